"""What a recipe promises: its ``expect`` lines, checked while composing and judged against finished runs. Imports no torch.

A line is ``{metric, op, value, tolerance, measured}``. Over several seeds a number passes if its **median** does,
with ``tolerance`` in its favour::

    median >= value - tolerance    (>=)        median <= value + tolerance    (<=)
    median >  value - tolerance    (>)         median <  value + tolerance    (<)
    |median - value| <= tolerance  (==)

A word (``status``) has no median and no tolerance: it must be equal on every seed. A metric that is absent or NaN on any
seed fails its line, because a median over the seeds that happened to work would hide the others. A recipe that does not
speak of ``status`` expects ``ok``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mprun.errors import nearest

# What a line may speak of, where it stands in ``result.json`` (a dot goes into ``best``; names with / are in ``final``).
RESULT_METRICS = (
    "status", "steps_applied", "steps_skipped", "loss_scale", "best.metric", "best.value", "best.step", "best.epoch",
    "train_s", "wall_s", "examples_per_s", "peak_memory",
)  # fmt: skip
FINAL_METRICS = (
    "train/loss", "train/top1", "train/grad_norm", "train/lr", "val/loss", "val/top1", "ema/loss", "ema/top1",
)  # fmt: skip
EXPECTABLE = (*FINAL_METRICS, *RESULT_METRICS)
STATUSES = ("ok", "failed", "oom", "diverged", "interrupted")
WORDS = {"status": STATUSES, "best.metric": FINAL_METRICS}
OPS = (">=", "<=", ">", "<", "==")
KEYS = ("metric", "op", "value", "tolerance", "measured")
MEASURED = ("commit", "device", "versions", "seeds", "values")
NEEDS = ("gpu",)


@dataclass(frozen=True)
class Expectation:
    """One line of ``expect``. ``measured`` says where ``value`` comes from; nothing depends on it but the seeds."""

    metric: str
    op: str
    value: float | str
    tolerance: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """``>= 0.9844``."""
        return f"{self.op} {self.value if isinstance(self.value, str) else format(self.value, '.6g')}"

    def holds(self, got: float | str) -> bool:
        """Whether ``got`` (the median, or a word) is as expected. NaN never is."""
        if isinstance(got, str) or isinstance(self.value, str):
            return got == self.value
        # The last digits of value - tolerance are rounding: 0.98 - 0.01 is 0.97 for a reader, not 0.97 and a half ulp.
        slack = self.tolerance + 1e-12 * max(abs(self.value), abs(self.tolerance))
        return {
            ">=": got >= self.value - slack,
            "<=": got <= self.value + slack,
            ">": got > self.value - self.tolerance,
            "<": got < self.value + self.tolerance,
            "==": abs(got - self.value) <= slack,
        }[self.op]


@dataclass(frozen=True)
class Verdict:
    """How a line fared. ``each`` is the metric by seed (None where absent), ``got`` the median or the common word."""

    line: Expectation
    each: Mapping[int, float | str | None]
    got: float | str | None
    passed: bool
    why: str = ""


def expect_problems(expect: Any) -> Iterable[str]:
    """What is wrong with a recipe's ``expect``, one text a problem."""
    if not isinstance(expect, Sequence) or isinstance(expect, str):
        yield f"expect={expect!r} is not a list of lines such as {{metric: val/top1, op: '>=', value: 0.9}}"
        return
    for number, line in enumerate(expect):
        yield from _line_problems(f"expect[{number}]", line)


def meta_problems(meta: Mapping[str, Any]) -> Iterable[str]:
    """What is wrong with the parts of ``meta`` that mean something: ``seeds`` and ``requires``. The rest is free text."""
    if "seeds" in meta and not _are_seeds(meta["seeds"]):
        yield f"meta.seeds={meta['seeds']!r} is not a list of different whole numbers from 0 up, such as [0, 1, 2]"
    for need in needs(meta):
        if need not in NEEDS:
            yield f"meta.requires={need!r} is unknown: {nearest(str(need), NEEDS)}"


def needs(meta: Mapping[str, Any]) -> list[str]:
    """``meta.requires`` as a list: what a machine must have."""
    given = meta.get("requires") or []
    return [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else [str(given)]


def expectations(expect: Sequence[Mapping[str, Any]]) -> list[Expectation]:
    """The lines of a checked ``expect``, with ``status == ok`` first where none of them speaks of the status."""
    lines = [Expectation(**{**line, "measured": line.get("measured") or {}}) for line in expect]
    if any(line.metric == "status" for line in lines):
        return lines
    return [Expectation("status", "==", "ok"), *lines]


def seeds_of(meta: Mapping[str, Any], lines: Sequence[Expectation], default: int) -> list[int]:
    """The seeds that a recipe is verified with: ``meta.seeds``, else those it was measured with, else ``default``."""
    found = [meta.get("seeds"), *(line.measured.get("seeds") for line in lines)]
    return next((list(seeds) for seeds in found if seeds), [default])


def value_of(result: Mapping[str, Any], metric: str) -> float | str | None:
    """``metric`` in the content of a ``result.json``; None where the run has no such number."""
    if metric in RESULT_METRICS:
        node: Any = result
        for part in metric.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
    else:
        node = (result.get("final") or {}).get(metric)
    if isinstance(node, bool) or not isinstance(node, int | float | str):
        return None
    return node


def judge(line: Expectation, results: Mapping[int, Mapping[str, Any]]) -> Verdict:
    """Hold one line against the results of all seeds.

    Args:
        line: what is expected.
        results: by seed, the content of ``result.json`` with its words ``nan inf`` as floats; ``{}`` where there is none.
    """
    each = {seed: value_of(result, line.metric) for seed, result in results.items()}
    absent = [
        seed for seed, value in each.items() if value is None or isinstance(value, str) != isinstance(line.value, str)
    ]
    if absent or not each:
        return Verdict(line, each, None, False, f"absent: seed {', '.join(map(str, absent))}")
    if isinstance(line.value, str):
        words = {str(value) for value in each.values()}
        return Verdict(line, each, words.pop() if len(words) == 1 else "mixed", set(each.values()) == {line.value})
    numbers = [float(value) for value in each.values() if value is not None]
    if any(math.isnan(number) for number in numbers):
        return Verdict(line, each, math.nan, False, "not a number")
    median = statistics.median(numbers)
    return Verdict(line, each, median, line.holds(median))


def _line_problems(where: str, line: Any) -> Iterable[str]:
    if not isinstance(line, Mapping):
        yield f"{where}={line!r} is not a mapping with {', '.join(KEYS[:3])}"
        return
    for key in line:
        if key not in KEYS:
            yield f"unknown key {where}.{key}: {nearest(str(key), KEYS)}"
    absent = [key for key in KEYS[:3] if line.get(key) is None]
    if absent:
        yield f"{where} has no {' and no '.join(absent)}: a line needs {', '.join(KEYS[:3])}"
    metric, op, value, tolerance = (line.get(key) for key in KEYS[:4])
    if metric is not None and metric not in EXPECTABLE:
        yield f"{where}.metric={metric!r} is never measured: {nearest(str(metric), EXPECTABLE)}"
    if op is not None and op not in OPS:
        yield f"{where}.op={op!r} is unknown: {nearest(str(op), OPS)} (quote it in YAML)"
    if metric in WORDS:
        legal = WORDS[metric]
        if value is not None and value not in legal:
            yield f"{where}.value={value!r} is no {metric}: {nearest(str(value), legal)}"
        if op in OPS and op != "==":
            yield f"{where}.op={op!r}: {metric} is a word, and words are compared with =="
        if tolerance:
            yield f"{where}.tolerance={tolerance!r}: {metric} is a word; leave the tolerance out"
    elif value is not None and not _is_number(value):
        yield f"{where}.value={value!r} is not a finite number"
    if tolerance is not None and not (_is_number(tolerance) and tolerance >= 0):
        yield f"{where}.tolerance={tolerance!r} is not a finite number from 0 up"
    yield from _measured_problems(f"{where}.measured", line.get("measured") or {})


def _measured_problems(where: str, measured: Any) -> Iterable[str]:
    if not isinstance(measured, Mapping):
        yield f"{where}={measured!r} is not a mapping of {', '.join(MEASURED)}"
        return
    for key in measured:
        if key not in MEASURED:
            yield f"unknown key {where}.{key}: {nearest(str(key), MEASURED)}"
    if "seeds" in measured and not _are_seeds(measured["seeds"]):
        yield f"{where}.seeds={measured['seeds']!r} is not a list of different whole numbers from 0 up"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_seeds(seeds: Any) -> bool:
    return (
        isinstance(seeds, Sequence)
        and not isinstance(seeds, str)
        and bool(seeds)
        and all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63 for seed in seeds)
        and len(set(seeds)) == len(seeds)
    )
