"""Code of "a user's own" for whole runs: datasets and models small enough to know every number of.

A run names it as ``tests.case_code:rows`` with ``trust=[tests]``. The toy is one weight, starting at 0, with input 1 and
squared error: the gradient at the layer's output is 2 (w - target) S, so FP16 overflows exactly where that reaches 65520.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mprun.tracking.jsonl import read_metrics

TRUST = ["trust=[tests]", "tracking=disabled", "device=cpu", "train.log_every=1"]
TOY = [*TRUST, "model=python", "model.name=tests.case_code:toy", "dataset=python", "dataset.name=tests.case_code:targets",
       "dataset.task=regression", "train.batch_size=1", "train.shuffle=false", "train.epochs=1", "schedule=constant",
       "optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=0.1"]  # fmt: skip


class Table(Dataset[Any]):
    """Inputs and targets of given values, and something that happens when a sample is read."""

    def __init__(self, inputs: Any, targets: Tensor, *, event: Callable[[int], None] | None = None, **facts: Any) -> None:
        self.inputs, self.labels, self.event = inputs, targets, event
        vars(self).update(facts)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        if self.event is not None:
            self.event(i)
        return self.inputs(i) if callable(self.inputs) else self.inputs[i], self.labels[i]


def toy() -> nn.Module:
    """One weight of 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def targets(values: Sequence[float], val: Sequence[float] = (0.0,), nan_at: int | None = None) -> tuple[Any, Any]:
    """The toy's data: these targets, input 1 (NaN for sample ``nan_at``; all of them for -1)."""
    inputs = torch.ones(len(values), 1)
    if nan_at is not None:
        inputs[slice(None) if nan_at == -1 else nan_at] = float("nan")
    return Table(inputs, torch.tensor(values)[:, None]), Table(torch.ones(len(val), 1), torch.tensor(val)[:, None])


# --- classification with randomness, records and accidents ------------------------------------------------------------


def rows(n: int = 80, record: str | None = None, at: int | None = None, accident: str = "", noise: bool = True) -> tuple[Any, Any]:
    """``n`` rows of 6 numbers in 4 classes, with noise of three generators.

    Args:
        record: a file that every sample's number is appended to.
        at: the accident happens when so many training samples have been read, in this process.
        accident: ``kill`` (SIGKILL), ``sleep`` (two minutes), ``fill`` (files may no longer grow beyond 64 kB) or
            ``full`` (the disk of the run folder, given by the variable ``FILL``, is filled to the last byte).
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(n, 6, generator=generator), torch.randint(4, (n,), generator=generator)
    reads = 0

    def noisy(i: int) -> Tensor:
        return x[i] + noise * 0.1 * (random.random() + float(numpy.random.rand()) + float(torch.rand(())))

    def event(i: int) -> None:
        nonlocal reads
        if record is not None:
            with Path(record).open("a") as file:
                file.write(f"{i}\n")
        reads += 1
        if reads == at:
            ACCIDENTS[accident]()

    return Table(noisy, y, event=event, num_classes=4), Table(x[:32], y[:32])


def _fill() -> None:
    Path(os.environ["FILL"], "filler").write_bytes(b"")
    with Path(os.environ["FILL"], "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


ACCIDENTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: (Path("sleeping").touch(), time.sleep(120))[0],
    "fill": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY)),
    "full": _fill,
}


def net(width: int = 16) -> nn.Module:
    """Linear, BatchNorm, dropout, Linear: everything that a skipped step or a resume could get wrong."""
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 4))


ROWS = [*TRUST, "model=python", "model.name=tests.case_code:net", "dataset=python", "dataset.name=tests.case_code:rows",
        "train.batch_size=8", "optimizer.lr=1e-2"]  # fmt: skip


# --- what a run left ---------------------------------------------------------------------------------------------------


def latest() -> Path:
    """The newest run folder below the current folder."""
    return Path("outputs/latest").resolve()


def result(run: Path | None = None) -> dict[str, Any]:
    """``result.json``."""
    found: dict[str, Any] = json.loads(((run or latest()) / "result.json").read_text())
    return found


def checkpoint(run: Path | None = None, name: str = "last.pt") -> dict[str, Any]:
    """A checkpoint, read as anybody would."""
    found: dict[str, Any] = torch.load((run or latest()) / "checkpoints" / name, weights_only=True)
    return found


def records(kind: str, run: Path | None = None, *, effective: bool = False) -> list[dict[str, Any]]:
    """The records of one kind."""
    return [record for record in read_metrics(run or latest(), effective=effective) if record["kind"] == kind]
