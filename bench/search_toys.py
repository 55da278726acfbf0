"""Small models whose trouble in FP16 is known: a T5-like encoder with Linears that reach beyond 65504, and data for it.

``t5`` has an embedding, and blocks of attention and a gated MLP. The output Linear ``wo`` of the MLP is followed by a small
gain, as in nets that scale their branches, so its large output does no harm in FP32. ``loud`` makes one ``wo`` reach millions.
``chain`` puts a Linear ``down`` between such a ``wo`` and the gain: with ``wo`` alone in FP32 its output overflows in the cast
before ``down``, with ``down`` alone it has overflowed already. ``tricky`` makes the MLP of the first block look at its dtype, as
patched nets do: right in half and in FP32, it overflows with its first Linear alone in FP32, so that more FP32 is not better.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY, LENGTH, CLASSES = 32, 8, 8
LOUD = 3e5


def tokens(n: int = 512) -> tuple[TensorDataset, TensorDataset]:
    """Sequences of tokens; the class is the first token's."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (n + 64, LENGTH), generator=draw)
    classes = ids[:, 0] % CLASSES
    return TensorDataset(ids[:n], classes[:n]), TensorDataset(ids[n:], classes[n:])


def rows(
    n: int = 256, bad: int | None = None, value: float = float("nan"), size: float = 1.0
) -> tuple[TensorDataset, TensorDataset]:
    """16 numbers of magnitude ``size``, and the sign of their sum as the class; sample ``bad`` holds a ``value``."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(n + 64, 16, generator=draw)
    classes = (inputs.sum(1) > 0).long()
    inputs *= size
    if bad is not None:
        inputs[bad, 3] = value
    return TensorDataset(inputs[:n], classes[:n]), TensorDataset(inputs[n:], classes[n:])


class Attention(nn.Module):
    """Softmax attention with its products written out: they are its own operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return self.o(scores.softmax(-1) @ self.v(x))


class Gated(nn.Module):
    """T5's MLP, its output times a gain; ``chain`` has a second Linear before the gain."""

    def __init__(self, width: int, loud: bool, chain: bool) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.act = nn.GELU()
        self.wo = nn.Linear(2 * width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False) if chain else nn.Identity()
        self.gain = 1.0
        if loud:
            self.gain = 1.0 / LOUD
            nn.init.normal_(self.wo.weight, std=20 * LOUD / (2 * width) ** 0.5)
        if chain:  # its inputs are large, its outputs are not
            nn.init.normal_(self.down.weight, std=0.1 / width**0.5)
            self.gain = 10.0 / LOUD

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.down(self.wo(self.act(self.wi_0(x)) * self.wi_1(x))) * self.gain


class Tricky(nn.Module):
    """Two Linears with a large number between them, which is made smaller where the first one's output is half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.normal_(self.wi.weight, std=2e3 / width**0.5)
        nn.init.normal_(self.wo.weight, std=1e2 / width**0.5)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        hidden = self.wi(x)
        small = 2.0**-10 if hidden.dtype == torch.float16 else 1.0
        return self.wo(hidden * small).float() / small * 2.0**-18


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, loud: bool, chain: bool, tricky: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn = Attention(width)
        self.mlp = Tricky(width) if tricky else Gated(width, loud, chain)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class T5(nn.Module):
    """Embedding, blocks, norm, mean, head."""

    def __init__(self, classes: int, width: int, depth: int, loud: int | None, chain: bool, tricky: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            Block(width, i == loud, chain and i == loud, tricky and i == 0) for i in range(depth)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embed(ids) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def t5(
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    width: int = 16,
    depth: int = 2,
    loud: int | None = None,
    chain: bool = False,
    tricky: bool = False,
) -> nn.Module:
    """The model; ``loud`` is the number of the block with the large ``wo``."""
    return T5(num_classes, width, depth, loud, chain, tricky)
