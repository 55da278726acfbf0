"""What the whole training step of mprun costs beside the same step written by hand, and beside other trainers.

    python bench/step_overhead.py [--models tiny 5m 25m] [--precisions fp32 ...] [--accumulate 1 4] [--rounds N] [--json [FILE]]
    python bench/step_overhead.py --quick --json FILE       the pairs with the plain loop alone, in under a minute
    .venv-peers/bin/python bench/step_overhead.py --json    with the peers too (``bench/setup_peers.sh`` makes that folder)

``mprun`` is ``mprun.training.loop.step`` on a run that is composed, built and looked at as ``mprun train`` does it, in the
same switches; results are read after every step on the CPU and at the end of a block on a GPU, as in life. Logging,
evaluation and checkpoints are out of the way. ``plain`` is the loop of a careful user: autocast or FP32 masters,
``GradScaler``, ``clip_grad_norm_``, fused AdamW, a rate per step, an FP32 EMA with ``torch._foreach_lerp_``; it reads its loss as
often. The peers that can be imported are in ``peer_loops.py``. All start from the same weights and step through the same
batches, which are on the device already, in one process, with the garbage collector as it is.

Models: ``tiny`` is the default ViT on the digits (136 k parameters, batch 64); ``5m`` is timm's ViT-Ti (batch 8) and ``25m`` its
ResNet-50 (batch 4), on 64 x 64 images. A step clips to 1.0 and keeps an EMA (decay 0.999); the rate warms up and then
follows a cosine. The loss scale starts so low that no step overflows.

Before anything is timed, mprun and ``plain`` make three steps, under the same kernels: parameters and EMA must be equal, bit
for bit in FP32 and BF16 on the CPU, otherwise within a tolerance. If they are not, the bench stops.

Kernels. torch computes FP16 on the CPU so slowly that a comparison would say nothing of the loops. So in FP16 rows
``plain`` and every peer run under mprun's kernels and autocast list (``plain_kernels: mprun``): the ratio is the loop's cost. A
full measurement adds the plain loop on torch's own kernels (``torch_ms``, ``ratio_to_torch``). In FP32 and BF16 rows, and
on a GPU, nothing of mprun is installed while the others run (``plain_kernels: torch``), but for the C library's
thresholds: mprun sets them on the CPU and nobody can take them back, so the others' steps gain from them too.

Contestants take turns in short blocks, whose order rotates; after a change of kernels one step is not counted. Ratios
are medians over rounds of ratios within a round (``ratio of pairs``), so that they may differ a little from the quotient of the
median milliseconds beside them. ``cpu_ratio_to_plain`` is the same of processor time: on a busy machine,
with one thread, it tells more than the clock. Targets: at most 1.00 times ``plain`` at 25m, 1.03 at 5m and tiny, and below
every peer.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import about, about_text, busy_note, positive, progress, ratio_of_pairs, save, unwritable
from peer_loops import PEERS, importable
from step_cases import MODELS, PRECISIONS, Case, Kernels, Loop, distance, make_case
from step_loops import Mprun, Plain

from mprun.training.env import atomic_write_json

TARGETS = {"tiny": 1.03, "5m": 1.03, "25m": 1.00}
CHECKED = 3
# How far two contestants may be apart, as a part of the way that they have come: after one step, and after CHECKED. Without
# a scale not at all. With one, unscaling and clipping round in another order: one bit of a weight, which the cast to half
# makes a different gradient, of which AdamW makes a full step where it is small. (On a GPU, kernels add up in any order.)
TOLERANCE = (1e-3, 0.1)
# Peers run on other kernels and lists, have another first step of the EMA, and so on: this finds a step that is not made.
PEER_TOLERANCE = 0.3
# In a full measurement a round is a block of steps by everyone. Seconds that the blocks of one contestant take at least.
BLOCK_S, QUICK_BLOCK_S = 0.4, 0.12
ROUNDS, QUICK_ROUNDS, NATIVE_ROUNDS = 11, 7, 3
# Seconds of a quick measurement over all rows, from the composing of the first case; two rounds of each are made in any case.
QUICK_S, LEAST_ROUNDS = 48.0, 2
# How much of what is left of it a row takes, beside the rows that follow.
QUICK_SHARE = {"tiny": 2.0, "5m": 2.5, "25m": 4.0}
LEGEND = (
    "ms: medians over rounds; ratio of pairs: mprun to plain within a round, the median over rounds "
    "(it need not be the quotient of the medians)"
)


@dataclass
class Times:
    """Seconds a step of one contestant, one number a round: by the clock, and of the processor."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device({"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(args.device, args.device))
    busy_note()
    print(LEGEND, flush=True)
    rows, asked = [], cases(args)
    deadline = time.perf_counter() + QUICK_S if args.quick else math.inf
    for number, (model, precision, accumulate) in enumerate(asked):
        until = share(asked[number:], now=time.perf_counter(), deadline=deadline)
        row = measure_case(model, precision, accumulate, device, args, until)
        rows.append(row)
        print(line(row), flush=True)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    facts = about(threads=None if gpu else torch.get_num_threads(), device=gpu)
    table = judged(rows)
    for entry in table:
        print(
            f"{entry['what']}: {entry['ratio']:.3f}, target {entry['target']:.2f}: {'met' if entry['met'] else 'missed'}"
        )
    print(about_text(facts))
    if args.json is not None:
        content = {"about": facts, "quick": args.quick, "rows": rows, "table": table}
        if args.json:
            atomic_write_json(Path(args.json), content)
        else:
            print(save("step_overhead", content))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="default: all")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, help="default: all")
    parser.add_argument(
        "--accumulate", nargs="+", type=positive, metavar="K", help="micro-batches a step (default 1 4)"
    )
    parser.add_argument("--rounds", type=positive, help=f"default {ROUNDS}; {QUICK_ROUNDS} with --quick")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="default: all that can be imported")
    parser.add_argument("--no-peers", action="store_true", help="the plain loop alone")
    parser.add_argument("--threads", type=positive, help="torch threads (default: torch's own choice)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--quick", action="store_true", help="the plain loop alone, short; accumulate 1, and 4 for tiny"
    )
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="default bench/results/step_overhead.json")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; cpu and auto are possible")
    if args.peers and (args.quick or args.no_peers):
        parser.error(
            f"--peers with {'--quick' if args.quick else '--no-peers'}, which leaves them out: give one of both"
        )
    if absent := [name for name in args.peers or [] if name not in importable()]:
        there = ", ".join(importable()) or "none"
        parser.error(f"--peers {' '.join(absent)}: not installed here (there: {there}); bench/setup_peers.sh gets them")
    if args.json and (why := unwritable(Path(args.json))):
        parser.error(f"--json {why}")
    return args


def cases(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Model, precision and micro-batches of every row."""
    counts = {model: args.accumulate or ([1] if args.quick and model != "tiny" else [1, 4]) for model in args.models}
    return [(model, p, k) for model in args.models for k in counts[model] for p in args.precisions]


def share(left: Sequence[tuple[str, str, int]], *, now: float, deadline: float) -> float:
    """Until when the first of the rows that are ``left`` may take, so that all of them end at ``deadline``."""
    if math.isinf(deadline):
        return deadline
    part = QUICK_SHARE[left[0][0]] / sum(QUICK_SHARE[model] for model, _, _ in left)
    return now + max(deadline - now, 0.0) * part


def measure_case(
    model: str, precision: str, accumulate: int, device: torch.device, args: argparse.Namespace, until: float
) -> dict[str, Any]:
    """One row: everybody's times on one case, after mprun and the plain loop were seen to do the same."""
    progress(f"{model} {precision} x{accumulate}")
    case = make_case(model, precision, accumulate, device)
    gc.collect()
    gc.freeze()  # what is there already is not looked through again, whoever's step it is
    kernels = Kernels(case)
    try:
        kernels.use("mprun")
        mprun, plain = Mprun(case), Plain(case, kernels="mprun" if case.half_kernels() else "torch")
        first, last = check(mprun, plain)
        others = peers(case, mprun, kernels, args)
        loops: list[Loop] = [mprun, plain, *(peer for peer, _ in others.values())]
        times = take_turns(loops, kernels, args, until)
        row = summary(case, loops, times) | {"difference_after_1": first, f"difference_after_{CHECKED}": last}
        for name, (_, apart) in others.items():
            row["peers"][name][f"difference_after_{CHECKED}"] = apart
        if case.half_kernels() and not args.quick:
            row |= on_torch_kernels(case, mprun, kernels)
        mprun.check_counters()
    finally:
        kernels.use("torch")
        gc.unfreeze()
    return row


def check(mprun: Mprun, plain: Plain) -> tuple[float, float]:
    """Make :data:`CHECKED` steps by both; how far apart they are after the first and after the last.

    Raises:
        SystemExit: farther than the tolerance, so that they do not do the same work.
    """
    found = []
    for count in (1, CHECKED - 1):
        mprun.advance(count)
        plain.advance(count)
        found.append(distance(mprun, plain))
    case = mprun.case
    exact = case.device.type == "cpu" and not case.scaled
    for apart, allowed in zip(found, (0.0, 0.0) if exact else TOLERANCE, strict=True):
        if not apart <= allowed:
            raise SystemExit(
                f"step_overhead: {case.model} {case.precision}: mprun and the plain loop are {found} of their way apart"
            )
    return found[0], found[1]


def peers(case: Case, mprun: Mprun, kernels: Kernels, args: argparse.Namespace) -> dict[str, tuple[Loop, float]]:
    """The peers that can be had, after as many steps as mprun has made, and how far apart from it they are.

    Raises:
        SystemExit: one of them went another way.
    """
    if args.quick or args.no_peers or case.config.precision.mode.value == "master":
        return {}
    found: dict[str, tuple[Loop, float]] = {}
    for name in args.peers or importable():
        peer = PEERS[name][1](case)
        kernels.use(peer.kernels)
        peer.advance(CHECKED)
        apart = distance(mprun, peer)
        if not apart <= PEER_TOLERANCE:
            raise SystemExit(
                f"step_overhead: {case.model} {case.precision}: {name} is {apart:.2g} of its way apart from mprun"
            )
        found[name] = peer, apart
    return found


def take_turns(loops: Sequence[Loop], kernels: Kernels, args: argparse.Namespace, until: float) -> dict[str, Times]:
    """Rounds of one block by everyone, in an order that rotates; those beyond :data:`LEAST_ROUNDS` end before ``until``."""
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    once = max(turn(loop, kernels, 1).wall[0] for loop in loops)
    steps = min(max(math.ceil((QUICK_BLOCK_S if args.quick else BLOCK_S) / once), 1), 20)
    times = {loop.name: Times() for loop in loops}
    for number in range(rounds):
        begin, start = time.perf_counter(), number % len(loops)
        for loop in [*loops[start:], *loops[:start]]:
            progress(
                f"{loop.case.model} {loop.case.precision} x{loop.case.accumulate} {number + 1}/{rounds} {loop.name}"
            )
            taken = turn(loop, kernels, steps)
            times[loop.name].wall += taken.wall
            times[loop.name].cpu += taken.cpu
        now = time.perf_counter()
        if number + 1 >= LEAST_ROUNDS and now + (now - begin) > until:
            break
    progress("")
    return times


def turn(loop: Loop, kernels: Kernels, steps: int) -> Times:
    """One block of steps, under the contestant's kernels."""
    if kernels.use(loop.kernels):
        loop.advance(1)
    gc.collect()
    wall, cpu = loop.run(steps)
    return Times([wall / steps], [cpu / steps])


def summary(case: Case, loops: Sequence[Loop], times: dict[str, Times]) -> dict[str, Any]:
    """A row of the file."""
    mprun, plain = times["mprun"], times["plain"]
    return {
        "model": case.model,
        "precision": case.precision,
        "accumulate": case.accumulate,
        "parameters": sum(value.numel() for value in loops[0].weights().values()),
        "rounds": len(mprun.wall),
        "step_ms": 1e3 * statistics.median(mprun.wall),
        "plain_ms": 1e3 * statistics.median(plain.wall),
        "ratio_to_plain": ratio_of_pairs(mprun.wall, plain.wall),
        "cpu_ratio_to_plain": ratio_of_pairs(mprun.cpu, plain.cpu),
        "plain_kernels": loops[1].kernels,
        "peers": {
            loop.name: {
                "ms": 1e3 * statistics.median(times[loop.name].wall),
                "ratio_mprun_to_peer": ratio_of_pairs(mprun.wall, times[loop.name].wall),
                "cpu_ratio_mprun_to_peer": ratio_of_pairs(mprun.cpu, times[loop.name].cpu),
                "note": loop.note,
                "comparable": loop.comparable,
            }
            for loop in loops[2:]
        },
    }


def on_torch_kernels(case: Case, mprun: Mprun, kernels: Kernels) -> dict[str, Any]:
    """The plain loop on torch's own half kernels, in a few pairs of one step."""
    native = Plain(case, kernels="torch")
    pairs = [(turn(mprun, kernels, 1).wall[0], turn(native, kernels, 1).wall[0]) for _ in range(NATIVE_ROUNDS)]
    ours, theirs = zip(*pairs, strict=True)
    return {"torch_ms": 1e3 * statistics.median(theirs), "ratio_to_torch": ratio_of_pairs(ours, theirs)}


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    name = f"{row['model']:<5}{row['precision']:<20} x{row['accumulate']}"
    text = (
        f"{name} {row['step_ms']:8.2f} ms, plain {row['plain_ms']:8.2f} ms, ratio of pairs {row['ratio_to_plain']:.3f}"
    )
    text += f" (processor {row['cpu_ratio_to_plain']:.3f})"
    for peer, found in row["peers"].items():
        mark = "" if found["comparable"] else "*"
        text += f"  {peer}{mark} {found['ms']:.2f} ms ({found['ratio_mprun_to_peer']:.3f})"
    return text + (f"  torch's kernels {row['torch_ms']:.1f} ms" if "torch_ms" in row else "")


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What answers a target: the slowest ratio of every model, and the closest peer."""
    table = []
    for model in dict.fromkeys(row["model"] for row in rows):
        worst = max((row for row in rows if row["model"] == model), key=lambda row: row["ratio_to_plain"])
        table.append(entry(f"training step, {model}, beside a loop by hand", worst, worst["ratio_to_plain"], "plain",
                           worst["plain_ms"], TARGETS[model]))  # fmt: skip
    compared = [(row, name, peer) for row in rows for name, peer in row["peers"].items() if peer["comparable"]]
    for name in dict.fromkeys(name for _, name, _ in compared):
        row, _, peer = max((c for c in compared if c[1] == name), key=lambda c: c[2]["ratio_mprun_to_peer"])
        table.append(entry(f"training step beside {name}", row, peer["ratio_mprun_to_peer"], name, peer["ms"], 1.0))
    return table


def entry(what: str, row: dict[str, Any], ratio: float, other: str, ms: float, target: float) -> dict[str, Any]:
    """A row of the table, in words."""
    where = f"{row['model']} {row['precision']}, {row['accumulate']} micro-batch{'es' if row['accumulate'] > 1 else ''}"
    measured = f"worst of all cases, {where}: mprun {row['step_ms']:.2f} ms, {other} {ms:.2f} ms"
    return {"what": what, "measured": measured, "ratio": ratio, "target": target, "met": ratio <= target}


if __name__ == "__main__":
    raise SystemExit(main())
