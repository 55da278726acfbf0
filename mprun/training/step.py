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

import torch
import torch.nn.functional as F
from torch import Tensor

from mprun.config import Task
from mprun.data.base import Batch
from mprun.errors import ConfigError
from mprun.precision.policy import PrecisionPolicy
from mprun.training.state import TrainState

IGNORE = -100
APPLIED, OVERFLOW, NONFINITE_LOSS, NONFINITE_GRAD, EMPTY = range(5)


@dataclass(frozen=True)
class Verdict:
    """What happens to a window: 0-D bool tensors on the device, exactly one of the first four true."""

    applied: Tensor
    overflow: Tensor
    nonfinite_loss: Tensor
    nonfinite_grad: Tensor
    empty: Tensor

    @property
    def failed(self) -> Tensor:
        """Dropped for a non-finite value."""
        return self.overflow | self.nonfinite_loss | self.nonfinite_grad

    @property
    def outcome(self) -> Tensor:
        """0-D float64 code: APPLIED, OVERFLOW, NONFINITE_LOSS, NONFINITE_GRAD or EMPTY."""
        return (
            self.overflow * OVERFLOW
            + self.nonfinite_loss * NONFINITE_LOSS
            + self.nonfinite_grad * NONFINITE_GRAD
            + self.empty * EMPTY
        ).double()


@dataclass(frozen=True)
class StepRow:
    """A step's numbers on the host."""

    loss: float
    grad_norm: float
    loss_scale: float
    lr: float
    valid_targets: int
    correct: int
    outcome: int
    steps_applied: int
    consecutive_skips: int
    inf_inputs: int

    @property
    def applied(self) -> bool:
        """Whether the optimizer step was applied."""
        return self.outcome == APPLIED


@dataclass(frozen=True)
class StepResult:
    """A step's numbers on the device, and how many micro-batches were computed.

    ``packed`` is float64 of shape (10,): the fields of :class:`StepRow`. ``loss`` is the mean over the window's valid
    targets (never times S), ``grad_norm`` the true norm before clipping, ``loss_scale`` the S of this window and
    ``lr`` the learning rate that this step used or would have used. ``inf_inputs`` counts the input tensors that the cast
    to the policy's dtype made infinite.
    """

    packed: Tensor
    micro_batches: int

    @property
    def loss(self) -> Tensor:
        """Mean loss over the window's valid targets, 0-D float64."""
        return self.packed[0]

    @property
    def grad_norm(self) -> Tensor:
        """True global gradient norm before clipping, 0-D float64; non-finite on a skip."""
        return self.packed[1]

    @property
    def loss_scale(self) -> Tensor:
        """The S of this window, 0-D float64."""
        return self.packed[2]

    @property
    def lr(self) -> Tensor:
        """The learning rate of this step, 0-D float64."""
        return self.packed[3]

    @property
    def valid_targets(self) -> Tensor:
        """How many targets counted, 0-D float64."""
        return self.packed[4]

    @property
    def applied(self) -> Tensor:
        """Whether the optimizer step was applied, 0-D bool."""
        return self.packed[6] == APPLIED

    def read(self) -> StepRow:
        """The numbers on the host. Waits for the device."""
        return unpack(self.packed.tolist())


def unpack(values: Sequence[float]) -> StepRow:
    """A row of packed numbers as a :class:`StepRow`."""
    loss, norm, scale, lr, *counts = values
    return StepRow(loss, norm, scale, lr, *(int(count) for count in counts))


def train_step(state: TrainState, window: Sequence[Batch]) -> StepResult:
    """Run one window through forward, backward and (if all is finite) the optimizer. See the module's docstring.

    Args:
        state: moved in place: parameters, optimizer state, EMA, scale, counters. On a skip only scale and counters.
        window: the micro-batches of one optimizer step, on the state's device.

    Raises:
        ConfigError: no trainable parameter received a gradient.
    """
    buffers = state.start_window()
    valid = sum((valid_targets(batch.targets, state.task) for batch in window), start=torch.zeros_like(state.applied))
    loss = torch.zeros((), device=state.device)
    correct = torch.zeros_like(state.applied)
    inf_inputs = torch.zeros_like(state.applied)
    done = 0
    for batch in window:
        inf_inputs = sum((bad.any() for bad in state.policy.overflowing(batch.inputs)), start=inf_inputs)
        part, hits = forward_loss(state, batch, valid)
        if part.requires_grad:
            state.loss_scale.scaled(part, state.scale).backward()  # type: ignore[no-untyped-call]
        state.weights.collect()
        loss, correct, done = loss + part.detach(), correct + hits, done + 1
        if done < len(window) and _lost(state, loss):
            break
    grads = _gradients(state)
    norm, bad_grad = gradient_norm(state, grads)
    verdict = judge(state, loss=loss, bad_grad=bad_grad, empty=valid == 0)
    lr = state.lr_table.take(state.applied.clamp(max=len(state.lr_table) - 1)) * state.base_lr
    optimizer_step(state, grads, norm=norm, lr=lr, verdict=verdict)
    state.weights.write_back()
    state.undo_buffers(buffers, verdict.applied)
    state.applied = state.applied + verdict.applied
    if state.ema is not None:
        state.ema.update(state.named_truth(), verdict.applied)
    used = state.scale
    state.scale = state.loss_scale.adjust(
        used, overflow=verdict.overflow, applied=verdict.applied, failed=verdict.failed
    )
    state.optimizer.zero_grad(set_to_none=True)
    numbers = (
        loss,
        norm,
        used.scale,
        lr,
        valid,
        correct,
        verdict.outcome,
        state.applied,
        state.scale.consecutive_skips,
        inf_inputs,
    )
    return StepResult(torch.stack([number.double() for number in numbers]), done)


def valid_targets(targets: Tensor, task: Task) -> Tensor:
    """How many targets count: 0-D int64. Labels of ``IGNORE`` (-100) do not; every number of a regression does."""
    if task is Task.regression or targets.is_floating_point():
        count = targets.shape[0] if task is not Task.regression else targets.numel()
        return torch.full((), count, dtype=torch.int64, device=targets.device)
    return (targets != IGNORE).sum()


def forward_loss(state: TrainState, batch: Batch, valid: Tensor) -> tuple[Tensor, Tensor]:
    """This micro-batch's share of the window's loss (float32, 0-D, with graph) and its correct predictions (int64)."""
    output = state.run_forward(batch.inputs)
    total, correct = summed_loss(output, batch.targets, state.task, label_smoothing=state.label_smoothing)
    # A window without valid targets has loss 0 and gradients 0, not 0/0.
    return total / valid.clamp(min=1) * state.loss_weight, correct


def summed_loss(output: Tensor, targets: Tensor, task: Task, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss summed over valid targets, computed and reduced in float32, and the number of correct predictions.

    Args:
        output: logits (B, C), or (B, T, V) for a language model, or predictions of the targets' shape; any float dtype.
        targets: class indices (B) or (B, T), class probabilities (B, C), or numbers.
        task: which loss: cross-entropy or squared error.
        label_smoothing: share of the target mass spread over all classes.
    """
    output = output.float()
    if task is Task.regression:
        difference = output.reshape(targets.shape) - targets.float()
        return difference.square().sum(), torch.zeros((), dtype=torch.int64, device=output.device)
    if task is Task.language_model:
        output, targets = output.flatten(0, -2), targets.flatten()
    total = F.cross_entropy(output, targets, reduction="sum", label_smoothing=label_smoothing)
    labels = targets.argmax(-1) if targets.is_floating_point() else targets
    return total, (output.detach().argmax(-1) == labels).sum()


def gradient_norm(state: TrainState, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The true global norm of the (still scaled) gradients, float32, 0-D, and whether any of them is non-finite (bool).

    One pass serves both: a sum of squares is finite only if every term is, and then dividing by S and clipping gives finite
    numbers too. (It is also infinite where the norm itself is beyond float32, above 1.8e19; that counts as non-finite.)
    """
    scaled = torch.nn.utils.get_total_norm([_wide(grad) for grad in grads])
    norm = scaled * state.loss_scale.inverse(state.scale) if state.loss_scale.active else scaled
    return norm, ~scaled.isfinite()


def judge(state: TrainState, *, loss: Tensor, bad_grad: Tensor, empty: Tensor) -> Verdict:
    """Tell an overflow (the scale's fault) from a non-finite loss (not its fault) and from an empty window."""
    bad_loss = ~loss.isfinite()
    bad_grad = bad_grad & ~bad_loss
    none = torch.zeros_like(bad_loss)
    overflow, nonfinite_grad = (bad_grad, none) if state.loss_scale.active else (none, bad_grad)
    empty = empty & ~bad_loss & ~bad_grad
    return Verdict(~(bad_loss | bad_grad | empty), overflow, bad_loss, nonfinite_grad, empty)


@torch.no_grad()
def optimizer_step(state: TrainState, grads: Sequence[Tensor], *, norm: Tensor, lr: Tensor, verdict: Verdict) -> None:
    """Unscale, clip on the true norm and step, or leave everything as it is where the verdict says so.

    Unscaling and clipping are one factor, clip/S. A fused kernel divides by its inverse on the way; otherwise it is one
    multiplication. Without a scale the clip is that of ``clip_grad_norm_``, so that FP32 equals a plain loop bit for bit.
    """
    optimizer = state.optimizer
    clip = None
    if state.clip_norm is not None:
        clip = (state.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    divisor = None
    if state.fused and state.loss_scale.active:
        divisor = state.scale.scale if clip is None else state.scale.scale / clip
    elif state.loss_scale.active:
        inverse = state.loss_scale.inverse(state.scale)
        torch._foreach_mul_(list(grads), inverse if clip is None else clip * inverse)
    elif clip is not None:
        torch._foreach_mul_(list(grads), clip)
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
    grads = [p.grad for p in state.params if p.grad is not None]
    for p, (name, _) in zip(state.params, (item for item in state.weights if item[1].requires_grad), strict=True):
        if p.grad is not None and p.grad.layout != torch.strided:
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
        return torch.view_as_real(grad)
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad


def _lost(state: TrainState, loss: Tensor) -> bool:
    """Whether the window is known to be lost, where the host can tell without waiting: on the CPU."""
    if state.device.type != "cpu":
        return False
    norm = torch.nn.utils.get_total_norm([_wide(p.grad) for p in state.params if p.grad is not None])
    return not bool(torch.stack([loss, norm.to(loss.dtype)]).isfinite().all().tolist())


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
            loss, correct = summed_loss(output, batch.targets, state.task)
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
