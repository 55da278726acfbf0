"""What went into every module of a model and what came back to its outputs, so that each can be run again alone.

One forward and backward pass of one micro-batch is watched by hooks: of every call of a module its arguments (copied, because
a later operation may write into them), the random numbers' state, and the gradients of its outputs. A second forward pass,
of the model under another policy, tells in which dtype each argument *arrives* there: an FP32 residual stream reaches a
module as float32 under one policy and as half under another, and that decides what it computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mprun.data.base import Batch
from mprun.precision.policy import map_tensors
from mprun.training.env import capture_rng
from mprun.training.record import is_memory
from mprun.training.state import TrainState
from mprun.training.step import forward_loss, valid_targets

# A module that is called in a loop is looked at in its first calls; they differ in the data only.
MOST_CALLS = 3


@dataclass
class Call:
    """One call of a module, in FP32.

    Attributes:
        given: arguments and keyword arguments, tensors detached and copied.
        leaves: of each floating-point tensor in them, whether it had a gradient.
        rng: every generator's state before the call.
        output_grads: gradient of each floating-point tensor of the output; None where there was none.
    """

    given: tuple[Any, dict[str, Any]]
    leaves: list[bool]
    rng: dict[str, Any]
    output_grads: list[Tensor | None] = field(default_factory=list)


def floats(value: Any) -> list[Tensor]:
    """The floating-point tensors in ``value``, in order."""
    found: list[Tensor] = []
    map_tensors(value, lambda t: found.append(t) if t.is_floating_point() else None)
    return found


def record(state: TrainState, window: Sequence[Batch]) -> dict[str, list[Call]]:
    """Forward and backward of the window's first micro-batch; the calls of every module, by path.

    Nothing of ``state`` is moved but the random numbers. Losses have the window's weight, so gradients are those of a run.
    """
    calls: dict[str, list[Call]] = {}
    open_calls: dict[str, list[Call | None]] = {}  # a module may call itself

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found, call = calls.setdefault(name, []), None
        if len(found) < MOST_CALLS:
            given = map_tensors((args, kwargs), lambda t: t.detach().clone())
            call = Call(given, [t.requires_grad for t in floats((args, kwargs))], capture_rng())
            found.append(call)
        open_calls.setdefault(name, []).append(call)

    def leave(name: str, output: Any) -> None:
        call = open_calls[name].pop()
        if call is None:
            return
        for index, tensor in enumerate(floats(output)):
            call.output_grads.append(None)
            if tensor.requires_grad:
                tensor.register_hook(_keeper(call, index))  # type: ignore[no-untyped-call]

    buffers = state.start_window()
    try:
        with _hooked(state.model, enter, leave):
            valid = sum(
                (valid_targets(batch.targets, state.task) for batch in window), start=torch.zeros_like(state.applied)
            )
            loss, _ = forward_loss(state, window[0], valid)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        buffers.restore(state.model.modules())
        drop_gradients(state)
    return calls


def arrivals(state: TrainState, window: Sequence[Batch]) -> tuple[dict[str, list[list[torch.dtype]]], str | None]:
    """In which dtypes the floating-point arguments of every call arrive under ``state``'s policy; and why it broke, if it did.

    A pass that raises (a constant too large for half, say) has told of the modules up to there.
    """
    found: dict[str, list[list[torch.dtype]]] = {}

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls = found.setdefault(name, [])
        if len(calls) < MOST_CALLS:
            calls.append([t.dtype for t in floats((args, kwargs))])

    trouble = None
    with _hooked(state.model, enter, lambda name, output: None), torch.no_grad():
        try:
            state.run_forward(window[0].inputs)
        except RuntimeError as error:
            if is_memory(error):  # no fault of the module
                raise
            trouble = str(error).splitlines()[0]
    return found, trouble


def _keeper(call: Call, index: int) -> Callable[[Tensor], None]:
    def keep(grad: Tensor) -> None:
        call.output_grads[index] = grad.detach().clone()

    return keep


def drop_gradients(state: TrainState) -> None:
    """Set every gradient to None, on the model and on the masters."""
    for parameter in state.model.parameters():
        parameter.grad = None
    state.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _hooked(model: nn.Module, enter: Callable[..., None], leave: Callable[[str, Any], None]) -> Iterator[None]:
    handles = []
    for path, module in model.named_modules():

        def on_enter(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            enter(path, module, args, kwargs)

        def on_leave(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            leave(path, output)

        handles.append(module.register_forward_pre_hook(on_enter, with_kwargs=True))
        handles.append(module.register_forward_hook(on_leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
