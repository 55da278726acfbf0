"""What ``bench/gpu.py`` prints, and the rows of its ``table``: numbers in, text out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

GIB = 2**30
# Where what is said of a section begins, and how many of its faults are printed.
INDENT, MOST = " " * 11, 12
STEP_TARGET, MEMORY_TARGET = 1.05, 1.10
Sections = Mapping[str, Mapping[str, Any]]


def wrap(text: str, width: int, first: str = "", indent: str = "") -> list[str]:
    """``text`` in lines of ``width`` columns, the first after ``first``, the others after ``indent``. No word is cut."""
    lines = textwrap.wrap(" ".join(text.split()), max(width, 2 * len(indent)), initial_indent=first,
                          subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return lines or [first.rstrip()]


def lines_of(name: str, found: Mapping[str, Any], width: int = 80) -> list[str]:
    """A section's outcome, and what is wrong with it, in lines of ``width`` columns."""
    about = SAID.get(name, lambda found: "")(found) if found["status"] in ("ok", "failed") else found.get("reason", "")
    head = f"{name:<11}{found['status']:<9}{found['seconds']:6.1f} s  "
    lines = wrap(about, width, head, " " * len(head))
    if found.get("error"):
        lines += wrap(found["error"], width, INDENT, INDENT)
    wrong = [f"{t['test']}: {t['error'].splitlines()[0] if t['error'] else ''}" for t in found.get("failed", ())]
    wrong += [
        f"{d['operation']} {d['region']} {d['inputs']}: cpu {d['cpu']}, gpu {d['gpu']}" for d in found.get("differ", ())
    ]
    wrong += [f"{w['model']} {w['policy']} {w['where']}: {w['error']}" for w in found.get("waits", ())]
    wrong += [f"{r['model']} {r['policy']}: {_worst(r)}" for r in found.get("rows", ()) if r.get("ok") is False]
    wrong += list(found.get("left_out", ()))
    if len(wrong) > MOST:
        wrong = [*wrong[:MOST], f"and {len(wrong) - MOST} more, in gpu.json"]
    return lines + [line for text in wrong for line in wrap(text, width, INDENT, INDENT + "  ")]


def _worst(row: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{kind} {of['median_db']:.0f} dB, {of['worst'][0][0]} {of['worst'][0][1]:.0f}"
        for kind, of in row["kinds"].items()
    )


def _parity(found: Mapping[str, Any]) -> str:
    half = [k["median_db"] for row in found["rows"] if row["policy"] == "fp16_dynamic" for k in row["kinds"].values()]
    return f"FP16, CPU against GPU: medians from {min(half):.0f} to {max(half):.0f} dB" if half else ""


SAID = {
    "suite": lambda f: f"{f['passed']} passed, {len(f['failed'])} failed, {len(f['skipped'])} skipped",
    "dtypes": lambda f: (
        f"{f['compared']} calls, {len(f['differ'])} differ; in {len(f['one_raises'])} one device raises"
    ),
    "sync": lambda f: f"{len(f['waits'])} of {2 * len(f.get('outcomes', ()))} loops wait for the device",
    "trajectory": lambda f: (
        f"{f['steps']} steps, skips {f['cpu']['skips']} and {f['gpu']['skips']}, top-1 {f['cpu']['top1']:.3f} and "
        f"{f['gpu']['top1']:.3f}"
    ),
    "parity": _parity,
    "predict": lambda f: f"{len(f['bytes'])} rows",
    "speed": lambda f: f"{len(f['rows'])} rows, {len(f['left_out'])} left out",
}


def speed_lines(sections: Sections) -> list[str]:
    """The table of speed and memory, 80 columns wide."""
    rows = sections.get("speed", {}).get("rows", ())
    if not rows:
        return []
    head = f"{'model':<7}{'policy':<20}{'':<9}{'img/s':>8}{'ms':>9}{'/hand':>7}{'GiB':>8}{'predicted':>11}"
    return [head, *(_speed_line(row) for row in rows)]


def _speed_line(row: Mapping[str, Any]) -> str:
    peak, predicted = row["peak_bytes"], row["predicted_bytes"]
    memory = f"{peak / GIB:8.2f}" if peak else f"{'-':>8}"
    off = f"{100 * (predicted / peak - 1):+10.1f}%" if peak and predicted else f"{'-':>11}"
    way = "compiled" if row["compiled"] else "eager"
    return (
        f"{row['model']:<7}{row['policy']:<20}{way:<9}{row['images_per_s']:8.0f}{row['mprun_ms']:9.2f}{row['ratio']:7.3f}"
        f"{memory}{off}"
    )


def table_of(sections: Sections) -> list[dict[str, Any]]:
    """The rows that answer a target: a step beside one by hand, and the allocator's peak beside the prediction."""
    table: list[dict[str, Any]] = []
    for row in sections.get("speed", {}).get("rows", ()):
        what = f"{row['model']} {row['policy']} {'compiled' if row['compiled'] else 'eager'}, batch {row['batch']}"
        steps = f"mprun {row['mprun_ms']:.2f} ms, by hand {row['plain_ms']:.2f} ms"
        table.append(_judged(f"{what}: a step", steps, row["ratio"], STEP_TARGET, row["ratio"] <= STEP_TARGET))
        if row["peak_bytes"] and row["predicted_bytes"] and not row["compiled"]:
            ratio = row["peak_bytes"] / row["predicted_bytes"]
            sizes = f"measured {row['peak_bytes'] / GIB:.2f} GiB, predicted {row['predicted_bytes'] / GIB:.2f} GiB"
            met = 1 / MEMORY_TARGET <= ratio <= MEMORY_TARGET
            table.append(_judged(f"{what}: peak memory", sizes, ratio, MEMORY_TARGET, met))
    return table


def _judged(what: str, measured: str, ratio: float, target: float, met: bool) -> dict[str, Any]:
    return {"what": what, "measured": measured, "ratio": ratio, "target": target, "met": met}
