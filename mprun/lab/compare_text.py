"""A comparison in a terminal. Imports no torch.

The table never wraps: columns that say least go first, and which ones is said (Markdown has them all).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from mprun.lab.comparison import Comparison, PolicyResult
from mprun.lab.words import points
from mprun.numerics.parity import FAIL, PASS, UNDECIDED, higher_is_better
from mprun.report.run_folders import OK
from mprun.report.runs_table import Spread
from mprun.report.summary import bytes_text, count_text, number_text, scale_text, shown_path

STYLES = {PASS: "green", FAIL: "bold red", UNDECIDED: "bold yellow", "baseline": "dim"}
# Columns by heading, from the first to go to the last; what is not here always stays.
EXPENDABLE = (
    "train/loss",
    "ema/loss",
    "examples/s",
    "ema/top1",
    "curve gap",
    "val/loss",
    "scale",
    "gradients",
    "memory",
    "step",
)
GAP = "  "


@dataclass(frozen=True)
class Column:
    """A heading and a cell for each policy."""

    heading: str
    cells: tuple[str, ...]

    @property
    def width(self) -> int:
        """Cells of a terminal."""
        return max(map(cell_len, (self.heading, *self.cells)))


def columns(found: Comparison) -> list[Column]:
    """All columns of the table; those that would be empty are left out."""
    base = next(policy for policy in found.policies if policy.label == found.baseline)

    def column(heading: str, cell: Any) -> Column:
        return Column(heading, tuple(cell(policy) for policy in found.policies))

    named = list(dict.fromkeys(name for policy in found.policies for name in policy.metrics))
    all_columns = [
        column("policy", lambda p: p.label),
        column("verdict", lambda p: p.verdict),
        column(found.metric, lambda p: spread_text(p.metrics.get(found.metric), found.metric)),
        column(
            "gap",
            lambda p: "" if p.parity is None else points(-_better(found) * p.parity.deficit, found.metric, sign=True),
        ),
        *(
            column(name, lambda p, name=name: spread_text(p.metrics.get(name), name))
            for name in named
            if name != found.metric
        ),
        column("curve gap", curve_text),
        column("gradients", lambda p: decibels(p.gradient_db)),
        column("skips", lambda p: f"{p.skips:,}" if p.steps or p.skips else ""),
        column("scale", lambda p: "" if p.scale is None else scale_text(p.scale)),
        column("step", lambda p: _ratio(p.step_ms, p.step_ratio, p is base)),
        column("examples/s", lambda p: count_text(p.examples_per_s) if math.isfinite(p.examples_per_s) else ""),
        column("memory", lambda p: _memory(p, base)),
        column("ended", _ended),
    ]
    return [one for one in all_columns if any(one.cells) and not (one.heading == "ended" and not any(one.cells))]


def seeds_text(found: Comparison) -> str:
    """``3 seeds``."""
    return f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)}"


def _better(found: Comparison) -> int:
    return 1 if higher_is_better(found.metric) else -1


def spread_text(value: Spread | None, metric: str) -> str:
    """``96.10 ± 0.32``: top-1 in points, a loss as it is."""
    if value is None or value.n == 0:
        return "-" if value is not None else ""
    if higher_is_better(metric):
        return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.n > 1 else "")
    return number_text(value.mean) + (f" ± {value.std:.2g}" if value.n > 1 else "")


def curve_text(policy: PolicyResult) -> str:
    """The gap of the training loss in standard deviations of the baseline's seeds; in percent where there is one seed."""
    gap = policy.curve
    if gap is None:
        return ""
    return f"{gap.ratio:.2g} sd" if math.isfinite(gap.ratio) else f"{100 * gap.last_frac:+.1f} %"


def decibels(value: float) -> str:
    """An SQNR: ``31 dB``; ``exact`` where nothing differs, ``not finite`` where gradients are not."""
    if math.isnan(value):
        return ""
    return "exact" if value == math.inf else "not finite" if value == -math.inf else f"{value:.0f} dB"


def _ratio(milliseconds: float, ratio: float, base: bool) -> str:
    if not math.isfinite(milliseconds):
        return ""
    text = f"{milliseconds:.3g} ms"
    return text if base or not math.isfinite(ratio) else f"{text} x{ratio:.2f}"


def _memory(policy: PolicyResult, base: PolicyResult) -> str:
    """The predicted peak of a step, and the ratio to the baseline's."""
    peak, other = ((p.memory or {}).get("peak_bytes") for p in (policy, base))
    if not peak:
        return ""
    return bytes_text(peak) if policy is base or not other else f"{bytes_text(peak)} x{peak / other:.2f}"


def _ended(policy: PolicyResult) -> str:
    """How the runs ended, unless all ended well."""
    words = [run.status for run in policy.runs]
    good = words.count(OK)
    rest = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words) if word != OK)
    return "" if good == len(words) else (f"{good} ok, " if good else "") + rest


def terminal(found: Comparison, width: int) -> list[Text]:
    """The table and what it says, as lines of at most ``width`` cells (notes are wrapped)."""
    every = columns(found)
    hidden = _hidden(every, width)
    shown = [one for one in every if one.heading not in hidden]
    lines = [_line([one.heading for one in shown], shown, "bold", None)]
    for index, policy in enumerate(found.policies):
        lines.append(_line([one.cells[index] for one in shown], shown, "", STYLES.get(policy.verdict)))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    lines.append(Text(""))
    labels = max(cell_len(policy.label) for policy in found.policies)
    for policy in found.policies:
        if policy.why:
            head = f"{policy.label:<{labels}}{GAP}"
            lines += _hanging(head, policy.why, width, STYLES.get(policy.verdict, "") if policy.verdict != PASS else "")
    for policy in found.candidates:
        if policy.worst_modules and math.isfinite(policy.gradient_db):
            lines += _hanging(f"{policy.label:<{labels}}{GAP}", worst_text(policy), width, "dim")
    for note in found.notes:
        lines += _hanging("note  ", note, width, "yellow")
    if hidden:
        lines += _hanging(
            "", f"hidden to fit {width} columns: {', '.join(hidden)}; all are in compare.md", width, "dim"
        )
    return lines


def _hidden(every: Sequence[Column], width: int) -> list[str]:
    """Headings of the columns to leave out so that a line has at most ``width`` cells, as long as there are any to spare."""
    spare = [heading for heading in EXPENDABLE if any(one.heading == heading for one in every)]
    sizes = {one.heading: one.width + len(GAP) for one in every}
    hidden: list[str] = []
    for heading in spare:
        if sum(size for name, size in sizes.items() if name not in hidden) - len(GAP) > width:
            hidden.append(heading)
    for heading in hidden[::-1]:  # a narrow one may fit in again beside what has gone after it
        rest = [name for name in hidden if name != heading]
        if sum(size for name, size in sizes.items() if name not in rest) - len(GAP) <= width:
            hidden = rest
    return hidden


def worst_text(policy: PolicyResult) -> str:
    """``gradients worst in blocks.0.norm2: 25 dB (step 0), ...``."""
    worst = ", ".join(
        f"{path or '(the model itself)'}: {decibels(value)} (step {step})" for path, value, step in policy.worst_modules
    )
    return f"gradients worst in {worst}"


def _line(cells: Sequence[str], shown: Sequence[Column], style: str, verdict: str | None) -> Text:
    text = Text(style=style, no_wrap=True, end="")
    for number, (cell, column) in enumerate(zip(cells, shown, strict=True)):
        pad = " " * (column.width - cell_len(cell))
        left = column.heading in ("policy", "verdict", "ended")
        text.append(GAP if number else "")
        text.append(cell + pad if left else pad + cell, style=verdict or "" if column.heading == "verdict" else "")
    text.rstrip()
    return text


def _hanging(head: str, text: str, width: int, style: str) -> list[Text]:
    import textwrap

    body = textwrap.wrap(text, max(width - cell_len(head), 24), break_long_words=False, break_on_hyphens=False) or [""]
    return [Text((head if not index else " " * cell_len(head)) + part, style=style) for index, part in enumerate(body)]


def last_lines(found: Comparison) -> list[str]:
    """How it ended, and where to look."""
    verdicts = [policy.verdict for policy in found.candidates]
    parts = [f"{verdicts.count(word)} {name}" for word, name in ((PASS, "passed"), (FAIL, "failed"), (UNDECIDED, "UNDECIDED"))
             if word in verdicts]  # fmt: skip
    folder = shlex.quote(str(shown_path(found.folder)))
    said = [f"parity with {found.baseline} in {found.metric} over {seeds_text(found)}: {', '.join(parts)}"]
    if UNDECIDED in verdicts:
        said.append("undecided is no pass: the seeds are too few to tell; compare.strict=true makes it exit status 1")
    return [*said, f"comparison     {folder}/compare.html (also .md, .json)", f"runs           mprun table {folder}"]
