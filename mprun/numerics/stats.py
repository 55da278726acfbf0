"""What a tensor's numbers look like in a float format: exponent histogram, amax, rms, and the fractions that are lost.

Everything follows from the exponents. Write x = m * 2**e with 1 <= |m| < 2 and count how often each e occurs; then for a
format F and a loss scale S, with shift k = log2(S)::

    underflow   x != 0 but S * x rounds to 0:    |S * x| <= smallest_subnormal / 2     e + k <  that exponent
    subnormal   S * x is kept, but with less than full relative precision:             e + k <  exponent of smallest_normal
    overflow    S * x rounds to inf:             |S * x| >= F.overflow                 e + k >  exponent of F.max

so one histogram, taken once and of unscaled numbers, answers the question for every format and every power-of-two scale.
The limits of a format are powers of two but for the last one: numbers between F.overflow (65520 for FP16, above 464 for FP8
E4M3) and the power of two above share an exponent with finite ones. A histogram cannot tell them apart, so they are counted
as overflow only if they are beyond that power of two (65536, 512); whether *any* number overflows is exact, by amax. In the
same way a number that rounds up to the smallest normal one is counted as subnormal.

:func:`measure` works on the device and reads nothing; :func:`unpack` makes a :class:`Stats` of it on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mprun.numerics.formats import Format

# Biased exponents of float32: 0 holds its subnormals (and zero, which is counted apart), 255 inf and NaN.
BIAS, BINS = 127, 256
# What :func:`measure` packs in front of the histogram.
HEAD = 5
PACKED = HEAD + BINS
# Of float32's 32 bits: all but the sign, the width of the mantissa, and the first that is no finite number.
MAGNITUDE, MANTISSA, INFINITY = 0x7FFFFFFF, 23, 0x7F800000
# A square of 2**60 and less, and of its inverse, is a normal float32, also when many of them are added.
SAFE_EXPONENT = 40
# How many numbers are looked at together. On the CPU they and what is made of them stay in a core's cache, and torch, which
# splits among threads what has 2**15 numbers, leaves them to one; on an accelerator they take little room.
CPU_CHUNK, DEVICE_CHUNK = 2**15 - 2**6, 2**22
MANY = 2**13


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
        """Whether any finite number is beyond ``form`` after ``scale``: it becomes inf (E4M3: its largest, or NaN). Exact."""
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
def measure(tensor: Tensor, factor: Tensor | float | None = None, *, minus: Tensor | None = None) -> Tensor:
    """The numbers of ``tensor``, packed. Nothing is read from an accelerator.

    Args:
        tensor: floating-point, any shape, dtype and device; a complex number counts as two. float64 is rounded to float32.
        factor: a 0-D float32 tensor or a number that every value is multiplied by in float32 first, such as 1/S.
        minus: a tensor of the same shape that is subtracted first, in float32.

    Returns:
        float64 of shape (PACKED,): count, zeros, non-finite, amax, sum of squares, then the histogram.
    """
    order = _memory_order(tensor)
    flat = _flat(tensor, order)
    rest = None if minus is None else _flat(minus, order)
    on_cpu = tensor.device.type == "cpu"
    size = CPU_CHUNK if on_cpu else DEVICE_CHUNK
    pieces = (
        _prepared(flat[start : start + size], factor, None if rest is None else rest[start : start + size])
        for start in range(0, flat.numel(), size)
    )
    return _look_here(pieces) if on_cpu else _look_there(pieces, tensor.device)


def _prepared(x: Tensor, factor: Tensor | float | None, minus: Tensor | None) -> Tensor:
    x = x.float()
    if minus is not None:
        x = x - minus.float()
    return x if factor is None else x * factor


def _memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the slowest to the fastest, where that is not their own order: then no copy is made."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda dim: strides[dim], reverse=True)


def _flat(tensor: Tensor, order: list[int] | None) -> Tensor:
    """The real numbers of ``tensor``, 1-D; a view wherever there can be one."""
    tensor = tensor.detach() if order is None else tensor.detach().permute(order)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().reshape(-1)


def _look_here(pieces: Iterable[Tensor]) -> Tensor:
    """Packed numbers of 1-D float32 ``pieces`` on the CPU, where reading a result is free and decides what is left to do.

    By numpy: most tensors are small, and its calls cost a fraction of torch's.
    """
    packed = np.zeros(PACKED)
    largest = 0
    for piece in pieces:
        x = piece.numpy()
        # As integers, magnitudes are ordered like the floats that they are, and the exponent is a shift away.
        magnitude = x.view(np.int32) & MAGNITUDE
        exponents = magnitude >> MANTISSA
        # numpy widens before it counts, which takes longer than a call of torch does.
        many = x.size >= MANY
        found = torch.bincount(torch.from_numpy(exponents)).numpy() if many else np.bincount(exponents)
        packed[HEAD : HEAD + len(found)] += found
        packed[0] += x.size
        if found[0]:
            packed[1] += x.size - np.count_nonzero(magnitude)
        top = int(magnitude.max())
        if top >= INFINITY:
            magnitude = np.where(magnitude >= INFINITY, 0, magnitude)
            x, top = magnitude.view(np.float32), int(magnitude.max())
        largest = max(largest, top)
        # Far from 1 a square would leave float32's range.
        wide = x if abs((top >> MANTISSA) - BIAS) <= SAFE_EXPONENT else x.astype(np.float64)
        packed[4] += np.dot(wide, wide)
    packed[2], packed[3] = packed[-1], np.int32(largest).view(np.float32)
    packed[HEAD] -= packed[1]
    packed[-1] = 0
    return torch.from_numpy(packed)


def _look_there(pieces: Iterable[Tensor], device: torch.device) -> Tensor:
    """The same on an accelerator, which is not asked for anything."""
    packed = [torch.zeros(PACKED, dtype=torch.float64, device=device)]
    for x in pieces:
        magnitude = x.view(torch.int32) & MAGNITUDE
        histogram = _histogram(magnitude >> MANTISSA)
        finite = torch.where(magnitude >= INFINITY, 0, magnitude)
        count = torch.full((), x.numel(), dtype=torch.float64, device=device)
        zeros = count - torch.count_nonzero(magnitude)
        nonfinite = histogram[-1].clone()
        histogram[0] -= zeros
        histogram[-1] = 0
        amax = finite.amax().view(torch.float32).double()
        squares = torch.linalg.vector_norm(finite.view(torch.float32), dtype=torch.float64).square()
        packed.append(torch.cat([torch.stack([count, zeros, nonfinite, amax, squares]), histogram]))
    return combine(packed)


def _histogram(exponents: Tensor) -> Tensor:
    """How often each of 0 .. BINS - 1 occurs, float64. Not ``bincount``: it would ask the device how large its result will be."""
    if exponents.device.type == "cuda":
        return torch.histc(exponents, bins=BINS, min=0, max=BINS).double()
    ones = torch.ones((), dtype=torch.float64, device=exponents.device).expand(exponents.numel())
    counts = torch.zeros(BINS, dtype=torch.float64, device=exponents.device)
    return counts.scatter_add_(0, exponents.long(), ones)


def combine(packed: Sequence[Tensor]) -> Tensor:
    """Several packed tensors taken together: shape (PACKED,)."""
    stacked = torch.stack(list(packed))
    total = stacked.sum(0)
    total[3] = stacked[:, 3].amax()
    return total


def unpack(packed: Tensor | Sequence[float]) -> Stats:
    """The :class:`Stats` of one row of :func:`measure`. Waits for the device if ``packed`` lies on one."""
    values = packed.cpu().numpy() if isinstance(packed, Tensor) else np.asarray(packed)
    count, zeros, nonfinite, amax, squares = values[:HEAD].tolist()
    filled = np.flatnonzero(values[HEAD:])
    first, last = (int(filled[0]), int(filled[-1])) if len(filled) else (BIAS, BIAS - 1)
    finite = count - nonfinite
    return Stats(
        count=int(count),
        zeros=int(zeros),
        nonfinite=int(nonfinite),
        amax=amax,
        rms=math.sqrt(squares / finite) if finite else 0.0,
        low=first - BIAS,
        bins=tuple(values[HEAD + first : HEAD + last + 1].astype(np.int64).tolist()),
    )


def stats(tensor: Tensor, factor: Tensor | float | None = None) -> Stats:
    """:func:`measure` and :func:`unpack` in one."""
    return unpack(measure(tensor, factor))


def merged(parts: Sequence[Stats]) -> Stats:
    """Several :class:`Stats` taken together."""
    parts = [part for part in parts if part.count]
    if len(parts) == 1:
        return parts[0]
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
