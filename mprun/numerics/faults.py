"""Faults on purpose: one wrong number at a known module, attempt and micro-batch, put there by hooks.

Training rarely breaks when a test wants it to. A :class:`Fault` says where and when it shall, and :func:`inject` makes it
happen, for as long as its block lasts::

    fault = Fault("blocks.1.attn", attempt=3, micro_batch=2, where="backward", value=float("inf"))
    with inject(model, fault) as injector:
        for window in windows:
            injector.start_attempt()
            train_step(state, window)
    assert injector.strikes

========== ==================================== ===========================================================
where      what is changed                      how
========== ==================================== ===========================================================
forward    every float tensor that M returns    ``t + value`` for NaN and inf, ``t * value`` for a factor:
input      every float tensor that M is given   the graph stays whole, so gradients go on flowing
backward   the gradient of what M returns       the same on the gradient, before M's own backward sees it
========== ==================================== ===========================================================

What time is it? A micro-batch is a forward of the whole model with gradients on (evaluation does not count, and meets no
fault); an attempt is what ``start_attempt`` separates, because only the loop knows whether a window was cut short or is
run again. Activation checkpointing computes a block again during backward: the model itself is not called for it, the
clock stands still, and the recompute meets the fault that the first pass met.

Hooks of ``torch.nn.Module`` only: no forward is replaced, and the hooks go when the block ends, however it ends. They sit
outside the borders of :mod:`mprun.precision.casting`, so a fault on an FP32 module acts on what its surroundings see.
Code compiled by ``torch.compile`` before the block does not see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mprun.errors import ConfigError, nearest

Where = Literal["forward", "backward", "input"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where and when.

    Attributes:
        module: dotted path of a module, ``""`` for the whole model. A shared module is hit whichever path calls it.
        attempt: which optimizer attempt, counted from 1.
        micro_batch: which micro-batch of the attempt, counted from 0; None for each of them.
        where: ``forward`` (output), ``backward`` (gradient of the output) or ``input``.
        value: NaN or inf, which every number becomes, or a finite factor.
        times: in how many attempts in a row, ``attempt`` being the first.
    """

    module: str
    attempt: int
    micro_batch: int | None = 0
    where: Where = "forward"
    value: float = math.nan
    times: int = 1

    def __post_init__(self) -> None:
        for name, low in (("attempt", 1), ("micro_batch", 0), ("times", 1)):
            given = getattr(self, name)
            if given is not None and given < low:
                raise ConfigError(f"Fault.{name}={given} is not legal: a whole number from {low} up")
        if self.where not in get_args(Where):
            raise ConfigError(f"Fault.where={self.where!r}: {nearest(self.where, get_args(Where))}")

    def due(self, attempt: int, micro_batch: int) -> bool:
        """Whether the fault strikes in this micro-batch of this attempt."""
        return 0 <= attempt - self.attempt < self.times and self.micro_batch in (None, micro_batch)

    def spoil(self, tensor: Tensor) -> Tensor:
        """``tensor`` with the fault in it, in the same dtype; differentiable, not in place."""
        return tensor * self.value if math.isfinite(self.value) else tensor + self.value


@dataclass
class Injector:
    """The clock of the faults, and the record of what they did.

    Attributes:
        attempt: the attempt in progress, counted from 1.
        micro_batches: forwards of the model so far in this attempt.
        strikes: every tensor that was changed, as (fault, attempt, micro-batch); a recompute counts again.
    """

    attempt: int = 1
    micro_batches: int = 0
    strikes: list[tuple[Fault, int, int]] = field(default_factory=list)
    _live: bool = False

    def start_attempt(self) -> None:
        """What follows is the next attempt. Nothing happens if this one has seen no forward yet."""
        self.attempt += self.micro_batches > 0
        self.micro_batches = 0

    def rewind(self) -> None:
        """What follows is this attempt once more, from its first micro-batch on."""
        self.micro_batches = 0

    def _tick(self, module: nn.Module, args: Any) -> None:
        """The model is called: the next micro-batch, or an evaluation. A recompute never comes by here."""
        self._live = torch.is_grad_enabled()
        self.micro_batches += self._live

    def _spoiler(self, fault: Fault) -> Callable[[Tensor], Tensor] | None:
        """What puts ``fault`` into a tensor of this micro-batch, if it is due."""
        now = (fault, self.attempt, self.micro_batches - 1)
        if not self._live or not fault.due(*now[1:]):
            return None

        def spoil(tensor: Tensor) -> Tensor:
            self.strikes.append(now)
            return fault.spoil(tensor)

        return spoil


@contextmanager
def inject(model: nn.Module, *faults: Fault) -> Iterator[Injector]:
    """Let ``faults`` happen in ``model`` inside the block. Nothing of them is left behind.

    Args:
        model: the module that the loop calls once a micro-batch; any precision mode, before ``torch.compile``.
        faults: in the order in which they act on one tensor.

    Raises:
        ConfigError: a fault names a module that ``model`` does not have; the message lists the nearest paths.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for fault in faults:
        if fault.module not in modules:
            raise ConfigError(f"Fault.module={fault.module!r} is no module: {nearest(fault.module, modules)}")
    injector = Injector()
    with ExitStack() as stack:
        # In front of every other hook: whoever looks at this micro-batch must find the clock at it.
        stack.callback(model.register_forward_pre_hook(injector._tick, prepend=True).remove)
        for fault in faults:
            stack.callback(_attach(injector, fault, modules[fault.module], stack).remove)
        yield injector


def _attach(injector: Injector, fault: Fault, module: nn.Module, stack: ExitStack) -> Any:
    """Hang ``fault`` on ``module``. Returns the handle of the hook; those on tensors go to ``stack``."""

    def on_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        spoil = injector._spoiler(fault)
        return _map_floats((args, kwargs), spoil) if spoil else None

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        spoil = injector._spoiler(fault)
        return _map_floats(output, spoil) if spoil else None

    def on_gradient(module: nn.Module, args: Any, output: Any) -> None:
        spoil = injector._spoiler(fault)

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                stack.callback(tensor.register_hook(spoil).remove)  # type: ignore[no-untyped-call]
            return tensor

        if spoil:
            _map_floats(output, watch)

    if fault.where == "input":
        return module.register_forward_pre_hook(on_input, with_kwargs=True)
    return module.register_forward_hook(on_output if fault.where == "forward" else on_gradient)


def _map_floats(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``function`` applied to its floating-point tensors, through tuples, lists and dicts."""
    return pytree.tree_map_only(Tensor, lambda t: function(t) if t.is_floating_point() else t, value)
