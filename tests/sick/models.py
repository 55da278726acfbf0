"""Sick models: tiny, each with one fault in a module whose path is known. A run names one as ``tests.sick.models:Mlp``.

Thirty steps take a tenth of a second. In FP32 the loss falls, unless the case (:mod:`tests.sick.cases`) says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sick import layers

WIDTH = 16
# What stands between two linear layers of the Mlp; takes ``eps`` where it has one.
MIDDLES: dict[str, Callable[[float], nn.Module]] = {
    "layer": lambda eps: nn.LayerNorm(WIDTH),
    "batch": lambda eps: nn.BatchNorm1d(WIDTH, momentum=0.03),
    "square": lambda eps: layers.SquareNorm(),
    "power": lambda eps: layers.PowerNorm(),
    "moment": lambda eps: layers.MomentNorm(),
    "mean_abs": lambda eps: layers.MeanAbsNorm(),
    "length": layers.LengthNorm,
    "standardise": layers.Standardise,
    "log": layers.Log,
    "cube": lambda eps: layers.Cube(),
    "gelu": lambda eps: layers.CubicGelu(),
    "none": lambda eps: nn.Identity(),
}


@torch.no_grad()
def times(layer: nn.Module, gain: float) -> None:
    """Weights, not the bias, times ``gain``."""
    layer.weight *= gain  # type: ignore[operator]


class Mlp(nn.Module):
    """Linear ``stem``, ReLU, linear ``fc``, ``middle``, linear ``head``.

    Args:
        middle: a key of ``MIDDLES``, and its ``eps``.
        stem: factor on the stem's first weights; ``gain`` on those of fc, ``head`` on those of the head.
        offset: added to fc's bias; ``level`` to the head's.
        bias: of stem and fc.
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, middle: str = "layer", eps: float = 0.0, stem: float = 1.0,
        gain: float = 1.0, head: float = 1.0, offset: float = 0.0, level: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stem = nn.Linear(input_shape[0], WIDTH, bias=bias)
        self.act = nn.ReLU()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.middle = MIDDLES[middle](eps)
        self.head = nn.Linear(WIDTH, num_classes)
        for layer, factor in ((self.stem, stem), (self.fc, gain), (self.head, head)):
            times(layer, factor)
        with torch.no_grad():
            self.head.bias += level
            if offset:
                self.fc.bias += offset

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.fc(self.act(self.stem(x)))))  # type: ignore[no-any-return]


class Boxed(nn.Module):
    """Linear ``stem``, then a ``box`` of a linear layer ``fc`` with large weights and the LayerNorm that undoes them."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, gain: float) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[0], WIDTH)
        self.box = nn.Sequential()
        self.box.add_module("fc", nn.Linear(WIDTH, WIDTH))
        self.box.add_module("norm", nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, num_classes)
        times(self.stem, 10.0)
        times(self.box.get_submodule("fc"), gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.box(F.relu(self.stem(x))))  # type: ignore[no-any-return]


class Direct(nn.Module):
    """Linear ``stem``, ReLU, ``middle``, linear ``head``: what the middle gets may be exactly 0."""

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, middle: str, eps: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[0], WIDTH, bias=bias)
        self.act = nn.ReLU()
        self.middle = MIDDLES[middle](eps)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.act(self.stem(x))))  # type: ignore[no-any-return]


class First(nn.Module):
    """``middle`` on the inputs themselves, then two linear layers."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, middle: str, eps: float = 0.0) -> None:
        super().__init__()
        self.middle = MIDDLES[middle](eps)
        self.stem = nn.Linear(input_shape[0], WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(self.middle(x))))  # type: ignore[no-any-return]


class Last(nn.Module):
    """Two linear layers and a ``last`` one that computes what leaves the model."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, last: str, level: float = 1.0) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[0], WIDTH)
        outputs = WIDTH if last == "prototypes" else num_classes
        self.head = nn.Linear(WIDTH, outputs)
        times(self.head, level)
        self.last = layers.Prototypes(WIDTH, num_classes, level) if last == "prototypes" else layers.LogProbability()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(F.relu(self.stem(x))))  # type: ignore[no-any-return]


class Conv(nn.Module):
    """Two convolutions, BatchNorm, the mean over the image, a linear head. ``gain``: on the second convolution.

    ``poisoned``: BatchNorm is frozen, and its statistics came from a run that had overflowed.
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, gain: float = 1.0, poisoned: bool | None = None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 4, num_classes)
        times(self.conv2, gain)
        self.frozen = poisoned is not None
        if poisoned and self.bn.running_var is not None:
            self.bn.running_var[3] = float("nan")
        self.train()

    def train(self, mode: bool = True) -> Conv:
        super().train(mode)
        if self.frozen:
            self.bn.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv2(F.relu(self.conv1(x)))))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


class Pooled(nn.Module):
    """A sequence (T, dim) of numbers: linear ``stem``, ``pool`` over time, LayerNorm, linear ``head``."""

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, pool: str, gain: float = 1.0, stem: float = 1.0
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[1], WIDTH)
        pools: dict[str, Callable[[], nn.Module]] = {
            "softmax": lambda: layers.SoftmaxPool(WIDTH, gain),
            "smooth_max": layers.SmoothMaxPool,
            "sum": layers.SumPool,
        }
        self.pool = pools[pool]()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)
        times(self.stem, stem)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.pool(self.stem(x))))  # type: ignore[no-any-return]


class LinearAttention(nn.Module):
    """Linear ``stem``, unnormalised linear attention, the mean over time, linear ``head``."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, gain: float) -> None:
        super().__init__()
        self.stem = nn.Linear(input_shape[1], WIDTH)
        self.attn = layers.LinearAttention(WIDTH, gain)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.attn(x)).mean(1))  # type: ignore[no-any-return]


class Parity(nn.Module):
    """Phases of a position, and a linear layer that reads off them whether it is odd."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.positions = layers.Positions()
        self.head = nn.Linear(2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.positions(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a linear layer, each with a LayerNorm before and a residual around."""

    def __init__(self, gain: float, divide: bool, mask: str | float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn = layers.Attention(WIDTH, divide=divide, mask=mask, gain=gain)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), padding)
        return x + F.relu(self.mlp(self.norm2(x)))


class Reader(nn.Module):
    """Classifies sequences of tokens of which 0 is padding. The attention of block 1 has ``gain``, ``divide`` and ``mask``."""

    def __init__(
        self, num_classes: int, gain: float = 1.0, divide: bool = True, mask: str | float = "inf", vocab: int = 16
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList([Block(1.0, True, "finfo"), Block(gain, divide, mask)])
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        x, padding = self.table(ids), ids == 0
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Embedded(nn.Module):
    """A bag of tokens from an embedding whose numbers are ``size`` large.

    ``embed`` is table and norm together; ``mix`` is a linear layer on the raw table.
    """

    def __init__(self, num_classes: int, size: float, mix: bool = False, vocab: int = 16) -> None:
        super().__init__()
        table = nn.Embedding(vocab, WIDTH)
        times(table, size)
        self.embed = nn.Sequential(table) if mix else nn.Sequential(table, nn.LayerNorm(WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)
        if mix:
            times(self.mix, 1e-2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(self.embed(ids))).mean(1))  # type: ignore[no-any-return]


class Decades(nn.Module):
    """Two outputs of one trunk, one of size 1e3, the other times ``factor``: their gradients lie decades apart."""

    def __init__(self, input_shape: Sequence[int], factor: float = 1e-5) -> None:
        super().__init__()
        self.trunk = nn.Linear(input_shape[0], WIDTH)
        self.large, self.small = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return torch.cat([1e3 * self.large(x).float(), self.factor * self.small(x).float()], -1)
