"""Which module is to blame, for an error message. Nothing here runs while training is healthy.

:func:`explain` finds where a non-finite value was born, by replaying a batch with hooks on: is it the input, the weights,
or which module's output (forward) or input gradient (backward) is the first non-finite tensor. :func:`dtype_trouble` reads
off a traceback which module an error of torch about a dtype came from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mprun.data.base import Batch
from mprun.precision.policy import map_tensors
from mprun.training.env import capture_rng, restore_rng
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


def input_overflow(state: TrainState, window: Sequence[Batch]) -> str | None:
    """One clause that names the samples of ``window`` with an input that the cast makes infinite; None without one."""
    bad = []
    for batch in window:
        for found in state.policy.overflowing(batch.inputs):
            rows = found.flatten(1).any(1) if found.ndim > 1 else found
            bad += batch.ids[rows.cpu()].tolist() if rows.shape == batch.ids.shape else batch.ids.tolist()
    if not bad:
        return None
    dtype = state.policy.input_dtype
    return (
        f"an input of sample {_some(sorted(set(bad)))} becomes inf when precision.mode={state.policy.mode} casts it to "
        f"{str(dtype).removeprefix('torch.')}, whose largest number is {torch.finfo(dtype).max:g}: normalise the data, or use "
        "precision.mode=autocast with an FP32 rule for the module that takes it"
    )


def explain(state: TrainState, window: Sequence[Batch], *, loss_scale: float | None = None) -> str:
    """One clause that names the first non-finite tensor of ``window``: input, weight, forward or backward.

    Runs forward and backward again on the current weights; buffers, gradients and random states are put back.

    Args:
        state: as it is now; it may have gone on since the step in question.
        window: the micro-batches of the step.
        loss_scale: the S of the step, which an overflow has lowered since; None for the present one.
    """
    rng = capture_rng()
    # Not through torch.compile, whose code calls no hooks.
    state = replace(state, forward=state.model)
    if loss_scale is not None:
        state.scale = replace(state.scale, scale=torch.full_like(state.scale.scale, loss_scale))
    try:
        return _explain(state, window)
    finally:
        restore_rng(rng)


def _explain(state: TrainState, window: Sequence[Batch]) -> str:
    for batch in window:
        if samples := nonfinite_samples(batch):
            return f"the input of sample {_some(samples)} is NaN or inf: bad data, not precision"
        if text := input_overflow(state, [batch]):
            return text
    for name, p in state.model.named_parameters():
        if not _finite(p):
            return f"the parameter {name} is already NaN or inf"
    buffers = state.start_window()
    valid = sum((valid_targets(batch.targets, state.task) for batch in window), start=torch.zeros_like(state.applied))
    try:
        for batch in window:
            if found := _replay(state, batch, valid):
                return found
            state.model.zero_grad(set_to_none=True)  # half gradients of several micro-batches are not added up in half
    finally:
        buffers.restore(state.model.modules())
        state.model.zero_grad(set_to_none=True)
    return "a second pass over the same batch stays finite (random layers differ); no module could be named"


def _replay(state: TrainState, batch: Batch, valid: Tensor) -> str | None:
    """Forward and backward of one micro-batch with hooks; the clause that names the culprit, or None.

    ``valid`` counts the targets of the whole window, by which the step divides.
    """
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

    # All modules, not leaves only: an operation in the forward of a container is the container's own. Inner hooks fire
    # first, so what is found is the innermost module that turned finite inputs into a bad output.
    handles = [module.register_forward_hook(after_forward) for module in state.model.modules()]
    try:
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


# What torch says where a module cannot be computed in half as it is written, and what to do about it.
DTYPE_TROUBLE = {
    r"cannot be converted to type \S+ without overflow": (
        "a constant is beyond the range of {dtype}: use torch.finfo(x.dtype).min, or keep the module in FP32: "
        "precision.fp32_modules=[{path}]"
    ),
    r"unsafe to autocast|binary_cross_entropy of half": (
        "return logits and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)"
    ),
    r"maximum recursion depth": (
        "if its forward calls super(type(self), self), write super(): the module's class gets a subclass that casts its inputs"
    ),
    # '"cdist" not implemented for 'Half'', 'Low precision dtypes not supported', 'must be either float or double' ...
    r"not implemented for '(Half|BFloat16|ComplexHalf)'|[Ll]ow precision|[Uu]nsupported (dtype|ScalarType) \w*(Half|BFloat16)"
    r"|(either|other than) float (or|and) double|float, double|Float or Double": (
        "torch has no {dtype} kernel for it here: compute it in float32 (x.float()), or keep the module in FP32: "
        "precision.fp32_modules=[{path}]"
    ),
    # 'mat1 and mat2 must have the same dtype, but got Float and Half' and its relatives, some of which name no dtype at all.
    # A clash of other dtypes (Double and Float) is there in FP32 too, and is not ours to explain.
    r"(?s)(?!.*types: Long)(?=.*(Half|BFloat16)|(?!.*(Float|Double|Long|Int|Bool|float|double|long|int\b)))"
    r"(?=.*(same dtype|scalar type|should be the same|dtypes match|dtype to be equal|expected dtype))": (
        "give new tensors the dtype of the input (dtype=x.dtype), or keep the module in FP32: precision.fp32_modules=[{path}]"
    ),
}
# The same, from the backward pass of a function of the user's own.
CUSTOM_BACKWARD = (
    "decorate its forward with @torch.amp.custom_fwd and its backward with @torch.amp.custom_bwd (device_type=...), "
    "or cast what they take"
)


def dtype_trouble(error: Exception, state: TrainState) -> str | None:
    """What to tell instead of ``error``, if it is about a dtype: the module it came from, where, and the cure.

    Returns:
        Two lines; None for any other error, and in ``full`` mode, where mprun has cast nothing.
    """
    cure = next((cure for pattern, cure in DTYPE_TROUBLE.items() if re.search(pattern, str(error))), None)
    if cure is None or state.policy.mode == "full" or not isinstance(error, RuntimeError | TypeError):
        return None
    names = {module: path for path, module in state.model.named_modules()}
    subject, path = f"the model itself ({type(state.model).__name__})", ""
    trace = error.__traceback__
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        # The first argument, which need not be called self.
        owner = values.get(code.co_varnames[0]) if code.co_argcount else None
        where = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        if isinstance(owner, nn.Module) and owner in names:
            path = names[owner]
            subject = f"{path or 'the model itself'} ({type(owner).__name__}, {where})"
        elif isinstance(owner, torch.autograd.function.BackwardCFunction):
            function = type(owner).__name__.removesuffix("Backward")
            path, subject, cure = "", f"the backward of {function} ({where})", CUSTOM_BACKWARD
        trace = trace.tb_next
    return (
        f"{subject} does not run at precision={state.policy.name}: {str(error).strip().splitlines()[0]}\n"
        + cure.format(path=path or "'**'", dtype=str(state.policy.compute_dtype).removeprefix("torch."))
    )
