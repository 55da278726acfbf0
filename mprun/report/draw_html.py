"""The same pictures as one HTML file that needs no network: plotly with its script inside (extra ``plot``).

What a page adds to a picture: values under the pointer, zoom, curves to switch off by their legend, and axes of parallel
coordinates to choose ranges on and to move. The file is 5 MB for plotly's script, whatever is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mprun.report.curves import PROGRESS, Array, Curve, best_first, drawn, wants_log
from mprun.report.palette import COLOURS, GREY, INK, LIGHT, LINE
from mprun.report.parallel import NO_VALUE, Parallel, nice
from mprun.report.summary import number_text

DASHES = ("solid", "dash", "dot", "dashdot", "solid", "dash", "dot")
FONT = "system-ui, 'DejaVu Sans', sans-serif"
# viridis in five stops, without its pale end; dark is better.
RAMP = ("#440154", "#404387", "#29788e", "#22a784", "#8bd646")

Trace = dict[str, Any]


def save(figure: dict[str, Any], path: Path, title: str) -> None:
    """Write a figure as a page of its own."""
    from plotly.io import to_html  # the only part that needs plotly itself

    height = figure["layout"]["height"]
    page = to_html(
        figure, include_plotlyjs=True, validate=False, div_id="plot", default_height=f"{height}px",
        config={"displaylogo": False, "responsive": True, "toImageButtonOptions": {"filename": path.stem}},
    )  # fmt: skip
    safe = title.replace("&", "&amp;").replace("<", "&lt;")
    head = f"<head><title>{safe}</title><style>body {{ margin: 0 }}</style>"
    path.write_text(page.replace("<head>", head, 1), encoding="utf-8")


def curves_figure(
    curves: Sequence[Curve], metric: str, progress: str, *, subtitle: str, skips: bool = False, letters: int = 120
) -> dict[str, Any]:
    """Curves with bands as a plotly figure; a click on a name in the legend hides its curve, band and marks.

    About so many ``letters`` of a legend fit beside each other where the figure will be shown.
    """
    curves = drawn(curves, metric, len(COLOURS))
    coloured = best_first(curves, metric)[: len(COLOURS)]
    order = [*(index for index in range(len(curves)) if index not in coloured), *sorted(coloured)]
    data: list[Trace] = []
    for index in order:
        number = sorted(coloured).index(index) if index in coloured else None
        data += _curve(curves[index], f"curve{index}", number, skips=skips)
    values = np.concatenate([np.concatenate([curve.mean, curve.low, curve.high]) for curve in curves])
    log = wants_log(values.tolist())
    rows = math.ceil(sum(6 + max(len(curves[index].label), 12) for index in coloured) / letters)
    rows = min(
        rows if len(coloured) * max(len(curve.label) for curve in curves) < 2.5 * letters else len(coloured),
        len(coloured),
    )
    below = 76 + 21 * rows
    height = 430 + below
    layout = _layout(f"<b>{escaped(metric)}</b><br><sup>{escaped(subtitle)}</sup>", height) | {
        "xaxis": _axis(PROGRESS[progress]),
        "yaxis": _axis(metric) | (_log_axis(values) if log else {}),
        "hovermode": "x" if len(curves) <= len(COLOURS) else "closest",
        "margin": {"l": 80, "r": 30, "t": 84, "b": below},
        # In the height kept free for it: below the axis and its name, however many lines it has.
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "yanchor": "top", "y": (below - 64) / height,
        },
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _log_axis(values: Array) -> dict[str, Any]:
    finite = values[np.isfinite(values) & (values > 0)]
    ticks = nice(float(finite.min()) / 1.5, float(finite.max()) * 1.5, log=True)
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _curve(curve: Curve, group: str, number: int | None, *, skips: bool) -> list[Trace]:
    """The line of a curve, and before it its band, after it its marks; grey and outside the legend without a number."""
    colour = LIGHT if number is None else COLOURS[number]
    common = {"legendgroup": group, "showlegend": False, "hoverinfo": "skip", "type": "scatter"}
    found: list[Trace] = []
    if number is not None and np.isfinite(curve.low).any():
        for x, low, high in _pieces(curve):
            found.append(
                common | {
                    "x": [*x, *x[::-1]], "y": [*high, *low[::-1]], "mode": "lines", "fill": "toself",
                    "fillcolor": _pale(colour), "line": {"width": 0},
                }
            )  # fmt: skip
    name = escaped(curve.label)
    few = int(np.isfinite(curve.mean).sum()) <= 30
    found.append(
        {
            "type": "scatter", "x": curve.x.tolist(), "y": _json(curve.mean), "name": name, "legendgroup": group,
            "mode": "lines+markers" if few and number is not None else "lines", "connectgaps": False,
            "marker": {"size": 5}, "showlegend": number is not None,
            "line": {"color": colour, "width": 1 if number is None else 2, "dash": "solid" if number is None else DASHES[number]},
            "hovertemplate": f"%{{y:.5g}}<extra>{name}</extra>",
        }
    )  # fmt: skip
    if number is None:
        return found
    if curve.deaths:
        found.append(
            common | {
                "x": [x for x, _ in curve.deaths], "y": [y for _, y in curve.deaths], "mode": "markers", "cliponaxis": False,
                "marker": {"symbol": "x-thin", "size": 10, "line": {"color": colour, "width": 2.5}},
                "hoverinfo": "text", "text": "failed",
            }
        )  # fmt: skip
    if skips and len(curve.skips):
        found.append(
            common | {
                "x": curve.skips.tolist(), "y": [0.99 - 0.03 * number] * len(curve.skips), "yaxis": "y2", "mode": "markers",
                "marker": {"symbol": "line-ns", "size": 6, "line": {"color": colour, "width": 1.2}},
                "hoverinfo": "text", "text": "skipped",
            }
        )  # fmt: skip
    return found


def _pieces(curve: Curve) -> list[tuple[list[float], list[float], list[float]]]:
    """The band between its gaps."""
    there = np.flatnonzero(np.isfinite(curve.low) & np.isfinite(curve.high))
    parts = np.split(there, np.flatnonzero(np.diff(there) > 1) + 1)
    return [
        (curve.x[part].tolist(), curve.low[part].tolist(), curve.high[part].tolist()) for part in parts if len(part)
    ]


def parallel_figure(data: Parallel, *, subtitle: str, higher: bool) -> dict[str, Any]:
    """Parallel coordinates as a plotly figure: drag along an axis to choose a range, drag its name to move it."""
    order = list(data.order)
    last = data.axes[-1]
    shade = [math.nan if math.isnan(data.values[index]) else last.places[index] for index in order]
    # Runs without a value take a colour of their own below the scale.
    colours = [-0.25 if math.isnan(place) else (1 - place if higher else place) for place in shade]
    ramp = [[0.0, LIGHT], [0.19, LIGHT], [0.2, RAMP[0]]]
    ramp += [[0.2 + 0.8 * step / (len(RAMP) - 1), colour] for step, colour in enumerate(RAMP) if step]
    dimensions = []
    for one in data.axes:
        ticks = [*one.ticks, *([(NO_VALUE, "no value")] if one is last and data.missing else [])]
        dimensions.append(
            {
                "label": escaped(one.label), "values": [one.places[index] for index in order],
                "range": [NO_VALUE if one is last and data.missing else 0, 1],
                "tickvals": [place for place, _ in ticks], "ticktext": [escaped(text) for _, text in ticks],
            }
        )  # fmt: skip
    best = [value for value in data.values if not math.isnan(value)]
    note = f", best {number_text(max(best) if higher else min(best))}" if best else ""
    trace = {
        "type": "parcoords", "dimensions": dimensions,
        "line": {"color": colours, "colorscale": ramp, "cmin": -0.25, "cmax": 1.0},
        "labelfont": {"size": 13, "color": INK}, "tickfont": {"size": 12, "color": INK},
        "rangefont": {"size": 1, "color": "white"},
        "unselected": {"line": {"color": LIGHT, "opacity": 0.15}},
    }  # fmt: skip
    layout = _layout(f"<b>{escaped(last.label)}</b><br><sup>{escaped(subtitle + note)}</sup>", 560)
    left = 40 + 8 * max(len(text) for _, text in data.axes[0].ticks)
    return {"data": [trace], "layout": layout | {"margin": {"l": left, "r": 70, "t": 140, "b": 40}}}


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "height": height,
        "title": {
            "text": title, "x": 0.02, "xanchor": "left", "y": 1 - 34 / height, "yanchor": "middle",
            "font": {"size": 18, "color": INK},
        },
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "white", "plot_bgcolor": "white",
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }  # fmt: skip


def _axis(title: str) -> dict[str, Any]:
    return {
        "title": {"text": escaped(title)},
        "gridcolor": LINE,
        "linecolor": LIGHT,
        "zeroline": False,
        "tickfont": {"color": GREY},
    }


def _json(values: Array) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def escaped(text: str) -> str:
    """Text that plotly takes literally: it reads some HTML tags in its labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
