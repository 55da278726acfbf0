"""Public bug reports about whole runs: what a checkpoint must bring back, what resume may not ignore, paths, names, sweeps."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import mprun.training.loop as loop
from mprun.cli import main
from mprun.training.metrics import Best
from tests import case_code
from tests.case_code import ROWS, TOY, checkpoint, latest, records, result
from tests.test_faults import REPOSITORY
from tests.test_run import same

STATE = ("model", "masters", "optimizer", "scale", "ema", "counters", "position", "rng")
GO_ON = ["resume=latest", "trust=[tests]"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [path for key in STATE for path in same(a[key], b[key], key)]


# --- what a checkpoint brings back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_scale_growth_tracker_and_skip_count_come_back(folder, hysteresis):  # case C47
    """A spike, three clean steps, a stop; one more clean step must double the scale. A lost tracker would leave it."""
    spikes = [1e4] * hysteresis
    values = [*spikes, 0.1, 0.1, 0.1, 0.1, 1e4, 0.1]
    words = [*TOY, "precision=fp16_dynamic", "precision.loss_scale.init=2048", "precision.loss_scale.growth_interval=4", "optimizer.lr=0",
             f"precision.loss_scale.hysteresis={hysteresis}", f"dataset.kwargs.values={values}".replace(" ", ""), "train.ema.decay=0.9"]  # fmt: skip
    assert main([*words, "train.steps=3"]) == 0
    saved = checkpoint()["scale"]
    assert (saved["scale"], saved["growth_tracker"], saved["hysteresis_left"]) == (1024.0, 3, hysteresis)
    assert main([*GO_ON, "train.steps=4"]) == 0
    saved = checkpoint()
    assert (saved["scale"]["scale"], saved["scale"]["growth_tracker"]) == (2048.0, 0)
    assert (result()["steps_applied"], result()["steps_skipped"]) == (4, hysteresis)
    assert main([*GO_ON, "train.steps=5"]) == 0
    resumed = checkpoint()
    assert resumed["counters"] == {
        "attempts": hysteresis + 6,
        "applied": 5,
        "skipped": hysteresis + 1,
        "nonfinite": 0,
        "empty": 0,
    }
    assert main([*words, "train.steps=5"]) == 0
    assert different(checkpoint(), resumed) == []


@pytest.mark.parametrize(
    "keys", [["precision=fp32"], ["precision=fp16_dynamic", "precision.loss_scale.init=1048576"]], ids=["fp32", "fp16"]
)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_sees_the_samples_and_ends_at_the_weights_of_the_unbroken_one(
    folder, monkeypatch, keys, workers
):  # case C52
    """Shuffle, dropout, noise of three generators; 10 batches an epoch; stopped at 7 (inside) and 10 (the border), resumed to 25."""
    seen: list[tuple[int, ...]] = []
    inner = loop.train_step

    def spy(state: Any, window: Any, **options: Any) -> Any:
        seen.append(tuple(int(i) for batch in window for i in batch.ids))
        return inner(state, window, **options)

    monkeypatch.setattr(loop, "train_step", spy)
    words = [*ROWS, *keys, f"dataset.workers={workers}", "schedule=constant", "train.ema.decay=0.9"]

    def run(words: list[str]) -> list[tuple[int, ...]]:
        seen.clear()
        assert main(words) == 0
        return list(seen)

    whole = run([*words, "train.steps=25"])
    unbroken = checkpoint()
    if "fp32" not in keys[0]:
        assert unbroken["counters"]["skipped"] >= 1
    epochs = [[i for ids in whole[start : start + 10] for i in ids] for start in (0, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(80))
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    for stop in (7, 10):
        first = run([*words, f"train.steps={stop}"])
        assert checkpoint()["step"] == stop
        second = run([*GO_ON, "train.steps=25"])
        assert first + second == whole
        assert different(checkpoint(), unbroken) == []
    assert run([*words, "train.steps=25"]) == whole


def test_after_a_crash_every_step_counts_once(folder, monkeypatch):  # case C66
    """Crashed in step 9, checkpoint every 5, resumed to 12: steps 6 to 8 are there twice, and it is plain which ones count."""

    def fail() -> None:
        raise ConnectionError("the power has gone")

    monkeypatch.setitem(case_code.ACCIDENTS, "crash", fail)
    words = [
        *ROWS,
        "precision=fp32",
        "train.steps=12",
        "train.checkpoint_every=5",
        "train.eval_every=4",
        "dataset.kwargs.accident=crash",
    ]
    # 1 sample to look at the data, 8 to observe the first batch, 8 a step; accidents are off when MPRUN_TEST_NO_ACCIDENT is set.
    with pytest.raises(ConnectionError):
        main([*words, f"dataset.kwargs.at={9 + 8 * 8 + 1}"])
    assert (result()["status"], checkpoint()["step"]) == ("failed", 5)
    monkeypatch.setenv("MPRUN_TEST_NO_ACCIDENT", "1")
    assert main(GO_ON) == 0
    everything = [(record["step"], record["segment"]) for record in records("train")]
    assert everything == [(step, 0) for step in range(1, 9)] + [(step, 1) for step in range(6, 13)]
    counting = {record["step"]: record["segment"] for record in records("train", effective=True)}
    assert counting == {step: int(step > 5) for step in range(1, 13)}
    assert [(record["step"], record["segment"]) for record in records("val", effective=True)] == [
        (4, 0),
        (8, 1),
        (12, 1),
    ]
    (resumed,) = (record for record in records("event") if record["event"] == "resume")
    assert (resumed["resumed_from_step"], resumed["segment"]) == (5, 1)
    told = result()
    assert told["steps_applied"] == 12


# --- what a resume may not take ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [
    (lambda: nn.Sequential(*case_code.net(width=24)), "shape"),
    (lambda: nn.Sequential(*list(case_code.net())[:4], nn.Linear(16, 4, bias=False)), "1 extra (first: 4.bias)"),
    (lambda: nn.Sequential(*case_code.net(), nn.Linear(4, 4)), "2 missing (first: 5.bias)"),
])  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused_whole(folder, monkeypatch, capsys, change, said):  # case C51
    """The model's code has changed since: no tensor is loaded, nothing is written, the file and the first name are told."""
    assert main([*ROWS, "precision=fp16_dynamic", "train.steps=3"]) == 0
    capsys.readouterr()
    path = latest() / "checkpoints" / "last.pt"
    before = {file: file.read_bytes() for file in latest().rglob("*") if file.is_file()}
    other = change()
    monkeypatch.setattr(case_code, "net", lambda: other)
    assert main([*GO_ON, "train.steps=6"]) == 2
    err = capsys.readouterr().err
    assert f"{path} is of another model" in err
    assert said in err
    assert "Traceback" not in err
    assert before == {file: file.read_bytes() for file in latest().rglob("*") if file.is_file()}


def test_resume_goes_on_or_says_why_not_and_auto_says_which(folder, capsys):  # case C51
    for target in ("runs/nope.pt", "runs", "latest"):
        assert main([*ROWS, f"resume={target}"]) == 2
        assert f"resume={target}" in capsys.readouterr().err
    empty = folder / "empty"
    empty.mkdir()
    assert main([*ROWS, "resume=empty"]) == 2
    assert f"{empty} holds no checkpoint" in capsys.readouterr().err
    assert list(folder.iterdir()) == [empty]
    assert main([*ROWS, "resume=auto", "train.steps=2"]) == 0
    assert records("event") == []
    assert main([*ROWS, "resume=auto", "train.steps=4"]) == 0
    (resumed,) = records("event")
    assert resumed["message"] == "resumed from step 2"


def test_overrides_are_in_force_on_the_first_resumed_step(folder, capsys):  # case C55
    """w = 0.2 after one step of lr 0.1. Then -1.6 is clipped to -0.5, decay adds 0.1 * 0.2: w = 0.2 + 0.01 * 0.48."""
    assert main([*TOY, "precision=fp32", "dataset.kwargs.values=[1.0,1.0,1.0]", "train.steps=1"]) == 0
    assert checkpoint()["model"]["weight"].item() == pytest.approx(0.2)
    new = {"optimizer.lr": 0.01, "optimizer.weight_decay": 0.1, "train.clip_norm": 0.5, "train.steps": 2}
    capsys.readouterr()
    assert main([*GO_ON, *(f"{key}={value}" for key, value in new.items())]) == 0
    assert checkpoint()["model"]["weight"].item() == pytest.approx(0.2048, rel=1e-5)
    said = capsys.readouterr().err
    config = OmegaConf.load(latest() / "config.yaml")
    for key, value in new.items():
        assert f"{key} " in said, "every changed key is told"
        assert OmegaConf.select(config, key) == value
    assert [record["train/lr"] for record in records("train")] == [0.1, 0.01]


def test_a_new_base_rate_scales_the_schedule_from_where_it_is(folder):  # case C55
    words = [
        *TOY,
        "precision=fp32",
        "dataset.kwargs.values=[1.0]",
        "dataset.kwargs.repeat=8",
        "schedule=cosine",
        "train.steps=8",
    ]
    assert main([*words, "train.checkpoint_every=4", "train.keep=9", "optimizer.lr=0.2"]) == 0
    before = [record["train/lr"] for record in records("train")]
    (latest() / "checkpoints" / "last.pt").unlink()
    (latest() / "checkpoints" / "step_8.pt").unlink()
    assert main([*GO_ON, "optimizer.lr=0.02"]) == 0
    after = [record["train/lr"] for record in records("train", effective=True)]
    assert after == pytest.approx(before[:4] + [rate / 10 for rate in before[4:]])


def test_a_new_growth_interval_counts_the_saved_steps(folder):  # case C55
    words = [
        *TOY,
        "precision=fp16_dynamic",
        "precision.loss_scale.init=1024",
        "dataset.kwargs.values=[0.1]",
        "dataset.kwargs.repeat=8",
    ]
    assert main([*words, "train.steps=2"]) == 0
    assert main([*GO_ON, "train.steps=3", "precision.loss_scale.growth_interval=3"]) == 0
    assert checkpoint()["scale"]["scale"] == 2048.0
    assert main([*GO_ON, "train.steps=4", "precision.loss_scale.max=1500"]) == 0, "a lower ceiling holds at once"
    assert checkpoint()["scale"]["scale"] == 1500.0


# --- best --------------------------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
SEQUENCES = [
    ([NAN, 0.5, 0.4], 0.4, 2, 0),
    ([0.5, NAN, 0.6], 0.5, 0, 2),
    ([NAN, NAN, NAN], None, None, 3),
    ([INF, 0.5], 0.5, 1, 0),
    ([-INF, 0.5], 0.5, 1, 0),
    ([0.5, None, 0.4], 0.4, 2, 0),
    ([None, None], None, None, 2),
]


@pytest.mark.parametrize(("sequence", "best", "epoch", "stale"), SEQUENCES)
def test_nan_and_absent_are_no_improvement_and_never_the_best(sequence, best, epoch, stale):  # case C57
    for mode, sign in (("min", 1.0), ("max", -1.0)):
        record = Best("val/loss", mode)
        for number, value in enumerate(sequence):
            record.update({} if value is None else {"val/loss": sign * value}, step=number + 1, epoch=number)
        assert record.value == (None if best is None else sign * best)
        assert (record.epoch, record.stale) == (epoch, stale)


@pytest.mark.parametrize(("sequence", "best", "epoch", "stale"), SEQUENCES)
def test_best_checkpoint_and_warnings_of_a_run_with_such_metrics(
    folder, monkeypatch, sequence, best, epoch, stale
):  # case C57
    scores = iter(sequence)

    def scored(*_: Any) -> dict[str, float]:
        score = next(scores)
        return {} if score is None else {"loss": score}

    monkeypatch.setattr(loop, "eval_step", scored)
    words = [
        *TOY,
        "precision=fp32",
        "dataset.kwargs.values=[0.1,0.1]",
        f"train.epochs={len(sequence)}",
        "train.early_stop.metric=val/loss",
    ]
    assert main(words) == 0
    got = result()
    assert got["status"] == "ok"
    assert checkpoint()["step"] == 2 * len(sequence), "last is saved in any case"
    if best is None:
        assert got["best"] is None
        assert not (latest() / "checkpoints" / "best.pt").exists()
    else:
        assert (got["best"]["value"], got["best"]["epoch"]) == (best, epoch)
        assert checkpoint(name="best.pt")["step"] == 2 * (epoch + 1)
    bad = [value for value in sequence if value is None or not math.isfinite(value)]
    warnings = [record["message"] for record in records("event") if record["event"] == "warning"]
    assert len(warnings) == len(bad)
    assert all("val/loss" in message for message in warnings)


def test_nan_counts_for_early_stopping(folder, monkeypatch):  # case C57
    monkeypatch.setattr(loop, "eval_step", lambda *_: {"loss": NAN})
    words = [
        *TOY,
        "precision=fp32",
        "dataset.kwargs.values=[0.1]",
        "train.epochs=50",
        "train.early_stop.metric=val/loss",
        "train.early_stop.patience=3",
    ]
    assert main(words) == 0
    assert (result()["steps_applied"], result()["best"]) == (3, None)


def test_the_accuracy_of_nan_is_not_the_share_of_class_0(folder, monkeypatch):  # case C57
    """A model that answers NaN in evaluation "predicts" class 0 everywhere, which must not become the best top-1."""
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * (1.0 if self.training else NAN))
    assert main([*ROWS, "precision=fp32", "train.epochs=2"]) == 0
    (first, second) = records("val")
    assert all(math.isnan(record[key]) for record in (first, second) for key in ("val/loss", "val/top1"))
    assert result()["best"] is None
    assert not (latest() / "checkpoints" / "best.pt").exists()


# --- names and paths -----------------------------------------------------------------------------------------------------------------


def test_own_names_can_be_pasted_back_unquoted(folder):  # case C60
    """Whatever the run is called: its folder and files hold nothing that Hydra or a shell would read as something else."""
    name = """'name="it\\'s a=1, b#2 (x) [y] {z} ü"'"""
    assert main([*ROWS, name[1:-1], "precision=fp32", "train.steps=2", "train.checkpoint_every=1", "train.keep=2"]) == 0
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    assert any("step_2.pt" in path for path in paths)
    for path in paths:
        assert re.fullmatch(r"[A-Za-z0-9._/-]+", path), path
    run = os.path.relpath(latest(), folder)
    for step, target in enumerate((f"{run}/checkpoints/step_2.pt", run, "outputs/latest"), start=3):
        assert main([f"resume={target}", "trust=[tests]", f"train.steps={step}"]) == 0
        assert result()["steps_applied"] == step
    assert main(["resume=epoch=3,it's#.pt"]) == 2


@pytest.fixture
def elsewhere(folder):
    """A folder with what a user's relative paths name, and another one to call from."""
    assert main([*ROWS, "precision=fp32", "train.steps=2", "hydra.run.dir=first"]) == 0
    (folder / "mine.yaml").write_text("# mine\ntrain:\n  steps: 3\n")
    (folder / "init.pt").write_bytes((folder / "first/checkpoints/last.pt").read_bytes())
    return folder


def call(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mprun", *words], cwd=cwd, env=own, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("how", [[], ["hydra.job.chdir=true"], ["-m"], ["-m", "hydra.job.chdir=true"]], ids=" ".join)
@pytest.mark.slow
def test_relative_paths_mean_where_the_command_was_typed(elsewhere, how):  # case C62
    """Alone and in a sweep, with Hydra's chdir and without: the same files are found, and nothing is written anywhere else."""
    before = set(elsewhere.rglob("*"))
    words = [*ROWS, "precision=fp32", "recipe=./mine.yaml", "model.init=./init.pt", "dataset.root=data", "optimizer.lr=0", "hydra.run.dir=./run",
             "hydra.sweep.dir=./run", "hydra.sweep.subdir=.", "optimizer.weight_decay=0"]  # fmt: skip
    done = call([*words, *how], elsewhere)
    assert done.returncode == 0, done.stderr
    run = elsewhere / "run"
    config = OmegaConf.load(run / "config.yaml")
    assert (config.model.init, config.dataset.root) == (str(elsewhere / "init.pt"), str(elsewhere / "data"))
    assert result(run)["steps_applied"] == 3
    init = checkpoint(elsewhere / "first")["model"]
    assert (
        same(
            {k: v for k, v in init.items() if "running" not in k and "num" not in k},
            {k: v for k, v in checkpoint(run)["model"].items() if k in init and "running" not in k and "num" not in k},
        )
        == []
    )
    written = {path for path in set(elsewhere.rglob("*")) - before if path != run and run not in path.parents}
    assert written == set(), "outside the run folder"


@pytest.mark.slow
def test_resume_by_a_relative_path_from_another_folder(elsewhere):  # case C62
    deeper = elsewhere / "a" / "b"
    deeper.mkdir(parents=True)
    assert call(["-m", "resume=../../first", "trust=[tests]", "train.steps=4,5"], deeper).returncode != 0, (
        "not a run from scratch"
    )
    assert not (deeper / "outputs/latest").exists()
    done = call(["resume=../../first", "trust=[tests]", "train.steps=4"], deeper)
    assert done.returncode == 0, done.stderr
    assert result(elsewhere / "first")["steps_applied"] == 4
    assert {path.name for path in deeper.iterdir()} <= {"outputs"}, "the refused sweep's folder at most"


# --- sweeps ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failing_jobs_of_a_sweep_leave_the_others_alone(folder):  # case C64
    """Two of four diverge (lr 1e30 in FP32): the others complete, each folder says how its job ended, the exit status is not 0."""
    words = [
        *ROWS,
        "-m",
        "precision=fp32",
        "train.steps=4",
        "optimizer=sgd",
        "optimizer.lr=0.1,1e30,0.01,1e35",
        "hydra.sweep.dir=sweep",
    ]
    done = call(words, folder)
    assert done.returncode == 1, done.stderr
    status = {
        float(found["lr"]): found["status"] for found in map(_job, sorted((folder / "sweep").glob("*/result.json")))
    }
    assert status == {0.1: "ok", 1e30: "diverged", 0.01: "ok", 1e35: "diverged"}
    for path in (folder / "sweep").glob("*/result.json"):
        found = json.loads(path.read_text())
        assert (found["error"] is None) == (found["status"] == "ok")


def _job(path: Path) -> dict[str, Any]:
    config = OmegaConf.load(path.parent / "config.yaml")
    return {"lr": config.optimizer.lr, **json.loads(path.read_text())}


@pytest.mark.parametrize("sweep", ["optimizer.lr=0.1,bad,0.01", "model=mlp,missing"])
@pytest.mark.slow
def test_a_value_that_no_job_could_run_with_is_told(folder, sweep):  # case C64
    done = call(
        [
            "-m",
            "model=mlp",
            "tracking=disabled",
            "device=cpu",
            "train.steps=1",
            "dataset.limit=64",
            sweep,
            "hydra.sweep.dir=sweep",
        ],
        folder,
    )
    assert done.returncode == 1
    wrong = re.search(r"bad|missing", sweep)[0]
    assert wrong in done.stdout
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    found = [json.loads(path.read_text()) for path in (folder / "sweep").glob("*/result.json")]
    assert sorted(result["status"] for result in found) == ["failed", *["ok"] * (len(found) - 1)]
    assert len(found) == sweep.count(",") + 1
