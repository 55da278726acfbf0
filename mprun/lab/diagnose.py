"""From one FP32 run to a policy that has been tried: measure, propose, verify, correct.

**Measure**: ``diagnose.steps`` steps in FP32, every ``diagnose.every``-th with the numbers at all module borders; some states
are kept. **Propose** a policy for a half format (:mod:`mprun.lab.propose`).

**Verify**: the policy runs from the same initialisation over the same batches as the FP32 run, once with the dynamic and once
with the static scale. It has to end, skip at most ``MOST_SKIPS`` steps (1 % with a static scale), and follow FP32's loss; where
the loss is off, FP32 itself is run again from weights that were moved by a rounding, and so far the loss may be off. If that is
not enough, what is to blame is corrected (a module, the scale), at most ``ROUNDS`` times.

FP16 is recommended where its cure is small and verified and leaves something in half, otherwise BF16, if that is; otherwise
FP32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.config import Config
from mprun.data.base import Batch
from mprun.errors import PrecisionError
from mprun.lab.advice import SCALES, SHORT, Modules, Parity, loss_parity
from mprun.lab.borders import watched_step
from mprun.lab.propose import Measured, Proposal, cure, policy, propose
from mprun.lab.reference import Curve, SavedState, reference
from mprun.lab.replay import Replay
from mprun.numerics.formats import FORMATS, power
from mprun.precision.overrides import make_plan
from mprun.training.postmortem import outliers
from mprun.training.result import StepResult
from mprun.training.state import TrainState
from mprun.training.step import train_step

KEPT_STATES, ROUNDS, MOST_SKIPS, TWINS = 4, 4, 2, 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """A run of a policy beside FP32: its scale's kind and where it started and ended, and whether it is ``ok``."""

    kind: str
    init: float
    last_scale: float
    steps: int
    skips: int
    parity: Parity
    status: str
    error: str | None
    ok: bool


@dataclass
class Diagnosis:
    """What came out. ``chosen`` is None where nothing in half could be verified; ``reason`` says why it is what it is."""

    measured: Measured | None = None
    fp16: Proposal | None = None
    bf16: Proposal | None = None
    chosen: Proposal | None = None
    reason: str = ""


def diagnose(config: Config, found: Diagnosis, say: Say) -> None:
    """Fill ``found`` in, step by step, so that an interrupted diagnosis leaves what is known.

    Raises:
        MprunError: what ``mprun train`` would refuse.
    """
    say("FP32: the run that everything is held against")
    measured = found.measured = measure(config)
    curve = measured.reference.curve
    if curve.status != "ok" or not curve.losses:
        found.reason = (
            f"the FP32 run itself goes wrong, so precision is not the cause: {curve.error or 'no step was applied'}"
        )
        return
    fp16 = found.fp16 = _proposed(measured, config, "float16", say)
    bf16 = found.bf16 = _proposed(measured, config, "bfloat16", say)
    _try(measured, config, fp16, say)
    if not fp16.failed and fp16.small:
        count = len(fp16.rules)
        kept = f", with {count} module{'s' * (count != 1)} in FP32" if count else ""
        found.chosen, found.reason = fp16, f"FP16 with a loss scale follows FP32{kept}"
        return
    why = fp16.failed or f"it would need {len(fp16.rules)} of {fp16.halves} modules in FP32"
    if not fp16.failed and fp16.hollow:
        why = _nothing_left(fp16)
    _try(measured, config, bf16, say)
    if not bf16.failed and bf16.hollow:
        bf16.failed = _nothing_left(bf16)
    if not bf16.failed:
        found.chosen, found.reason = bf16, f"not FP16: {why}. BF16 has FP32's range, and follows FP32{_doubt(bf16)}"
    elif not fp16.failed and not fp16.hollow:
        found.chosen, found.reason = fp16, f"{why}, but BF16 is no way out: {bf16.failed}"
    else:
        found.reason = f"stay with FP32. FP16: {why}. BF16: {bf16.failed}"


def _nothing_left(found: Proposal) -> str:
    return (
        f"with {', '.join(found.rules)} in FP32, which it needs, no module with weights is left that computes in half"
    )


def _doubt(found: Proposal) -> str:
    """What speaks against a policy that passed: the model as a whole is worse than rounding explains."""
    if found.whole is None:
        return ""
    return f" over these steps, but the model as a whole is beyond what rounding explains: {found.whole.why}; compare longer runs"


def measure(config: Config) -> Measured:
    """The FP32 run, sampled.

    Raises:
        OverrideError: a rule of ``precision.fp32_modules`` matches nothing.
    """
    steps, every = config.diagnose.steps, config.diagnose.every
    if config.train.steps is not None:
        steps = min(steps, config.train.steps)
    samples: dict[int, Modules] = {}
    apart: list[str] = []  # of the first window with a sample far from all others

    def step(state: TrainState, window: Sequence[Batch]) -> StepResult:
        now = state.counters.applied
        if not state.counters.attempts:
            make_plan(state.model, config.precision.fp32_modules, mode=config.precision.mode.value)
        if not apart and (outlier := outliers(window)) is not None:
            apart.append(f"{outlier.message.partition(': ')[2]}: look at it before the precision")
        if now % every or now in samples:
            return train_step(state, window)
        result, samples[now] = watched_step(state, window)
        return result

    sampled = range(0, steps, every)
    places = {round(i * (len(sampled) - 1) / max(KEPT_STATES - 1, 1)) for i in range(KEPT_STATES)}
    exact = reference(config, steps=steps, keep=[sampled[i] for i in sorted(places)], watch=step)
    return Measured(exact, samples, "".join(apart))


def _proposed(measured: Measured, config: Config, dtype: str, say: Say) -> Proposal:
    say(f"{SHORT[dtype]}: what would be half, how large it gets, and what each module does to it")
    try:
        return propose(measured, config, dtype)
    except PrecisionError as error:  # a device that does not compute in it
        return Proposal(dtype, failed=" ".join(str(error).split()))


def _try(measured: Measured, config: Config, found: Proposal, say: Say) -> None:
    """Verify and correct a policy; ``failed`` says why it cannot be recommended."""
    dtype = found.dtype
    kinds = ("dynamic", "static") if found.scaled else ("none",)
    for number in range(0 if found.failed else ROUNDS):
        trials, broken = [], None
        for kind in kinds:
            init = found.static if kind == "static" else found.init
            say(f"{SHORT[dtype]}: a run" + (f" with a {kind} scale from {power(init)}" if found.scaled else ""))
            runner = Replay(measured.reference, policy(config, dtype, init=init, kind=kind))
            curve, at = runner.run([*found.rules], len(measured.reference.losses))
            trial = trial_of(kind, init, curve, measured.reference.losses)
            if trial.status == "ok" and not trial.parity.holds:
                say(f"FP32: {TWINS} runs from weights that were rounded, to see how far that alone leads")
                spread = max(map(abs, twin_gaps(measured, config, dtype)), default=0.0)
                trial = trial_of(kind, init, curve, measured.reference.losses, spread=2 * spread)
            trials.append(trial)
            broken = broken or at
        found.trials = trials
        found.failed = next((_failure(trial) for trial in trials if not trial.ok), "")
        if not found.failed or number == ROUNDS - 1 or not _correct(measured, config, found, broken):
            break


def trial_of(kind: str, init: float, curve: Curve, exact: Sequence[float], *, spread: float = 0.0) -> Trial:
    """The verdict on a run: it ended, skipped few steps, and follows the losses ``exact``; a gap up to ``spread`` is allowed."""
    parity, skips = loss_parity(exact, curve.losses), len(curve.skips)
    parity = dataclasses.replace(parity, allowed=max(parity.allowed, spread))
    ok = curve.status == "ok" and skips <= most_skips(kind, len(curve.losses)) and parity.holds
    last = curve.scales[-1] if curve.scales else init
    return Trial(kind, init, last, len(curve.losses), skips, parity, curve.status, curve.error, ok)


def most_skips(kind: str, steps: int) -> int:
    """How many skips a verified run may have: the first search of a dynamic scale, or one step in a hundred of a static one."""
    return MOST_SKIPS if kind == "dynamic" else steps // 100


def twin_gaps(measured: Measured, config: Config, dtype: str) -> list[float]:
    """Loss gaps of FP32 runs whose initial weights are off by half an ulp of ``dtype``, up or down at random.

    Such a run is as good as the first one, but takes another path: where training is chaotic, so far apart two equally good runs
    end, and no rounding can be asked for less.
    """
    gaps = []
    for seed in range(TWINS):
        draw = torch.Generator().manual_seed(seed)
        first = measured.reference.states[0]
        content = dict(first.checkpoint)
        content["model"] = {name: _moved(t, FORMATS[dtype].eps / 2, draw) for name, t in content["model"].items()}
        states = (dataclasses.replace(first, checkpoint=content), *measured.reference.states[1:])
        runner = Replay(dataclasses.replace(measured.reference, states=states), measured.reference.config)
        curve = runner.curve([], len(measured.reference.losses))
        gaps.append(loss_parity(measured.reference.losses, curve.losses).gap)
    return [gap for gap in gaps if math.isfinite(gap)]


def _moved(value: Tensor, by: float, draw: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    sign = torch.randint(0, 2, value.shape, generator=draw).to(value) * 2 - 1
    return value * (1 + by * sign)


def _failure(trial: Trial) -> str:
    if trial.status != "ok":
        return f"a run of it ends early: {trial.error}"
    if not trial.parity.holds:
        gap, allowed = trial.parity.gap, trial.parity.allowed
        return f"after {trial.steps} steps its loss is {gap:.3g} above FP32's ({allowed:.2g} is allowed)"
    return f"with a {trial.kind} scale from {power(trial.init)} it skips {trial.skips} of {trial.steps + trial.skips} steps"


def _correct(measured: Measured, config: Config, found: Proposal, broken: SavedState | None) -> bool:
    """Change what a failed verification blames: a module that overflowed, or the scale. Whether there was something to change."""
    before = (dict(found.rules), found.static, found.init)
    if broken is not None:
        states = dataclasses.replace(measured.reference, states=(*measured.reference.states, broken))
        replay = Replay(measured.reference, policy(config, found.dtype))
        cure(replay, dataclasses.replace(measured, reference=states), config, found)
    for trial in found.trials if found.rules == before[0] else ():
        if trial.kind == "static" and trial.skips > most_skips("static", trial.steps):
            found.static = max(found.static / 2, SCALES[0])
        elif trial.kind == "dynamic" and trial.skips > MOST_SKIPS:
            found.init = max(min(trial.last_scale, found.init / 4), SCALES[0])
    return before != (dict(found.rules), found.static, found.init)
