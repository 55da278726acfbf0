"""``mprun report`` of a folder with several runs, or of what compare, diagnose and search found: reading, not drawing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mprun.commands.plot import labels_of
from mprun.errors import ConfigError, MprunError
from mprun.report import page_many
from mprun.report.html_page import Page, Section
from mprun.report.page_data import RunFiles
from mprun.report.run_folders import CONFIG, RunRow, find_runs, read_run
from mprun.report.runs_table import grouped
from mprun.tracking.jsonl import read_metrics
from mprun.training.env import from_json


def sweep_page(folder: Path) -> Page:
    """The page of a sweep, or of any folder above runs.

    Raises:
        ConfigError: no run lies there.
    """
    runs = _runs([read_run(run) for run in find_runs([str(folder)])])
    # A sweep's folder is <name>/<stamp>-<uid>: the name says more.
    return page_many.sweep_page("/".join(folder.absolute().parts[-2:]), folder, runs)


def comparison_page(folder: Path) -> Page:
    """The page of a comparison: its verdicts, judged anew from the runs as they are now, and the runs themselves.

    Raises:
        ConfigError: ``compare.json`` is not what compare wrote.
    """
    from mprun.lab.compare_html import page
    from mprun.lab.comparison import build

    try:
        content = from_json(json.loads((folder / "compare.json").read_text(encoding="utf-8")))
        policies = {one["label"]: one for one in content["policies"]}
        places = {
            label: {int(run["seed"]): _moved(folder, Path(run["run_dir"])) for run in one["runs"]}
            for label, one in policies.items()
        }
        settings = content["settings"]
        found = build(
            folder, places, name=content["name"], baseline=content["baseline"], metric=content["metric"],
            margin=settings["floor"],
            spread=settings["spread"], confidence=settings["confidence"], measured=policies, words=content["words"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"report {folder}: compare.json is not what mprun compare writes ({type(error).__name__}: {error})"
        ) from error
    whole = page(found)
    rows = [read_run(place) for seeds in places.values() for place in seeds.values() if place.is_dir()]
    runs = _runs(rows)
    more = [Section("Gradients by module and step", heat)] if (heat := page_many.sqnr(content)) else []
    more.append(Section("Runs", [*page_many.curves(runs), *page_many.tables(runs)]))
    return replace(whole, sections=[*whole.sections, *more])


def _moved(folder: Path, place: Path) -> Path:
    """A run folder of the comparison, also where all of it lies elsewhere by now."""
    return place if place.is_dir() else folder / place.name


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
    # One after the other: the records of a thousand runs do not fit into the memory.
    traces = [page_many.traces_of(row, _records(row.folder)) for row in rows]
    return page_many.Runs(rows, traces, groups, labels_of(rows, groups))


def _records(folder: Path) -> list[dict[str, Any]]:
    """What a run logged and counts; nothing where the file is missing or broken: its row says how it ended."""
    try:
        return read_metrics(folder, effective=True)
    except MprunError:
        return []
