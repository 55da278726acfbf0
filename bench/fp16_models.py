"""What FP16 and BF16 cost on the CPU, model by model: whole training steps beside FP32 and beside torch's own half kernels.

    python bench/fp16_models.py [--cases vit resnet gpt ...] [--rounds 9] [--steps 5] [--threads N] [--no-native] [--json]

Contestants: ``fp32``, ``bf16``, ``fp16`` (``numerics.cpu_fp16=fast``) and ``native`` (the same policy with torch's half
kernels). They start from equal parameters and see the same window. In every round each of them makes ``--steps`` steps
with mprun's ``train_step`` (forward, backward, norm, finite test, optimizer, scale), one contestant after the other; its
number is the median over these steps, and a ratio is the median over rounds of ratios within a round. The native
kernels are so slow that they make one step, in every third round.

Cases: ViT, ResNet and GPT at the project's default sizes, and at 5 million parameters and more. Targets: native at least 9 times
fp16 everywhere; fp16 at most 1.25 times fp32 in the large cases; bf16 at most 0.9 times fp32 in the small ViT and GPT.

FP16 on a GPU has no kernels to choose from: this bench is about the CPU, and runs there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import about, about_text, busy_note, positive, progress, ratio_of_pairs, save
from torch import Tensor

from mprun.config import Config
from mprun.training.build import build, switches
from mprun.training.heap import freed_memory_kept
from mprun.training.state import TrainState
from mprun.training.step import train_step

NATIVE_TARGET, LARGE_TARGET, BF16_TARGET = 9.0, 1.25, 0.9
LARGE = 5_000_000  # parameters from which on LARGE_TARGET counts
NATIVE_EVERY = 3  # rounds
WARM_UP = 2  # steps of every contestant before the first round
CPU = torch.device("cpu")

_IMAGES = ["dataset=synthetic", "dataset.kwargs.image_size=32"]
CASES: dict[str, list[str]] = {
    "vit": ["model=vit", "dataset=digits"],
    "resnet": ["model=resnet", "dataset=digits"],
    "gpt": ["model=gpt", "dataset=python_docs"],
    "vit large": [
        "model=vit", *_IMAGES, "model.kwargs.patch_size=4", "model.kwargs.embed_dim=288", "model.kwargs.depth=6",
        "model.kwargs.num_heads=6", "model.kwargs.mlp_ratio=4.0", "train.batch_size=16",
    ],
    "resnet large": ["model=timm", "model.name=resnet18", *_IMAGES, "train.batch_size=32"],
    "gpt large": [
        "model=gpt", "dataset=python_docs", "model.kwargs.dim=288", "model.kwargs.depth=6", "model.kwargs.heads=6",
        "train.batch_size=16",
    ],
}  # fmt: skip
CONTESTANTS: dict[str, list[str]] = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp16": ["precision=fp16_dynamic", "numerics.cpu_fp16=fast"],
    "native": ["precision=fp16_dynamic", "numerics.cpu_fp16=native"],
}
BF16_JUDGED = ("vit", "gpt")


@dataclass
class Contestant:
    """A model under one policy, with a window of its own copy of the data."""

    config: Config
    state: TrainState
    window: Sequence[Any]
    losses: list[Tensor] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(p.numel() for p in self.state.model.parameters())

    def steps(self, count: int) -> list[float]:
        """Make ``count`` steps, each timed in milliseconds, with the kernels that the configuration asks for."""
        times = []
        with switches(self.config, CPU):
            for _ in range(count):
                begin = time.perf_counter()
                result = train_step(self.state, self.window)
                times.append(1e3 * (time.perf_counter() - begin))
                self.losses.append(result.loss)
        return times


def contestant(words: Sequence[str]) -> Contestant:
    """Build what ``mprun train WORDS`` would train, on the CPU, with the first window of its data."""
    from mprun.compose import compose

    config = compose([*words, "device=cpu", "tracking=disabled"]).config
    with switches(config, CPU):
        state, data, _ = build(config, CPU)
    return Contestant(config, state, [next(iter(data.train_batches(0, 0)))])


def measure(case: str, names: Sequence[str], *, rounds: int, steps: int) -> dict[str, Any]:
    """One row: parameters, median step and ratio to ``fp32`` of every contestant, and fp16 over native."""
    contestants = {name: contestant([*CASES[case], *CONTESTANTS[name]]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    with freed_memory_kept():  # from round to round too, as in one long run
        for name, each in contestants.items():
            progress(f"{case} warm-up {name}")
            each.steps(1 if name == "native" else WARM_UP)
        for number in range(rounds):
            for name, each in contestants.items():
                native = name == "native"
                if native and number % NATIVE_EVERY:
                    continue
                progress(f"{case} round {number + 1}/{rounds} {name}")
                times[name].append(statistics.median(each.steps(1 if native else steps)))
    progress("")
    row: dict[str, Any] = {
        "case": case,
        "parameters": contestants["fp32"].parameters,
        "step_ms": {name: statistics.median(values) for name, values in times.items()},
        "to_fp32": {name: ratio_of_pairs(times[name], times["fp32"]) for name in names if name != "native"},
        "losses": {name: [float(loss) for loss in each.losses[:WARM_UP]] for name, each in contestants.items()},
    }
    if "native" in names:
        row["native_to_fp16"] = ratio_of_pairs(times["native"], times["fp16"][::NATIVE_EVERY])
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The judged ratios, one line each."""
    lines = []

    def judge(row: dict[str, Any], a: str, b: str, ratio: float, target: float, *, at_least: bool) -> None:
        ms = row["step_ms"]
        lines.append({
            "what": f"{row['case']}, {row['parameters'] / 1e6:.2f} M parameters: {a} over {b}",
            "measured": f"a training step takes {ms[a]:.1f} ms in {a} and {ms[b]:.1f} ms in {b}",
            "ratio": ratio,
            "target": target,
            "met": ratio >= target if at_least else ratio <= target,
            "at_least": at_least,
        })  # fmt: skip

    for row in rows:
        if "native_to_fp16" in row:
            judge(row, "native", "fp16", row["native_to_fp16"], NATIVE_TARGET, at_least=True)
        if row["parameters"] >= LARGE:
            judge(row, "fp16", "fp32", row["to_fp32"]["fp16"], LARGE_TARGET, at_least=False)
        if row["case"] in BF16_JUDGED:
            judge(row, "bf16", "fp32", row["to_fp32"]["bf16"], BF16_TARGET, at_least=False)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=positive, default=9, help="default 9")
    parser.add_argument("--steps", type=positive, default=5, help="steps of a contestant in a round (default 5)")
    parser.add_argument("--threads", type=positive, help="torch threads (default: torch's own choice)")
    parser.add_argument("--no-native", action="store_true", help="leave torch's slow half kernels out")
    parser.add_argument("--json", action="store_true", help="write bench/results/fp16_models.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    busy_note()
    names = [name for name in CONTESTANTS if not (args.no_native and name == "native")]
    rows = []
    for case in args.cases:
        row = measure(case, names, rounds=args.rounds, steps=args.steps)
        rows.append(row)
        listed = "  ".join(f"{n} {ms:.1f} ms" + (f" ({row['to_fp32'][n]:.2f})" if n in row["to_fp32"] else "")
                           for n, ms in row["step_ms"].items())  # fmt: skip
        native = f"  native/fp16 {row['native_to_fp16']:.1f}" if "native_to_fp16" in row else ""
        print(f"{case:<13}{row['parameters'] / 1e6:6.2f} M  {listed}{native}", flush=True)
    facts = about(threads=torch.get_num_threads())
    lines = table(rows)
    print(about_text(facts))
    for line in lines:
        bound = "at least" if line["at_least"] else "at most"
        print(f"{line['what']}, {bound} {line['target']:g}: {line['ratio']:.2f}, {'met' if line['met'] else 'missed'}")
    if args.json:
        counts = {"rounds": args.rounds, "steps": args.steps}
        print(save("fp16_models", {"about": facts, **counts, "rows": rows, "table": lines}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
