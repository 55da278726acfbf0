"""Delta debugging on predicates of every kind: what comes out passes, is 1-minimal, and takes a bounded number of tests."""

from __future__ import annotations

from itertools import chain, combinations
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.lab.ddmin import BudgetSpentError, Trials, ddmin, minimise, split

NAMES = [chr(ord("a") + i) for i in range(12)]


def subsets(items):
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


@st.composite
def monotone(draw):
    """Items, and a test that any of some sets is contained."""
    items = NAMES[: draw(st.integers(1, 12))]
    cures = draw(st.lists(st.sets(st.sampled_from(items), min_size=1), min_size=1, max_size=3))
    return items, lambda given: any(cure <= set(given) for cure in cures)


@st.composite
def arbitrary(draw):
    """Items, and a test whose answers are drawn set by set: no rule at all, but the whole passes and nothing does not."""
    items = NAMES[: draw(st.integers(1, 6))]
    seed = draw(st.integers(0, 2**30))
    density = draw(st.sampled_from([1, 2, 3]))
    table = {frozenset(s): crc32(repr((seed, s)).encode()) % 4 < density for s in subsets(items)}
    table[frozenset(items)], table[frozenset()] = True, False
    return items, lambda given: table[frozenset(given)]


@settings(max_examples=200, deadline=None)
@given(st.one_of(monotone(), arbitrary()))
def test_ddmin_passes_is_one_minimal_and_its_tests_are_bounded(case):
    items, passes = case
    tests = Trials(items, passes, budget=10**6)
    found = ddmin(items, tests)
    assert passes(found)
    assert not any(passes([item for item in found if item != left]) for left in found)
    assert list(found) == [item for item in items if item in found]  # in the order given
    assert tests.count <= len(items) ** 2 + 3 * len(items)


@settings(max_examples=200, deadline=None)
@given(st.one_of(monotone(), arbitrary()))
def test_minimise_is_never_wrong_about_itself(case):
    items, passes = case
    tests = Trials(items, passes, budget=10**6)
    result = minimise(items, tests)
    assert result is not None
    assert passes(result.items)
    brute = min(len(s) for s in subsets(items) if passes(s))
    assert result.one_minimal == (not any(passes([i for i in result.items if i != left]) for left in result.items))
    assert result.one_minimal
    if result.smallest or len(result.items) <= 2:
        assert len(result.items) == brute
    assert not result.budget_spent
    n = len(items)
    assert tests.count <= n**2 + 4 * n + 16 + 10 * 20


@settings(max_examples=200, deadline=None)
@given(st.one_of(monotone(), arbitrary()), st.integers(1, 30))
def test_a_spent_budget_is_kept_and_said(case, budget):
    items, passes = case
    tests = Trials(items, passes, budget=budget)
    result = minimise(items, tests)
    assert tests.count <= budget
    if result is None:
        assert tests.count == budget
    else:
        assert passes(result.items)
        if result.one_minimal:
            assert not any(passes([i for i in result.items if i != left]) for left in result.items)
        assert result.budget_spent or result.one_minimal


def test_one_culprit_first_in_the_ranking_takes_two_tests_and_is_the_smallest():
    items = [f"m{i}" for i in range(100)]
    tests = Trials(items, lambda given: "m0" in given, budget=200)
    result = minimise(items, tests)
    assert result is not None
    assert (result.items, result.one_minimal, result.smallest, tests.count) == (("m0",), True, True, 2)


@pytest.mark.parametrize("culprits", [("m0", "m1"), ("m3", "m70"), ("m97",)])
def test_culprits_anywhere_in_a_hundred_are_found_within_the_default_budget(culprits):
    items = [f"m{i}" for i in range(100)]
    tests = Trials(items, lambda given: set(culprits) <= set(given), budget=200)
    result = minimise(items, tests)
    assert result is not None
    assert (result.items, result.one_minimal, result.smallest) == (culprits, True, True)
    assert tests.count <= 160


def test_ddmin_alone_can_miss_the_smallest_and_minimise_does_not():
    items = list("abcdefgh")
    passes = lambda given: set("abcd") <= set(given) or set(given) == {"g"}  # noqa: E731
    assert ddmin(items, Trials(items, passes, budget=999)) == tuple("abcd")
    result = minimise(items, Trials(items, passes, budget=999))
    assert result is not None
    assert (result.items, result.smallest) == (("g",), True)


def test_costs_decide_not_numbers():
    cost = {"block": 9, "x": 1, "y": 1, "z": 1}
    items = ["block", "x", "y", "z"]
    tests = Trials(
        items, lambda s: "block" in s or {"x", "y", "z"} <= set(s), budget=99, cost=lambda s: sum(cost[i] for i in s)
    )
    result = minimise(items[1:], tests)
    assert result is not None
    assert result.items == ("x", "y", "z")


def test_nothing_needed_and_nothing_suffices():
    assert minimise(["a", "b"], Trials("ab", lambda s: True, budget=9)).items == ()  # type: ignore[union-attr]
    assert minimise(["a", "b"], Trials("ab", lambda s: False, budget=9)) is None


def test_a_repeated_question_costs_nothing_and_an_answer_beyond_the_budget_is_refused():
    asked = []
    tests = Trials("ab", lambda s: bool(asked.append(s)), budget=1)
    assert not tests("ba")
    assert not tests("ab")
    assert asked == [("a", "b")]
    with pytest.raises(BudgetSpentError):
        tests("a")


def test_pieces_are_nearly_equal():
    assert [len(p) for p in split(tuple("abcdefgh"), 3)] == [2, 3, 3]
