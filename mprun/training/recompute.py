"""Activation checkpointing: keep a block's input, compute the block again in the backward pass.

What is wrapped are the repeated blocks of a model: the elements of every ``ModuleList`` or ``Sequential`` that holds at
least two modules of the same class with parameters (outermost first; nothing inside a wrapped block is wrapped again).
The recompute sees the same autocast state, the same FP32 borders and the same random numbers. Buffers would be moved
twice (BatchNorm would average each batch twice), so the second pass starts from what the first one saw and puts back
what it found.

As with the precision borders, the module's class is exchanged for a subclass; nothing is patched on the instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mprun.errors import ConfigError
from mprun.precision.casting import subclass
from mprun.training.buffers import Snapshot


def apply_checkpointing(model: nn.Module) -> list[str]:
    """Wrap the repeated blocks of ``model`` in place. Returns their paths.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            f"model.activation_checkpointing=true: {type(model).__name__} has no repeated blocks (a ModuleList or Sequential "
            "with two modules of one class); set it to false"
        )
    for block in blocks.values():
        cls: Any = type(block)
        block.__class__ = _recomputed(cls)
    return list(blocks)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of ``model`` by path: each module once, none inside another."""
    found: dict[str, nn.Module] = {}
    for path, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or any(
            path.startswith(f"{block}.") for block in found
        ):
            continue
        children = dict(container.named_children())
        counts = Counter(type(child) for child in children.values())
        for name, child in children.items():
            repeated = (
                counts[type(child)] > 1
                and any(True for _ in child.parameters())
                and any(True for _ in child.children())
            )
            if repeated and child not in found.values():
                found[f"{path}.{name}".lstrip(".")] = child
    return found


def is_recomputed(model: nn.Module) -> bool:
    """Whether :func:`apply_checkpointing` has wrapped anything in ``model``."""
    recipes = (vars(type(module)).get("_mprun_recipe", (None,)) for module in model.modules())
    return any(recipe[0] is _recomputed for recipe in recipes)


@cache
def _recomputed(cls: Any) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            # Compiled code changes a buffer once, at its end, however often a value is computed.
            return checkpoint(cls.forward, self, *args, use_reentrant=False, **kwargs)
        return checkpoint(cls.forward, self, *args, use_reentrant=False, context_fn=partial(_contexts, self), **kwargs)

    return subclass(cls, forward, _recomputed)


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    """For the first pass and the recompute. Called before the first pass, so it sees the buffers as that pass will."""
    return nullcontext(), _with_buffers(module, Snapshot.take(module.modules()))


@contextmanager
def _with_buffers(module: nn.Module, earlier: Snapshot) -> Iterator[None]:
    """Give ``module`` the buffers it had in the first pass, and put the present ones back at the end.

    The recomputed graph has saved these buffers; putting values back does not look to it like a modification.
    """
    present = Snapshot.take(module.modules())
    earlier.restore(module.modules())
    try:
        yield
    finally:
        present.restore(module.modules())
