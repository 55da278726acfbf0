"""What the benches of speed, growth and memory measured, as text for the README (briefly) and for ``docs/performance.md``.

Every one of them writes a list ``table`` into its results: what, measured, ratio, target, met.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import ROOT, about_text, load
from lab_tables import table

# Bench -> what its rows are about. In this order they are shown.
BENCHES = {
    "step_overhead": "The training step",
    "fp16_models": "Half precision on the CPU",
    "optimizer_phase": "What follows backward",
    "startup": "Start-up",
    "data_wait": "Waiting for data",
    "growth": "Growth",
    "memory_peak": "Memory",
    "probe_cost": "The probe",
    "gpu": "On a GPU",
}
HEADS = ("what", "measured", "ratio", "target", "")
FEW = 3  # rows of a bench that the README shows in full


def markdown_speed() -> str:
    """The README's tables: the step, case by case; of each other bench its rows, or where they are many the worst of them."""
    rows: list[tuple[str, ...]] = []
    places: dict[str, list[str]] = {}
    parts: list[str] = []
    for bench in BENCHES:
        content = load(bench)
        if content is None or not content.get("table"):
            continue
        places.setdefault(about_text(content["about"]), []).append(f"`bench/{bench}.py`")
        if bench == "step_overhead":
            parts += steps(content)
            continue
        entries = content["table"]
        if len(entries) <= FEW:
            rows += [line(entry) for entry in entries]
            continue
        met = sum(entry["met"] for entry in entries)
        what, *rest = line(max(entries, key=closeness))
        rows.append((f"{what} (worst of {len(entries)}, {met} met)", *rest))
    if rows:
        parts.append(table(HEADS, rows, right=[2, 3]))
    return "\n\n".join([*parts, *measured_by(places)]) or "Not measured yet: `python bench/step_overhead.py --json`."


def steps(content: dict[str, Any]) -> list[str]:
    """The step's time over that of a loop by hand, a row for each model; and the peers in a sentence."""
    rows = content["rows"]
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        cells = [
            " / ".join(f"{row['ratio_to_plain']:.2f}" for row in own if row["precision"] == precision)
            for precision in precisions
        ]
        lines.append((f"{own[0]['parameters'] / 1e6:.2g} M parameters", *cells))
    counts = " / ".join(dict.fromkeys(str(row["accumulate"]) for row in rows))
    head = f"a step over the same step by hand, {counts} micro-batches"
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, peer in row["peers"].items():
            if peer["comparable"]:
                found.setdefault(name, []).append(peer["ratio_mprun_to_peer"])
    sentence = ", ".join(
        f"{name} {statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for name, r in found.items()
    )
    made = [table((head, *(f"`{p}`" for p in precisions)), lines, right=range(1, len(precisions) + 1))]
    return made + ([f"Over a step of other trainers, median of all cases and range: {sentence}."] if sentence else [])


def markdown_targets() -> str:
    """Every row of every bench, bench by bench, and a plot for each axis of growth."""
    parts = []
    for bench, title in BENCHES.items():
        content = load(bench)
        if content is None or not content.get("table"):
            continue
        parts.append(f"### {title}")
        parts.append(table(HEADS, [line(entry) for entry in content["table"]], right=[2, 3]))
        if bench == "step_overhead":
            parts.append(peers(content))
        if bench == "growth":
            pictures = sorted((ROOT / "bench" / "results").glob("growth_*.png"))
            parts += [f"![{p.stem.removeprefix('growth_')}](../bench/results/{p.name})" for p in pictures]
        parts += measured_by({about_text(content["about"]): [f"`bench/{bench}.py`"]})
    return "\n\n".join(parts) or "Not measured yet."


def peers(content: dict[str, Any]) -> str:
    """How long a step takes here over how long it takes elsewhere, case by case."""
    names = list(dict.fromkeys(name for row in content["rows"] for name in row["peers"]))
    rows = []
    for row in content["rows"]:
        found = [row["peers"].get(name) for name in names]
        cells = [
            "" if peer is None else f"{peer['ratio_mprun_to_peer']:.2f}{'' if peer['comparable'] else ' *'}"
            for peer in found
        ]
        case = f"{row['model']}, `{row['precision']}`, {row['accumulate']}"
        native = f"{row['ratio_to_torch']:.2f}" if "ratio_to_torch" in row else ""
        rows.append((case, f"{row['step_ms']:.1f}", f"{row['ratio_to_plain']:.3f}", *cells, native))
    heads = (
        "model, `precision=`, micro-batches",
        "ms",
        "to a loop by hand",
        *(f"to {name}" for name in names),
        "to torch's FP16 kernels",
    )
    notes = {
        f"{name}: {peer['note']}"
        for row in content["rows"]
        for name, peer in row["peers"].items()
        if peer["note"] and not peer["comparable"]
    }
    star = [f"\\* not comparable: {'; '.join(sorted(notes))}."] if notes else []
    return "\n\n".join([table(heads, rows, right=range(1, len(heads))), *star])


def line(entry: dict[str, Any]) -> tuple[str, ...]:
    """A row of a table, in words."""
    bound = "≥" if entry.get("at_least") else "≤"
    verdict = "met" if entry["met"] else "**missed**"
    return entry["what"], entry["measured"], number(entry["ratio"]), f"{bound} {entry['target']:g}", verdict


def number(ratio: float) -> str:
    """Two decimals; shares of a few per cent with four."""
    return f"{ratio:.4f}" if 0 < ratio < 0.1 else f"{ratio:.2f}"


def closeness(entry: dict[str, Any]) -> tuple[bool, float]:
    """How near to its target a row is, or how far beyond it; what misses its target is always the nearer."""
    ratio, target = float(entry["ratio"]), float(entry["target"])
    return not entry["met"], target / ratio if entry.get("at_least") else ratio / target


def measured_by(places: dict[str, list[str]]) -> list[str]:
    """Where and when, one sentence for each place."""
    return [f"Measured by {', '.join(names)}: {place}." for place, names in places.items()]
