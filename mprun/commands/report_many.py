"""``mprun report`` of a folder with several runs, or of what compare, diagnose and search found: reading, not drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mprun.commands.plot import labels_of
from mprun.errors import MprunError
from mprun.report import page_many
from mprun.report.html_page import Page
from mprun.report.page_data import RunFiles
from mprun.report.run_folders import CONFIG, RunRow, find_runs, read_run
from mprun.report.runs_table import grouped
from mprun.tracking.jsonl import read_metrics


def sweep_page(folder: Path) -> Page:
    """The page of a sweep, or of any folder above runs.

    Raises:
        ConfigError: no run lies there.
    """
    runs = _runs([read_run(run) for run in find_runs([str(folder)])])
    # A sweep's folder is <name>/<stamp>-<uid>: the name says more.
    return page_many.sweep_page("/".join(folder.absolute().parts[-2:]), folder, runs)


def lab_page(files: RunFiles) -> Page:
    """The page of a command of the lab."""
    below = sorted(
        {
            path.parent
            for path in files.folder.rglob(CONFIG)
            if path.parent != files.folder and ".hydra" not in path.parts
        }
    )
    try:
        recommended = (files.folder / "precision" / "recommended.yaml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        recommended = ""
    return page_many.lab_page(files, recommended, _runs([read_run(folder) for folder in below]) if below else None)


def _runs(rows: Sequence[RunRow]) -> page_many.Runs:
    groups = grouped([row.config for row in rows], page_many.SEED)
    return page_many.Runs(rows, [_records(row.folder) for row in rows], groups, labels_of(rows, groups))


def _records(folder: Path) -> list[dict[str, Any]]:
    """What a run logged and counts; nothing where the file is missing or broken: its row says how it ended."""
    try:
        return read_metrics(folder, effective=True)
    except MprunError:
        return []
