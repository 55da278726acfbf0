"""How a cost grows with a size: the exponent of a power law, how far it leaves a straight line, and the plot of both.

Two questions are asked of a curve of costs, because neither alone is enough::

    exponent       p of cost ~ size^p on the upper half of the range, least squares of the logarithms
    over_linear    the cost at the largest size over what a + b * size says of it, fitted to the three before it (a, b >= 0)

A large constant part hides growth from the first one, and not from the second; a cache that becomes too small shows in both.
"""

from __future__ import annotations

import gc
import io
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import progress
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from mprun.report.palette import COLOURS, GREY, INK, LIGHT, LINE

# The highest exponent that counts as linear, and as constant.
LINEAR, FLAT = 1.1, 0.1
# How far above the straight line through the smaller sizes the largest one may be.
OVER = 1.25
MARKERS = "osD^vP*"
DPI = 110


@dataclass(frozen=True)
class Series:
    """One cost against one size.

    Attributes:
        name: what is measured, for people.
        sizes: of the axis, ascending; at least a factor of 16 from the first to the last.
        prepare: from a size to what is measured: the size as it came out (parameters of a width) and a call that gives the
            cost once. All sizes are prepared before any is measured.
        unit: of the cost.
        most: the highest exponent that meets the target.
        panel: title of the part of the plot that it is drawn in.
        exact: it is the same at every call, such as the size of a file: one round is enough.
    """

    name: str
    sizes: Sequence[int]
    prepare: Callable[[int], tuple[float, Callable[[], float]]]
    unit: str = "ms"
    most: float = LINEAR
    panel: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Row:
    """A measured :class:`Series`: medians over the rounds."""

    axis: str
    name: str
    unit: str
    panel: str
    most: float
    size: list[float]
    cost: list[float]
    exponent: float = field(init=False)
    over_linear: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exponent", exponent(self.size, self.cost))
        object.__setattr__(self, "over_linear", over_linear(self.size, self.cost))

    @property
    def met(self) -> bool:
        """Whether the target is met: no exponent above ``most``, and where linear is legal no bend away from a line."""
        return self.exponent <= self.most and (self.most <= FLAT or self.over_linear <= OVER)

    @property
    def text(self) -> str:
        """``25 to 1,601: 1.2 to 80 ms``."""
        sizes = f"{_count(self.size[0])} to {_count(self.size[-1])}"
        return f"{sizes}: {_digits(self.cost[0])} to {_digits(self.cost[-1])} {self.unit}"

    def plain(self) -> dict[str, Any]:
        """For JSON, with as many digits as mean something."""
        return {
            "axis": self.axis, "name": self.name, "unit": self.unit, "size": self.size,
            "cost": [float(f"{value:.4g}") for value in self.cost], "exponent": round(self.exponent, 3),
            "over_linear": round(self.over_linear, 3), "most": self.most, "met": self.met,
        }  # fmt: skip


def measure(axis: str, series: Sequence[Series], *, rounds: int) -> list[Row]:
    """Median costs. In every round each size of each series has its turn, the small ones and the large ones alike."""
    ready = []
    for one in series:
        progress(f"{axis}: preparing {one.name}")
        ready.append([one.prepare(size) for size in one.sizes])
    # Everything that was prepared is alive at once, which no run has: the collector is not to walk through it again and again.
    gc.collect()
    gc.freeze()
    costs: list[list[list[float]]] = [[[] for _ in sizes] for sizes in ready]
    for number in range(rounds):
        for one, sizes, found in zip(series, ready, costs, strict=True):
            progress(f"{axis} round {number + 1}/{rounds} {one.name}")
            for (_, call), values in zip(sizes, found, strict=True):
                if not (one.exact and number):
                    values.append(call())
    gc.unfreeze()
    progress("")
    return [
        Row(axis, one.name, one.unit, one.panel, one.most, [size for size, _ in sizes], list(map(statistics.median, found)))
        for one, sizes, found in zip(series, ready, costs, strict=True)
    ]  # fmt: skip


def timed(call: Callable[[], Any], *, least_ms: float = 15.0) -> float:
    """Milliseconds of processor time that a call takes: to wait for a busy machine is no growth.

    A short one is repeated for ``least_ms``, and the mean counts.
    """
    count, begin = 0, time.process_time()
    while True:
        call()
        count += 1
        taken = 1e3 * (time.process_time() - begin)
        if taken >= least_ms:
            return taken / count


def upper(size: Sequence[float]) -> int:
    """Index from which on the upper half of the range begins, on a logarithmic scale; at least three points follow."""
    middle = math.sqrt(size[0] * size[-1])
    return min(next(index for index, value in enumerate(size) if value >= 0.999 * middle), max(len(size) - 3, 0))


def exponent(size: Sequence[float], cost: Sequence[float]) -> float:
    """Exponent p of cost ~ size^p on the upper half of the range."""
    begin = upper(size)
    slope, _ = np.polyfit(np.log(size[begin:]), np.log(np.maximum(cost[begin:], 1e-12)), 1)
    return float(slope)


def linear(size: Sequence[float], cost: Sequence[float]) -> tuple[float, float]:
    """Both a and b, neither negative, of cost ~ a + b * size by least squares of relative errors."""
    x, y = np.asarray(size, dtype=np.float64), np.maximum(np.asarray(cost, dtype=np.float64), 1e-12)
    columns = np.stack([1 / y, x / y], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    if a >= 0 and b >= 0:
        return float(a), float(b)
    kept = 1 if a < 0 else 0
    value = float(columns[:, kept].sum() / (columns[:, kept] ** 2).sum())
    return (0.0, value) if kept else (value, 0.0)


def over_linear(size: Sequence[float], cost: Sequence[float]) -> float:
    """The cost at the largest size over what a straight line through the three sizes before it says of it."""
    a, b = linear(size[-4:-1], cost[-4:-1])
    return float(cost[-1] / max(a + b * size[-1], 1e-12))


def worst(rows: Sequence[Row]) -> Row:
    """The row that is nearest to its limit, or farthest above it; a missed one first."""
    return max(rows, key=lambda row: (not row.met, row.exponent - row.most))


# --- the plot ----------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], title: str, xlabel: str) -> Figure:
    """Costs against sizes, both logarithmic: points, a + b * size as a line, exponents in the legend; a panel a group."""
    panels = list(dict.fromkeys(row.panel for row in rows))
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    height = 0.9 + 3.5 * lines
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(max(7.2, 4.3 * columns), height), layout=layout, facecolor="white")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, panels, strict=False):
        _panel(axis, [row for row in rows if row.panel == panel], panel, xlabel)
    bad, last = [row for row in rows if not row.met], worst(rows)
    head = f"{title}: steepest p = {last.exponent:.2f} (at most {last.most:g})"
    said = "nothing above its target" if not bad else f"{len(bad)} of {len(rows)} above the target (✗)"
    figure.suptitle(f"{head}\n", x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.text(
        0.012, 1 - 0.33 / height, f"{last.name}; {said}; lines are a + b × size", fontsize=8.5, color=GREY, va="center"
    )
    return figure


def _panel(axis: Axes, rows: Sequence[Row], panel: str, xlabel: str) -> None:
    units = list(dict.fromkeys(row.unit for row in rows))
    for number, row in enumerate(rows):
        colour = COLOURS[number % len(COLOURS)]
        a, b = linear(row.size, row.cost)
        x = np.geomspace(row.size[0], row.size[-1], 60)
        axis.plot(x, a + b * x, color=colour, linewidth=1.1, alpha=0.75, zorder=2)
        name = f"{row.name} ({row.unit})" if len(units) > 1 else row.name
        label = f"{name}  p = {row.exponent:.2f}" + ("" if row.met else "  ✗")
        axis.plot(
            row.size, row.cost, MARKERS[number % len(MARKERS)], color=colour, markersize=4.5, label=label, zorder=3
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    low, high = min(min(row.cost) for row in rows), max(max(row.cost) for row in rows)
    span = math.log10(high / low)
    # Room for a factor of ten at least, or noise looks like growth; and above for the legend.
    pad = max(0.0, (1 - span) / 2) + 0.1 * max(span, 1)
    axis.set_ylim(low / 10**pad, high * 10 ** (pad + 0.085 * len(rows) * max(span, 1)))
    axis.set_xlabel(xlabel, color=INK, fontsize=9)
    axis.set_ylabel(", ".join(units), color=INK, fontsize=9)
    axis.set_title(panel, loc="left", fontsize=9.5, color=INK)
    ticks = _ticks(min(row.size[0] for row in rows), max(row.size[-1] for row in rows))
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if span > 1.5 else (1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _digits(value)))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(LIGHT)
    axis.grid(color=LINE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=GREY, labelsize=8, length=0)
    axis.legend(loc="upper left", frameon=False, fontsize=7.5, labelcolor=INK, handletextpad=0.2, borderpad=0.1)


def _ticks(low: float, high: float) -> list[float]:
    """Some four ticks, each a round number, evenly on a logarithmic scale."""
    found = [
        step * 10**power for power in range(12) for step in (1, 2, 5) if low * 0.8 <= step * 10**power <= high * 1.25
    ]
    decades = [value for value in found if math.log10(value).is_integer()]
    found = decades if len(decades) >= 3 else found
    return found[:: max(1, math.ceil(len(found) / 5))]


def _count(value: float) -> str:
    """``25``, ``1,600``, ``1.2 M``."""
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def save_plot(figure: Figure, path: Path) -> None:
    """Write a plot as PNG, in as few colours as it has: a quarter of the size."""
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=DPI)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(whole).convert("RGB").quantize(64).save(path, optimize=True)
