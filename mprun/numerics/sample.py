"""One step's numbers on the host, as :mod:`mprun.numerics.probe` found them, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mprun.numerics.formats import FORMATS
from mprun.numerics.stats import Stats

INPUT, ACTIVATION, ACTIVATION_GRAD, INPUT_GRAD = "input", "activation", "activation_grad", "input_grad"


@dataclass(frozen=True)
class Sample:
    """One step's numbers on the host; all of them unscaled.

    Attributes:
        step: applied steps, this one included.
        attempt: number of the attempt, from 1.
        format: the policy's compute dtype, such as ``float16``.
        loss_scale: S of the step; gradients times S is what was stored.
        applied: whether the optimizer step was; otherwise there are no updates.
        modules: by module path, then by tensor (see :mod:`mprun.numerics.probe`).
        gradients: every activation gradient, taken together, each tensor once.
        activations: every activation, likewise.
        flow: gradients before they are rounded to ``format``, as far as they are known: float32 ones, and what products give
            back, extrapolated from the rows that were looked at. Where nothing is float16 it is ``gradients``.
    """

    step: int
    attempt: int
    format: str
    loss_scale: float
    applied: bool
    modules: dict[str, dict[str, Stats]]
    gradients: Stats
    activations: Stats
    flow: Stats


def record(sample: Sample) -> dict[str, Any]:
    """The record of ``sample``: kind ``probe``, the glossary's ``precision/*``, ``worst`` and ``modules`` (plain values)."""
    form, scale = FORMATS[sample.format], sample.loss_scale
    gradients = sample.gradients
    return {
        "kind": "probe",
        "step": sample.step,
        "attempt": sample.attempt,
        "format": sample.format,
        "precision/loss_scale": scale,
        "precision/underflow_frac": sample.flow.underflow_frac(form, scale),
        "precision/subnormal_frac": gradients.subnormal_frac(form, scale),
        "precision/overflow_frac": gradients.overflow_frac(form, scale),
        "precision/zero_frac": gradients.zero_frac,
        "precision/nonfinite_frac": gradients.nonfinite_frac,
        "precision/amax_grad": gradients.amax,
        "precision/amax_activation": sample.activations.amax,
        "worst": worst(sample.modules, sample.format, scale),
        "modules": {
            path: {name: stats.as_json() for name, stats in tensors.items()} for path, tensors in sample.modules.items()
        },
    }


def worst(modules: Mapping[str, Mapping[str, Stats]], name: str, scale: float, *, count: int = 5) -> list[list[Any]]:
    """Up to ``count`` entries [module, tensor, field, value]: what is not finite or overflows first, then what underflows.

    Fractions in the format ``name``, gradients times ``scale``; below a thousandth nothing is said of an underflow.
    """
    form = FORMATS[name]
    found: list[tuple[int, float, list[Any]]] = []
    for path, tensors in modules.items():
        for tensor, stats in tensors.items():
            if tensor not in (ACTIVATION, ACTIVATION_GRAD, INPUT_GRAD):
                continue
            s = scale if tensor.endswith("_grad") else 1.0
            for rank, label, value in (
                (0, "nonfinite_frac", stats.nonfinite_frac),
                (1, "overflow_frac", stats.overflow_frac(form, s)),
                (2, "underflow_frac", stats.underflow_frac(form, s) if tensor != ACTIVATION else 0.0),
            ):
                if value > (1e-3 if rank == 2 else 0):
                    found.append((rank, -value, [path, tensor, label, value]))
    return [entry for *_, entry in sorted(found, key=lambda item: item[:2])[:count]]
