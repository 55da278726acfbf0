"""The contestants of ``bench/step_overhead.py`` that need torch alone: mprun's own loop, and the same step written by hand.

A *case* is a model, a precision and a number of micro-batches. It is composed as the command line composes it, and its
batches are taken once, so that every contestant steps through the same ones.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.compose import compose
from mprun.config import Config
from mprun.data import build_data
from mprun.data.base import Batch
from mprun.models.build import build_model
from mprun.training.build import build, switches
from mprun.training.env import seed_everything
from mprun.training.loop import step
from mprun.training.observe import check_plan, observe
from mprun.training.outcomes import drain
from mprun.training.run import Run, best_of

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
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
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
    """A contestant: :meth:`run` makes steps, one after the other, from where it stood."""

    name, kernels, note = "", "torch", ""

    def __init__(self, case: Case) -> None:
        self.case, self.done = case, 0

    def run(self, count: int) -> float:
        """Make ``count`` steps; seconds of the clock, to the end of the device's work."""
        from time import perf_counter

        self._wait()
        begin = perf_counter()
        for _ in range(count):
            self.step(self.case.windows[self.done % len(self.case.windows)])
            self.done += 1
        self._wait()
        return perf_counter() - begin

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


class Mprun(Loop):
    """``mprun.training.loop.step`` on a run that is built, and looked at, as ``mprun train`` does it."""

    name, kernels = "mprun", "mprun"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        config = case.config
        state, data, plan = build(config, case.device)
        assert all(torch.equal(value, case.start[name]) for name, value in state.named_truth()), "other weights"
        # No end of an epoch either: the batches are taken already.
        plan = dataclasses.replace(plan, batches_per_epoch=NEVER, windows_per_epoch=NEVER)
        self.inner = Run(config, state, data, plan, [], Path("none"), best_of(config))
        check_plan(state, observe(state, case.windows[0][0]))

    def step(self, window: Sequence[Batch]) -> None:
        """What ``fit`` calls."""
        step(self.inner, list(window))

    def _wait(self) -> None:
        if self.inner.pending:
            drain(self.inner)
        super()._wait()

    def weights(self) -> dict[str, Tensor]:
        """What the optimizer owns."""
        return {name: value.detach() for name, value in self.inner.state.weights}

    def average(self) -> dict[str, Tensor]:
        """Out of the shadow."""
        ema = self.inner.state.ema
        assert ema is not None, "COMMON has an EMA"
        return {name: ema.shadow[name] for name in self.weights()}

    def check_counters(self) -> None:
        """Every step was applied: a skip would be less work, or more."""
        counters = self.inner.state.counters
        assert counters.applied == counters.attempts == self.done, f"{counters} after {self.done} steps"


class Plain(Loop):
    """The step as a careful user writes it by hand with torch's parts.

    Args:
        kernels: ``mprun`` or ``torch``: where FP16 runs on the CPU, under whose kernels.
    """

    name = "plain"

    def __init__(self, case: Case, *, kernels: str = "torch") -> None:
        super().__init__(case)
        self.kernels = kernels
        self.model = case.fresh()
        self.master = case.config.precision.mode.value == "master"
        named = list(self.model.named_parameters())
        self.halves: list[Tensor] = []
        self.truths: list[Tensor] = []
        if self.master:
            values = {name: p.detach().clone() for name, p in named}
            halve(self.model, case.dtype)
            named = [(n, p if p.dtype == torch.float32 else nn.Parameter(values[n])) for n, p in named]
            pairs = [(p, t) for p, (_, t) in zip(self.model.parameters(), named, strict=True) if p is not t]
            self.halves, self.truths = [p for p, _ in pairs], [t for _, t in pairs]
        self.named = named
        self.params = [p for _, p in named]
        self.optimizer = torch.optim.AdamW(decay_groups(self.params), lr=LR, fused=True)
        self.scaler = torch.amp.GradScaler(case.device.type, init_scale=SCALE, enabled=case.scaled)
        floats = [b for b in self.model.buffers() if b.is_floating_point()]
        self.averaged = [*(p.detach() for p in self.params), *floats]
        self.copied = [b for b in self.model.buffers() if not b.is_floating_point()]
        self.shadow = [t.clone() for t in self.averaged]
        self.shadow_copied = [t.clone() for t in self.copied]

    def step(self, window: Sequence[Batch]) -> None:
        """The loop's body."""
        total = torch.zeros((), device=self.case.device)
        for batch in window:
            inputs = batch.inputs.to(self.case.dtype) if self.master else batch.inputs
            with self.region():
                output = self.model(inputs)
            loss = F.cross_entropy(output.float(), batch.targets) / len(window)
            self.scaler.scale(loss).backward()
            total += loss.detach()
            if self.master:
                self.collect()
        self.scaler.unscale_(self.optimizer) if self.case.scaled else None
        torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * multiplier(self.done)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            if self.halves:
                torch._foreach_copy_(self.halves, self.truths)
            torch._foreach_lerp_(self.shadow, self.averaged, 1 - DECAY)
            if self.copied:
                torch._foreach_copy_(self.shadow_copied, self.copied)
        self.optimizer.zero_grad(set_to_none=True)
        if self.case.device.type == "cpu":
            total.item()

    def region(self) -> Any:
        """Autocast, in the modes that have it."""
        if self.master or self.case.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.case.device.type, dtype=self.case.dtype)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the half gradients to those of the masters."""
        for half, truth in zip(self.halves, self.truths, strict=True):
            if half.grad is not None:
                truth.grad = half.grad.float() if truth.grad is None else truth.grad.add_(half.grad)
                half.grad = None

    def weights(self) -> dict[str, Tensor]:
        """What the optimizer owns."""
        return {name: value.detach() for name, value in self.named}

    def average(self) -> dict[str, Tensor]:
        """Out of the shadow."""
        return {name: shadow for (name, _), shadow in zip(self.named, self.shadow, strict=False)}


def halve(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast ``model`` to ``dtype`` in place, but for its normalisation layers, which compute in FP32 on cast inputs."""
    for module in model.modules():
        if isinstance(module, NORMS):
            module.forward = _fp32_inside(module.forward)  # type: ignore[method-assign]
            continue
        for p in module.parameters(recurse=False):
            p.data = p.data.to(dtype)


def _fp32_inside(forward: Any) -> Any:
    return lambda x: forward(x.float()).to(x.dtype)


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
