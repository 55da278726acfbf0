"""How often the numerics lab was right, and what it cost, as text for the docs: from the results of its benches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common import about_text

from mprun.numerics.formats import power


def markdown_lab(
    sick: dict[str, Any] | None,
    scales: dict[str, Any] | None,
    toys: dict[str, Any] | None,
    probe: dict[str, Any] | None,
) -> str:
    """The section's tables; a bench that was not run leaves its own out."""
    parts = [
        sick_table(sick) if sick else "",
        scale_table(scales) if scales else "",
        toy_table(toys) if toys else "",
        probe_table(probe) if probe else "",
    ]
    return "\n\n".join(part for part in parts if part) or "Not measured yet."


def sick_table(content: dict[str, Any]) -> str:
    """Hits by instrument, cures, false alarms, and what was missed."""
    total = content["totals"]
    rows = [[name, f"{n['hits']} of {n['questions']}"] for name, n in total["by_instrument"].items()]
    rows += [
        ["all questions", f"{total['hits']} of {total['questions']} ({total['hit_rate']:.1%})"],
        ["proposed cures that make a plain run healthy", f"{total['cures_that_work']} of {total['cures_tried']}"],
        [
            f"false alarms on {total['controls']} healthy controls",
            f"{total['false_alarms']} of {total['control_questions']}",
        ],
    ]
    missed = [f"{row['fault']} ({row['instrument']})" for row in content["sick"] if not row["hit"]]
    note = f" Missed: {', '.join(missed)}." if missed else ""
    head = (
        f"**{total['cases']} models and datasets with one known fault each** (`tests/sick/faults.py`). A hit names the cause, "
        "and the module or sample where one is at fault, and the cure that it proposes works. The lab was improved on these "
        f"cases, so the rate is not that of unseen ones.{note}"
    )
    return (
        f"{head}\n\n{table(('asked', 'right'), rows, (1,))}\n\n{about_text(content['about'])} (`bench/sick_models.py`)."
    )


def scale_table(content: dict[str, Any]) -> str:
    """The recommended static scale beside the one at which a dynamic scale settles."""
    rows = [
        [
            row["pair"],
            power(row["static"]),
            power(row["settled"]),
            f"{row['ratio']:g}",
            power(row["init"]),
            str(row["skips"]),
        ]
        for row in content["rows"]
    ]
    heads = (
        "model / data",
        "recommended static",
        "dynamic settles at",
        "ratio",
        "recommended `init`",
        "skips from there",
    )
    head = "**`diagnose`: the recommended scale.** Targets: within a factor 4, at most 2 skips."
    return (
        f"{head}\n\n{table(heads, rows, range(1, 6))}\n\n{about_text(content['about'])} (`bench/recommended_scale.py`)."
    )


def toy_table(content: dict[str, Any]) -> str:
    """What the search found where the right set is known."""
    rows = [
        [
            row["case"], "yes" if row["exact"] else "**no**", f"{len(row['fp32_modules'])} of {row['candidates']}",
            str(row["sets"]), str(row["evaluations"]), f"{row['seconds']:.0f} s",
        ]
        for row in content["rows"]
    ]  # fmt: skip
    head = "**`search` on transformers with known culprits.** Seconds include the FP32 runs."
    heads = ("overflowing modules", "exactly them", "found", "sets tested", "evaluations", "time")
    return f"{head}\n\n{table(heads, rows, range(2, 6))}\n\n{about_text(content['about'])} (`bench/search_toy.py`)."


def probe_table(content: dict[str, Any]) -> str:
    """The cost of a sampled step, and of the default sampling."""
    targets = content["targets"]
    rows = [
        [
            row["case"], f"{row['parameters'] / 1e6:.2f} M", f"{row['plain_ms']:.1f} ms", f"{row['sampled_ms']:.1f} ms",
            f"{row['ratio']:.2f}" + (" **missed**" if row["ratio"] > targets["ratio"] else ""), f"{row['share']:.1%}",
        ]
        for row in content["rows"]
    ]  # fmt: skip
    head = (
        f"**The probe.** Targets: a sampled step at most {targets['ratio']:g} times a plain one, at most {targets['share']:.0%} "
        f"of a run at `probe.every={content['every']}`. The steps in between run the same code as with the probe off."
    )
    heads = ("model", "parameters", "plain step", "sampled step", "ratio", "of a run")
    return f"{head}\n\n{table(heads, rows, range(1, 6))}\n\n{about_text(content['about'])} (`bench/probe_cost.py`)."


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> str:
    """A Markdown table; the columns ``right`` are aligned to the right."""
    heads, right = list(heads), set(right)
    line = ["--:" if index in right else "---" for index in range(len(heads))]
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*heads], line, *([*row] for row in rows)))
