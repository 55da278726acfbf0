"""A memory footprint for people: categories, modules, dimensions, at the width of the terminal.

What adds up is printed so that it can be added up: elements times bytes of an element, at the peak and in full.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mprun.report.summary import bytes_text

if TYPE_CHECKING:
    from mprun.numerics.memory import Footprint
    from mprun.numerics.tensor_cores import Misfit

WIDE = 110  # columns from which on every category has a column of its own
MOST_LOOKED_FOR = 2**30  # examples, see largest_batch
STATE = ("masters", "optimizer", "ema")
MODULE_COLUMNS = ("parameters", "gradients", "masters", "optimizer", "ema", "activations")
MEANING = {
    "masters": "FP32 copies of half parameters",
    "buffers": "with a copy, to undo a skipped step",
    "data": "batches of a step, and what of the set lies here",
    "counters": "loss scale, rates, step counts",
    "weight copies": "half copies that autocast makes",
    "working tensors": "results in flight, gradients of activations",
    "kernel workspace": "copies inside kernels: FP32 of half, reordered",
}


def make_console() -> Console:
    """Stdout; where that is no terminal, at the width of ``COLUMNS``, or 100."""
    plain = not os.isatty(1) and "COLUMNS" not in os.environ
    return Console(highlight=False, width=100 if plain else None)


def print_categories(console: Console, found: Footprint, measured: Footprint | None) -> None:
    """The table of categories; the peak as its last line. ``measured`` beside it, if there is one."""
    from mprun.numerics.memory import CATEGORIES

    table = _table()
    table.add_column("category", no_wrap=True)
    for heading in ("in full", "at peak", *(("measured",) if measured else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    for kind in CATEGORIES:
        full = found.counted.highest[kind]
        if not full and kind not in ("masters", "ema"):
            continue
        row = [kind, _size(full), _size(found.counted.peak[kind])]
        if measured:
            row.append(_size(measured.counted.highest[kind]))
        table.add_row(*row, _how(found, kind), style="dim" if not full else None)
    last = ["peak", "", _size(found.peak_bytes)]
    if measured:
        last.append(_size(measured.peak_bytes))
    table.add_section()
    table.add_row(*last, f"{found.peak_bytes:,} bytes", style="bold")
    console.print(table)


def _how(found: Footprint, kind: str) -> str:
    elements = found.elements.get(kind)
    if kind in ("masters", "ema") and not found.counted.highest[kind]:
        return "none: the parameters are the FP32 truth" if kind == "masters" else "off (train.ema.decay)"
    if kind == "activations":
        return f"{_size(found.counted.highest[kind] / found.batch_size)} x batch of {found.batch_size}"
    if elements and kind != "buffers":
        note = f": {MEANING[kind]}" if kind in MEANING else ""
        if kind == "gradients" and found.elements.get("masters"):
            note = ", and half ones of a micro-batch on their way"
        return product_text(elements) + note
    return MEANING.get(kind, "")


def product_text(elements: Mapping[int, int]) -> str:
    """``25,503,912 x 2 + 53,120 x 4``: elements times bytes of an element."""
    return " + ".join(f"{count:,} x {size}" for size, count in sorted(elements.items()))


def formula_line(found: Footprint) -> str:
    """The whole of what depends on parameters alone, as a sum that can be checked by hand."""
    kinds = [kind for kind in ("parameters", "masters", "gradients", "optimizer", "ema") if kind in found.elements]
    sums = {kind: sum(size * count for size, count in found.elements[kind].items()) for kind in kinds}
    parts = " + ".join(f"{kind} {value:,}" for kind, value in sums.items())
    total = sum(sums.values())
    count = sum(found.elements["parameters"].values())
    return f"{parts} = {total:,} bytes, {total / count:.4g} a parameter ({count:,} parameters)"


def print_modules(console: Console, found: Footprint, *, top: int) -> None:
    """The modules that keep most for backward, blocks of the model as one line each."""
    grouped = group(found)
    wide = console.width >= WIDE
    columns = MODULE_COLUMNS if wide else ("parameters", "gradients", "state", "activations")
    table = _table()
    table.add_column("module", overflow="fold", min_width=12)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    ranked = sorted(grouped.items(), key=lambda item: -_kept(item[1]))
    for path, sizes in ranked[:top]:
        table.add_row(path, *(_size(_cell(sizes, kind)) for kind in columns))
    if rest := ranked[top:]:
        total: Counter[str] = sum((sizes for _, sizes in rest), Counter())
        table.add_row(f"{len(rest)} more", *(_size(_cell(total, kind)) for kind in columns), style="dim")
    console.print(table)
    singles = sorted(found.modules.items(), key=lambda item: -_kept(item[1]))[:5]
    largest = ", ".join(f"{path or 'the model itself'} {_size(_kept(sizes))}" for path, sizes in singles)
    console.print(Text(f"largest single modules: {largest}"))


def group(found: Footprint) -> dict[str, Counter[str]]:
    """Bytes by block: a path up to its first number (``layer1.0``, ``blocks.3``), or its first two components."""
    grouped: dict[str, Counter[str]] = {}
    for path, sizes in found.modules.items():
        parts = path.split(".")
        depth = next((number for number, part in enumerate(parts, start=1) if part.isdecimal()), 2)
        name = ".".join(parts[:depth]) or "(model)"
        grouped[name] = grouped.get(name, Counter()) + sizes
    return grouped


def _kept(sizes: Counter[str]) -> int:
    return sizes["activations"] + sizes["weight copies"]


def _cell(sizes: Counter[str], column: str) -> int:
    if column == "activations":
        return _kept(sizes)
    return sum(sizes[kind] for kind in STATE) if column == "state" else sizes[column]


def print_misfits(console: Console, found: Sequence[Misfit], *, top: int) -> None:
    """Dimensions that Tensor Cores dislike."""
    if not found:
        console.print(Text("Tensor Cores: every dimension of a 16-bit product is a multiple of 8"))
        return
    console.print(Text("Tensor Cores want multiples of 8; these dimensions are not:"))
    table = _table()
    for heading in ("module", "class", "dimension"):
        table.add_column(heading, overflow="fold")
    for heading in ("size", "next"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in found[:top]:
        table.add_row(item.module or "(model)", item.kind, item.dimension, f"{item.size:,}", f"{item.better:,}")
    if len(found) > top:
        table.add_row(f"{len(found) - top} more", style="dim")
    console.print(table)


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Label and text, one below the other."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold", min_width=13)
    table.add_column(overflow="fold")
    for label, text in facts:
        table.add_row(label, Text(text))
    console.print(table)


def facts(report: Mapping[str, Any], *, compiled: bool) -> list[tuple[str, str]]:
    """What is to be known beside the tables: largest batch, what was measured, what is not counted."""
    found: Footprint = report.get("predicted") or report["measured"]
    lines: list[tuple[str, str]] = []
    if "unpredicted" in report:
        lines.append(("predicted", f"nothing: {report['unpredicted']}"))
        if found.allocator_peak:
            lines.append(("allocator", f"measured {bytes_text(found.allocator_peak)}"))
    if "memory" in report:
        lines.append(("largest batch", _largest(report["memory"], report["largest"], found)))
    if (measured := report.get("measured")) and "predicted" in report:
        lines.append(("saved tensors", _beside(found.counted.saved_bytes, measured.counted.saved_bytes)))
        lines.append(("peak", _beside(found.peak_bytes, measured.peak_bytes)))
        if measured.allocator_peak:
            lines.append(("allocator", _beside(found.peak_bytes, measured.allocator_peak)))
    if past := report.get("run"):
        lines += _past_lines(past, found, report["process_bytes"])
    if not report["device_is_here"]:
        lines.append(("device", "no GPU here: counted with the CPU's kernels, under CUDA's operation list"))
    if compiled:
        lines.append(("compile", "model.compile=true may need less: counted uncompiled"))
    outside = (
        "the CUDA context, workspaces of cuDNN and cuBLAS, fragmentation"
        if report["device"] == "cuda"
        else "the interpreter and its libraries, what matrix products pack, fragmentation"
    )
    lines.append(("not counted", outside))
    return lines


def _largest(limit: int, best: Footprint | None, found: Footprint) -> str:
    if best is None:
        fixed = bytes_text(found.fixed_bytes)
        return f"none: a batch of 1 does not fit in {bytes_text(limit)} (what does not depend on the batch is {fixed})"
    size = best.batch_size
    if size >= MOST_LOOKED_FOR:
        return f"{size} and more in {bytes_text(limit)}: its peak is {bytes_text(best.peak_bytes)}; no more were tried"
    return f"{size} in {bytes_text(limit)}: its peak is {bytes_text(best.peak_bytes)}, and {size + 1} would be too much"


def _beside(predicted: int, measured: int) -> str:
    text = f"predicted {bytes_text(predicted)}, measured {bytes_text(measured)}"
    return f"{text} ({predicted / measured - 1:+.1%})" if measured else text


def _past_lines(past: Mapping[str, Any], found: Footprint, process: int) -> list[tuple[str, str]]:
    peak = past["peak_memory_bytes"]
    if not peak:
        return [("measured", f"nothing: the run ended as {past['status']} and noted no peak")]
    if past["device"] == "cuda":
        return [("run", f"{_beside(found.peak_bytes, peak)}: the allocator's peak on {past['device_name']}")]
    # A CPU run notes what its whole process held; this process has loaded the same libraries and no tensors.
    text = f"process {bytes_text(process)} + tensors {bytes_text(found.peak_bytes)}"
    return [("run", f"{text}: {_beside(process + found.peak_bytes, peak)}, resident memory of the whole process")]


def as_dict(found: Footprint) -> dict[str, Any]:
    """A footprint for JSON: plain containers, bytes everywhere."""
    counted = found.counted
    return {
        "batch_size": found.batch_size,
        "accumulate": found.accumulate,
        "peak_bytes": found.peak_bytes,
        "saved_bytes": counted.saved_bytes,
        "fixed_bytes": found.fixed_bytes,
        "allocator_peak_bytes": found.allocator_peak,
        "peak_by_category": {kind: size for kind, size in counted.peak.items() if size},
        "full_by_category": {kind: size for kind, size in counted.highest.items() if size},
        "elements": {kind: dict(sizes) for kind, sizes in found.elements.items()},
        "modules": {path: {"class": found.classes.get(path), **sizes} for path, sizes in found.modules.items()},
        "misfits": [
            {"module": m.module, "class": m.kind, "dimension": m.dimension, "size": m.size, "next": m.better}
            for m in found.misfits
        ],
    }


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))


def _size(value: float) -> str:
    return bytes_text(value) if value else "0"
