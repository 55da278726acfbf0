"""Facts of a float format, from its two numbers: exponent bits e and mantissa bits m. Imports no torch.

A format with a sign bit, e exponent bits and m mantissa bits holds (bias = 2**(e-1) - 1, the top exponent is inf and NaN)::

    normal      (1 + k / 2**m) * 2**x     k = 0 .. 2**m - 1,  x = 1 - bias .. bias
    subnormal   (k / 2**m) * 2**(1 - bias)

so the spacing of its numbers (the ulp) is 2**(x - m), and never below 2**(1 - bias - m). FP16 spends its bits on the
mantissa, BF16 on the exponent: that is all there is to the choice between precision and range.

FP8 E5M2 is of this layout. E4M3 (torch's ``float8_e4m3fn``) is not: eight bits are too few to give a whole exponent away, so
the top one holds numbers as well, there is no inf, and only the all-ones mantissa is NaN. So x goes up to bias + 1, and the
largest number is 1.75 * 2**8 = 448. What is beyond becomes 448 or NaN, as whoever casts likes (torch has done both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary float format of IEEE 754's layout, or of E4M3's.

    Attributes:
        name: as torch writes the dtype (``tfloat32`` is the input format of a Tensor Core, no dtype).
        exponent_bits: they give the range.
        mantissa_bits: they give the precision; the leading 1 is not stored.
        bytes: what a number takes in memory.
        has_inf: whether the top exponent is inf and NaN; otherwise it holds numbers, but for one NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bytes: int
    has_inf: bool = True

    @property
    def _bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def max(self) -> float:
        """The largest finite number."""
        if self.has_inf:
            return (2.0 - self.eps) * 2.0**self._bias
        return (2.0 - 2 * self.eps) * 2.0 ** (self._bias + 1)

    @property
    def overflow(self) -> float:
        """The smallest number that rounds to inf: halfway between ``max`` and the power of two that would follow.

        The tie goes to the even mantissa. Without inf that is ``max``'s own, so it takes more than half a step to be beyond it:
        this is then the float64 above the midpoint.
        """
        if self.has_inf:
            return (2.0 - self.eps / 2) * 2.0**self._bias
        return math.nextafter(self.max + self.ulp(self.max) / 2, math.inf)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with the full precision."""
        return 2.0 ** (1 - self._bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above 0. Half of it, and everything below, rounds to 0."""
        return 2.0 ** (1 - self._bias - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The spacing at 1: the difference between 1 and the next number."""
        return 2.0**-self.mantissa_bits

    def ulp(self, x: float) -> float:
        """The spacing of the format's numbers at ``x``, from ``abs(x)`` upwards; inf beyond ``max``, NaN at NaN.

        A value that lies between two of them is rounded by at most half of it.
        """
        if math.isnan(x):
            return math.nan
        if abs(x) > self.max:
            return math.inf
        exponent = math.frexp(x)[1] - 1 if x else 1 - self._bias
        return float(2.0 ** (max(exponent, 1 - self._bias) - self.mantissa_bits))


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("float16", 5, 10, 2),
        Format("bfloat16", 8, 7, 2),
        Format("tfloat32", 8, 10, 4),
        Format("float32", 8, 23, 4),
        Format("float64", 11, 52, 8),
        Format("float8_e4m3fn", 4, 3, 1, has_inf=False),
        Format("float8_e5m2", 5, 2, 1),
    )
}


def power(scale: float) -> str:
    """A loss scale as a power of two: ``2^16``; as a number where it is none."""
    if scale <= 0:
        return "none"
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
