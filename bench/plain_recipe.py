"""The recipe ``digits/vit_fp16`` in a loop written by hand with torch's and timm's own parts, against mprun.

    python bench/plain_recipe.py [--seeds 0 1 2] [--precision fp16] [--json]

The loop below is what a careful user would write: timm's Vision Transformer, ``timm.optim.create_optimizer_v2``,
``torch.autocast``, ``torch.amp.GradScaler``, ``unscale_``, ``clip_grad_norm_``, cosine with warm-up by ``LambdaLR``. It
shares no code with mprun's training: own data order, own shift augmentation, torch's native CPU half kernels. Only the
hyperparameters and the initialisation (``mprun.models.vit``) are the recipe's. So both must reach the same accuracy
within the spread of their seeds, and anything else would be a bug in one of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, about, about_text, save
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

EPOCHS, BATCH, LR, DECAY, CLIP, SMOOTHING, WARMUP = 60, 64, 2e-3, 0.05, 1.0, 0.1, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--precision", choices=["fp16", "fp32"], default="fp16", help="default: fp16 (slow: native)")
    parser.add_argument("--json", action="store_true", help="write bench/results/plain_recipe.json")
    args = parser.parse_args()
    rows: dict[str, list[float]] = {"plain loop": [], "mprun": []}
    for seed in args.seeds:
        begin = time.perf_counter()
        top1, skipped = plain(seed, half=args.precision == "fp16")
        rows["plain loop"].append(top1)
        print(f"plain loop seed {seed}: {top1:.4f}, {skipped} skipped, {time.perf_counter() - begin:.0f} s", flush=True)
        rows["mprun"].append(ours(seed, half=args.precision == "fp16"))
        print(f"mprun      seed {seed}: {rows['mprun'][-1]:.4f}", flush=True)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    spread = max(max(values) - min(values) for values in rows.values())
    gap = 100 * (medians["mprun"] - medians["plain loop"])
    print(f"medians {medians}; gap {gap:+.2f} points, spread over seeds {100 * spread:.2f} points")
    facts = about(threads=torch.get_num_threads())
    print(about_text(facts))
    if args.json:
        content = {"about": facts, "precision": args.precision, "seeds": args.seeds, "top1": rows, "gap_points": gap}
        print(save("plain_recipe", content))
    return 0


def plain(seed: int, *, half: bool) -> tuple[float, int]:
    """Train by hand. Validation top-1 after the last step, and the number of steps that the scaler skipped."""
    from timm.optim import create_optimizer_v2

    from mprun.models.vit import vit

    torch.manual_seed(seed)
    train, labels, val, answers = data()
    model = vit(input_shape=(1, 8, 8), num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=LR, weight_decay=DECAY)
    steps = EPOCHS * math.ceil(len(train) / BATCH)
    warm = round(WARMUP * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / max(steps - 1 - warm, 1))),
    )
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    skipped = 0
    for _ in range(EPOCHS):
        for ids in torch.randperm(len(train)).split(BATCH):
            with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                logits = model(shifted(train[ids]))
            loss = functional.cross_entropy(logits.float(), labels[ids], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped += 1
            else:
                schedule.step()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=half):
        right = (model(val).argmax(-1) == answers).float().mean()
    return right.item(), skipped


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The documented split: the first 898 images for training, the rest for validation, normalised by the former."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None]
    images = (images - images[:898].mean()) / images[:898].std()
    labels = torch.tensor(bunch.target)
    return images[:898], labels[:898], images[898:], labels[898:]


def shifted(images: Tensor) -> Tensor:
    """Half of the images moved by up to one pixel each way; the border is background."""
    background = images.min().item()
    padded = functional.pad(images, (1, 1, 1, 1), value=background)
    moved = images.clone()
    for i in range(len(images)):
        if torch.rand(()) < 0.5:
            y, x = torch.randint(0, 3, (2,)).tolist()
            moved[i] = padded[i, :, y : y + 8, x : x + 8]
    return moved


def ours(seed: int, *, half: bool) -> float:
    """The recipe through the command line: its last validation top-1."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["recipe=digits/vit_fp16", f"seed={seed}", "tracking=disabled", f"hydra.run.dir={folder}/run"]
        words += [] if half else ["precision=fp32"]
        done = subprocess.run(
            [sys.executable, "-m", "mprun", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"plain_recipe: mprun {' '.join(words)} failed\n{done.stderr}")
        result = json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))
        return float(result["final"]["val/top1"])


if __name__ == "__main__":
    raise SystemExit(main())
