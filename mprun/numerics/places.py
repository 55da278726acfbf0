"""Which module is running now, forward or backward. For post-mortems: it costs hooks on every module.

Forward is a stack: a hook before a module's forward pushes its path, one after it pops. Backward has no modules, only the
nodes of autograd, each with a number that counts upwards as nodes are made. So whenever the stack changes in the forward
pass, the next number is noted with the module that runs from here on; a node belongs to the module in whose stretch its
number falls::

    number    0        4             9       11
    runs      model    model.attn    model   (the loss)        node 6 was made by model.attn

This needs no walk through the graph, and a container's own operations, shared modules, custom autograd functions and what
lies outside of every module fall into place. A node that adds a gradient up has no number; it belongs to its parameter's
module.

Activation checkpointing runs forward again inside of backward, with gradients enabled, which tells the two apart. The
block's own hooks do not fire then (its forward is called directly) and the pass may stop half-way, so the stack is emptied
whenever another node begins, and what runs between inner modules is taken for the container of the one before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

Where = Literal["forward", "backward"]
Place = tuple[str, Where]

# Paths of what lies outside of the model: no module can be called so.
LOSS, INPUT = "<loss>", "<input>"


class Places:
    """Where the program is. Made for one model; :meth:`watch` puts the hooks on and takes them off.

    Attributes:
        paths: by module; ``classes`` by path.
        order: the modules that called no inner ones, as they ran in the forward passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self.order: list[str] = []
        self.classes = {path: type(module).__name__ for module, path in self.paths.items()}
        self._owners: dict[Any, str] = {
            parameter: path for module, path in self.paths.items() for parameter in module.parameters(recurse=False)
        }
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._runs: list[str] = []
        self._called: set[str] = set()
        self._entered = False  # the model has been called since the last backward
        self._node: Any = None
        self._around: str | None = None
        self._entering = ""
        self._thread = threading.get_ident()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the model inside the block."""
        with ExitStack() as stack:
            for module in self.paths:
                stack.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            self._mark()
            try:
                yield
            finally:
                self._node = None

    def now(self) -> Place:
        """Path of the module that runs, ``LOSS`` or ``INPUT`` outside of all, and the direction."""
        if not _in_backward():
            return self._stack[-1] if self._stack else self._outside(), "forward"
        self._entered = False
        owner = self._node_owner()
        if not torch.is_grad_enabled():
            return owner, "backward"
        return self._stack[-1] if self._stack else self._around or owner, "forward"

    def class_of(self, path: str) -> str:
        """The class of the module at ``path``; empty outside of the model."""
        return self.classes.get(path, "")

    def _outside(self) -> str:
        return LOSS if self._entered else INPUT

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _in_backward():
            self._node_owner()
        else:
            self._entered = True
        path = self._entering = self.paths[module]
        self._called.add(path)
        self._stack.append(path)
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self.paths[module]
        if path == self._entering and not _in_backward():
            self.order.append(path)
        if path in self._stack:
            while self._stack.pop() != path:
                pass
            self._mark()
        if _in_backward() and not self._stack:
            while path and path not in self._called - {self.paths[module]}:
                path = path.rpartition(".")[0]
            self._around = path

    def _mark(self) -> None:
        """From the next node on, nodes belong to what runs now. Another thread counts its own numbers."""
        if threading.get_ident() == self._thread:
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            if self._stack or not _in_backward():
                self._runs.append(self._stack[-1] if self._stack else LOSS)
            else:
                self._runs.append(self._around or self._node_owner())

    def _node_owner(self) -> str:
        """Whose node autograd works on; a new one ends whatever a recompute for the last one had begun."""
        node: Any = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._around = node, None
            self._stack.clear()
        if node is None:
            return LOSS
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owners.get(variable, LOSS)
        number: int = node._sequence_nr()
        index = bisect_right(self._numbers, number) - 1
        return self._runs[index] if index >= 0 else LOSS


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
