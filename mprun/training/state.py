"""``TrainState``: everything that a run needs to go on, and nothing else.

What moves lives here: parameters, optimizer state, loss scale, EMA, counters, the place in the data. What does not
move (policy, rules, schedule) stands beside it as frozen values. Counters that decide about a step are 0-D tensors on
the device; the host keeps its own copy, which is true at log points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.config import Config, Task
from mprun.errors import ConfigError
from mprun.precision.casting import apply_plan
from mprun.precision.master import Masters, take_truths
from mprun.precision.overrides import PlanEntry, make_plan
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.scaling import LossScale, ScaleState
from mprun.training.ema import Ema
from mprun.training.optim import build_optimizer, is_fused
from mprun.training.rates import Rates
from mprun.training.recompute import apply_checkpointing
from mprun.training.schedule import Schedule


@dataclass
class Position:
    """Where in the data the next window starts: micro-batch ``batch`` of epoch ``epoch``."""

    epoch: int = 0
    batch: int = 0


@dataclass
class HostCounters:
    """What the host knows. ``attempts`` is always exact; the others are true as of the last log point."""

    attempts: int = 0
    applied: int = 0
    skipped: int = 0
    nonfinite: int = 0
    empty: int = 0


@dataclass
class TrainState:
    """A run at a step border.

    Attributes:
        model: the module that forward uses (θ).
        forward: the same module, or its compiled form.
        policy: the precision policy of training.
        loss_scale: the rule of the loss scale; ``scale`` is where it stands.
        schedule: applied steps -> learning-rate multiplier; ``rates`` looks it up on the device.
        optimizer: owns the FP32 truth.
        params: the tensors that the optimizer owns, in the model's order (its groups have another), so that the global norm
            adds up in the order of a plain loop.
        weights: FP32 truth by name (masters where the model's parameters are half).
        plan: what the precision rules decided, module by module.
        applied: applied optimizer steps, 0-D int64 on the device. LR, EMA and warm-up count these.
        task: what the loss is.
    """

    model: nn.Module
    forward: nn.Module
    device: torch.device
    policy: PrecisionPolicy
    loss_scale: LossScale
    scale: ScaleState
    schedule: Schedule
    rates: Rates
    optimizer: Optimizer
    params: list[Tensor]
    weights: Masters
    plan: list[PlanEntry]
    base_lr: float
    task: Task
    clip_norm: float | None
    label_smoothing: float
    loss_weight: float
    channels_last: bool
    applied: Tensor
    ema: Ema | None = None
    position: Position = field(default_factory=Position)
    counters: HostCounters = field(default_factory=HostCounters)

    @property
    def fused(self) -> bool:
        """Whether the optimizer obeys the finite flag on the device."""
        return is_fused(self.optimizer)

    def named_truth(self) -> Iterator[tuple[str, Tensor]]:
        """Names with the FP32 truth of every parameter, then every buffer: what the EMA is fed from."""
        yield from self.weights
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if _movable(buffer))

    def run_forward(self, inputs: Any, policy: PrecisionPolicy | None = None) -> Tensor:
        """The model's output for ``inputs``, under ``policy`` (the training policy if None), in one autocast region."""
        policy = policy or self.policy
        with policy.region(self.device.type):
            output: Tensor = self.forward(policy.cast_inputs(inputs, channels_last=self.channels_last))
        return policy.cast_output(output)

    def start_window(self) -> Sequence[tuple[nn.Module, str, Tensor]]:
        """Copies of every buffer, so that a window which is not applied can be undone (:meth:`undo_buffers`)."""
        return [
            (module, name, buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if _movable(buffer)
        ]

    @torch.no_grad()
    def undo_buffers(self, saved: Sequence[tuple[nn.Module, str, Tensor]], applied: Tensor) -> None:
        """Put ``saved`` back unless ``applied`` (0-D bool on the device; not read by the host)."""
        for module, name, old in saved:
            new = getattr(module, name)
            torch.where(applied, new, old, out=new)


def _refuse_other_dtypes(model: nn.Module) -> None:
    """A model must arrive in float32: that is the truth every policy starts from.

    Raises:
        ConfigError: names the first parameter that is not.
    """
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta:
            raise ConfigError(
                f"parameter {name} has no values yet (a lazy or meta module): initialise the model in its builder"
            )
        if p.is_floating_point() and p.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} arrives as {str(p.dtype).removeprefix('torch.')}, not float32: the precision policy casts "
                "parameters, a model must not do it itself (look for .half(), .double() or a default dtype)"
            )


def _movable(buffer: Tensor) -> bool:
    """Whether a buffer can be written in place: not if its elements share memory, as those of an expanded tensor do."""
    return all(stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def build_state(config: Config, model: nn.Module, schedule: Schedule, device: torch.device) -> TrainState:
    """The state before the first step.

    Args:
        config: the checked configuration.
        model: in FP32, on any device; it is moved to ``device`` in place.
        schedule: learning-rate multiplier by applied steps.
        device: where the run happens.

    Raises:
        ConfigError: the optimizer or its arguments are not legal, or nothing is trainable.
    """
    model = model.to(device=device)
    if config.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    policy = PrecisionPolicy.from_config(config.precision)
    rule = LossScale.from_config(config.precision.loss_scale)
    _refuse_other_dtypes(model)
    plan = make_plan(model, policy.fp32_modules, mode=policy.mode)
    truths = take_truths(model, mode=policy.mode)
    evaluation = policy.for_eval(config.precision.eval_dtype)
    apply_plan(policy, plan, eval_autocast=evaluation.mode == "autocast")
    if config.model.activation_checkpointing:
        apply_checkpointing(model)
    weights = Masters(model, truths)
    weights.write_back()
    optimizer = build_optimizer(config.optimizer, weights, device)
    state = TrainState(
        model=model,
        forward=torch.compile(model) if config.model.compile else model,  # type: ignore[arg-type]
        device=device,
        policy=policy,
        loss_scale=rule,
        scale=rule.start(device),
        schedule=schedule,
        rates=Rates(schedule, device),
        optimizer=optimizer,
        params=[p for _, p in weights if p.requires_grad],
        weights=weights,
        plan=plan,
        base_lr=config.optimizer.lr,
        task=config.dataset.task,
        clip_norm=config.train.clip_norm,
        label_smoothing=config.train.label_smoothing,
        loss_weight=config.train.loss_weight,
        channels_last=config.model.channels_last,
        applied=torch.zeros((), dtype=torch.int64, device=device),
    )
    if config.train.ema.decay is not None:
        ema = config.train.ema
        state.ema = Ema(state.named_truth(), decay=config.train.ema.decay, warmup=ema.warmup, device=device)
    return state
