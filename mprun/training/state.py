"""``TrainState``: everything that a run needs to go on, and nothing else.

What moves lives here: parameters, optimizer state, loss scale, EMA, counters, the place in the data. What does not
move (policy, rules, schedule) stands beside it as frozen values. Counters that decide about a step are 0-D tensors on
the device; the host keeps its own copy, which is true at log points.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from mprun.training.arrival import Parameters, check_arrival
from mprun.training.buffers import Form, Snapshot, forms, named_buffers, writable
from mprun.training.ema import Ema
from mprun.training.optim import build_optimizer, is_fused
from mprun.training.rates import Rates
from mprun.training.recompute import apply_checkpointing
from mprun.training.schedule import Schedule
from mprun.training.structure import Structure


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
        parameters: which they are and which are trained, to see that it stays so; ``forms``: shapes and dtypes of the buffers.
        written: parameters (module, name) that the forward pass writes to, as :mod:`~mprun.training.observe` saw.
        written_in_eval: what evaluation writes to; None before the first one.
        applied: applied optimizer steps, 0-D int64 on the device. LR, EMA and warm-up count these.
        task: what the loss is.
        num_classes: of the dataset; None where nobody said.
        fingerprint: of the initialisation, before any cast; None where it is not known any more.
        structure: the modules that hold something, known from step to step.
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
    parameters: Parameters
    forms: dict[str, Form]
    base_lr: float
    task: Task
    clip_norm: float | None
    label_smoothing: float
    loss_weight: float
    channels_last: bool
    applied: Tensor
    ema: Ema | None = None
    num_classes: int | None = None
    fingerprint: str | None = None
    written: frozenset[tuple[nn.Module, str]] = frozenset()
    written_in_eval: set[tuple[nn.Module, str]] | None = None
    position: Position = field(default_factory=Position)
    counters: HostCounters = field(default_factory=HostCounters)
    structure: Structure = field(init=False)

    def __post_init__(self) -> None:
        self.structure = Structure(self.model)

    @property
    def fused(self) -> bool:
        """Whether the optimizer obeys the finite flag on the device."""
        return is_fused(self.optimizer)

    def named_truth(self) -> Iterator[tuple[str, Tensor]]:
        """Names with the FP32 truth of every parameter, then every buffer: what the EMA is fed from."""
        yield from self.weights
        yield from (
            (name, buffer) for name, buffer in named_buffers(self.structure.current().buffered) if writable(buffer)
        )

    def run_forward(self, inputs: Any, policy: PrecisionPolicy | None = None) -> Tensor:
        """The model's output for ``inputs``, under ``policy`` (the training policy if None), in one autocast region.

        Without gradients, as in evaluation, whatever the forward pass moves in the model is put back.

        Raises:
            ConfigError: the model returned no tensor, or froze or unfroze a parameter.
        """
        policy = policy or self.policy
        with nullcontext() if torch.is_grad_enabled() else self._unmoved(), policy.region(self.device.type):
            output: Tensor = self.forward(policy.cast_inputs(inputs, channels_last=self.channels_last))
        self.parameters.refuse_toggled()
        return policy.cast_output(output)

    @contextmanager
    def _unmoved(self) -> Iterator[None]:
        """Put buffers, written parameters and extra state back at the end.

        Values are copied only of what the first pass was seen to write to; of the rest the tensors themselves are put back.
        The first pass waits for the device, once for each buffer.
        """
        known = None if self.model.training else self.written_in_eval
        before = Snapshot.take(
            self.model.modules(),
            written=self.written,
            copies=lambda module, name: known is None or (module, name) in known,
        )
        try:
            yield
        finally:
            changed = before.changed(by_value=known is None and not self.model.training)
            before.restore(list(self.model.modules()))
        if known is None:
            self.written_in_eval = self.written_in_eval if self.model.training else changed
        elif changed - known:
            module, name = next(iter(changed - known))
            path = next((path for path, candidate in self.model.named_modules() if candidate is module), "")
            raise ConfigError(
                f"evaluation wrote to the buffer {f'{path}.{name}'.lstrip('.')}, but not in its first batch: training could "
                "not go on unchanged; write to it while self.training is true only"
            )

    def start_window(self) -> Snapshot:
        """What the forward passes of a window can move, so that one which is not applied can be undone (:meth:`undo_buffers`)."""
        now = self.structure.current()
        return Snapshot.take([module for _, module in now.buffered], written=self.written, known=now.modules)

    def undo_buffers(self, saved: Snapshot, applied: Tensor) -> None:
        """Put ``saved`` back unless ``applied`` (0-D bool on the device; not read by the host while buffers keep their form).

        Raises:
            ConfigError: the forward pass added or exchanged a parameter.
        """
        now = self.structure.current()
        self.parameters.refuse_changed(self.model, now.parameters)
        saved.keep_if(applied, [module for _, module in now.buffered])

    def refuse_changed(self) -> None:
        """See once more that the model has the parameters that it was built with, however they might have been exchanged.

        Raises:
            ConfigError: one was added, exchanged or removed.
        """
        self.structure.look()
        self.parameters.refuse_changed(self.model, self.structure.parameters)

    def late_buffers(self) -> list[str]:
        """Names of buffers that were filled, registered, resized or removed since the start."""
        now = forms(self.model)
        return [name for name in sorted({*self.forms, *now}) if self.forms.get(name, ...) != now.get(name, ...)]


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
    check_arrival(model)
    model = model.to(device=device)
    if config.model.channels_last:
        model = model.to(memory_format=torch.channels_last)
    policy = PrecisionPolicy.from_config(config.precision)
    rule = LossScale.from_config(config.precision.loss_scale)
    plan = make_plan(model, policy.fp32_modules, mode=policy.mode)
    truths = take_truths(model, mode=policy.mode)
    evaluation = policy.for_eval(config.precision.eval_dtype)
    apply_plan(policy, plan, eval_autocast=evaluation.mode == "autocast")
    if config.model.activation_checkpointing:
        apply_checkpointing(model)
    weights = Masters(model, truths)
    del truths  # the masters are copies
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
        parameters=Parameters.of(model),
        forms=forms(model),
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
