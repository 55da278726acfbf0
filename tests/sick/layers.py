"""Layers as people write them, each with one way to go wrong; :mod:`tests.sick.models` puts them into models.

What is wrong is said at each class. Arguments called ``eps`` or ``half`` are what a cure changes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SquareNorm(nn.Module):
    """RMSNorm with ``x * x``: on no autocast list, so half squares, inf from 256 on; the inverse root of that is 0, the output too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class PowerNorm(nn.Module):
    """The same with ``pow``, which autocast takes to FP32 and half parameters do not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class MomentNorm(nn.Module):
    """Variance as E[x^2] - E[x]^2: of numbers near 50 that differ by 1, half keeps no digit; it may be negative."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance + 1e-3)


class MeanAbsNorm(nn.Module):
    """Divides by the mean magnitude plus 1e-8, which is 0 in half: a row of zeros becomes 0/0."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + 1e-8)


class LengthNorm(nn.Module):
    """Divides by the length ``sqrt(sum(x^2))``, whose gradient at a row of zeros is inf times 0, in any format."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (1.0 + torch.sqrt(x.float().square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class Standardise(nn.Module):
    """Every feature minus its mean over the batch, divided by its deviation: 0/0 for a constant feature, in any format."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + self.eps)


class Log(nn.Module):
    """The logarithm of what a ReLU leaves: of 0 it is -inf, in any format."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.float() + self.eps).to(x.dtype)


class LogProbability(nn.Module):
    """``log(softmax(x))``: in half a probability below 3e-8 is 0, and its logarithm -inf."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.softmax(x, -1))


class SoftmaxPool(nn.Module):
    """Attention pooling with ``exp(s) / sum(exp(s))`` and no maximum taken off: in half inf/inf from s = 11.1 on."""

    def __init__(self, dim: int, gain: float) -> None:
        super().__init__()
        self.score, self.gain = nn.Linear(dim, 1), gain

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.exp(self.gain * torch.tanh(self.score(x)))
        return (x * (weight / weight.sum(1, keepdim=True))).sum(1)


class SmoothMaxPool(nn.Module):
    """``log(sum(exp(x)))`` over the sequence and no maximum taken off."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.exp(x).sum(1))


class SumPool(nn.Module):
    """The mean as a sum divided by the count: the sum is beyond half long before the mean is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) / x.shape[1]


class Positions(nn.Module):
    """Phases of positions, counted in the dtype of the input: BF16 knows no odd number above 256."""

    def forward(self, x: Tensor) -> Tensor:
        where = (x * torch.arange(x.shape[1], dtype=x.dtype, device=x.device)).sum(-1)
        return torch.stack([torch.cos(math.pi * where), torch.sin(math.pi * where)], -1)


class CubicGelu(nn.Module):
    """GELU's tanh form with ``x * x * x``: inf in half from 41 on; tanh hides it in the forward pass, the gradient is 0 * inf."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * (x * x * x))))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float().pow(3) * 1e-6).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (3.0 * x * x) * 1e-6


class Cube(nn.Module):
    """``1e-6 x^3`` with a backward of its own, amid which stands ``3 x^2``: inf in half from 148 on at every loss scale."""

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class Prototypes(nn.Module):
    """Minus the squared distances to one point a class: squares of half differences."""

    def __init__(self, dim: int, classes: int, level: float) -> None:
        super().__init__()
        self.points = nn.Parameter(level * torch.randn(classes, dim))
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        return -((x.unsqueeze(1) - self.points) ** 2).sum(-1) / self.level**2


class Attention(nn.Module):
    """One head over (B, T, dim), its scores in full sight.

    Args:
        divide: by sqrt(dim), as one should.
        mask: what scores at padding become: ``inf`` for -inf, ``finfo`` for the format's lowest number, or a literal.
    """

    def __init__(self, dim: int, *, divide: bool = True, mask: str | float = "inf", gain: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.scale = dim**-0.5 if divide else 1.0
        self.mask = mask
        with torch.no_grad():
            self.qkv.weight[: 2 * dim] *= gain

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        if padding is not None:
            lowest = torch.finfo(scores.dtype).min if self.mask == "finfo" else -float(self.mask)
            scores = scores.masked_fill(padding[:, None, :], lowest)
        return self.proj(scores.softmax(-1).to(v.dtype) @ v)  # type: ignore[no-any-return]


class LinearAttention(nn.Module):
    """Keys times values summed over all positions before the queries see them: as large as the sequence is long."""

    def __init__(self, dim: int, gain: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.gain * F.softplus(self.k(x)), self.gain * self.v(x)
        state = keys.transpose(1, 2) @ values
        return (F.softmax(self.q(x), -1) @ state.to(values.dtype)) / (x.shape[1] * self.gain**2)  # type: ignore[no-any-return]
