"""How far apart two numerics are: SQNR and relative error of tensors, and the gap of loss curves. float64, pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

GRID = 200  # points of the common axis of curves


def sqnr_db(reference: ArrayLike, candidate: ArrayLike) -> float:
    """Signal to quantisation noise: 10 log10(sum r^2 / sum (r - c)^2), in dB.

    ``inf`` for equal arrays, ``-inf`` where the candidate is not finite, or where the signal is 0 and the noise is not.
    """
    signal, noise = _energies(reference, candidate)
    return energy_db(signal, noise)


def energy_db(signal: float, noise: float) -> float:
    """SQNR in dB from two sums of squares; see :func:`sqnr_db`."""
    if not math.isfinite(noise) or not math.isfinite(signal):
        return -math.inf
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def relative_error(reference: ArrayLike, candidate: ArrayLike) -> float:
    """Norm of the difference over the norm of the reference; ``inf`` where the candidate is not finite, 0 for two zeros."""
    signal, noise = _energies(reference, candidate)
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if math.isfinite(noise) and signal > 0 else math.inf


def _energies(reference: ArrayLike, candidate: ArrayLike) -> tuple[float, float]:
    r = np.asarray(reference, dtype=np.float64).ravel()
    c = np.asarray(candidate, dtype=np.float64).ravel()
    if r.shape != c.shape:
        raise ValueError(f"{r.size} numbers cannot be held against {c.size}")
    if not np.isfinite(c).all():
        return float(np.dot(r, r)), math.inf
    return float(np.dot(r, r)), float(np.dot(r - c, r - c))


@dataclass(frozen=True)
class CurveGap:
    """How far the loss curves of a candidate lie from those of the baseline.

    Attributes:
        rms: root mean square of the gap over the common steps, in the loss's unit.
        spread: the same of the baseline's own standard deviation over its seeds; NaN with one seed.
        ratio: ``rms / spread``; NaN with one seed.
        last_frac: gap over the last tenth of the steps, as a fraction of the baseline's mean there; above 0 is worse.
        worst_step: where the gap is largest.
        runs: how many curves of the candidate count: where seeds can be paired, those that are.
    """

    rms: float
    spread: float
    ratio: float
    last_frac: float
    worst_step: float
    runs: int


def curve_gap(
    baseline: Mapping[int, tuple[Sequence[float], Sequence[float]]],
    candidate: Mapping[int, tuple[Sequence[float], Sequence[float]]],
) -> CurveGap | None:
    """The gap of smoothed curves on the steps that all of them have.

    Curves *are* paired by seed where they can be: two runs of one seed see the same batches, whose noise cancels.

    Args:
        baseline: by seed, ascending steps and the loss at each; NaN and infinity are left out.
        candidate: the same.

    Returns:
        None where either has no curve, or they have no step in common.
    """
    base = {seed: found for seed, curve in baseline.items() if (found := _finite(*curve)) is not None}
    other = {seed: found for seed, curve in candidate.items() if (found := _finite(*curve)) is not None}
    if not base or not other:
        return None
    curves = [*base.values(), *other.values()]
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if start > end:
        return None
    grid = np.linspace(start, end, GRID) if end > start else np.array([start])
    b = {seed: np.interp(grid, x, y) for seed, (x, y) in base.items()}
    c = {seed: np.interp(grid, x, y) for seed, (x, y) in other.items()}
    both = [seed for seed in c if seed in b]
    mean_b = np.mean([*b.values()], axis=0)
    gap = np.mean([c[s] - b[s] for s in both], axis=0) if both else np.mean([*c.values()], axis=0) - mean_b
    spread = math.nan
    if len(b) > 1:
        spread = float(np.sqrt(np.mean(np.var([*b.values()], axis=0, ddof=1))))
    rms = float(np.sqrt(np.mean(gap**2)))
    tail = max(len(grid) // 10, 1)
    level = float(np.mean(np.abs(mean_b[-tail:])))
    last = float(np.mean(gap[-tail:])) / level if level > 0 else math.nan
    ratio = rms / spread if spread > 0 else math.nan
    return CurveGap(rms, spread, ratio, last, float(grid[int(np.argmax(np.abs(gap)))]), len(both or c))


def _finite(x: Sequence[float], y: Sequence[float]) -> tuple[Array, Array] | None:
    """The finite points of a curve, smoothed; None without any."""
    steps, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    there = np.isfinite(steps) & np.isfinite(values)
    return (steps[there], smooth(values[there])) if there.any() else None


def smooth(values: Array, width: int | None = None) -> Array:
    """Centred moving mean over ``width`` points (a twentieth of them, odd); at the ends over those that there are.

    Each window is summed by itself: differences of running sums would lose every loss that follows a spike of 1e18.
    """
    window = np.ones(width or len(values) // 20 | 1)
    half = len(window) // 2
    sums, counts = (np.convolve(x, window)[half : half + len(values)] for x in (values, np.ones(len(values))))
    means: Array = sums / counts
    return means
