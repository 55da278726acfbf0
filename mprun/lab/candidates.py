"""Which modules can be put into FP32, in what order they are suspected, and what a set of them costs.

A candidate owns parameters or computes something itself: a leaf, or a container whose own ``forward`` adds, normalises or
multiplies; where FP32 modules give half back, any container, since its rule keeps numbers FP32 between what is inside. A rule
covers everything inside a module, so a container costs as many modules as it covers; leaves come first, and containers only
where no set of what is inside them will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mprun.lab.local import ModuleError

ROOT = "**"  # the rule for everything; the root's own path is empty, which no rule can name


@dataclass(frozen=True)
class Candidate:
    """A module that a rule can name.

    Attributes:
        path: dotted path, the rule that names it.
        cls: name of its class.
        level: 0 for a leaf, otherwise one more than the highest candidate inside it.
        inside: candidates that its rule covers too, itself not counted.
    """

    path: str
    cls: str
    level: int
    inside: tuple[str, ...]


def candidates(rows: Sequence[dict[str, Any]], *, half_borders: bool = False) -> list[Candidate]:
    """The candidates of a table of modules (:func:`~mprun.training.observe.observe`), in module order. The root is none.

    Args:
        rows: of the model in FP32.
        half_borders: what an FP32 module gives goes back to half, as in ``master`` mode. A container then does something though
            it computes nothing: numbers stay FP32 between what is inside. So one with two or more candidates inside is one too.
    """
    working = [row["module"] for row in rows if row["module"] and (row["compute_dtype"] or row["param_dtype"])]
    named = [
        row
        for row in rows
        if row["module"] in working
        or (half_borders and row["module"] and sum(path.startswith(f"{row['module']}.") for path in working) > 1)
    ]
    paths = [row["module"] for row in named]
    levels: dict[str, int] = {}
    found: list[Candidate] = []
    for row in sorted(named, key=lambda row: -row["module"].count(".")):  # from the inside out
        inside = tuple(path for path in paths if path.startswith(f"{row['module']}."))
        levels[row["module"]] = 1 + max((levels[path] for path in inside), default=-1)
        found.append(Candidate(row["module"], row["class"], levels[row["module"]], inside))
    return sorted(found, key=lambda candidate: paths.index(candidate.path))


def rank(found: Sequence[Candidate], errors: Iterable[ModuleError]) -> list[Candidate]:
    """``found``, most suspect first: those whose own operations are wrong, other wrong leaves, then by SQNR; leaves first."""
    by_path = {error.path: error for error in errors}

    def key(place: int) -> tuple[Any, ...]:
        candidate = found[place]
        error = by_path.get(candidate.path)
        if error is None:
            return True, True, candidate.level, 0.0, place
        sqnr = min(error.forward_sqnr_db, error.grad_sqnr_db)
        return not error.own, not error.beyond or candidate.level > 0, candidate.level, sqnr, place

    return [found[place] for place in sorted(range(len(found)), key=key)]


def uncovered(items: Iterable[str]) -> tuple[str, ...]:
    """``items`` without those inside of another one."""
    given = list(items)
    return tuple(
        path
        for path in given
        if path == ROOT or (ROOT not in given and not any(path.startswith(f"{other}.") for other in given))
    )


def cost(items: Iterable[str], found: Sequence[Candidate]) -> int:
    """How many candidates ``items`` put into FP32, those inside of them counted."""
    inside = {candidate.path: candidate.inside for candidate in found}
    covered: set[str] = set()
    for path in items:
        covered |= {path, *inside.get(path, ())}
    return len(covered)
