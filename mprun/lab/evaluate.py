"""One set of FP32 modules, held against FP32: the gradients of saved states under the candidate policy.

Each state that the FP32 reference kept is put into a model under the candidate policy with ``precision.fp32_modules`` = the set,
and its window is run forward and backward with the same random numbers. **The test**: at every state the loss and all
gradients are finite, and for every module m with parameters of its own, and for all of them together,

    |g_m - g32_m|  <=  tolerance * max( R * r_m,  min(K * n_m, |g32_m| / 2),  Z * |g32| )          (norms are Euclidean)

* g_m, g32_m: gradient of m's parameters, unscaled, in the candidate and in FP32;
* r_m: what rounding to the format's mantissa explains, range left aside (:mod:`mprun.lab.rounding`); R = 4, since a real run
  rounds inside of modules too;
* n_m: the difference between the FP32 gradients of two windows at the same weights, the noise that training lives with; K = 0.1.
  Capped at half of the gradient, so that a gradient that was lost never passes as noise;
* Z = 1e-6 of the whole gradient: below that nothing is to be seen, and FP32's own rounding begins.

A module whose gradient is 0 but for rounding (a bias before a normalisation) has a large r_m, and is so not asked for what FP32
does not know either.

The loss scale S: a static one as it is; a dynamic one where it settles when it comes down from ``init``: the largest
``init * backoff_factor**k`` at which the gradients are finite, above ``min``. A loss that is not finite is nothing that S can
mend.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mprun.config import Config
from mprun.data.base import Batch
from mprun.lab.reference import Curve, Reference, SavedState, go, lab_config, undisturbed, windows
from mprun.lab.rounding import rounded_borders
from mprun.models.build import build_model
from mprun.numerics.formats import FORMATS
from mprun.training.build import switches
from mprun.training.buffers import adopt_buffers
from mprun.training.checkpoint import load_weights, restore
from mprun.training.env import restore_rng, seed_everything
from mprun.training.observe import check_plan, observe
from mprun.training.run import make_plan
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import accumulate

ROUNDING, NOISE, CAP, FLOOR = 4.0, 0.1, 0.5, 1e-6  # R, K, the cap of the noise, Z
ALL = "(all)"  # where the whole gradient stands among modules
KEPT = Path("the kept state")


@dataclass(frozen=True)
class Baseline:
    """What FP32 says at one state: gradients by parameter name, and by module their norm and what the candidate may miss."""

    saved: SavedState
    loss: float
    grads: dict[str, Tensor]
    norms: dict[str, float]
    rounding: dict[str, float]
    noise: dict[str, float]

    def limit(self, module: str) -> float:
        """The largest error at tolerance 1: see the module's docstring."""
        noise = min(NOISE * self.noise.get(module, 0.0), CAP * self.norms.get(module, 0.0))
        return max(ROUNDING * self.rounding.get(module, 0.0), noise, FLOOR * self.norms[ALL])


@dataclass(frozen=True)
class StateError:
    """How a set did at one state.

    Attributes:
        step: of the state.
        loss_scale: S at which it was run.
        finite: ``yes``, ``loss`` (the loss is not finite) or ``gradients`` (at no scale, or not at the static one).
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
            return f"gradients are not finite at {at}, loss scale {worst.loss_scale:g}"
        return f"{worst.worst}: gradient error {worst.errors.get(worst.worst or '', 0):.2g}, {worst.margin:.2g} of its limit, at {at}"


class Evaluator:
    """Runs sets of FP32 modules against the states of a reference; answers are kept by set.

    Args of the constructor:
        reference: with at least one kept state, the first of them at step 0.
        config: the candidate; its own ``precision.fp32_modules`` stay in force beside every set.
        tolerance: scales the limits.
    """

    def __init__(self, reference: Reference, config: Config, *, tolerance: float = 1.0) -> None:
        """Take the FP32 baselines. See the class."""
        self.reference = reference
        self.config = lab_config(config, seed=reference.config.seed)
        self.tolerance = tolerance
        self.device = reference.device
        self.known: dict[tuple[frozenset[str], float | None], Evaluation] = {}
        self.settled: dict[int, float] = {}
        plan = make_plan(self.config, reference.data.batches_per_epoch)
        self.schedule = build_schedule(self.config.schedule, plan.steps)
        with undisturbed():
            seed_everything(self.config.seed)
            self.pristine = build_model(self.config.model, reference.data.spec, trust=self.config.trust)
            with switches(reference.config, self.device):
                self.rows, self.written = self._looked()
                self.baselines = [self._baseline(saved) for saved in reference.states]

    # --- models -------------------------------------------------------------------------------------------------------

    def configured(self, modules: Sequence[str] | None) -> Config:
        """The candidate's config with ``modules`` in FP32; the reference's for None."""
        if modules is None:
            return self.reference.config
        config = copy.copy(self.config)
        rules = [*self.config.precision.fp32_modules]
        config.precision = dataclasses.replace(
            self.config.precision, fp32_modules=rules + [name for name in modules if name not in rules]
        )
        return config

    def build(self, modules: Sequence[str] | None) -> TrainState:
        """A fresh state, for the candidate with ``modules`` in FP32 or (None) for FP32. Inside its switches."""
        state = build_state(self.configured(modules), self._model(), self.schedule, self.device)
        state.num_classes = self.reference.data.spec.num_classes
        return state

    def _model(self) -> nn.Module:
        return copy.deepcopy(self.pristine)

    def _looked(self) -> tuple[list[dict[str, Any]], bool]:
        """The FP32 model's table of modules, and whether its forward pass writes to parameters."""
        state = self.build(None)
        restore(state, self.reference.states[0].checkpoint, path=KEPT)
        rows = observe(state, self.reference.states[0].window[0])
        return rows, bool(state.written)

    def place(self, state: TrainState, saved: SavedState) -> None:
        """Put the saved weights, buffers and random numbers into ``state``; optimizer and counters stay."""
        content = saved.checkpoint
        adopt_buffers(
            state.model, content["model"], content["buffers"], late=content["late_buffers"], device=self.device
        )
        load_weights(state, content, path=KEPT)
        restore_rng(saved.rng)

    # --- FP32 ---------------------------------------------------------------------------------------------------------

    def _baseline(self, saved: SavedState) -> Baseline:
        state = self.build(None)
        loss, grads = self.gradients(state, saved)
        bits = FORMATS[self.config.precision.compute_dtype.value].mantissa_bits
        with rounded_borders(state.model, bits):
            _, rough = self.gradients(state, saved, placed=False)
        other = dataclasses.replace(saved, window=self._other_window(saved))
        _, elsewhere = self.gradients(state, other)
        norms = norms_by_module(grads)
        return Baseline(saved, loss, grads, norms, distances(rough, grads), distances(elsewhere, grads))

    def _other_window(self, saved: SavedState) -> tuple[Batch, ...]:
        """The window of another state, or the run's next one: other examples at the same weights."""
        for other in self.reference.states:
            if other is not saved and len(other.window) == len(saved.window):
                return other.window
        state = self.build(None)
        state.position.epoch = saved.checkpoint["position"]["epoch"] + 1
        return tuple(next(windows(state, self.reference.data, max(len(saved.window), 1))))

    def gradients(
        self, state: TrainState, saved: SavedState, *, loss_scale: float = 1.0, placed: bool = True
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and unscaled float32 gradients by parameter name of ``saved``'s window.

        Args:
            state: of any policy; its weights, buffers and random numbers become those of ``saved``.
            saved: where to stand.
            loss_scale: S.
            placed: whether weights and buffers are put in place first (if not, they are there already).
        """
        if placed:
            self.place(state, saved)
        else:
            restore_rng(saved.rng)
        state.optimizer.zero_grad(set_to_none=True)
        state.scale = dataclasses.replace(state.scale, scale=torch.full_like(state.scale.scale, loss_scale))
        loss = float(accumulate(state, saved.window).loss)
        inverse = 1.0 / loss_scale if state.loss_scale.active else 1.0
        grads = {name: p.grad.float() * inverse for name, p in state.weights if p.grad is not None}
        state.optimizer.zero_grad(set_to_none=True)
        return loss, grads

    # --- the candidate ------------------------------------------------------------------------------------------------

    def evaluate(self, modules: Sequence[str], *, loss_scale: float | None = None) -> Evaluation:
        """The test of the module's docstring for ``modules`` in FP32, at another scale than the policy's if one is given."""
        key = frozenset(modules), loss_scale
        if key not in self.known:
            self.known[key] = self._evaluate(tuple(modules), loss_scale)
        return self.known[key]

    def _evaluate(self, modules: tuple[str, ...], loss_scale: float | None) -> Evaluation:
        found: list[StateError] = []
        with self.running(modules) as state:
            for number, base in enumerate(self.baselines):
                found.append(self._compared(state, number, base, loss_scale))
                if not found[-1].margin <= self.tolerance:
                    break
        return Evaluation(modules, found[-1].margin <= self.tolerance, tuple(found))

    @contextmanager
    def running(self, modules: Sequence[str]) -> Iterator[TrainState]:
        """A fresh state of the candidate inside its switches, random numbers put back at the end."""
        with undisturbed(), switches(self.configured(modules), self.device):
            yield self.build(modules)

    def _compared(self, state: TrainState, number: int, base: Baseline, loss_scale: float | None) -> StateError:
        if loss_scale is None and state.loss_scale.kind == "dynamic":
            scale, loss, grads = self._settle(state, number, base)
        else:
            scale = state.loss_scale.init if loss_scale is None else loss_scale
            scale = scale if state.loss_scale.active else 1.0
            loss, grads = self.gradients(state, base.saved, loss_scale=scale)
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
            return scale, *self.gradients(state, base.saved, loss_scale=scale)

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

    # --- a short run --------------------------------------------------------------------------------------------------

    def curve(self, modules: Sequence[str], steps: int) -> Curve:
        """A run of ``steps`` applied steps of the candidate with ``modules`` in FP32, from the reference's initialisation."""
        first = self.reference.states[0]
        config = self.configured(modules)
        with self.running(modules) as state:
            restore(state, first.checkpoint, path=KEPT)
            state.scale = state.loss_scale.start(self.device)
            if self.written:
                check_plan(state, observe(state, first.window[0]))
            return go(state, self.reference.data, config, steps=steps)[0]


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
