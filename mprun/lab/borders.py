"""One training step with the numbers at every module's border: what a sampled step of the FP32 run tells.

Tensors by name, as in ``probe.jsonl``: ``input`` and ``activation`` (all floating-point inputs and outputs of a module together),
``activation_grad``, and for each parameter of its own ``weight`` and ``weight_grad``. All of them in FP32 and unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mprun.data.base import Batch
from mprun.lab.calls import floats
from mprun.numerics.stats import Stats, combine, measure, unpack
from mprun.training.result import StepResult
from mprun.training.state import TrainState
from mprun.training.step import train_step

Packed = dict[str, dict[str, list[Tensor]]]


def watched_step(state: TrainState, window: Sequence[Batch]) -> tuple[StepResult, dict[str, dict[str, Stats]]]:
    """:func:`~mprun.training.step.train_step` with hooks; moves what it moves. Waits for the device once a tensor."""
    found: Packed = {}
    with _hooks(state.model, found):
        result = train_step(state, window)
    return result, {
        path: {name: unpack(combine(parts)) for name, parts in tensors.items()} for path, tensors in found.items()
    }


@contextmanager
def _hooks(model: nn.Module, found: Packed) -> Iterator[None]:
    def note(path: str, name: str, tensor: Tensor) -> None:
        found.setdefault(path, {}).setdefault(name, []).append(measure(tensor))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(_before(path, note), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(_after(path, note)).remove)
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_floating_point():
                    note(path, name, parameter)
                    if parameter.requires_grad:
                        hook = parameter.register_hook(_gradient(path, f"{name}_grad", note))
                        stack.callback(hook.remove)
        yield


Note = Callable[[str, str, Tensor], None]


def _before(path: str, note: Note) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in floats((args, kwargs)):
            note(path, "input", tensor)

    return hook


def _after(path: str, note: Note) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in floats(output):
            note(path, "activation", tensor)
            if tensor.requires_grad:
                tensor.register_hook(_gradient(path, "activation_grad", note))  # type: ignore[no-untyped-call]

    return hook


def _gradient(path: str, name: str, note: Note) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        note(path, name, grad.detach())

    return hook
