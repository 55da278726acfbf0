"""How often ``mprun compare``'s test is wrong: FP32 against FP32 with other seeds, and two policies that it has to catch.

    python bench/compare_false_alarms.py [--json] [--quick]

FP32 against FP32: a pool of runs of the small residual net on digits that differ in nothing but the seed; 40 times two disjoint
groups of 2 to 5 of them are drawn and compared. None is worse than the other, so every ``fail`` is a false alarm.

To be caught: ``fp16_unscaled`` with the loss times 3e-6, whose gradients FP16 cannot hold, and ``bf16_pure`` at a small learning
rate, whose updates BF16 weights lose. Each is compared with FP32 under the same settings, seed by seed as the command does it,
over every choice of 2 and of 3 seeds: every verdict but ``fail`` is a miss.

The runs are those of ``mprun train``, in as many processes as there are cores, one thread each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import about, about_text, progress, save

from mprun.numerics.parity import floor_of, judge

BASE = ["tracking=disabled", "device=cpu", "train.checkpoint_every=100000"]
METRIC, CHANCE, DRAWS = "val/top1", 0.1, 40
CASES = {
    "fp16_unscaled, loss x 3e-6": ("fp16_unscaled", ["train.loss_weight=3e-6"]),
    "bf16_pure, lr 1e-4": ("bf16_pure", ["optimizer.lr=1e-4"]),
}


def main() -> int:
    """Run the pool, draw, and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write bench/results/compare_false_alarms.json")
    parser.add_argument(
        "--quick", action="store_true", help="few and short runs: shows that it works, measures nothing"
    )
    args = parser.parse_args()
    epochs, pool, seeds = (2, 10, 3) if args.quick else (15, 24, 5)
    base = ["model=resnet", f"train.epochs={epochs}", *BASE]
    asked = {("fp32", "", seed): [*base, "precision=fp32", f"seed={seed}"] for seed in range(pool)}
    for case, (policy, words) in CASES.items():
        for precision in ("fp32", policy):
            asked |= {
                (precision, case, seed): [*base, *words, f"precision={precision}", f"seed={seed}"]
                for seed in range(seeds)
            }
    begin = time.perf_counter()
    values = dict(zip(asked, run_all([*asked.values()]), strict=True))
    seconds = time.perf_counter() - begin
    own = {seed: value for (precision, case, seed), value in values.items() if precision == "fp32" and not case}
    mean, spread = statistics.fmean(own.values()), statistics.stdev(own.values())
    print(f"{len(asked)} runs in {seconds:.0f} s; FP32 {100 * mean:.2f} ± {100 * spread:.2f}")
    alarms = {n: dict(Counter(false_alarms(own, n, random.Random(n)))) for n in (2, 3, 4, 5)}
    for n, found in alarms.items():
        rate = found.get("fail", 0) / DRAWS
        print(f"FP32 against FP32, {n} seeds: {found.get('fail', 0)} of {DRAWS} fail ({100 * rate:.1f} %), {found}")
    caught: dict[str, dict[int, dict[str, int]]] = {}
    for case, (policy, _) in CASES.items():
        one, other = ({seed: values[precision, case, seed] for seed in range(seeds)} for precision in ("fp32", policy))
        caught[case] = {n: dict(Counter(verdicts(one, other, n))) for n in (2, 3)}
        means = f"{100 * statistics.fmean(one.values()):.1f} against {100 * statistics.fmean(other.values()):.1f}"
        for n, found in caught[case].items():
            print(f"{case}, {n} seeds: {found.get('fail', 0)} of {sum(found.values())} fail; {means}")
    facts = about(threads=1)
    print(about_text(facts))
    if args.json and not args.quick:
        runs = [{"precision": p, "case": case, "seed": seed, METRIC: v} for (p, case, seed), v in values.items()]
        content = {
            "about": facts,
            "draws": DRAWS,
            "false_alarms": alarms,
            "caught": caught,
            "runs": runs,
            "seconds": seconds,
        }
        print(save("compare_false_alarms", content))
    return 0


def false_alarms(pool: dict[int, float], n: int, draw: random.Random) -> list[str]:
    """Verdicts on two groups of ``n`` runs that are drawn from one pool, 40 times."""
    found = []
    for _ in range(DRAWS):
        chosen = draw.sample(sorted(pool), 2 * n)
        # Other seeds: nothing pairs them.
        found.append(outcome({seed: pool[seed] for seed in chosen[:n]}, {seed: pool[seed] for seed in chosen[n:]}))
    return found


def verdicts(baseline: dict[int, float], candidate: dict[int, float], n: int) -> list[str]:
    """Verdicts over every choice of ``n`` seeds."""
    return [
        outcome({seed: baseline[seed] for seed in chosen}, {seed: candidate[seed] for seed in chosen})
        for chosen in itertools.combinations(sorted(baseline), n)
    ]


def outcome(baseline: dict[int, float], candidate: dict[int, float]) -> str:
    """The verdict with the defaults of ``compare.*``."""
    floor = floor_of(METRIC, [*baseline.values()])
    return judge(baseline, candidate, higher=True, floor=floor, chance=CHANCE).outcome


def run_all(lines: Sequence[list[str]]) -> list[float]:
    """Final validation top-1 of each line of words; NaN for a run that broke down."""
    os.environ["OMP_NUM_THREADS"] = "1"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: list[float] = []
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as workers:
        for value in workers.map(run_one, lines):
            found.append(value)
            progress(f"{len(found)}/{len(lines)} runs")
    progress("")
    return found


def run_one(words: list[str]) -> float:
    """One run of ``mprun train`` in this process, in a folder that is removed afterwards."""
    import json

    from mprun.commands.train import execute
    from mprun.compose import compose
    from mprun.errors import MprunError

    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place, "run")
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                execute(compose(words).config, folder)
            except MprunError:
                return float("nan")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return float(result["final"][METRIC])


if __name__ == "__main__":
    raise SystemExit(main())
