"""The end of a run for people: what was reached, what it cost, where to look.

Paths and commands are printed so that they can be copied: never truncated, and never broken by a line end of ours. A
line that is too long for the terminal is left to the terminal, which copies it back as one.

The small functions at the end turn numbers into short text, here and in the progress bar.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

STATUS_STYLE = {"ok": "green", "interrupted": "yellow"}
LABEL_WIDTH = 13
FAMILIES = "val ema train"  # in this order


def print_summary(result: Mapping[str, Any], run_dir: Path, *, console: Console | None = None) -> None:
    """Print the closing table of a run to stdout.

    Args:
        result: the content of ``result.json``.
        run_dir: the run folder; shown relative to the current folder where it lies below it.
        console: where to print; stdout by default, plain when that is no terminal.
    """
    console = console or Console(highlight=False)
    status = str(result.get("status", "unknown"))
    style = STATUS_STYLE.get(status, "red")
    console.print()
    console.rule(Text(f"run {status}", style=f"bold {style}"), align="left", style=style)
    if result.get("error"):
        # soft_wrap: an error may hold a path or a command, too.
        console.print(Text(str(result["error"]), style=style), soft_wrap=True)
    if metrics := _metrics_table(result):
        console.print(metrics)
        console.print()
    facts = [(label, text) for label, text in _facts(result) if text]
    for label, text in facts:
        _line(console, label, text)
    if facts:
        console.print()
    for label, text in where_to_look(run_dir, result.get("wandb")):
        _line(console, label, text)


def where_to_look(run_dir: Path, wandb: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """Labels with the folder and the commands, ready for a shell, that show a run.

    Args:
        run_dir: the run folder.
        wandb: the ``wandb`` entry of ``result.json``, if any.
    """
    shown = shown_path(run_dir)
    lines = [("run folder", shlex.quote(str(shown)))]
    page = run_dir / "report.html"
    lines.append(
        ("report", shlex.quote(str(shown / page.name)) if page.exists() else f"mprun report {shlex.quote(str(shown))}")
    )
    folder = run_dir / "wandb"
    if not any(folder.glob("*run-*")):
        return lines
    lines.append(("curves", f"wandb leet {shlex.quote(str(shown / 'wandb'))}"))
    if wandb and wandb.get("url"):
        lines.append(("online", str(wandb["url"])))
    elif offline := newest_offline(run_dir):
        # Only the newest: it holds the whole run, also after a resume.
        lines.append(("upload", f"wandb sync {shlex.quote(str(shown / 'wandb' / offline.name))}"))
    return lines


def newest_offline(run_dir: Path) -> Path | None:
    """The folder of the newest offline W&B files of a run. Their names begin with the time, to the second."""
    found = [path for path in (run_dir / "wandb").glob("offline-run-*") if path.is_dir()]
    return max(found, key=lambda path: (path.name.split("-")[2:3], path.stat().st_mtime), default=None)


def _metrics_table(result: Mapping[str, Any]) -> Table | None:
    final: Mapping[str, Any] = result.get("final") or {}
    best: Mapping[str, Any] = result.get("best") or {}
    names = [name for name in final if name.endswith(("/loss", "/top1"))]
    if best and best.get("metric") not in names:
        names.append(best["metric"])
    if not names:
        return None
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("metric", no_wrap=True, min_width=LABEL_WIDTH)
    for heading in ("final", "best", "at step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in sorted(names, key=lambda name: (FAMILIES.find(name.split("/")[0]), name)):
        row = [name, number_text(final[name]) if name in final else ""]
        if name == best.get("metric"):
            row += [number_text(best["value"]), count_text(best["step"])]
        table.add_row(*row)
    return table


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    applied, skipped = result.get("steps_applied"), result.get("steps_skipped") or 0
    steps = ""
    if applied is not None:
        share = f" ({skipped / (applied + skipped):.1%} of attempts)" if skipped else ""
        steps = f"{count_text(applied)} applied, {count_text(skipped)} skipped{share}"
    scale, speed = result.get("loss_scale"), result.get("examples_per_s")
    wall, train = result.get("wall_s"), result.get("train_s")
    time = duration_text(wall) if wall is not None else ""
    if time and train is not None:
        time += f" (training {duration_text(train)})"
    memory = result.get("peak_memory")
    return [
        ("steps", steps),
        ("loss scale", scale_text(scale) if isinstance(scale, int | float) else ""),
        ("speed", f"{count_text(speed)} examples/s" if speed else ""),
        ("time", time),
        ("peak memory", bytes_text(memory) if isinstance(memory, int | float) else ""),
    ]


def _line(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<{LABEL_WIDTH}}  ", "bold"), text), soft_wrap=True)


def shown_path(path: Path) -> Path:
    """``path`` relative to the current folder if it lies below it, otherwise absolute."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def number_text(value: float) -> str:
    """Four significant digits: ``0.9711``, ``12.35``, ``1.2e-05``, ``nan``."""
    if not math.isfinite(value):
        return str(float(value))
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def count_text(value: float) -> str:
    """A count with separators; a fraction of a count only where it says something: ``1,120``, ``3.4``."""
    return f"{value:.1f}" if isinstance(value, float) and value < 10 else f"{round(value):,}"


def counted(value: int, noun: str) -> str:
    """``1 step``, ``1,120 steps``."""
    return f"{value:,} {noun}{'s' * (value != 1)}"


def scale_text(value: float) -> str:
    """A loss scale as a power of two where it is one: ``2^16``, ``1000``."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and abs(exponent - 1) > 3 else f"{value:g}"


def duration_text(seconds: float) -> str:
    """``4.2 s``, ``3:07``, ``1:02:33``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bytes_text(value: float) -> str:
    """``620 MiB``, ``1.4 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
