"""The best evaluation, early stopping and the checkpoints that are kept, whatever the metric does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mprun.training.loop as loop
from mprun.cli import main
from mprun.config import Task
from mprun.training.metrics import Best
from mprun.training.run import best_of
from tests.case_code import TOY, checkpoint, latest, records, result
from tests.conftest import make_config

NAN, INF = math.nan, math.inf
LONG = [*TOY, "precision=fp32", "dataset.kwargs.values=[0.1,0.2]", "dataset.kwargs.repeat=20", "train.eval_every=2"]
STOP = ["train.early_stop.metric=val/loss", "train.early_stop.patience=2"]


@pytest.fixture
def scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``scores({step: loss})``: what evaluations find, 9.0 where nothing is said; in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def given_(by_step: dict[int, float]) -> None:
        monkeypatch.setattr(loop, "eval_step", lambda state, *_: {"loss": by_step.get(state.counters.applied, 9.0)})

    return given_


def kept() -> list[str]:
    return sorted(path.name for path in (latest() / "checkpoints").iterdir())


# --- the best ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.floats(), st.sampled_from([NAN, INF, -INF, 0.5, 0.5, 1.0])), max_size=12))
@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_is_the_first_of_the_best_finite_values(mode: str, values: list[float | None]) -> None:
    best = Best("val/x", mode)
    told = [
        best.update({} if value is None else {"val/x": value}, step=step, epoch=0) for step, value in enumerate(values)
    ]
    finite = [(value, step) for step, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not finite:
        assert (best.value, best.summary(), any(told), best.stale) == (None, None, False, len(values))
        return
    extreme = (min if mode == "min" else max)(value for value, _ in finite)
    first = next(step for value, step in finite if value == extreme)
    assert (best.value, best.step, best.stale) == (extreme, first, len(values) - 1 - first)
    assert told[first]
    assert not any(told[first + 1 :])


@pytest.mark.parametrize(
    ("keys", "metric", "mode"),
    [
        ({}, "val/top1", "max"),
        ({"dataset.task": Task.regression}, "val/loss", "min"),
        ({"dataset.task": Task.language_model}, "val/loss", "min"),
        ({"train.early_stop.metric": "val/loss"}, "val/loss", "min"),
        ({"train.early_stop.metric": "ema/top1", "train.ema.decay": 0.9}, "ema/top1", "max"),
        ({"train.early_stop.metric": "ema/loss", "train.ema.decay": 0.9}, "ema/loss", "min"),
    ],
)
def test_the_name_of_a_metric_says_which_way_is_better(keys: dict[str, Any], metric: str, mode: str) -> None:
    best = best_of(make_config(**keys))
    assert (best.metric, best.mode) == (metric, mode)


def test_of_equal_ones_the_first_stays_in_best_pt(scores: Callable[..., None]) -> None:
    scores({2: 1.0, 4: 0.5, 6: 0.5, 8: 0.5})
    assert main([*LONG, "train.steps=8"]) == 0
    assert (result()["best"]["step"], checkpoint(name="best.pt")["step"]) == (4, 4)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_best_pt_is_never_of_a_value_that_is_no_number(scores: Callable[..., None], bad: float) -> None:
    scores({2: bad, 4: 0.7, 6: bad, 8: bad})
    assert main([*LONG, "train.steps=8"]) == 0
    assert (result()["best"]["value"], checkpoint(name="best.pt")["step"]) == (0.7, 4)
    scores(dict.fromkeys(range(99), bad))
    assert main([*LONG, "train.steps=8"]) == 0
    assert (result()["status"], result()["best"]) == ("ok", None)
    assert kept() == ["last.pt"]


# --- early stopping ----------------------------------------------------------------------------------------------------


def test_patience_counts_evaluations_and_nothing_else(scores: Callable[..., None]) -> None:
    """An epoch of 40 steps: the run ends within it, at the second evaluation after the best."""
    scores({2: 0.9, 4: 0.5})
    assert main([*LONG, *STOP, "train.checkpoint_every=1", "train.log_every=1"]) == 0
    assert [record["step"] for record in records("val")] == [2, 4, 6, 8]
    assert (result()["status"], result()["steps_applied"]) == ("ok", 8)
    assert result()["stopped"] == "no better val/loss in 2 evaluations"
    assert checkpoint()["step"] == 8


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_metric_that_is_never_a_number_ends_the_run_by_patience(scores: Callable[..., None], bad: float) -> None:
    scores(dict.fromkeys(range(99), bad))
    assert main([*LONG, *STOP]) == 0
    assert (result()["steps_applied"], result()["best"], kept()) == (4, None, ["last.pt"])


def test_patience_goes_on_where_a_stopped_run_left_it(scores: Callable[..., None]) -> None:
    scores({2: 0.9, 4: 0.5})
    assert main([*LONG, *STOP, "train.steps=6"]) == 0
    assert checkpoint()["best"]["stale"] == 1
    assert main(["resume=latest", "trust=[tests]", "train.steps=30"]) == 0
    assert [record["step"] for record in records("val")] == [2, 4, 6, 8]
    assert (result()["best"]["step"], result()["best"]["value"]) == (4, 0.5)


def test_a_stopped_run_goes_on_with_more_patience_in_the_same_epoch(scores: Callable[..., None]) -> None:
    scores({2: 0.5, 8: 0.4})
    assert main([*LONG, *STOP]) == 0
    assert result()["steps_applied"] == 6
    assert main(["resume=latest", "trust=[tests]", "train.early_stop.patience=4"]) == 0
    assert [record["step"] for record in records("val")] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert (result()["best"]["step"], checkpoint(name="best.pt")["step"]) == (8, 8)
    saved = checkpoint()
    assert (saved["position"]["epoch"], saved["position"]["batch"]) == (0, 16), "not one sample twice"


def test_the_last_step_of_an_epoch_can_be_the_one_that_stops(scores: Callable[..., None]) -> None:
    words = [*LONG, *STOP, "train.epochs=3", "train.early_stop.patience=1", "train.eval_every=20"]
    scores({20: 0.5})
    assert main(words) == 0
    assert result()["steps_applied"] == 40
    assert main(["resume=latest", "trust=[tests]", "train.early_stop.patience=2"]) == 0
    assert [record["step"] for record in records("val")] == [20, 40, 60]
    assert {record["step"]: record["epoch"] for record in records("train")}[41] == 1


# --- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "numbers"), [(0, []), (1, [12]), (3, [8, 10, 12]), (99, [2, 4, 6, 8, 10, 12])])
def test_keep_counts_numbered_checkpoints_and_leaves_best_and_last(
    scores: Callable[..., None], keep: int, numbers: list[int]
) -> None:
    scores({4: 0.5})
    assert main([*LONG, "train.steps=12", "train.checkpoint_every=2", f"train.keep={keep}"]) == 0
    assert kept() == sorted(["best.pt", "last.pt", *(f"step_{number}.pt" for number in numbers)])
    assert [checkpoint(name=f"step_{number}.pt")["step"] for number in numbers] == numbers
    best, last = checkpoint(name="best.pt"), checkpoint()
    assert (best["step"], last["step"]) == (4, 12)
    assert not torch.equal(best["model"]["weight"], last["model"]["weight"])
