"""The run as people see it: one line that moves, and above it what will matter later.

On a terminal a bar shows how far the run is, with as many numbers as the width allows, the important ones first.
Evaluations, warnings and the first skips of a search for the loss scale stay above it. Without a terminal (a log file,
a scheduler, CI) there is no bar: a line at the start, one per evaluation, warnings, and a line at the end.

Everything goes to stderr, so that stdout holds only the closing table and can be piped.
"""

from __future__ import annotations

import shlex
import sys
import time
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from mprun.report.summary import count_text, counted, duration_text, number_text, scale_text, shown_path
from mprun.tracking.base import Record, RunInfo, Sink

REFRESH_PER_S = 4
BAR_MIN, BAR_MAX = 6, 40
SKIPS_PER_BURST = 3
SKIP_LINES = 12

# Which fields to give up first when the line is too long, from the least to the most important.
EXPENDABLE = ("grad", "lr", "epoch", "val", "bar", "eta", "rate", "skipped", "top1", "scale", "loss")


class Line:
    """The moving line: the newest value of each field, laid out for whatever width the terminal has now."""

    def __init__(self, total: int, step: int) -> None:
        self.total = total
        self.step = self.first = step
        self.values: Record = {}
        self.begin = time.monotonic()

    def fields(self) -> dict[str, str]:
        """The fields with a value, in the order they are shown."""
        get = self.values.get
        found: dict[str, str] = {"step": f"{self.step}/{self.total}" if self.total else f"step {self.step}"}
        for key, label, name in (
            ("epoch", "epoch", "epoch"),
            ("loss", "loss", "train/loss"),
            ("top1", "top1", "train/top1"),
            ("val", "val", "val/top1" if "val/top1" in self.values else "val/loss"),
            ("grad", "grad", "train/grad_norm"),
            ("lr", "lr", "train/lr"),
        ):
            if isinstance(value := get(name), int | float):
                found[key] = f"{label} {value if key == 'epoch' else number_text(value)}"
        # Without a loss scale (it is then 1, always) there is nothing to say about it.
        scale, skipped = get("precision/loss_scale"), get("precision/skipped_steps") or 0
        if isinstance(scale, int | float) and (scale != 1 or skipped):
            found["scale"] = f"scale {scale_text(scale)}"
        if skipped:
            found["skipped"] = f"skip {skipped}"
        if speed := get("perf/examples_per_s"):
            found["rate"] = f"{count_text(speed)} ex/s"
        if (eta := self.eta_s()) is not None:
            found["eta"] = f"eta {duration_text(eta) if eta >= 60 else f'{eta:.0f} s'}"
        return found

    def eta_s(self) -> float | None:
        """Seconds to go at the pace since the start, evaluations included; null before the first step."""
        done = self.step - self.first
        if done <= 0 or self.step >= self.total:
            return None
        return (time.monotonic() - self.begin) / done * (self.total - self.step)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line that is never longer than the terminal is wide: a longer one would leave its pieces behind."""
        width = max(options.max_width - 1, 1)
        fields = self.fields() | ({"bar": " " * BAR_MIN} if self.total else {})
        separator = "  " if width >= 100 else " "
        for name in EXPENDABLE:
            if cell_len(separator.join(fields.values())) <= width:
                break
            fields.pop(name, None)
        line = Text(no_wrap=True, overflow="crop", end="")
        if fields.pop("bar", None):
            room = width - cell_len(separator.join(fields.values())) - 1
            bar = min(BAR_MAX, room)
            done = round(bar * min(self.step / self.total, 1.0))
            # Two shapes, not only two colours: NO_COLOR must still show where the run is.
            full, empty = "#-" if options.ascii_only else "━─"
            line.append(full * done, "bar.complete")
            line.append(empty * (bar - done) + " ", "bar.back")
        line.append(separator.join(fields.values()))
        line.truncate(width)
        yield line


class ConsoleSink(Sink):
    """Shows a run on stderr."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.line = Line(0, 0)
        self._live: Live | None = None
        self._burst = 0
        self._hidden: Record | None = None
        self._skip_lines = 0
        self._closed = False

    @property
    def moving(self) -> bool:
        """Whether there is a terminal that can redraw a line."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def start(self, info: RunInfo) -> None:
        """Say what runs and where it writes; start the bar."""
        self.line = Line(info.total_steps, info.resumed_from_step or 0)
        steps = f"{count_text(info.total_steps)} steps" if info.total_steps else "unknown number of steps"
        resumed = f", resumed from step {info.resumed_from_step}" if info.resumed_from_step is not None else ""
        folder = shlex.quote(str(shown_path(info.run_dir)))
        if not self.moving:
            self.say(f"{info.name}: {steps}{resumed}, in {folder}")
            return
        self.say(f"{info.name}: {steps}{resumed}")
        self.say(folder, style="dim")
        self._live = Live(
            self.line,
            console=self.console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # stdout into a file must go on reaching the file
        )
        self._live.start()
        # rich hides the cursor, and a killed process would leave it hidden.
        self.console.show_cursor(True)

    def progress(self, step: int, attempt: int) -> None:
        """Move the bar."""
        self.line.step = step

    def log(self, record: Record) -> None:
        """Take the numbers into the line; print what should stay."""
        if record.get("kind") == "probe":
            return
        self.line.step = record.get("step", self.line.step)
        self.line.values.update({key: value for key, value in record.items() if "/" in key})
        if "epoch" in record:
            self.line.values["epoch"] = record["epoch"]
        kind = record.get("kind")
        if kind == "skip":
            self._skip(record)
            return
        self._end_burst()
        if kind == "val":
            self.say(self._evaluation(record))
        elif kind == "event" and record.get("event") != "resume":
            # A search for the loss scale is how a run begins, not a reason to worry.
            style = "dim" if record.get("verdict") == "scale_search" else "yellow"
            self.say(f"{record.get('event', 'event')}: {record.get('message', '')}", style=style)

    def finish(self, result: dict[str, Any]) -> None:
        """Take the bar away; without a terminal, say how it ended."""
        self._end_burst()
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if self.moving:
            return
        skipped = result.get("steps_skipped") or 0
        text = f"{result.get('status', 'finished')}: {counted(result.get('steps_applied') or 0, 'step')} applied"
        text += f", {count_text(skipped)} skipped" if skipped else ""
        if (wall := result.get("wall_s")) is not None:
            text += f", {duration_text(wall)}"
        self.say(text)

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bar, from any thread; a long one is wrapped by the terminal, so that it can be copied."""
        if self._closed:
            return
        try:
            self.console.print(Text(text, style=style), soft_wrap=True)
        except (OSError, SystemExit):
            # The reader of the terminal has gone (`2>&1 | head`), upon which rich exits the process. Training goes on.
            self._closed = True

    def _evaluation(self, record: Record) -> str:
        families: dict[str, list[str]] = {}
        for key, value in record.items():
            family, _, name = key.partition("/")
            if name in ("loss", "top1") and isinstance(value, int | float):
                families.setdefault(family, []).append(f"{name} {number_text(value)}")
        total = f"/{self.line.total}" if self.line.total else ""
        parts = [f"step {record.get('step', '?')}{total}", *(f"{key} {' '.join(v)}" for key, v in families.items())]
        if not self.moving and (skipped := self.line.values.get("precision/skipped_steps")):
            parts.append(f"skipped {skipped}")
        return "  ".join(parts)

    def _skip(self, record: Record) -> None:
        """Print the first skips of a burst. A search for the loss scale is one burst of maybe twenty."""
        reason, attempt = str(record.get("reason", "overflow")), record.get("attempt", "?")
        scale = scale_text(record.get("precision/loss_scale") or 1.0)
        if reason == "overflow" and not self.moving:
            return
        self._burst += 1
        if self._burst > SKIPS_PER_BURST or self._skip_lines >= SKIP_LINES:
            self._hidden = record
            return
        self._skip_lines += 1
        last = "; further ones are only counted" if self._skip_lines == SKIP_LINES else ""
        self.say(
            f"step {record.get('step', '?')}: {reason.replace('_', ' ')} at loss scale {scale}, nothing moved "
            f"(attempt {attempt}){last}",
            style="dim" if reason == "overflow" else "yellow",
        )

    def _end_burst(self) -> None:
        hidden, more = self._hidden, self._burst - SKIPS_PER_BURST
        self._burst, self._hidden = 0, None
        if hidden is not None and more > 0 and self._skip_lines < SKIP_LINES:
            scale = scale_text(hidden.get("precision/loss_scale") or 1.0)
            self.say(f"  and {more} more skipped steps, the last at loss scale {scale}", style="dim")
