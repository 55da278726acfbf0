"""What the runs of a comparison have come to: from run folders to verdicts. Imports no torch.

Every number is that of a run folder (:mod:`mprun.lab.seed_run`), or was measured before (:mod:`mprun.lab.compare`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprun.lab.seed_run import CUT_OFF, SHOWN_METRICS, SeedRun, read_seed
from mprun.lab.words import points, sentence
from mprun.numerics.parity import CurveGap, Parity, curve_gap, floor_of, higher_is_better, judge
from mprun.report.run_folders import OK
from mprun.report.runs_table import Spread, is_number


@dataclass(frozen=True)
class PolicyResult:
    """A policy over its seeds.

    Attributes:
        label: as on the command line; a file goes by its stem.
        parity: the test against the baseline; None for the baseline itself.
        verdict: ``baseline``, ``pass``, ``fail`` or ``undecided``.
        why: the verdict in words.
        metrics: final metrics over the seeds.
        curve: gap of the training loss from the baseline; None for the baseline, or where there is none.
        skips: over all seeds; ``steps`` applied and skipped.
        scale: median of the loss scales at the end; None where there is none.
        step_ms: median over the seeds; ``step_ratio`` the median ratio to the baseline's run of the same seed.
        peak_bytes: the largest that a run measured: of its process on the CPU, of the allocator on a GPU.
        memory: predicted bytes by category at the peak of a step; None where that was not asked.
        gradients: at each kept state, SQNR in dB of the gradients against FP32; empty where that was not asked.
    """

    label: str
    runs: tuple[SeedRun, ...]
    parity: Parity | None
    verdict: str
    why: str
    metrics: Mapping[str, Spread]
    curve: CurveGap | None
    skips: int
    steps: int
    scale: float | None
    step_ms: float
    step_ratio: float
    examples_per_s: float
    peak_bytes: float
    memory: Mapping[str, Any] | None = None
    gradients: Sequence[Mapping[str, Any]] = ()

    @property
    def gradient_db(self) -> float:
        """The lowest SQNR of the whole gradient over the kept states; NaN where nothing was measured."""
        found = [float(state["total_db"]) for state in self.gradients]
        return min(found) if found else math.nan

    @property
    def worst_modules(self) -> list[tuple[str, float, int]]:
        """The three modules with the lowest SQNR: path, dB, step."""
        lowest: dict[str, tuple[float, int]] = {}
        for state in self.gradients:
            for path, value in state["modules"].items():
                lowest[path] = min(lowest.get(path, (math.inf, 0)), (float(value), int(state["step"])))
        ranked = sorted(lowest.items(), key=lambda item: (item[1], item[0]))
        return [(path, value, step) for path, (value, step) in ranked[:3] if math.isfinite(value) or value < 0]


@dataclass(frozen=True)
class Comparison:
    """A comparison as it stands. ``settings`` are the test's numbers; ``notes`` are for people."""

    folder: Path
    name: str
    metric: str
    baseline: str
    seeds: tuple[int, ...]
    policies: tuple[PolicyResult, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    whole: bool = True
    words: Sequence[str] = field(default_factory=tuple)

    @property
    def candidates(self) -> list[PolicyResult]:
        """All policies but the baseline."""
        return [policy for policy in self.policies if policy.parity is not None]


def build(
    folder: Path,
    runs: Mapping[str, Mapping[int, Path]],
    *,
    name: str,
    baseline: str,
    metric: str,
    margin: float | None,
    spread: float,
    confidence: float,
    measured: Mapping[str, Mapping[str, Any]],
    words: Sequence[str] = (),
    at_once: int = 1,
) -> Comparison:
    """Read the runs and judge them.

    Args:
        folder: of the comparison.
        runs: label -> seed -> run folder, which need not exist.
        name: of the comparison.
        baseline: one of the labels.
        metric: by which is judged.
        margin: floor of the margin in the metric's unit; None for the default of the metric.
        spread: how many standard deviations of the baseline the margin is at least.
        confidence: of the test's upper bound.
        measured: label -> ``gradients`` and ``memory``, as far as known.
        words: of the command line.
        at_once: how many runs shared the machine, which is said beside times.
    """
    read = {label: tuple(read_seed(seed, place) for seed, place in seeds.items()) for label, seeds in runs.items()}
    base = read[baseline]
    finals = {run.seed: value for run in base if (value := run.value(metric)) is not None}
    floor = floor_of(metric, [*finals.values()]) if margin is None else margin
    chance = _chance(metric, base)
    policies = []
    for label, own in read.items():
        parity = None
        if label != baseline:
            values = {run.seed: value for run in own if (value := run.value(metric)) is not None}
            parity = judge(
                finals,
                values,
                higher=higher_is_better(metric),
                floor=floor,
                factor=spread,
                confidence=confidence,
                chance=chance,
            )
        policies.append(_policy(label, own, base, parity, metric, measured.get(label, {})))
    seeds = tuple(runs[baseline])
    settings = {"metric": metric, "floor": floor, "spread": spread, "confidence": confidence, "chance": chance}
    missing = sum(run.status in CUT_OFF for own in read.values() for run in own)
    notes = [*_start_notes(read, baseline), *_metric_notes(finals, chance, metric)]
    if at_once > 1:
        notes.append(f"times are of {at_once} runs at once; for times to rely on: sweep.jobs=1")
    if missing:
        notes.append(
            f"{missing} of {sum(map(len, read.values()))} runs have not ended yet: the same command goes on with them"
        )
    return Comparison(
        folder,
        name,
        metric,
        baseline,
        seeds,
        tuple(policies),
        settings,
        tuple(notes),
        whole=not missing,
        words=tuple(words),
    )


def _policy(
    label: str,
    own: tuple[SeedRun, ...],
    base: tuple[SeedRun, ...],
    parity: Parity | None,
    metric: str,
    measured: Mapping[str, Any],
) -> PolicyResult:
    good = [run for run in own if run.status == OK]
    times = {run.seed: run.step_ms for run in base if run.step_ms > 0}
    ratios = [run.step_ms / times[run.seed] for run in own if run.seed in times and run.step_ms > 0]
    curves = {run.seed: run.losses for run in own}
    scales = [float(run.result["loss_scale"]) for run in own if is_number(run.result.get("loss_scale"))]
    broke = [f"seed {run.seed} {run.status}: {run.reason}" for run in own if run.status not in (OK, *CUT_OFF)]
    return PolicyResult(
        label=label,
        runs=own,
        parity=parity,
        verdict="baseline" if parity is None else parity.outcome,
        why="; ".join(broke[:1]) if parity is None else sentence(parity, metric, broke),
        metrics={
            key: Spread.over((run.value(key) for run in own), len(own))
            for key in dict.fromkeys((metric, *SHOWN_METRICS))
            if any(is_number(run.result.get(key)) for run in own)
        },
        curve=None if parity is None else curve_gap({run.seed: run.losses for run in base}, curves),
        skips=sum(int(run.result.get("steps_skipped") or 0) for run in own),
        steps=sum(int(run.result.get("steps_applied") or 0) for run in own),
        scale=statistics.median(scales) if scales else None,
        step_ms=_median(run.step_ms for run in good),
        step_ratio=statistics.median(ratios) if ratios else math.nan,
        examples_per_s=_median(run.result.get("examples_per_s") for run in good),
        peak_bytes=max(
            (float(run.result["peak_memory"]) for run in own if run.result.get("peak_memory")), default=math.nan
        ),
        memory=measured.get("memory"),
        gradients=measured.get("gradients") or (),
    )


def _median(values: Any) -> float:
    numbers = [float(value) for value in values if is_number(value) and math.isfinite(value)]
    return statistics.median(numbers) if numbers else math.nan


def _chance(metric: str, base: Sequence[SeedRun]) -> float | None:
    """What a model that has learned nothing reaches: a guess among the classes. None where that is not known."""
    known = next((run for run in base if run.start.get("num_classes")), None)
    if known is None or known.task in ("", "regression"):
        return None
    classes = int(known.start["num_classes"])
    return None if classes < 2 else 1 / classes if higher_is_better(metric) else math.log(classes)


def _metric_notes(finals: Mapping[int, float], chance: float | None, metric: str) -> list[str]:
    values = [value for value in finals.values() if math.isfinite(value)]
    if len(values) == 1:
        return ["one seed of the baseline: only a breakdown or a collapse can be told; give compare.seeds=2 at least"]
    if values and chance is not None:
        mean = statistics.fmean(values)
        if (mean - chance) * (1 if higher_is_better(metric) else -1) <= 0:
            return [
                f"the baseline has not learned: {metric} {points(mean, metric)}, by chance {points(chance, metric)}"
            ]
    return []


def _start_notes(read: Mapping[str, Sequence[SeedRun]], baseline: str) -> list[str]:
    """Whether the runs of a seed began alike, and whether all runs come from one place."""
    base = {run.seed: run for run in read[baseline]}
    notes = []
    meaning = {"parameters": "another initialisation", "first_batch": "another order of the data", "data": "other data"}
    for label, own in read.items():
        for run in own:
            other = base.get(run.seed)
            if other is None or not run.start or not other.start:
                continue
            found = [text for key, text in meaning.items() if run.start.get(key) != other.start.get(key)]
            if found:
                notes.append(
                    f"{label}, seed {run.seed}, began with {' and '.join(found)} than {baseline}: "
                    "what differs is not the precision alone"
                )
    envs = [run.env for own in read.values() for run in own if run.env]
    places: dict[str, set[str]] = {
        "commits": {str((env.get("git") or {}).get("commit"))[:10] for env in envs},
        "devices": {str((env.get("device") or {}).get("name")) for env in envs},
        "versions of torch": {str((env.get("versions") or {}).get("torch")) for env in envs},
    }
    for what, values in places.items():
        if len(values) > 1:
            notes.append(f"the runs come from {len(values)} {what}: {', '.join(sorted(values))}")
    return notes
