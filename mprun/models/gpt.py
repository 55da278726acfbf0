"""A small GPT: a pre-norm decoder over token ids, with tied embeddings.

The defaults suit characters at a context of 64: 3 blocks of width 64, some 160 thousand parameters.

Every matrix and embedding starts at a standard deviation of 0.02. Each block adds two terms to the residual stream; so
that its variance does not grow with the depth, the matrices that write into it start smaller by ``sqrt(2 * depth)``.
One matrix serves as token embedding and as classifier, ``head.weight is wte.weight``: it is one parameter, with one
gradient and one master.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.errors import ConfigError

INIT_STD = 0.02


def gpt(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    depth: int = 3,
    dim: int = 64,
    heads: int = 4,
    dropout: float = 0.0,
    bias: bool = False,
) -> nn.Module:
    """Build the model, float32 on the CPU.

    Args:
        input_shape: (T,), the longest sequence: the context.
        num_classes: size of the vocabulary.
        depth: number of blocks.
        dim: width of a token; a multiple of ``heads``.
        heads: attention heads of a block.
        dropout: on the embeddings, on the attention weights and on both outputs of a block.
        bias: give linear layers and normalisation layers a bias.

    Returns:
        A module from token ids (B, T), int64, to logits (B, T, num_classes). Shorter sequences are legal too.

    Raises:
        ConfigError: sizes that do not fit together.
    """
    if len(input_shape) != 1:
        raise ConfigError(
            f"the gpt takes sequences of token ids (T,), not inputs of shape {tuple(input_shape)}: use dataset=python_docs or "
            "dataset=text, or a model for images (see mprun list model)"
        )
    for key, value in (("depth", depth), ("dim", dim), ("heads", heads)):
        if value < 1:
            raise ConfigError(f"model.kwargs.{key}={value} is not at least 1")
    if dim % heads:
        raise ConfigError(f"model.kwargs.dim={dim} is not a multiple of model.kwargs.heads={heads}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.kwargs.dropout={dropout} is not from 0 to below 1")
    return GPT(input_shape[0], num_classes, depth=depth, dim=dim, heads=heads, dropout=dropout, bias=bias)


class Attention(nn.Module):
    """Causal self-attention: position t sees positions 0 to t."""

    def __init__(self, dim: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) to (B, T, dim)."""
        batch, length, dim = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        merged: Tensor = self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, dim)))
        return merged


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, dim: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim, bias=bias)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * dim, dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) to (B, T, dim)."""
        out: Tensor = self.drop(self.fc2(self.act(self.fc1(x))))
        return out


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, dim: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attn = Attention(dim, heads, dropout, bias)
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        self.mlp = Mlp(dim, dropout, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) to (B, T, dim)."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """See the module's docstring; arguments as in :func:`gpt`, with ``context`` and ``vocab`` for the dataset's facts."""

    def __init__(
        self, context: int, vocab: int, *, depth: int, dim: int, heads: int, dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.context = context
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(context, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, bias) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, bias=bias)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.wte.weight
        self._initialise()

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for what follows each token.

        Args:
            ids: (B, T) int64, T at most the context.

        Raises:
            ConfigError: T is beyond the context.
        """
        length = ids.shape[1]
        if length > self.context:
            raise ConfigError(f"a sequence of {length} tokens is longer than the gpt's context of {self.context}")
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        into_residual = INIT_STD * (2 * len(self.blocks)) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
                nn.init.normal_(parameter, std=into_residual)
            elif parameter.ndim >= 2:
                nn.init.normal_(parameter, std=INIT_STD)
            elif name.endswith(("qkv.bias", "proj.bias", "fc1.bias", "fc2.bias")):
                nn.init.zeros_(parameter)
