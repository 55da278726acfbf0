"""The part of a run's page that the probe fills: heatmaps of underflow and amax, exponents, what other formats would lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mprun.numerics.formats import FORMATS, Format
from mprun.report import html_figures as draw
from mprun.report import html_maps as maps
from mprun.report.html_page import Plot, note, table
from mprun.report.page_data import RunFiles
from mprun.report.probe_view import (
    ACTIVATION,
    FLOW,
    GRADIENT,
    Grid,
    View,
    fewer_columns,
    grid,
    histogram,
    relative_peak,
    short,
    underflow,
    worst_first,
)
from mprun.report.summary import counted, scale_text

# Rows and columns of a heatmap: what a person can look through, and what keeps the page small.
MODULES_MOST, SAMPLES_MOST = 40, 150


def numbers(run: RunFiles) -> list[str | Plot]:
    """Heatmaps of underflow and amax, the exponent histogram, and what other formats would lose."""
    view = run.view
    if view is None:
        every = run.config.get("probe.every")
        why = "the probe was off (probe.every=0)" if every == 0 else "the run has no samples of the probe (probe.jsonl)"
        return [note(f"No heatmaps: {why}.")]
    form = short(view.main)
    asked = (
        f"what {form} would do without a loss scale; the run itself is FP32"
        if view.what_if
        else f"in {form}, gradients at the loss scale of the sample"
    )
    spared = sum(view.spared(path) for path in run.probe[-1]["modules"])
    left = f" Left out: {counted(spared, 'module')} in FP32, with nothing to lose." if spared else ""
    samples = counted(len(run.probe), "sample")
    parts: list[str | Plot] = [note(f"{samples} of the probe, {asked}. Worst modules first.{left}")]
    plots: list[Plot] = []
    for tensor, flow, noun in ((GRADIENT, FLOW, "Activation gradients"), (ACTIVATION, ACTIVATION, "Activations")):
        name = tensor.replace("_", "-")
        lost = grid(run.probe, view, flow, underflow)
        if not lost.modules:
            parts.append(note(f"{noun}: the probe has none (a compiled model calls no hooks)."))
            continue
        if (worst := lost.worst()) is None or worst[2] < maps.FLOOR:
            less = (
                "in no module and sample does more than 0.001% become 0"
                if worst
                else "no sample has a finite number but 0"
            )
            parts.append(note(f"{noun}: {less}."))
        else:
            plots.append(_heatmap(f"underflow-{name}", f"{noun}: part that becomes 0", lost, maps.underflow_map))
        peaks = grid(run.probe, view, tensor, relative_peak)
        plots.append(
            _heatmap(
                f"amax-{name}",
                f"{noun}: largest magnitude against the limit of {form}",
                peaks,
                lambda found: maps.peak_map(found, view.main),
                cross=True,
            )
        )
    return [*parts, *plots, *_last(run, view)]


def _heatmap(key: str, title: str, found: Grid, figure: Callable[[Grid], draw.Figure], *, cross: bool = False) -> Plot:
    shown = fewer_columns(worst_first(found, MODULES_MOST), SAMPLES_MOST)
    notes = ["× beyond the limit, inf or NaN"] if cross else []
    if len(found.modules) > MODULES_MOST:
        notes.append(f"the worst {MODULES_MOST} of {len(found.modules)} modules")
    if len(found.attempts) > SAMPLES_MOST:
        notes.append(f"{len(found.attempts)} samples in {SAMPLES_MOST} columns, the largest of each counts")
    return Plot(key, title, figure(shown), "; ".join(notes))


def _last(run: RunFiles, view: View) -> list[str | Plot]:
    """The histogram of the last sample, and the formats that it could have run in."""
    sample = run.probe[-1]
    wanted: dict[str, Callable[[str], bool]] = {
        "activations": lambda name: name == ACTIVATION,
        "activation gradients": lambda name: name == FLOW,
        "parameters": lambda name: name not in (ACTIVATION, "input") and not name.endswith(("_grad", "_update")),
        "updates": lambda name: name.endswith("_update"),
    }
    found = {label: pair for label, of in wanted.items() if (pair := histogram(sample, of))[0]}
    if not found:
        return []
    own = view.scale(sample, GRADIENT)
    at = f"attempt {sample.get('attempt')}, the last sample"
    parts: list[str | Plot] = [
        Plot("exponents", f"Exponents of all numbers, {at}", draw.exponents(found, view.main, own), wide=True)
    ]
    lost = sum(
        any(tensors.get(name, {}).get("nonfinite") for name in (ACTIVATION, FLOW))
        for tensors in sample["modules"].values()
    )
    without = f"; inf and NaN, of which {counted(lost, 'module')} had some, count for nothing" if lost else ""
    rows = what_if(run, sample, own)
    columns = (
        "format",
        "S",
        "gradients that become 0",
        "worst module",
        "modules with an activation beyond the limit",
        "worst activation",
    )
    return [
        *parts,
        note(f"The same numbers in other formats, as if everything ran in them ({at}{without}):"),
        table(columns, rows),
    ]


def what_if(run: RunFiles, sample: Mapping[str, Any], scale: float) -> list[list[Any]]:
    """For each format and some loss scales, what the sample would lose if every module ran in it."""
    rows = []
    for name, form in FORMATS.items():
        if form.bytes > 2:
            continue
        for s in dict.fromkeys((1.0, scale)) if name != "bfloat16" else (1.0,):
            view = View(form, False, {})
            asked = [{**sample, "loss_scale": s}]
            lost, peaks = grid(asked, view, FLOW, underflow), grid(asked, view, ACTIVATION, relative_peak)
            worst, highest = lost.worst(), peaks.worst()
            # What is inf or NaN already says nothing of another format.
            over = int((np.isfinite(peaks.values) & (peaks.values >= np.log2(form.overflow / form.max))).sum())
            rows.append(
                [
                    short(form), scale_text(s), _part(sample, form, s),
                    f"{worst[0] or '(model)'}: {worst[2]:.2%}" if worst and worst[2] else "none",
                    over, f"{highest[0] or '(model)'}: {form.max * 2.0 ** highest[2]:.3g} of {form.max:.4g}" if highest else "",
                ]
            )  # fmt: skip
    return rows


def _part(sample: Mapping[str, Any], form: Format, scale: float) -> str:
    """The part of all activation gradients that becomes 0."""
    exponents, parts = histogram(sample, lambda name: name == FLOW)
    if not exponents:
        return ""
    # As the counts of one tensor, which a histogram of fractions can stand for.
    return f"{underflow({'bins': parts, 'low': exponents[0]}, form, scale):.3%}"
