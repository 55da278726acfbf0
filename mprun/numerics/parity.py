"""A stated test of parity of final metrics; beside it (``gaps``) SQNR, relative error, and the gap of loss curves.

**Parity is non-inferiority.** "No difference was found" says little after three seeds. So it is the other way round: a policy
passes once its deficit is *shown* to be below a margin, fails once it is shown to be real *and* larger than the margin, and
is undecided as long as the seeds say neither::

    deficit  d = how much worse the mean of the candidate is than that of the baseline, in the metric's own unit
    margin   M = max(floor, factor * s_b)              s_b: standard deviation of the baseline over its own seeds
    pass     d + t(96 %, Welch)  * sqrt(s_b^2/n + s_c^2/m) <= M     (95 % where there are no pairs)
        or   d'+ t(99 %, k - 1)  * s_pairs / sqrt(k)       <= M     d': over the k seeds that both have run
    fail     d - t(97.5 %, pooled) * s * sqrt(1/n + 1/m) > 0   and   d > M

Two runs of one seed have initialisation and batches in common, but another rounding sends them apart within some hundred
steps. After a long run next to nothing is left of the correlation, and pairing would cost half of the degrees of freedom;
after a short one, seeds differ far more than precisions do, and only pairs can tell. Which is which is not known beforehand,
and may not be chosen by the result. So a policy may pass by either, and the error of 5 % is shared: 4 for the spread of the two
groups (Welch: nothing is assumed of the candidate's), 1 for the pairs. To fail is to refuse "the candidate is the baseline with
other seeds", under which both have one spread: it is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mprun.numerics.gaps import CurveGap, curve_gap, energy_db, relative_error, smooth, sqnr_db
from mprun.numerics.student import t_quantile

__all__ = ["CurveGap", "Parity", "curve_gap", "energy_db", "floor_of", "higher_is_better", "judge", "non_inferiority",
           "relative_error", "smooth", "sqnr_db", "t_quantile"]  # fmt: skip

Array = NDArray[np.float64]

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
HIGHER_IS_BETTER = ("top1",)
TOP1_FLOOR, LOSS_FLOOR_FRAC = 0.01, 0.01  # one point of top-1; one percent of the baseline's loss
SPREAD_FACTOR, CONFIDENCE = 2.0, 0.95
# The part of the error that is spent on pairs.
PAIRS_SHARE = 0.2
# A collapse to chance needs no test: where the baseline is this many margins better than chance, and the candidate keeps less
# than this part of that, or less than a margin. (What is not exactly chance: a model that only knows how frequent classes are.)
COLLAPSE_MARGINS, COLLAPSE_FRAC = 4.0, 0.1
MOST_SEEDS = 100


@dataclass(frozen=True)
class Parity:
    """What the test says of one candidate.

    Attributes:
        outcome: ``pass``, ``fail`` or ``undecided``.
        reason: why, in a sentence without numbers of the table; empty where the numbers say it.
        deficit: how much worse the candidate's mean is, in the metric's unit; below 0 it is better. NaN where there is none.
        low: lower confidence bound of the deficit (97.5 %); NaN where there are too few seeds.
        high: upper confidence bound (95 %), the lower one of the two ways.
        paired: whether that is the one over pairs.
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
    paired: bool = False


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
    pairs: Sequence[tuple[float, float]] = (),
) -> Parity:
    """The test of the module's docstring, on finite final metrics, one a seed, in any order.

    Args:
        baseline: final metrics of the baseline.
        candidate: those of the candidate.
        higher: more is better.
        floor: of the margin, in the metric's unit.
        factor: how many standard deviations of the baseline's seeds the margin is at least.
        confidence: of the upper bound; the lower one has half its error.
        pairs: baseline and candidate of every seed that both have run.
    """
    b, c = np.sort(np.asarray(baseline, dtype=np.float64)), np.sort(np.asarray(candidate, dtype=np.float64))
    if not len(b) or not len(c):
        return Parity(UNDECIDED, "no run to judge by")
    sign = 1 if higher else -1
    deficit = float(np.mean(b) - np.mean(c)) * sign
    s_b, s_c = _std(b), _std(c)
    margin = max(floor, factor * s_b) if len(b) > 1 else floor
    found = Parity(UNDECIDED, "", deficit, margin=margin, baseline_std=s_b, candidate_std=s_c)
    if len(b) < 2 or len(c) < 2:
        return replace(found, reason="one seed says nothing of the spread", seeds_needed=2)
    gaps = np.sort(np.array([one - other for one, other in pairs]) * sign)
    spreads = Spreads(deficit, s_b, s_c, float(np.mean(gaps)) if len(gaps) > 1 else math.nan, _std(gaps))
    low, high, paired = spreads.bounds(len(b), len(c), len(gaps), confidence)
    outcome = _decide(low, high, deficit, margin)
    found = replace(found, outcome=outcome, low=low, high=high, paired=paired)
    if outcome != UNDECIDED:
        return found
    for n in range(max(len(b), len(c)) + 1, MOST_SEEDS + 1):
        low, high, _ = spreads.bounds(n, n, n if len(gaps) > 1 else 0, confidence)
        if _decide(low, high, deficit, margin) != UNDECIDED:
            found = replace(found, seeds_needed=n)
            break
    return replace(found, reason="the spread over the seeds is too large for so few")


def _std(values: Array) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _decide(low: float, high: float, deficit: float, margin: float) -> str:
    # A difference of sums that should be 0 can be 1e-17: a margin of 0 is not missed for that.
    if high <= margin + 1e-12:
        return PASS
    return FAIL if low > 0 and deficit > margin else UNDECIDED


@dataclass(frozen=True)
class Spreads:
    """What the bounds are made of: the deficit, the two standard deviations, mean and standard deviation over pairs."""

    deficit: float
    s_b: float
    s_c: float
    pair_mean: float
    pair_std: float

    def bounds(self, n: int, m: int, k: int, confidence: float) -> tuple[float, float, bool]:
        """Lower bound (pooled, half the error), upper bound (Welch or pairs), and whether the upper one is that of pairs.

        Args:
            n: seeds of the baseline.
            m: seeds of the candidate.
            k: seeds of both; fewer than 2: there are no pairs.
            confidence: of the upper bound.
        """
        v_b, v_c = self.s_b**2 / n, self.s_c**2 / m
        wide = math.sqrt(v_b + v_c)
        if wide == 0:
            return self.deficit, self.deficit, False
        error = 1 - confidence
        share = PAIRS_SHARE if k > 1 else 0.0
        df = (v_b + v_c) ** 2 / (v_b**2 / (n - 1) + v_c**2 / (m - 1))
        pooled = math.sqrt(((n - 1) * self.s_b**2 + (m - 1) * self.s_c**2) / (n + m - 2) * (1 / n + 1 / m))
        low = self.deficit - t_quantile(1 - error / 2, n + m - 2) * pooled
        # Degrees of freedom are rounded down, which is to the safe side, so that quantiles are found again in the cache.
        high = self.deficit + t_quantile(1 - error * (1 - share), max(math.floor(df * 20) / 20, 1.0)) * wide
        if k < 2:
            return low, high, False
        by_pairs = self.pair_mean + t_quantile(1 - error * share, k - 1) * self.pair_std / math.sqrt(k)
        return low, min(high, by_pairs), by_pairs < high


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
    pairs = [
        (b, c) for seed, c in candidate.items() if math.isfinite(c) and math.isfinite(b := baseline.get(seed, math.nan))
    ]
    found = non_inferiority(good, theirs, higher=higher, floor=floor, factor=factor, confidence=confidence, pairs=pairs)
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
    if ours > COLLAPSE_MARGINS * found.margin and other <= max(found.margin, COLLAPSE_FRAC * ours):
        return replace(found, outcome=FAIL, reason="hardly better than chance, and the baseline is", seeds_needed=None)
    return found
