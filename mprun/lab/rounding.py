"""What rounding alone does to gradients: a format's mantissa with FP32's range, simulated at the borders of modules.

A healthy low-precision run differs from FP32 because every product and every tensor between modules is rounded to m mantissa
bits. How much of that reaches a gradient depends on the model, so it is measured: the FP32 model runs once more with its
matrices, every module's inputs and outputs, and the gradients of both rounded to m bits, to nearest even, while exponents keep
FP32's range. What a real half run loses beyond that, it loses to range (overflow, underflow) or inside of a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mprun.precision.policy import map_tensors

FP32_MANTISSA = 23


def round_mantissa(tensor: Tensor, bits: int) -> Tensor:
    """``tensor`` (float32) with its mantissa rounded to ``bits`` bits, to nearest, ties to even; NaN and inf as they are."""
    drop = FP32_MANTISSA - bits
    if drop <= 0:
        return tensor
    words = tensor.contiguous().view(torch.int32)
    odd = (words >> drop) & 1
    rounded = ((words + ((1 << (drop - 1)) - 1) + odd) & -(1 << drop)).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded.view(tensor.shape), tensor)


class _Rounded(torch.autograd.Function):
    """The identity, with value and gradient rounded."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return round_mantissa(tensor, bits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return round_mantissa(grads[0], ctx.bits), None


@contextmanager
def rounded_borders(model: nn.Module, bits: int) -> Iterator[None]:
    """Round what goes in and out of every module of ``model``, forward and backward, and its matrices (put back at the end).

    Args:
        model: in float32.
        bits: of the mantissa, the leading 1 not counted: 10 for FP16, 7 for BF16.
    """

    def apply(value: Any) -> Any:
        def one(t: Tensor) -> Tensor:
            if t.dtype != torch.float32 or t.layout != torch.strided:
                return t
            result: Tensor = _Rounded.apply(t, bits)
            return result

        return map_tensors(value, one)

    handles = []
    for module in model.modules():
        handles.append(
            module.register_forward_pre_hook(lambda _, args, kwargs: (apply(args), apply(kwargs)), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(lambda _, args, output: apply(output)))
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.dtype == torch.float32]
    before = [p.detach().clone() for p in matrices]
    with torch.no_grad():
        for p in matrices:
            p.copy_(round_mantissa(p, bits))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for p, old in zip(matrices, before, strict=True):
                p.copy_(old)
