"""What a product gives back in the backward pass, before it is rounded: a few rows of it, in float32.

For ``y = x W^T`` the gradient of x is ``g_x = g_y W``. A GPU adds it up in float32 and rounds once, to FP16; what is below
2**-25 then is gone, and nobody can see that it was there. Rows of g_y are independent of each other, so some of them say what
becomes of all: the same product, without the last rounding. They lie steps of the golden section apart, not at even distances:
of (B, T, D) with B a multiple of 32, every (B T / 32)-th row would be that of the first token, which is like no other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad as gradients
from torch.nn.utils.parametrize import is_parametrized

# How many rows of a Linear, and how many images of a convolution.
ROWS, IMAGES = 32, 1
GOLDEN = (math.sqrt(5) - 1) / 2
CONVOLUTIONS = {
    nn.Conv1d: gradients.conv1d_input,
    nn.Conv2d: gradients.conv2d_input,
    nn.Conv3d: gradients.conv3d_input,
}


@dataclass(frozen=True)
class Part:
    """Some rows of the gradient of a product's input, float32, times S; all of it is ``of`` times as large."""

    values: Tensor
    of: float


@torch.no_grad()
def given_back(module: nn.Module, grad: Tensor, shape: torch.Size) -> Part | None:
    """What ``module`` gives back for ``grad``, in part.

    Args:
        module: any; only a Linear or convolution with a plain weight is known.
        grad: of its output, FP16.
        shape: of its input.

    Returns:
        None where it is not known.
    """
    weight, forward = module._parameters.get("weight"), _forward(module)
    if weight is None or is_parametrized(module) or not grad.numel():
        return None
    with torch.autocast(grad.device.type, enabled=False):
        if forward is nn.Linear.forward:
            rows = grad.reshape(-1, grad.shape[-1])
            some = rows[_spread(len(rows), grad.device)]
            return Part(some.float() @ weight.float(), len(rows) / len(some))
        for kind, back in CONVOLUTIONS.items():
            if forward is kind.forward and len(shape) == grad.ndim == weight.ndim:
                return _convolution(module, back, grad, shape, weight.float())
    return None


def _spread(count: int, device: torch.device) -> Tensor:
    """Which of ``count`` rows are looked at: up to ``ROWS``, none twice, and none of them at a fixed place of a period."""
    step = round(count * GOLDEN)
    while math.gcd(step, count) > 1:
        step += 1
    return torch.arange(min(count, ROWS), device=device) * step % count


def _forward(module: nn.Module) -> object:
    """The forward of the module's class as it was written, without the borders that a policy puts around it."""
    cls: Any = next(cls for cls in type(module).__mro__ if "_mprun_recipe" not in vars(cls))
    return vars(module).get("forward", cls.forward)


def _convolution(module: nn.Module, back: object, grad: Tensor, shape: torch.Size, weight: Tensor) -> Part | None:
    padding = getattr(module, "padding", "same")
    if isinstance(padding, str) or getattr(module, "padding_mode", "") != "zeros" or not callable(back):
        return None
    some = grad[:: max(len(grad) // IMAGES, 1)]
    values = back(
        (len(some), *shape[1:]), weight, some.float(), module.stride, padding, module.dilation, module.groups
    )  # fmt: skip
    return Part(values, len(grad) / len(some))
