"""The two loops that ``bench/step_overhead.py`` is about: mprun's own, and the same step written by hand with torch's parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_cases import CLIP, DECAY, LR, NEVER, SCALE, Case, Loop, decay_groups, multiplier
from torch import Tensor, nn

from mprun.data.base import Batch
from mprun.training.build import build
from mprun.training.loop import step
from mprun.training.observe import check_plan, observe
from mprun.training.outcomes import drain
from mprun.training.run import Run, best_of

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


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
