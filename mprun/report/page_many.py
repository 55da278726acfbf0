"""The page of several runs (a sweep, any folder above runs), and that of what a command of the lab found.

What the lab wrote is shown as it is: numbers and words as facts, lists of alike things as tables, so that a page needs to know
nothing of a command. There are two exceptions: the SQNR of gradients by module and step becomes a heatmap, and a diagnosis
begins with what the terminal showed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from mprun.report import html_maps as maps
from mprun.report.curves import Trace, merge, trace_of
from mprun.report.diagnose_text import diagnosis_text
from mprun.report.draw_html import curves_figure
from mprun.report.html_page import Page, Plot, Section, escape, folded, note, table, words
from mprun.report.page_data import RunFiles
from mprun.report.page_words import ENDED, level_of
from mprun.report.run_folders import OK, RunRow, flatten
from mprun.report.runs_table import build_table
from mprun.report.summary import number_text
from mprun.report.table_text import cell, heading, shown

METRICS = (("train/loss", "Training loss"), ("val/loss", "Validation loss"), ("val/top1", "Validation top-1"),
           ("ema/top1", "Top-1 of the EMA"),
           ("precision/loss_scale", "Loss scale"))  # fmt: skip
SEED = ("seed",)
LEVELS = {**ENDED, "pass": "good", "fail": "bad", "undecided": "warn", "FAIL": "bad", "PASS": "good"}
ROWS_MOST = 1000


@dataclass(frozen=True)
class Runs:
    """Several runs: their rows, their curves, and in which groups and under which labels they are drawn together.

    ``traces`` has for each run its trace of each of :data:`METRICS` that it logged: a hundredth of its records.
    """

    rows: Sequence[RunRow]
    traces: Sequence[Mapping[str, Trace]]
    groups: Sequence[Sequence[int]]
    labels: Sequence[str]


def sweep_page(title: str, folder: Path, runs: Runs) -> Page:
    """Statuses, the table over seeds and of every run, curves with bands."""
    statuses = Counter(row.status for row in runs.rows)
    bad = sum(count for status, count in statuses.items() if level_of(status) == "bad")
    word = "ok" if statuses.keys() == {OK} else f"{statuses[OK]} of {len(runs.rows)} ok"
    head = f'<p class="about">{escape(folder)}</p>\n' + words(_said(runs, statuses))
    sections = [Section("Curves", curves(runs)), Section("Results", tables(runs))]
    return Page(title, (word, "bad" if bad else level_of(OK) if word == OK else "plain"), head, sections)


def traces_of(row: RunRow, records: Sequence[Mapping[str, Any]]) -> dict[str, Trace]:
    """What of a run's records is drawn."""
    found = {metric: trace_of(records, metric, "step", status=row.status) for metric, _ in METRICS}
    return {metric: trace for metric, trace in found.items() if trace is not None}


def _said(runs: Runs, statuses: Counter[str]) -> list[tuple[str, str]]:
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    alone = "1 run" if len(runs.rows) == 1 else f"{len(runs.rows)} runs"
    found = [("plain", f"{alone}, {len(runs.groups)} configurations apart from the seed: {counts}.")]
    for metric, higher in (("val/top1", True), ("val/loss", False)):
        scored = [(float(row.result[metric]), index) for index, row in enumerate(runs.rows) if _finite(row, metric)]
        if scored:
            value, best = max(scored) if higher else min(scored)
            label = next(label for label, group in zip(runs.labels, runs.groups, strict=True) if best in group)
            found.append(("good", f"Best {metric}: {number_text(value)}, by {label} ({runs.rows[best].folder.name})."))
            break
    reasons: dict[str, list[int]] = {}
    for index, row in enumerate(runs.rows):
        if row.status != OK and row.reason:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(index)
    for reason, which in list(reasons.items())[:6]:
        label = next(label for label, group in zip(runs.labels, runs.groups, strict=True) if which[0] in group)
        more = f" and {len(which) - 1} more" if len(which) > 1 else ""
        found.append((level_of(runs.rows[which[0]].status), f"{label}{more}: {reason}"))
    if len(reasons) > 6:
        found.append(("plain", f"{len(reasons) - 6} further reasons are in the table."))
    return found


def _finite(row: RunRow, metric: str) -> bool:
    value = row.result.get(metric)
    return row.status == OK and isinstance(value, int | float) and bool(np.isfinite(value))


def curves(runs: Runs) -> list[str | Plot]:
    """Each metric against applied steps: a line a configuration, a band over its seeds."""
    parts: list[str | Plot] = []
    for metric, title in METRICS:
        traces = [found.get(metric) for found in runs.traces]
        if metric == "precision/loss_scale":  # where there is none, it is logged as 1
            traces = [
                trace if row.config.get("precision.loss_scale.kind") == "dynamic" else None
                for row, trace in zip(runs.rows, traces, strict=True)
            ]
        found = []
        for group, label in zip(runs.groups, runs.labels, strict=True):
            there: list[Trace] = [trace for index in group if (trace := traces[index]) is not None]
            if there:
                found.append(merge(label, there))
        if not found or all(not np.isfinite(curve.mean).any() for curve in found):
            continue
        figure = curves_figure(found, metric, "step", subtitle="", letters=50)
        figure["layout"].pop("title")
        figure["layout"]["margin"] |= {"t": 16, "l": 60}
        figure["layout"]["yaxis"] |= {"title": {"text": ""}, "automargin": True}
        about = [
            text
            for text, true in (
                ("band from min to max over seeds", any(curve.runs > 1 for curve in found)),
                ("× a run failed", any(curve.deaths for curve in found)),
            )
            if true
        ]
        parts.append(Plot(metric.replace("/", "-").replace("_", "-"), title, figure, "; ".join(about)))
    return parts or [note("Nothing was logged by any of the runs.")]


def tables(runs: Runs) -> list[str | Plot]:
    """The mean over seeds where there are several, and every run."""
    parts: list[str | Plot] = []
    if any(len(group) > 1 for group in runs.groups):
        parts += [
            note("Mean ± standard deviation over seeds (how many):"),
            _runs_table(runs.rows, by=SEED),
            note("Every run:"),
        ]
    return [*parts, _runs_table(runs.rows)]


def _runs_table(rows: Sequence[RunRow], by: Sequence[str] = ()) -> str:
    found = build_table(rows, by=by)
    failed = any(row["error"] for row in found.rows)
    columns = [*found.columns, *(["error"] if failed and "error" not in found.columns else [])]
    cells = [[cell(found, row, key, most=200) for key in columns] for row in found.rows[:ROWS_MOST]]
    return table([heading(found, key) for key in columns], cells, levels=LEVELS)


# --- what a command of the lab found --------------------------------------------------------------------------------------


def lab_page(files: RunFiles, recommended: str, runs: Runs | None) -> Page:
    """``result.json`` of compare, diagnose or search, the precision file that it wrote, and curves of the runs below it."""
    result = dict(files.result)
    command = str(result.get("command") or files.config.get("command") or "lab")
    status = str(result.get("verdict") or files.status)
    level = LEVELS.get(status, level_of(files.status))
    # What a person is to know is in the head of the file.
    header = [
        line.removeprefix("#").strip()
        for line in takewhile(lambda line: line.startswith("#"), recommended.splitlines())
    ]
    # Some of it is said by the result too, with or without a full stop.
    texts = {text.rstrip("."): text for text in [*_texts(result), *header] if text}
    said = [(level, text) for text in texts.values()]
    head = (
        f'<p class="about">{escape(files.folder)}</p>\n' + words(said) + "".join(note(text) for text in files.problems)
    )
    if not result:
        head += note("There is no result.json: the command was killed, or goes on.")
    told = (
        [Section("Diagnosis", [f"<pre>{escape(diagnosis_text(result))}</pre>"])]
        if command == "diagnose" and result
        else []
    )
    sections = [*told, Section("Findings", findings(result))]
    if heat := sqnr(result):
        sections.append(Section("Gradients against FP32", heat))
    if recommended:
        sections.append(Section("Recommended precision file", [f"<pre>{escape(recommended)}</pre>"]))
    if runs is not None:
        sections.append(Section("Runs", [*curves(runs), *tables(runs)]))
    if files.config_text:
        sections.append(Section("Configuration", [folded("Configuration", f"<pre>{escape(files.config_text)}</pre>")]))
    return Page(f"{command}: {files.name}", (status, LEVELS.get(status, level_of(files.status))), head, sections)


SENTENCES = ("message", "summary", "why", "advice", "reason", "error", "notes")


def _texts(result: Mapping[str, Any]) -> list[str]:
    """The sentences that a result has."""
    found: list[str] = []
    for key in SENTENCES:
        value = result.get(key)
        found += [str(item) for item in value] if isinstance(value, list) else [str(value)] if value else []
    return found


def findings(result: Mapping[str, Any]) -> list[str | Plot]:
    """A result as tables: its facts, and each list of alike things."""
    facts: list[list[Any]] = []
    parts: list[str | Plot] = []
    for key, value in result.items():
        if key in SENTENCES or value in (None, "", [], {}):
            continue
        if isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()):
            value = [{"": name, **item} for name, item in value.items()]
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            parts += [f"<h3>{escape(key.replace('_', ' '))}</h3>", _alike(value)]
        elif isinstance(value, Mapping):
            for name, item in flatten(value).items():
                if isinstance(item, list) and item and all(isinstance(part, Mapping) for part in item):
                    parts += [f"<h3>{escape(f'{key}.{name}'.replace('_', ' '))}</h3>", _alike(item)]
                elif item not in (None, "", []):
                    facts.append([f"{key}.{name}", _text(item)])
        else:
            facts.append([key.replace("_", " "), _text(value)])
    return [*([table(("what", "value"), facts)] if facts else []), *parts] or [note("The result is empty.")]


def _alike(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of alike things; what is nested in them goes by dotted keys, lists of things by their number."""
    flat = [flatten(row) for row in rows]
    columns = [
        key
        for key in dict.fromkeys(key for row in flat for key in row)
        if any(row.get(key) not in (None, "", [], {}) for row in flat)
    ]
    columns = [
        key
        for key in columns
        if not any(
            isinstance(row.get(key), list) and any(isinstance(item, Mapping) for item in row[key]) for row in flat
        )
    ][:24]
    cells = [[_text(row.get(key)) for key in columns] for row in flat[:ROWS_MOST]]
    return table([key.replace("_", " ") for key in columns], cells, levels=LEVELS)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return (
            ", ".join(_text(item) for item in value)
            if all(not isinstance(item, Mapping | list) for item in value)
            else json.dumps(value)
        )
    return shown(value)


def sqnr(result: Mapping[str, Any]) -> list[str | Plot]:
    """Heatmaps of the SQNR of gradients in dB, modules by steps, for each policy that has them."""
    parts: list[str | Plot] = []
    for number, one in enumerate(item for item in result.get("policies") or () if isinstance(item, Mapping)):
        states = [
            state
            for state in one.get("gradients") or ()
            if isinstance(state, Mapping) and isinstance(state.get("modules"), Mapping)
        ]
        if any(_some(state) for state in states):
            label = str(one.get("label") or one.get("name") or number)
            parts.append(
                Plot(
                    f"sqnr-{number}",
                    f"{label}: SQNR of gradients in dB",
                    maps.sqnr_map(states),
                    "the lower, the less of the gradient is left",
                )
            )
    return parts


def _some(state: Mapping[str, Any]) -> bool:
    """Whether a state has a module whose gradient is not exactly that of FP32."""
    return any(isinstance(value, int | float) and np.isfinite(value) for value in state["modules"].values())
