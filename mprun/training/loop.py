"""The visible loop: fetch a window, step, and at the borders log, evaluate, save.

The host learns how steps ended when it *drains* the pending results: after every step on the CPU, where that costs
nothing; on an accelerator at log points and wherever the next event could be due (evaluation, checkpoint, last step,
end of an epoch). All counting is in applied steps.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch

from mprun.config import OnOverflow, Task
from mprun.data.base import Batch
from mprun.errors import CheckpointError, ConfigError
from mprun.precision.policy import PrecisionPolicy
from mprun.precision.scaling import LossScale
from mprun.training import checkpoint
from mprun.training.env import capture_rng, peak_memory_bytes, restore_rng, step_rng
from mprun.training.outcomes import drain, refuse_nothing
from mprun.training.result import OVERFLOW
from mprun.training.run import Pending, Run, RunResult, due_probe, emit, log_state, probe_notes, warn
from mprun.training.step import eval_step, train_step
from mprun.training.targets import batch_norm_explained


def fit(run: Run) -> RunResult:
    """Train until the plan is fulfilled, a signal arrives or early stopping decides.

    Raises:
        NonFiniteError: a loss, input or gradient is NaN or inf, and the scale is not the cause.
        LossScaleError: too many skipped steps in a row.
    """
    state = run.state
    notes = [run.data.spec.note] if run.data.spec.note else []
    notes += probe_notes(run)
    for line in [*announcements(state.policy, state.loss_scale), *notes]:
        warn(run, line)
    with signals(run):
        while not finished(run):
            empty_before = state.counters.empty
            for window in windows(run):
                step(run, window)
                if finished(run) or run.stop_signal is not None or stop_early(run):
                    break
            else:
                end_epoch(run, empty_before)
            if run.stop_signal is not None and not finished(run):
                save(run)
                return RunResult("interrupted", run.stop_signal)
            if stop_early(run):
                return conclude(run, f"no better {run.best.metric} in {run.best.stale} evaluations")
        return conclude(run, None)


def announcements(policy: PrecisionPolicy, scale: LossScale) -> list[str]:
    """What a policy that exists to go wrong says of itself at the start."""
    lines = []
    if policy.mode == "pure":
        lines.append(
            f"precision={policy.name} is a negative control: no FP32 masters, so updates below half an ulp of a weight are lost"
        )
    if policy.compute_dtype == torch.float16 and not scale.active:
        lines.append(
            f"precision={policy.name} is a negative control: FP16 without a loss scale, gradients below 2^-25 become 0"
        )
    return lines


def finished(run: Run) -> bool:
    """Whether the plan is fulfilled, as far as the host knows."""
    if run.plan.by_steps:
        return run.state.counters.applied >= run.plan.steps
    return run.state.position.epoch >= run.plan.epochs


def windows(run: Run) -> Iterator[list[Batch]]:
    """The windows of the rest of this epoch, from the state's position on; the last one may be shorter."""
    window: list[Batch] = []
    position = run.state.position
    if position.batch >= run.plan.batches_per_epoch:
        return
    begin = time.perf_counter()
    for batch in run.data.train_batches(position.epoch, position.batch):
        window.append(batch)
        if len(window) == run.config.train.accumulate:
            _waited(run, begin)
            yield window
            window = []
            begin = time.perf_counter()
    _waited(run, begin)  # also of an epoch's end: worker processes take their time to leave
    if window:
        yield window


def _waited(run: Run, begin: float) -> None:
    seconds = time.perf_counter() - begin
    run.wait_s += seconds
    run.train_s += seconds


def step(run: Run, window: list[Batch]) -> None:
    """One window (again at a lower scale with ``on_overflow=retry``), and whatever is due after it."""
    begin = time.perf_counter()
    state, config = run.state, run.config
    retry = config.precision.loss_scale.on_overflow is OnOverflow.retry and state.loss_scale.active
    attempt(run, window)
    if retry:
        drain(run)
        while run.last_row and run.last_row.outcome == OVERFLOW and run.last_row.loss_scale > state.loss_scale.min:
            attempt(run, window)
            drain(run)
    state.position.batch += len(window)
    size = sum(len(batch.ids) for batch in window)
    run.window_examples += size
    run.examples += size
    if run.pending and _must_look(run):
        drain(run)
    run.window_s += time.perf_counter() - begin
    run.train_s += time.perf_counter() - begin
    if run.pending:
        return
    applied = state.counters.applied
    if applied // config.train.log_every > run.logged_step // config.train.log_every:
        log_train(run)
    if _due(config.train.eval_every, applied, run.evaluated_step):
        evaluate(run)
    if config.train.checkpoint_every and _due(config.train.checkpoint_every, applied, run.saved_step):
        save(run)


def attempt(run: Run, window: list[Batch]) -> None:
    """Run one training step and remember its result until the host looks."""
    probe, rng = due_probe(run), step_rng(run.state.device)
    with batch_norm_explained(window), nullcontext() if probe is None else probe.watch(run.state):
        result = train_step(run.state, window, probe=probe)
    run.state.counters.attempts += 1
    run.window_attempts += 1
    position, ids = run.state.position, [i for batch in window for i in batch.ids[:8].tolist()]
    kept = window if run.state.device.type == "cpu" else None
    run.pending.append(Pending(result, position.epoch, position.batch, len(window), tuple(ids[:8]), kept, probe, rng))
    for sink in run.sinks:
        sink.progress(run.state.counters.applied, run.state.counters.attempts)


def _must_look(run: Run) -> bool:
    """Whether the host has to know now how the pending steps ended."""
    state, train = run.state, run.config.train
    if state.device.type == "cpu" or not state.fused or run.stop_signal is not None:
        return True
    upper = state.counters.applied + len(run.pending)
    borders = [_next(every, state.counters.applied) for every in (train.eval_every, train.checkpoint_every) if every]
    if run.plan.by_steps:
        borders.append(run.plan.steps)
    return (
        len(run.pending) >= train.log_every
        or state.position.batch >= run.plan.batches_per_epoch
        or any(upper >= border for border in borders)
    )


def _next(every: int, applied: int) -> int:
    return (applied // every + 1) * every


def _due(every: int | None, applied: int, last: int) -> bool:
    return every is not None and applied > 0 and applied % every == 0 and applied != last


def end_epoch(run: Run, empty_before: int) -> None:
    """The border between epochs: evaluate and save where no step count says when."""
    state, train = run.state, run.config.train
    if state.counters.empty - empty_before == run.plan.windows_per_epoch:
        raise ConfigError(
            f"epoch {state.position.epoch} had no valid target at all: every label of {run.data.spec.name} is -100, which the "
            "loss leaves out, so there is nothing to learn from"
        )
    if train.eval_every is None and run.evaluated_step != state.counters.applied:
        evaluate(run)
    state.position.epoch += 1
    state.position.batch = 0
    if train.checkpoint_every is None:
        save(run)


def stop_early(run: Run) -> bool:
    """Whether early stopping is on and out of patience."""
    stop = run.config.train.early_stop
    return stop.metric is not None and run.best.stale >= stop.patience


def conclude(run: Run, reason: str | None) -> RunResult:
    """The end of a run that reached it: last log line, last evaluation, last checkpoint.

    Raises:
        MprunError: in all of it no step was applied, so there is no result.
    """
    if run.means.targets:
        log_train(run)
    if run.evaluated_step != run.state.counters.applied:
        save(run)  # first of all: an evaluation can fail, and the training before it must not be lost
        evaluate(run)
    save(run)
    refuse_nothing(run.state.counters)
    return RunResult("ok", reason=reason)


def log_train(run: Run) -> None:
    """One ``train`` record: means since the last one, and how fast it went."""
    row = run.last_applied
    if row is None:  # resumed with means of earlier steps, and nothing was applied since
        return
    loss, top1 = run.means.take()
    seconds = max(run.window_s, 1e-9)
    record: dict[str, Any] = {
        "kind": "train",
        "step": run.state.counters.applied,
        "attempt": run.state.counters.attempts,
        "train/loss": loss,
        **({} if run.config.dataset.task is Task.regression else {"train/top1": top1}),
        "train/grad_norm": row.grad_norm,
        "train/lr": row.lr,
        "precision/loss_scale": row.loss_scale,
        "precision/skipped_steps": run.state.counters.skipped,
        "perf/examples_per_s": run.window_examples / (seconds + run.wait_s),
        "perf/step_ms": 1e3 * seconds / max(run.window_attempts, 1),
        "perf/data_wait_frac": run.wait_s / (seconds + run.wait_s),
        "perf/peak_memory_bytes": peak_memory_bytes(run.state.device),
    }
    run.window_s, run.wait_s, run.window_attempts, run.window_examples = 0.0, 0.0, 0, 0
    run.logged_step = run.state.counters.applied
    run.final.update({key: value for key, value in record.items() if key.startswith("train/")})
    emit(run, record)


def evaluate(run: Run) -> None:
    """Score the model (and its EMA) on the validation set; keep the best checkpoint. Moves no state of training."""
    state, config = run.state, run.config
    policy = state.policy.for_eval(config.precision.eval_dtype)
    rng = capture_rng()
    try:
        metrics = {f"val/{key}": value for key, value in eval_step(state, policy, run.data.val_batches()).items()}
        if state.ema is not None:
            with state.ema.swapped_in(state.model):
                scores = eval_step(state, policy, run.data.val_batches())
            metrics |= {f"ema/{key}": value for key, value in scores.items()}
    finally:
        restore_rng(rng)
    run.evaluated_step = state.counters.applied
    run.final.update(metrics)
    improved = run.best.update(metrics, step=state.counters.applied, epoch=state.position.epoch)
    if run.best.metric not in metrics:
        warn(run, f"{run.best.metric} is not among the metrics ({', '.join(metrics)}): nothing can be best")
    elif not math.isfinite(metrics[run.best.metric]):
        warn(
            run, f"{run.best.metric} is {metrics[run.best.metric]} at step {state.counters.applied}: not an improvement"
        )
    emit(run, {"kind": "val", "step": state.counters.applied, "attempt": state.counters.attempts, **metrics})
    if improved:
        save(run, "best.pt")


def save(run: Run, name: str = "last.pt") -> None:
    """Write a checkpoint. A disk that refuses costs this checkpoint, not the run: it is reported and training goes on."""
    if run.pending:
        drain(run)
    run.state.refuse_changed()
    folder = run.run_dir / "checkpoints"
    extra = {"best": asdict(run.best), "log": log_state(run), **run.metadata}
    content = checkpoint.snapshot(run.state, **extra)
    try:
        checkpoint.save(content, folder / name)
        if name == "last.pt":
            run.saved_step = run.state.counters.applied
            if run.config.train.keep and run.config.train.checkpoint_every:
                checkpoint.link(folder / name, folder / f"step_{run.state.counters.applied}.pt")
                checkpoint.prune(folder, run.config.train.keep)
    except CheckpointError as error:
        run.save_error = str(error)
        warn(run, str(error))


@contextmanager
def signals(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM ask the loop to finish its step, save and stop; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        with nullcontext():
            yield
        return
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        if run.stop_signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        run.stop_signal = number

    handler: Callable[[int, FrameType | None], None] = ask
    for name in (signal.SIGINT, signal.SIGTERM):
        before[name] = signal.signal(name, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
