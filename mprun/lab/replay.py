"""Saved states of the FP32 reference in models of any policy: gradients of a state, and short runs from the first one.

A model of a candidate is a copy of the FP32 model as it was built, cast and put under its rules as a run would be, which takes
milliseconds; data, seeds and initial weights are the reference's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mprun.config import Config, ScaleKind
from mprun.lab.reference import Curve, Reference, SavedState, go, lab_config, undisturbed
from mprun.models.build import build_model
from mprun.training.buffers import adopt_buffers
from mprun.training.build import switches
from mprun.training.checkpoint import load_weights, restore
from mprun.training.env import restore_rng, seed_everything
from mprun.training.observe import check_plan, observe
from mprun.training.run import make_plan
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import accumulate

KEPT = Path("the kept state")


class Replay:
    """Builds models of a candidate policy and puts states of a reference into them.

    Args of the constructor:
        reference: with at least one kept state, the first of them at step 0.
        config: the candidate; its own ``precision.fp32_modules`` stay in force beside every set.

    Attributes:
        rows: the FP32 model's table of modules (:func:`~mprun.training.observe.observe`).
    """

    def __init__(self, reference: Reference, config: Config) -> None:
        """See the class."""
        self.reference = reference
        self.config = lab_config(config, seed=reference.config.seed)
        self.device = reference.device
        plan = make_plan(self.config, reference.data.batches_per_epoch)
        self.schedule = build_schedule(self.config.schedule, plan.steps)
        with undisturbed():
            self.pristine: nn.Module | None = None
            self.pristine = self._model()
            with switches(reference.config, self.device):
                state = self.build(None)
                self.place(state, reference.states[0])
                self.rows: list[dict[str, Any]] = observe(state, reference.states[0].window[0])

    def configured(self, modules: Sequence[str] | None, loss_scale: float | None = None) -> Config:
        """The candidate's config with ``modules`` in FP32, and a static scale if one is given; the reference's for None."""
        if modules is None:
            return self.reference.config
        config = copy.copy(self.config)
        rules = [*self.config.precision.fp32_modules]
        config.precision = dataclasses.replace(
            self.config.precision, fp32_modules=rules + [name for name in modules if name not in rules]
        )
        if loss_scale is not None:
            static = dataclasses.replace(config.precision.loss_scale, kind=ScaleKind.static, init=loss_scale)
            config.precision.loss_scale = static
        return config

    def build(self, modules: Sequence[str] | None, loss_scale: float | None = None) -> TrainState:
        """A fresh state, for the candidate with ``modules`` in FP32 or (None) for FP32. Inside its switches."""
        state = build_state(self.configured(modules, loss_scale), self._model(), self.schedule, self.device)
        state.num_classes = self.reference.data.spec.num_classes
        return state

    def _model(self) -> nn.Module:
        """The FP32 model as it was built; built again where it cannot be copied (the old weight_norm keeps results in it)."""
        if self.pristine is not None:
            with suppress(RuntimeError, TypeError, NotImplementedError):
                return copy.deepcopy(self.pristine)
        with undisturbed():
            seed_everything(self.config.seed)
            return build_model(self.config.model, self.reference.data.spec, trust=self.config.trust)

    @contextmanager
    def running(self, modules: Sequence[str] | None, loss_scale: float | None = None) -> Iterator[TrainState]:
        """A fresh state inside its switches; the caller's random numbers are put back at the end."""
        with undisturbed(), switches(self.configured(modules), self.device):
            yield self.build(modules, loss_scale)

    def place(self, state: TrainState, saved: SavedState) -> None:
        """Put the saved weights, buffers and random numbers into ``state``; optimizer and counters stay."""
        content = self._content(state, saved)
        adopt_buffers(
            state.model, content["model"], content["buffers"], late=content["late_buffers"], device=self.device
        )
        load_weights(state, content, path=KEPT)
        restore_rng(saved.rng)

    def gradients(
        self, state: TrainState, saved: SavedState, *, loss_scale: float = 1.0, placed: bool = True
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and unscaled float32 gradients by parameter name of ``saved``'s window.

        Args:
            state: of any policy; its weights, buffers and random numbers become those of ``saved``.
            saved: where to stand.
            loss_scale: S; of no account where the policy has no scale.
            placed: whether weights and buffers are put in place first (if not, they are there already).
        """
        if placed:
            self.place(state, saved)
        else:
            restore_rng(saved.rng)
        return window_gradients(state, saved, loss_scale)

    def curve(self, modules: Sequence[str], steps: int, *, loss_scale: float | None = None) -> Curve:
        """A run of ``steps`` applied steps of the candidate with ``modules`` in FP32, from the reference's initialisation.

        Raises:
            MprunError: a real run would be refused, as one whose rules cannot come into force.
        """
        return self.run(modules, steps, loss_scale=loss_scale)[0]

    def run(
        self, modules: Sequence[str], steps: int, *, loss_scale: float | None = None
    ) -> tuple[Curve, SavedState | None]:
        """:meth:`curve`, and the state and window at which it broke, if it did."""
        first = self.reference.states[0]
        with self.running(modules, loss_scale) as state:
            restore(state, self._content(state, first), path=KEPT)
            state.scale = state.loss_scale.start(self.device)
            check_plan(state, observe(state, first.window[0]))
            return go(state, self.reference.data, self.configured(modules, loss_scale), steps=steps)

    def _content(self, state: TrainState, saved: SavedState) -> dict[str, Any]:
        # ``pure`` takes over nothing from other modes in a resumed run, where its truth would be lost. Here nothing is resumed.
        return saved.checkpoint | {"mode": state.policy.mode, "policy": str(state.policy)}


def window_gradients(state: TrainState, saved: SavedState, loss_scale: float) -> tuple[float, dict[str, Tensor]]:
    """Loss and unscaled float32 gradients by parameter name of ``saved``'s window, from where ``state`` stands."""
    state.optimizer.zero_grad(set_to_none=True)
    state.scale = dataclasses.replace(state.scale, scale=torch.full_like(state.scale.scale, loss_scale))
    loss = float(accumulate(state, saved.window).loss)
    inverse = 1.0 / loss_scale if state.loss_scale.active else 1.0
    grads = {name: p.grad.float() * inverse for name, p in state.weights if p.grad is not None}
    state.optimizer.zero_grad(set_to_none=True)
    return loss, grads
