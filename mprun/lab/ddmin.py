"""Delta debugging: the smallest part of a list that still passes a test.

``ddmin`` is the minimising algorithm of Zeller and Hildebrandt (Simplifying and Isolating Failure-Inducing Input, IEEE
Transactions on Software Engineering 28(2), 2002): split what passes into n parts; go on with a part that passes alone, or with
what is left without a part if that passes, or split finer. The test need not be monotone: a set may fail though a part of it
passes. What comes out passes and is *1-minimal*: without any single one of its items it fails. It takes at most m^2 + 3m tests
for m items, and some 2 log2(m) where one item is enough.

1-minimal is not smallest: {b, c} can be 1-minimal where {a} passes too. :func:`minimise` therefore looks at small sets of
well-ranked items first, at growing prefixes of the ranking next, and afterwards at every single item, and at pairs of the best
ranked: where one item is enough it finds it, whatever the ranking, unless the budget ends before. A result says what is known of
it: ``one_minimal``, and ``smallest`` where every cheaper set was tested or cannot exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

Items = tuple[str, ...]
Test = Callable[[Items], bool]

FIRST = 4  # so many of the best-ranked are tried alone and in pairs before anything else
PAIRED = 8  # so many afterwards, if the result is larger than a pair
ENUMERATED = 20_000  # so many sets at most are looked up to say that a result is the smallest


class BudgetSpentError(Exception):
    """No further test is allowed."""


class Trials:
    """A test function with a memory and a budget; what is asked twice is answered once.

    Args of the constructor:
        order: all items; sets are handed to the test in this order.
        test: whether a set passes.
        budget: how many sets may be tested.
        cost: of a set, what is to be minimised.
        tell: called after every test, with the set and whether it passed.
    """

    def __init__(
        self,
        order: Sequence[str],
        test: Test,
        *,
        budget: int,
        cost: Callable[[Items], int] = len,
        tell: Callable[[Items, bool], None] | None = None,
    ) -> None:
        """See the class."""
        self.order = {item: place for place, item in enumerate(order)}
        self.test = test
        self.budget = budget
        self.cost = cost
        self.tell = tell
        self.answers: dict[frozenset[str], bool] = {}
        self.best: Items | None = None

    @property
    def count(self) -> int:
        """Sets tested so far."""
        return len(self.answers)

    def __call__(self, items: Iterable[str]) -> bool:
        """Whether ``items`` pass.

        Raises:
            BudgetSpentError: nobody has tested them, and the budget is spent.
        """
        key = frozenset(items)
        if key not in self.answers:
            if self.count >= self.budget:
                raise BudgetSpentError
            ordered = self.sorted(key)
            passes = self.answers[key] = self.test(ordered)
            if passes and (self.best is None or self.cost(ordered) < self.cost(self.best)):
                self.best = ordered
            if self.tell is not None:
                self.tell(ordered, passes)
        return self.answers[key]

    def sorted(self, items: Iterable[str]) -> Items:
        """``items`` in the order of the ranking."""
        return tuple(sorted(items, key=lambda item: (self.order.get(item, len(self.order)), item)))

    def failed(self, items: Iterable[str]) -> bool:
        """Whether ``items`` were tested and failed."""
        return self.answers.get(frozenset(items)) is False


@dataclass(frozen=True)
class Minimum:
    """What a minimisation found.

    Attributes:
        items: a set that passes.
        one_minimal: it was tested without each single item, and fails without any of them.
        smallest: every set of lower cost was tested, and failed.
        budget_spent: the search ended because no further test was allowed.
    """

    items: Items
    one_minimal: bool
    smallest: bool
    budget_spent: bool


def ddmin(items: Sequence[str], trials: Callable[[Iterable[str]], bool]) -> Items:
    """A 1-minimal part of ``items``, which must pass as a whole.

    Raises:
        BudgetSpentError: see :class:`Trials`.
    """
    current, parts = tuple(items), 2
    while current:
        parts = min(parts, len(current))
        pieces = split(current, parts)
        smaller = next((piece for piece in pieces if len(piece) < len(current) and trials(piece)), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        rests = ([item for item in current if item not in piece] for piece in pieces)
        rest = next((rest for rest in rests if trials(rest)), None)
        if rest is not None:
            current, parts = tuple(rest), max(parts - 1, 2)
        elif parts == len(current):
            break
        else:
            parts *= 2
    return current


def split(items: Items, parts: int) -> list[Items]:
    """``items`` in ``parts`` pieces of nearly equal length, in order."""
    borders = [len(items) * part // parts for part in range(parts + 1)]
    return [items[low:high] for low, high in pairwise(borders)]


def minimise(ranked: Sequence[str], trials: Trials, *, singles: bool = True) -> Minimum | None:
    """The smallest passing part of ``ranked`` that the budget can find; None if none is known to pass.

    Args:
        ranked: most suspect first.
        trials: the test; what it knows already costs nothing.
        singles: whether to try every item alone where all of them together fail, which a test that is not monotone allows.
    """
    found: Items | None = None
    try:
        found = _first(ranked, trials, singles=singles)
        if found is not None:
            found = _improved(found, ranked, trials)
        spent = False
    except BudgetSpentError:
        spent = True
        inside = [items for items, passes in trials.answers.items() if passes and items <= set(ranked)]
        found = min(map(trials.sorted, inside), key=trials.cost, default=None)
    return None if found is None else minimum(found, ranked, trials, spent=spent)


def minimum(found: Items, ranked: Sequence[str], trials: Trials, *, spent: bool) -> Minimum:
    """``found`` with what the tests so far say of it."""
    one_minimal = all(trials.failed(item for item in found if item != left) for left in found)
    return Minimum(found, one_minimal, _is_smallest(found, ranked, trials), spent)


def _first(ranked: Sequence[str], trials: Trials, *, singles: bool) -> Items | None:
    """A 1-minimal passing set: nothing, one or two of the best-ranked, or what ddmin makes of a prefix of the ranking."""
    if trials(()):
        return ()
    for size in (1, 2):
        for items in combinations(ranked[:FIRST], size):
            if trials(items):
                return ddmin(items, trials)
    size = FIRST
    while True:
        if trials(ranked[:size]):
            return ddmin(ranked[:size], trials)
        if size >= len(ranked):
            break
        size = min(2 * size, len(ranked))
    return next(((item,) for item in ranked if trials((item,))), None) if singles else None


def _improved(found: Items, ranked: Sequence[str], trials: Trials) -> Items:
    """A cheaper set than ``found`` among all single items, and pairs of the best-ranked and of its own; else ``found``."""
    near = trials.sorted({*ranked[:PAIRED], *found})
    for size, pool in ((1, tuple(ranked)), (2, near)):
        if size >= len(found):
            break
        for items in combinations(pool, size):
            if trials.cost(items) < trials.cost(found) and trials(items):
                return items
    return found


def _is_smallest(found: Items, ranked: Sequence[str], trials: Trials) -> bool:
    """Whether every set that could cost less is known to fail. A set costs at least as much as it has items."""
    limit = trials.cost(found)
    if sum(comb(len(ranked), size) for size in range(limit)) > ENUMERATED:
        return False
    return all(
        trials.failed(items)
        for size in range(limit)
        for items in combinations(ranked, size)
        if trials.cost(items) < limit
    )
