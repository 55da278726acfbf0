"""W&B can neither stop nor change a run: each call of it raises, exits, hangs or meddles, and the run is the same."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mprun.cli import main
from mprun.tracking import read_metrics, wandb_sink, wandb_start
from tests.case_code import TOY, checkpoint, latest, result
from tests.test_run import same as differences

WORDS = [*TOY, "precision=fp16_dynamic", "precision.loss_scale.init=65536", "dataset.kwargs.values=[0.5,0.1,0.2,0.4]"]
OPTIONAL = ["Table", "item", "Histogram", "Artifact", "add_file", "log_artifact"]
CALLS = ["setup", "Settings", "init", "define_metric", "log", "summary", "finish", *OPTIONAL]


class Fake(types.ModuleType):
    """As much of wandb as mprun calls. Whatever is called is noted; ``fault`` happens in the call named ``at``."""

    def __init__(self, at: str, fault: Callable[[], Any]) -> None:
        super().__init__("wandb")
        self.at, self.fault, self.calls = at, fault, list[tuple[str, Any]]()
        self.Settings: Any = self._class("Settings")
        self.Settings.model_fields = {}
        self.Table, self.Artifact, self.Histogram = map(self._class, ("Table", "Artifact", "Histogram"))

    def _class(self, name: str) -> Any:
        outer = self

        class Made:
            def __init__(self, *_: Any, **given: Any) -> None:
                outer.note(name, given)

            def add_file(self, *_: Any, **given: Any) -> None:
                outer.note("add_file", given)

        return Made

    def note(self, name: str, given: Any = None) -> None:
        self.calls.append((name, given))
        if name == self.at:
            self.fault()

    def setup(self, **_: Any) -> None:
        self.note("setup")

    def teardown(self) -> None:
        self.note("teardown")

    def init(self, **given: Any) -> Any:
        self.note("init", given)
        run = types.SimpleNamespace(dir=f"{given['dir']}/wandb/r/files", url=None, resumed=False, id=given["id"])
        for name in ("define_metric", "log", "log_artifact", "finish", "alert"):
            setattr(run, name, lambda *words, _name=name, **more: self.note(_name, words or more))
        outer = self

        class Summary(dict[str, Any]):
            def __setitem__(self, key: str, value: Any) -> None:
                outer.note("item", key)

            def update(self, *_: Any, **__: Any) -> None:
                outer.note("summary")

        run.summary = Summary()
        return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """The checkpoint and the records of the run without W&B."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        assert main([*WORDS, "tracking=disabled"]) == 0
        return checkpoint(), numbers(latest())


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_sink, "_stuck", threading.Event())
    monkeypatch.setattr(wandb_start, "at_exit", [])


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs, hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def numbers(run_dir: Path) -> list[Any]:
    """What the run logged, without times."""
    return [
        {key: value for key, value in record.items() if not key.startswith("perf/")} for record in read_metrics(run_dir)
    ]


def run_with(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.chdir(tmp_path)
    return main([*WORDS, "tracking.mode=offline", "tracking.log_checkpoint=last", *words])


def same(plain: tuple[dict[str, Any], list[Any]]) -> None:
    """This run is the one without W&B: weights, optimizer, generators, and every number that was logged."""
    ours, (theirs, logged) = checkpoint(), plain
    for part in ("model", "optimizer", "rng", "scale", "counters"):
        assert differences(ours[part], theirs[part], part) == []
    assert numbers(latest()) == logged
    assert result()["status"] == "ok"


def raising() -> None:
    raise RuntimeError("ill")


def leaving() -> None:
    raise SystemExit(3)


def cancelled() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        *((at, raising) for at in CALLS),
        *((at, fault) for at in ("init", "log", "finish") for fault in (leaving, cancelled)),
    ],
)
def test_a_call_that_fails_costs_one_line(
    at: str, fault: Callable[[], Any], plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    fake = Fake(at, fault)
    assert run_with(fake, tmp_path, monkeypatch) == 0
    same(plain)
    said = capfd.readouterr().err
    assert said.count("W&B") == 1, said
    names = [name for name, _ in fake.calls]
    assert at in names
    if at in OPTIONAL:
        assert "W&B does without the" in said
        assert names.count("log") == len([r for r in read_metrics(latest()) if r["kind"] != "event"])
    else:
        assert "W&B is left alone" in said
    started = at not in ("setup", "Settings", "init")
    assert ("finish" in names) == started, "closed in any case"
    assert (result()["wandb"] is not None) == started


@pytest.mark.parametrize("at", CALLS)
def test_a_call_that_hangs_costs_a_bounded_time(
    at: str, plain: Any, gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(wandb_sink, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(wandb_sink, "OFFLINE_FINISH_TIMEOUT_S", 0.5)
    before = (sys.stdin, sys.stdout, sys.stderr, sys.argv, sys.excepthook, sys.exit, dict(os.environ))
    begin = time.monotonic()
    assert run_with(Fake(at, lambda: gate.wait(60)), tmp_path, monkeypatch) == 0
    assert time.monotonic() - begin < 20
    assert (sys.stdin, sys.stdout, sys.stderr, sys.argv, sys.excepthook, sys.exit, dict(os.environ)) == before
    same(plain)
    said = capfd.readouterr().err
    assert said.count("W&B is left alone") == 1, said
    # A sweep does not wait as often as it has runs.
    begin = time.monotonic()
    assert run_with(Fake(at, lambda: gate.wait(60)), tmp_path, monkeypatch, "train.steps=1") == 0
    assert "did not answer earlier" in capfd.readouterr().err


def test_a_call_that_meddles_changes_nothing(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meddle() -> None:
        random.seed(7)
        np.random.seed(7)
        sys.excepthook = lambda *_: None
        sys.exit = lambda *_: None  # type: ignore[assignment]
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.environ["WANDB_SERVICE"] = "me"

    before = (sys.stdin, sys.stdout, sys.stderr, sys.argv, sys.excepthook, sys.exit)
    assert run_with(Fake("init", meddle), tmp_path, monkeypatch) == 0
    assert (sys.stdin, sys.stdout, sys.stderr, sys.argv, sys.excepthook, sys.exit) == before
    assert "WANDB_SERVICE" not in os.environ
    same(plain)


@pytest.mark.parametrize(
    ("words", "status"), [([], 0), (["dataset.kwargs.values=[nan]"], 1), (["dataset.kwargs.values=[0.1,kill]"], 1)]
)
def test_the_exit_status_is_that_of_the_process(
    words: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake("", raising)
    if words and "kill" in words[0]:
        # A bug of ours, with a traceback: W&B is closed as failed all the same.
        monkeypatch.setattr("mprun.training.loop.log_train", lambda run: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_with(fake, tmp_path, monkeypatch)
    else:
        assert run_with(fake, tmp_path, monkeypatch, *words) == status
    assert [given["exit_code"] for name, given in fake.calls if name == "finish"] == [status]
    assert result()["exit_code"] == status
    alerts = [given for name, given in fake.calls if name == "alert"]
    assert len(alerts) == (result()["status"] == "diverged")
