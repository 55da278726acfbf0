"""What the lab says of models with one known fault each, and of healthy ones: the table of the docs.

    python bench/sick_models.py                        every case and control, every instrument but compare (some minutes)
    python bench/sick_models.py --compare              and compare, whose runs are processes of their own (some more)
    python bench/sick_models.py --only rmsnorm         cases and controls whose name has this in it
    python bench/sick_models.py --json                 every case, and bench/results/sick_models.json

The cases (``tests/sick/``) are verified by plain runs in ``tests/test_sick_models.py``: that the fault shows, and that the known
cure works. Here each instrument that should find a fault is asked. A hit names the cause, and the module or sample where one
is at fault, and the cure that it proposes makes a plain run healthy (``-``: it proposes none that is an override).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from common import about, save  # noqa: E402

from tests.sick.cases import Case, Control  # noqa: E402
from tests.sick.controls import HEALTHY  # noqa: E402
from tests.sick.faults import SICK  # noqa: E402
from tests.sick.lab import alarms, ask, cure_works, faults_of  # noqa: E402

WIDTH = 70


def sick_row(case: Case, instrument: str) -> dict[str, Any]:
    """One case put to one instrument."""
    begin = time.perf_counter()
    row: dict[str, Any] = {
        "fault": case.name,
        "about": case.about,
        "precision": case.precision,
        "cause": case.cause,
        "culprits": list(case.culprits),
        "instrument": instrument,
    }
    try:
        answer = ask(instrument, tuple(case.overrides()))
    except Exception as error:  # an instrument that breaks has missed
        return row | {
            "hit": False,
            "wrong": [f"{type(error).__name__}: {error}"],
            "said": "",
            "cure": None,
            "cured": None,
        }
    seconds = time.perf_counter() - begin
    wrong, cured = faults_of(case, instrument, answer), cure_works(case, answer)
    return row | {
        "kind": answer.kind,
        "modules": list(answer.modules),
        "said": answer.said,
        "wrong": wrong,
        "cure": answer.cure,
        "cured": cured,
        "hit": not wrong and cured is not False,
        "seconds": seconds,
    }


def control_row(control: Control, instrument: str) -> dict[str, Any]:
    """One healthy control put to one instrument."""
    begin = time.perf_counter()
    try:
        found = alarms(control, instrument)
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    row = {"control": control.name, "precision": control.precision, "instrument": instrument, "alarms": found}
    return row | {"seconds": time.perf_counter() - begin}


def measure(only: str, instruments: Sequence[str]) -> dict[str, Any]:
    """All rows, and what they add up to."""
    rows = [
        sick_row(case, instrument)
        for case in SICK
        if only in case.name
        for instrument in case.finds
        if instrument in instruments
    ]
    asked = [instrument for instrument in instruments if instrument != "startup"]
    controls = [control_row(c, instrument) for c in HEALTHY if only in c.name for instrument in asked]
    return {
        "about": about(threads=torch.get_num_threads()),
        "sick": rows,
        "healthy": controls,
        "totals": totals(rows, controls),
    }


def totals(rows: Sequence[dict[str, Any]], controls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Hits of questions by instrument and in all, cases that at least one and that every instrument got right, false alarms."""
    asked, hits = Counter(row["instrument"] for row in rows), Counter(row["instrument"] for row in rows if row["hit"])
    names = list(dict.fromkeys(row["fault"] for row in rows))
    by_name = {name: [row["hit"] for row in rows if row["fault"] == name] for name in names}
    return {
        "questions": len(rows),
        "hits": sum(hits.values()),
        "hit_rate": sum(hits.values()) / max(len(rows), 1),
        "by_instrument": {name: {"hits": hits[name], "questions": count} for name, count in asked.items()},
        "cases": len(names),
        "cases_named": sum(any(found) for found in by_name.values()),
        "cases_named_by_all": sum(all(found) for found in by_name.values()),
        "cures_tried": sum(row["cured"] is not None for row in rows),
        "cures_that_work": sum(row["cured"] is True for row in rows),
        "controls": len({row["control"] for row in controls}),
        "control_questions": len(controls),
        "false_alarms": sum(bool(row["alarms"]) for row in controls),
    }


def text(found: dict[str, Any]) -> str:
    """The table for people."""
    lines = [f"{'fault':28} {'instrument':11} {'right':6} {'cured':6} what it said"]
    for row in found["sick"]:
        cured = {True: "yes", False: "NO", None: "-"}[row["cured"]]
        said = row["said"] if row["hit"] else f"[{'; '.join(row['wrong']) or 'its cure does not work'}] {row['said']}"
        lines.append(
            f"{row['fault']:28} {row['instrument']:11} {'yes' if row['hit'] else 'NO':6} {cured:6} {shortened(said)}"
        )
    lines += ["", f"{'healthy control':28} {'instrument':11} alarm"]
    lines += [
        f"{row['control']:28} {row['instrument']:11} {shortened('; '.join(row['alarms'])) or 'none'}"
        for row in found["healthy"]
    ]
    total = found["totals"]
    parts = ", ".join(f"{name} {n['hits']}/{n['questions']}" for name, n in total["by_instrument"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"hits: {total['hits']} of {total['questions']} questions ({total['hit_rate']:.1%}): {parts}",
            f"cases: {total['cases_named']} of {total['cases']} named by at least one instrument, "
            f"{total['cases_named_by_all']} by all that should",
            f"cures: {total['cures_that_work']} of {total['cures_tried']} proposed ones work",
            f"false alarms: {total['false_alarms']} of {total['control_questions']} on {total['controls']} healthy controls",
        ]
    )


def shortened(said: str) -> str:
    """At most ``WIDTH`` characters."""
    return said if len(said) <= WIDTH else said[: WIDTH - 3] + "..."


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of cases and controls")
    parser.add_argument("--instruments", default="postmortem,diagnose,search,startup")
    parser.add_argument("--compare", action="store_true", help="compare as well")
    parser.add_argument("--json", action="store_true", help="write bench/results/sick_models.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    instruments = given.instruments.split(",") + ["compare"] * given.compare
    found = measure(given.only, instruments)
    print(text(found))
    if given.json:
        print(save("sick_models", found))


if __name__ == "__main__":
    main()
