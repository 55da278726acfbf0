"""Training steps on a GPU: do they wait for it, and does the scale go the way that it goes on the CPU?

    python bench/gpu_steps.py sync|trajectory --json FILE [--device cuda|cpu] [--tiny] [--limit SECONDS]

``bench/gpu.py`` calls this; docs/gpu.md says what each section checks and what it writes.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from gpu_section import NEVER, QUIET, Asked, config_of, run_section

from mprun.config import Config
from mprun.data.base import Batch
from mprun.training.build import build, switches
from mprun.training.loop import step, windows
from mprun.training.outcomes import drain
from mprun.training.result import OVERFLOW, StepResult
from mprun.training.run import Run, best_of
from mprun.training.step import eval_step, train_step

# --- no waiting -------------------------------------------------------------------------------------------------------

LOOP = [
    "train.accumulate=2",
    "train.clip_norm=1.0",
    "train.ema.decay=0.99",
    "schedule=cosine",
    f"train.steps={NEVER}",
    *QUIET,
]
BUSY = {
    "resnet": ["model=resnet", "dataset=digits", "dataset.augment=shift", "train.batch_size=32", *LOOP],
    # So many tokens that an embedding sorts them in its backward pass.
    "gpt": [
        "model=gpt",
        "dataset=text",
        f"dataset.root={ROOT / 'README.md'}",
        "train.batch_size=64",
        *LOOP,
        "train.accumulate=1",
    ],
}
WATCHED = [*(("resnet", p) for p in ("fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic")), ("gpt", "fp16_dynamic")]


def sync(asked: Asked) -> dict[str, Any]:
    """Steps in torch's mode in which an operation that waits for the device raises, between two looks of the host.

    With gradient accumulation, clipping, EMA, augmentation, BatchNorm or embeddings, and skips in FP16. As ``train_step`` on
    batches that are there, and as the loop makes them, fetching included.
    """
    found: dict[str, Any] = {"status": "ok", "waits": []}
    if not asked.on_gpu:
        found |= {
            "status": "skipped",
            "reason": "torch tells of waiting on CUDA only; the steps were made all the same",
        }
    for model, policy in WATCHED:
        if asked.tiny and (model, policy) != ("resnet", "fp16_dynamic"):
            continue
        scale = ["precision.loss_scale.init=16777216"] if policy.startswith("fp16") else []
        run = run_of(config_of(asked.device, *BUSY[model], f"precision={policy}", *scale), asked)
        with run as made:
            taken = windows(made)
            ready = [next(taken) for _ in range(2)]
            for window in ready:
                train_step(made.state, window)
            results: list[StepResult] = []
            waits = waiting(asked, partial(steps, made, ready * 3, results))
            step(made, next(taken))  # what the loop does for the first time
            looped = waiting(asked, partial(loop_steps, made, taken, 5))
            if made.pending:
                drain(made)
            found["waits"] += [{"model": model, "policy": policy, "where": where, "error": error}
                               for where, error in (("train_step", waits), ("loop.step", looped)) if error]  # fmt: skip
            found.setdefault("outcomes", {})[f"{model} {policy}"] = [result.read().outcome for result in results]
    if found["waits"]:
        found["status"] = "failed"
    return found


def steps(run: Run, ready: Sequence[list[Batch]], results: list[StepResult]) -> None:
    """A training step on each window."""
    results += [train_step(run.state, window) for window in ready]


def loop_steps(run: Run, taken: Iterator[list[Batch]], count: int) -> None:
    """So many steps of the loop, each of which fetches its window first."""
    for _ in range(count):
        step(run, next(taken))


def waiting(asked: Asked, make: Callable[[], Any]) -> str | None:
    """The error of the first operation in ``make`` that waits for the GPU, with the line that asked for it."""
    if not asked.on_gpu:
        make()
        return None
    torch.cuda.synchronize()
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    torch.cuda.set_sync_debug_mode("error")
    try:
        make()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        trace = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return f"{str(error).splitlines()[0]} at {' '.join(trace[-4:])}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@contextmanager
def run_of(config: Config, asked: Asked) -> Iterator[Run]:
    """A run of ``config`` that is ready to go and has no sinks, inside its switches."""
    with switches(config, asked.device):
        state, data, plan = build(config, asked.device)
        yield Run(config, state, data, plan, [], Path("none"), best_of(config))


# --- the scale's way --------------------------------------------------------------------------------------------------

LATE = 50
TRAJECTORY = ["model=resnet", "dataset=digits", "precision=fp16_dynamic", "precision.loss_scale.init=16777216",
              "precision.loss_scale.growth_interval=25", "train.clip_norm=1.0", "train.ema.decay=0.99", *QUIET]  # fmt: skip


def trajectory(asked: Asked) -> dict[str, Any]:
    """The same FP16 run on the CPU and on the GPU: how the scale moved, and where both arrived.

    Both must find the scale after the same number of skips; later a borderline batch may go either way, so from there on scale
    and loss are held against each other with room, and the accuracies within three points. On the CPU alone torch's own half
    kernels stand in for the GPU.
    """
    steps = 24 if asked.tiny else 200
    sides: dict[str, dict[str, Any]] = {}
    for name, device in (("cpu", torch.device("cpu")), ("gpu", asked.device)):
        kernels = "auto" if device.type == "cuda" else "fast" if name == "cpu" else "native"
        config = config_of(device, *TRAJECTORY, f"train.steps={steps}", f"numerics.cpu_fp16={kernels}")
        with run_of(config, replace(asked, device=device)) as run:
            results = []
            for epoch in range(steps):
                batches = run.data.train_batches(epoch)
                results += [train_step(run.state, [batch]) for batch in islice(batches, steps - len(results))]
                if len(results) == steps:
                    break
            rows = [result.read() for result in results]
            score = eval_step(run.state, run.state.policy, run.data.val_batches())
        late = [row.loss for row in rows[-min(LATE, steps // 2) :] if row.applied]
        sides[name] = {
            "first_skips": next(i for i, row in enumerate(rows) if row.applied),
            "skips": sum(row.outcome == OVERFLOW for row in rows),
            "scales": [row.loss_scale for row in rows],
            "last_loss": sum(late) / max(len(late), 1),
            "top1": score["top1"],
        }
    cpu, gpu = sides["cpu"], sides["gpu"]
    ratio = gpu["scales"][-1] / cpu["scales"][-1]
    close = abs(gpu["last_loss"] - cpu["last_loss"]) <= max(0.2 * cpu["last_loss"], 0.03)
    same = cpu["first_skips"] == gpu["first_skips"] and 0.25 <= ratio <= 4
    good = same and close and abs(gpu["top1"] - cpu["top1"]) <= 0.03
    apart = [i for i, (a, b) in enumerate(zip(cpu["scales"], gpu["scales"], strict=True)) if a != b]
    return {"status": "ok" if good else "failed", "steps": steps, "first_apart": apart[0] if apart else None, **sides}


if __name__ == "__main__":
    raise SystemExit(run_section({"sync": sync, "trajectory": trajectory}, __doc__))
