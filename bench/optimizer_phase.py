"""What follows backward, on 25 M parameters: unscale, finite test, norm, clip, AdamW, EMA, scale update.

    python bench/optimizer_phase.py [--rounds 15] [--model resnet50] [--threads N] [--json]

Two contestants, in turns, on equal gradients of a real model's shapes (timm's, random weights):

* ``plain``   what a careful loop does with torch's parts: ``GradScaler.unscale_``, ``clip_grad_norm_``, ``GradScaler.step``
              (fused AdamW), ``GradScaler.update``, EMA by ``torch._foreach_lerp_``
* ``mprun``   the functions of ``mprun/training/step.py`` and ``ema.py``, called as ``train_step`` calls them: no pass of its own
              for unscaling and none for clipping, but one factor that the fused kernel divides by; the finite test reads
              the norm; the EMA is one fused call that obeys the same flag

Before they are timed, both are checked to give the same parameters and shadows, and a skip to move nothing. Target: ``mprun`` at
most 0.8 of ``plain``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import about, about_text, progress, ratio_of_pairs, save
from omegaconf import OmegaConf
from torch import Tensor, nn

from mprun.config import Config
from mprun.config_check import to_config
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import WindowSums, gradient_norm, judge, optimizer_step

TARGET = 0.8
CLIP, DECAY, SCALE, LR, WEIGHT_DECAY = 1.0, 0.999, 65536.0, 1e-3, 0.05
CONFIG = {
    "precision.name": "fp16_dynamic", "precision.mode": "autocast", "precision.compute_dtype": "float16",
    "precision.loss_scale.kind": "dynamic", "precision.loss_scale.init": SCALE, "train.clip_norm": CLIP,
    "train.ema.decay": DECAY, "train.ema.warmup": False, "optimizer.lr": LR, "optimizer.weight_decay": WEIGHT_DECAY,
}  # fmt: skip


@dataclass
class Clock:
    """Milliseconds by part. A part is timed up to the end of the device's work on it."""

    cuda: bool
    parts: dict[str, float] = field(default_factory=dict)
    last: float = 0.0

    def start(self) -> None:
        """Begin a measurement."""
        self.parts, self.last = {}, self._now()

    def part(self, name: str) -> None:
        """Since the last call, this is what was done."""
        now = self._now()
        self.parts[name] = self.parts.get(name, 0.0) + 1e3 * (now - self.last)
        self.last = now

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Contestant:
    """A model with its own gradients, which :meth:`load` fills and :meth:`run` consumes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = [p for p in model.parameters() if p.requires_grad]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.grads: list[Tensor] = [p.grad for p in self.params if p.grad is not None]

    def load(self, grads: list[Tensor]) -> None:
        """Set the scaled gradients."""
        for p, own in zip(self.params, self.grads, strict=True):
            p.grad = own
        torch._foreach_copy_(self.grads, grads)

    def run(self, clock: Clock) -> None:
        """The phase, once."""
        raise NotImplementedError

    def shadows(self) -> list[Tensor]:
        """The EMA of the parameters, in their order."""
        raise NotImplementedError


class Plain(Contestant):
    """torch's own parts."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self.optimizer = adamw(model)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        self.scaler.scale(torch.zeros((), device=device))  # makes its tensors
        self.shadow = [p.detach().clone() for p in self.params]

    def run(self, clock: Clock) -> None:
        """One call of torch's for each part."""
        self.scaler.unscale_(self.optimizer)
        clock.part("unscale")
        torch.nn.utils.clip_grad_norm_(self.params, CLIP)
        clock.part("norm and clip")
        self.scaler.step(self.optimizer)
        clock.part("AdamW")
        self.scaler.update()
        clock.part("scale")
        with torch.no_grad():
            torch._foreach_lerp_(self.shadow, [p.detach() for p in self.params], 1 - DECAY)
        clock.part("EMA")

    def shadows(self) -> list[Tensor]:
        """As kept by this class."""
        return self.shadow


class Ours(Contestant):
    """The functions of mprun, in the order of ``train_step``."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self.state = build(model, device)
        self.loss = torch.zeros((), device=device)
        no, one = torch.zeros((), dtype=torch.bool, device=device), torch.ones((), dtype=torch.int64, device=device)
        self.sums = WindowSums(self.loss, one, one, no, no, one, 1)

    def run(self, clock: Clock) -> None:
        """The calls of ``train_step`` after backward."""
        state = self.state
        norm, bad_grad = gradient_norm(state, self.grads)
        clock.part("norm")
        verdict = judge(state, self.sums, bad_grad)
        clock.part("verdict")
        optimizer_step(state, self.grads, norm=norm, lr=torch.full_like(norm, LR).double(), verdict=verdict)
        clock.part("clip and AdamW")
        assert state.ema is not None, "CONFIG has an EMA"
        state.ema.update(state.weights, verdict.applied)
        clock.part("EMA")
        state.scale = state.loss_scale.adjust(
            state.scale, overflow=verdict.overflow, applied=verdict.applied, failed=verdict.failed
        )
        clock.part("scale")

    def shadows(self) -> list[Tensor]:
        """As kept by ``Ema``."""
        assert self.state.ema is not None, "CONFIG has an EMA"
        shadow = self.state.ema.shadow
        return [shadow[name] for name, p in self.state.weights if p.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with the decay that mprun gives: matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, fused=True)


def build(model: nn.Module, device: torch.device) -> TrainState:
    """A training state over ``model``, with ``CONFIG``."""
    node = OmegaConf.structured(Config)
    for key, value in CONFIG.items():
        OmegaConf.update(node, key, value)
    config = to_config(node)
    return build_state(config, model, build_schedule(config.schedule, 1000), device)


def make_model(name: str) -> nn.Module:
    """The timm model ``name`` with random weights, equal at every call; ``mlp`` is a small stand-in for tests."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    import timm

    model: nn.Module = timm.create_model(name)
    return model


def check(contestants: dict[str, Contestant], grads: list[Tensor], clock: Clock) -> float:
    """Two steps by both, then a skip; the largest difference to ``plain`` of a parameter or shadow.

    The skip must leave everything as it was, bit for bit. (The plain EMA does not know of skips: it moves.)

    Raises:
        AssertionError: they do not do the same.
    """
    bad = [g.clone() for g in grads]
    bad[-1].view(-1)[-1] = float("inf")
    clock.start()
    worst = 0.0
    for given in (grads, grads, bad):
        for contestant in contestants.values():
            before = [t.detach().clone() for t in (*contestant.params, *contestant.shadows())]
            contestant.load(given)
            contestant.run(clock)
            after = [*contestant.params, *contestant.shadows()]
            same = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            assert same == (given is bad) or isinstance(contestant, Plain), "a skip moved something, or a step nothing"
        if given is not bad:
            plain, own = ([*c.params, *c.shadows()] for c in (contestants["plain"], contestants["mprun"]))
            pairs = zip(plain, own, strict=True)
            worst = max(worst, *(float((a.detach() - b.detach()).abs().max()) for a, b in pairs))
    assert worst < 1e-6, f"the contestants differ by {worst}"
    return worst


def measure(contestants: dict[str, Contestant], grads: list[Tensor], clock: Clock, rounds: int) -> dict[str, Any]:
    """Total milliseconds per round, and median milliseconds per part, of every contestant."""
    totals: dict[str, list[float]] = {name: [] for name in contestants}
    parts: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
    for number in range(rounds):
        for name, contestant in contestants.items():
            progress(f"round {number + 1}/{rounds} {name}")
            contestant.load(grads)
            clock.start()
            contestant.run(clock)
            totals[name].append(sum(clock.parts.values()))
            for part, ms in clock.parts.items():
                parts[name].setdefault(part, []).append(ms)
    progress("")
    return {
        name: {
            "total_ms": statistics.median(totals[name]),
            "to_plain": ratio_of_pairs(totals[name], totals["plain"]),
            "fastest_ms": min(totals[name]),
            "parts_ms": {part: statistics.median(values) for part, values in parts[name].items()},
        }
        for name in contestants
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--model", default="resnet50", help="a timm model (default resnet50, 25.6 M parameters)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="write bench/results/optimizer_phase.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    makers: dict[str, Callable[[nn.Module, torch.device], Contestant]] = {
        "plain": Plain,
        "mprun": Ours,
    }
    contestants = {name: make(make_model(args.model).to(device), device) for name, make in makers.items()}
    generator = torch.Generator().manual_seed(1)
    params = contestants["plain"].params
    grads = [(torch.randn(p.shape, generator=generator) * 1e-3 * SCALE).to(device) for p in params]
    clock = Clock(cuda=device.type == "cuda")
    worst = check(contestants, grads, clock)
    rows = measure(contestants, grads, clock, args.rounds)
    millions = sum(p.numel() for p in params) / 1e6
    print(f"{args.model}, {millions:.1f} M parameters in {len(params)} tensors; largest difference {worst:.1e}")
    for name, row in rows.items():
        listed = "  ".join(f"{part} {ms:.1f}" for part, ms in row["parts_ms"].items())
        print(
            f"{name:<9}{row['total_ms']:7.1f} ms  {row['to_plain']:.2f} of plain  (fastest {row['fastest_ms']:.1f})  {listed}"
        )
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    facts = about(threads=None if gpu else torch.get_num_threads(), device=gpu)
    print(f"target {TARGET}: {'met' if rows['mprun']['to_plain'] <= TARGET else 'missed'}\n{about_text(facts)}")
    if args.json:
        own, plain = rows["mprun"], rows["plain"]
        table = {
            "what": f"unscale, finite test, clip, AdamW, EMA, scale, on {millions:.1f} M parameters",
            "measured": f"{own['total_ms']:.1f} ms; with torch's parts {plain['total_ms']:.1f} ms",
            "ratio": own["to_plain"],
            "target": TARGET,
            "met": own["to_plain"] <= TARGET,
        }
        content = {
            "about": facts, "target": TARGET, "model": args.model, "parameters": millions * 1e6, "rows": rows, "table": [table],
        }  # fmt: skip
        print(save("optimizer_phase", content))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
