"""What the host does when it learns how steps ended: count, record skips, warn, and raise what has to be raised."""

from __future__ import annotations

import math
from typing import Any

import torch

from mprun.config import OnNonFiniteLoss
from mprun.errors import LossScaleError, MprunError, NonFiniteError
from mprun.numerics.probe import Probe
from mprun.numerics.sample import record as probe_record
from mprun.training.blame import input_overflow
from mprun.training.examination import Case
from mprun.training.result import APPLIED, EMPTY, NONFINITE_GRAD, NONFINITE_LOSS, OVERFLOW, StepRow, unpack
from mprun.training.run import Pending, Run, emit, warn
from mprun.training.state import HostCounters, TrainState

# Share of the gradients that become 0 from which a run is told of it. Healthy runs stay below a twentieth.
MOST_UNDERFLOW = 0.5
_SPOKEN = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}


def drain(run: Run) -> None:
    """Learn how the pending steps ended: count, record skips, raise what has to be raised."""
    state, pending = run.state, run.pending
    run.pending = []
    first = state.counters.attempts - len(pending)
    # One read for all of them.
    rows = [unpack(values) for values in torch.stack([entry.result.packed for entry in pending]).tolist()]
    for number, (entry, row) in enumerate(zip(pending, rows, strict=True), start=first + 1):
        run.last_row = row
        counters = state.counters
        counters.applied = row.steps_applied
        if row.outcome == APPLIED:
            run.last_applied = row
            if run.examined.first_loss is None:
                run.examined.first_loss = row.loss
            run.means.add(loss=row.loss, correct=row.correct, targets=row.valid_targets)
        elif row.outcome == OVERFLOW:
            counters.skipped += 1
        elif row.outcome == EMPTY:
            counters.empty += 1
        else:
            counters.nonfinite += 1
        if entry.probe is not None:
            _record_probe(run, number, entry.probe)
        if row.outcome != APPLIED:
            emit(run, _skip_record(run, row, number, entry))
        if row.inf_inputs and not run.told_inf_inputs:
            run.told_inf_inputs = True
            warn(run, f"step {row.steps_applied} (attempt {number}): {input_overflow(state, entry.fetch(run.data))}")
        case = Case(run, row, number, entry, rows[-1].steps_applied - row.steps_applied)
        if case.due:
            case.finding  # noqa: B018 - held and recorded once, whoever asks first
        if row.outcome in (NONFINITE_LOSS, NONFINITE_GRAD):
            _raise_nonfinite(case)
        rate = run.skip_rate.add(number, row.outcome == OVERFLOW)
        if rate is not None:
            warn(
                run,
                f"{rate:.0%} of the last 100 steps overflowed at loss scale {row.loss_scale:g}: {case.finding}",
            )
        if row.consecutive_skips >= state.loss_scale.patience:
            _raise_patience(case)


def _record_probe(run: Run, number: int, probe: Probe) -> None:
    """Record a sample. One that could not be made is told of the first time; the run goes on unchanged."""
    try:
        sample = probe.read()
        record = probe_record(sample)
    except (
        Exception
    ) as error:  # it is only an explanation: modules return what they like, and the memory may be too small
        if not run.told_probe:
            run.told_probe = True
            rest = "probe.modules=[...] looks at other modules only, probe.every=0 at none"
            warn(run, f"the probe could not sample attempt {number}, {error}; training is not touched by it; {rest}")
        return
    emit(run, record)
    lost = record["precision/underflow_frac"]
    # Of a step that was not applied nothing was lost.
    if lost > MOST_UNDERFLOW and sample.applied and not run.told_underflow:
        run.told_underflow = True
        worst = next((path for path, _, label, _ in record["worst"] if label == "underflow_frac" and path), None)
        place = f" (worst: {worst})" if worst else ""
        warn(
            run,
            f"step {sample.step} (attempt {number}): {lost:.0%} of the gradients that are not 0 become 0 in "
            f"{_SPOKEN[sample.format]} at loss scale {sample.loss_scale:g}{place}: "
            f"{underflow_advice(run.state, sample.format, sample.loss_scale)}",
        )


def underflow_advice(state: TrainState, form: str, scale: float) -> str:
    """What to do when most gradients become 0.

    Args:
        state: its policy and its rule of the loss scale say what there is to change.
        form: the compute dtype, such as ``float16``.
        scale: S of the step.
    """
    rule, mode = state.loss_scale, state.policy.mode
    if form != "float16":  # as wide as FP32: the loss itself is too small
        return f"make the loss larger (train.loss_weight={state.loss_weight:g}), or look at what the model does to it"
    options = {"autocast": "precision=fp16_dynamic", "master": "precision=fp16_master_dynamic"}
    dynamic = options.get(mode, "precision.loss_scale.kind=dynamic")
    if not rule.active:
        return f"use a loss scale: {dynamic}" + (
            f" or {dynamic.replace('dynamic', 'static')}" if mode in options else ""
        )
    if rule.kind == "static":
        return f"raise precision.loss_scale.init, or use a dynamic scale: {dynamic}"
    if scale >= rule.max:
        return f"raise precision.loss_scale.max={rule.max:g}, at which the scale is"
    if scale < rule.init:
        return (
            f"overflows took the scale down from {rule.init:g}, so FP16 is too narrow for this model: use BF16, or keep what "
            "overflows in FP32 (precision.fp32_modules)"
        )
    return (
        "raise precision.loss_scale.init, or lower precision.loss_scale.growth_interval="
        f"{rule.growth_interval}, after which the scale grows"
    )


def _skip_record(run: Run, row: StepRow, number: int, entry: Pending) -> dict[str, Any]:
    reasons = {OVERFLOW: "overflow", NONFINITE_LOSS: "nonfinite_loss", NONFINITE_GRAD: "nonfinite_grad", EMPTY: "empty"}
    return {
        "kind": "skip",
        "step": row.steps_applied,
        "attempt": number,
        "reason": reasons[row.outcome],
        "train/loss": row.loss,
        "precision/loss_scale": row.loss_scale,
        "precision/skipped_steps": run.state.counters.skipped,
        "sample_ids": list(entry.ids),
    }


def _raise_nonfinite(case: Case) -> None:
    """Stop for a non-finite loss or gradient, unless a non-finite loss is to be skipped.

    Raises:
        NonFiniteError: names step, cause and the first non-finite tensor.
    """
    run, row, number = case.run, case.row, case.number
    skip_losses = run.config.precision.on_nonfinite_loss is OnNonFiniteLoss["skip"]
    if row.outcome == NONFINITE_LOSS and skip_losses and row.consecutive_skips < run.state.loss_scale.patience:
        return
    what = "a gradient is NaN or inf"
    if row.outcome == NONFINITE_LOSS:
        what = "an input is NaN or inf" if math.isfinite(row.loss) else f"the loss is {row.loss}"
    advice = ""
    if row.outcome == NONFINITE_LOSS:
        advice = "; precision.on_nonfinite_loss=skip drops such batches"
        if skip_losses:
            advice = (
                f"; {row.consecutive_skips} steps in a row were skipped, "
                f"which precision.loss_scale.patience={run.state.loss_scale.patience} forbids"
            )
    raise NonFiniteError(
        f"step {row.steps_applied + 1} (attempt {number}): {what} at precision={run.state.policy.name}, "
        f"loss scale {row.loss_scale:g}: {case.finding}{advice}"
    )


def _raise_patience(case: Case) -> None:
    run, row, number = case.run, case.row, case.number
    floor = " (its floor)" if row.loss_scale <= run.state.loss_scale.min else ""
    raise LossScaleError(
        f"step {row.steps_applied + 1} (attempt {number}): {row.consecutive_skips} steps in a row were skipped, the last at "
        f"loss scale {row.loss_scale:g}{floor}, which precision.loss_scale.patience={run.state.loss_scale.patience} forbids: "
        f"{case.finding}"
    )


def refuse_nothing(counters: HostCounters) -> None:
    """A run that came to its end without a single applied step has no result.

    Raises:
        MprunError: says what became of the attempts.
    """
    if counters.applied:
        return
    raise MprunError(
        f"no step was applied in {counters.attempts} attempts ({counters.skipped} overflowed, {counters.nonfinite} had a "
        f"non-finite loss, {counters.empty} no valid target): the weights are still the initial ones; see metrics.jsonl, train "
        "longer, or start from a smaller precision.loss_scale.init"
    )
