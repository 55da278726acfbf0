"""What a search found, as values: the set, what is known of it, the evidence; and the test that it passed, in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mprun.lab.causes import Cause
from mprun.lab.ddmin import Minimum
from mprun.lab.evaluate import CAP, FLOOR, NOISE, ROUNDING, VANISHED, Evaluation
from mprun.lab.follow import APART, RESOLUTION, SEEDS, Tracking

# The test in words, for result.json.
TEST = (
    "At 0, 1/2 and 1 of search.steps of an FP32 run: loss and gradients are finite, and for every module m with parameters, "
    f"and for all together, |g_m - g32_m| <= tolerance * max({ROUNDING:g} r_m, min({NOISE:g} n_m, {CAP:g} |g32_m|), {FLOOR:g} "
    f"|g32|, {VANISHED:g} G), where G is the largest |g32| of the three, r_m "
    "is the error of FP32 gradients when matrices and all that passes between modules are rounded to the "
    "format's mantissa, and n_m the difference between FP32 gradients of two windows. Then a run of search.steps steps ends "
    "well, and the root mean square gap of its smoothed loss curve to FP32's is at most tolerance times the larger of "
    f"{APART:g} times the largest such gap between two of {SEEDS + 1} FP32 seeds and {RESOLUTION:g} eps of the mean loss."
)


@dataclass(frozen=True)
class Evidence:
    """Why one module must stay FP32: what it does by itself, and what becomes of the run without it."""

    path: str
    cls: str
    alone: str
    without: str


@dataclass(frozen=True)
class Found:
    """What the search found.

    Attributes:
        status: ``found``, ``empty`` (nothing needs FP32), ``none`` (no set suffices: see ``cause``) or ``interrupted``.
        fp32_modules: the set; the best one so far if the budget ended or the search was interrupted; None without any.
        minimum: what is known of it.
        evidence: of each module in it.
        cause: why none suffices.
        loss_scale: a static scale that needs no FP32 module, where the scale was the cause.
        tests: sets that were tested; ``evaluations`` gradients of sets (other scales included), ``runs`` short runs.
        candidates: how many modules could have been chosen.
        tracking: of the set.
        evaluation: of the set.
        seconds: the reference included.
    """

    status: str
    fp32_modules: tuple[str, ...] | None
    minimum: Minimum | None = None
    evidence: tuple[Evidence, ...] = ()
    cause: Cause | None = None
    loss_scale: float | None = None
    tests: int = 0
    evaluations: int = 0
    runs: int = 0
    candidates: int = 0
    tracking: Tracking | None = None
    evaluation: Evaluation | None = None
    seconds: float = 0.0


def as_dict(found: Found) -> dict[str, Any]:
    """``found`` for ``result.json``."""
    content = {key: value for key, value in dataclasses.asdict(found).items() if key not in ("tracking", "evaluation")}
    minimum_of = content.pop("minimum")
    content |= {key: minimum_of[key] for key in ("one_minimal", "smallest", "budget_spent")} if minimum_of else {}
    if found.evaluation is not None:
        content["gradients"] = [
            {
                "step": e.step,
                "loss_scale": e.loss_scale,
                "error": e.error,
                "loss_error": e.loss_error,
                "worst": e.worst,
                "of_limit": e.margin,
            }
            for e in found.evaluation.states
        ]
    if found.tracking is not None:
        t = found.tracking
        content["curve"] = {
            "gap": t.gap,
            "limit": t.limit,
            "spread": t.spread,
            "skips": len(t.curve.skips),
            "why": t.why,
        }
    return content
