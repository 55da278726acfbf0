"""When a post-mortem is held, what is said of it and kept of it. Whatever goes wrong with it, the run goes on unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mprun.data.base import Batch
from mprun.errors import CheckpointError
from mprun.precision.policy import map_tensors
from mprun.training import checkpoint
from mprun.training.env import json_ready
from mprun.training.postmortem import examine
from mprun.training.result import APPLIED, EMPTY, StepRow
from mprun.training.run import Pending, Run, emit, warn
from mprun.training.verdict import SCALE_SEARCH, Verdict


@dataclass(frozen=True)
class Case:
    """A step that was not applied, as the host learns of it.

    Attributes:
        number: of the attempt.
        moved: how many steps were applied since.
    """

    run: Run
    row: StepRow
    number: int
    entry: Pending
    moved: int

    @property
    def due(self) -> bool:
        """Whether the step is one of the first that are examined (``postmortem.skips``).

        Of a search for the loss scale the first step is enough: it says how far down S has to go, and until S is there and
        as long as nothing is applied, the skips that follow are explained.
        """
        seen, row = self.run.examined, self.row
        if row.outcome in (APPLIED, EMPTY) or seen.count >= self.run.config.postmortem.skips:
            return False
        return not (seen.search_step == row.steps_applied and row.loss_scale > seen.search_scale)

    @cached_property
    def finding(self) -> str:
        """The verdict in one line. The first time that it is asked for, the post-mortem is held and recorded."""
        run, seen = self.run, self.run.examined
        seen.count += 1
        try:
            window = self.entry.fetch(run.data)
            verdict = examine(
                run.state,
                window,
                loss_scale=self.row.loss_scale,
                rng=self.entry.rng,
                moved=self.moved,
                first_loss=seen.first_loss,
                stops=self.row.consecutive_skips >= run.state.loss_scale.patience,
            )
        except (
            Exception
        ) as error:  # it is only an explanation; the model's own hooks may break, or the memory be too small
            first = next(iter(str(error).splitlines()), "")
            text = f"the post-mortem failed ({type(error).__name__}: {first})"
            self._record({"verdict": "failed", "message": text})
            return text
        if verdict.kind == SCALE_SEARCH and verdict.largest_scale is not None:
            seen.search_step, seen.search_scale = self.row.steps_applied, verdict.largest_scale
        self._record(verdict.record())
        if run.config.postmortem.save_batch:
            self._save(window, verdict)
        return verdict.message

    def _record(self, fields: dict[str, Any]) -> None:
        place = {"step": self.row.steps_applied, "attempt": self.number, "precision/loss_scale": self.row.loss_scale}
        emit(self.run, {"kind": "event", "event": "postmortem", **place, **fields})

    def _save(self, window: Sequence[Batch], verdict: Verdict) -> None:
        path = self.run.run_dir / "postmortem" / f"{self.number}.pt"
        try:
            save_window(path, window, self.entry.rng, self.row.loss_scale, verdict)
        except CheckpointError as error:
            warn(self.run, f"the batch of attempt {self.number} was not kept: {error}")


def save_window(path: Path, window: Sequence[Batch], rng: Any, loss_scale: float, verdict: Verdict) -> None:
    """Keep a window and what it takes to examine it again, in a file that loads with ``weights_only=True``.

    Raises:
        CheckpointError: the disk refused, or the inputs are of classes that such a file cannot hold.
    """

    def kept(value: Any) -> Any:
        return map_tensors(value, lambda t: _alone(t))

    batches = [{"inputs": kept(b.inputs), "targets": kept(b.targets), "ids": kept(b.ids)} for b in window]
    fields = {"rng": rng, "loss_scale": loss_scale, "verdict": json_ready(verdict.record())}
    checkpoint.save({"window": batches, **fields}, path)
    try:
        checkpoint.load(path, own=False)
    except CheckpointError:
        path.unlink()
        raise


def load_window(path: Path) -> tuple[list[Batch], float, dict[str, Any] | None]:
    """Window, loss scale and random state of a file of :func:`save_window`, on the CPU, as ``examine`` takes them.

    Raises:
        CheckpointError: no such file, or another one.
    """
    content = checkpoint.load(path, own=False)
    if not {"window", "loss_scale", "rng"} <= content.keys():
        raise CheckpointError(f"{path} holds no window: give a file that postmortem.save_batch=true has written")
    return [Batch(**batch) for batch in content["window"]], content["loss_scale"], content["rng"]


def _alone(tensor: Tensor) -> Tensor:
    """A copy on the CPU: of a view, torch would save all that it is a view of."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
