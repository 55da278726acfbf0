"""Facts of a float format, from its two numbers: exponent bits e and mantissa bits m. Imports no torch.

A format with a sign bit, e exponent bits and m mantissa bits holds (bias = 2**(e-1) - 1, the top exponent is inf and NaN)::

    normal      (1 + k / 2**m) * 2**x     k = 0 .. 2**m - 1,  x = 1 - bias .. bias
    subnormal   (k / 2**m) * 2**(1 - bias)

so the spacing of its numbers (the ulp) is 2**(x - m), and never below 2**(1 - bias - m). FP16 spends its bits on the
mantissa, BF16 on the exponent: that is all there is to the choice between precision and range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A binary float format of IEEE 754's layout.

    Attributes:
        name: as torch writes the dtype (``tfloat32`` is the input format of a Tensor Core, no dtype).
        exponent_bits: they give the range.
        mantissa_bits: they give the precision; the leading 1 is not stored.
        bytes: what a number takes in memory.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bytes: int

    @property
    def _bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def max(self) -> float:
        """The largest finite number."""
        return (2.0 - self.eps) * 2.0**self._bias

    @property
    def overflow(self) -> float:
        """The smallest number that rounds to inf: halfway between ``max`` and the power of two that would follow."""
        return (2.0 - self.eps / 2) * 2.0**self._bias

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
    name: Format(name, exponent_bits, mantissa_bits, size)
    for name, exponent_bits, mantissa_bits, size in (
        ("float16", 5, 10, 2),
        ("bfloat16", 8, 7, 2),
        ("tfloat32", 8, 10, 4),
        ("float32", 8, 23, 4),
        ("float64", 11, 52, 8),
    )
}
