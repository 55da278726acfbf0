"""Metrics of several runs against their progress: one curve for runs that differ in nothing but the seed.

A curve is the mean of its runs with a band around it. NaN and infinity are gaps; where one run has none and another has,
the mean is that of those that have. Runs that logged at other places are interpolated, never beyond their own ends and
never across a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mprun.report.thin import COLUMNS, kept

Array = NDArray[np.float64]

PROGRESS = {"step": "applied steps", "epoch": "epochs", "time": "training time (s)"}
BANDS = ("minmax", "std", "none")
GRID_MAX = 2000  # points of a curve whose runs logged at different places
GREY_COLUMNS = 9000  # of all grey curves together
HIGHER_IS_BETTER = ("top1", "examples_per_s")


@dataclass(frozen=True)
class Trace:
    """One run: float64 ``x`` (ascending) and ``y`` (NaN for a gap) of one shape, and where it skipped a step."""

    x: Array
    y: Array
    skips: Array
    failed: bool = False
    ended: bool = True


@dataclass(frozen=True)
class Curve:
    """Several runs as one line: arrays of one shape, ``low`` and ``high`` the band (NaN where there is none).

    Attributes:
        deaths: the last finite point of each run that failed.
        skips: ``x`` of the skipped steps of all runs.
        end: the last finite mean, by which curves are ranked; NaN if there is none.
    """

    label: str
    x: Array
    mean: Array
    low: Array
    high: Array
    runs: int
    deaths: tuple[tuple[float, float], ...] = ()
    skips: Array = field(default_factory=lambda: np.empty(0))

    @property
    def end(self) -> float:
        """The last finite mean."""
        finite = self.mean[np.isfinite(self.mean)]
        return float(finite[-1]) if len(finite) else math.nan


def trace_of(records: Sequence[Mapping[str, Any]], metric: str, progress: str, *, status: str = "ok") -> Trace | None:
    """One metric of one run; None where it was never logged, or where its progress is not known.

    Args:
        records: of ``metrics.jsonl``, those that count.
        metric: a name of the glossary, such as ``val/loss``.
        progress: ``step``, ``epoch`` or ``time``.
        status: how the run ended; anything but ``ok`` and a run that goes on is a failure.
    """
    places = _places(records, progress)
    points: dict[float, float] = {}
    skips: list[float] = []
    for record, place in zip(records, places, strict=True):
        if place is None:
            continue
        if record.get("kind") == "skip":
            skips.append(place)
        elif isinstance(value := record.get(metric), int | float):
            points[place] = float(value) if math.isfinite(value) else math.nan
    if not points:
        return None
    x = np.array(sorted(points), dtype=np.float64)
    y = np.array([points[place] for place in x.tolist()], dtype=np.float64)
    running = status.startswith("running")
    return Trace(x, y, np.array(skips, dtype=np.float64), failed=status != "ok" and not running, ended=not running)


def _places(records: Sequence[Mapping[str, Any]], progress: str) -> list[float | None]:
    """Where each record stands on the x axis."""
    if progress == "step":
        return [_number(record.get("step")) for record in records]
    if progress == "epoch":
        return _epochs(records)
    return _times(records)


def _epochs(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Passes over the data, with fractions: attempts by the attempts of one pass.

    Those are not logged; but an attempt ``a`` in pass ``e`` (from 0) says that a pass has at least ``a / (e + 1)`` of
    them, and an evaluation at the end of a pass says it exactly. Within the first pass nothing is known.
    """
    pairs = [(_number(record.get("attempt")), _number(record.get("epoch"))) for record in records]
    known = [(attempt, epoch) for attempt, epoch in pairs if attempt is not None and epoch is not None]
    if not any(epoch >= 1 for _, epoch in known):
        return [None] * len(records)
    length = max(math.ceil(attempt / (epoch + 1)) for attempt, epoch in known)
    return [None if attempt is None or not length else attempt / length for attempt, _ in pairs]


def _times(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Seconds of training since the start: the mean times of an attempt, summed; evaluation does not count.

    A record between two of these times is placed at the pace of the one that follows.
    """
    attempts, seconds = [0.0], [0.0]
    for record in records:
        attempt, pace = _number(record.get("attempt")), _number(record.get("perf/step_ms"))
        if attempt is not None and pace is not None and attempt > attempts[-1]:
            seconds.append(seconds[-1] + (attempt - attempts[-1]) * pace / 1000)
            attempts.append(attempt)
    if len(attempts) == 1:
        return [None] * len(records)
    found = [_number(record.get("attempt")) for record in records]
    return [None if attempt is None else float(np.interp(attempt, attempts, seconds)) for attempt in found]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def merge(label: str, traces: Sequence[Trace], *, band: str = "minmax") -> Curve:
    """One curve of several runs.

    Args:
        label: its name in the legend.
        traces: at least one.
        band: ``minmax`` (all runs lie in it), ``std`` (mean ± sample standard deviation) or ``none``.
    """
    x = traces[0].x
    if any(not np.array_equal(trace.x, x) for trace in traces[1:]):
        x = np.unique(np.concatenate([trace.x for trace in traces]))
        if len(x) > GRID_MAX:
            x = np.linspace(x[0], x[-1], GRID_MAX)
    y = np.stack([np.interp(x, trace.x, trace.y, left=np.nan, right=np.nan) for trace in traces])
    there = np.isfinite(y)
    count = there.sum(axis=0)
    gap = np.full(len(x), np.nan)
    mean = np.divide(np.where(there, y, 0).sum(axis=0), count, out=gap.copy(), where=count > 0)
    low, high = gap, gap
    if band == "minmax" and len(traces) > 1:
        low = np.where(count > 1, np.where(there, y, np.inf).min(axis=0), np.nan)
        high = np.where(count > 1, np.where(there, y, -np.inf).max(axis=0), np.nan)
    elif band == "std" and len(traces) > 1:
        squares = np.where(there, y - mean, 0) ** 2
        deviation = np.sqrt(np.divide(squares.sum(axis=0), count - 1, out=gap.copy(), where=count > 1))
        low, high = mean - deviation, mean + deviation
    return Curve(
        label, x, mean, low, high, len(traces), _deaths(traces), np.unique(np.concatenate([t.skips for t in traces]))
    )


def drawn(curves: Sequence[Curve], metric: str, coloured: int) -> list[Curve]:
    """The curves with as many points as a picture shows, so that neither long runs nor many of them make a large file.

    Args:
        curves: to be drawn.
        metric: the best of them are drawn in colour and in full.
        coloured: how many that are; the others are grey, and share the points of a few.
    """
    best = set(best_first(curves, metric)[:coloured])
    coarse = max(GREY_COLUMNS // max(len(curves) - coloured, 1), 20)
    return [_thin(curve, COLUMNS if index in best else min(coarse, COLUMNS)) for index, curve in enumerate(curves)]


def _thin(curve: Curve, columns: int) -> Curve:
    """The curve at its lowest, highest and last points, and those of its band; a skipped step a column."""
    keep = kept(curve.x, curve.mean, columns)
    if not keep.all():
        keep |= kept(curve.x, curve.low, columns) | kept(curve.x, curve.high, columns)
        keep[np.flatnonzero(np.isfinite(curve.mean))[-1:]] = True
    skips = curve.skips
    if len(skips) > columns:
        place = ((skips - skips[0]) / ((skips[-1] - skips[0]) or 1.0) * columns).astype(int)
        skips = skips[np.unique(place, return_index=True)[1]]
    return replace(
        curve, x=curve.x[keep], mean=curve.mean[keep], low=curve.low[keep], high=curve.high[keep], skips=skips
    )


def _deaths(traces: Sequence[Trace]) -> tuple[tuple[float, float], ...]:
    found = []
    for trace in traces:
        finite = np.flatnonzero(np.isfinite(trace.y))
        if trace.failed and len(finite):
            found.append((float(trace.x[finite[-1]]), float(trace.y[finite[-1]])))
    return tuple(found)


def alone(values: Array) -> NDArray[np.bool_]:
    """Which finite values have no finite neighbour: a line through them would not be seen."""
    finite = np.isfinite(values)
    padded = np.concatenate([[False], finite, [False]])
    found: NDArray[np.bool_] = finite & ~padded[:-2] & ~padded[2:]
    return found


def best_first(curves: Sequence[Curve], metric: str) -> list[int]:
    """Indices of the curves, the best end first; those without an end come last."""
    sign = -1.0 if metric.endswith(HIGHER_IS_BETTER) else 1.0
    return sorted(
        range(len(curves)), key=lambda index: (math.isnan(curves[index].end), sign * curves[index].end, index)
    )


def wants_log(values: Sequence[float]) -> bool:
    """Whether an axis of these values is better logarithmic: a factor of 20 or more, nothing below or at 0."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 20 * min(finite)
