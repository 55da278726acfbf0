"""What a probe can look at: the modules that can be hooked, and the tensors that have numbers of their own.

Not everything can. Some code is another when it is watched: compiled code is compiled anew, and torch's
``TransformerEncoderLayer`` leaves its fast path in evaluation, whose numbers differ in the last bit. And some tensors are no
plain numbers in memory: those of ``torch.func`` (vmap, grad) and on the meta device have none, nested ones have no shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mprun.errors import ConfigError, nearest
from mprun.precision.overrides import hits


def floats(value: Any, device: torch.device) -> list[Tensor]:
    """The floating-point and complex tensors on ``device`` in ``value``, in whatever it is built of."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and has_numbers(leaf, device)]


def has_numbers(tensor: Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` can be measured beside others on ``device``."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.device.type == device.type
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def version(tensor: Tensor) -> int | None:
    """How often ``tensor`` was written to; None for those of ``torch.inference_mode``, of which nobody counts it."""
    return None if tensor.is_inference() else tensor._version


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation checkpointing has it."""
    return torch._C._current_graph_task_id() != -1


def select(model: nn.Module, rules: Sequence[str]) -> frozenset[str]:
    """The module paths that ``rules`` cover: a match and everything inside it; all paths without a rule.

    Raises:
        ConfigError: a rule matches nothing.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if not rules:
        return frozenset(modules)
    covered: set[str] = set()
    for rule in rules:
        found = hits(rule, modules)
        if not found:
            raise ConfigError(
                f"probe.modules: {rule!r} matches no module: {nearest(rule, [path for path in modules if path])}"
            )
        covered.update(found)
    for path in modules:  # a module comes after the one around it
        if path and path.rpartition(".")[0] in covered:
            covered.add(path)
    return frozenset(covered)


def visible(model: nn.Module, selected: frozenset[str]) -> dict[str, nn.Module]:
    """The modules that can be hooked without being changed by it, each once; of the others also nothing inside them."""
    hidden: set[str] = set()
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _changes_when_watched(module) or (path and path.rpartition(".")[0] in hidden):
            hidden.add(path)
        elif path in selected:
            found.setdefault(module, path)
    return {path: module for module, path in found.items()}


def _changes_when_watched(module: nn.Module) -> bool:
    compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    fast = isinstance(module, nn.TransformerEncoderLayer) and not module.training
    return compiled or fast or isinstance(module, torch.jit.ScriptModule)
