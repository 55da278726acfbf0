"""Heatmaps of a page, modules by samples, as plotly's plain dicts: underflow, amax against a format's limits, SQNR."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mprun.numerics.formats import Format
from mprun.report.curves import Array
from mprun.report.draw_html import escaped
from mprun.report.html_figures import Figure, axis, layout
from mprun.report.palette import GREY
from mprun.report.probe_view import Grid

# White to dark red, of even steps in lightness: nothing lost to everything lost.
LOSS_RAMP = ((0.0, "#ffffff"), (0.25, "#fdd9b0"), (0.5, "#f59c5b"), (0.75, "#d1481f"), (1.0, "#5f0a0a"))
# The least fraction that has a colour of its own.
FLOOR = 1e-5
BLUE, MIDDLE, ORANGE, RED = "#2166ac", "#f4f4ee", "#e8832a", "#8b0f0f"
ROW_PX = 17
# A heatmap is never lower than LOWEST_PX, of which EDGE_PX are not the map; a label of the colour bar needs LABEL_PX.
LOWEST_PX, EDGE_PX, LABEL_PX = 230, 90, 12


def underflow_map(grid: Grid) -> Figure:
    """Fractions of shape (modules, samples) on a logarithmic colour scale, 1 % and below pale, 100 % dark."""
    shown = np.log10(np.clip(grid.values, FLOOR, 1.0))
    ticks = list(range(int(math.log10(FLOOR)), 1))
    bar = {"tickvals": ticks, "ticktext": ["none", "0.01%", "0.1%", "1%", "10%", "100%"]}
    text = [[_percent(value) for value in row] for row in grid.values.tolist()]
    return _map(grid, shown, (ticks[0], 0), [list(stop) for stop in LOSS_RAMP], bar, text)


def peak_map(grid: Grid, form: Format) -> Figure:
    """log2 of amax over the largest number; the limits of ``form`` are marked in the colour bar.

    A cell beyond it, or with inf or NaN, has a ×.
    """
    normal, least = (math.log2(value / form.max) for value in (form.smallest_normal, form.smallest_subnormal))
    low = max(least, -48.0)
    span = 2.0 - low
    ramp = [
        [0.0, BLUE],
        [(-12 - low) / span, MIDDLE],
        [(-3 - low) / span, ORANGE],
        [(0 - low) / span, RED],
        [1.0, "#000000"],
    ]
    if low > -14:  # a narrow format: no room for the blue half
        ramp = [[0.0, BLUE], [0.5, MIDDLE], [(0 - low) / span, RED], [1.0, "#000000"]]
    marks = {0.0: f"limit {form.max:.5g}", -3.0: "1/8 of it", -12.0: "2<sup>−12</sup>"}
    marks |= {edge: name for edge, name in ((normal, "smallest normal"), (least, "smallest")) if edge >= low}
    if _bar_px(len(grid.modules)) * 3 / span < LABEL_PX:
        del marks[-3.0]  # it would lie on the limit's
    bar = {"tickvals": list(marks), "ticktext": list(marks.values())}
    text = [[_peak(value, form) for value in row] for row in grid.values.tolist()]
    figure = _map(grid, np.clip(grid.values, low, 2.0), (low, 2.0), ramp, bar, text)
    rows, columns = np.nonzero(grid.values >= math.log2(form.overflow / form.max))
    if len(rows):
        figure["data"].append(
            {
                "type": "scatter", "x": columns.tolist(), "y": rows.tolist(), "mode": "markers", "hoverinfo": "skip",
                "marker": {"symbol": "x-thin", "size": 8, "line": {"color": "white", "width": 2}}, "showlegend": False,
            }
        )  # fmt: skip
    return figure


def _map(
    grid: Grid,
    shown: Array,
    limits: tuple[float, float],
    ramp: list[Any],
    bar: dict[str, Any],
    text: list[Any],
    place: str = "attempt",
) -> Figure:
    count = len(grid.attempts)
    places = sorted({round(index) for index in np.linspace(0, count - 1, min(count, 7)).tolist()})
    data = {
        "type": "heatmap", "x": list(range(count)), "y": list(range(len(grid.modules))), "z": shown.tolist(),
        "customdata": [[[escaped(name or "(model)"), attempt, cell] for attempt, cell in zip(grid.attempts, row, strict=True)]
                       for name, row in zip(grid.modules, text, strict=True)],
        "zmin": limits[0], "zmax": limits[1], "colorscale": ramp, "xgap": 1 if count <= 80 else 0, "ygap": 1,
        "hovertemplate": "<b>%{customdata[0]}</b><br>" + place + " %{customdata[1]}: %{customdata[2]}<extra></extra>",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "tickfont": {"size": 10, "color": GREY}, "len": 1, "y": 0.5, **bar},
    }  # fmt: skip
    names = [escaped(_shortened(name or "(model)")) for name in grid.modules]
    return {
        "data": [data],
        "layout": layout(
            _bar_px(len(names)) + EDGE_PX,
            # The ranges are given: by itself plotly leaves room around markers, and forgets rows without a number.
            xaxis=axis(
                place,
                range=[-0.5, count - 0.5],
                tickvals=places,
                ticktext=[f"{grid.attempts[place]:,}" for place in places],
                showgrid=False,
                tickangle=0,
            ),
            yaxis=axis(
                "", tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.5, -0.5], showgrid=False
            ),
            plot_bgcolor="#eceef1",
        ),
    }


def _bar_px(rows: int) -> int:
    """How high a heatmap of so many rows is."""
    return max(ROW_PX * rows, LOWEST_PX - EDGE_PX)


def _shortened(name: str, most: int = 34) -> str:
    return name if len(name) <= most else "…" + name[-most + 1 :]


def _percent(value: float) -> str:
    return "no numbers" if math.isnan(value) else f"{value:.3%} become 0"


def _peak(value: float, form: Format) -> str:
    if math.isnan(value):
        return "only zeros"
    if math.isinf(value):
        return "inf or NaN among the numbers"
    return f"amax {form.max * 2.0**value:.3g}, 2^{value:+.1f} of the limit"


def sqnr_map(states: Sequence[Mapping[str, Any]], most: int = 40) -> Figure:
    """SQNR in dB by module and step, the worst first. ``states`` have a ``step`` and ``modules`` (path to dB)."""
    modules = list(dict.fromkeys(path for state in states for path in state["modules"]))
    values = np.array([[_db(state["modules"].get(path)) for state in states] for path in modules], dtype=np.float64)
    order = sorted(range(len(modules)), key=lambda row: float(np.nanmin(np.append(values[row], 1e9))))[:most]
    grid = Grid(
        tuple(modules[row] for row in order), tuple(int(state.get("step", 0)) for state in states), values[order]
    )
    text = [["" if math.isnan(value) else f"{value:.1f} dB" for value in row] for row in grid.values.tolist()]
    ramp = [[0.0, "#5f0a0a"], [0.25, "#d1481f"], [0.5, "#fdd9b0"], [1.0, "#ffffff"]]
    return _map(grid, np.clip(grid.values, 0.0, 60.0), (0.0, 60.0), ramp, {"ticksuffix": " dB"}, text, place="step")


def _db(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
