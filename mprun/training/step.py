"""One optimizer step, and one evaluation.

A step consumes a window of k micro-batches::

    for each micro-batch:  forward -> FP32 loss / valid targets of the window -> times S -> backward (gradients add up)
    global norm (divided by S) -> finite? -> clip on the true norm
    finite:      optimizer step on gradients times clip/S -> EMA -> learning-rate position
    not finite:  nothing moves: parameters, optimizer state, EMA, schedule, buffers are as before the window
    adjust S; gradients to None

Whether the window is applied is decided by tensors on the device (``Verdict``): a fused optimizer takes the flag, and
buffers, EMA, counters and S follow it by ``torch.where``. The host reads nothing here, unless the optimizer has no fused
kernel, which needs one answer a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mprun.config import Task
from mprun.data.base import IGNORE, Batch
from mprun.errors import ConfigError
from mprun.numerics.probe import Probe
from mprun.precision.policy import PrecisionPolicy, map_tensors
from mprun.training.result import StepResult, Verdict
from mprun.training.state import TrainState
from mprun.training.targets import check_output


def train_step(state: TrainState, window: Sequence[Batch], *, probe: Probe | None = None) -> StepResult:
    """Run one window through forward, backward and (if all is finite) the optimizer. See the module's docstring.

    Args:
        state: moved in place: parameters, optimizer state, EMA, scale, counters. On a skip only scale and counters.
        window: the micro-batches of one optimizer step, on the state's device.
        probe: inside its ``watch``: looks at gradients and updates. It moves nothing.

    Raises:
        ConfigError: no trainable parameter received a gradient.
    """
    buffers = state.start_window()
    sums = accumulate(state, window)
    grads = _gradients(state)
    if probe is not None:
        probe.gradients(state)
    norm, bad_grad = gradient_norm(state, grads)
    verdict = judge(state, sums, bad_grad | sums.lost)
    lr = state.rates.at(state.applied) * state.base_lr
    optimizer_step(state, grads, norm=norm, lr=lr, verdict=verdict)
    if probe is not None:
        probe.updates(state, verdict.applied)
    state.weights.write_back()
    state.undo_buffers(buffers, verdict.applied)
    state.applied = state.applied + verdict.applied
    if state.ema is not None:
        state.ema.update(state.named_truth(), verdict.applied)
    used = state.scale
    state.scale = state.loss_scale.adjust(
        used, overflow=verdict.overflow, applied=verdict.applied, failed=verdict.failed
    )
    for p in state.params:
        p.grad = None
    skips = state.scale.consecutive_skips
    numbers = (
        sums.loss,
        norm,
        used.scale,
        lr,
        sums.valid,
        sums.correct,
        verdict.outcome,
        state.applied,
        skips,
        sums.inf_inputs,
    )
    return StepResult(torch.stack([number.double() for number in numbers]), sums.micro_batches)


@dataclass(frozen=True)
class WindowSums:
    """What the micro-batches of a window added up to, beside the gradients. 0-D tensors on the device.

    Attributes:
        loss: mean over the window's valid targets, float32.
        valid: valid targets of the whole window, int64.
        correct: correct predictions, int64.
        lost: the gradients of a micro-batch before the last were non-finite, bool. What follows it is not looked at any
            more: the first bad micro-batch decides, whether or not the rest was computed.
        bad_input: an input was NaN or inf, or became inf by the policy's cast, bool.
        inf_inputs: input tensors that became inf by the policy's cast, int64.
        micro_batches: how many were computed.
    """

    loss: Tensor
    valid: Tensor
    correct: Tensor
    lost: Tensor
    bad_input: Tensor
    inf_inputs: Tensor
    micro_batches: int


def accumulate(state: TrainState, window: Sequence[Batch], *, watch: bool = False) -> WindowSums:
    """Forward and backward of every micro-batch; gradients add up on the FP32 truth.

    On the CPU, where asking costs nothing, the rest of a lost window is not computed. Looking at all gradients after every
    micro-batch does cost something there. Under a loss scale, where overflows are part of the work, it is done; otherwise a
    non-finite gradient ends the run, and it is enough to ask who was first when a loss or an input is non-finite. ``watch``
    looks in any case.
    """
    cpu = state.device.type == "cpu"
    watched = watch or state.loss_scale.active or not cpu
    zero = torch.zeros_like(state.applied)
    valid = sum((valid_targets(batch.targets, state.task) for batch in window), start=zero)
    loss = torch.zeros((), device=state.device)
    correct, inf_inputs, lost, bad_input, done = zero, zero, zero > 0, zero > 0, 0
    for batch in window:
        made_inf = sum((bad.any() for bad in state.policy.overflowing(batch.inputs)), start=zero)
        bad = nonfinite(batch.inputs, start=made_inf > 0)
        inf_inputs = inf_inputs + made_inf
        part, hits = forward_loss(state, batch, valid)
        if done and not watched and (bad | ~part.detach().isfinite()).tolist():
            lost = _lost(state)
        bad_input = torch.where(lost, bad_input, bad_input | bad)
        if part.requires_grad:
            state.loss_scale.scaled(part, state.scale).backward()  # type: ignore[no-untyped-call]
        state.weights.collect()
        loss = torch.where(lost, loss, loss + part.detach())
        correct, done = correct + hits, done + 1
        if done < len(window):
            lost = lost | _lost(state) if watched else lost
            if cpu and (lost | ~loss.isfinite()).tolist():
                break
    return WindowSums(loss, valid, correct, lost, bad_input, inf_inputs, done)


def _lost(state: TrainState) -> Tensor:
    """Whether a gradient that was added up so far is non-finite: 0-D bool."""
    grads = [grad for p in state.params if (grad := p.grad) is not None and grad.layout is torch.strided]
    # Where there is none, the end of the window says why that cannot be.
    return ~total_norm(grads).isfinite() if grads else torch.zeros_like(state.applied, dtype=torch.bool)


def nonfinite(value: Any, *, start: Tensor) -> Tensor:
    """``start`` or whether a floating-point tensor in ``value`` holds NaN or inf: 0-D bool on the device."""
    found = [start]

    def look(t: Tensor) -> None:
        if t.is_floating_point() and t.numel():
            # On the CPU a tenth of the time of isfinite().all(), which makes five tensors. Both are NaN if there is one, and
            # NaN or inf times 0 is NaN, which differs from anything.
            low, high = t.aminmax()
            found.append(low * 0 != high * 0)

    map_tensors(value, look)
    return reduce(torch.logical_or, found)


def valid_targets(targets: Tensor, task: Task) -> Tensor:
    """How many targets count: 0-D int64. Labels of ``IGNORE`` (-100) do not; every number of a regression does."""
    if task is Task.regression or targets.is_floating_point():
        count = targets.numel() if task is Task.regression else targets.numel() // targets.shape[1]
        return torch.full((), count, dtype=torch.int64, device=targets.device)
    return (targets != IGNORE).sum()


def forward_loss(state: TrainState, batch: Batch, valid: Tensor) -> tuple[Tensor, Tensor]:
    """This micro-batch's share of the window's loss (float32, 0-D, with graph) and its correct predictions (int64)."""
    output = state.run_forward(batch.inputs)
    total, correct = summed_loss(
        output, batch.targets, state.task, label_smoothing=state.label_smoothing, num_classes=state.num_classes
    )
    # A window without valid targets has loss 0 and gradients 0, not 0/0.
    mean = total / valid.clamp(min=1)
    return mean if state.loss_weight == 1 else mean * state.loss_weight, correct


def summed_loss(
    output: Tensor, targets: Tensor, task: Task, *, label_smoothing: float = 0.0, num_classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """The loss summed over valid targets, computed and reduced in float32, and the number of correct predictions.

    Args:
        output: logits (B, C) or (B, C, ...), or (B, T, V) for a language model, or predictions of the targets' shape; any
            float dtype.
        targets: class indices (B), (B, ...) or (B, T), class probabilities of the output's shape, or numbers.
        task: which loss: cross-entropy or squared error.
        label_smoothing: share of the target mass spread over all classes.
        num_classes: of the dataset, where known.

    Raises:
        ConfigError: output and targets do not belong together.
    """
    check_output(output, targets, task, num_classes)
    output = output.float()
    if task is Task.regression:
        difference = output.reshape(targets.shape) - targets.float()
        return difference.square().sum(), torch.zeros((), dtype=torch.int64, device=output.device)
    if task is Task.language_model:
        output, targets = output.flatten(0, -2), targets.flatten()
    if not targets.is_floating_point():
        targets = targets.long()  # int32 labels are labels too
    total = F.cross_entropy(output, targets, reduction="sum", ignore_index=IGNORE, label_smoothing=label_smoothing)
    labels = targets.argmax(1) if targets.is_floating_point() else targets
    return total, (output.detach().argmax(1) == labels).sum()


def gradient_norm(state: TrainState, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The true global norm of the gradients, float32, 0-D, and whether any of them is non-finite (bool).

    One pass serves both: a sum of squares is finite only if every term is. (It is also infinite where the norm itself is
    beyond float32, above 1.8e19; that counts as non-finite.) With a fused optimizer the gradients are still scaled here, and
    its kernel divides in float32, which keeps finite numbers finite. Otherwise they are divided by S in place first, so
    that the test looks at the very numbers that will be applied.
    """
    if state.loss_scale.active and not state.fused:
        torch._foreach_mul_(list(grads), state.loss_scale.inverse(state.scale))
    norm = total_norm(grads)
    bad = ~norm.isfinite()
    return norm * state.loss_scale.inverse(state.scale) if state.loss_scale.active and state.fused else norm, bad


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all elements of ``grads``, float32, 0-D: ``torch.nn.utils.get_total_norm`` on one device.

    Args:
        grads: at least one, dense; half ones are widened first, complex ones taken as pairs.
    """
    wide = [grad if grad.dtype is torch.float32 else _wide(grad) for grad in grads]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide)))
    return norm


def judge(state: TrainState, sums: WindowSums, bad_grad: Tensor) -> Verdict:
    """Tell an overflow (the scale's fault) from a non-finite loss or input (not its fault) and from an empty window."""
    bad_loss = ~sums.loss.isfinite() | (bad_grad & sums.bad_input)
    bad_grad = bad_grad & ~bad_loss
    none = torch.zeros_like(bad_loss)
    overflow, nonfinite_grad = (bad_grad, none) if state.loss_scale.active else (none, bad_grad)
    empty = (sums.valid == 0) & ~bad_loss & ~bad_grad
    return Verdict(~(bad_loss | bad_grad | empty), overflow, bad_loss, nonfinite_grad, empty)


@torch.no_grad()
def optimizer_step(state: TrainState, grads: Sequence[Tensor], *, norm: Tensor, lr: Tensor, verdict: Verdict) -> None:
    """Clip on the true norm and step, or leave everything as it is where the verdict says so.

    For a fused kernel unscaling and clipping are one divisor, S/clip. Without a scale the clip is that of
    ``clip_grad_norm_``, so that FP32 equals a plain loop bit for bit.
    """
    optimizer = state.optimizer
    scaled = state.fused and state.loss_scale.active
    divisor = state.scale.scale if scaled else None
    if state.clip_norm is not None:
        clip = (state.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if divisor is None:
            torch._foreach_mul_(list(grads), clip)
        else:
            divisor = divisor / clip
    if state.fused:
        for group in optimizer.param_groups:
            group["lr"].copy_(lr)
        optimizer.found_inf = (~verdict.applied).float()  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.step()
        return
    # No fused kernel: the one answer that the host needs, and the rate with it, in a single read.
    applied, rate = torch.stack([verdict.applied.double(), lr.double()]).tolist()
    if applied:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def _gradients(state: TrainState) -> list[Tensor]:
    grads = [grad for p in state.params if (grad := p.grad) is not None]
    if any(grad.layout is not torch.strided for grad in grads):
        name = next(n for n, p in state.weights if p.grad is not None and p.grad.layout is not torch.strided)
        raise ConfigError(
            f"the gradient of {name} is sparse, which neither the loss scale nor the finite test covers: "
            "build the module with sparse=False"
        )
    if not grads:
        raise ConfigError(
            f"none of the {len(state.params)} trainable parameters received a gradient: "
            "the loss does not depend on them (is the output detached, or are the used modules frozen?)"
        )
    return grads


def _wide(grad: Tensor) -> Tensor:
    """A norm summed in half would overflow at 65504 (``pure`` mode); a complex number is a pair of real ones."""
    if grad.is_complex():
        return torch.view_as_real(grad.resolve_conj())
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad


@torch.no_grad()
def eval_step(state: TrainState, policy: PrecisionPolicy, batches: Iterable[Batch]) -> dict[str, float]:
    """Loss (mean over valid targets) and top-1 (fraction) of the model over ``batches``. Waits for the device once.

    Every module's ``training`` flag is put back as it was, also after an error, and nothing is drawn from the training
    RNG. Sums are float64 and int64.
    """
    flags = [(module, module.training) for module in state.model.modules()]
    state.model.eval()
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    hits = torch.zeros_like(state.applied)
    count = torch.zeros_like(state.applied)
    try:
        for batch in batches:
            output = state.run_forward(batch.inputs, policy)
            loss, correct = summed_loss(output, batch.targets, state.task, num_classes=state.num_classes)
            total, hits = total + loss.double(), hits + correct
            count = count + valid_targets(batch.targets, state.task)
    finally:
        for module, training in flags:
            module.training = training
    n = max(int(count), 1)
    metrics = {"loss": float(total) / n if int(count) else float("nan")}
    if state.task is not Task.regression:
        # The argmax of NaN is class 0, which is right now and then: an evaluation that broke has no accuracy.
        metrics["top1"] = float("nan") if metrics["loss"] != metrics["loss"] else int(hits) / n
    return metrics
