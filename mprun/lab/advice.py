"""From what an FP32 run's numbers look like to a policy: pure functions on :class:`~mprun.numerics.stats.Stats`.

Which tensors a low-precision run *holds in half* is seen once, in a forward pass under the candidate policy (``modules.json``):
the outputs of some modules, and with them their gradients; the arithmetic of some, and with it the half copies of their weights
and those copies' gradients. Only these can overflow or underflow; what autocast computes in FP32 cannot.

The safe interval of a static scale S, in powers of two::

    high    the largest S at which no half gradient overflows at any sampled step; a factor below 1 accounts for the inside of
            modules, whose gradients pass no border (measured by mprun.lab.halves at some states)
    low     the smallest S at which the *starved* modules hold at most MOST_STARVED of all gradient elements. A module is starved
            where the gradients that become 0 are more than STARVED of the norm of all its gradients: many tiny gradients may go,
            as long as what they add up to is small beside the rest

The static scale is ``high``, but at most ``late / HEADROOM`` and not below ``low``; ``late`` is ``high`` of the sampled
steps in the second half. Most runs have their largest gradients in the first steps or in single spikes, which have been seen;
what is to come looks like the end, and may grow beyond it, which a static scale cannot follow. The dynamic scale starts at
``high``: it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mprun.numerics.formats import Format
from mprun.numerics.stats import Stats, merged

LOWEST, HIGHEST = -14, 24
SCALES = tuple(2.0**k for k in range(LOWEST, HIGHEST + 1))
STARVED, MOST_STARVED = 0.01, 0.02
HEADROOM = 2.0
SHORT = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}

# Statistics of one sampled step: module path -> tensor -> stats, gradients unscaled.
Modules = Mapping[str, Mapping[str, Stats]]


@dataclass(frozen=True)
class Held:
    """Which modules give half outputs, and which compute in half (and so round their inputs and weights)."""

    outputs: frozenset[str]
    computes: frozenset[str]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, object]], dtype: str) -> Held:
        """From the rows of ``modules.json`` under a policy with ``dtype``."""
        rows = list(rows)
        return cls(
            frozenset(str(row["module"]) for row in rows if dtype in str(row["output_dtype"]).split(",")),
            frozenset(str(row["module"]) for row in rows if row["compute_dtype"] == dtype),
        )


@dataclass(frozen=True)
class ScaleRow:
    """What one scale would do.

    Attributes:
        scale: S.
        overflow_frac: sampled steps at which something overflows.
        underflow_frac: half gradients (not 0) that become 0, of all of them.
        starved_frac: gradient elements in starved modules.
        overflowing: the module that overflows first; empty if none does.
    """

    scale: float
    overflow_frac: float
    underflow_frac: float
    starved_frac: float
    overflowing: str


@dataclass(frozen=True)
class Interval:
    """Safe static scales; ``high`` is 0 where every one overflows, and ``low`` above ``high`` where none is safe.

    ``late``: ``high`` of the second half of the samples.
    """

    low: float
    high: float
    late: float = math.inf

    @property
    def empty(self) -> bool:
        """Whether no scale is safe."""
        return not 0 < self.low <= self.high

    @property
    def static(self) -> float:
        """The recommended static scale: see the module's docstring."""
        return max(min(self.high, self.late / HEADROOM), min(self.low, self.high))

    @property
    def init(self) -> float:
        """Where a dynamic scale should start."""
        return max(self.high, 2.0**LOWEST)


def half_gradients(modules: Modules, held: Held) -> dict[str, list[Stats]]:
    """The gradients of one step that would be half, by module: of outputs, and of the half copies of parameters."""
    found: dict[str, list[Stats]] = {}
    for path, tensors in modules.items():
        parts = [tensors["activation_grad"]] if path in held.outputs and "activation_grad" in tensors else []
        if path in held.computes:
            parts += [part for name, part in tensors.items() if name.endswith("_grad") and name != "activation_grad"]
        if parts := [part for part in parts if part.count]:
            found[path] = parts
    return found


def largest_scale(amax: float, form: Format) -> float:
    """The largest power of two S, at most ``2**24``, with ``S * amax`` below overflow; 0 below ``2**-14``."""
    if amax <= 0:
        return SCALES[-1]
    exponent = math.frexp(form.overflow / amax)[1] - 1
    if math.ldexp(amax, exponent) >= form.overflow:  # exactly at the border
        exponent -= 1
    return 0.0 if exponent < LOWEST else 2.0 ** min(exponent, HIGHEST)


def lost_norm_frac(stats: Stats, form: Format, scale: float) -> float:
    """Norm of the numbers that become 0 in ``form`` after ``scale``, as a fraction of the norm of all; from the histogram."""
    lost = total = 0.0
    border = math.frexp(form.smallest_subnormal / 2)[1] - 1 - (math.frexp(scale)[1] - 1) - stats.low
    for index, count in enumerate(stats.bins):
        energy = count * 4.0 ** (index - len(stats.bins))  # relative to the top bin
        total += energy
        lost += energy if index < border else 0.0
    return math.sqrt(lost / total) if total else 0.0


def scale_rows(samples: Sequence[Modules], held: Held, form: Format, *, factor: float = 1.0) -> list[ScaleRow]:
    """What every power-of-two scale would do to the half gradients of the sampled steps.

    Args:
        samples: one mapping a sampled step.
        held: what would be half.
        form: the half format.
        factor: largest scale seen inside modules over the largest scale by their borders; at most 1 lowers the limit.
    """
    steps = [half_gradients(modules, held) for modules in samples]
    peaks = [{path: max(part.amax for part in parts) for path, parts in step.items()} for step in steps]
    whole: dict[str, Stats] = {}
    for path in dict.fromkeys(path for step in steps for path in step):
        whole[path] = merged([part for step in steps for part in step.get(path, [])])
    nonzero = sum(stats.nonzero for stats in whole.values()) or 1
    count = sum(stats.count for stats in whole.values()) or 1
    rows = []
    for scale in SCALES:
        over = [{path: a for path, a in step.items() if a * scale >= form.overflow * factor} for step in peaks]
        worst = max(((a, path) for step in over for path, a in step.items()), default=(0.0, ""))[1]
        under = sum(stats.underflow_frac(form, scale) * stats.nonzero for stats in whole.values())
        starved = sum(s.count for s in whole.values() if s.nonzero and lost_norm_frac(s, form, scale) > STARVED)
        frac = sum(map(bool, over)) / len(over) if over else 0.0
        rows.append(ScaleRow(scale, frac, under / nonzero, starved / count, worst))
    return rows


def interval(rows: Sequence[ScaleRow]) -> Interval:
    """The safe static scales of a table of :func:`scale_rows`."""
    safe = [row.scale for row in rows if row.overflow_frac == 0]
    fed = [row.scale for row in rows if row.starved_frac <= MOST_STARVED]
    return Interval(min(fed, default=2.0 * rows[-1].scale), max(safe, default=0.0))


@dataclass(frozen=True)
class ModuleLoss:
    """What a format would cost one module, over all sampled steps.

    Attributes:
        path: dotted path; ``cls`` its class.
        half: whether it would compute in half or give a half output.
        amax: largest magnitudes of ``input``, ``output``, ``weight`` (any parameter), ``gradient`` (of its output).
        overflow: ``input``, ``output`` or ``weight``, whichever is beyond the format; empty if none is.
        factor: how far beyond: the magnitude over the format's largest.
        underflow_frac: of its output's non-zero numbers.
        scale_high: the largest scale at which its gradients do not overflow; ``scale_low`` the smallest that feeds it.
    """

    path: str
    cls: str
    half: bool
    amax: dict[str, float]
    overflow: str
    factor: float
    underflow_frac: float
    scale_high: float
    scale_low: float


def module_loss(path: str, cls: str, samples: Sequence[Modules], held: Held, form: Format) -> ModuleLoss:
    """What ``form`` would cost the module at ``path``."""
    whole = _merged_tensors(path, samples)
    weights = [
        stats for name, stats in whole.items()
        if name not in ("input", "activation") and not name.endswith(("_grad", "_update"))
    ]  # fmt: skip
    amax = {
        "input": _amax(whole.get("input")),
        "output": _amax(whole.get("activation")),
        "weight": max(map(_amax, weights), default=0.0),
        "gradient": _amax(whole.get("activation_grad")),
    }
    computes, gives = path in held.computes, path in held.outputs
    at_risk = [
        (amax[kind], kind)
        for kind, is_half in (("input", computes), ("weight", computes), ("output", gives))
        if is_half
    ]
    beyond = max(((value, kind) for value, kind in at_risk if value >= form.overflow), default=(0.0, ""))
    grads = half_gradients({path: whole}, held).get(path, [])
    together = merged(grads)
    low = next((s for s in SCALES if lost_norm_frac(together, form, s) <= STARVED), SCALES[-1])
    activation = whole.get("activation")
    return ModuleLoss(
        path,
        cls,
        computes or gives,
        amax,
        beyond[1],
        beyond[0] / form.max,
        activation.underflow_frac(form) if activation and gives else 0.0,
        largest_scale(max((part.amax for part in grads), default=0.0), form),
        low,
    )


def _merged_tensors(path: str, samples: Sequence[Modules]) -> dict[str, Stats]:
    names = dict.fromkeys(name for modules in samples for name in modules.get(path, {}))
    return {name: merged([m[path][name] for m in samples if name in m.get(path, {})]) for name in names}


def _amax(stats: Stats | None) -> float:
    return stats.amax if stats else 0.0


@dataclass(frozen=True)
class Parity:
    """Whether a short run follows FP32: ``gap`` of the mean loss at its end (above 0 is worse), and what is ``allowed``."""

    gap: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the gap is within what is allowed; NaN is not."""
        return self.gap <= self.allowed


def loss_parity(exact: Sequence[float], other: Sequence[float]) -> Parity:
    """Compare the last fifth of two loss curves over the same batches.

    Allowed is the larger one of 5 % of what FP32 has learned so far, 1 % of its loss, and three standard errors of the mean
    difference: rounding sends two runs apart on different paths of the same quality. The batches are the same, so their own
    noise cancels in the differences.
    """
    n = min(len(exact), len(other))
    tail = max(n // 5, min(n, 5))
    if not n:
        return Parity(math.nan, 0.0)
    a, b = exact[n - tail : n], other[n - tail : n]
    level = math.fsum(a) / tail
    learned = max(math.fsum(exact[: min(n, 5)]) / min(n, 5) - level, 0.0)
    if not all(map(math.isfinite, b)):
        return Parity(math.nan, max(0.05 * learned, 0.01 * abs(level)))
    differences = [y - x for x, y in zip(a, b, strict=True)]
    gap = math.fsum(differences) / tail
    deviation = math.sqrt(math.fsum((d - gap) ** 2 for d in differences) / max(tail - 1, 1))
    return Parity(gap, max(0.05 * learned, 0.01 * abs(level), 3 * deviation / math.sqrt(tail)))
