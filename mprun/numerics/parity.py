"""How far apart two numerics are: SQNR and relative error of tensors, the gap of loss curves, and a stated test of parity.

**Parity is non-inferiority.** "No difference was found" says little after three seeds. So it is the other way round: a policy
passes once its deficit is *shown* to be below a margin, fails once it is shown to be real *and* larger than the margin, and
is undecided as long as the seeds say neither::

    deficit  d = how much worse the mean of the candidate is than that of the baseline, in the metric's own unit
    margin   M = max(floor, factor * s_b)              s_b: standard deviation of the baseline over its own seeds
    pass     d + t(95 %,   Welch)  * sqrt(s_b^2/n + s_c^2/m) <= M
    fail     d - t(97.5 %, pooled) * s * sqrt(1/n + 1/m) > 0   and   d > M

Seeds are not paired. Two runs of one seed have initialisation and batches in common, but another rounding sends them apart
within some hundred steps: what is left of the correlation buys less than the half of the degrees of freedom that pairing
costs. To fail is to refuse "the candidate is the baseline with other seeds", under which both have one spread: it is pooled.
To pass, nothing is assumed of the candidate's spread: Welch.

Everything here is float64, pure, and imports no torch. The quantiles of Student's t are computed here, because the only other
use of a statistics package would be these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
HIGHER_IS_BETTER = ("top1",)
TOP1_FLOOR, LOSS_FLOOR_FRAC = 0.01, 0.01  # one point of top-1; one percent of the baseline's loss
SPREAD_FACTOR, CONFIDENCE = 2.0, 0.95
# A collapse to chance needs no test: where the baseline is this many margins better than chance, and the candidate not one.
COLLAPSE_MARGINS = 4.0
MOST_SEEDS = 100
GRID = 200


# --- tensors ----------------------------------------------------------------------------------------------------------


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


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurveGap:
    """How far the loss curves of a candidate lie from those of the baseline.

    Attributes:
        rms: root mean square of the gap over the common steps, in the loss's unit.
        spread: the same of the baseline's own standard deviation over its seeds; NaN with one seed.
        ratio: ``rms / spread``; NaN with one seed.
        last_frac: gap over the last tenth of the steps, as a fraction of the baseline's mean there; above 0 is worse.
        worst_step: where the gap is largest.
        runs: how many curves of the candidate count.
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
    return CurveGap(rms, spread, ratio, last, float(grid[int(np.argmax(np.abs(gap)))]), len(c))


def _finite(x: Sequence[float], y: Sequence[float]) -> tuple[Array, Array] | None:
    """The finite points of a curve, smoothed; None without any."""
    steps, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    there = np.isfinite(steps) & np.isfinite(values)
    return (steps[there], smooth(values[there])) if there.any() else None


def smooth(values: Array, width: int | None = None) -> Array:
    """Centred moving mean over ``width`` points (a twentieth of them, odd); at the ends over those that there are."""
    width = width or len(values) // 20 | 1
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    low, high = np.maximum(place - half, 0), np.minimum(place + half + 1, len(values))
    means: Array = (sums[high] - sums[low]) / (high - low)
    return means


# --- the test ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parity:
    """What the test says of one candidate.

    Attributes:
        outcome: ``pass``, ``fail`` or ``undecided``.
        reason: why, in a sentence without numbers of the table; empty where the numbers say it.
        deficit: how much worse the candidate's mean is, in the metric's unit; below 0 it is better. NaN where there is none.
        low: lower confidence bound of the deficit (97.5 %); NaN where there are too few seeds.
        high: upper confidence bound (95 %).
        margin: what counts as material.
        baseline_std: over the baseline's seeds; NaN for one.
        candidate_std: over the candidate's.
        seeds_needed: so many seeds would decide if deficit and spreads stay as they are; None where nothing is to be
            decided, or more than a hundred would not do.
    """

    outcome: str
    reason: str
    deficit: float = math.nan
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan
    baseline_std: float = math.nan
    candidate_std: float = math.nan
    seeds_needed: int | None = None


def higher_is_better(metric: str) -> bool:
    """Whether more of ``metric`` is better: top-1 is, a loss is not."""
    return metric.endswith(HIGHER_IS_BETTER)


def floor_of(metric: str, baseline: Sequence[float]) -> float:
    """The margin's floor where the user states none: one point of top-1, or 1 % of the baseline's mean loss."""
    values = [value for value in baseline if math.isfinite(value)]
    if higher_is_better(metric) or not values:
        return TOP1_FLOOR
    return LOSS_FLOOR_FRAC * abs(float(np.mean(values)))


def non_inferiority(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    higher: bool,
    floor: float,
    factor: float = SPREAD_FACTOR,
    confidence: float = CONFIDENCE,
) -> Parity:
    """The test of the module's docstring, on finite final metrics, one a seed, in any order.

    Args:
        baseline: final metrics of the baseline.
        candidate: those of the candidate.
        higher: more is better.
        floor: of the margin, in the metric's unit.
        factor: how many standard deviations of the baseline's seeds the margin is at least.
        confidence: of the upper bound; the lower one has half its error.
    """
    b, c = np.sort(np.asarray(baseline, dtype=np.float64)), np.sort(np.asarray(candidate, dtype=np.float64))
    if not len(b) or not len(c):
        return Parity(UNDECIDED, "no run to judge by")
    deficit = float(np.mean(b) - np.mean(c)) * (1 if higher else -1)
    s_b, s_c = _std(b), _std(c)
    margin = max(floor, factor * s_b) if len(b) > 1 else floor
    found = Parity(UNDECIDED, "", deficit, margin=margin, baseline_std=s_b, candidate_std=s_c)
    if len(b) < 2 or len(c) < 2:
        return replace(found, reason="one seed says nothing of the spread", seeds_needed=2)
    low, high = _bounds(deficit, s_b, s_c, len(b), len(c), confidence)
    outcome = _decide(low, high, deficit, margin)
    found = replace(found, outcome=outcome, low=low, high=high)
    if outcome != UNDECIDED:
        return found
    needed = next(
        (n for n in range(max(len(b), len(c)) + 1, MOST_SEEDS + 1)
         if _decide(*_bounds(deficit, s_b, s_c, n, n, confidence), deficit, margin) != UNDECIDED),
        None,
    )  # fmt: skip
    return replace(found, reason="the spread over the seeds is too large for so few", seeds_needed=needed)


def _std(values: Array) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _decide(low: float, high: float, deficit: float, margin: float) -> str:
    # A difference of sums that should be 0 can be 1e-17: a margin of 0 is not missed for that.
    if high <= margin + 1e-12:
        return PASS
    return FAIL if low > 0 and deficit > margin else UNDECIDED


def _bounds(deficit: float, s_b: float, s_c: float, n: int, m: int, confidence: float) -> tuple[float, float]:
    """Lower bound (pooled spread, half the error) and upper bound (Welch) of the deficit."""
    v_b, v_c = s_b**2 / n, s_c**2 / m
    wide = math.sqrt(v_b + v_c)
    if wide == 0:
        return deficit, deficit
    welch = (v_b + v_c) ** 2 / (v_b**2 / (n - 1) + v_c**2 / (m - 1))
    pooled = math.sqrt(((n - 1) * s_b**2 + (m - 1) * s_c**2) / (n + m - 2) * (1 / n + 1 / m))
    low = deficit - t_quantile((1 + confidence) / 2, n + m - 2) * pooled
    # Rounded down, which is to the safe side, so that quantiles are found again in the cache.
    high = deficit + t_quantile(confidence, max(math.floor(welch * 20) / 20, 1.0)) * wide
    return low, high


def judge(
    baseline: Mapping[int, float],
    candidate: Mapping[int, float],
    *,
    higher: bool,
    floor: float,
    factor: float = SPREAD_FACTOR,
    confidence: float = CONFIDENCE,
    chance: float | None = None,
) -> Parity:
    """The verdict on a candidate: :func:`non_inferiority`, and what needs no statistics.

    * A run that broke down (NaN here) where the baseline's run of the same seed did not: fail.
    * The baseline has not learned (its mean is not a margin better than chance): undecided, whatever the candidate does.
    * The candidate is at chance level where the baseline is far from it: fail, also with one seed.

    Args:
        baseline: final metric by seed; NaN for a run that broke down. Seeds that have not been run are left out.
        candidate: the same.
        higher: more is better.
        floor: see :func:`non_inferiority`; so are ``factor`` and ``confidence``.
        factor: see above.
        confidence: see above.
        chance: what a model that has learned nothing reaches; None where that is not known.
    """
    good = [value for value in baseline.values() if math.isfinite(value)]
    theirs = [value for value in candidate.values() if math.isfinite(value)]
    broke = sorted(s for s, v in candidate.items() if not math.isfinite(v) and math.isfinite(baseline.get(s, math.nan)))
    found = non_inferiority(good, theirs, higher=higher, floor=floor, factor=factor, confidence=confidence)
    if broke:
        seeds = ", ".join(map(str, broke))
        reason = f"seed{'s' * (len(broke) > 1)} {seeds} broke down where the baseline did not"
        return replace(found, outcome=FAIL, reason=reason, seeds_needed=None)
    if not good:
        return replace(found, outcome=UNDECIDED, reason="no run of the baseline ended well", seeds_needed=None)
    if not theirs:
        return replace(found, outcome=UNDECIDED, reason="no run of it has ended yet", seeds_needed=None)
    if chance is None:
        return found
    sign = 1 if higher else -1
    ours, other = sign * (float(np.mean(good)) - chance), sign * (float(np.mean(theirs)) - chance)
    if ours <= found.margin:
        reason = "the baseline itself is no better than chance: nothing can be said of parity"
        return replace(found, outcome=UNDECIDED, reason=reason, seeds_needed=None)
    if other <= found.margin and ours > COLLAPSE_MARGINS * found.margin:
        return replace(found, outcome=FAIL, reason="no better than chance, and the baseline is", seeds_needed=None)
    return found


# --- Student's t ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The value that Student's t with ``df`` degrees of freedom is below with probability ``p``, 0 < p < 1."""
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        low, high = high, high * 2
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: float) -> float:
    """P(T <= t) for t >= 0: 1 - I_x(df/2, 1/2) / 2 with x = df / (df + t^2)."""
    x = df / (df + t * t)
    return 1 - 0.5 * _beta_frac(df / 2, 0.5, x)


def _beta_frac(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, that of the other side is fast
        return 1 - _beta_frac(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    total = d
    for k in range(1, 500):
        for top in (
            k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k)),
            -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1)),
        ):
            d, c = 1 + top * d, 1 + top / c
            d, c = 1 / (d if abs(d) > tiny else tiny), c if abs(c) > tiny else tiny
            total *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * total / a
