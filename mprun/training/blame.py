"""Where a non-finite value was born: replays a batch with hooks on, after the fact.

Nothing here runs while training is healthy. It answers one question for an error message: is it the input, the weights,
or which module's output (forward) or input gradient (backward) is the first non-finite tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun.data.base import Batch
from mprun.precision.policy import map_tensors
from mprun.training.state import TrainState
from mprun.training.step import forward_loss, valid_targets


def nonfinite_samples(batch: Batch) -> list[int]:
    """Ids of the samples of ``batch`` whose float inputs or targets hold NaN or inf."""
    bad = torch.zeros(len(batch.ids), dtype=torch.bool)

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.ndim and tensor.shape[0] == len(bad):
            bad.logical_or_(
                ~tensor.detach().isfinite().flatten(1 if tensor.ndim > 1 else 0).reshape(len(bad), -1).all(1).cpu()
            )
        return tensor

    map_tensors(batch.inputs, look)
    look(batch.targets)
    return [int(i) for i in batch.ids[bad]]


def explain(state: TrainState, window: Sequence[Batch]) -> str:
    """One clause that names the first non-finite tensor of ``window``: input, weight, forward or backward.

    Runs forward and backward again on the current weights; buffers and gradients are put back.
    """
    for batch in window:
        if samples := nonfinite_samples(batch):
            return f"the input of sample {_some(samples)} is NaN or inf: bad data, not precision"
        cast = state.policy.cast_inputs(batch.inputs)
        if not _finite(cast):
            return f"an input of samples {_some(batch.ids.tolist())} is inf in {state.policy.compute_dtype}: normalise the data"
    for name, p in state.model.named_parameters():
        if not _finite(p):
            return f"the parameter {name} is already NaN or inf"
    buffers = state.start_window()
    try:
        for batch in window:
            if found := _replay(state, batch):
                return found
    finally:
        state.undo_buffers(buffers, torch.zeros((), dtype=torch.bool, device=state.device))
        state.optimizer.zero_grad(set_to_none=True)
    return "a second pass over the same batch stays finite (random layers differ); no module could be named"


def _replay(state: TrainState, batch: Batch) -> str | None:
    """Forward and backward of one batch with hooks; the clause that names the culprit, or None."""
    found: list[str] = []
    names = {module: name or "the model" for name, module in state.model.named_modules()}

    def after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not found and _finite(args) and not _finite(output):
            found.append(
                f"first non-finite output: {names[module]} ({type(module).__name__}), whose input reaches {_amax(args):.3g}; "
                "keep it in FP32, use BF16, or lower the learning rate"
            )

        map_tensors(output, lambda t: t.register_hook(partial(after_backward, module)) if t.requires_grad else None)

    def after_backward(module: nn.Module, grad: Tensor) -> None:
        # Gradients arrive from the loss backwards, so the first bad one is the nearest to where it was born.
        if not found and not _finite(grad):
            found.append(
                f"first non-finite gradient: at the output of {names[module]} ({type(module).__name__}), from what follows it"
            )

    leaves = [module for module in state.model.modules() if not any(module.children())]
    handles = [module.register_forward_hook(after_forward) for module in leaves]
    try:
        valid = valid_targets(batch.targets, state.task)
        loss, _ = forward_loss(state, batch, valid)
        if found or not loss.isfinite():
            return found[0] if found else "the model's output is finite, the loss is not: check the targets"
        state.loss_scale.scaled(loss, state.scale).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    bad = [name for name, p in state.model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    return f"first non-finite gradient: {bad[-1]} (of {len(bad)} parameters)" if bad else None


def _finite(value: Any) -> bool:
    ok = True

    def look(tensor: Tensor) -> Tensor:
        nonlocal ok
        ok = ok and (not tensor.is_floating_point() or bool(tensor.detach().isfinite().all()))
        return tensor

    map_tensors(value, look)
    return ok


def _amax(value: Any) -> float:
    most = 0.0

    def look(tensor: Tensor) -> Tensor:
        nonlocal most
        if tensor.is_floating_point() and tensor.numel():
            most = max(most, float(tensor.detach().abs().max()))
        return tensor

    map_tensors(value, look)
    return most


def _some(ids: Sequence[int], most: int = 5) -> str:
    shown = ", ".join(str(i) for i in ids[:most])
    return shown if len(ids) <= most else f"{shown} and {len(ids) - most} more"
