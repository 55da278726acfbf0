"""The peers of ``bench/step_overhead.py``: the same step with the means of other trainers. Each is imported where it is used.

========== ==================== ======================= ================================= ==============================
peer       precision            clipping                EMA                               rate
========== ==================== ======================= ================================= ==============================
timm       autocast,            ``dispatch_clip_grad``  ``ModelEmaV3``                    ``CosineLRScheduler``
           ``NativeScaler``
fabric     Lightning Fabric's   ``clip_gradients``      torch's ``AveragedModel``         ``LambdaLR``
trainer    Lightning Trainer's  ``gradient_clip_val``   its ``WeightAveraging``           ``LambdaLR``, every step
accelerate ``Accelerator``'s    ``clip_grad_norm_``     torch's ``AveragedModel``         ``LambdaLR``, prepared
========== ==================== ======================= ================================= ==============================

The averages are multi-tensor EMAs of parameters and buffers everywhere, which is faster than the defaults of some; the
optimizer is fused AdamW wherever the peer allows it. The Trainer is ``barebones``; its time runs from the end of one step
to the end of a later one within ``fit``, so that nothing of its start is counted. Whoever's loop is free to choose reads its loss
after every step on the CPU, and none on a GPU.

Two things are not what was asked for, and are said in a peer's ``note``. Lightning refuses to clip with a fused optimizer
under FP16, and its Trainer under BF16 too, so they have the multi-tensor one there. Lightning and Accelerate do not take
FP16 to the CPU: asked by name Lightning computes in BF16, so its FP16 plugin is handed over ready-made; Accelerate has no
such door, and what it computes is FP32 (``comparable`` is false). None of them has FP32 masters for a half model, so none
is in those rows.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from step_cases import CLIP, DECAY, LR, NEVER, SCALE, WARM_UP, Case, Loop, decay_groups, multiplier
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mprun.data.base import Batch


class Peer(Loop):
    """A contestant with a model and an optimizer of its own."""

    fused = True

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.kernels = "mprun" if case.half_kernels() else "torch"
        self.model = case.fresh()
        self.named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(decay_groups(list(self.named.values())), lr=LR, fused=self.fused)
        self.ema: Any = None

    def weights(self) -> dict[str, Tensor]:
        """The model's own parameters."""
        return {name: value.detach() for name, value in self.named.items()}

    def scheduler(self) -> LambdaLR:
        """Torch's own way to set a rate."""
        return LambdaLR(self.optimizer, multiplier)

    def averaged(self) -> AveragedModel:
        """Torch's own EMA."""
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)

    def read(self, loss: Tensor) -> None:
        """Look at the loss, where that costs nothing."""
        if self.case.device.type == "cpu":
            loss.item()


class Timm(Peer):
    """timm's parts, in the order of its training script."""

    name = "timm"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3, NativeScaler

        self.scaler = NativeScaler(device=case.device.type) if case.scaled else None
        if self.scaler is not None:
            self.scaler._scaler = torch.amp.GradScaler(case.device.type, init_scale=SCALE)
        self.ema = ModelEmaV3(self.model, decay=DECAY)
        self.rates = CosineLRScheduler(
            self.optimizer, t_initial=NEVER, warmup_t=WARM_UP - 1, warmup_lr_init=LR / WARM_UP, t_in_epochs=False
        )

    def step(self, window: Sequence[Batch]) -> None:
        """One update."""
        from timm.utils import dispatch_clip_grad

        case, total = self.case, torch.zeros((), device=self.case.device)
        autocast = case.dtype != torch.float32
        for number, batch in enumerate(window, start=1):
            with torch.autocast(case.device.type, dtype=case.dtype if autocast else None, enabled=autocast):
                loss = F.cross_entropy(self.model(batch.inputs), batch.targets) / len(window)
            last = number == len(window)
            if self.scaler is not None:
                self.scaler(loss, self.optimizer, clip_grad=CLIP, parameters=self.model.parameters(), need_update=last)
            else:
                loss.backward()
                if last:
                    dispatch_clip_grad(self.model.parameters(), CLIP)
                    self.optimizer.step()
            total += loss.detach()
        self.optimizer.zero_grad()
        self.ema.update(self.model, step=self.done + 1)
        self.read(total)
        self.rates.step_update(self.done + 1)


class LightningFabric(Peer):
    """A loop of one's own with Lightning Fabric."""

    name = "fabric"

    def __init__(self, case: Case) -> None:
        self.fused = not case.scaled
        super().__init__(case)
        from lightning.fabric import Fabric
        from lightning.fabric.plugins import MixedPrecision

        quiet()
        if case.scaled:
            self.note = lightning_note(case)
            scaler = torch.amp.GradScaler(case.device.type, init_scale=SCALE)
            given: dict[str, Any] = {"plugins": MixedPrecision("16-mixed", case.device.type, scaler=scaler)}
        else:
            given = {"precision": lightning_precision(case)}
        self.fabric = Fabric(accelerator=case.device.type, devices=1, **given)
        self.ema, self.rates = self.averaged(), self.scheduler()
        self.wrapped, self.outer = self.fabric.setup(self.model, self.optimizer)

    def step(self, window: Sequence[Batch]) -> None:
        """One update."""
        total = torch.zeros((), device=self.case.device)
        for number, batch in enumerate(window, start=1):
            with self.fabric.no_backward_sync(self.wrapped, enabled=number < len(window)):
                loss = F.cross_entropy(self.wrapped(batch.inputs), batch.targets) / len(window)
                self.fabric.backward(loss)
            total += loss.detach()
        self.fabric.clip_gradients(self.wrapped, self.outer, max_norm=CLIP)
        self.outer.step()
        self.outer.zero_grad()
        self.rates.step()
        self.ema.update_parameters(self.model)
        self.read(total)


class HuggingFaceAccelerate(Peer):
    """A loop of one's own with Accelerate."""

    name = "accelerate"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import GradScalerKwargs

        AcceleratorState._reset_state(reset_partial_state=True)  # one process, one precision: it would keep the first
        named = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[case.dtype]
        if case.half_kernels():
            self.note, self.comparable = "asked for FP16 on the CPU, it computes in FP32", False
        handlers = [GradScalerKwargs(init_scale=SCALE)] if case.scaled else []
        self.accelerator = Accelerator(
            cpu=case.device.type == "cpu", mixed_precision=named, gradient_accumulation_steps=case.accumulate,
            kwargs_handlers=handlers,
        )  # fmt: skip
        self.ema = self.averaged()
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.scheduler())
        self.wrapped, self.outer, self.rates = prepared

    def step(self, window: Sequence[Batch]) -> None:
        """One update."""
        total = torch.zeros((), device=self.case.device)
        for batch in window:
            with self.accelerator.accumulate(self.wrapped):
                loss = F.cross_entropy(self.wrapped(batch.inputs), batch.targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.wrapped.parameters(), CLIP)
                self.outer.step()
                self.rates.step()
                self.outer.zero_grad()
            total += loss.detach() / len(window)
        self.ema.update_parameters(self.model)
        self.read(total)


def lightning_precision(case: Case) -> str:
    """Lightning's name of a precision without a scale."""
    return {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}[case.dtype]


def lightning_note(case: Case) -> str:
    """What is different under autocast."""
    note = "refuses to clip with a fused optimizer under autocast: AdamW with foreach"
    by_plugin = case.device.type == "cpu" and case.scaled
    return f"{note}; asked for FP16 on the CPU it takes BF16: FP16 by plugin" if by_plugin else note


def quiet() -> None:
    """No tips and no lists of hardware."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def trainer(case: Case) -> Peer:
    """Lightning's Trainer."""
    from peer_trainer import LightningTrainer

    return LightningTrainer(case)


# Name -> the package that it needs, and how to make it.
PEERS: dict[str, tuple[str, Callable[[Case], Peer]]] = {
    "timm": ("timm", Timm),
    "fabric": ("lightning", LightningFabric),
    "trainer": ("lightning", trainer),
    "accelerate": ("accelerate", HuggingFaceAccelerate),
}


def importable() -> list[str]:
    """The peers that this environment has."""
    return [name for name, (package, _) in PEERS.items() if find_spec(package)]
