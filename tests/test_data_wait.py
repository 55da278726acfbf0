"""``perf/data_wait_frac`` is the time in which a step cannot begin for want of data, over that time and the steps' own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.cli import main
from mprun.compose import compose
from mprun.data.base import Batch, Data, DataSpec
from mprun.tracking import read_metrics
from mprun.training import loop
from mprun.training.build import build, switches
from mprun.training.run import Run, best_of, make_plan

BEGIN, FETCH, END, STEP, EVALUATE, RECORD = 7.0, 2.0, 4.0, 5.0, 100.0, 50.0  # seconds by the clock of the test


@dataclass
class Clock:
    """Stands still until it is moved, in the place of the module ``time``."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Slow:
    """Data that take known times: an epoch's beginning, each batch, an epoch's end, an evaluation."""

    data: Data
    clock: Clock

    @property
    def spec(self) -> DataSpec:
        return self.data.spec

    @property
    def batches_per_epoch(self) -> int:
        return self.data.batches_per_epoch

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        self.clock.now += BEGIN
        for batch in self.data.train_batches(epoch, start):
            self.clock.now += FETCH
            yield batch
        self.clock.now += END

    def val_batches(self) -> Iterator[Batch]:
        self.clock.now += EVALUATE
        return self.data.val_batches()


class Records:
    """A sink that takes its time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.shares: list[float] = []
        self.rates: list[float] = []

    def log(self, record: dict[str, Any]) -> None:
        self.clock.now += RECORD
        if record["kind"] == "train":
            self.shares.append(record["perf/data_wait_frac"])
            self.rates.append(record["perf/examples_per_s"])

    def progress(self, step: int, attempt: int) -> None:
        pass


def shares(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, start: int = 0) -> list[float]:
    """The share of every record of a run of mlp on 70 digits, in 7 batches an epoch."""
    clock = Clock()
    given = [
        "model=mlp",
        "dataset.limit=70",
        "train.batch_size=10",
        "tracking=disabled",
        "train.log_every=1",
        "probe.every=0",
        *words,
    ]
    config, device = compose(given).config, torch.device("cpu")
    real = loop.train_step

    def slow_step(*args: Any, **more: Any) -> Any:
        clock.now += STEP
        return real(*args, **more)

    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(loop, "train_step", slow_step)
    sink = Records(clock)
    with switches(config, device):
        state, data, _ = build(config, device)
        state.position.batch = start
        slow = Slow(data, clock)
        plan = make_plan(config, slow.batches_per_epoch)
        run = Run(config, state, slow, plan, [sink], folder, best_of(config))  # type: ignore[list-item]
        loop.fit(run)
    # Examples a second are those that went through training, waiting included; the run's own rate takes all of it together.
    steps = [STEP / (1 - share) for share in sink.shares]
    if config.train.log_every == 1 and config.train.accumulate == 1:
        assert sink.rates == pytest.approx([10 / seconds for seconds in steps], rel=1e-12)
        assert run.train_s == pytest.approx(sum(steps), rel=1e-12)
    return sink.shares


def expected(*waits: float, steps: float = STEP) -> Any:
    return pytest.approx([wait / (wait + steps) for wait in waits], rel=1e-12)


def test_the_share_is_that_of_an_independent_clock(monkeypatch, tmp_path):
    # The end of an epoch delays the step after it; the evaluation between them, records and checkpoints are nobody's wait.
    epoch = [BEGIN + FETCH, *[FETCH] * 6]
    assert shares(monkeypatch, tmp_path, "train.steps=16") == expected(
        *epoch, END + epoch[0], *epoch[1:], END + epoch[0], FETCH
    )


def test_an_evaluation_in_the_middle_of_an_epoch_is_no_wait(monkeypatch, tmp_path):
    found = shares(monkeypatch, tmp_path, "train.steps=5", "train.eval_every=2", "train.checkpoint_every=3")
    assert found == expected(BEGIN + FETCH, *[FETCH] * 4)


def test_all_micro_batches_of_a_window_are_waited_for(monkeypatch, tmp_path):
    found = shares(monkeypatch, tmp_path, "train.steps=4", "train.accumulate=3")
    assert found == expected(BEGIN + 3 * FETCH, 3 * FETCH, FETCH + END, BEGIN + 3 * FETCH)


def test_a_record_of_several_steps_takes_their_waits_together(monkeypatch, tmp_path):
    found = shares(monkeypatch, tmp_path, "train.steps=8", "train.log_every=4")
    assert found == expected(BEGIN + 4 * FETCH, 3 * FETCH + END + BEGIN + FETCH, steps=4 * STEP)


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_waits_for_its_own_batches(monkeypatch, tmp_path):
    found = shares(monkeypatch, tmp_path, "train.steps=3", start=4)
    assert found == expected(BEGIN + FETCH, FETCH, FETCH)


# -- by the real clock --------------------------------------------------------------------------------------------

SLEEP_S = 0.01


class Sleepy:
    """Four numbers, 10 milliseconds later."""

    num_classes = 3

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(SLEEP_S)
        return torch.full((4,), float(index)), index % 3


def sleepy() -> tuple[Sleepy, Sleepy]:
    return Sleepy(), Sleepy()


def test_a_slow_dataset_is_told_by_its_share(tmp_path):
    words = [
        "dataset=python", "dataset.name=tests.test_data_wait:sleepy", "trust=[tests]", "model=mlp", "train.steps=5",
        "train.batch_size=4", "train.log_every=1", "tracking=disabled", f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(words) == 0
    records = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    assert len(records) == 5
    for record in records:
        share = record["perf/data_wait_frac"]
        waited_ms = record["perf/step_ms"] * share / (1 - share)
        assert waited_ms >= 1e3 * 4 * SLEEP_S, "each of the four samples slept"


class Writes(torch.nn.Module):
    """Writes into its input, in a way that autograd follows."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return self.layer(x.flatten(1))


def writes(num_classes: int = 10) -> torch.nn.Module:
    return Writes()


def test_batches_that_are_gathered_together_share_nothing(tmp_path):
    """A model that adds to its input in place would drag the other batches into its graph, if they were views of one tensor."""
    words = ["model=python", "model.name=tests.test_data_wait:writes", "trust=[tests]", "train.steps=6", "train.accumulate=2",
             "tracking=disabled", f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip
    assert main(words) == 0
