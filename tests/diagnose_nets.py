"""Small nets, each with one property that a diagnosis has to find; built by ``model=python``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH = 32


class Net(nn.Module):
    """Three Linears. ``gain`` multiplies what the middle one gives, and is taken back after it."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, gain: float = 1.0) -> None:
        super().__init__()
        self.stem = nn.Linear(int(torch.tensor(input_shape).prod()), WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.after = Divide(gain)
        self.head = nn.Linear(WIDTH, num_classes)
        with torch.no_grad():
            self.middle.weight *= gain

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x.flatten(1)))
        return self.head(torch.tanh(self.after(self.middle(x))))


class Divide(nn.Module):
    """Its input over a constant, in FP32 whatever comes in."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x.float() / self.by


class HandRMSNorm(nn.Module):
    """A sum of squares in the dtype of the input: beyond 255 it overflows FP16, the result is 0, and nothing is NaN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Silent(nn.Module):
    """A hand-written norm behind a Linear whose outputs reach some hundreds."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(int(torch.tensor(input_shape).prod()), WIDTH)
        self.norm = HandRMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)
        with torch.no_grad():
            self.stem.weight *= 3000

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x.flatten(1))))


class Tall(nn.Module):
    """A residual stream that reaches 1e6 through every one of its blocks: FP16 cannot hold it anywhere."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(int(torch.tensor(input_shape).prod()), WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, num_classes)
        with torch.no_grad():
            for block in self.blocks:
                block.weight.mul_(1e6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = x + torch.tanh(block(torch.tanh(x)) / 1e6)
        return self.head(torch.tanh(x))


class Scores(nn.Module):
    """Scores as of attention without a division by sqrt(d): a product of the model itself overflows FP16, outside any module."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        side = input_shape[-1]
        self.q, self.k, self.v = nn.Linear(side, 64), nn.Linear(side, 64), nn.Linear(side, 64)
        self.head = nn.Linear(64, num_classes)
        with torch.no_grad():
            self.q.weight *= 400
            self.k.weight *= 400

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, -2)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return self.head((scores.softmax(-1) @ self.v(x)).mean(1))


class Loud(nn.Module):
    """Two Linears whose inputs are beyond FP16, and nothing else."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(int(torch.tensor(input_shape).prod()), WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)
        with torch.no_grad():
            self.stem.weight *= 1e-3
            self.head.weight *= 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.head(1e6 * torch.tanh(self.stem(1e6 * x.flatten(1))))


def rows(large: float = 1.0) -> tuple[TensorDataset, TensorDataset]:
    """Rows of 16 normal numbers with the sign of their sum as the class; sample 17 holds ``large``."""
    inputs = torch.randn(320, 16, generator=torch.Generator().manual_seed(0))
    classes = (inputs.sum(1) > 0).long()
    inputs[17, 3] = large
    return TensorDataset(inputs[:256], classes[:256]), TensorDataset(inputs[256:], classes[256:])
