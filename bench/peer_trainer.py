"""The peer of ``bench/step_overhead.py`` that brings its own loop: Lightning's Trainer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peer_loops import Peer, lightning_note, lightning_precision, quiet
from step_cases import CLIP, DECAY, SCALE, Case
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn


class LightningTrainer(Peer):
    """``Trainer.fit`` on a LightningModule. A block is a ``fit`` of its own, of which all but the first step are timed."""

    name = "trainer"

    def __init__(self, case: Case) -> None:
        self.fused = case.dtype == torch.float32
        super().__init__(case)
        quiet()
        self.note = "" if self.fused else lightning_note(case)
        self.scaler = torch.amp.GradScaler(case.device.type, init_scale=SCALE) if case.scaled else None
        self.rates = self.scheduler()
        self.module = lightning_module(self.model, self.optimizer, self.rates)

    def advance(self, count: int) -> None:
        """Make ``count`` steps."""
        self._fit(count)

    def run(self, count: int) -> tuple[float, float]:
        """One more step than ``count``, of which the first is not timed."""
        stamps = self._fit(count + 1)
        return stamps[-1][0] - stamps[0][0], stamps[-1][1] - stamps[0][1]

    def _fit(self, count: int) -> list[tuple[float, float]]:
        """Make ``count`` steps in one ``fit``; clock and processor time at the end of each of them."""
        from lightning.pytorch import Trainer
        from lightning.pytorch.callbacks import WeightAveraging
        from lightning.pytorch.plugins import MixedPrecision

        case, stamps = self.case, Stamps(self.case)

        class Average(WeightAveraging):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                """It would make the average the weights, and this is not the end."""

        average = Average(multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        if self.scaler is not None:
            given: dict[str, Any] = {"plugins": MixedPrecision("16-mixed", case.device.type, scaler=self.scaler)}
        else:
            given = {"precision": lightning_precision(case)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator=case.device.type, devices=1, barebones=True, max_steps=count, max_epochs=-1,
                gradient_clip_val=CLIP, accumulate_grad_batches=case.accumulate,
                callbacks=[average, stamps.callback()], **given,
            )  # fmt: skip
            trainer.fit(self.module, Stream(case, self.done, count))
        self.done += count
        return stamps.found


class Stream:
    """``count`` windows as pairs of inputs and targets, from window ``first`` on, for a Trainer."""

    def __init__(self, case: Case, first: int, count: int) -> None:
        windows = [case.windows[number % len(case.windows)] for number in range(first, first + count)]
        self.pairs = [(batch.inputs, batch.targets) for window in windows for batch in window]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


class Stamps:
    """When each step of a ``fit`` ended."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.found: list[tuple[float, float]] = []

    def callback(self) -> Any:
        """To be the last of the callbacks."""
        from lightning.pytorch import Callback

        stamps = self

        class Stamp(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                stamps.end(outputs["loss"], (batch_idx + 1) % stamps.case.accumulate == 0)

        return Stamp()

    def end(self, loss: Tensor, last: bool) -> None:
        """Of a micro-batch, the ``last`` of its window or not."""
        if not last:
            return
        if self.case.device.type == "cpu":
            loss.item()
        else:
            torch.cuda.synchronize()
        self.found.append((time.perf_counter(), time.process_time()))


def lightning_module(model: nn.Module, optimizer: Any, rates: LambdaLR) -> Any:
    """What a Trainer trains, with an optimizer that outlives the ``fit``."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}

    return Module()
