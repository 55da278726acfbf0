"""Predicted and measured memory of a step, side by side: six models under four policies, on the CPU.

    python bench/memory_estimate.py --json bench/results/memory_estimate.json        two minutes on two cores
    python bench/memory_estimate.py --models vit gpt --policies fp32

* ``saved``      distinct storages that autograd keeps for backward, apart from parameters, buffers and the batch: predicted from
                 shapes, and summed over the real tensors of one forward pass
* ``allocated``  how far memory grows within a step beyond what exists before: predicted, and every allocation and release
                 that torch's CPU allocator reports, added up. It sees what kernels take for themselves, too: the FP32 copies
                 of the CPU's half kernels and reordered tensors of convolutions, which a prediction works out from shapes.

The last rows are the question that the estimate is for: ResNet-50 at batch 256 and 224 x 224. Each is a command in a process of
its own, with the seconds that it took from start to end, and the processor seconds of these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import ROOT, about
from torch import Tensor

from mprun.compose import compose
from mprun.config import Config
from mprun.training.build import build, switches
from mprun.training.env import atomic_write_json
from mprun.training.footprint import predicting
from mprun.training.step import forward_loss, train_step, valid_targets

CPU = torch.device("cpu")
SMALL = ["dataset=synthetic", "dataset.kwargs.examples=32", "dataset.kwargs.val_examples=2", "train.batch_size=16"]
MODELS = {
    "vit": ["model=vit"],
    "resnet": ["model=resnet"],
    "mlp": ["model=mlp"],
    "gpt": ["model=gpt", "dataset=python_docs"],
    "test_vit": ["model=timm", "model.name=test_vit", "dataset.kwargs.image_size=160", *SMALL],
    "test_resnet": ["model=timm", "model.name=test_resnet", "dataset.kwargs.image_size=160", *SMALL],
}
POLICIES = ["fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic"]
LASTING = ("parameters", "masters", "optimizer", "ema", "data", "counters")
RESNET50 = [
    "model=timm",
    "model.name=resnet50",
    "dataset=synthetic",
    "train.batch_size=256",
    "optimizer=adam",
    "device=cpu",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--no-resnet50", action="store_true", help="leave the last row out")
    args = parser.parse_args()
    rows = []
    print(
        f"{'model':<12} {'policy':<20} {'saved MiB':>10} {'measured':>10} {'ratio':>7} "
        f"{'allocated':>10} {'measured':>10} {'ratio':>7}"
    )
    for model in args.models:
        for policy in args.policies:
            row = compare(compose([*MODELS[model], f"precision={policy}"]).config)
            rows.append({"model": model, "policy": policy, **row})
            numbers = [row[key] for key in ("saved_predicted", "saved_measured", "grown_predicted", "grown_measured")]
            saved, real, grown, allocated = (value / 2**20 for value in numbers)
            print(
                f"{model:<12} {policy:<20} {saved:10.3f} {real:10.3f} {saved / real:7.4f} {grown:10.3f} {allocated:10.3f} "
                f"{grown / allocated:7.4f}",
                flush=True,
            )
    worst = max(abs(row["saved_predicted"] / row["saved_measured"] - 1) for row in rows)
    print(f"saved tensors: at most {worst:.2%} off")
    content: dict[str, Any] = {"about": about(threads=torch.get_num_threads()), "rows": rows, "worst_saved": worst}
    if not args.no_resnet50:
        content["resnet50"] = [resnet50(policy) for policy in args.policies]
    if args.json is not None:
        atomic_write_json(args.json, content)
    return 0


def compare(config: Config) -> dict[str, int]:
    """Bytes saved and bytes grown by, predicted and measured."""
    with predicting(config, CPU) as predict:
        found = predict(config.train.batch_size)
    standing = sum(found.counted.highest[kind] for kind in LASTING) + found.counted.highest["buffers"] // 2
    saved, grown = real(config)
    return {
        "saved_predicted": found.counted.saved_bytes,
        "saved_measured": saved,
        "grown_predicted": found.peak_bytes - standing,
        "grown_measured": grown,
        "peak_predicted": found.peak_bytes,
    }


def real(config: Config) -> tuple[int, int]:
    """Bytes that a real forward pass saves, and by how many a real step makes the allocator's account grow."""
    with switches(config, CPU):
        state, data, _ = build(config, CPU)
        window = list(islice(data.train_batches(0), config.train.accumulate))
        kept: dict[int, tuple[Tensor, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor, tensor.untyped_storage().nbytes()
            return tensor

        first = window[0]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward_loss(state, first, valid_targets(first.targets, state.task))
        there = [*state.model.parameters(), *state.model.buffers(), first.inputs, first.targets]
        known = {tensor.untyped_storage()._cdata for tensor in there}
        saved = sum(size for key, (_, size) in kept.items() if key not in known)
        kept.clear()
        train_step(state, window)
        with torch.profiler.profile(profile_memory=True) as profile:
            train_step(state, window)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = grown = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        grown = max(grown, now)
    return saved, grown


def resnet50(policy: str) -> dict[str, Any]:
    """What the command says of ResNet-50, and the seconds that it took from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found.json")
        words = [*RESNET50, f"precision={policy}", "--json", str(target)]
        begin, spent = time.perf_counter(), os.times()
        subprocess.run(
            [sys.executable, "-m", "mprun", "estimate", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
        )
        seconds, now = time.perf_counter() - begin, os.times()
        content = json.loads(target.read_text(encoding="utf-8"))
    found = content["predicted"]
    row = {
        "policy": policy,
        "seconds": seconds,
        "cpu_seconds": now.children_user + now.children_system - spent.children_user - spent.children_system,
        "peak_bytes": found["peak_bytes"],
        "process_bytes": content["process_bytes"],
        "full": found["full_by_category"],
    }
    print(
        f"resnet50 batch 256 {policy:<20} peak {row['peak_bytes'] / 2**30:6.2f} GiB; process "
        f"{row['process_bytes'] / 2**20:.0f} MiB, {seconds:.1f} s, {row['cpu_seconds']:.1f} s of a processor",
        flush=True,
    )
    return row


if __name__ == "__main__":
    raise SystemExit(main())
