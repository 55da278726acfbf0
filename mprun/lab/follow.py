"""Whether the loss of a short run follows FP32's as closely as FP32's own seeds follow each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from mprun.lab.reference import Curve
from mprun.numerics.parity import curve_gap

SEEDS = 2  # further seeds of FP32 that say how far curves lie apart by chance
APART = 2.0  # times the largest gap between two of them: no seed is expected to lie so far from another
RESOLUTION = 4.0  # times eps of the format, of the mean loss


@dataclass(frozen=True)
class Tracking:
    """How the loss curve of a set lies to FP32's.

    Attributes:
        passes: whether it tracks FP32.
        why: what is wrong, or how far apart they are; one line.
        gap: root mean square between the smoothed curves; ``limit`` what it may be; ``spread`` the largest between FP32's seeds.
        curve: the run.
    """

    passes: bool
    why: str
    gap: float
    limit: float
    spread: float
    curve: Curve


def follow(
    losses: Sequence[float], others: Callable[[], Sequence[Curve]], curve: Curve, *, tolerance: float, eps: float
) -> Tracking:
    """Hold a curve against FP32's.

    Args:
        losses: of the FP32 run.
        others: gives FP32 runs of other seeds, asked for where they are needed.
        curve: of the candidate.
        tolerance: scales what may lie between them.
        eps: of the candidate's format.
    """
    nan, steps = math.nan, len(losses)
    if curve.status != "ok":
        return Tracking(False, f"a run of {steps} steps: {curve.error}", nan, nan, nan, curve)
    spread = max(_gap(a, b) for a, b in combinations([losses, *(other.losses for other in others())], 2))
    gap = _gap(losses, curve.losses)
    limit = tolerance * max(APART * spread, RESOLUTION * eps * sum(map(abs, losses)) / steps)
    why = f"the loss curve of {steps} steps lies {gap:.2g} from FP32's, {gap / limit:.2g} of what seeds explain"
    return Tracking(gap <= limit, why, gap, limit, spread, curve)


def _gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square between two smoothed loss curves, over the steps that both have."""
    found = curve_gap({0: (range(len(a)), a)}, {0: (range(len(b)), b)})
    return math.inf if found is None else found.rms
