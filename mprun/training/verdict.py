"""What a post-mortem finds, and how it says it in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mprun.numerics.formats import FORMATS
from mprun.numerics.places import INPUT, LOSS
from mprun.numerics.trace import Event

SCALE_SEARCH, FORWARD, BACKWARD, DIVERGENCE, BAD_DATA, UNREPRODUCED = (
    "scale_search",
    "overflow_forward",
    "overflow_backward",
    "divergence",
    "bad_data",
    "unreproduced",
)
SHORT = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


@dataclass(frozen=True)
class Verdict:
    """Why a window was not applied.

    Attributes:
        kind: ``scale_search`` (the loss scale was too large, nothing else), ``overflow_forward`` and ``overflow_backward`` (the
            format's range is too small for a module), ``divergence`` and ``bad_data`` (FP32 breaks too), ``unreproduced``.
        message: one line for people; cures in it were tried and found to work, but for the learning rate.
        module: the culprit's dotted path, ``""`` for the model itself, ``<loss>`` and ``<input>`` outside; None without one.
        cls: its class.
        operation: the operation that made the first non-finite number which had consequences.
        where: ``forward`` or ``backward``.
        dtype: of the operation's result.
        amax: what the operation reaches in FP32 (at S = 1), or takes in where FP32 has no such operation.
        limit: the largest number of the running format.
        factor: ``amax / limit``.
        sample_ids: the samples in which the first bad numbers are, where that can be told (the first 64).
        fp32_modules: rules that, added to the run's own, make the window finite.
        largest_scale: the largest loss scale (of those that the rule can reach) at which the window is finite.
        replays: how often the window was run again.
    """

    kind: str
    message: str
    module: str | None = None
    cls: str = ""
    operation: str = ""
    where: str = ""
    dtype: str = ""
    amax: float | None = None
    limit: float | None = None
    factor: float | None = None
    sample_ids: tuple[int, ...] = ()
    fp32_modules: tuple[str, ...] = ()
    largest_scale: float | None = None
    replays: int = 0

    def record(self) -> dict[str, Any]:
        """The fields of an event record; ``kind`` is called ``verdict`` there."""
        fields = asdict(self)
        return {"verdict": fields.pop("kind"), **fields}


def of_event(event: Event | None) -> dict[str, Any]:
    """The fields of a verdict that an event gives."""
    if event is None:
        return {}
    return {
        "module": event.module,
        "cls": event.cls,
        "operation": event.operation,
        "where": event.where,
        "dtype": event.dtype,
    }


def place(event: Event) -> str:
    """``blocks.3.mlp.fc2 (Linear) mm``."""
    outside = {LOSS: "the loss", INPUT: "the input", "": "the model"}
    name = outside.get(event.module, event.module)
    if event.module in (LOSS, INPUT) and "norm" in event.operation:
        return "the norm of the gradients"
    if event.kind == "given":
        return f"the {event.source}"
    return f"{name} ({event.cls}) {event.operation}" if event.cls else f"{name}, {event.operation}"


def reaches(event: Event, amax: float, limit: float) -> str:
    """How far beyond the format the culprit is."""
    form = SHORT.get(event.dtype, event.dtype)
    if amax > limit:
        return f"reaches {amax:.2g} in FP32, {times(amax / limit)} {form}'s largest {limit:g}"
    if event.dtype == "float32":
        return "makes inf or NaN of what its inputs were rounded to; in FP32 throughout it does not"
    return f"gives {event.value:g} in {form}; in FP32 it stays finite (at most {amax:.2g})"


def times(factor: float) -> str:
    """``1.8x``."""
    return f"{factor:.1f}x" if factor < 100 else f"{factor:.2g}x"


def exact(x: float) -> str:
    """A number as the command line takes it, to the last digit."""
    return str(int(x)) if x == int(x) else repr(x)


def scale_words(x: float) -> str:
    """A loss scale for people: ``2^24``, ``65536``, ``0.5``."""
    mantissa, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not -4 < exponent < 18 else f"{x:g}"


def rules_text(rules: Sequence[str]) -> str:
    """``precision.fp32_modules=[a,b]``, as the command line takes it."""
    return f"precision.fp32_modules=[{','.join(_quoted(rule) for rule in rules)}]"


def _quoted(rule: str) -> str:
    """Hydra reads ``1.10`` as a number and would make ``1.1`` of it."""
    try:
        return rule if str(float(rule)) == rule or rule.isdigit() else f"'{rule}'"
    except ValueError:
        return rule


def some(ids: Sequence[int], most: int = 5) -> str:
    """The first ids, and how many more."""
    shown = ", ".join(str(i) for i in ids[:most])
    return shown if len(ids) <= most else f"{shown} and {len(ids) - most} more"


def largest(dtype: str) -> float:
    """The largest number of a format."""
    return FORMATS[dtype].max if dtype in FORMATS else FORMATS["float32"].max
