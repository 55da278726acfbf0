"""A policy in one half format, from nothing in FP32 upwards: FP32 modules and loss scale, from a measured FP32 run.

1. At each kept state, forward and backward under the policy. Whatever overflows in the forward pass does so at any loss scale:
   its module joins the FP32 rules, the first one first, and again, until nothing does. A container is not put in FP32 for an
   addition of its own while the child that gives it the largest numbers might do: what is FP32 makes the sum FP32.
2. The interval of scales (:mod:`mprun.lab.advice`) from the sampled gradients, with what the passes saw inside of modules.
3. The local error of each module (:mod:`mprun.lab.local`) at the scale found. Own operations that are wrong by more than
   rounding join the rules, and so back to 1.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mprun.config import Config, DType, LossScaleConfig, Mode, PrecisionConfig, ScaleKind
from mprun.lab.advice import (
    SCALES,
    SHORT,
    STARVED,
    Held,
    Interval,
    ModuleLoss,
    Modules,
    ScaleRow,
    half_gradients,
    interval,
    lost_norm_frac,
    module_loss,
    scale_rows,
)
from mprun.lab.halves import Look, Overflow, peak, settled
from mprun.lab.local import local_errors
from mprun.lab.module_error import ModuleError
from mprun.lab.reference import Reference
from mprun.lab.replay import Replay
from mprun.numerics.formats import FORMATS, power
from mprun.numerics.stats import merged
from mprun.training.observe import observe
from mprun.training.record import is_memory

ROUNDS = 4
# A cure is small if at most so many modules, or this part of those that compute in half, have to stay in FP32.
SMALL, SMALL_FRAC = 3, 0.25


@dataclass(frozen=True)
class Measured:
    """The FP32 run: the reference with its kept states, the sampled steps by applied step, and the data that stands out."""

    reference: Reference
    samples: dict[int, Modules]
    outlier: str = ""


@dataclass
class Proposal:
    """A policy in one half format, with what speaks for it.

    Attributes:
        dtype: ``float16`` or ``bfloat16``.
        rules: FP32 modules with the reason of each.
        held: what is half under it.
        rows: what each scale would do; ``interval`` the safe ones (FP16 only).
        static: the recommended static scale; ``init`` where a dynamic one starts.
        losses: by module, what the format costs if nothing is kept in FP32.
        errors: local errors without the rules that were found.
        trials: the last verification runs.
        working: the modules with parameters that compute in half, without those rules.
        whole: the local error of the model itself, under the rules, where it is beyond what rounding explains.
        failed: why it cannot be recommended; empty if it can.
    """

    dtype: str
    rules: dict[str, str] = field(default_factory=dict)
    held: Held = field(default_factory=lambda: Held(frozenset(), frozenset()))
    rows: list[ScaleRow] = field(default_factory=list)
    interval: Interval = field(default_factory=lambda: Interval(1.0, 1.0))
    static: float = 1.0
    init: float = 1.0
    losses: list[ModuleLoss] = field(default_factory=list)
    errors: list[ModuleError] = field(default_factory=list)
    trials: list[Any] = field(default_factory=list)
    working: tuple[str, ...] = ()
    whole: ModuleError | None = None
    failed: str = ""

    @property
    def scaled(self) -> bool:
        """Whether it has a loss scale."""
        return self.dtype == "float16"

    @property
    def small(self) -> bool:
        """Whether few enough modules stay in FP32, and something is left that computes in half."""
        return len(self.rules) <= max(SMALL, SMALL_FRAC * self.halves) and not self.hollow

    @property
    def halves(self) -> int:
        """How many modules with parameters compute in half, without the rules."""
        return len(self.working)

    @property
    def hollow(self) -> bool:
        """Whether the rules leave no module with parameters in half: FP32 by another name."""
        covered = (any(f"{path}.".startswith(f"{rule}.") for rule in self.rules) for path in self.working)
        return bool(self.working) and all(covered)


def policy(config: Config, dtype: str, *, init: float = 1.0, kind: str = "dynamic") -> Config:
    """``config`` with the policy that is tried: its own mode if that is ``master``, otherwise autocast; its own FP32 rules."""
    mode = Mode.master if config.precision.mode is Mode.master else Mode.autocast
    old, scale = config.precision.loss_scale, LossScaleConfig()
    if dtype == "float16":
        scale = dataclasses.replace(
            old, kind=ScaleKind[kind], init=init, min=min(old.min, init), max=max(old.max, init)
        )
        scale.on_overflow = LossScaleConfig().on_overflow
    tried = PrecisionConfig(
        name="recommended",
        mode=mode,
        param_dtype=DType[dtype] if mode is Mode.master else DType.float32,
        compute_dtype=DType[dtype],
        fp32_modules=[*config.precision.fp32_modules],
        on_nonfinite_loss=config.precision.on_nonfinite_loss,
        loss_scale=scale,
    )
    changed = copy.copy(config)
    changed.precision = tried
    return changed


def with_rules(config: Config, rules: Mapping[str, str]) -> Config:
    """``config`` with further FP32 rules."""
    changed = copy.copy(config)
    given = config.precision.fp32_modules
    changed.precision = dataclasses.replace(
        config.precision, fp32_modules=[*given, *(rule for rule in rules if rule not in given)]
    )
    return changed


def propose(measured: Measured, config: Config, dtype: str) -> Proposal:
    """A policy in ``dtype``, not verified yet; ``failed`` says why there is none."""
    found = Proposal(dtype)
    replay = Replay(measured.reference, policy(config, dtype))
    _describe(replay, measured, found)
    for _ in range(ROUNDS):
        looks = cure(replay, measured, config, found)
        if found.failed:
            found.errors = found.errors or errors_of(measured, config, found, {})
            return found
        find_scale(replay, measured, found, looks)
        if found.scaled and found.interval.empty:
            new = _binding(measured, found, looks)
            if not new:
                break
            found.rules |= new
            continue
        errors = errors_of(measured, config, found, found.rules)
        if not found.errors:
            found.errors = errors_of(measured, config, found, {}) if found.rules else errors
        new = {error.path: error.why for error in errors if error.own and error.path not in found.rules}
        found.whole = next((error for error in errors if not error.path and error.beyond), None)
        new.pop("", None)  # what the errors of all modules add up to is for the run beside FP32 to say
        if not new:
            break
        found.rules |= new
    if found.scaled and found.interval.empty:
        found.failed = _no_scale(found)
    return found


def errors_of(measured: Measured, config: Config, found: Proposal, rules: Mapping[str, str]) -> list[ModuleError]:
    """The local errors under the proposal, with ``rules`` and at its scale."""
    tried = with_rules(policy(config, found.dtype, init=found.static or 1.0), rules)
    return local_errors(measured.reference, tried, measured.reference.states)


def cure(replay: Replay, measured: Measured, config: Config, found: Proposal) -> list[Look]:
    """Add rules until no kept state overflows in the forward pass; the passes at which none does. ``failed``: there are none."""
    form, states = FORMATS[found.dtype], measured.reference.states
    start = 1.0 if not found.scaled else found.static if found.static > 1 else SCALES[-1]
    while True:
        looks: list[Look] = []
        with replay.running([*found.rules]) as state:
            children = {
                path: [name for name, _ in module.named_children()] for path, module in state.model.named_modules()
            }
            for saved in states:
                looks.append(settled(replay, state, saved, start))
                if looks[-1].overflows or looks[-1].error:
                    break
        last, before = looks[-1], dict(found.rules)
        if last.error:
            errors = errors_of(measured, config, found, found.rules)
            found.rules |= {e.path: e.why for e in errors if e.path and e.own and e.nonfinite == "error"}
        elif last.overflows:
            bad = last.overflows[0]
            if rule := _rule_for(bad, children, measured.samples.get(last.step, {}), found.rules):
                # What is around covers what was tried inside.
                found.rules = {path: why for path, why in found.rules.items() if not path.startswith(f"{rule}.")}
                found.rules[rule] = _overflow_words(bad, form.max, SHORT[found.dtype])
        else:
            if not all(math.isfinite(look.loss) for look in looks):
                found.failed = f"the loss is not finite at step {last.step}"
            return looks
        if found.rules == before:
            where = last.overflows[0].module if last.overflows else ""
            said = (
                f"{where or 'an operation of the model itself'} overflows in the forward pass, whatever is kept in FP32"
            )
            found.failed = f"it breaks at step {last.step}: {last.error or said}"
            return looks
        if len(found.rules) > max(2 * SMALL, found.halves // 2):
            first = next(iter(found.rules))
            found.failed = f"more than {len(before)} modules overflow in the forward pass, the first {first}"
            return looks


def _rule_for(
    bad: Overflow, children: Mapping[str, Sequence[str]], sample: Modules, rules: Mapping[str, str]
) -> str | None:
    """The module to keep in FP32 for an overflow: itself; of a container first the child with the largest output.

    What an FP32 module gives back in half overflows all the same (``master`` mode): then the module around it.
    """
    inside = [f"{bad.module}.{name}".lstrip(".") for name in children.get(bad.module, ())]

    def size(path: str) -> float:
        stats = sample.get(path, {}).get("activation")
        return stats.amax if stats else 0.0

    largest = [path for path in sorted(inside, key=size, reverse=True) if size(path)][:1]
    around = [bad.module]
    while around[-1]:
        around.append(around[-1].rpartition(".")[0])
    return next((path for path in [*largest, *around] if path and path in children and path not in rules), None)


def _overflow_words(bad: Overflow, largest: float, name: str) -> str:
    if bad.amax > largest:
        return f"{bad.operation} of numbers up to {bad.amax:.2g}, {bad.amax / largest:.2g} times {name}'s largest"
    return f"{bad.operation} of numbers up to {bad.amax:.2g} overflows {name}"


def _rows(replay: Replay, measured: Measured, rules: Mapping[str, str]) -> list[dict[str, Any]]:
    """The precision table of the policy with ``rules``."""
    with replay.running([*rules]) as state:
        replay.place(state, measured.reference.states[0])
        return observe(state, measured.reference.states[0].window[0])


def _describe(replay: Replay, measured: Measured, found: Proposal) -> None:
    """What the format would cost each module without any rule that was found."""
    try:
        rows = _rows(replay, measured, {})
    except RuntimeError as error:  # a constant too large for half, say: the local errors name it
        if is_memory(error):
            raise
        return
    held = Held.of(rows, found.dtype)
    found.working = tuple(row["module"] for row in rows if row["compute_dtype"] == found.dtype and row["param_dtype"])
    samples = [*measured.samples.values()]
    found.losses = [
        module_loss(row["module"], row["class"], samples, held, FORMATS[found.dtype])
        for row in rows
        if any(row["module"] in modules for modules in samples)
    ]


def find_scale(replay: Replay, measured: Measured, found: Proposal, looks: Sequence[Look]) -> None:
    """The interval of scales under the rules so far, and the scales to start from."""
    found.held = Held.of(_rows(replay, measured, found.rules), found.dtype)
    if not found.scaled:
        return
    inside, half = _inside(measured, found.held, looks), len(measured.reference.losses) // 2
    factor = inside / _unseen(measured)
    samples, form = [*measured.samples.values()], FORMATS[found.dtype]
    found.rows = scale_rows(samples, found.held, form, factor=factor)
    ending = [modules for step, modules in measured.samples.items() if step >= half] or samples
    late = interval(scale_rows(ending, found.held, form, factor=inside)).high
    found.interval = dataclasses.replace(interval(found.rows), late=late)
    found.static, found.init = found.interval.static, found.interval.init


def _binding(measured: Measured, found: Proposal, looks: Sequence[Look]) -> dict[str, str]:
    """The modules that leave no scale: those that overflow at the lowest one, or those that starve at the highest, if fewer."""
    form, low, high = FORMATS[found.dtype], found.interval.low, found.interval.high
    over: dict[str, str] = {}
    for look in looks:
        for module, (operation, amax) in look.backward.items():
            if amax * low >= form.overflow and module:
                over[module] = (
                    f"{operation} of its backward pass reaches {amax:.2g}, too much for a loss scale of {power(low)}"
                )
    steps = [half_gradients(modules, found.held) for modules in measured.samples.values()]
    whole = {
        path: merged([s for step in steps for s in step.get(path, [])])
        for path in dict.fromkeys(p for s in steps for p in s)
    }
    starved = {
        path: f"its gradients, at most {stats.amax:.2g}, become 0 at a loss scale of {power(high)}"
        for path, stats in whole.items()
        if path and high and lost_norm_frac(stats, form, high) > STARVED
    }
    fewer = starved if starved and (not over or len(starved) <= len(over)) else over
    return {path: why for path, why in fewer.items() if path not in found.rules}


def _inside(measured: Measured, held: Held, looks: Sequence[Look]) -> float:
    """How much smaller half gradients are at the modules' borders than inside of them; at most 1.

    Over the states the median, but at least so that the largest one seen inside counts as what it is.
    """

    def border(step: int) -> float:
        parts = half_gradients(measured.samples.get(step, {}), held).values()
        return max((stats.amax for part in parts for stats in part), default=0.0)

    pairs = [(border(look.step), peak(look)) for look in looks]
    ratios = [outside / inside for outside, inside in pairs if outside and inside]
    if not ratios:
        return 1.0
    largest = max(map(border, measured.samples)) / max(inside for _, inside in pairs)
    return min(statistics.median(ratios), largest, 1.0)


def _unseen(measured: Measured) -> float:
    """How much larger the gradient's norm was at any step than at the sampled ones; at least 1."""
    norms = measured.reference.curve.grad_norms
    seen = max((norms[step] for step in measured.samples if step < len(norms)), default=0.0)
    return max(max(norms) / seen, 1.0) if seen else 1.0


def _no_scale(found: Proposal) -> str:
    low, high = found.interval.low, found.interval.high
    row = next((row for row in found.rows if row.scale > high), found.rows[-1])
    return (
        f"no loss scale is safe: above {power(high)} the gradients of {row.overflowing or 'a module'} overflow, "
        f"below {power(low)} those of others become 0"
    )
