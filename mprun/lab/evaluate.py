"""One set of FP32 modules, held against FP32: the gradients of saved states under the candidate policy.

Each state that the FP32 reference kept is put into a model under the candidate policy with ``precision.fp32_modules`` = the set,
and its window is run forward and backward with the same random numbers. **The test**: at every state the loss and all
gradients are finite, and for every module m with parameters of its own, and for all of them together,

    |g_m - g32_m|  <=  tolerance * max( R * r_m,  min(K * n_m, |g32_m| / 2),  Z * |g32|,  V * G )  (norms are Euclidean)

* g_m, g32_m: gradient of m's parameters, unscaled, in the candidate and in FP32;
* r_m: what rounding to the format's mantissa explains, range left aside (:mod:`mprun.lab.rounding`); R = 4, since a real run
  rounds inside of modules too;
* n_m: the difference between the FP32 gradients of two windows at the same weights, the noise that training lives with; K = 0.1.
  Capped at half of the gradient, so that a gradient that was lost never passes as noise;
* Z = 1e-6 of the whole gradient: below that nothing is to be seen, and FP32's own rounding begins;
* V = 1e-12 of G, the largest whole gradient of the states: where a run has learned its examples to the last bit, what is left
  of the gradient moves no weight in FP32 either, and a format that loses it loses nothing.

A module whose gradient is 0 but for rounding (a bias before a normalisation) has a large r_m, and is so not asked for what FP32
does not know either.

The loss scale S: a static one as it is; a dynamic one where it settles when it comes down from ``init``: the largest
``init * backoff_factor**k`` at which the gradients are finite, above ``min``. A loss that is not finite is nothing that S can
mend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mprun.config import Config
from mprun.data.base import Batch
from mprun.lab.reference import Reference, SavedState, windows
from mprun.lab.replay import Replay
from mprun.lab.rounding import rounded_borders
from mprun.numerics.formats import FORMATS
from mprun.report.summary import scale_text
from mprun.training.blame import dtype_trouble
from mprun.training.state import TrainState

ROUNDING, NOISE, CAP, FLOOR, VANISHED = 4.0, 0.1, 0.5, 1e-6, 1e-12  # R, K, the cap of the noise, Z, V
ALL = "(all)"  # where the whole gradient stands among modules


@dataclass(frozen=True)
class Baseline:
    """What FP32 says at one state: gradients by parameter name, and by module their norm and what the candidate may miss.

    ``largest`` is the norm of the whole gradient at the state where it is largest.
    """

    saved: SavedState
    loss: float
    grads: dict[str, Tensor]
    norms: dict[str, float]
    rounding: dict[str, float]
    noise: dict[str, float]
    largest: float = 0.0

    def limit(self, module: str) -> float:
        """The largest error at tolerance 1: see the module's docstring."""
        noise = min(NOISE * self.noise.get(module, 0.0), CAP * self.norms.get(module, 0.0))
        return max(ROUNDING * self.rounding.get(module, 0.0), noise, FLOOR * self.norms[ALL], VANISHED * self.largest)


@dataclass(frozen=True)
class StateError:
    """How a set did at one state.

    Attributes:
        step: of the state.
        loss_scale: S at which it was run.
        finite: ``yes``, ``loss`` (the loss is not finite), ``gradients`` (at no scale, or not at the static one), or what
            the model said when it met dtypes that it cannot do with.
        loss: of the candidate; ``loss_error`` its relative difference from FP32's.
        error: relative error of the whole gradient.
        worst: module with the largest error for its limit, and ``margin`` their ratio: above the tolerance it fails.
        errors: relative error by module, ``margins`` error for limit.
    """

    step: int
    loss_scale: float
    finite: str
    loss: float
    loss_error: float
    error: float
    worst: str | None
    margin: float
    errors: dict[str, float]
    margins: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """How a set did: ``passes`` at every state that was looked at (none after the first that failed)."""

    modules: tuple[str, ...]
    passes: bool
    states: tuple[StateError, ...]

    @property
    def why(self) -> str:
        """The reason of a failure, or how close it was, in one line."""
        worst = max(self.states, key=lambda s: s.margin)
        at = f"step {worst.step}"
        if worst.finite == "loss":
            return f"the loss is {worst.loss} at {at}"
        if worst.finite == "gradients":
            return f"gradients are not finite at {at}, loss scale {scale_text(worst.loss_scale)}"
        if worst.finite != "yes":
            return worst.finite.splitlines()[0]
        error = worst.errors.get(worst.worst or "", 0.0)
        return f"gradient error {error:.2g} in {worst.worst or 'the model'}, {worst.margin:.2g} of its limit, at {at}"


class Evaluator:
    """Runs sets of FP32 modules against the states of a reference; answers are kept by set.

    Args of the constructor:
        reference: with at least one kept state, the first of them at step 0.
        config: the candidate; its own ``precision.fp32_modules`` stay in force beside every set.
        tolerance: scales the limits.
    """

    def __init__(self, reference: Reference, config: Config, *, tolerance: float = 1.0) -> None:
        """See the class."""
        self.replay = Replay(reference, config)
        self.tolerance = tolerance
        self.known: dict[tuple[frozenset[str], float | None], Evaluation] = {}
        self.settled: dict[int, float] = {}

    @cached_property
    def baselines(self) -> list[Baseline]:
        """What FP32 says at each state."""
        with self.replay.running(None) as state:
            found = [self._baseline(state, saved) for saved in self.replay.reference.states]
        largest = max((base.norms[ALL] for base in found), default=0.0)
        return [dataclasses.replace(base, largest=largest) for base in found]

    def _baseline(self, state: TrainState, saved: SavedState) -> Baseline:
        loss, grads = self.replay.gradients(state, saved)
        bits = FORMATS[self.replay.config.precision.compute_dtype.value].mantissa_bits
        with rounded_borders(state.model, bits):
            _, rough = self.replay.gradients(state, saved, placed=False)
        other = dataclasses.replace(saved, window=self._other_window(state, saved))
        _, elsewhere = self.replay.gradients(state, other)
        return Baseline(
            saved, loss, grads, norms_by_module(grads), distances(rough, grads), distances(elsewhere, grads)
        )

    def _other_window(self, state: TrainState, saved: SavedState) -> tuple[Batch, ...]:
        """The window of another state, or one of the next epoch: other examples at the same weights."""
        reference = self.replay.reference
        for other in reference.states:
            if other is not saved and len(other.window) == len(saved.window):
                return other.window
        state.position.epoch, state.position.batch = saved.checkpoint["position"]["epoch"] + 1, 0
        return tuple(next(windows(state, reference.data, len(saved.window))))

    def evaluate(self, modules: Sequence[str], *, loss_scale: float | None = None) -> Evaluation:
        """The module docstring's test for ``modules`` in FP32; at a static scale in place of the policy's if one is given."""
        key = frozenset(modules), loss_scale
        if key not in self.known:
            self.known[key] = self._evaluate(tuple(modules), loss_scale)
        return self.known[key]

    def _evaluate(self, modules: tuple[str, ...], loss_scale: float | None) -> Evaluation:
        found: list[StateError] = []
        baselines = self.baselines
        with self.replay.running(modules, loss_scale) as state:
            for number, base in enumerate(baselines):
                try:
                    found.append(self._compared(state, number, base))
                except (RuntimeError, TypeError) as error:
                    if (text := dtype_trouble(error, state)) is None:
                        raise
                    step, nan = base.saved.step, math.nan
                    found.append(StateError(step, nan, text, nan, nan, nan, None, math.inf, {}, {}))
                if not found[-1].margin <= self.tolerance:
                    break
        return Evaluation(modules, found[-1].margin <= self.tolerance, tuple(found))

    def _compared(self, state: TrainState, number: int, base: Baseline) -> StateError:
        if state.loss_scale.kind == "dynamic":
            scale, loss, grads = self._settle(state, number, base)
        else:
            scale = state.loss_scale.init if state.loss_scale.active else 1.0
            loss, grads = self.replay.gradients(state, base.saved, loss_scale=scale)
        gap = abs(loss - base.loss) / max(abs(base.loss), 1e-30)
        finite = "loss" if not math.isfinite(loss) else "yes" if all_finite(grads) else "gradients"
        if finite != "yes":
            worst = next((name.rpartition(".")[0] for name, g in grads.items() if not g.isfinite().all()), None)
            return StateError(base.saved.step, scale, finite, loss, gap, math.inf, worst, math.inf, {}, {})
        away = distances(grads, base.grads)
        errors = {m: ratio(d, base.norms.get(m, 0.0)) for m, d in away.items()}
        margins = {m: ratio(d, base.limit(m)) for m, d in away.items()}
        worst = max(margins, key=lambda m: margins[m])
        return StateError(
            base.saved.step, scale, finite, loss, gap, errors[ALL], worst, margins[worst], errors, margins
        )

    def _settle(self, state: TrainState, number: int, base: Baseline) -> tuple[float, float, dict[str, Tensor]]:
        """Where a dynamic scale comes to rest, and loss and gradients there. Begins where the last set came to rest."""
        rule = state.loss_scale
        last = max(math.ceil(math.log(rule.min / rule.init, rule.backoff_factor)), 0)

        def run(k: int) -> tuple[float, float, dict[str, Tensor]]:
            scale = max(rule.init * rule.backoff_factor**k, rule.min)
            return scale, *self.replay.gradients(state, base.saved, loss_scale=scale)

        def good(result: tuple[float, float, dict[str, Tensor]]) -> bool:
            return all_finite(result[2])

        k = min(int(self.settled.get(number, 0)), last)
        here = run(k)
        if not math.isfinite(here[1]):
            return here
        if good(here):
            while k > 0 and good(above := run(k - 1)):
                k, here = k - 1, above
            self.settled[number] = k
            return here
        bad, step = k, 1
        while not good(here):  # down in growing strides, then back by halves
            if k == last:
                return here
            bad, k, step = k, min(k + step, last), step * 2
            here = run(k)
        while k - bad > 1:
            middle = (k + bad) // 2
            result = run(middle)
            if good(result):
                k, here = middle, result
            else:
                bad = middle
        self.settled[number] = k
        return here


def ratio(part: float, whole: float) -> float:
    """``part / whole``; nothing of nothing is 0, something of nothing is inf."""
    return part / whole if whole else math.inf if part else 0.0


def all_finite(grads: dict[str, Tensor]) -> bool:
    """Whether no gradient holds NaN or inf."""
    norms = torch._foreach_norm(list(grads.values()))
    return bool(torch.stack(norms).isfinite().all()) if norms else True


def norms_by_module(grads: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the gradient by module that owns the parameters, and of all of them (``ALL``)."""
    values = torch.stack(torch._foreach_norm(list(grads.values()))).double().tolist()
    sums: dict[str, float] = {ALL: 0.0}
    for name, value in zip(grads, values, strict=True):
        owner = name.rpartition(".")[0]
        sums[owner] = sums.get(owner, 0.0) + value**2
        sums[ALL] += value**2
    return {owner: math.sqrt(value) for owner, value in sums.items()}


def distances(grads: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference by module; a gradient that one side lacks counts as 0 there."""
    difference = {}
    for name in {**other, **grads}:
        a, b = grads.get(name), other.get(name)
        difference[name] = a - b if a is not None and b is not None else a if a is not None else b
    return norms_by_module({name: value for name, value in difference.items() if value is not None})
