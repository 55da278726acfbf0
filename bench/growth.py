"""What grows with what: cost of a step and of everything beside it against six sizes. Nothing may be super-linear.

    python bench/growth.py [--axes modules runs ...] [--rounds 5] [--threads N] [--json]

=========== ==================================================================================================================
parameters  a step of an MLP and a ViT, wider and wider; what follows backward, alone
batch       a step
modules     a step over a chain of small modules (FP32 rules, masters, buffers), the probe, ``modules.json``, building a run
length      records of a run: reading, report, plot, resuming, size of files; pace and memory of a real run
runs        run folders, jobs of a sweep, earlier sweeps, trials of a study
recipes     recipes and precision files
=========== ==================================================================================================================

Every cost is measured at five or more sizes that span a factor of 16 or more, in turns, and its median over the rounds is
fitted by a power of the size on the upper half of the range, and held against a straight line through the three sizes
before the largest. Milliseconds are of the processor: to wait for a busy machine is no growth. Targets: exponent at most 1.1, and
at most 1.25 times the straight line; exponent 0.1 for what must not grow at all. With ``--json`` numbers go to
``bench/results/growth.json`` and a plot for each axis to ``bench/results/growth_<axis>.png``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import growth_files
import growth_steps
import torch
from growth_fit import FLAT, LINEAR, OVER, Row, Series, draw, measure, save_plot, worst

AXES: dict[str, tuple[str, str, Callable[[Path, bool], list[Series]]]] = {
    "parameters": ("Size of the model", "parameters", lambda _, small: growth_steps.parameters(small=small)),
    "batch": ("Batch size", "examples of a batch", lambda _, small: growth_steps.batch(small=small)),
    "modules": ("Number of modules", "modules", lambda _, small: growth_steps.modules(small=small)),
    "length": ("Length of a run", "records, or steps", lambda folder, small: growth_files.length(folder, small=small)),
    "runs": (
        "Number of runs",
        "runs, jobs, sweeps, trials",
        lambda folder, small: growth_files.runs(folder, small=small),
    ),
    "recipes": ("Number of recipes", "files", lambda folder, small: growth_files.recipes(folder, small=small)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--rounds", type=common.positive, default=5, help="default 5")
    parser.add_argument("--threads", type=common.positive, default=1, help="torch threads (default 1: steps are small)")
    parser.add_argument(
        "--small", action="store_true", help="few and small sizes: seconds, and numbers that mean nothing"
    )
    parser.add_argument("--json", action="store_true", help="write bench/results/growth.json and the plots")
    args = parser.parse_args()
    if args.small and args.json:
        parser.error("--small with --json: its numbers mean nothing, so they are not kept")
    if not args.small:
        common.busy_note()
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    for axis in args.axes:
        found = run_axis(axis, rounds=args.rounds, small=args.small)
        rows += found
        print(f"{axis}")
        for row in found:
            print(line(row, judged=not args.small), flush=True)
        if args.json:
            title, xlabel, _ = AXES[axis]
            save_plot(draw(found, title, xlabel), common.RESULTS / f"growth_{axis}.png")
    facts = common.about(threads=args.threads)
    print(common.about_text(facts))
    if args.small:
        print("--small: the sizes are too small for these numbers to mean anything, so nothing is judged")
        return 0
    late = [f"{row.axis}: {row.name}" for row in rows if not row.met]
    print(
        f"target {LINEAR:g} (linear), {OVER:g} of a straight line: {'missed by ' + '; '.join(late) if late else 'met'}"
    )
    if args.json:
        content = {"about": facts, "target": LINEAR, "rounds": args.rounds, "rows": [row.plain() for row in rows]}
        print(common.save("growth", merged(content)))
    return 0


def line(row: Row, *, judged: bool) -> str:
    """A row for people; without a word of targets where it is not ``judged``."""
    if not judged:
        return f"  {row.name:<36} p {row.exponent:5.2f}, {row.over_linear:5.2f} of linear; {row.text}"
    return (
        f"  {row.name:<36} p {row.exponent:5.2f} (at most {row.most:.2f}), {row.over_linear:5.2f} of linear; "
        f"{row.text}{'' if row.met else '  MISSED'}"
    )


def run_axis(axis: str, *, rounds: int, small: bool) -> list[Row]:
    """The rows of one axis, measured in a folder of their own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return measure(axis, AXES[axis][2](Path(folder), small), rounds=rounds)
        finally:
            os.chdir(before)


def merged(content: dict[str, Any]) -> dict[str, Any]:
    """``content`` with the axes that were measured before and not now, and the table of all."""
    now = {row["axis"] for row in content["rows"]}
    old = [row for row in (common.load("growth") or {"rows": []})["rows"] if row["axis"] not in now]
    rows = sorted([*old, *content["rows"]], key=lambda row: list(AXES).index(row["axis"]))
    return {**content, "rows": rows, "table": table(rows)}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each axis and target: the worst cost. ``ratio`` is its exponent, or its bend where that alone misses."""
    found = []
    for axis, (title, _, _) in AXES.items():
        for most in sorted({row["most"] for row in rows if row["axis"] == axis}, reverse=True):
            held = [Row(row["axis"], row["name"], row["unit"], "", most, row["size"], row["cost"]) for row in rows
                    if row["axis"] == axis and row["most"] == most]  # fmt: skip
            steepest = worst(held)
            count, ratio, target = len(held), steepest.exponent, most
            of = f"{count} costs" if count > 1 else "the one cost"
            if most <= FLAT:
                what = f"{title}: what must not grow" + (f", the steepest of {count}" if count > 1 else "")
            elif steepest.met or steepest.exponent > most:
                what = f"{title}: exponent of {of}" + (", the steepest" if count > 1 else "")
            else:  # it is the bend that misses the target
                what = f"{title}: the largest size over a straight line" + (f", worst of {of}" if count > 1 else "")
                ratio, target = steepest.over_linear, OVER
            found.append(
                {
                    "what": what, "measured": f"{steepest.name}, {steepest.text}", "ratio": round(ratio, 2),
                    "target": target, "met": all(row.met for row in held),
                }
            )  # fmt: skip
    return found


if __name__ == "__main__":
    raise SystemExit(main())
