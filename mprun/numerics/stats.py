"""What a tensor's numbers look like in a float format: exponent histogram, amax, rms, and the fractions that are lost.

Everything follows from the exponents. Write x = m * 2**e with 1 <= |m| < 2 and count how often each e occurs; then for a
format F and a loss scale S, with shift k = log2(S)::

    underflow   x != 0 but S * x rounds to 0:    |S * x| <= smallest_subnormal / 2     e + k <  that exponent
    subnormal   S * x is kept, but with less than full relative precision:             e + k <  exponent of smallest_normal
    overflow    S * x rounds to inf:             |S * x| >= F.overflow                 e + k >  exponent of F.max

so one histogram, taken once and of unscaled numbers, answers the question for every format and every power-of-two scale.
The limits of a format are powers of two but for the last one: numbers between F.overflow (65520 for FP16) and the power of
two above share an exponent with finite ones. A histogram cannot tell them apart, so they are counted as overflow only if
they are beyond that power of two, which is at most ``eps`` of a binade away; whether *any* number overflows is exact, by amax.

:func:`measure` works on the device and reads nothing; :func:`unpack` makes a :class:`Stats` of it on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mprun.numerics.formats import Format

# Biased exponents of float32: 0 holds its subnormals (and zero, which is counted apart), 255 inf and NaN.
BIAS, BINS = 127, 256
# What :func:`measure` packs in front of the histogram.
HEAD = 5
PACKED = HEAD + BINS


@dataclass(frozen=True)
class Stats:
    """The numbers of one tensor, or of several taken together.

    Attributes:
        count: numbers, zeros and non-finite ones included.
        zeros: those that are exactly 0.
        nonfinite: NaN and inf.
        amax: the largest finite magnitude; 0 if there is none.
        rms: root mean square of the finite numbers, zeros included.
        low: exponent of the first bin: it counts ``2**low <= |x| < 2**(low + 1)``.
        bins: how many finite non-zero numbers have each exponent, ``low`` upwards, without empty bins at either end.
    """

    count: int
    zeros: int
    nonfinite: int
    amax: float
    rms: float
    low: int
    bins: tuple[int, ...]

    @property
    def nonzero(self) -> int:
        """Finite numbers that are not 0: what the fractions below are fractions of."""
        return self.count - self.zeros - self.nonfinite

    @property
    def zero_frac(self) -> float:
        """Exact zeros among all numbers."""
        return self.zeros / self.count if self.count else 0.0

    @property
    def nonfinite_frac(self) -> float:
        """NaN and inf among all numbers."""
        return self.nonfinite / self.count if self.count else 0.0

    def underflow_frac(self, form: Format, scale: float = 1.0) -> float:
        """Non-zero numbers x for which ``scale * x`` becomes 0 in ``form``; 0 where there are none.

        Exact for a power-of-two scale, but for a number of exactly half the smallest subnormal (it becomes 0, and is counted
        as kept); another scale is taken as the power of two below it.
        """
        return self._below(math.frexp(form.smallest_subnormal / 2)[1] - 1, scale)

    def subnormal_frac(self, form: Format, scale: float = 1.0) -> float:
        """Non-zero numbers x for which ``scale * x`` is not 0 in ``form``, but below its smallest normal number."""
        return self._below(math.frexp(form.smallest_normal)[1] - 1, scale) - self.underflow_frac(form, scale)

    def overflow_frac(self, form: Format, scale: float = 1.0) -> float:
        """Non-zero numbers x for which ``scale * x`` becomes inf in ``form``; see the module's docstring for the last ulp."""
        if not self.overflows(form, scale):
            return 0.0
        beyond = 1.0 - self._below(math.frexp(form.max)[1], scale)
        return max(beyond, 1 / max(self.nonzero, 1))

    def overflows(self, form: Format, scale: float = 1.0) -> bool:
        """Whether any finite number becomes inf in ``form`` after ``scale``. Exact."""
        return self.amax * scale >= form.overflow

    def _below(self, exponent: int, scale: float) -> float:
        """The fraction of non-zero numbers x with ``|scale * x| < 2**exponent``."""
        if not self.nonzero:
            return 0.0
        border = exponent - (math.frexp(scale)[1] - 1) - self.low
        return sum(self.bins[: max(border, 0)]) / self.nonzero

    def scaled(self, shift: int) -> Stats:
        """The same numbers times ``2**shift``."""
        factor = 2.0**shift
        return Stats(
            self.count, self.zeros, self.nonfinite, self.amax * factor, self.rms * factor, self.low + shift, self.bins
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; :func:`from_json` is the inverse."""
        return {
            "count": self.count, "zeros": self.zeros, "nonfinite": self.nonfinite, "amax": self.amax, "rms": self.rms,
            "low": self.low, "bins": list(self.bins),
        }  # fmt: skip


def from_json(saved: dict[str, Any]) -> Stats:
    """The :class:`Stats` that :meth:`Stats.as_json` wrote."""
    return Stats(**{**saved, "bins": tuple(saved["bins"])})


@torch.no_grad()
def measure(tensor: Tensor, factor: Tensor | float | None = None) -> Tensor:
    """The numbers of ``tensor``, packed. Nothing is read by the host.

    Args:
        tensor: floating-point, any shape, dtype and device; a complex number counts as two. float64 is rounded to float32.
        factor: a 0-D float32 tensor or a number that every value is multiplied by in float32 first, such as 1/S.

    Returns:
        float64 of shape (PACKED,): count, zeros, non-finite, amax, sum of squares, then the histogram.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    x = tensor.detach().reshape(-1).float()
    if factor is not None:
        x = x * factor
    # As integers, magnitudes are ordered like the floats that they are, and the exponent is a shift away.
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    exponents = magnitude >> 23
    if x.device.type == "cpu":
        histogram = torch.bincount(exponents, minlength=BINS).double()
    else:  # torch.bincount asks the device how large the result will be
        ones = torch.ones((), dtype=torch.float64, device=x.device).expand(x.numel())
        histogram = torch.zeros(BINS, dtype=torch.float64, device=x.device).scatter_add_(0, exponents.long(), ones)
    finite = torch.where(exponents == BINS - 1, 0, magnitude)
    count = histogram.sum()
    zeros = count - torch.count_nonzero(magnitude)
    nonfinite = histogram[-1].clone()
    histogram[0] -= zeros
    histogram[-1] = 0
    amax = finite.amax().view(torch.float32).double() if x.numel() else torch.zeros_like(count)
    norm = torch.linalg.vector_norm(finite.view(torch.float32), dtype=torch.float64)
    return torch.cat([torch.stack([count, zeros, nonfinite, amax, norm.square()]), histogram])


def combine(packed: Sequence[Tensor]) -> Tensor:
    """Several packed tensors taken together: shape (PACKED,)."""
    stacked = torch.stack(list(packed))
    total = stacked.sum(0)
    total[3] = stacked[:, 3].amax()
    return total


def unpack(packed: Tensor | Sequence[float]) -> Stats:
    """The :class:`Stats` of one row of :func:`measure`. Waits for the device if ``packed`` lies on one."""
    values: list[float] = packed.tolist() if isinstance(packed, Tensor) else list(packed)
    count, zeros, nonfinite, amax, squares = values[:HEAD]
    bins = [int(value) for value in values[HEAD:]]
    filled = [index for index, value in enumerate(bins) if value]
    first, last = (filled[0], filled[-1]) if filled else (BIAS, BIAS - 1)
    finite = count - nonfinite
    return Stats(
        count=int(count),
        zeros=int(zeros),
        nonfinite=int(nonfinite),
        amax=amax,
        rms=math.sqrt(squares / finite) if finite else 0.0,
        low=first - BIAS,
        bins=tuple(bins[first : last + 1]),
    )


def stats(tensor: Tensor, factor: Tensor | float | None = None) -> Stats:
    """:func:`measure` and :func:`unpack` in one."""
    return unpack(measure(tensor, factor))


def merged(parts: Sequence[Stats]) -> Stats:
    """Several :class:`Stats` taken together."""
    parts = [part for part in parts if part.count]
    if not parts:
        return Stats(0, 0, 0, 0.0, 0.0, 0, ())
    low = min((part.low for part in parts if part.bins), default=0)
    high = max((part.low + len(part.bins) for part in parts if part.bins), default=0)
    bins = [0] * (high - low)
    for part in parts:
        for index, value in enumerate(part.bins, start=part.low - low):
            bins[index] += value
    finite = sum(part.count - part.nonfinite for part in parts)
    squares = sum(part.rms**2 * (part.count - part.nonfinite) for part in parts)
    return Stats(
        count=sum(part.count for part in parts),
        zeros=sum(part.zeros for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        amax=max(part.amax for part in parts),
        rms=math.sqrt(squares / finite) if finite else 0.0,
        low=low,
        bins=tuple(bins),
    )
