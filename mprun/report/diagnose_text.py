"""A diagnosis for people: the worst modules, the scales as a chart, the recommendation and how it was tried. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mprun.numerics.formats import power

WIDE = 120
BAR = 24
SHOWN = 12
STYLES = {3: "bold red", 2: "red", 1: "yellow", 0: ""}
NAMES = {"float16": "FP16", "bfloat16": "BF16"}


def print_diagnosis(console: Console, result: Mapping[str, Any]) -> None:
    """Everything between the progress lines and the closing command."""
    if result.get("float16") or result.get("bfloat16"):
        _modules(console, result.get("modules") or [])
    fp16 = result.get("float16") or {}
    if fp16.get("interval"):
        console.print()
        _scales(console, fp16, result.get("recommended") or {})
    if fp16:
        console.print()
    _trials(console, result)


def diagnosis_text(result: Mapping[str, Any], width: int = WIDE) -> str:
    """The same as plain text of ``width`` columns; empty where ``result`` is not one of diagnose."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    try:
        print_diagnosis(console, result)
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""
    written = console.file
    assert isinstance(written, StringIO)
    return "\n".join(line.rstrip() for line in written.getvalue().strip("\n").splitlines())


def _modules(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of modules, worst first; those that need nothing are counted."""
    told = [row for row in rows if row["level"]]
    quiet = [row for row in rows if not row["level"]]
    shown = told[:SHOWN] or quiet[:5]
    wide = console.width >= WIDE
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("module", overflow="fold", max_width=36 if wide else 22)
    if wide:
        table.add_column("class", no_wrap=True)
        for heading in ("input", "output", "gradient"):
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("FP16", justify="right", no_wrap=True)
    table.add_column("BF16", justify="right", no_wrap=True)
    table.add_column("says", overflow="fold")
    for row in shown:
        cells = [row["module"] or "(the model)"]
        if wide:
            cells += [row["class"], *(_number(row[key]) for key in ("input_amax", "output_amax", "gradient_amax"))]
        cells += [_worst(row, "fp16"), _worst(row, "bf16"), row["says"] or "nothing needed"]
        table.add_row(*map(Text, cells), style=STYLES[row["level"]])
    if shown:
        console.print(table)
    more = len(told) - len(shown) if told else 0
    notes = ["FP16, BF16: signal to error of output or gradient, the worse one (one rounding: 71 and 53 dB)"]
    if more > 0:
        notes.append(f"{more} more in result.json")
    if told and quiet:
        notes.append(f"{len(quiet)} modules need nothing")
    if not told:
        notes.append(f"none of {len(quiet)} modules needs anything" if quiet else "no module would be half")
    for note in notes:
        console.print(Text(note, style="dim"))


def _worst(row: Mapping[str, Any], name: str) -> str:
    values = [row[f"{name}_{part}_db"] for part in ("forward", "grad") if row[f"{name}_{part}_db"] is not None]
    if not values:
        return "-"
    value = min(values)
    return "exact" if value == math.inf else "lost" if value < -99 else f"{value:.0f} dB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _scales(console: Console, fp16: Mapping[str, Any], recommended: Mapping[str, Any]) -> None:
    """Scale by scale: how much becomes 0 on the left side, where it overflows on the right."""
    low, high = fp16["interval"]["low"], fp16["interval"]["high"]
    scale = recommended.get("loss_scale") or {}
    console.print(Text("loss scale in FP16", style="bold") + Text("   gradients that become 0", style="dim"))
    rows = fp16["scales"]
    first = next((i for i, row in enumerate(rows) if row["underflow_frac"] < 0.5), 0)
    last = next((i for i, row in enumerate(rows) if row["overflow_frac"] >= 1), len(rows) - 1)
    marked = {low, high, scale.get("static"), scale.get("init")}
    for index in range(max(first - 1, 0), last + 1):
        row = rows[index]
        if row["scale"] not in marked and (last - first > 12 and (index - first) % 2):
            continue
        console.print(_scale_line(row, low, high, scale), soft_wrap=False)


def _scale_line(row: Mapping[str, Any], low: float, high: float, scale: Mapping[str, float]) -> Text:
    value, under = row["scale"], row["underflow_frac"]
    filled = round(under * BAR)
    line = Text(f"  2^{round(math.log2(value)):<4}")
    line.append("█" * filled, style="yellow")
    line.append("·" * (BAR - filled), style="dim")
    line.append(f" {100 * under:5.1f} %  " if under >= 5e-4 else "         ")
    if row["overflow_frac"]:
        line.append(f"overflows at {100 * row['overflow_frac']:.0f} % of steps", style="red")
        line.append(f", first {row['overflowing'] or 'the model'}", style="dim")
    elif low <= value <= high:
        line.append("safe", style="green")
    else:
        line.append("too small", style="yellow")
    notes = [name for name, key in (("static", "static"), ("dynamic starts", "init")) if scale.get(key) == value]
    if notes:
        line.append(f"  <- {', '.join(notes)}", style="bold")
    return line


def _trials(console: Console, result: Mapping[str, Any]) -> None:
    """What was recommended and why, and every verification run."""
    recommended, reason = result.get("recommended"), result.get("reason")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    head = Text()
    if recommended:
        head.append(NAMES[recommended["dtype"]], style="bold green")
        if scale := recommended.get("loss_scale"):
            head.append(f", dynamic scale from {power(scale['init'])} (static: {power(scale['static'])}; ")
            head.append(f"safe {power(scale['low'])} to {power(scale['high'])})")
        if modules := recommended["fp32_modules"]:
            head.append(f"; in FP32: {', '.join(modules)}")
    elif result.get("status") == "interrupted":
        head.append("nothing yet: it was stopped", style="bold yellow")
    elif (result.get("fp32") or {}).get("status", "ok") != "ok":
        head.append("nothing: see first to the FP32 run", style="bold red")
    else:
        head.append("FP32", style="bold red")
    grid.add_row("recommended", head)
    if reason:
        grid.add_row("because", Text(str(reason)))
    if result.get("data"):
        grid.add_row("data", Text(str(result["data"]), style="yellow"))
    for dtype, name in NAMES.items():
        for trial in (result.get(dtype) or {}).get("trials", ()):
            scale = "" if trial["kind"] == "none" else f" {trial['kind']} {power(trial['init'])}"
            line = Text(f"{name}{scale}: {trial['steps']} steps, {trial['skips']} skipped, ")
            if isinstance(trial["loss_gap"], float) and math.isfinite(trial["loss_gap"]):
                line.append(f"loss {trial['loss_gap']:+.2g} against FP32 (allowed {trial['allowed_gap']:.2g})")
            line.append("  ok" if trial["ok"] else "  fails", style="green" if trial["ok"] else "red")
            grid.add_row("tried", line)
    console.print(grid)
