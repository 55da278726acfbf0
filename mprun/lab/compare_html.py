"""A comparison as one HTML page that needs no network: verdicts, the table, loss curves, gradients, memory. No torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mprun.lab.compare_markdown import gradient_rows, memory_rows, test_text
from mprun.lab.compare_text import columns
from mprun.lab.comparison import Comparison, PolicyResult
from mprun.numerics.parity import FAIL, PASS, UNDECIDED, smooth
from mprun.report.curves import Curve, Trace, merge
from mprun.report.html_page import Page, Plot, Section, note, save, table, words
from mprun.report.run_folders import OK

LEVELS = {PASS: "good", FAIL: "bad", UNDECIDED: "warn", "baseline": "plain"}


def write_html(found: Comparison, path: Path) -> None:
    """Write the page of a comparison."""
    save(page(found), path)


def page(found: Comparison) -> Page:
    """The page of a comparison."""
    verdicts = [policy.verdict for policy in found.candidates]
    worst = next((word for word in (FAIL, UNDECIDED) if word in verdicts), PASS)
    said = [(LEVELS[policy.verdict], f"{policy.label}: {policy.verdict}. {policy.why}") for policy in found.candidates]
    shown = columns(found)
    rows = [[one.cells[index] for one in shown] for index in range(len(found.policies))]
    sections = [Section("Policies", [table([one.heading for one in shown], rows, levels=LEVELS)])]
    if plot := loss_plot(found):
        sections.append(Section("Training loss", [plot]))
    if gradients := gradient_rows(found):
        sections.append(Section("Gradients against FP32 (SQNR)", [table(*gradients)]))
    if categories := memory_rows(found):
        sections.append(Section("Memory at the peak of a step, predicted", [table(*categories)]))
    sections.append(Section("The test", [note(test_text(found).replace("`", ""))]))
    head = words([*said, *(("warn", text) for text in found.notes)])
    return Page(f"{found.name}: precision policies against {found.baseline}", (worst, LEVELS[worst]), head, sections)


def loss_plot(found: Comparison) -> Plot | None:
    """The smoothed training loss of each policy: mean over its seeds, band from min to max. None without the extra ``plot``."""
    try:
        from mprun.report.draw_html import curves_figure
    except ImportError:
        return None
    curves = [curve for policy in found.policies if (curve := _curve(policy)) is not None]
    if not curves:
        return None
    figure = curves_figure(curves, "train/loss", "step", subtitle="")
    figure["layout"].pop("title")  # the page has one above it
    figure["layout"]["margin"] |= {"t": 16}
    return Plot("loss", "train/loss, smoothed", figure, wide=True)


def _curve(policy: PolicyResult) -> Curve | None:
    traces = []
    for run in policy.runs:
        x, y = (np.asarray(values, dtype=np.float64) for values in run.losses)
        there = np.isfinite(y)
        if there.any():
            traces.append(Trace(x[there], smooth(y[there]), np.empty(0), failed=run.status != OK))
    return merge(policy.label, traces) if traces else None
