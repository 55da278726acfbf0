"""A multilayer perceptron: the smallest model that learns, for tests and for looking at single numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from mprun.errors import ConfigError

NORMS: dict[str, Callable[[int], nn.Module]] = {"layernorm": nn.LayerNorm, "batchnorm": nn.BatchNorm1d}


def mlp(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (128, 128),
    dropout: float = 0.0,
    norm: str | None = None,
) -> nn.Module:
    """Build the model, float32 on the CPU: flatten, then (linear, norm, GELU, dropout) per hidden width, then linear.

    Args:
        input_shape: any shape; inputs are flattened.
        num_classes: size of the output.
        hidden: widths of the hidden layers; none for a linear model.
        dropout: after each hidden layer.
        norm: ``layernorm``, ``batchnorm`` or none.

    Returns:
        A module from inputs (B, *input_shape) to outputs (B, num_classes).

    Raises:
        ConfigError: an unknown norm, or a width that is not positive.
    """
    if norm is not None and norm not in NORMS:
        raise ConfigError(f"model.kwargs.norm={norm!r} is not one of {', '.join(NORMS)}, null")
    if any(width < 1 for width in hidden):
        raise ConfigError(f"model.kwargs.hidden={list(hidden)} must be positive widths, as in [128,128]")
    layers: list[nn.Module] = [nn.Flatten()]
    width_in = math.prod(input_shape)
    for width in hidden:
        layers.append(nn.Linear(width_in, width))
        if norm is not None:
            layers.append(NORMS[norm](width))
        layers.append(nn.GELU())
        if dropout:
            layers.append(nn.Dropout(dropout))
        width_in = width
    return nn.Sequential(*layers, nn.Linear(width_in, num_classes))
