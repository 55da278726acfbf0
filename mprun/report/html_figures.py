"""The figures of a page as plotly's plain dicts: lines, the loss scale with its skips, heatmaps, bars, histograms.

Colours are those of ``mprun/report/palette.py``. A figure has no title of its own: the
page prints it, as text that can be searched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mprun.numerics.formats import Format
from mprun.report.curves import Array, wants_log
from mprun.report.palette import COLOURS, GREY, INK, LIGHT, LINE
from mprun.report.parallel import nice
from mprun.report.probe_view import short
from mprun.report.summary import bytes_text, scale_text
from mprun.report.thin import thinned

Figure = dict[str, Any]

FONT = "system-ui, 'DejaVu Sans', sans-serif"
REASONS = {"overflow": "#D55E00", "nonfinite_loss": "#CC79A7", "nonfinite_grad": "#000000", "empty": "#6B7079"}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis in the page's style."""
    return {
        "title": {"text": title, "font": {"size": 12}}, "gridcolor": LINE, "linecolor": LIGHT, "zeroline": False,
        "tickfont": {"color": GREY, "size": 11}, "automargin": True, **more,
    }  # fmt: skip


def layout(height: int, **more: Any) -> dict[str, Any]:
    """A layout in the page's style."""
    return {
        "height": height, "font": {"family": FONT, "size": 12, "color": INK}, "paper_bgcolor": "white",
        "plot_bgcolor": "white", "margin": {"l": 60, "r": 20, "t": 30, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}, **more,
    }  # fmt: skip


def lines(
    curves: Mapping[str, tuple[Array, Array]], ytitle: str, *, xtitle: str = "applied steps", log: bool = False
) -> Figure:
    """Named curves, each ``(x, y)``; with ``log`` y is logarithmic where it spans more than a factor of 20."""
    data = []
    for number, (name, (x, y)) in enumerate(curves.items()):
        x, y = thinned(x, y)
        few = int(np.isfinite(y).sum()) <= 40
        data.append(
            {
                "type": "scatter", "x": x.tolist(), "y": y.tolist(), "name": name, "connectgaps": False,
                "mode": "lines+markers" if few else "lines", "marker": {"size": 5},
                "line": {"color": COLOURS[number % len(COLOURS)], "width": 1.8}, "hovertemplate": "%{y:.5g}",
            }
        )  # fmt: skip
    values = np.concatenate([y for _, y in curves.values()])
    vertical = axis(ytitle)
    if log and wants_log(values.tolist()):
        finite = values[np.isfinite(values)]
        ticks = nice(float(finite.min()) / 1.5, float(finite.max()) * 1.5, log=True)
        vertical |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return {
        "data": data,
        "layout": layout(290, xaxis=axis(xtitle), yaxis=vertical, hovermode="x unified", showlegend=len(data) > 1),
    }


def loss_scale(attempts: Array, scales: Array, skips: Mapping[str, tuple[Array, Array]]) -> Figure:
    """The loss scale S over attempts as steps; skipped attempts by reason, at the S at which they were lost.

    Args:
        attempts: float64, ascending.
        scales: S at each of them; not above 0 is a gap.
        skips: for each reason attempts and scales; without a scale they stand at the lower edge.
    """
    powers = np.log2(scales, out=np.full(len(scales), np.nan), where=scales > 0)
    x, y = thinned(attempts, powers)
    data: list[dict[str, Any]] = []
    if np.isfinite(powers).any():
        data.append(
            {
                "type": "scatter", "x": x.tolist(), "y": y.tolist(), "name": "loss scale", "mode": "lines",
                "line": {"color": COLOURS[0], "width": 1.8, "shape": "hv"},
                "customdata": [scale_text(2.0**power) if math.isfinite(power) else "" for power in y.tolist()],
                "hovertemplate": "%{customdata}",
            }
        )  # fmt: skip
    known = [power[np.isfinite(power)] for power in (powers, *(_powers(s) for _, s in skips.values()))]
    every = np.concatenate(known) if known else np.empty(0)
    low, high = (math.floor(every.min()) - 1, math.ceil(every.max()) + 1) if len(every) else (0, 1)
    for reason, (where, scale) in skips.items():
        at = np.where(np.isfinite(_powers(scale)), _powers(scale), low)
        at_x, at_y = thinned(where, at)
        data.append(
            {
                "type": "scatter", "x": at_x.tolist(), "y": at_y.tolist(),
                "name": f"skipped: {reason.replace('_', ' ')} ({len(where)})",
                "mode": "markers", "hovertemplate": "attempt %{x}",
                "marker": {"symbol": "x-thin", "size": 8, "line": {"color": REASONS.get(reason, INK), "width": 1.8}},
            }
        )  # fmt: skip
    step = max(1, math.ceil((high - low) / 8))
    ticks = list(range(low, high + 1, step))
    vertical = axis(
        "loss scale S",
        range=[low - 0.3, high + 0.3],
        tickvals=ticks,
        ticktext=[f"2<sup>{tick}</sup>" for tick in ticks],
    )
    if not len(every):
        vertical |= {"visible": False}
    return {"data": data, "layout": layout(290, xaxis=axis("attempts"), yaxis=vertical, showlegend=True)}


def _powers(scales: Array) -> Array:
    return np.log2(scales, out=np.full(len(scales), np.nan), where=scales > 0)


# --- bars and histograms ------------------------------------------------------------------------------------------------


def bars(names: Sequence[str], values: Mapping[str, Sequence[float]]) -> Figure:
    """Bytes by category, one bar for each name of ``values`` (predicted, measured)."""
    top = max((value for several in values.values() for value in several), default=1.0) or 1.0
    unit = 1024.0 ** min(int(math.log(top, 1024)), 4) if top > 1 else 1.0
    word = bytes_text(unit).split()[1]
    data = [
        {
            "type": "bar", "orientation": "h", "name": label, "y": list(names), "x": [value / unit for value in several],
            "marker": {"color": COLOURS[number]}, "text": [bytes_text(value) if value else "0" for value in several],
            "textposition": "outside", "cliponaxis": False, "hoverinfo": "name+y+text",
        }
        for number, (label, several) in enumerate(values.items())
    ]  # fmt: skip
    height = 90 + 24 * len(names) * max(len(values), 1)
    return {
        "data": data,
        "layout": layout(
            height, xaxis=axis(word), yaxis=axis("", autorange="reversed"), barmode="group", showlegend=len(values) > 1,
            margin={"l": 60, "r": 80, "t": 30, "b": 46},
        ),
    }  # fmt: skip


def exponents(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], form: Format, scale: float) -> Figure:
    """How often each exponent occurs; the range of ``form`` shaded, and at a loss scale that of unscaled gradients."""
    data = [
        {
            "type": "scatter", "x": list(x), "y": list(y), "name": name, "mode": "lines",
            "line": {"color": COLOURS[number], "width": 1.8, "shape": "hvh"},
            "hovertemplate": f"2^%{{x}}: %{{y:.2%}}<extra>{name}</extra>",
        }
        for number, (name, (x, y)) in enumerate(curves.items())
    ]  # fmt: skip
    low, high = math.log2(form.smallest_subnormal) - 1, math.log2(form.overflow)
    shift = math.log2(scale)
    ends = [exponent for x, _ in curves.values() for exponent in (x[0], x[-1])]
    shown = [max(min([*ends, low - shift]), -80) - 2, max([*ends, min(high, 40)]) + 2]
    ticks = list(range(8 * math.ceil(shown[0] / 8), math.floor(shown[1]) + 1, 8))
    shapes, notes = [_edge(high, GREY)], [_label(high, f"{short(form)} overflows", "right")]
    shapes.append(_edge(low, GREY))
    notes.append(_label(low, f"becomes 0 in {short(form)}", "right"))
    if shift:
        shapes.append(_edge(low - shift, COLOURS[1], dash="dot"))
        notes.append(_label(low - shift, f"gradients become 0 at S = {scale_text(scale)}", "left", y=0.9))
    keep = [index for index, note in enumerate(notes) if shown[0] <= note["x"] <= shown[1]]
    return {
        "data": data,
        "layout": layout(
            310, xaxis=axis("exponent of the number (unscaled)", range=shown,
                              tickvals=ticks, ticktext=[f"2<sup>{tick}</sup>" for tick in ticks]),
            yaxis=axis("of the non-zero numbers", tickformat=".0%", rangemode="tozero"), showlegend=True,
            shapes=[shapes[index] for index in keep], annotations=[notes[index] for index in keep],
        ),
    }  # fmt: skip


def _edge(x: float, colour: str, dash: str = "dash") -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": colour, "width": 1.2, "dash": dash},
    }


def _label(x: float, text: str, side: str, y: float = 0.99) -> dict[str, Any]:
    return {
        "x": x, "y": y, "yref": "paper", "text": text, "showarrow": False, "xanchor": side, "yanchor": "top",
        "font": {"size": 11, "color": GREY}, "xshift": 4 if side == "left" else -4, "bgcolor": "rgba(255,255,255,0.75)",
    }  # fmt: skip
