"""Matrix dimensions that Tensor Cores dislike.

A Tensor Core multiplies tiles, and reads them 16 bytes at a time: 8 numbers of 16 bits. Where a dimension of a product is
no multiple of 8 the library pads, or takes a slower kernel. A product has three dimensions, and each of them is in
turn the innermost one: of the forward pass, of the gradient of the inputs, of the gradient of the weights (which sums
over the rows of the batch).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

MULTIPLE = 8  # of a 16-bit matrix dimension, for Tensor Cores to be used in full: 16 bytes


@dataclass(frozen=True)
class Misfit:
    """A dimension that Tensor Cores dislike: not a multiple of 8 elements."""

    module: str
    kind: str
    dimension: str
    size: int

    @property
    def better(self) -> int:
        """The next multiple of 8."""
        return -(-self.size // MULTIPLE) * MULTIPLE


def misfits(
    modules: Iterable[tuple[str, nn.Module]], rows: Mapping[str, int], heads: Mapping[str, int]
) -> list[Misfit]:
    """Dimensions of matrix products that are not multiples of 8, by module.

    Looked at: features of linear layers (an output layer's are the classes, or the vocabulary) and the rows of their
    inputs (the weight gradient sums over them), channels of convolutions per group (depthwise ones use no Tensor Cores), the
    width of attention heads.

    Args:
        modules: path and module of those that compute in 16 bits.
        rows: path -> rows of the module's input as a matrix.
        heads: path -> width of the heads of the attention that the module calls.
    """
    found = []
    for path, module in modules:
        sizes: dict[str, int] = {}
        if isinstance(module, nn.Linear):
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
            if path in rows:
                sizes["rows (batch x tokens)"] = rows[path]
        elif isinstance(module, nn.modules.conv._ConvNd) and (module.groups == 1 or module.in_channels > module.groups):
            sizes = {
                "in_channels": module.in_channels // module.groups,
                "out_channels": module.out_channels // module.groups,
            }
        elif isinstance(module, nn.MultiheadAttention):
            sizes = {"embed_dim": module.embed_dim, "head_dim": module.head_dim}
        if path in heads and "head_dim" not in sizes:
            sizes["head_dim"] = heads[path]
        kind = type(module).__name__
        found += [Misfit(path, kind, name, size) for name, size in sizes.items() if size % MULTIPLE]
    return found
