"""The verdict of a parity test in words, and metrics in the unit that people use for them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mprun.numerics.parity import FAIL, PASS, Parity, higher_is_better
from mprun.report.summary import number_text


def points(value: float, metric: str, *, sign: bool = False) -> str:
    """A value of ``metric``, or a difference of two: top-1 in points (hundredths), a loss as it is."""
    if not math.isfinite(value):
        return "-"
    if higher_is_better(metric):
        return f"{100 * value:+.2f}" if sign else f"{100 * value:.2f}"
    return f"{value:+.3g}" if sign else number_text(value)


def unit(metric: str) -> str:
    """What a difference of ``metric`` is counted in."""
    return "points" if higher_is_better(metric) else f"of {metric}"


def sentence(parity: Parity, metric: str, broke: Sequence[str] = ()) -> str:
    """Why the verdict is what it is, in one line.

    Args:
        parity: of a candidate.
        metric: by which it was judged.
        broke: how its runs broke down, if some did.
    """
    name, margin = unit(metric), points(parity.margin, metric)
    if parity.outcome == FAIL and "broke down" in parity.reason:
        return "; ".join([parity.reason, *broke[:1]])
    if parity.outcome == FAIL and parity.reason:
        return f"{parity.reason}: {points(parity.deficit, metric)} {name} worse"
    if parity.outcome == FAIL:
        return f"{points(parity.deficit, metric)} {name} worse, at least {points(parity.low, metric)}; margin {margin}"
    if parity.outcome == PASS:
        way = "worse" if parity.high > 0 else "better"
        return (
            f"at most {points(abs(parity.high), metric)} {name} worse; margin {margin}"
            if way == "worse"
            else (f"better, by at least {points(-parity.high, metric)} {name}")
        )
    if math.isnan(parity.low):
        return parity.reason + (f": give compare.seeds={parity.seeds_needed}" if parity.seeds_needed else "")
    more = (
        f"about {parity.seeds_needed} seeds would decide, if deficit and spread stay"
        if parity.seeds_needed
        else "more seeds would hardly decide: the deficit is about the margin"
    )
    between = (
        f"between {points(parity.low, metric, sign=True)} and {points(parity.high, metric, sign=True)} {name} worse"
    )
    if parity.seeds_needed is None and parity.reason.startswith(("the baseline", "no run")):
        return parity.reason
    return f"{between}, margin {margin}: {more}"
