"""Why was this window not applied? One step of a run, run again and examined; the run itself does not notice.

The window is repeated from the random state that it had, at {its loss scale, 1} and in FP32, and what differs decides::

    finite at its own scale                     unreproduced       a passing fault, or weights that have gone on
    finite at an S from 2^-14 up                scale search       S was too large for this batch: that is how a search looks
    not finite in FP32                          divergence, or bad data: not a matter of precision
    finite in FP32, loss not finite at S = 1    overflow in the forward pass     )  the first operation whose bad number
    finite in FP32, loss finite, at no S        overflow in the backward pass    )  arrives (mprun.numerics.trace)

For an overflow a cure is sought: the culprit's module gets an FP32 rule and the window is run once more; what then
overflows gets one too, and so on; at last every rule that is not needed is dropped. BF16 is tried. Only what was seen to
work is proposed.

FP32 means the FP32 truth in FP32: of ``master`` mode the masters, of ``pure`` mode the half parameters themselves.
Deviations that remain: modules that draw from Python's or numpy's generators, or from one of their own, see other numbers, and
attributes are as the step has left them (afterwards they are put back, :mod:`mprun.training.attributes`); on an accelerator
the parameters may have gone on since (``moved``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mprun.data.base import Batch
from mprun.numerics.places import INPUT
from mprun.numerics.trace import Event
from mprun.precision.policy import PrecisionPolicy, map_tensors
from mprun.training.blame import input_overflow, nonfinite_samples
from mprun.training.cure import bf16_helps, cure_text, divergence_words, find_rules
from mprun.training.replay import INPUTS, TARGETS, Exam, Replay
from mprun.training.state import TrainState
from mprun.training.verdict import (
    BACKWARD,
    BAD_DATA,
    DIVERGENCE,
    FORWARD,
    SCALE_SEARCH,
    SHORT,
    UNREPRODUCED,
    Verdict,
    exact,
    largest,
    of_event,
    place,
    reaches,
    scale_words,
    some,
)

DIVERGED = 100.0  # times the first loss of the run: what is larger in FP32 has diverged, whatever overflows then
OUTLIER = 1000.0  # times the median sample: an input that is bad data, though finite
HUGE = 1e9  # an operation of FP32 on such numbers has overflowed; on smaller ones it had no finite result
EXPONENTIAL = ("exp", "expm1", "exp2", "sinh", "cosh", "pow")
MOST_IDS = 64  # of samples, in a record
LOWEST = 2.0**-14  # the smallest loss scale that is one: below, FP16 has no normal gradients
FULL = PrecisionPolicy()


def examine(
    state: TrainState,
    window: Sequence[Batch],
    *,
    loss_scale: float,
    rng: Mapping[str, Any] | None = None,
    moved: int = 0,
    first_loss: float | None = None,
    stops: bool = False,
) -> Verdict:
    """Find out why ``window`` was not applied. Everything is as before afterwards, random states included.

    Args:
        state: at a step border.
        window: the micro-batches of the step.
        loss_scale: its S, which an overflow has lowered since.
        rng: torch's generators at its start, from :func:`~mprun.training.env.step_rng`.
        moved: how many steps were applied since.
        first_loss: the loss that the run began with, to tell a divergence by.
        stops: whether the run stops, for it was skipped too often in a row.
    """
    exam = Exam(state, window, rng, first_loss)
    verdict = _judge(exam, loss_scale, moved, stops=stops)
    note = f" (with the weights of {moved} steps later)" if moved else ""
    return replace(verdict, message=verdict.message + note, replays=exam.replays)


def _judge(exam: Exam, loss_scale: float, moved: int, *, stops: bool) -> Verdict:
    state = exam.state
    if state.loss_scale.active:
        now = exam.run(loss_scale)
        if now.finite:
            return _unreproduced(moved)
        for bottom in (1.0, LOWEST):  # 1 is no border, but mostly it is enough
            if now.finite_loss and bottom < loss_scale and exam.run(bottom).finite:
                return _scale_search(exam, loss_scale, bottom, stops=stops)
    seen = exam.run(traced=True)
    if seen.finite:
        return _unreproduced(moved)
    fp32 = seen if state.policy.mode == "full" else exam.run(policy=FULL, traced=True)
    if not fp32.finite:
        return _not_precision(exam, fp32)
    if seen.first is not None and seen.first.module == INPUT and (text := input_overflow(state, exam.window)):
        return Verdict(FORWARD, text, **of_event(seen.first), sample_ids=_samples(exam, seen)[:MOST_IDS])
    if outlier := outliers(exam.window):
        return replace(outlier, **of_event(seen.first))
    if exam.first_loss is not None and fp32.loss > DIVERGED * max(exam.first_loss, 1e-6):
        name, cure = divergence_words(state)
        where = f"; in {_format(state)} {place(seen.first)} overflows first" if seen.first else ""
        return Verdict(
            DIVERGENCE,
            f"{name}: the loss is {fp32.loss:.3g} in FP32 as well, {exam.first_loss:.3g} at the first step{where}; {cure}",
            **of_event(seen.first),
        )
    return _overflow(exam, seen, fp32)


def _unreproduced(moved: int) -> Verdict:
    why = "the weights have moved on" if moved else "a passing fault, or a module that draws random numbers of its own"
    return Verdict(
        UNREPRODUCED, f"a second pass over the same batch stays finite ({why}); no module could be named", module=None
    )


# --- the scale --------------------------------------------------------------------------------------------------------


def _scale_search(exam: Exam, loss_scale: float, bottom: float, *, stops: bool) -> Verdict:
    """The largest scale on the way down at which the window is finite, by bisection: finite at k steps, not at fewer."""
    rule = exam.state.loss_scale
    factor = rule.backoff_factor if rule.kind == "dynamic" else 0.5
    low, high = 0, math.ceil(math.log(loss_scale / bottom) / -math.log(factor))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exam.run(loss_scale * factor**middle).finite else (middle, high)
    found = max(loss_scale * factor**high, bottom)
    advice = "nothing to do"
    if stops:
        advice = f"set precision.loss_scale.init={exact(found)}, or a larger precision.loss_scale.patience"
    if rule.kind != "dynamic":
        advice = f"set precision.loss_scale.init={exact(found)}, or precision.loss_scale.kind=dynamic"
    elif found < rule.min:
        advice = f"lower precision.loss_scale.min={exact(rule.min)}, which is above it"
    return Verdict(
        SCALE_SEARCH,
        f"scale search: the gradients overflow at loss scale {scale_words(loss_scale)} and are finite at {scale_words(bottom)}; "
        f"the largest that this batch takes is {scale_words(found)}; {advice}",
        largest_scale=found,
        limit=largest(_dtype(exam.state)),
    )


# --- not precision ----------------------------------------------------------------------------------------------------


def _not_precision(exam: Exam, fp32: Replay) -> Verdict:
    """FP32 breaks too: the data, a parameter that was bad already, or arithmetic that has no finite result."""
    event = fp32.first
    name, cure = divergence_words(exam.state)
    if event is None:
        return Verdict(DIVERGENCE, f"{name}: FP32 is not finite either; {cure}")
    root = event.cause or event
    source = root.source or ""
    if source.startswith((INPUTS, TARGETS)):
        bad = sorted({i for batch in exam.window for i in nonfinite_samples(batch)})
        what = INPUTS if source.startswith(INPUTS) else TARGETS
        text = f"bad data, not precision: {what} of sample {some(bad)} is NaN or inf"
        return Verdict(BAD_DATA, text, sample_ids=tuple(bad[:MOST_IDS]), **of_event(event))
    if outlier := outliers(exam.window):
        return replace(outlier, **of_event(event))
    ids = _samples(exam, fp32)
    rows = f" in sample {some(ids)}" if ids and 2 * len(ids) < len(_lost(exam, fp32).ids) else ""
    if event.kind == "given":
        why = f"; {cure}" if source.startswith("parameter") else ""
        text = f"{name}: the {source} is already NaN or inf{why}"
    elif event.cause is not None:
        by = f"the {source}" if event.cause.kind == "given" else place(event.cause)
        text = f"not precision, FP32 breaks too: {place(event)} makes NaN of the inf from {by}{rows}"
    elif place(event) == "the norm of the gradients":
        text = f"{name}: the norm of the gradients is beyond float32 (above 1.8e19); {cure}"
    elif event.amax > HUGE or event.operation in EXPONENTIAL:
        text = (
            f"{name}: FP32 overflows too, first at {place(event)} of the {event.where} pass{rows}, "
            f"whose input reaches {event.amax:.3g}; {cure}"
        )
    else:
        text = (
            f"not precision, FP32 breaks too: {place(event)} of the {event.where} pass makes {event.value:g} of finite numbers"
            f"{rows} (at most {event.amax:.3g}): 0/0, log(0) or the like"
        )
    return Verdict(DIVERGENCE, text, **of_event(event), amax=event.amax, sample_ids=ids[:MOST_IDS])


def _bad_sample(outliers: Mapping[int, float], what: str) -> Verdict:
    worst = max(outliers.values())
    return Verdict(
        BAD_DATA,
        f"bad data, not precision: {what} of sample {some(sorted(outliers))} reaches {worst:.2g}, more than {OUTLIER:g} times "
        "the others of its batch",
        sample_ids=tuple(sorted(outliers)),
        amax=worst,
    )


def outliers(window: Sequence[Batch]) -> Verdict | None:
    """Samples whose inputs or targets are larger than ``OUTLIER`` times the median of their micro-batch."""
    for what in (INPUTS, TARGETS):
        found: dict[int, float] = {}
        for batch in window:
            reach = _reach_by_sample(batch.inputs if what == INPUTS else batch.targets, len(batch.ids))
            typical = float(reach.median()) if len(reach) else 0.0
            if len(reach) >= 3 and typical > 0:
                large = (reach > OUTLIER * typical).nonzero()[:, 0].tolist()
                found |= {int(batch.ids[i]): float(reach[i]) for i in large}
        if found:
            return _bad_sample(found, what)
    return None


def _reach_by_sample(value: Any, size: int) -> torch.Tensor:
    """The largest magnitude among each sample's floating-point numbers in ``value``: (size,), on the CPU."""
    reach = torch.zeros(size)

    def look(t: torch.Tensor) -> None:
        if t.is_floating_point() and t.ndim and len(t) == size and t.numel():
            torch.maximum(reach, t.detach().reshape(size, -1).abs().amax(1).float().cpu(), out=reach)

    map_tensors(value, look)
    return reach


def _lost(exam: Exam, seen: Replay) -> Batch:
    """The micro-batch that a replay stopped at: the first bad one, on the CPU."""
    return exam.window[seen.micro_batches - 1]


def _samples(exam: Exam, seen: Replay) -> tuple[int, ...]:
    """Ids of the samples whose rows of the culprit's result are bad, if the rows are samples (or parts of them)."""
    event, known = seen.first, len(exam.window) == 1 or exam.state.device.type == "cpu"
    if event is None or event.where != "forward" or not event.shape or not known:
        return ()
    ids = _lost(exam, seen).ids.tolist()
    parts, rest = divmod(event.shape[0], max(len(ids), 1))
    if not parts or rest:
        return ()
    return tuple(dict.fromkeys(ids[row // parts] for row in event.rows))


# --- overflow ---------------------------------------------------------------------------------------------------------


def _in_fp32(state: TrainState, event: Event, fp32: Replay) -> float:
    """The largest magnitude that in FP32 is where the bad number is."""
    kind, _, name = (event.source or "").partition(" ")
    if kind == "parameter":  # half parameters, whose master is beyond their format
        return float(dict(state.weights)[name].detach().abs().max())
    if event.operation == "cast":
        return event.amax
    return fp32.reach.get((event.module, event.where, event.operation, event.nth), event.amax)


def _overflow(exam: Exam, seen: Replay, fp32: Replay) -> Verdict:
    """The format is too narrow for a module: which one, by how much, and what helps."""
    event, state = seen.first, exam.state
    kind = BACKWARD if seen.finite_loss else FORWARD
    way = "backward" if kind == BACKWARD else "forward"
    if event is None:
        return Verdict(
            kind, f"overflow in the {way} pass, in {_format(state)} and not in FP32; no operation could be named"
        )
    amax = _in_fp32(state, event, fp32)
    limit = largest(event.dtype)
    ids = _samples(exam, seen)
    rows = f" in sample {some(ids)}" if ids and 2 * len(ids) < len(_lost(exam, seen).ids) else ""
    rules, bf16 = find_rules(exam, seen), bf16_helps(exam)
    return Verdict(
        kind,
        f"overflow in the {way} pass: {place(event)} {reaches(event, amax, limit)}{rows}; {cure_text(state, rules, bf16=bf16)}",
        **of_event(event),
        amax=amax,
        limit=limit,
        factor=amax / limit,
        sample_ids=ids[:MOST_IDS],
        fp32_modules=tuple(rules),
    )


def _dtype(state: TrainState) -> str:
    return str(state.policy.compute_dtype).removeprefix("torch.")


def _format(state: TrainState) -> str:
    return SHORT[_dtype(state)]
