"""The page of one run: verdicts in words, curves, scale and skips, heatmaps, memory, environment, configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mprun.report import html_figures as draw
from mprun.report.curves import Array
from mprun.report.html_page import Page, Plot, Section, escape, folded, note, table, words
from mprun.report.page_data import RunFiles
from mprun.report.page_probe import numbers
from mprun.report.page_words import level_of, said_of
from mprun.report.run_folders import flatten
from mprun.report.summary import bytes_text, number_text, scale_text

ROWS_MOST = 200
CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("loss", "Loss", ("train/loss", "val/loss", "ema/loss")),
    ("top1", "Top-1 accuracy", ("train/top1", "val/top1", "ema/top1")),
    ("lr", "Learning rate", ("train/lr",)),
    ("underflow", "Part of all gradients that becomes 0 (the probe)", ("precision/underflow_frac",)),
    ("grad-norm", "Gradient norm (unscaled, before clipping)", ("train/grad_norm",)),
)


def run_page(run: RunFiles) -> Page:
    """The page. Parts that the folder has no data for are left out, with a line that says why."""
    about = " · ".join(
        str(part)
        for part in (run.folder, str(run.env.get("started") or "").replace("T", " ").partition("+")[0])
        if part
    )
    head = (
        f'<p class="about">{escape(about)}</p>\n' + words(said_of(run)) + "".join(note(text) for text in run.problems)
    )
    sections = [
        Section("Curves", curves(run)),
        Section("Loss scale and skips", scale(run)),
        Section("Numbers by module", numbers(run)),
        Section("Memory", memory(run)),
        Section("Events", events(run)),
        Section("Precision table", precision(run)),
        Section("Environment and configuration", environment(run)),
    ]
    return Page(run.name, (run.status, level_of(run.status)), head, sections)


def series(records: Sequence[Mapping[str, Any]], name: str, place: str = "step") -> tuple[Array, Array] | None:
    """Where a number was logged, and its values (NaN and infinity stay); None where it never was."""
    points = {
        float(record[place]): float(record[name])
        for record in records
        if record.get("kind") != "skip"
        and isinstance(record.get(name), int | float)
        and isinstance(record.get(place), int | float)
    }
    if not points:
        return None
    x = np.array(sorted(points), dtype=np.float64)
    return x, np.array([points[at] for at in x.tolist()], dtype=np.float64)


def curves(run: RunFiles) -> list[str | Plot]:
    """Loss, metric, learning rate and gradient norm against applied steps."""
    parts: list[str | Plot] = []
    for key, title, names in CURVES:
        found = {
            name: pair
            for name in names
            if (pair := series(run.records, name)) is not None and np.isfinite(pair[1]).any()
        }
        if found and (key != "underflow" or found["precision/underflow_frac"][1].any()):
            parts.append(Plot(key, title, draw.lines(found, "", log=key in ("loss", "grad-norm"))))
    return parts or [note("Nothing was logged: metrics.jsonl holds no train or val record.")]


def scale(run: RunFiles) -> list[str | Plot]:
    """The loss scale over attempts, and which attempts were skipped."""
    skips = run.of("skip")
    trained = (
        series(run.records, "precision/loss_scale", "attempt")
        if run.config.get("precision.loss_scale.kind") != "none"
        else None
    )
    if trained is None and not skips:
        return [note(f"No loss scale at precision={run.config.get('precision.name', '?')}, and no step was skipped.")]
    points = dict(zip(trained[0].tolist(), trained[1].tolist(), strict=True)) if trained else {}
    by_reason: dict[str, list[tuple[float, float]]] = {}
    for record in skips:
        at, value = float(record.get("attempt") or 0), record.get("precision/loss_scale")
        number = float(value) if isinstance(value, int | float) else np.nan
        by_reason.setdefault(str(record.get("reason")), []).append((at, number))
        if trained is not None:
            points[at] = number
    attempts = np.array(sorted(points), dtype=np.float64)
    values = np.array([points[place] for place in attempts.tolist()], dtype=np.float64)
    marks = {reason: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for reason, pairs in by_reason.items()}
    parts: list[str | Plot] = [
        Plot(
            "loss-scale",
            "Loss scale S over attempts; × a skipped attempt",
            draw.loss_scale(attempts, values, marks),
            wide=True,
        )
    ]
    if skips:
        rows = [
            [record.get("attempt"), record.get("step"), str(record.get("reason")).replace("_", " "),
             _scale(record.get("precision/loss_scale")),
             _number(record.get("train/loss")), ", ".join(map(str, record.get("sample_ids") or ()))]
            for record in skips[:ROWS_MOST]
        ]  # fmt: skip
        more = f", the first {ROWS_MOST} of {len(skips):,}" if len(skips) > ROWS_MOST else ""
        columns = ("attempt", "applied before", "reason", "S", "loss", "samples (the first)")
        parts.append(folded(f"Skipped attempts ({len(skips):,}{more})", table(columns, rows)))
    return parts


# --- the rest -----------------------------------------------------------------------------------------------------------


def memory(run: RunFiles) -> list[str | Plot]:
    """Bytes by category where ``memory.json`` has them, and the peak that the run noted."""
    parts: list[str | Plot] = []
    peak = run.result.get("peak_memory")
    device = found.get("type") if isinstance(found := run.env.get("device"), dict) else None
    if isinstance(peak, int | float):
        of = "the allocator's peak" if device == "cuda" else "resident memory of the whole process"
        parts.append(note(f"Peak of the run: {bytes_text(peak)} ({of})."))
    else:
        parts.append(note("The run noted no peak."))
    footprints = {
        name: found for name in ("predicted", "measured") if isinstance(found := run.memory.get(name), Mapping)
    }
    if not footprints:
        parts.append(
            note(
                f"No memory by category: mprun estimate {run.folder} --json {run.folder / 'memory.json'} writes it"
                f" (--measure for a real step beside it)."
            )
        )
        return parts
    sizes = {name: found.get("full_by_category") or {} for name, found in footprints.items()}
    names = sorted(
        {kind for found in sizes.values() for kind in found},
        key=lambda kind: -max(float(found.get(kind, 0)) for found in sizes.values()),
    )
    values = {name: [float(found.get(kind, 0)) for kind in names] for name, found in sizes.items()}
    totals = ", ".join(
        f"{name} {bytes_text(found['peak_bytes'])}" for name, found in footprints.items() if found.get("peak_bytes")
    )
    parts.append(
        Plot(
            "memory",
            "Memory of a step by category, each at its own highest",
            draw.bars(names, values),
            f"Peak of all together: {totals}." if totals else "",
            wide=True,
        )
    )
    return parts


def events(run: RunFiles) -> list[str | Plot]:
    """Warnings, resumes, post-mortems."""
    found = [record for record in run.of("event") if record.get("message")]
    if not found and not run.traceback:
        return [note("None: no warning, no resume, no post-mortem.")]
    rows = [
        [record.get("step"), record.get("attempt"), _event(record), record.get("message")]
        for record in found[:ROWS_MOST]
    ]
    cells = {_event(record) for record in found}
    levels = {cell: "plain" if "scale search" in cell else "bad" for cell in cells if cell.startswith("post-mortem")}
    columns = ("step", "attempt", "event", "what")
    parts: list[str | Plot] = [table(columns, rows, levels={**levels, "warning": "warn"})] if rows else []
    if len(found) > ROWS_MOST:
        parts.append(note(f"{len(found) - ROWS_MOST} more are in metrics.jsonl."))
    if run.traceback:
        parts.append(folded("Traceback (error.txt)", f"<pre>{escape(run.traceback)}</pre>"))
    return parts


def _event(record: Mapping[str, Any]) -> str:
    """What kind of event; a post-mortem goes by its verdict."""
    if record.get("event") != "postmortem":
        return str(record.get("event"))
    return f"post-mortem: {str(record.get('verdict') or 'unknown').replace('_', ' ')}"


def precision(run: RunFiles) -> list[str | Plot]:
    """``modules.json``: the dtype of every module as really seen."""
    if not run.modules:
        return [note("No precision table: the folder has no readable modules.json.")]
    columns = ("module", "class", "rule", "param_dtype", "compute_dtype", "output_dtype")
    rows = [[row.get(name) or ("(model)" if name == "module" else "") for name in columns] for row in run.modules]
    counts: dict[str, int] = {}
    for row in run.modules:
        if row.get("compute_dtype"):
            counts[str(row["compute_dtype"])] = counts.get(str(row["compute_dtype"]), 0) + 1
    share = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(counts.items(), key=lambda item: -item[1]))
    return [
        note(f"{len(rows)} modules as seen in the first forward pass; of those that compute: {share or 'none'}."),
        folded("Every module", table(columns, rows)),
    ]


def environment(run: RunFiles) -> list[str | Plot]:
    """``env.json`` as a table, and the configuration."""
    parts: list[str | Plot] = []
    flat = flatten({key: value for key, value in run.env.items() if key not in ("argv", "git_caller")})
    if flat:
        flat = {
            key: value for key, value in flat.items() if value is not None and key not in ("git.diff", "git.untracked")
        }
        argv = run.env.get("argv")
        command = " ".join(map(str, argv)) if isinstance(argv, list) else ""
        parts.append(note(f"Command: {command}") if command else "")
        parts.append(
            folded("Environment", table(("what", "value"), [[key, _shown(value)] for key, value in flat.items()]))
        )
    else:
        parts.append(note("No environment: the folder has no readable env.json."))
    config = f"<pre>{escape(run.config_text)}</pre>"
    parts.append(
        folded("Configuration", config)
        if run.config_text
        else note("No configuration: the folder has no readable config.yaml.")
    )
    return parts


def _shown(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else str(value)


def _scale(value: Any) -> str:
    return scale_text(value) if isinstance(value, int | float) else ""


def _number(value: Any) -> str:
    return number_text(value) if isinstance(value, int | float) else ""
