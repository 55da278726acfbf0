"""What a kernel on the CPU takes for itself while it runs, from the shapes of its arguments and results.

A step's memory is not tensors alone. Two things come and go inside one operation, where no tensor is to be seen:

* The half kernels of :mod:`mprun.precision.cpu_half` hold FP32 copies of their inputs and an FP32 result until it is rounded.
  Those are counted as that module makes them: for a product, all copies while the FP32 kernel runs, then all but the
  first beside both results.
* oneDNN brings the tensors of a convolution into an order of its own. In channels-last order that is the weight alone; otherwise
  activations go through a second copy as well. Which, is the library's choice: what stands here is what it was seen to do
  on x86 with AVX2 and AVX-512, within some 20 % for channels that are multiples of 16.

Left out, because they do not grow with the batch or the model: the buffers that matrix products pack into, and those of an
attention kernel, of which each thread has one (up to 2.4 MiB, in backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mprun.precision.cpu_half_kernels import ATTENTION, PRODUCTS, small_head

_FORWARD, _BACKWARD = "convolution", "convolution_backward"


def cpu_workspace(name: str, args: Sequence[Any], out: Any, *, fast_half: bool) -> int:
    """The most bytes that one CPU kernel holds beside its arguments and its results.

    Args:
        name: of the operation, such as ``mm`` or ``convolution_backward``; 0 for one of which nothing is known.
        args: its positional arguments; tensors may be fake.
        out: what it returned.
        fast_half: FP16 goes through the kernels of ``cpu_half`` (``numerics.cpu_fp16``), and BF16 where they serve it.
    """
    rounded, dtypes = ATTENTION.get(name, (None, (torch.float16,)))
    if name not in PRODUCTS and rounded is None:
        return 0
    given = [arg for arg in args if isinstance(arg, Tensor)]
    made = [part for part in (out if isinstance(out, tuple | list) else (out,)) if isinstance(part, Tensor)][:rounded]
    dtype = given[0].dtype
    widened = dtype in dtypes and (fast_half if dtype == torch.float16 else small_head(given[2]))
    inner = 0
    if name in (_FORWARD, _BACKWARD):
        source, weight, result = (given[0], given[1], made[0]) if name == _FORWARD else (given[1], given[2], given[0])
        backward = name == _BACKWARD
        strides = args[4] if backward else args[3]
        inner = _reordered(source, weight, result, strides, 4 if widened else dtype.itemsize, backward=backward)
    if not widened:
        return inner
    wide = [4 * tensor.numel() for tensor in given if tensor.dtype == dtype]
    if made[0] is given[0]:  # in place: the copy of the target becomes the result
        return sum(wide) + inner
    results, halves = sum(4 * part.numel() for part in made), sum(dtype.itemsize * part.numel() for part in made)
    after = results if rounded is not None else sum(wide[1:]) + results
    return max(sum(wide) + results + inner - halves, after)


def _reordered(
    source: Tensor, weight: Tensor, result: Tensor, strides: Sequence[int], itemsize: int, *, backward: bool
) -> int:
    """Bytes of what oneDNN reorders for a convolution, beyond its results."""
    x, w, y = (itemsize * tensor.numel() for tensor in (source, weight, result))
    if _channels_last(source) or _channels_last(weight):
        return 2 * w if backward else w
    if itemsize == 4 and all(size == 1 for size in (*weight.shape[2:], *strides)):
        return 0  # a matrix product
    return x + y if backward else max(x + w, y)


def _channels_last(tensor: Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    return form is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=form)
