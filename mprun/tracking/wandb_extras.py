"""What W&B gets besides numbers: the precision table, the probe's histograms, the checkpoint, the alert.

All of them are records in the run's own file, so an offline run has them too, once it is uploaded. None of them is worth
losing the curves for: where one fails, that is told and the rest goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mprun.config import CheckpointArtifact
from mprun.errors import MprunError
from mprun.tracking.base import RunInfo
from mprun.tracking.masking import masked
from mprun.training.env import json_ready

MODULES_FILE, MODULES_KEY = "modules.json", "modules"
ALERT_LENGTH = 1000
# What is drawn of a sample of the probe, and of how many modules at most: the first ones that have one of them.
HISTOGRAMS, HISTOGRAM_MODULES = ("activation", "activation_grad"), 64


def log_modules(run: Any, info: RunInfo) -> None:
    """``modules.json`` as a table in the run's summary, where W&B's pages look for tables."""
    import wandb

    path = info.run_dir / MODULES_FILE
    if not path.exists():
        return
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    columns = list(rows[0]) if rows else []
    if columns:
        run.summary[MODULES_KEY] = wandb.Table(
            columns=columns, data=[[row.get(name) for name in columns] for row in rows]
        )


def histograms(record: Mapping[str, Any]) -> dict[str, Any]:
    """A ``probe`` record's exponent histograms under ``probe/<module>/<tensor>``: counts over log2 of the magnitude, unscaled."""
    import wandb

    drawn: dict[str, Any] = {}
    modules = [item for item in record.get("modules", {}).items() if set(HISTOGRAMS) & item[1].keys()]
    for path, tensors in modules[:HISTOGRAM_MODULES]:
        for name in HISTOGRAMS:
            stats = tensors.get(name)
            if stats and stats["bins"]:
                edges = list(range(stats["low"], stats["low"] + len(stats["bins"]) + 1))
                drawn[f"probe/{path or 'model'}/{name}"] = wandb.Histogram(np_histogram=(stats["bins"], edges))
    return drawn


def log_checkpoint(run: Any, info: RunInfo, result: Mapping[str, Any]) -> None:
    """The checkpoint that ``tracking.log_checkpoint`` names as an artifact of type ``model``; nothing if there is none.

    W&B is given a hard link of its own: a checkpoint file is never written in place, so what the link leads to stays what
    it is until it is uploaded, whatever a resumed run does, and takes no room while it is the current one.
    """
    import wandb

    which = info.tracking.log_checkpoint
    if which is CheckpointArtifact.none:
        return
    source = info.run_dir / "checkpoints" / f"{which.value}.pt"
    about: Mapping[str, Any] = result.get("best" if which is CheckpointArtifact.best else "checkpoint") or {}
    if not source.is_file() or not about:
        return
    if masked(config := json_ready(info.config)) != config:
        raise MprunError("the configuration in it holds a secret")
    path = _own_link(source, info.run_dir / "wandb" / "checkpoints", f"{which.value}-step-{about['step']}.pt")
    metadata = {key: value for key, value in about.items() if key != "file"} | {"status": result.get("status")}
    artifact = wandb.Artifact(f"run-{run.id}-{which.value}", type="model", metadata=json_ready(metadata))
    artifact.add_file(str(path), name=source.name, policy="immutable", skip_cache=True)
    run.log_artifact(artifact, aliases=[which.value, f"step-{about['step']}"])


def log_report(run: Any, info: RunInfo) -> None:
    """``report.html`` as an artifact of type ``report``, with ``tracking.log_report``; secrets in it are masked already."""
    import wandb

    path = info.run_dir / "report.html"
    if not info.tracking.log_report or not path.is_file():
        return
    artifact = wandb.Artifact(f"run-{run.id}-report", type="report")
    artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
    run.log_artifact(artifact)


def _own_link(source: Path, folder: Path, name: str) -> Path:
    # What an earlier life of the run linked belongs to a file that needs no upload any more.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / name
    with suppress(OSError):
        os.link(source, path)
        return path
    shutil.copyfile(source, path)
    return path


def alert(run: Any, info: RunInfo, result: Mapping[str, Any]) -> None:
    """Ask W&B to tell its user that the run has diverged; it does so by mail or chat, as set up there."""
    if result.get("status") == "diverged":
        text = f"{info.name}: {result.get('error')}"[:ALERT_LENGTH]
        run.alert(title="Run diverged", text=masked(text), level="ERROR")
