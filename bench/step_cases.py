"""What ``bench/step_overhead.py`` trains: cases, the kernels that are in force, and what a contestant is.

A *case* is a model, a precision and a number of micro-batches. It is composed as the command line composes it, and its
batches are taken once, so that every contestant steps through the same ones.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mprun.compose import compose
from mprun.config import Config
from mprun.data import build_data
from mprun.data.base import Batch
from mprun.models.build import build_model
from mprun.training.build import switches
from mprun.training.env import seed_everything

CLIP, DECAY, SCALE, LR, WEIGHT_DECAY, WARM_UP, NEVER = 1.0, 0.999, 1024.0, 2e-3, 0.05, 10, 1_000_000
MODELS = {
    "tiny": ["model=vit", "dataset=digits", "train.batch_size=64"],
    "5m": ["model=timm", "model.name=vit_tiny_patch16_224", "dataset=synthetic", "dataset.kwargs.image_size=64",
           "dataset.kwargs.examples=128", "train.batch_size=8"],
    "25m": ["model=timm", "model.name=resnet50", "dataset=synthetic", "dataset.kwargs.image_size=64",
            "dataset.kwargs.examples=128", "train.batch_size=4"],
}  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic")
# The scale starts low, so that no step overflows: what a skip costs is not asked here. Borders are out of the way.
COMMON = [
    f"train.clip_norm={CLIP}", f"train.ema.decay={DECAY}", "train.ema.warmup=false", "train.label_smoothing=0.0",
    "train.drop_last=true", f"optimizer.lr={LR}", f"optimizer.weight_decay={WEIGHT_DECAY}", f"train.steps={NEVER}",
    f"train.log_every={NEVER}", f"train.eval_every={NEVER}", f"train.checkpoint_every={NEVER}",
    "schedule.warmup_frac=null", f"schedule.warmup_steps={WARM_UP}", "schedule.final=0.0", "tracking=disabled",
]  # fmt: skip
WINDOWS = 4


@dataclass
class Case:
    """What is trained, on which batches. ``windows`` are gone through in a circle."""

    model: str
    precision: str
    accumulate: int
    config: Config
    device: torch.device
    windows: list[list[Batch]]
    origin: nn.Module

    @property
    def start(self) -> dict[str, Tensor]:
        """Parameters and buffers at the start, by name."""
        named = [*self.origin.named_parameters(), *self.origin.named_buffers()]
        return {name: value.detach() for name, value in named}

    @property
    def dtype(self) -> torch.dtype:
        """What products are computed in."""
        return getattr(torch, self.config.precision.compute_dtype.value)

    @property
    def scaled(self) -> bool:
        """Whether there is a loss scale."""
        return self.precision.startswith("fp16")

    def fresh(self) -> nn.Module:
        """The model in FP32 on the device, in training mode, with the values that every contestant starts from."""
        return copy.deepcopy(self.origin)

    def half_kernels(self) -> bool:
        """Whether FP16 runs on the CPU, where torch's own kernels take many times as long as mprun's."""
        return self.device.type == "cpu" and self.dtype == torch.float16


def make_case(model: str, precision: str, accumulate: int, device: torch.device) -> Case:
    """Compose a case, and put its batches and initial values on the device."""
    words = [*MODELS[model], f"precision={precision}", f"train.accumulate={accumulate}", f"device={device.type}"]
    if precision.startswith("fp16"):
        words.append(f"precision.loss_scale.init={SCALE}")
    config = compose([*words, *COMMON]).config
    seed_everything(config.seed)
    data = build_data(config, device=device)
    batches: Iterator[Batch] = (batch for epoch in range(NEVER) for batch in data.train_batches(epoch, 0))
    windows = [list(islice(batches, accumulate)) for _ in range(WINDOWS)]
    origin = build_model(config.model, data.spec, trust=config.trust).to(device).train()
    return Case(model, precision, accumulate, config, device, windows, origin)


class Kernels:
    """Which CPU kernels and autocast list are in force: ``mprun`` (as in a run of this case), or ``torch``."""

    def __init__(self, case: Case) -> None:
        self.case, self.now, self.stack = case, "torch", ExitStack()

    def use(self, kernels: str) -> bool:
        """Change to ``kernels``; whether that changed anything."""
        if kernels == self.now:
            return False
        self.stack.close()
        if kernels == "mprun":
            self.stack.enter_context(switches(self.case.config, self.case.device))
        self.now = kernels
        return True


class Loop:
    """A contestant: it makes steps, one after the other, from where it stood.

    Attributes:
        name: in the file.
        kernels: under which it runs.
        note: what it does otherwise than asked; ``comparable`` is false where that is another precision.
    """

    name, kernels, note, comparable = "", "torch", "", True

    def __init__(self, case: Case) -> None:
        self.case, self.done = case, 0

    def run(self, count: int) -> tuple[float, float]:
        """Make ``count`` steps; seconds of the clock, to the end of the device's work, and of the processor."""
        self._wait()
        begin, busy = time.perf_counter(), time.process_time()
        self.advance(count)
        self._wait()
        return time.perf_counter() - begin, time.process_time() - busy

    def advance(self, count: int) -> None:
        """Make ``count`` steps."""
        for _ in range(count):
            self.step(self.case.windows[self.done % len(self.case.windows)])
            self.done += 1

    def step(self, window: Sequence[Batch]) -> None:
        """One optimizer step."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """The FP32 truth of every parameter, by the model's names."""
        raise NotImplementedError

    def average(self) -> dict[str, Tensor]:
        """The EMA of every parameter, by the model's names; empty where it cannot be read."""
        return {}

    def _wait(self) -> None:
        if self.case.device.type == "cuda":
            torch.cuda.synchronize()


def decay_groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without, as mprun has it."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def multiplier(done: int) -> float:
    """Of the learning rate of the step after ``done`` steps: a linear warm-up, then half a cosine."""
    if done < WARM_UP:
        return (done + 1) / WARM_UP
    return 0.5 * (1.0 + math.cos(math.pi * (done - WARM_UP + 1) / (NEVER - WARM_UP)))


def distance(a: Loop, b: Loop) -> float:
    """How far apart two contestants are after their steps, relative to the way that both have come: 0 is bit for bit.

    The larger of two numbers: over the parameters, and over their EMA where both can show one.
    """
    start = a.case.start
    found = []
    for mine, yours in ((a.weights(), b.weights()), (a.average(), b.average())):
        if not mine or not yours:
            continue
        assert mine.keys() == yours.keys(), "the contestants have other parameters"
        apart = sum(float((mine[n].double() - yours[n].double()).square().sum()) for n in mine)
        way = sum(float((yours[n].double() - start[n].double()).square().sum()) for n in mine)
        found.append(math.sqrt(apart / way))
    return max(found)
