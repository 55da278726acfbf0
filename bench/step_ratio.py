"""How long a step takes in half precision, relative to FP32: median ``perf/step_ms`` of real runs, taken in turns.

    python bench/step_ratio.py [--models vit resnet] [--rounds 5] [--steps 40] [--threads N] [--json]

Contestants per model: ``fp32``, ``bf16``, ``fp16_dynamic``, and ``fp16_dynamic`` with torch's own half kernels
(``numerics.cpu_fp16=native``). In every round each of them trains for ``--steps`` steps through the command line's own
code, in one process, one after the other; a round's number is the median over its steps without the first five, and a
ratio is the median over rounds of ratios within a round. Target: ``fp16_dynamic`` and ``bf16`` at most 1.5 times FP32.

On a GPU ``native`` does not exist and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
from pathlib import Path

import torch
from common import about, about_text, progress, ratio_of_pairs, save

from mprun.cli import main as mprun
from mprun.tracking import read_metrics

TARGET = 1.5
WARM_UP = 5
CONTESTANTS = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp16_dynamic": ["precision=fp16_dynamic"],
    "fp16_native": ["precision=fp16_dynamic", "numerics.cpu_fp16=native"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit", "resnet"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default 40)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="write bench/results/step_ratio.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    contestants = [name for name in CONTESTANTS if not (gpu and name == "fp16_native")]
    rows = []
    for model in args.models:
        times = measure(model, contestants, rounds=args.rounds, steps=args.steps)
        row = {
            "model": model,
            "step_ms": {name: statistics.median(values) for name, values in times.items()},
            "to_fp32": {name: ratio_of_pairs(values, times["fp32"]) for name, values in times.items()},
        }
        rows.append(row)
        print(f"{model:<10}" + "  ".join(f"{n} {row['step_ms'][n]:.1f} ms ({row['to_fp32'][n]:.2f})" for n in times))
    facts = about(threads=None if gpu else torch.get_num_threads(), device=gpu)
    print(about_text(facts))
    if args.json:
        counts = {"rounds": args.rounds, "steps": args.steps}
        print(save("step_ratio", {"about": facts, "target": TARGET, **counts, "rows": rows}))
    judged = [(row, name) for row in rows for name in ("bf16", "fp16_dynamic")]
    late = [f"{row['model']} {name}" for row, name in judged if row["to_fp32"][name] > TARGET]
    print(f"target {TARGET} times fp32: {'missed by ' + ', '.join(late) if late else 'met'}")
    return 0


def measure(model: str, contestants: list[str], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step, one number a round, for every contestant."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in contestants:
            times[name].append(step_ms([f"model={model}", *CONTESTANTS[name]], steps=steps))
            progress(f"{model} round {number + 1}/{rounds} {name}")
    progress("")
    return times


def step_ms(words: list[str], *, steps: int) -> float:
    """Median ``perf/step_ms`` of one run, evaluation and checkpoints kept to its end.

    Raises:
        SystemExit: the run failed.
    """
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        options = [
            f"train.steps={steps}", "train.log_every=1", "train.eval_every=1000000", "train.checkpoint_every=1000000",
            "tracking=disabled", f"hydra.run.dir={folder}{os.sep}run",
        ]  # fmt: skip
        status = mprun([*words, *options])
        if status:
            raise SystemExit(f"step_ratio: mprun {' '.join(words)} ended with status {status}\n{quiet.getvalue()}")
        records = read_metrics(Path(folder, "run"))
    values: list[float] = [record["perf/step_ms"] for record in records if record["kind"] == "train"]
    return statistics.median(values[WARM_UP:] or values)


if __name__ == "__main__":
    raise SystemExit(main())
