"""The local error of one module under a policy: the numbers, where rounding ends to explain them, and the words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mprun.numerics.formats import Format

# How far below what one rounding leaves (:func:`rounding_db`) a module is no longer explained by rounding. Sums that cancel cost
# some 10 dB, an input of 3 digits less than the format has 20. A gradient loses more: the slope of a ReLU or a maximum jumps, so
# that the few elements which rounding moves across the edge are wrong altogether (25 dB in a residual block in FP16).
BEYOND_DB, GRADIENT_BEYOND_DB = 45.0, 65.0
# Below this hardly anything is left of a gradient, in any format.
LEAST_GRADIENT_DB = 3.0


@dataclass(frozen=True)
class ModuleError:
    """What a module does to numbers under a policy, worst over the states.

    Attributes:
        path: dotted path, empty for the model itself.
        cls: name of its class.
        forward_sqnr_db: of its outputs; inf without an error.
        grad_sqnr_db: of the gradients of its inputs or of its parameters, whichever is worse.
        nonfinite: what became inf or NaN though it is finite in FP32: ``input`` (by the cast), ``output``, ``gradient``; or
            ``error``: the module raised. Empty for nothing.
        own: it is :attr:`beyond` rounding and nothing inside it is: its own operation is the culprit.
        beyond: it is wrong by far more than rounding explains, or not finite.
        why: one line.
        input_amax: largest magnitude that it is given in FP32; ``output_amax`` likewise.
    """

    path: str
    cls: str
    forward_sqnr_db: float
    grad_sqnr_db: float
    nonfinite: str
    own: bool
    beyond: bool
    why: str
    input_amax: float
    output_amax: float


def rounding_db(form: Format) -> float:
    """SQNR of numbers near 1 that were rounded to ``form`` once: ``1 / (eps^2 / 12)``, the error uniform within half an ulp.

    Numbers of all mantissas have some 3 dB more: an ulp is largest beside a number just above a power of two.
    """
    return 20 * math.log10(1 / form.eps) + 10.8


def why_of(
    nonfinite: str, error: str, forward: float, backward: float, into: float, out: float, form: Format, scale: float
) -> str:
    """One line about what is wrong with a module; empty if nothing is."""
    name = {"float16": "FP16", "bfloat16": "BF16"}.get(form.name, form.name)
    if nonfinite == "error":
        return f"it raises: {error}"
    for what, amax in (("input", into), ("output", out)):
        if nonfinite in ("input", "output") and amax >= form.overflow:
            return f"{what} reaches {amax:.2g}, {amax / form.max:.2g} times {name}'s largest number"
    if nonfinite == "output":
        return f"an operation inside it overflows {name}: inputs reach {into:.2g}, outputs {out:.2g} in FP32"
    if nonfinite == "gradient":
        return f"its gradients times {scale:g} overflow {name}"
    if forward < rounding_db(form) - BEYOND_DB:
        return (
            f"its output is wrong in {name}: {_db(forward)} of {rounding_db(form):.0f} dB, with inputs up to {into:.2g}"
        )
    if backward >= least_gradient_db(form):
        return ""
    return f"its gradients are wrong in {name} at scale {scale:g}: {_db(backward)} of {rounding_db(form):.0f} dB"


def least_gradient_db(form: Format) -> float:
    """The SQNR below which the gradient of a module is no longer explained by rounding."""
    return max(rounding_db(form) - GRADIENT_BEYOND_DB, LEAST_GRADIENT_DB)


def _db(value: float) -> str:
    return f"{value:.0f} dB" if math.isfinite(value) else "no signal left"
