"""Hyperparameters and what came of them, as parallel coordinates: an axis a key that differs, a line a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mprun.report.run_folders import natural
from mprun.report.runs_table import is_number, token
from mprun.report.table_text import config_text

TICKS_MAX = 8
# Where a run without a value meets the last axis: below its lower end.
NO_VALUE = -0.12


@dataclass(frozen=True)
class Axis:
    """An axis from 0 (bottom) to 1: its name, its ticks ``(position, text)``, and where each run meets it."""

    label: str
    ticks: tuple[tuple[float, str], ...]
    places: tuple[float, ...]
    log: bool = False


@dataclass(frozen=True)
class Parallel:
    """All axes, the metric's last; ``values`` are the metric's, NaN for a run that has none.

    Attributes:
        order: indices of the runs, worst first and best last; those without a value before them.
    """

    axes: tuple[Axis, ...]
    values: tuple[float, ...]
    order: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def missing(self) -> int:
        """How many runs have no value."""
        return sum(math.isnan(value) for value in self.values)


def parallel(
    columns: Mapping[str, Sequence[Any]], metric: str, values: Sequence[float], names: Sequence[str], *, higher: bool
) -> Parallel:
    """The picture's geometry.

    Args:
        columns: for each hyperparameter (by the name of its axis) the value of every run; None for none.
        metric: the name of the last axis.
        values: the metric of every run, NaN for none.
        names: of the runs.
        higher: whether a higher metric is better.
    """
    values = [value if math.isfinite(value) else math.nan for value in values]
    last = (
        _numeric(metric, values)
        if any(value == value for value in values)
        else Axis(metric, (), (NO_VALUE,) * len(values))
    )
    sign = 1 if higher else -1
    order = sorted(
        range(len(values)),
        key=lambda index: (
            values[index] == values[index],
            sign * values[index] if values[index] == values[index] else 0,
        ),
    )
    return Parallel(
        (*(axis_of(name, column) for name, column in columns.items()), last), tuple(values), tuple(order), tuple(names)
    )


def axis_of(label: str, column: Sequence[Any]) -> Axis:
    """The axis of a hyperparameter: numeric if all its values are numbers, otherwise one place for each value."""
    if all(is_number(value) and math.isfinite(value) for value in column):
        return _numeric(label, [float(value) for value in column])
    texts = {token(value): config_text(value, most=18) for value in column}
    ordered = sorted(texts, key=lambda key: natural(texts[key]))
    span = max(len(ordered) - 1, 1)
    places = {key: index / span if len(ordered) > 1 else 0.5 for index, key in enumerate(ordered)}
    return Axis(
        label, tuple((places[key], texts[key]) for key in ordered), tuple(places[token(value)] for value in column)
    )


def _numeric(label: str, column: Sequence[float]) -> Axis:
    finite = sorted({value for value in column if math.isfinite(value)})
    log = is_log(finite)
    low, high = finite[0], finite[-1]
    if low == high:
        places = tuple(0.5 if value == value else NO_VALUE for value in column)
        return Axis(label, ((0.5, _text(low)),), places)

    def place(value: float) -> float:
        if log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    ticks = finite if _apart([place(value) for value in finite]) else nice(low, high, log=log)
    return Axis(
        label + (" (log)" if log else ""),
        tuple((place(value), _text(value)) for value in ticks),
        tuple(place(value) if math.isfinite(value) else NO_VALUE for value in column),
        log,
    )


def is_log(values: Sequence[float]) -> bool:
    """Whether sorted values are spread more evenly by their logarithm, as learning rates are: by where the median lies."""
    low, high = values[0], values[-1]
    if low <= 0 or high < 4 * low:
        return False
    middle = statistics.median(values)
    return abs(math.log(middle / low) / math.log(high / low) - 0.5) < abs((middle - low) / (high - low) - 0.5)


def _apart(places: Sequence[float]) -> bool:
    """Whether ticks at these places can be read."""
    return len(places) <= TICKS_MAX and all(after - before > 0.055 for before, after in pairwise(places))


def nice(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers within ``[low, high]``."""
    if log:
        decades = range(max(math.floor(math.log10(low)), -307), min(math.ceil(math.log10(high)) + 1, 308))  # of float64
        for factors in ((1, 2, 5), (1, 3), (1,)):
            ticks = [10.0**decade * factor for decade in decades for factor in factors]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) <= TICKS_MAX:
                break
        else:
            ticks = ticks[:: math.ceil(len(ticks) / TICKS_MAX)]
        return ticks if len(ticks) > 1 else [low, high]
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    size *= next(factor for factor in (1, 2, 5, 10) if factor * size >= raw)
    first = math.ceil(low / size - 1e-9)
    return [index * size for index in range(first, math.floor(high / size + 1e-9) + 1)]


def _text(value: float) -> str:
    return f"{value:.4g}"
