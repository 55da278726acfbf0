"""One run of a comparison, as its folder tells of it. Imports no torch.

A run counts by how it ended: ``ok`` with its final metric; one that diverged, failed, ran out of memory or has a metric that is
not finite as broken down (NaN); one that was interrupted or has not been started not at all.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprun.errors import MprunError
from mprun.report.run_folders import OK, RunRow, first_line, read_run
from mprun.report.runs_table import is_number
from mprun.tracking.jsonl import read_metrics
from mprun.training.env import from_json

SHOWN_METRICS = ("val/top1", "val/loss", "ema/top1", "ema/loss", "train/loss")
CUT_OFF = ("interrupted", "killed", "running", "running?", "not run")


@dataclass(frozen=True)
class SeedRun:
    """One run: how it ended, its final metrics, and what it logged of training.

    Attributes:
        losses: applied steps and the training loss at each, as logged.
        step_ms: median of the logged times of a step, without the first one; NaN where none was logged.
        task: ``dataset.task``, empty where it is not known.
        start: hashes of initialisation, first batch and data, from its ``env.json``; empty where there is none.
    """

    seed: int
    folder: Path
    status: str
    reason: str
    result: Mapping[str, Any]
    losses: tuple[tuple[float, ...], tuple[float, ...]]
    step_ms: float
    task: str = ""
    start: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        """Final ``metric``; NaN for a run that broke down, None for one that says nothing."""
        if self.status in CUT_OFF:
            return None
        if self.status != OK:
            return math.nan
        finals = [self.result[key] for key in SHOWN_METRICS if is_number(self.result.get(key))]
        found = self.result.get(metric)
        return float(found) if isinstance(found, int | float) and all(map(math.isfinite, finals)) else math.nan


def read_seed(seed: int, folder: Path) -> SeedRun:
    """The run in ``folder``, whatever state it is in."""
    if not (folder / "result.json").is_file() and not (folder / "config.yaml").is_file():
        return SeedRun(seed, folder, "not run", "", {}, ((), ()), math.nan)
    row = read_run(folder)
    try:
        records = read_metrics(folder, effective=True)
    except MprunError:
        records = []
    train = [record for record in records if record.get("kind") == "train"]
    losses = whole_windows(
        [(float(r["step"]), float(r["train/loss"])) for r in train if is_number(r.get("train/loss"))],
        row.config.get("train.log_every"),
    )
    times = [float(r["perf/step_ms"]) for r in train if is_number(r.get("perf/step_ms"))]
    env = _json(folder / "env.json")
    started = env.get("start")
    start = {**(started if isinstance(started, dict) else {}), "data": env.get("data_sha256")} if env else {}
    return SeedRun(
        seed, folder, row.status, _reason(row), row.result,
        (tuple(step for step, _ in losses), tuple(loss for _, loss in losses)),
        statistics.median(times[1:] or times) if times else math.nan,
        str(row.config.get("dataset.task", "")), start, env,
    )  # fmt: skip


def whole_windows(losses: list[tuple[float, float]], every: Any) -> list[tuple[float, float]]:
    """Steps and losses without the last one, if it is the mean over fewer steps than ``train.log_every``.

    How many those are differs between runs with another number of skips, and means over other batches are no gap.
    """
    if len(losses) > 1 and isinstance(every, int) and losses[-1][0] % every:
        return losses[:-1]
    return losses


def _reason(row: RunRow) -> str:
    """Why a run broke down, without the name of the error's class."""
    text = first_line(row.reason)
    name, colon, rest = text.partition(": ")
    return rest if colon and name.isidentifier() and name.endswith("Error") else text


def _json(path: Path) -> dict[str, Any]:
    try:
        found = from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
