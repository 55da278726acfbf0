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
        value = round(100 * value, 2) + 0.0  # no -0.00
        return f"{value:+.2f}" if sign and value else f"{value:.2f}"
    return f"{value:+.3g}" if sign else number_text(value)


def unit(metric: str) -> str:
    """What a difference of ``metric`` is counted in."""
    return "points" if higher_is_better(metric) else f"in {metric}"


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
        return f"{parity.reason}: {_apart(parity.deficit, metric)}"
    if parity.outcome == FAIL:
        return f"{_apart(parity.deficit, metric)}, at least {points(parity.low, metric)}; margin {margin}"
    if parity.outcome == PASS:
        pairs = " (by seeds in pairs)" if parity.paired else ""
        if parity.high < 0:
            return f"better, by at least {points(-parity.high, metric)} {name}{pairs}"
        return f"at most {_apart(parity.high, metric)}{pairs}; margin {margin}"
    if math.isnan(parity.low) or parity.reason.startswith(("the baseline", "no run")):
        return parity.reason + (f": give compare.seeds={parity.seeds_needed}" if parity.seeds_needed else "")
    more = (
        f"about {parity.seeds_needed} seeds would decide, if deficit and spread stay"
        if parity.seeds_needed
        else "more seeds would hardly decide: the deficit is about the margin"
    )
    return f"between {_apart(parity.low, metric)} and {_apart(parity.high, metric)}; margin {margin}; {more}"


def _apart(deficit: float, metric: str) -> str:
    """``0.35 points worse``."""
    return f"{points(abs(deficit), metric)} {unit(metric)} {'worse' if deficit >= 0 else 'better'}"
