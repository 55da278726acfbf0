"""Code of "a user's own" for whole runs: datasets and models small enough to know every number of.

A run names it as ``tests.case_code:rows`` with ``trust=[tests]``. The toy is one weight, starting at 0, with input 1 and
squared error: the gradient at the layer's output is 2 (w - target) S, so FP16 overflows exactly where that reaches 65520.
"""

from __future__ import annotations

import contextlib
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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from mprun.tracking.jsonl import read_metrics
from mprun.training.checkpoint import clean, load, save

TRUST = ["trust=[tests]", "tracking=disabled", "device=cpu", "train.log_every=1"]
TOY = [*TRUST, "model=python", "model.name=tests.case_code:toy", "dataset=python", "dataset.name=tests.case_code:targets",
       "dataset.task=regression", "train.batch_size=1", "train.shuffle=false", "train.epochs=1", "schedule=constant",
       "optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=0.1"]  # fmt: skip


class Table(Dataset[Any]):
    """Inputs and targets of given values, and something that happens when a sample is read."""

    def __init__(
        self, inputs: Any, targets: Tensor, *, event: Callable[[int], None] | None = None, **facts: Any
    ) -> None:
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


def one() -> nn.Module:
    """One weight of 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def targets(values: Sequence[float], repeat: int = 1, nan_at: int | None = None) -> tuple[Any, Any]:
    """The toy's data: these targets, ``repeat`` times; input 1, or NaN for sample ``nan_at`` (-1: for all of them)."""
    values = list(values) * repeat
    inputs = torch.ones(len(values), 1)
    if nan_at is not None:
        inputs[slice(None) if nan_at == -1 else nan_at] = float("nan")
    return Table(inputs, torch.tensor(values)[:, None]), Table(torch.ones(1, 1), torch.zeros(1, 1))


# --- classification with randomness, records and accidents ------------------------------------------------------------


def rows(
    n: int = 80, record: str | None = None, at: int | None = None, accident: str = "", noise: bool = True
) -> tuple[Any, Any]:
    """``n`` rows of 6 numbers in 4 classes, with noise of three generators.

    Args:
        record: a file that every sample's number is appended to.
        at: the accident happens when so many training samples have been read, in this process.
        accident: ``kill`` (SIGKILL), ``crash`` (SIGSEGV), ``sleep`` (two minutes), ``limit`` (files may no longer grow beyond 64 kB),
            ``full`` (the disk that the variable ``FILL`` names is filled to the last byte), ``tight`` (but for 64 kB).
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
        if reads == at and "MPRUN_TEST_NO_ACCIDENT" not in os.environ:
            ACCIDENTS[accident]()

    return Table(noisy, y, event=event, num_classes=4), Table(x[:32], y[:32])


def _fill(leave: int) -> None:
    """Fill the disk that ``FILL`` is on, and give ``leave`` bytes back."""
    with Path(os.environ["FILL"], "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
        file.truncate(file.tell() - leave)


ACCIDENTS: dict[str, Callable[[], Any]] = {
    "": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sleep": lambda: (Path("sleeping").touch(), time.sleep(120)),
    "limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY)),
    "tight": lambda: _fill(64 * 1024),
    "full": lambda: _fill(0),
}


class Restless(nn.Module):
    """Dropout that is never off: it draws random numbers in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, training=True)


def net(width: int = 16, restless: bool = False) -> nn.Module:
    """Linear, BatchNorm, dropout, Linear: everything that a skipped step or a resume could get wrong."""
    torch.set_num_threads(1)
    dropout = Restless() if restless else nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), dropout, nn.Linear(width, 4))


ROWS = [*TRUST, "model=python", "model.name=tests.case_code:net", "dataset=python", "dataset.name=tests.case_code:rows",
        "train.batch_size=8", "optimizer.lr=1e-2"]  # fmt: skip


# --- models that half precision breaks, and nested batches -------------------------------------------------------------------


class Attention(nn.Module):
    """One head whose padding mask is a literal, as in many public models."""

    def __init__(self, width: int, mask: float | None) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(width, 3 * width), mask

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        mask = torch.finfo(scores.dtype).min if self.mask is None else self.mask
        self.weights = scores.masked_fill(padding[:, None, :], mask).softmax(-1)
        return self.weights.to(v.dtype) @ v


class Masked(nn.Module):
    """Two attention blocks over 5 positions of 6 numbers each, of which the last two are padding."""

    def __init__(self, mask: float | None = -1e9) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Attention(8, mask if i else None) for i in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(len(x), 5, dtype=torch.bool, device=x.device)
        padding[:, 3:] = True
        x = self.embed(x.unsqueeze(1).expand(-1, 5, -1))
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x.mean(1))


class Probability(nn.Module):
    """Computes the BCE of a probability inside, as loss code in a model does; 12 = the loss of logit 12 for target 0."""

    def __init__(self, logits: bool = False) -> None:
        super().__init__()
        self.scale, self.logits = nn.Linear(1, 1, bias=False), logits
        nn.init.constant_(self.scale.weight, 12.0)

    def forward(self, x: Tensor) -> Tensor:
        logit = self.scale(x)
        if self.logits:
            return F.binary_cross_entropy_with_logits(logit, torch.zeros_like(logit), reduction="none")
        probability = logit.sigmoid()
        return F.binary_cross_entropy(probability, torch.zeros_like(probability), reduction="none")


class Mixed(nn.Module):
    """A forward that makes a tensor in the default dtype and writes half numbers into it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 4)
        out[torch.arange(len(x))] = self.inner(x)
        return out


class Nested(nn.Module):
    """Takes a dict of everything that a batch may hold; ``seen`` keeps what arrived."""

    def __init__(self, vocabulary: int = 50257) -> None:
        super().__init__()
        self.embed, self.dense = nn.Embedding(vocabulary, 4), nn.Linear(3, 4)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        self.seen = batch
        ids, (features, mask), [time_stamp] = batch["ids"], batch["pair"], batch["list"]
        x = self.embed(ids) * mask.unsqueeze(-1)
        # A bounded function of the time: were it infinite, nothing else would show it.
        return x.mean(1) + self.dense(features) + time_stamp.clamp(max=1.0).unsqueeze(-1)


def rows_beyond(n: int = 16) -> tuple[Any, Any]:
    """Ordinary rows, but for one number of sample 3 that FP16 cannot hold."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    x[3, 2] = 1e5
    labels = torch.arange(n) % 4
    return Table(x, labels, num_classes=4), Table(x[:2], labels[:2])


def nested(n: int = 8, time_stamp: float = 1.7e9) -> tuple[Any, Any]:
    """Ids that half precision would change, a bool mask, float64 features, and a time that FP16 cannot hold in sample 5."""

    def sample(i: int) -> Any:
        ids = torch.tensor([2049, 30521, 50256, i])
        features = torch.tensor([0.1, 0.2, float(i)], dtype=torch.float64)
        return {"ids": ids, "pair": (features, ids > 2049), "list": [torch.tensor(time_stamp if i == 5 else 1.0)]}

    labels = torch.arange(n) % 4
    return Table(sample, labels, num_classes=4), Table(sample, labels)


# --- saves that are killed -----------------------------------------------------------------------------------------------


def killed_saves(folder: Path, saves: int) -> dict[str, int]:
    """Children that save ``last.pt`` over and over are killed at random moments, until ``saves`` saves have begun.

    After every kill the checkpoint must load and be the last step that was finished or the one that had begun. Run it in
    a process of its own: the children are forked from a process that has imported everything, so that a restart is cheap.

    Returns:
        How many ``saves`` began, how often a child was killed (``kills``), how many kills struck inside a save (``torn``:
        a temporary file was left) and how many leftovers the next start found (``leftovers``).
    """
    torch.set_num_threads(1)
    path, moments = folder / "last.pt", random.Random(0)
    counts = {"saves": 0, "kills": 0, "torn": 0, "leftovers": 0}
    step, save_s = 0, 0.01
    while counts["saves"] < saves:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            clean(folder)
            os.write(writer, f"l{len(list(folder.glob('.*')))}\n".encode())
            while True:
                step += 1
                os.write(writer, f"b{step}\n".encode())
                begin = time.perf_counter()
                save({"format": 1, "step": step, "weights": torch.full((500_000,), float(step))}, path)
                os.write(writer, f"d{step} {time.perf_counter() - begin}\n".encode())
        os.close(writer)
        time.sleep(moments.uniform(0, 6) * save_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader) as file:
            lines = [line.split() for line in file.read().splitlines()]
        begun = [int(line[0][1:]) for line in lines if line[0][0] == "b"]
        done = [(int(line[0][1:]), float(line[1])) for line in lines if line[0][0] == "d"]
        first = step
        if done:
            save_s = done[-1][1]
        finished = done[-1][0] if done else first
        if begun:
            found = load(path) if path.exists() else {"step": 0, "weights": torch.zeros(1)}
            assert found["step"] in (finished, begun[-1]), f"{found['step']} is neither {finished} nor {begun[-1]}"
            assert bool((found["weights"] == found["step"]).all())
            step = found["step"]
        counts["saves"] += len(begun)
        counts["kills"] += 1
        counts["torn"] += any(folder.glob(".*.tmp"))
        counts["leftovers"] += sum(int(line[0][1:]) for line in lines if line[0][0] == "l")
    return counts


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
