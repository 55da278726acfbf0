"""Short runs in memory: the FP32 run that everything else is held against, and a run of any policy beside it.

No folder, no sinks, no evaluation: the same steps as ``mprun train`` takes, from the same initialisation and over the same
batches, so that the losses are those of a real run, bit for bit (evaluation draws nothing and moves nothing). The model runs
eagerly, also with ``model.compile``: the lab looks at modules, which compiled code does not show.

Switches are global: TF32 flags, determinism, the CPU's half kernels and its autocast list. A run enters its own
(:func:`~mprun.training.build.switches`) and puts back what was there, so they may be nested: the *innermost* policy decides
about TF32 and determinism. Half kernels and the operation list are counted per user; an outer FP16 region leaves them installed
around an inner FP32 run, which they do not touch, for they act on half tensors and under autocast alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mprun.config import Config, OnNonFiniteLoss, OnOverflow, PrecisionConfig
from mprun.data.base import Batch, Data
from mprun.precision.policy import map_tensors
from mprun.training import checkpoint
from mprun.training.build import build, device_of, switches
from mprun.training.env import capture_rng, restore_rng, step_rng
from mprun.training.observe import check_plan, observe
from mprun.training.postmortem import examine
from mprun.training.result import APPLIED, EMPTY, NONFINITE_GRAD, NONFINITE_LOSS, OVERFLOW, StepResult, StepRow
from mprun.training.state import TrainState
from mprun.training.step import train_step
from mprun.training.targets import batch_norm_explained

# A step of the run, or something in its place that looks on.
Step = Callable[[TrainState, Sequence[Batch]], StepResult]


@dataclass(frozen=True)
class SavedState:
    """A run at a step border, to be put back into a model of any policy.

    Attributes:
        step: applied steps at that point; 0 is the initialisation.
        checkpoint: what a checkpoint holds, copied: nothing that the run does later changes it.
        window: the micro-batches of the step that follows, on the run's device.
        rng: every global generator's state before that step.
    """

    step: int
    checkpoint: dict[str, Any]
    window: tuple[Batch, ...]
    rng: dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """How a run went.

    Attributes:
        losses: mean loss over the valid targets of each applied step; ``grad_norms`` the true norms before clipping.
        skips: numbers of the attempts (from 1) that overflowed.
        scales: loss scale of each attempt (1 where the policy has none).
        status: ``ok``, ``diverged`` (a loss, input or gradient that is not finite, the scale being no cause) or ``skips``
            (``precision.loss_scale.patience`` skips in a row).
        error: why it ended early, one line; None if it did not.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    skips: tuple[int, ...]
    scales: tuple[float, ...]
    status: str
    error: str | None


@dataclass(frozen=True)
class Reference:
    """An FP32 run and the states that were kept of it.

    Attributes:
        config: of the run, ``precision`` being plain FP32.
        curve: how it went; ``losses`` is its shorthand.
        states: kept states, by step. The step after the last one may lie beyond the run.
        data: the dataset, for who needs more batches.
        device: where it ran.
        broken: the state and window at which it stopped with a non-finite number, if it did.
    """

    config: Config
    curve: Curve
    states: tuple[SavedState, ...]
    data: Data
    device: torch.device
    broken: SavedState | None = None

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss of each applied step."""
        return self.curve.losses


def fp32_config(config: Config, *, seed: int | None = None) -> Config:
    """``config`` in plain FP32 (mode ``full``, products ``ieee``), eager, with another seed if one is given."""
    precision = PrecisionConfig(name="fp32", on_nonfinite_loss=config.precision.on_nonfinite_loss)
    return lab_config(config, precision=precision, seed=seed)


def lab_config(config: Config, *, precision: PrecisionConfig | None = None, seed: int | None = None) -> Config:
    """A copy of ``config``, eager, with another policy or seed if one is given."""
    changed = copy.deepcopy(config)
    changed.model.compile = False
    if precision is not None:
        changed.precision = copy.deepcopy(precision)
    if seed is not None:
        changed.seed = seed
    return changed


def reference(
    config: Config, *, steps: int, keep: Sequence[int] = (), seed: int | None = None, watch: Step | None = None
) -> Reference:
    """Run ``config`` in FP32 for ``steps`` applied steps (at most as many as the config asks for).

    Args:
        config: checked; its ``precision`` plays no part.
        steps: applied steps.
        keep: steps at which the state is kept, 0 to ``steps``; steps that are not reached are left out.
        seed: instead of ``config.seed``.
        watch: called in place of :func:`~mprun.training.step.train_step`, which it has to call.

    Raises:
        MprunError: what ``mprun train`` would refuse.
    """
    plain = fp32_config(config, seed=seed)
    device = device_of(plain)
    kept: list[SavedState] = []
    with undisturbed(), switches(plain, device):
        state, data, plan = ready(plain, device)
        curve, broken = go(state, data, plain, steps=min(steps, plan.steps), keep=set(keep), kept=kept, step=watch)
    return Reference(plain, curve, tuple(kept), data, device, broken)


def short_run(config: Config, *, steps: int, seed: int | None = None, watch: Step | None = None) -> Curve:
    """Run ``config`` under its own policy from the same initialisation over the same batches as :func:`reference`.

    Raises:
        MprunError: what ``mprun train`` would refuse. A run that diverges or only skips is no error: see :class:`Curve`.
    """
    own = lab_config(config, seed=seed)
    device = device_of(own)
    with undisturbed(), switches(own, device):
        state, data, plan = ready(own, device)
        return go(state, data, own, steps=min(steps, plan.steps), step=watch)[0]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the caller's random numbers as they were: a run seeds every global generator."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def ready(config: Config, device: torch.device) -> tuple[TrainState, Data, Any]:
    """State, data and plan of a run that has been looked at as ``mprun train`` does before its first step."""
    state, data, plan = build(config, device)
    check_plan(state, observe(state, next(iter(data.train_batches(0, 0)))))
    return state, data, plan


def save_state(state: TrainState, window: Sequence[Batch]) -> SavedState:
    """A copy of ``state`` and of what the next step will read."""
    content = map_tensors(checkpoint.snapshot(state), lambda t: t.detach().clone())
    return SavedState(state.counters.applied, content, tuple(window), content["rng"])


def go(
    state: TrainState,
    data: Data,
    config: Config,
    *,
    steps: int,
    keep: set[int] | None = None,
    kept: list[SavedState] | None = None,
    step: Step | None = None,
) -> tuple[Curve, SavedState | None]:
    """The loop: fetch a window, keep the state if asked to, step, look how it ended. Inside the switches of ``config``.

    Returns:
        How it went, and the state and window at which it stopped if it could not go on.
    """
    take = step or train_step
    keep, kept = keep or set(), kept if kept is not None else []
    losses: list[float] = []
    norms: list[float] = []
    skips: list[int] = []
    scales: list[float] = []
    retries = config.precision.loss_scale.on_overflow is OnOverflow.retry and state.loss_scale.active
    counters, empty = state.counters, 0
    for window in windows(state, data, config.train.accumulate):
        if counters.applied in keep and all(one.step != counters.applied for one in kept):
            kept.append(save_state(state, window))
        if counters.applied >= steps:
            break
        again = True
        while again:
            before = capture_rng()
            with batch_norm_explained(window):
                row = take(state, window).read()
            counters.attempts += 1
            scales.append(row.loss_scale)
            _count(state, row)
            if row.applied:
                losses.append(row.loss)
                norms.append(row.grad_norm)
            elif row.outcome == OVERFLOW:
                skips.append(counters.attempts)
            if _ends(state, row, config):
                restore_rng(before)
                trouble = _trouble(state, row, window, first_loss=losses[0] if losses else None)
                status = "skips" if row.outcome == OVERFLOW else "diverged"
                curve = Curve(tuple(losses), tuple(norms), tuple(skips), tuple(scales), status, trouble)
                return curve, save_state(state, window)
            again = retries and row.outcome == OVERFLOW and row.loss_scale > state.loss_scale.min
        empty = empty + 1 if row.outcome == EMPTY else 0
        if empty >= data.batches_per_epoch:  # a whole epoch without a valid target: it would go on for ever
            break
    return Curve(tuple(losses), tuple(norms), tuple(skips), tuple(scales), "ok", None), None


def windows(state: TrainState, data: Data, accumulate: int) -> Iterator[list[Batch]]:
    """Windows of ``accumulate`` micro-batches from the state's position on, epoch after epoch; an epoch's last may be shorter.

    The state's position is moved past a window when the next one is asked for.
    """
    while True:
        window: list[Batch] = []
        for batch in data.train_batches(state.position.epoch, state.position.batch):
            window.append(batch)
            if len(window) == accumulate:
                yield window
                state.position.batch += len(window)
                window = []
        if window:
            yield window
        state.position.epoch, state.position.batch = state.position.epoch + 1, 0


def _count(state: TrainState, row: StepRow) -> None:
    counters = state.counters
    counters.applied = row.steps_applied
    counters.skipped += row.outcome == OVERFLOW
    counters.empty += row.outcome == EMPTY
    counters.nonfinite += row.outcome in (NONFINITE_LOSS, NONFINITE_GRAD)


def _ends(state: TrainState, row: StepRow, config: Config) -> bool:
    """Whether the run cannot go on after this step, by the rules of a real run."""
    worn = row.consecutive_skips >= state.loss_scale.patience
    if row.outcome in (APPLIED, EMPTY) or (row.outcome == OVERFLOW and not worn):
        return False
    skip = row.outcome == NONFINITE_LOSS and config.precision.on_nonfinite_loss is OnNonFiniteLoss["skip"]
    return worn or not skip


def _trouble(state: TrainState, row: StepRow, window: Sequence[Batch], *, first_loss: float | None) -> str:
    """What ended the run, in one line. Random numbers are those of the step's start."""
    what = f"{row.consecutive_skips} steps in a row were skipped, the last" if row.outcome == OVERFLOW else "not finite"
    verdict = examine(state, window, loss_scale=row.loss_scale, rng=step_rng(state.device), first_loss=first_loss)
    return f"step {row.steps_applied + 1}: {what} at loss scale {row.loss_scale:g}: {verdict.message}"
