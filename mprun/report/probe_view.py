"""What the probe's samples say, for a page: fractions and peaks per module and sample. Imports no torch.

A sample of ``probe.jsonl`` holds the exponent histogram of each tensor of each module, unscaled (``mprun/numerics/stats.py`` has
the algebra; :func:`underflow` and :func:`relative_peak` are the part of it that a page needs). Here they become grids, modules by
samples, for one question at a time:

* ``underflow``: which part of the non-zero numbers becomes 0 in the module's format, gradients at the loss scale S. A gradient
  that is stored in half has lost them already, so it is looked for in what a module gives back, before it is rounded;
* ``peak``: log2 of the largest magnitude (times S for a gradient) over the format's largest number, so that 0 is the limit;
  infinite where there is an inf or NaN, so that what has overflowed does not look better than what nearly did.

A module that runs in FP32 beside others in half is left out. A run that is FP32 as a whole has nothing to fear there,
so it is asked what FP16 would do to it at S = 1, and the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mprun.numerics.formats import FORMATS, Format

Array = NDArray[np.float64]
Sample = Mapping[str, Any]

ACTIVATION, GRADIENT, GIVEN_BACK = "activation", "activation_grad", "input_grad"
# The gradient in which a module's underflow can be seen; see :func:`with_flow`.
FLOW = "flow_grad"
SHORT = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64", "float8_e4m3fn": "FP8 E4M3",
         "float8_e5m2": "FP8 E5M2"}  # fmt: skip


@dataclass(frozen=True)
class View:
    """Against which formats a run's numbers are held.

    Attributes:
        main: the format of the run's arithmetic, or FP16 where that is only a question.
        what_if: whether the run itself was FP32.
        of: the format of each module that is known to have another one.
    """

    main: Format
    what_if: bool
    of: Mapping[str, Format]

    def form(self, module: str) -> Format:
        """The format of a module's activations."""
        return self.main if self.what_if else self.of.get(module, self.main)

    def spared(self, module: str) -> bool:
        """Whether a module runs in FP32 while the run does not."""
        return not self.what_if and self.form(module).bytes >= 4

    def scale(self, sample: Sample, tensor: str) -> float:
        """What the numbers of ``tensor`` are multiplied by before they are stored: S for gradients, otherwise 1."""
        if self.what_if or not tensor.endswith("_grad"):
            return 1.0
        scale = sample.get("loss_scale")
        return float(scale) if isinstance(scale, int | float) and scale > 0 else 1.0


@dataclass(frozen=True)
class Grid:
    """Float64 ``values`` of shape (modules, samples), NaN where a module has no such tensor, or only zeros, in a sample."""

    modules: tuple[str, ...]
    attempts: tuple[int, ...]
    values: Array

    def worst(self) -> tuple[str, int, float] | None:
        """Module, attempt and value of the largest finite one; None for a grid without any."""
        finite = np.isfinite(self.values)
        if not finite.any():
            return None
        row, column = np.unravel_index(int(np.where(finite, self.values, -np.inf).argmax()), self.values.shape)
        return self.modules[row], self.attempts[column], float(self.values[row, column])


def sound(sample: Sample) -> Sample | None:
    """The sample without what is not of the form that the probe writes; None if nothing is left of it."""
    modules = {
        path: kept
        for path, tensors in found.items()
        if isinstance(tensors, dict) and (kept := {name: one for name, one in tensors.items() if _is_stats(one)})
    } if isinstance(found := sample.get("modules"), dict) else {}  # fmt: skip
    if not modules or not isinstance(sample.get("format"), str):
        return None
    scale = sample.get("loss_scale")
    known = isinstance(scale, int | float) and 0 < scale < math.inf
    return {**sample, "modules": modules, "loss_scale": scale if known else None}


def _is_stats(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(bins := value.get("bins"), list):
        return False
    numbers = [value.get(key) for key in ("count", "zeros", "nonfinite", "amax", "rms")]
    low = value.get("low")
    return all(map(_number, [*numbers, *bins])) and isinstance(low, int) and abs(low) < 2000


def _number(value: Any) -> bool:
    """Whether ``value`` is a number that float64 can be calculated with, or inf."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (abs(value) < 1e300 or value == math.inf)


def with_flow(sample: Sample) -> Sample:
    """The sample with the gradient that shows an underflow under a name of its own.

    It is what the module gives back, computed before rounding, where the probe has it (products); else its activation's gradient.
    """
    modules = {
        path: {**tensors, FLOW: tensors.get(GIVEN_BACK) or tensors[GRADIENT]}
        if GRADIENT in tensors or GIVEN_BACK in tensors
        else tensors
        for path, tensors in sample["modules"].items()
    }
    return {**sample, "modules": modules}


def view_of(samples: Sequence[Sample], modules: Sequence[Mapping[str, Any]]) -> View | None:
    """How the samples of a run are looked at; None without any whose format is known.

    Args:
        samples: of ``probe.jsonl``.
        modules: rows of ``modules.json``, which say what each module really puts out.
    """
    names = [str(sample.get("format")) for sample in samples if sample.get("format") in FORMATS]
    if not names:
        return None
    main = FORMATS[names[-1]]
    if main.bytes >= 4:
        return View(FORMATS["float16"], True, {})
    found = {}
    for row in modules:
        dtypes = [FORMATS[name] for name in str(row.get("output_dtype") or "").split(",") if name in FORMATS]
        if dtypes:
            found[str(row.get("module"))] = min(dtypes, key=lambda form: form.max)
    return View(main, False, found)


def underflow(stats: Mapping[str, Any], form: Format, scale: float) -> float:
    """The part of the non-zero numbers x for which ``scale * x`` becomes 0 in ``form``; NaN where there are none.

    Equal to ``Stats.underflow_frac`` of ``mprun/numerics/stats.py``.
    """
    total = sum(stats["bins"])
    if not total:
        return math.nan
    border = math.frexp(form.smallest_subnormal / 2)[1] - math.frexp(scale)[1]  # exponents below it become 0
    below: int = sum(stats["bins"][: max(border - int(stats["low"]), 0)])
    return float(below / total)


def relative_peak(stats: Mapping[str, Any], form: Format, scale: float) -> float:
    """log2 of the largest magnitude times ``scale`` over ``form``'s largest number; NaN for zeros only, inf for inf or NaN."""
    if stats.get("nonfinite"):
        return math.inf
    amax = float(stats["amax"]) * scale
    return math.log2(amax / form.max) if amax > 0 and math.isfinite(amax) else math.nan


Measure = Callable[[Mapping[str, Any], Format, float], float]


def grid(samples: Sequence[Sample], view: View, tensor: str, measure: Measure) -> Grid:
    """One question asked of every module and sample.

    Left out are modules that never have the tensor, and beside half ones those in FP32: they have nothing to lose.
    """
    modules = [
        path
        for path in dict.fromkeys(path for sample in samples for path in sample["modules"])
        if not view.spared(path) and any(tensor in sample["modules"].get(path, {}) for sample in samples)
    ]
    values = np.full((len(modules), len(samples)), np.nan)
    for column, sample in enumerate(samples):
        scale = view.scale(sample, tensor)
        for row, path in enumerate(modules):
            if stats := sample["modules"].get(path, {}).get(tensor):
                values[row, column] = measure(stats, view.form(path), scale)
    attempts = tuple(int(sample.get("attempt") or sample.get("step") or 0) for sample in samples)
    return Grid(tuple(modules), attempts, values)


def worst_first(found: Grid, most: int) -> Grid:
    """The ``most`` rows with the largest values, the largest first; rows without a value come last."""
    filled = np.where(np.isnan(found.values), -np.inf, found.values)
    peaks = filled.max(axis=1) if found.values.shape[1] else np.zeros(len(found.modules))
    # Among rows that overflowed, those that are nearest to the limit otherwise.
    finite = np.where(np.isfinite(found.values), found.values, -np.inf).max(axis=1, initial=-np.inf)
    order = sorted(range(len(found.modules)), key=lambda row: (-peaks[row], -finite[row]))[:most]
    return Grid(tuple(found.modules[row] for row in order), found.attempts, found.values[order])


def fewer_columns(found: Grid, most: int) -> Grid:
    """At most ``most`` columns: neighbours together, the largest of each row counts, so that no spike is lost."""
    count = found.values.shape[1]
    if count <= most:
        return found
    groups = np.array_split(np.arange(count), most)
    filled = np.where(np.isnan(found.values), -np.inf, found.values)
    values = np.stack([filled[:, group].max(axis=1) for group in groups], axis=1)
    return Grid(
        found.modules,
        tuple(found.attempts[int(group[0])] for group in groups),
        np.where(np.isneginf(values), np.nan, values),
    )


def histogram(sample: Sample, wanted: Callable[[str], bool]) -> tuple[list[int], list[float]]:
    """Exponents and the fraction of the non-zero numbers that have each, over all tensors whose name is wanted."""
    counts: dict[int, int] = {}
    for tensors in sample["modules"].values():
        for name, stats in tensors.items():
            if wanted(name):
                for exponent, count in enumerate(stats["bins"], start=int(stats["low"])):
                    counts[exponent] = counts.get(exponent, 0) + int(count)
    total = sum(counts.values())
    if not total:
        return [], []
    exponents = list(range(min(counts), max(counts) + 1))
    return exponents, [counts.get(exponent, 0) / total for exponent in exponents]


def short(form: Format) -> str:
    """``FP16`` for ``float16``."""
    return SHORT.get(form.name, form.name)
