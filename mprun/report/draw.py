"""Pictures of many runs as PNG, SVG or PDF, by matplotlib (extra ``plot``).

Colours are Okabe and Ito's, which colour-blind readers tell apart, each with a dash of its own, so that a print in grey
works, too. Where there are more curves than colours the best are in colour and the others grey. Legends stand below
the axes, where no curve runs through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from mprun.report.curves import PROGRESS, Curve, alone, best_first, drawn, wants_log
from mprun.report.palette import COLOURS, GREY, INK, LIGHT, LINE
from mprun.report.parallel import NO_VALUE, Parallel
from mprun.report.summary import bytes_text, number_text

DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), "-", (0, (6, 2)), (0, (2, 1.5)))
MARKERS_MAX = 30  # points up to which each is marked
DPI = 160


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "mprun"}):
        figure.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_curves(curves: Sequence[Curve], metric: str, progress: str, *, subtitle: str, skips: bool = False) -> Figure:
    """Curves with their bands; × where a run failed, and with ``skips`` a tick below for each skipped step."""
    curves = drawn(curves, metric, len(COLOURS))
    coloured = sorted(best_first(curves, metric)[: len(COLOURS)])
    rest = [index for index in range(len(curves)) if index not in coloured]
    columns = _legend_columns([curves[index].label for index in coloured])
    rows = math.ceil((len(coloured) + bool(rest)) / columns)
    figure = Figure(figsize=(7.2, 4.2 + 0.21 * rows), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    axis = figure.subplots()
    for index in rest:
        axis.plot(curves[index].x, curves[index].mean, color=LIGHT, linewidth=0.8, zorder=1)
    handles = []
    for number, index in enumerate(coloured):
        handles.append(_curve(axis, curves[index], number))
    if rest:
        handles.append(Line2D([], [], color=LIGHT, linewidth=1.2, label=f"{len(rest)} others"))
    _prepare(axis)
    _scale(axis, curves, metric)
    if skips:
        _skips(axis, [curves[index] for index in coloured])
    axis.set_xlabel(PROGRESS[progress], color=INK)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=progress == "step"))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    _title(figure, axis, metric, subtitle)
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK,
        handlelength=2.6, columnspacing=1.8,
    )  # fmt: skip
    return figure


def _curve(axis: Axes, curve: Curve, number: int) -> Line2D:
    colour, dash = COLOURS[number], DASHES[number]
    axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    few = np.isfinite(curve.mean).sum() <= MARKERS_MAX
    marks: list[bool] = (np.isfinite(curve.mean) if few else alone(curve.mean)).tolist()
    (line,) = axis.plot(
        curve.x, curve.mean, color=colour, linestyle=dash, linewidth=1.6, label=curve.label, zorder=3,
        marker="o", markersize=3, markevery=marks,
    )  # fmt: skip
    for x, y in curve.deaths:
        axis.plot(x, y, "x", color=colour, markersize=7, markeredgewidth=1.8, zorder=4, clip_on=False)
    return line


def _skips(axis: Axes, curves: Sequence[Curve]) -> None:
    """A row of small ticks for each curve below the top edge, where its runs skipped a step."""
    for number, curve in enumerate(curves):
        if len(curve.skips):
            height = np.full(len(curve.skips), 0.985 - 0.03 * number)
            axis.plot(
                curve.skips, height, "|", color=COLOURS[number], markersize=5, markeredgewidth=1,
                transform=axis.get_xaxis_transform(), zorder=2, clip_on=False,
            )  # fmt: skip


def _scale(axis: Axes, curves: Sequence[Curve], metric: str) -> None:
    """The y axis: logarithmic where values span a factor of 20; bytes with their unit."""
    values = np.concatenate([np.concatenate([curve.mean, curve.low, curve.high]) for curve in curves])
    axis.margins(y=0.08)
    axis.set_ylabel(axis_label(metric), color=INK)
    if metric.endswith("_bytes"):
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    if not wants_log(values.tolist()):
        return
    finite = values[np.isfinite(values)]
    axis.set_yscale("log")
    # Ticks at 1, 2 and 5 too, or a curve within one decade has a single number beside it.
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if finite.max() < 1e3 * finite.min() else (1.0,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def axis_label(metric: str) -> str:
    """A metric with its unit, where its name has one: ``perf/step_ms`` is ``perf/step (ms)``."""
    for suffix, unit in (("_ms", "ms"), ("_s", "s"), ("_per_s", "1/s"), ("_db", "dB")):
        if metric.endswith(suffix) and not (suffix == "_s" and metric.endswith("_per_s")):
            return f"{metric.removesuffix(suffix)} ({unit})"
    return metric.removesuffix("_bytes")


def draw_parallel(data: Parallel, *, subtitle: str, higher: bool) -> Figure:
    """Parallel coordinates: lines coloured by the metric, dark is better; the best is thick and has its value beside it."""
    count = len(data.axes)
    figure = Figure(figsize=(max(7.2, 1.45 * count + 1.2), 4.6), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.1))
    axis = figure.subplots()
    colour = shade(data, higher=higher)
    best = next((index for index in reversed(data.order) if not math.isnan(data.values[index])), None)
    for depth, index in enumerate(data.order):
        missing = math.isnan(data.values[index])
        axis.add_patch(
            PathPatch(
                _wave([one.places[index] for one in data.axes]), facecolor="none", edgecolor=colour(index),
                linewidth=3.0 if index == best else 1.3, linestyle=(0, (4, 2)) if missing else "-",
                alpha=1.0 if index == best else 0.75, zorder=2 + depth / len(data.order),
            )
        )  # fmt: skip
    halo = [withStroke(linewidth=3, foreground="white", alpha=0.9)]
    for position, one in enumerate(data.axes):
        axis.plot([position, position], [0, 1], color=INK, linewidth=1.1, zorder=4)
        last = position == count - 1
        for place, text in one.ticks:
            axis.plot(position, place, "_", color=INK, markersize=6, zorder=4)
            axis.annotate(
                text, (position, place), xytext=(7 if last else -6, 0), textcoords="offset points", fontsize=8.5,
                color=INK, ha="left" if last else "right", va="center", path_effects=halo, zorder=5,
            )  # fmt: skip
        axis.annotate(
            one.label.replace(" (log)", "\n(log)"), (position, 1), xytext=(0, 12), textcoords="offset points",
            fontsize=9.5, fontweight="bold" if last else "normal", color=INK, ha="center", va="bottom",
        )  # fmt: skip
    _ends(axis, data, best, halo)
    axis.set(xlim=(-0.45, count - 0.45), ylim=(NO_VALUE - 0.05 if data.missing else -0.05, 1.05))
    axis.axis("off")
    figure.suptitle(subtitle, x=0.02, ha="left", fontsize=9, color=GREY)
    return figure


def _ends(axis: Axes, data: Parallel, best: int | None, halo: list[Any]) -> None:
    """What stands beside the last axis: the best value, and where lines without a value end."""
    position = len(data.axes) - 1
    if best is not None:
        place = data.axes[-1].places[best]
        axis.plot(position, place, "o", color=INK, markersize=6, zorder=6)
        axis.annotate(
            f"best {number_text(data.values[best])}", (position, place), xytext=(-8, 9 if place < 0.9 else -12),
            textcoords="offset points", ha="right", fontsize=9, fontweight="bold", color=INK, path_effects=halo, zorder=6,
        )  # fmt: skip
    if data.missing:
        axis.plot(position, NO_VALUE, "x", color=GREY, markersize=7, markeredgewidth=1.8, zorder=6)
        axis.annotate(
            "no value", (position, NO_VALUE), xytext=(7, 0), textcoords="offset points", fontsize=8.5, color=GREY,
            va="center", path_effects=halo, zorder=6,
        )  # fmt: skip


def shade(data: Parallel, *, higher: bool) -> Callable[[int], str]:
    """The colour of each run's line: dark for the best, light yellow-green for the worst, grey without a value."""
    ramp = mpl.colormaps["viridis"]

    def colour(index: int) -> str:
        if math.isnan(data.values[index]):
            return LIGHT
        place = data.axes[-1].places[index]
        # The pale end of the map is left out: on white it is not seen.
        return str(mpl.colors.to_hex(ramp(0.88 * (1 - place if higher else place))))

    return colour


def _wave(places: Sequence[float]) -> Outline:
    """A smooth line through its places on the axes: lines that meet in one place still part with slopes of their own."""
    points, codes = [(0.0, places[0])], [Outline.MOVETO]
    for position in range(1, len(places)):
        before, after = places[position - 1], places[position]
        points += [(position - 0.6, before), (position - 0.4, after), (float(position), after)]
        codes += [Outline.CURVE4] * 3
    return Outline(points, codes)


def _prepare(axis: Axes) -> None:
    """Quiet axes: two spines, a light grid, small grey numbers."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(LIGHT)
    axis.grid(axis="y", which="major", color=LINE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=GREY, labelsize=8.5, length=0)


def _title(figure: Figure, axis: Axes, title: str, subtitle: str) -> None:
    axis.set_title(subtitle, loc="left", fontsize=9, color=GREY, pad=9)
    axis.annotate(
        title, (0, 1), xycoords="axes fraction", xytext=(0, 25), textcoords="offset points",
        fontsize=13, fontweight="bold", color=INK,
    )  # fmt: skip


def _legend_columns(labels: Sequence[str]) -> int:
    """How many columns of a legend fit the width of the figure."""
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(4, len(labels), 104 // (longest + 9)))
