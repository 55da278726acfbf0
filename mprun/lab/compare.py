"""What a comparison measures beside its runs: gradients under each policy against FP32's, and memory by category.

Gradients: an FP32 run of one seed is taken to a few steps; there the same window is run forward and backward with the same
weights and random numbers under each policy, and the unscaled gradients are held against FP32's::

    SQNR of a module = 10 log10( sum g32^2 / sum (g - g32)^2 )    over the parameters that it owns itself, in dB

So it says how far a policy's arithmetic is from FP32's *before* the trajectories part. What to expect: a gradient that is only
rounded has 20 to 60 dB (the small residual net on digits 28 to 33 in FP16 and 20 to 23 in BF16, whose rounding errors flip signs
at its rectifiers), one that has lost half of its energy 3 dB, one that is 0 has 0 dB.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mprun.config import Config
from mprun.errors import MprunError
from mprun.lab.reference import Reference, SavedState, lab_config, ready, reference, undisturbed
from mprun.lab.replay import window_gradients
from mprun.numerics.parity import energy_db
from mprun.training.buffers import adopt_buffers
from mprun.training.build import device_of, switches
from mprun.training.checkpoint import load_weights
from mprun.training.env import restore_rng
from mprun.training.footprint import predicting
from mprun.training.state import TrainState

# A module whose gradient is below this part of the whole one's norm (a bias before a normalisation: 0 but for rounding) is not
# ranked: its SQNR says nothing.
FLOOR_FRAC = 1e-6
KEPT = Path("the kept state")


def gradient_errors(
    base: Config, policies: Mapping[str, tuple[Config, float | None]], steps: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """SQNR of every policy's gradients at states of an FP32 run of ``base``.

    Args:
        base: the experiment, one seed of it; its precision plays no part.
        policies: label -> its configuration, and where its dynamic scale has settled (None: not known).
        steps: applied steps at which to look; those beyond the run, or after it diverged, are left out.

    Returns:
        For each label one entry a state: ``step``, ``loss_scale``, ``total_db``, ``loss_error`` (relative), ``modules`` (path ->
        dB). Gradients that are not finite at any scale have ``-inf``.
    """
    wanted = sorted(set(steps))
    fp32 = reference(base, steps=max(wanted), keep=wanted)
    truth = [_gradients_of(fp32, fp32.config, None, state) for state in fp32.states]
    found: dict[str, list[dict[str, Any]]] = {}
    for label, (config, scale) in policies.items():
        found[label] = [
            {
                "step": state.step,
                **_errors(exact, _gradients_of(fp32, lab_config(config, seed=fp32.config.seed), scale, state)),
            }
            for state, exact in zip(fp32.states, truth, strict=True)
        ]
    return found


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Loss, unscaled float32 gradients by parameter name, and S."""

    loss: float
    grads: dict[str, Tensor]
    loss_scale: float

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return math.isfinite(self.loss) and all(bool(grad.isfinite().all()) for grad in self.grads.values())


def _gradients_of(fp32: Reference, config: Config, scale: float | None, saved: SavedState) -> Gradients:
    """The gradients of ``saved``'s window under ``config``. A dynamic scale backs off as long as they are not finite."""
    with undisturbed(), switches(config, fp32.device):
        state, _, _ = ready(config, fp32.device)
        rule = state.loss_scale
        now = 1.0 if not rule.active else rule.init if scale is None or rule.kind != "dynamic" else scale
        while True:
            result = _backward(state, saved, now)
            lower = max(now * rule.backoff_factor, rule.min)
            if result.finite or rule.kind != "dynamic" or lower >= now or not math.isfinite(result.loss):
                return result
            now = lower


def _backward(state: TrainState, saved: SavedState, scale: float) -> Gradients:
    content = saved.checkpoint
    adopt_buffers(state.model, content["model"], content["buffers"], late=content["late_buffers"], device=state.device)
    if state.policy.mode == "pure":  # whose parameters are FP32's, rounded
        state.model.load_state_dict(content["model"], strict=False)
    else:
        load_weights(state, content, path=KEPT)
    restore_rng(saved.rng)
    loss, grads = window_gradients(state, saved, scale)
    return Gradients(loss, grads, scale)


def _errors(exact: Gradients, found: Gradients) -> dict[str, Any]:
    """SQNR in total and by module; a gradient that one side lacks counts as 0 there."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for name, grad in exact.grads.items():
        owner, wide = name.rpartition(".")[0], grad.double()
        other = found.grads.get(name)
        apart = wide if other is None else wide - other.double()
        signal[owner] = signal.get(owner, 0.0) + float(wide.square().sum())
        noise[owner] = noise.get(owner, 0.0) + float(apart.square().sum())
    whole = sum(signal.values())
    return {
        "loss_scale": found.loss_scale,
        "loss_error": abs(found.loss - exact.loss) / abs(exact.loss) if exact.loss else 0.0,
        "total_db": energy_db(whole, sum(noise.values())),
        "modules": {
            owner: energy_db(value, noise[owner]) for owner, value in signal.items() if value > FLOOR_FRAC**2 * whole
        },
    }


def memory(config: Config) -> dict[str, Any]:
    """Predicted bytes at the peak of a training step, in all and by category; ``error`` where it cannot be predicted."""
    try:
        with predicting(config, device_of(config)) as predict:
            found = predict(config.train.batch_size)
    except MprunError as error:
        return {"error": str(error).splitlines()[0]}
    return {
        "peak_bytes": found.peak_bytes,
        "categories": {kind: size for kind, size in found.counted.peak.items() if size},
    }
