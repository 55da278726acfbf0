"""The parity test by simulation, its properties, SQNR, curve gaps; Student's t against scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mprun.numerics.parity import (
    FAIL,
    PASS,
    UNDECIDED,
    curve_gap,
    floor_of,
    judge,
    non_inferiority,
    relative_error,
    smooth,
    sqnr_db,
    t_quantile,
)

SMALL = st.lists(st.floats(0.2, 0.99), min_size=2, max_size=5)


def outcome(baseline: Sequence[float], candidate: Sequence[float], floor: float = 0.0) -> str:
    return non_inferiority(baseline, candidate, higher=True, floor=floor).outcome


def rates(n: int, deficit: float, *, floor: float, spread: float = 1.0, draws: int = 1500) -> dict[str, float]:
    """How often each outcome happens where the baseline is N(0, 1) and the candidate N(-deficit, spread)."""
    random = np.random.default_rng(n)
    b, c = random.normal(0, 1, (draws, n)), random.normal(-deficit, spread, (draws, n))
    found = [outcome(one, two, floor) for one, two in zip(b.tolist(), c.tolist(), strict=True)]
    return {word: found.count(word) / draws for word in (PASS, FAIL, UNDECIDED)}


@pytest.mark.parametrize("p", [0.6, 0.8, 0.95, 0.975, 0.999])
@pytest.mark.parametrize("df", [1, 1.35, 2, 3.5, 8, 30, 400])
def test_quantiles_of_t_are_scipys(p, df) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9)
    assert t_quantile(1 - p, df) == pytest.approx(-t_quantile(p, df), rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_the_same_distribution_fails_at_most_once_in_forty(n, floor) -> None:
    # 2.5 % by construction; 1,500 draws have a standard error of 0.4 %.
    assert rates(n, 0, floor=floor)[FAIL] <= 0.025 + 3 * 0.004


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_floor_of_three_standard_deviations_gives_no_false_alarm(n) -> None:
    assert rates(n, 0, floor=3.0)[FAIL] <= 0.003


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("floor", [0.0, 2.0, 4.0])
def test_a_deficit_of_the_margin_seldom_passes(n, floor) -> None:
    # 5 %, and up to 7.5 % where the floor is just the multiple of the spread: the larger of the two is then too large on average.
    assert rates(n, max(floor, 2.0), floor=floor)[PASS] <= (0.075 if floor == 2.0 else 0.05) + 3 * 0.006


def test_power() -> None:
    # A policy as good as the baseline, with a floor of three standard deviations (the residual net on digits, one point).
    assert rates(3, 0, floor=3.0)[PASS] > 0.8
    assert rates(5, 0, floor=0.0)[PASS] > 0.7
    # One that is ten standard deviations worse.
    assert rates(2, 10, floor=1.0)[FAIL] > 0.9
    assert rates(3, 10, floor=1.0)[FAIL] > 0.99


def paired_rates(n: int, deficit: float, *, correlation: float, floor: float, draws: int = 1500) -> dict[str, float]:
    random = np.random.default_rng(n)
    common, b, c = (random.normal(0, 1, (draws, n)) for _ in range(3))
    own, shared = math.sqrt(1 - correlation), math.sqrt(correlation)
    found = [
        judge(
            dict(enumerate((shared * z + own * x).tolist())),
            dict(enumerate((shared * z + own * y - deficit).tolist())),
            higher=True,
            floor=floor,
        ).outcome
        for z, x, y in zip(common, b, c, strict=True)
    ]
    return {word: found.count(word) / draws for word in (PASS, FAIL, UNDECIDED)}


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.98])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_errors_with_pairs_are_what_they_are_without(n, correlation) -> None:
    assert paired_rates(n, 0, correlation=correlation, floor=1.0)[FAIL] <= 0.025 + 3 * 0.004
    assert paired_rates(n, 4, correlation=correlation, floor=4.0)[PASS] <= 0.05 + 3 * 0.006


def test_pairs_decide_where_seeds_differ_more_than_precisions() -> None:
    alone, paired = rates(3, 0, floor=1.0), paired_rates(3, 0, correlation=0.98, floor=1.0)
    assert alone[PASS] < 0.6
    assert paired[PASS] > 0.8
    found = judge({0: 0.8877, 1: 0.9244, 2: 0.9066}, {0: 0.8877, 1: 0.9199, 2: 0.9055}, higher=True, floor=0.01)
    assert found.outcome == PASS
    assert found.paired


def test_more_seeds_decide_more_often() -> None:
    shares = [rates(n, 0, floor=1.0)[UNDECIDED] for n in (2, 3, 4, 5)]
    assert shares == sorted(shares, reverse=True)


@settings(deadline=None)
@given(SMALL, SMALL, st.randoms())
def test_the_order_of_seeds_does_not_matter(b, c, random) -> None:
    found = non_inferiority(b, c, higher=True, floor=0.01)
    random.shuffle(b)
    random.shuffle(c)
    assert repr(non_inferiority(b, c, higher=True, floor=0.01)) == repr(found)


@settings(deadline=None)
@given(SMALL, SMALL)
def test_a_loss_is_judged_as_its_negative(b, c) -> None:
    one = non_inferiority(b, c, higher=True, floor=0.01)
    other = non_inferiority([-v for v in b], [-v for v in c], higher=False, floor=0.01)
    assert (one.outcome, one.deficit) == (other.outcome, pytest.approx(other.deficit, abs=1e-15))


@settings(deadline=None)
@given(SMALL, SMALL, st.floats(0, 0.5))
def test_a_worse_candidate_is_never_judged_better(b, c, shift) -> None:
    rank = {PASS: 0, UNDECIDED: 1, FAIL: 2}
    before, after = outcome(b, c, 0.01), outcome(b, [v - shift for v in c], 0.01)
    assert rank[after] >= rank[before]


@settings(deadline=None)
@given(SMALL, st.floats(-3, 3))
def test_a_shift_of_everything_changes_nothing(b, shift) -> None:
    found = non_inferiority(b, b[::-1], higher=True, floor=0.01)
    moved = non_inferiority([v + shift for v in b], [v + shift for v in b], higher=True, floor=0.01)
    assert moved.high == pytest.approx(found.high, abs=1e-9)
    assert moved.margin == pytest.approx(found.margin, abs=1e-9)


def test_the_bounds_are_those_of_scipy() -> None:
    b, c = [0.91, 0.93, 0.92, 0.95], [0.90, 0.86, 0.91]
    found = non_inferiority(b, c, higher=True, floor=0.01)
    pooled = stats.ttest_ind(b, c).confidence_interval(0.95)
    welch = stats.ttest_ind(b, c, equal_var=False).confidence_interval(0.90)
    assert found.low == pytest.approx(pooled.low, rel=1e-9)
    assert found.high == pytest.approx(welch.high, rel=5e-3)
    assert found.high >= welch.high
    assert found.margin == pytest.approx(2 * np.std(b, ddof=1))
    pairs = non_inferiority(b, c, higher=True, floor=0.01, pairs=[*zip(b, c, strict=False)])
    gaps = np.array(b[:3]) - np.array(c)
    by_pairs = np.mean(gaps) + stats.t.ppf(0.99, 2) * np.std(gaps, ddof=1) / math.sqrt(3)
    by_groups = stats.ttest_ind(b, c, equal_var=False).confidence_interval(0.92).high
    assert pairs.high == pytest.approx(min(by_pairs, by_groups), rel=5e-3)
    assert pairs.low == found.low


def test_undecided_says_how_many_seeds_would_do() -> None:
    b, c = [0.90, 0.94], [0.91, 0.94]
    found = non_inferiority(b, c, higher=True, floor=0.01)
    assert found.outcome == UNDECIDED
    assert found.seeds_needed is not None
    assert 3 <= found.seeds_needed <= 6
    spread = 0.01 / math.sqrt(2) * 3
    values = [0.92 + spread * v for v in np.linspace(-1, 1, found.seeds_needed)]
    assert non_inferiority(values, values, higher=True, floor=0.01).outcome == PASS


def test_one_seed_decides_nothing_but_a_breakdown_and_a_collapse() -> None:
    one = judge({0: 0.9}, {0: 0.7}, higher=True, floor=0.01, chance=0.1)
    assert (one.outcome, one.seeds_needed) == (UNDECIDED, 2)
    assert judge({0: 0.9}, {0: 0.105}, higher=True, floor=0.01, chance=0.1).outcome == FAIL
    assert judge({0: 0.9}, {0: 0.17}, higher=True, floor=0.01, chance=0.1).outcome == FAIL
    assert judge({0: 0.9}, {0: 0.19}, higher=True, floor=0.01, chance=0.1).outcome == UNDECIDED
    assert judge({0: 0.6}, {0: 2.2}, higher=False, floor=0.01, chance=math.log(10)).outcome == FAIL
    broke = judge({0: 0.9}, {0: math.nan}, higher=True, floor=0.01, chance=0.1)
    assert broke.outcome == FAIL
    assert "seed 0 broke down" in broke.reason


def test_a_breakdown_counts_only_where_the_baseline_did_better() -> None:
    b = {0: 0.90, 1: 0.905, 2: math.nan}
    c = {0: 0.90, 1: 0.906, 2: math.nan}
    assert judge(b, c, higher=True, floor=0.05).outcome == PASS
    assert judge({**b, 2: 0.9}, c, higher=True, floor=0.05).outcome == FAIL
    assert judge({0: math.nan}, {0: math.nan}, higher=True, floor=0.05).outcome == UNDECIDED
    # A seed that the baseline has not run is nothing to fail by.
    assert judge({0: 0.90, 1: 0.905}, c, higher=True, floor=0.05).outcome == PASS


def test_a_baseline_that_has_not_learned_is_said_to() -> None:
    found = judge({0: 0.10, 1: 0.11}, {0: 0.10, 1: 0.11}, higher=True, floor=0.05, chance=0.1)
    assert found.outcome == UNDECIDED
    assert "no better than chance" in found.reason
    loss = judge({0: 2.30, 1: 2.31}, {0: 2.3, 1: 2.3}, higher=False, floor=0.05, chance=math.log(10))
    assert loss.outcome == UNDECIDED


def test_equal_runs_pass_and_a_constant_deficit_fails() -> None:
    assert outcome([0.9, 0.9], [0.9, 0.9], 0.01) == PASS
    assert outcome([0.9, 0.9], [0.9, 0.9], 0.0) == PASS
    assert outcome([0.9, 0.9, 0.9], [0.88, 0.88, 0.88], 0.01) == FAIL
    assert outcome([0.9, 0.9, 0.9], [0.95, 0.97, 0.96], 0.01) == PASS


def test_floors() -> None:
    assert floor_of("val/top1", [0.9]) == 0.01
    assert floor_of("val/loss", [2.0, 4.0, math.nan]) == pytest.approx(0.03)


# --- tensors and curves -----------------------------------------------------------------------------------------------


def test_sqnr_of_a_known_noise() -> None:
    r = np.array([3.0, 4.0])
    assert sqnr_db(r, r + np.array([0.03, 0.04])) == pytest.approx(40)
    assert relative_error(r, r + np.array([0.03, 0.04])) == pytest.approx(0.01)
    assert sqnr_db(r, r) == math.inf
    assert relative_error(r, r) == 0
    assert sqnr_db(r, [3.0, math.inf]) == -math.inf
    assert relative_error(r, [3.0, math.nan]) == math.inf
    assert sqnr_db([0.0], [1.0]) == -math.inf
    assert sqnr_db([0.0], [0.0]) == math.inf
    with pytest.raises(ValueError, match="2 numbers"):
        sqnr_db(r, [1.0])


def test_sqnr_of_rounding_to_half_follows_from_its_mantissa() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    rounded = values.astype(np.float16).astype(np.float64)
    assert sqnr_db(values, rounded) == pytest.approx(20 * 11 * math.log10(2) + 7.3, abs=2)  # 11 significant bits


def test_gap_of_curves_cancels_the_noise_of_the_batches() -> None:
    random, x = np.random.default_rng(0), list(range(1, 401))
    noise = {seed: random.normal(0, 0.2, 400) for seed in range(3)}
    base = {seed: (x, list(2 / np.sqrt(x) + noise[seed])) for seed in range(3)}
    same = {seed: (x, list(np.array(y) + 0.001)) for seed, (_, y) in base.items()}
    found = curve_gap(base, same)
    assert found is not None
    assert found.rms == pytest.approx(0.001)
    assert found.ratio < 0.1
    worse = curve_gap(base, {seed: (x, list(np.array(y) + np.linspace(0, 1, 400))) for seed, (_, y) in base.items()})
    assert worse is not None
    assert worse.ratio > 3
    assert worse.last_frac > 1
    assert worse.worst_step > 380


def test_gap_of_curves_on_the_steps_in_common() -> None:
    base = {0: ([10, 20, 30, 40], [4.0, 3.0, 2.0, 1.0])}
    found = curve_gap(base, {0: ([15, 25], [3.6, math.nan]), 1: ([20, 30], [3.1, 2.1])})
    assert found is None  # one ends at 15 where the other begins at 20
    found = curve_gap(base, {1: ([20, 30], [3.1, 2.1])})
    assert found is not None
    assert found.rms == pytest.approx(0.1)
    assert math.isnan(found.ratio)
    assert found.runs == 1
    found = curve_gap(base, {0: ([10, 40], [4.0, 1.0]), 1: ([10, 40], [9.0, 9.0])})  # seed 1 has no partner
    assert found is not None
    assert (found.runs, found.rms) == (1, pytest.approx(0.0))
    assert curve_gap(base, {}) is None
    assert curve_gap(base, {0: ([1.0], [math.nan])}) is None


def test_smoothing_keeps_a_line_and_the_mean_of_a_constant() -> None:
    line = np.arange(100, dtype=np.float64)
    assert smooth(line)[5:95] == pytest.approx(line[5:95])
    assert smooth(np.full(7, 3.0), 5) == pytest.approx(3.0)
    assert smooth(np.array([1.0, 2.0, 6.0, 3.0]), 3) == pytest.approx([1.5, 3.0, 11 / 3, 4.5])


def test_smoothing_forgets_a_spike() -> None:
    values = np.ones(200)
    values[20] = 1e18
    assert smooth(values)[40:] == pytest.approx(1.0)
