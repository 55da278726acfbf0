"""Sick models that are deep: a residual stream that grows, and a transformer block with one large layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mprun.models.gpt import gpt
from tests.sick.models import WIDTH, times


class Term(nn.Module):
    """What a deep residual network adds per block: a function of the normalised stream plus a constant that never leaves it."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        times(self.fc, size / 10)
        with torch.no_grad():
            self.fc.bias.copy_(torch.where(torch.arange(WIDTH) == 3, size, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


class Stream(nn.Module):
    """``depth`` residual blocks, each of which adds ``size`` to one channel of the stream."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, depth: int = 6, size: float = 2e4) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[0], WIDTH)
        times(self.stem, size / 10)
        self.blocks = nn.ModuleList(Term(size) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def transformer(input_shape: Sequence[int], num_classes: int, fc1: float = 1.0, fc2: float = 1.0) -> nn.Module:
    """The small GPT, two blocks of width 16, with factors on the weights of ``blocks.1.mlp``."""
    model = gpt(input_shape=input_shape, num_classes=num_classes, depth=2, dim=WIDTH, heads=2)
    times(model.get_submodule("blocks.1.mlp.fc1"), fc1)
    times(model.get_submodule("blocks.1.mlp.fc2"), fc2)
    return model
