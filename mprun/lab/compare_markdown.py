"""A comparison as Markdown and as JSON: everything that was found, with the test in words. Imports no torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.cells import cell_len

from mprun.lab.compare_text import columns, decibels, seeds_text
from mprun.lab.comparison import Comparison, PolicyResult
from mprun.lab.words import points
from mprun.numerics.parity import higher_is_better
from mprun.report.summary import bytes_text, scale_text


def markdown(found: Comparison) -> str:
    """The whole comparison as Markdown."""
    shown = columns(found)
    rows = [[one.cells[index] for one in shown] for index in range(len(found.policies))]
    parts = [
        f"# {found.name}: precision policies against {found.baseline}\n",
        md_table([one.heading for one in shown], rows),
    ]
    parts.append("\n".join(f"* **{p.label}** {p.verdict}: {p.why}" for p in found.policies if p.why) + "\n")
    if found.notes:
        parts.append("\n".join(f"> {note}" for note in found.notes) + "\n")
    parts.append(f"## The test\n\n{test_text(found)}\n")
    if gradients := gradient_rows(found):
        parts.append("## Gradients against FP32 (SQNR)\n\n" + md_table(*gradients))
    if categories := memory_rows(found):
        parts.append("## Memory at the peak of a step, predicted\n\n" + md_table(*categories))
    if found.words:
        parts.append(f"```sh\nmprun compare {shlex.join(found.words)}\n```\n")
    return "\n".join(parts)


def test_text(found: Comparison) -> str:
    """What was tested, in words."""
    s, error = found.settings, 1 - float(found.settings["confidence"])
    floor = points(float(s["floor"]), found.metric)
    name = "points" if higher_is_better(found.metric) else found.metric
    return (
        f"Non-inferiority of the final `{found.metric}` over {seeds_text(found)}. The margin is {floor} {name}, or "
        f"{s['spread']:g} standard deviations of the baseline's own seeds where those are more. A policy passes where the upper "
        f"{100 - 100 * error:g} % bound of its deficit is within the margin (over the two groups of seeds, Welch, or over pairs "
        f"of one seed, which share the error 4 to 1). It fails where the deficit is above the margin and its lower "
        f"{100 - 50 * error:g} % bound (pooled) above 0, where a run broke down and the baseline's did not, or where it is at "
        "chance level and the baseline is not. `gap` is the candidate's mean less the baseline's; `curve gap` the distance of "
        "the smoothed training loss from the baseline's, in standard deviations of its seeds; `gradients` the lowest "
        "signal-to-noise ratio of the whole gradient against FP32's, at the same weights and batch."
    )


def gradient_rows(found: Comparison) -> tuple[list[str], list[list[str]]] | None:
    """A row for each policy and state: S, SQNR of the whole gradient, the worst three modules."""
    rows = []
    for policy in found.policies:
        for state in policy.gradients:
            ranked = sorted(state["modules"].items(), key=lambda item: (item[1], item[0]))[:3]
            worst = ", ".join(
                f"{path or '(the model itself)'}: {decibels(value)}" for path, value in ranked if value != math.inf
            )
            rows.append(
                [policy.label, str(state["step"]), scale_text(state["loss_scale"]), decibels(state["total_db"]), worst]
            )
    return (["policy", "step", "scale", "all", "worst modules"], rows) if rows else None


def memory_rows(found: Comparison) -> tuple[list[str], list[list[str]]] | None:
    """A row for each category, a column for each policy."""
    known = [policy for policy in found.policies if (policy.memory or {}).get("categories")]
    if not known:
        return None
    sizes = {policy.label: (policy.memory or {})["categories"] for policy in known}
    kinds = list(dict.fromkeys(kind for own in sizes.values() for kind in own))
    kinds.sort(key=lambda kind: -max(own.get(kind, 0) for own in sizes.values()))
    rows = [
        [kind, *(bytes_text(own.get(kind, 0)) if own.get(kind) else "-" for own in sizes.values())] for kind in kinds
    ]
    rows.append(["all", *(bytes_text((policy.memory or {})["peak_bytes"]) for policy in known)])
    return ["category", *sizes], rows


def md_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right unless they hold sentences."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    widths = [max(3, *(cell_len(row[index]) for row in cells)) for index in range(len(headings))]
    lines = [
        "| " + " | ".join(cell + " " * (w - cell_len(cell)) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "| " + " | ".join("-" * w for w in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def as_json(found: Comparison) -> dict[str, Any]:
    """Everything, unrounded: ``compare.json``."""
    return {
        "name": found.name,
        "metric": found.metric,
        "baseline": found.baseline,
        "seeds": list(found.seeds),
        "whole": found.whole,
        "settings": dict(found.settings),
        "notes": list(found.notes),
        "words": list(found.words),
        "policies": [_policy_json(policy) for policy in found.policies],
    }


def _policy_json(policy: PolicyResult) -> dict[str, Any]:
    return {
        "label": policy.label,
        "verdict": policy.verdict,
        "why": policy.why,
        "parity": asdict(policy.parity) if policy.parity else None,
        "metrics": {name: asdict(value) for name, value in policy.metrics.items()},
        "curve": asdict(policy.curve) if policy.curve else None,
        "steps_skipped": policy.skips,
        "steps_applied": policy.steps,
        "loss_scale": policy.scale,
        "step_ms": policy.step_ms,
        "step_ratio": policy.step_ratio,
        "examples_per_s": policy.examples_per_s,
        "peak_memory_bytes": policy.peak_bytes,
        "memory": policy.memory,
        "gradients": list(policy.gradients),
        "worst_modules": [{"module": path, "sqnr_db": value, "step": step} for path, value, step in policy.worst_modules],
        "runs": [
            {"seed": run.seed, "status": run.status, "reason": run.reason or None, "run_dir": str(run.folder),
             "final": {name: run.value(name) for name in policy.metrics}, "step_ms": run.step_ms, "start": dict(run.start)}
            for run in policy.runs
        ],
    }  # fmt: skip
