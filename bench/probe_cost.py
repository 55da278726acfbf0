"""What a sampled step costs: with the probe and its record, against the step without it.

    python bench/probe_cost.py [--cases vit resnet gpt large] [--rounds 9] [--every 100] [--threads N] [--json]

In every round a plain step and a sampled one are made by the loop's own code, one after the other, on one state and the same
window; the sampled one includes hooks, reading, and writing the record to ``metrics.jsonl`` and ``probe.jsonl``. The
ratio is the median over rounds of ratios within a round; the share of a run is (ratio - 1) / ``--every``. Targets: at most
2 times a plain step, at most 5 % of a run. Steps in between have no hooks and run the same code as with the probe off.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import about, about_text, progress, ratio_of_pairs, save

from mprun.config import TrackingConfig
from mprun.tracking import JsonlSink, RunInfo
from mprun.training import loop
from mprun.training.build import build, device_of, switches
from mprun.training.run import Run, best_of

TARGET_RATIO, TARGET_SHARE = 2.0, 0.05
WARM_UP = 2
CASES = {
    "vit": ["model=vit", "dataset=digits"],
    "resnet": ["model=resnet", "dataset=digits"],
    "gpt": ["model=gpt", "dataset=text"],
    "large": [
        "model=timm",
        "model.name=resnet50",
        "dataset=synthetic",
        "dataset.kwargs.image_size=64",
        "train.batch_size=32",
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=9, help="default 9")
    parser.add_argument("--every", type=int, default=100, help="attempts from one sample to the next (default 100)")
    parser.add_argument("--precision", default="fp16_dynamic", metavar="NAME")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="write bench/results/probe_cost.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    for case in args.cases:
        plain, sampled, parameters = measure(case, args.precision, rounds=args.rounds)
        ratio = ratio_of_pairs(sampled, plain)
        row = {
            "case": case,
            "parameters": parameters,
            "plain_ms": statistics.median(plain),
            "sampled_ms": statistics.median(sampled),
            "ratio": ratio,
            "share": (ratio - 1) / args.every,
        }
        rows.append(row)
        print(
            f"{case:<8}{parameters / 1e6:6.2f} M  plain {row['plain_ms']:.1f} ms  sampled {row['sampled_ms']:.1f} ms  "
            f"ratio {ratio:.2f}  of a run {row['share']:.2%}"
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = about(threads=None if gpu else torch.get_num_threads(), device=gpu)
    print(about_text(facts))
    late = [row["case"] for row in rows if row["ratio"] > TARGET_RATIO or row["share"] > TARGET_SHARE]
    print(f"targets {TARGET_RATIO:g} times, {TARGET_SHARE:.0%}: {'missed by ' + ', '.join(late) if late else 'met'}")
    if args.json:
        counts = {"rounds": args.rounds, "every": args.every, "precision": args.precision}
        targets = {"ratio": TARGET_RATIO, "share": TARGET_SHARE}
        print(save("probe_cost", {"about": facts, "targets": targets, **counts, "rows": rows}))
    return 0


def measure(case: str, precision: str, *, rounds: int) -> tuple[list[float], list[float], int]:
    """Milliseconds of a plain and of a sampled step, a pair a round, and the number of parameters."""
    times: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        config = configured(case, precision, Path(folder))
        device = device_of(config)
        with switches(config, device):
            state, data, plan = build(config, device)
            sink = JsonlSink()
            run = Run(config, state, data, plan, [sink], Path(folder), best_of(config))
            sink.start(RunInfo(Path(folder), {}, case, 0, None, TrackingConfig(), "bench"))
            window = next(iter(loop.windows(run)))
            for number in range(-WARM_UP, rounds):
                for every in (0, 1) if number % 2 else (1, 0):
                    config.probe.every = every
                    took = step_ms(run, window)
                    if number >= 0:
                        times[every].append(took)
                progress(f"{case} round {number + 1}/{rounds}")
            sink.finish({})
            progress("")
            return times[0], times[1], sum(p.numel() for p in state.model.parameters())


def step_ms(run: Any, window: Any) -> float:
    """One attempt and the host's look at it, as on the CPU after every step."""
    begin = time.perf_counter()
    loop.attempt(run, window)
    loop.drain(run)
    return 1e3 * (time.perf_counter() - begin)


def configured(case: str, precision: str, folder: Path) -> Any:
    """The configuration of a case, as the command line would have it."""
    from mprun.compose import compose

    words = [*CASES[case], f"precision={precision}", "tracking=disabled"]
    if case == "gpt":
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
        words.append(f"dataset.root={folder / 'text.txt'}")
    return compose(words).config


if __name__ == "__main__":
    raise SystemExit(main())
