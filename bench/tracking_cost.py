"""What tracking costs a training step: one run without any sink, with ``metrics.jsonl`` and console, and with W&B offline too.

    python bench/tracking_cost.py [--model resnet] [--rounds 5] [--steps 150] [--threads N] [--json]

For ``train.log_every`` 1 and 10, in every round each contestant trains for ``--steps`` steps in one process, one after
the other. A round's number is the time from the end of one step to the end of the last, logging and fetching included, over
the steps in between, without the first ten; a share is the median over rounds of the difference within a round, relative
to the run without sinks. W&B's own thread works meanwhile, so what it takes from the training loop is in it. Target: at most
5 % of a step for everything together.

What W&B takes once a run, at the start and at the end, is listed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import about, about_text, progress, ratio_of_pairs, save

import mprun.tracking
from mprun.cli import main as command
from mprun.tracking.wandb_sink import WandbSink
from mprun.training import loop

TARGET = 0.05
WARM_UP = 10
LOG_EVERY = (1, 10)
CONTESTANTS = {"none": "disabled", "jsonl": "disabled", "offline": "offline"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run (default 150)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="write bench/results/tracking_cost.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows, once = [], Once()
    for log_every in LOG_EVERY:
        times = measure(args.model, log_every, rounds=args.rounds, steps=args.steps, once=once)
        row = {
            "log_every": log_every,
            "step_ms": {name: statistics.median(values) for name, values in times.items()},
            "share": {name: ratio_of_pairs(values, times["none"]) - 1 for name, values in times.items()},
        }
        rows.append(row)
        parts = [f"{name} {row['step_ms'][name]:.2f} ms ({row['share'][name]:+.1%})" for name in times]
        print(f"log_every={log_every:<3} " + "  ".join(parts))
    print(f"once a run: start {statistics.median(once.start_s):.2f} s, finish {statistics.median(once.finish_s):.2f} s")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = about(threads=None if gpu else torch.get_num_threads(), device=gpu)
    print(about_text(facts))
    late = [f"log_every={row['log_every']}" for row in rows if row["share"]["offline"] > TARGET]
    print(f"target {TARGET:.0%} of a step: {'missed with ' + ', '.join(late) if late else 'met'}")
    if args.json:
        fixed = {"start_s": statistics.median(once.start_s), "finish_s": statistics.median(once.finish_s)}
        counts = {"model": args.model, "rounds": args.rounds, "steps": args.steps}
        print(save("tracking_cost", {"about": facts, "target": TARGET, **counts, "once": fixed, "rows": rows}))
    return 0


class Once:
    """What W&B took at the start and at the end of each run, in seconds."""

    def __init__(self) -> None:
        self.start_s: list[float] = []
        self.finish_s: list[float] = []


def measure(model: str, log_every: int, *, rounds: int, steps: int, once: Once) -> dict[str, list[float]]:
    """Milliseconds a step, one number a round, for every contestant."""
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name, mode in CONTESTANTS.items():
            words = [f"model={model}", f"tracking={mode}", f"train.log_every={log_every}", f"train.steps={steps}"]
            times[name].append(step_ms(words, sinks=name != "none", once=once))
            progress(f"log_every={log_every} round {number + 1}/{rounds} {name}")
    progress("")
    return times


def step_ms(words: list[str], *, sinks: bool, once: Once) -> float:
    """Mean time of a step with everything that follows it, evaluation and checkpoints left to the end of the run.

    Raises:
        SystemExit: the run failed.
    """
    ends: list[float] = []
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        options = ["train.eval_every=1000000", "train.checkpoint_every=1000000", f"hydra.run.dir={folder}{os.sep}run"]
        with timed(ends, once, sinks=sinks):
            status = command([*words, *options])
    if status:
        raise SystemExit(f"tracking_cost: mprun {' '.join(words)} ended with status {status}\n{quiet.getvalue()}")
    counted = ends[WARM_UP:] if len(ends) > WARM_UP + 1 else ends
    return 1e3 * (counted[-1] - counted[0]) / (len(counted) - 1)


@contextlib.contextmanager
def timed(ends: list[float], once: Once, *, sinks: bool) -> Iterator[None]:
    """Note when each step of the loop ends, and how long W&B's start and finish take; without sinks where so asked."""
    step, build = loop.step, mprun.tracking.build_sinks
    start, finish = WandbSink.start, WandbSink.finish

    def noted_step(*given: Any) -> None:
        step(*given)
        ends.append(time.perf_counter())

    def noted(action: Any, seconds: list[float]) -> Any:
        def run(*given: Any) -> None:
            begin = time.perf_counter()
            action(*given)
            seconds.append(time.perf_counter() - begin)

        return run

    changed: list[tuple[Any, str, Any]] = [
        (loop, "step", noted_step),
        (WandbSink, "start", noted(start, once.start_s)),
        (WandbSink, "finish", noted(finish, once.finish_s)),
    ]
    changed += [] if sinks else [(mprun.tracking, "build_sinks", lambda _: [])]
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        loop.step, mprun.tracking.build_sinks = step, build
        WandbSink.start, WandbSink.finish = start, finish  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
