"""One run in progress: its plan, its bookkeeping, and how it speaks to the sinks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mprun.config import Config, Task
from mprun.data.base import Batch, Data
from mprun.numerics.probe import Probe
from mprun.tracking.base import Sink
from mprun.training.metrics import Best, Examined, Means, SkipRate
from mprun.training.result import StepResult, StepRow
from mprun.training.state import TrainState


@dataclass(frozen=True)
class Plan:
    """How long a run is. ``steps`` (applied) ends it, or ``epochs`` where ``by_steps`` is false."""

    batches_per_epoch: int
    windows_per_epoch: int
    steps: int
    epochs: int
    by_steps: bool


@dataclass(frozen=True)
class Pending:
    """A step whose end the host does not know yet.

    ``window`` is kept on the CPU only, where the host looks at once: on an accelerator the batches of many steps would pile
    up in its memory, so they are fetched again by their place (``epoch``, first batch ``start``) if somebody asks for them.
    ``probe`` looked at the step, if it was a sampled one, and is read when the host looks. ``rng`` is the state of torch's
    generators at its start, for a post-mortem.
    """

    result: StepResult
    epoch: int
    start: int
    batches: int
    ids: tuple[int, ...]
    window: Sequence[Batch] | None
    probe: Probe | None = None
    rng: dict[str, Any] | None = None

    def fetch(self, data: Data) -> list[Batch]:
        """The micro-batches of the step."""
        return list(self.window or islice(data.train_batches(self.epoch, self.start), self.batches))


@dataclass
class Run:
    """One run in progress: what the loop needs besides the state."""

    config: Config
    state: TrainState
    data: Data
    plan: Plan
    sinks: Sequence[Sink]
    run_dir: Path
    best: Best
    metadata: dict[str, Any] = field(default_factory=dict)
    means: Means = field(default_factory=Means)
    skip_rate: SkipRate = field(default_factory=SkipRate)
    examined: Examined = field(default_factory=Examined)
    pending: list[Pending] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    last_row: StepRow | None = None
    last_applied: StepRow | None = None
    logged_step: int = 0
    evaluated_step: int = -1
    saved_step: int = -1
    save_error: str | None = None
    train_s: float = 0.0
    wait_s: float = 0.0
    window_s: float = 0.0
    window_attempts: int = 0
    window_examples: int = 0
    examples: int = 0
    stop_signal: int | None = None
    told_inf_inputs: bool = False
    told_probe: bool = False
    told_underflow: bool = False
    first_batch: str | None = None  # hash of the ids of the run's first batch; None for a run that goes on


@dataclass(frozen=True)
class RunResult:
    """How a run ended: ``status`` is ``ok`` or ``interrupted``; every other end is an exception."""

    status: str
    signal: int | None = None
    reason: str | None = None


def make_plan(config: Config, batches_per_epoch: int) -> Plan:
    """Length of the run. The tail window of an epoch is a window of its own, so windows are rounded up."""
    windows = math.ceil(batches_per_epoch / config.train.accumulate)
    by_steps = config.train.steps is not None
    steps = config.train.steps if config.train.steps is not None else config.train.epochs * windows
    return Plan(batches_per_epoch, windows, steps, config.train.epochs, by_steps)


def best_of(config: Config) -> Best:
    """What "best" means: the early-stopping metric, else top-1 for classification, else the loss."""
    metric = config.train.early_stop.metric
    if metric is None:
        metric = "val/top1" if config.dataset.task is Task.classification else "val/loss"
    return Best(metric, "min" if "loss" in metric else "max")


def log_state(run: Run) -> dict[str, Any]:
    """What logging needs to go on as if nothing had happened."""
    return {
        "means": asdict(run.means),
        "skip_rate": {"recent": list(run.skip_rate.recent), "warned": run.skip_rate.warned},
        "examined": asdict(run.examined),
        "told_inf_inputs": run.told_inf_inputs,
        "told_underflow": run.told_underflow,
        "logged_step": run.logged_step,
        "evaluated_step": run.evaluated_step,
        "train_s": run.train_s,
        "examples": run.examples,
    }


def resume_log(run: Run, saved: dict[str, Any]) -> None:
    """Put :func:`log_state` back."""
    run.means = Means(**saved["means"])
    run.skip_rate = SkipRate(recent=deque(saved["skip_rate"]["recent"]), warned=saved["skip_rate"]["warned"])
    run.examined = Examined(**saved.get("examined", {}))
    run.told_inf_inputs = saved["told_inf_inputs"]
    run.told_underflow = saved.get("told_underflow", False)  # absent in older checkpoints
    run.logged_step, run.evaluated_step = saved["logged_step"], saved["evaluated_step"]
    run.train_s, run.examples = saved["train_s"], saved["examples"]
    run.saved_step = run.state.counters.applied


def due_probe(run: Run) -> Probe | None:
    """A probe for the attempt to come, every ``probe.every`` attempts; by number, so that a resumed run samples the same ones."""
    every = run.config.probe.every
    return Probe(run.config.probe.modules) if every and run.state.counters.attempts % every == 0 else None


def probe_notes(run: Run) -> list[str]:
    """What is to be said of the probe at the start."""
    if not run.config.probe.every or run.state.forward is run.state.model:
        return []
    return [
        "probe: compiled code shows no modules; sampled are parameters, their gradients and updates (model.compile=true)"
    ]


def warn(run: Run, message: str) -> None:
    """A warning for people and for the metrics file."""
    emit(run, {"kind": "event", "event": "warning", "message": message})


def emit(run: Run, record: dict[str, Any]) -> None:
    """Hand one record to every sink, with where the run stands filled in."""
    counters = run.state.counters
    full = {
        "step": counters.applied,
        "attempt": counters.attempts,
        "epoch": run.state.position.epoch,
        **record,
    }
    for sink in run.sinks:
        sink.log(full)
