"""Long curves made short without losing a spike: of each pixel column the lowest and the highest point are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

COLUMNS = 900  # a plot is about that many pixels wide


def thinned(x: Array, y: Array, columns: int = COLUMNS) -> tuple[Array, Array]:
    """At most about ``3 * columns`` points of a curve.

    Args:
        x: float64 of shape (n,), ascending.
        y: float64 of shape (n,); NaN and infinity are gaps, and a column that has one keeps one.
        columns: into how many parts of equal width the x axis is cut.

    Returns:
        Points of the curve, in order: the first and the last, and of each column the lowest, the highest and a gap.
    """
    keep = kept(x, y, columns)
    return x[keep], y[keep]


def kept(x: Array, y: Array, columns: int = COLUMNS) -> NDArray[np.bool_]:
    """Which points of a curve :func:`thinned` keeps."""
    if len(x) <= 3 * columns:
        return np.ones(len(x), dtype=bool)
    width = (x[-1] - x[0]) or 1.0
    column = np.minimum(((x - x[0]) / width * columns).astype(int), columns - 1)
    finite = np.isfinite(y)
    keep = np.zeros(len(x), dtype=bool)
    keep[[0, -1]] = True
    borders = np.flatnonzero(np.diff(column)) + 1
    for part in np.split(np.arange(len(x)), borders):
        there = part[finite[part]]
        if len(there):
            keep[there[np.argmin(y[there])]] = keep[there[np.argmax(y[there])]] = True
        if len(there) < len(part):
            keep[part[~finite[part]][0]] = True
    return keep
