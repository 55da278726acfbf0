"""Post-mortems within a run: when they are held, what is recorded and kept, and that the run does not notice."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.config import DatasetSource, ModelSource, OnNonFiniteLoss, Task
from mprun.errors import LossScaleError, NonFiniteError
from mprun.training import checkpoint
from mprun.training.build import build, switches
from mprun.training.env import config_hash
from mprun.training.examination import load_window
from mprun.training.loop import fit
from mprun.training.postmortem import examine
from mprun.training.run import Run, best_of, log_state, resume_log
from tests.conftest import CPU, FP16, make_config
from tests.test_casting import MASTER

ROWS = {
    "name": "x", "trust": ["tests"], "dataset.source": DatasetSource.python, "dataset.name": "tests.case_code:rows", "model.source": ModelSource.python,
    "model.name": "tests.test_examination:net", "train.batch_size": 8, "dataset.kwargs": {"n": 48, "noise": False}, "train.epochs": 2,
    "optimizer.name": "sgd", "optimizer.lr": 0.01, "train.log_every": 1, "probe.every": 0,
}  # fmt: skip
TARGETS = {
    **ROWS, "model.name": "tests.case_code:toy", "dataset.name": "tests.case_code:targets", "dataset.task": Task.regression, "train.batch_size": 1,
    "train.shuffle": False, "train.epochs": 1, "optimizer.lr": 0.0,
}  # fmt: skip
HIGH = {"precision.loss_scale.init": 2.0**24}


class Moody(nn.Module):
    """Dropout, BatchNorm, a buffer that is exchanged; its hooks break once it was called so often."""

    breaks_at = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.head = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 4),
        )
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.register_forward_pre_hook(type(self).hook)

    def hook(self, args: Any) -> None:
        self.calls += 1
        if self.training and self.calls >= self.breaks_at:
            raise ZeroDivisionError("the hook of somebody else\nbreaks")

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.head(self.drop(self.norm(self.first(x)).relu()))


class Broken(Moody):
    """Its second forward raises: the first one is the step's, the second a post-mortem's, which puts attributes back."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).passes += 1
        if self.passes == 2:
            raise RuntimeError("only an accident\nwith details")
        return super().forward(x)


def net() -> nn.Module:
    return Moody()


def broken() -> nn.Module:
    Broken.passes = 0
    return Broken()


def fitted(folder: Path, keys: dict[str, Any]) -> tuple[Run, list[dict[str, Any]]]:
    """A run that came to its end, or the run and its error on ``run.error``."""
    records: list[dict[str, Any]] = []

    class Listing:
        def log(self, record: dict[str, Any]) -> None:
            records.append(record)

        def progress(self, applied: int, attempts: int) -> None:
            pass

    torch.manual_seed(0)
    config = make_config(**keys)
    with switches(config, CPU):
        state, data, plan = build(config, CPU)
        run = Run(config, state, data, plan, [Listing()], folder, best_of(config))  # type: ignore[list-item]
        run.metadata["error"] = ""
        try:
            fit(run)
        except (NonFiniteError, LossScaleError) as error:
            run.metadata["error"] = str(error)
    return run, records


def held(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == "postmortem"]


def content(run: Run) -> dict[str, Any]:
    """All that a checkpoint holds, but for how often was examined and how long it took."""
    return checkpoint.snapshot(run.state)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("mode", [FP16, MASTER], ids=["autocast", "master"])
@pytest.mark.parametrize(
    "more", [{}, {"train.accumulate": 2, "train.ema.decay": 0.9, "train.epochs": 8}], ids=["plain", "accumulate"]
)
def test_a_run_is_the_same_with_and_without_post_mortems(tmp_path, mode, more):
    """Weights, optimizer, BatchNorm statistics, buffers, scale, dropout's generator: to the last bit."""
    keys = {**ROWS, **mode, **HIGH, **more, "optimizer.momentum": 0.9}
    on, said = fitted(tmp_path / "on", {**keys, "postmortem.skips": 3, "postmortem.save_batch": True})
    off, silent = fitted(tmp_path / "off", {**keys, "postmortem.skips": 0})
    assert on.state.counters == off.state.counters
    assert on.state.counters.skipped > 3
    assert held(said)
    assert not held(silent)
    assert same(content(on), content(off))
    assert [r for r in said if r["kind"] == "skip"] == [r for r in silent if r["kind"] == "skip"]


def test_a_search_for_the_scale_is_examined_once_and_recorded(tmp_path):
    run, records = fitted(tmp_path, {**ROWS, **FP16, **HIGH})
    (event,) = held(records)
    skips = [record for record in records if record["kind"] == "skip"]
    assert len(skips) > 3
    assert (event["verdict"], event["step"], event["attempt"]) == ("scale_search", 0, 1)
    assert event["precision/loss_scale"] == 2.0**24
    # The first step is examined before any is applied, so it says where the search ends, if that batch were to come again.
    assert event["largest_scale"] <= skips[-1]["precision/loss_scale"]
    assert event["message"].startswith("scale search: the gradients overflow at loss scale 2^24 and are finite at 1; ")
    assert event["message"].endswith("nothing to do")
    assert "\n" not in event["message"]
    assert run.examined.count == 1


def test_only_so_many_are_examined_and_the_count_goes_into_the_checkpoint(tmp_path):
    """1000 overflows at 2^15 and above: three separate skips, each after an applied step that lets S grow again."""
    keys = {
        **TARGETS, **FP16, "dataset.kwargs": {"values": [0.1, 1000.0] * 6}, "precision.loss_scale.growth_interval": 1, "precision.loss_scale.init": 32.0,
    }  # fmt: skip
    for limit in (0, 2, 3):
        run, records = fitted(tmp_path, {**keys, "postmortem.skips": limit})
        assert len(held(records)) == run.examined.count == limit
        assert run.state.counters.skipped > 3
    saved = log_state(run)
    run.examined = type(run.examined)()
    resume_log(run, saved)
    assert asdict(run.examined)["count"] == 3
    assert run.examined.first_loss == pytest.approx(0.01)
    del saved["examined"]  # of an earlier version
    resume_log(run, saved)
    assert run.examined.count == 0


def test_guards_carry_the_verdict_even_if_no_skip_is_to_be_examined(tmp_path):
    off = {"postmortem.skips": 0}
    keys = {
        **TARGETS,
        **FP16,
        **off,
        "dataset.kwargs": {"values": [60000.0], "repeat": 60},
        "precision.loss_scale.patience": 4,
    }
    run, records = fitted(tmp_path, keys)
    (event,) = held(records)
    assert event["verdict"] == "scale_search"
    # The run stops at 8192, and the message does not say that there is nothing to do.
    assert event["message"].endswith("set precision.loss_scale.init=0.5, or a larger precision.loss_scale.patience")
    assert run.metadata["error"].endswith(event["message"])
    assert "4 steps in a row were skipped" in run.metadata["error"]

    run, records = fitted(tmp_path, {**TARGETS, **FP16, **off, "dataset.kwargs": {"values": [0.1, 0.2], "nan_at": 1}})
    (event,) = held(records)
    assert (event["verdict"], event["sample_ids"]) == ("bad_data", (1,))
    assert "bad data, not precision: the input of sample 1 is NaN or inf" in run.metadata["error"]


def test_losses_that_are_skipped_are_examined_too(tmp_path):
    keys = {
        **TARGETS,
        **FP16,
        "dataset.kwargs": {"values": [0.1, 0.2, 0.3], "nan_at": 1},
        "precision.on_nonfinite_loss": OnNonFiniteLoss["skip"],
    }
    run, records = fitted(tmp_path, keys)
    assert [event["verdict"] for event in held(records)] == ["bad_data"]
    assert run.metadata["error"] == ""


def test_a_post_mortem_that_fails_is_told_and_changes_nothing(tmp_path):
    keys = {**ROWS, **FP16, **HIGH, "model.name": "tests.test_examination:broken"}
    _, records = fitted(tmp_path, keys)
    event = held(records)[0]
    assert event["verdict"] == "failed"
    assert event["message"] == "the post-mortem failed (RuntimeError: only an accident)"


def test_hooks_that_break_in_a_post_mortem(tmp_path, monkeypatch):
    """The 2nd forward of the run is a replay. In the run without post-mortems it would be a step, so the hook counts replays."""
    import mprun.training.replay as replay
    from tests.test_examination import Moody  # as the run imports it

    def breaking(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Moody, "breaks_at", 0)
        try:
            return real(*args, **options)
        finally:
            monkeypatch.setattr(Moody, "breaks_at", 10**9)

    real = replay.run_again
    keys = {**ROWS, **FP16, **HIGH}
    off, _ = fitted(tmp_path, {**keys, "postmortem.skips": 0})
    monkeypatch.setattr(replay, "run_again", breaking)
    on, records = fitted(tmp_path, keys)
    assert [event["verdict"] for event in held(records)] == ["failed"] * 3, "none of them says that the search is known"
    assert "ZeroDivisionError: the hook of somebody else)" in held(records)[0]["message"]
    assert same(content(on), content(off))
    assert [len(m._forward_pre_hooks) for m in on.state.model.modules()] == [
        len(m._forward_pre_hooks) for m in off.state.model.modules()
    ]


def test_the_batch_is_kept_and_can_be_examined_later(tmp_path):
    keys = {
        **TARGETS,
        **FP16,
        "dataset.kwargs": {"values": [1000.0, 0.1]},
        "postmortem.save_batch": True,
        "precision.loss_scale.init": 2.0**15,
    }
    run, records = fitted(tmp_path, keys)
    (event,) = held(records)
    path = tmp_path / "postmortem" / "1.pt"
    torch.load(path, weights_only=True)
    window, scale, rng = load_window(path)
    assert (scale, window[0].targets.item(), window[0].ids.tolist()) == (2.0**15, 1000.0, [0])
    with switches(run.config, CPU):
        again = examine(run.state, window, loss_scale=scale, rng=rng)
    assert again.message == event["message"]
    assert path.stat().st_size < 20_000


def test_what_the_file_cannot_hold_or_the_disk_refuses_is_said(tmp_path, monkeypatch):
    keys = {
        **TARGETS,
        **FP16,
        "dataset.kwargs": {"values": [1000.0, 0.1]},
        "postmortem.save_batch": True,
        "precision.loss_scale.init": 2.0**15,
    }
    (tmp_path / "postmortem").write_text("a file is in the way")
    run, records = fitted(tmp_path, keys)
    assert len(held(records)) == 1
    assert any("the batch of attempt 1 was not kept" in record.get("message", "") for record in records)
    assert run.metadata["error"] == ""


def test_keys_change_no_hash():
    plain = {"seed": 0, "postmortem": {"skips": 3}}
    assert config_hash(plain) == config_hash({"seed": 0, "postmortem": {"skips": 0}})


def test_an_accelerator_may_have_gone_on(tmp_path):
    """Several steps are read at once there: the first overflowed, two were applied since, and the verdict says so."""
    from dataclasses import replace

    from mprun.training.loop import attempt, windows
    from mprun.training.outcomes import drain

    _, records = fitted(tmp_path, {**TARGETS, **FP16, "dataset.kwargs": {"values": [0.1]}})
    keys = {
        **TARGETS,
        **FP16,
        "dataset.kwargs": {"values": [1000.0, 0.1, 0.1]},
        "precision.loss_scale.init": 2.0**15,
        "optimizer.lr": 0.1,
    }
    records.clear()
    config = make_config(**keys)

    class Listing:
        def log(self, record: dict[str, Any]) -> None:
            records.append(record)

        def progress(self, applied: int, attempts: int) -> None:
            pass

    with switches(config, CPU):
        state, data, plan = build(config, CPU)
        run = Run(config, state, data, plan, [Listing()], tmp_path, best_of(config))  # type: ignore[list-item]
        for window in windows(run):
            attempt(run, window)
            state.position.batch += 1
        run.pending = [replace(entry, window=None) for entry in run.pending]  # as on an accelerator
        before = state.model.weight.clone()
        drain(run)
        assert torch.equal(before, state.model.weight)
    (event,) = held(records)
    assert event["message"].endswith("(with the weights of 2 steps later)")
    assert event["verdict"] == "scale_search"
