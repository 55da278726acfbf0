"""Whole runs through the command line: the run folder's contract, ends of every kind, resume bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from mprun.cli import main
from mprun.config_check import to_config
from mprun.tracking.jsonl import read_metrics

QUICK = [
    "model=mlp",
    "tracking=disabled",
    "device=cpu",
    "train.epochs=2",
    "train.batch_size=128",
    "dataset.limit=512",
    "train.log_every=1",
]

# A dataset and a model of a user's own, for what the built-in ones cannot show.
USER = """
import random
import numpy, torch
from torch import nn
from torch.utils.data import Dataset

class Rows(Dataset):
    num_classes = 4
    def __init__(self, n, bad=None, noise=True):
        g = torch.Generator().manual_seed(n)
        self.x, self.y = torch.randn(n, 6, generator=g), torch.randint(4, (n,), generator=g)
        self.bad, self.noise = bad, noise
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        x = self.x[i].clone()
        if self.noise:
            x += 0.1 * (random.random() + float(numpy.random.rand()) + float(torch.rand(())))
        if i == self.bad:
            x[0] = float("nan")
        return x, self.y[i]

def rows(n=80, bad=None, noise=True):
    return Rows(n, bad, noise), Rows(32, noise=False)

def net(input_shape, num_classes, amplify=1.0):
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "userpkg.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("userpkg", None)
    yield tmp_path
    sys.modules.pop("userpkg", None)


USERS = ["trust=[userpkg]", "model=python", "model.name=userpkg:net", "dataset=python", "dataset.name=userpkg:rows",
         "tracking=disabled", "device=cpu", "train.batch_size=8", "train.log_every=1", "optimizer.lr=1e-2"]  # fmt: skip


def latest() -> Path:
    return Path("outputs/latest").resolve()


def result(run: Path | None = None) -> dict[str, Any]:
    return json.loads(((run or latest()) / "result.json").read_text())


def checkpoint(run: Path | None = None) -> dict[str, Any]:
    return torch.load((run or latest()) / "checkpoints" / "last.pt", weights_only=True)


def same(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two checkpoints differ, bit for bit."""
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        keys = [] if a.keys() == b.keys() else [f"{path}: keys"]
        return keys + [p for key in a.keys() & b.keys() for p in same(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple):
        return [] if len(a) == len(b) and not any(same(x, y) for x, y in zip(a, b, strict=True)) else [path]
    return [] if a == b or (a != a and b != b) else [path]


def state_of(run: Path | None = None) -> dict[str, Any]:
    """A checkpoint without what may differ between a resumed and an unbroken run: times and the config's resume."""
    saved = checkpoint(run)
    return {key: value for key, value in saved.items() if key not in ("config", "log")}


def test_a_run_folder_keeps_its_contract(folder):
    assert main([*QUICK, "precision=fp16_dynamic", "seed=3"]) == 0
    run = latest()
    assert sorted(path.name for path in run.iterdir()) == [
        ".hydra", ".lock", "checkpoints", "config.yaml", "env.json", "metrics.jsonl", "modules.json", "probe.jsonl", "result.json"]  # fmt: skip
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best.pt", "last.pt"]
    assert sorted(path.name for path in (run / ".hydra").iterdir()) == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    config = to_config(OmegaConf.load(run / "config.yaml"))
    assert (config.seed, config.precision.name) == (3, "fp16_dynamic")
    assert OmegaConf.load(run / ".hydra" / "overrides.yaml") == [*QUICK, "precision=fp16_dynamic", "seed=3"]

    got = result()
    assert {"status", "error", "steps_applied", "steps_skipped", "final", "best", "loss_scale", "wall_s", "train_s",
            "examples_per_s", "peak_memory", "wandb"} <= got.keys()  # fmt: skip
    assert (got["status"], got["error"], got["steps_applied"], got["loss_scale"], got["wandb"]) == (
        "ok",
        None,
        8,
        65536.0,
        None,
    )
    assert got["best"]["metric"] == "val/top1"
    assert 0.3 < got["final"]["val/top1"] <= 1.0

    records = read_metrics(run / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 9))
    assert {"train/loss", "train/top1", "train/grad_norm", "train/lr", "precision/loss_scale", "precision/skipped_steps",
            "perf/examples_per_s", "perf/step_ms", "perf/peak_memory_bytes", "attempt", "epoch"} <= train[0].keys()  # fmt: skip
    assert [record["step"] for record in records if record["kind"] == "val"] == [4, 8]

    env = json.loads((run / "env.json").read_text())
    assert (env["seed"], env["cpu_fp16"], env["tf32"]) == (3, "fast", {"matmul": False, "cudnn": False})
    assert env["data_sha256"]
    assert env["versions"]["torch"] == torch.__version__.split("+")[0]
    modules = {row["module"]: row for row in json.loads((run / "modules.json").read_text())}
    linear = next(row for row in modules.values() if row["class"] == "Linear")
    assert (linear["param_dtype"], linear["compute_dtype"], linear["output_dtype"]) == ("float32", "float16", "float16")


@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        "bf16",
        "fp16_dynamic",
        "fp16_static",
        "fp16_unscaled",
        "fp16_master_dynamic",
        "bf16_master",
        "bf16_pure",
        "fp16_pure",
    ],
)
def test_every_precision_trains(folder, precision):
    assert main([*QUICK, f"precision={precision}"]) == 0
    assert result()["status"] == "ok"
    dtype = {"fp": "float16", "bf": "bfloat16"}[precision[:2]] if precision != "fp32" else "float32"
    rows = json.loads((latest() / "modules.json").read_text())
    assert {row["output_dtype"] for row in rows if row["class"] == "Linear"} == {dtype}
    assert json.loads((latest() / "env.json").read_text())["cpu_fp16"] == ("fast" if dtype == "float16" else None)


def test_tf32_is_refused_on_the_cpu_before_anything_exists(folder, capsys):
    assert main([*QUICK, "precision=tf32"]) == 2
    assert "precision=fp32" in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize("kind", ["native", "fast"])
def test_cpu_fp16_kernels_are_recorded(folder, kind):
    assert main([*QUICK, f"numerics.cpu_fp16={kind}", "train.epochs=1"]) == 0
    assert json.loads((latest() / "env.json").read_text())["cpu_fp16"] == kind


def test_two_runs_are_bit_identical_and_another_seed_is_not(folder):
    states = []
    for seed in (1, 1, 2):
        assert main([*QUICK, f"seed={seed}"]) == 0
        states.append(state_of()["model"])
    assert same(states[0], states[1]) == []
    assert same(states[0], states[2]) != []


RESUME_CASES = {
    "fp32": ["precision=fp32"],
    "fp16_skips": [
        "precision=fp16_dynamic",
        "precision.loss_scale.init=16777216",
        "precision.loss_scale.growth_interval=3",
    ],
    "accumulate": ["precision=fp16_dynamic", "train.accumulate=3", "train.ema.decay=0.9", "train.clip_norm=0.5"],
    "masters": ["precision=fp16_master_dynamic", "train.ema.decay=0.9", "precision.loss_scale.init=16777216"],
    "sgd_bf16": ["precision=bf16", "optimizer=sgd", "optimizer.lr=0.01"],
    "unfused": ["precision=fp16_dynamic", "optimizer.name=lamb", "precision.loss_scale.init=16777216"],
}


@pytest.mark.parametrize("keys", RESUME_CASES.values(), ids=RESUME_CASES)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_equals_unbroken_bit_for_bit(folder, keys, workers):
    """Stop in the middle of an epoch and at its end; 10 batches an epoch; dropout, BatchNorm and python/numpy/torch noise."""
    words = [
        *USERS,
        *keys,
        f"dataset.workers={workers}",
        "schedule=cosine",
        "train.checkpoint_every=1",
        "train.keep=99",
        "train.steps=17",
    ]
    assert main(words) == 0
    unbroken, whole = state_of(), latest()
    steps = {int(path.stem[5:]): path for path in (whole / "checkpoints").glob("step_*.pt")}
    assert sorted(steps) == list(range(1, 18))

    # The same run, cut at a step border: its folder, with the checkpoint of that step as the last one.
    for stop in (3, 10):
        cut = Path(f"cut_{stop}")
        subprocess.run(["cp", "-r", str(whole), str(cut)], check=True)
        for path in (cut / "checkpoints").iterdir():
            if path.name != f"step_{stop}.pt":
                path.unlink()
        (cut / "result.json").unlink()
        assert main([f"resume={cut}", "trust=[userpkg]"]) == 0
        assert same(unbroken, state_of(cut.resolve())) == [], stop
        records = read_metrics(cut / "metrics.jsonl", effective=True)
        assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 18))


def test_order_differs_between_epochs_and_workers_see_the_same(folder):
    seen = {}
    for workers in (0, 2):
        assert main([*USERS, f"dataset.workers={workers}", "train.epochs=1", "precision=fp32"]) == 0
        seen[workers] = state_of()["model"]
    assert same(seen[0], seen[2]) == []


def test_evaluation_changes_nothing(folder):
    states = []
    for every in (2, 1000):
        assert main([*USERS, f"train.eval_every={every}", "train.epochs=2", "precision=fp16_dynamic"]) == 0
        states.append(state_of()["model"])
    assert same(states[0], states[1]) == []


def test_finished_run_resumed_does_nothing(folder, capsys):
    assert main(QUICK) == 0
    before = {path: path.stat().st_mtime_ns for path in latest().rglob("*")}
    assert main(["resume=latest"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in latest().rglob("*")}


def test_more_epochs_at_resume_go_on_in_the_same_folder(folder):
    assert main(QUICK) == 0
    run = latest()
    assert main(["resume=latest", "train.epochs=3"]) == 0
    assert latest() == run
    assert result()["steps_applied"] == 12
    assert to_config(OmegaConf.load(run / "config.yaml")).train.epochs == 3


def test_overrides_at_resume_are_in_force(folder, capsys):
    assert main([*QUICK, "precision=fp32", "optimizer.lr=0.1", "schedule=constant"]) == 0
    assert (
        main(
            [
                "resume=latest",
                "train.epochs=4",
                "optimizer.lr=0.01",
                "optimizer.weight_decay=0.1",
                "train.clip_norm=1e-3",
            ]
        )
        == 0
    )
    assert "optimizer.lr 0.1 -> 0.01" in capsys.readouterr().err
    records = [record for record in read_metrics(latest() / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["train/lr"] for record in records] == [0.1] * 8 + [0.01] * 8


@pytest.mark.parametrize(("words", "said"), [
    (["model=resnet"], "model.name"), (["train.batch_size=64"], "train.batch_size"), (["seed=9"], "seed"),
    (["optimizer=sgd"], "optimizer.name"), (["train.ema.decay=0.9"], "ema"), (["precision.loss_scale.init=1024"], "loss_scale.init"),
])  # fmt: skip
def test_overrides_that_would_make_another_run_are_refused_by_name(folder, capsys, words, said):
    assert main(QUICK) == 0
    before = checkpoint()
    assert main(["resume=latest", "train.epochs=3", *words]) == 2
    assert said in capsys.readouterr().err
    assert same(before, checkpoint()) == []


@pytest.mark.parametrize(
    ("target", "said"), [("runs/nope.pt", "no such file"), ("latest", "no run yet"), (".", "holds no checkpoint")]
)
def test_missing_resume_target_is_an_error(folder, capsys, target, said):
    assert main([*QUICK, f"resume={target}"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_resume_auto_starts_when_there_is_nothing_and_goes_on_when_there_is(folder):
    assert main([*QUICK, "resume=auto"]) == 0
    first = latest()
    assert main([*QUICK, "resume=auto", "train.epochs=3"]) == 0
    assert latest() == first
    assert result()["steps_applied"] == 12


@pytest.mark.parametrize("damage", ["half", "empty", "foreign", "pickle"])
def test_damaged_checkpoints_are_named_and_never_loaded(folder, capsys, damage):
    assert main(QUICK) == 0
    path = latest() / "checkpoints" / "last.pt"
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        torch.save({"weight": torch.zeros(2)}, path)
    else:
        torch.save({"format": 1, "evil": Evil()}, path)
    assert main(["resume=latest", "train.epochs=3"]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert "Traceback" not in err
    assert not Path("pwned").exists()


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_nan_data_stops_the_run_and_names_the_sample(folder, capsys):
    assert main([*USERS, "dataset.kwargs.bad=7", "train.epochs=1", "precision=fp16_dynamic"]) == 1
    err = capsys.readouterr().err
    assert "sample 7" in err
    assert "step " in err
    got = result()
    assert (got["status"], got["steps_skipped"], got["loss_scale"]) == ("diverged", 0, 65536.0)


def test_nan_data_can_be_skipped_and_is_counted(folder):
    words = [
        *USERS,
        "dataset.kwargs.bad=7",
        "train.epochs=2",
        "precision=fp16_dynamic",
        "precision.on_nonfinite_loss=skip",
    ]
    assert main(words) == 0
    got = result()
    assert (got["status"], got["counters"]["nonfinite"], got["steps_applied"], got["loss_scale"]) == (
        "ok",
        2,
        18,
        65536.0,
    )
    saved = checkpoint()
    assert all(torch.isfinite(value).all() for value in saved["model"].values())


def test_patience_stops_a_run_that_only_skips(folder, capsys):
    words = [
        "precision=fp16_static",
        "precision.loss_scale.max=1e30",
        "precision.loss_scale.init=1e30",
        "precision.loss_scale.patience=4",
    ]
    assert main([*QUICK, *words]) == 1
    assert "4 steps in a row" in capsys.readouterr().err
    got = result()
    assert (got["status"], got["steps_skipped"], got["steps_applied"]) == ("diverged", 4, 0)


def test_retry_runs_the_same_batch_until_it_fits(folder):
    words = [
        "precision=fp16_dynamic",
        "precision.loss_scale.max=1e12",
        "precision.loss_scale.init=1e12",
        "precision.loss_scale.on_overflow=retry",
    ]
    assert main([*QUICK, *words]) == 0
    got = result()
    assert got["steps_applied"] == 8  # no batch was lost
    assert got["steps_skipped"] > 10
    assert got["counters"]["attempts"] == 8 + got["steps_skipped"]


def test_skips_cost_no_applied_steps_when_steps_are_asked_for(folder):
    words = [
        "precision=fp16_dynamic",
        "precision.loss_scale.max=1e12",
        "precision.loss_scale.init=1e12",
        "train.steps=9",
    ]
    assert main([*QUICK, *words]) == 0
    assert result()["steps_applied"] == 9
    skips = [record for record in read_metrics(latest() / "metrics.jsonl") if record["kind"] == "skip"]
    assert len(skips) == result()["steps_skipped"] > 10
    assert {record["reason"] for record in skips} == {"overflow"}


def test_early_stopping_and_best(folder):
    assert (
        main(
            [
                *QUICK,
                "optimizer.lr=0",
                "train.epochs=50",
                "train.early_stop.metric=val/loss",
                "train.early_stop.patience=3",
            ]
        )
        == 0
    )
    got = result()
    assert got["steps_applied"] == 4 * 4  # the first evaluation is the best, then three without improvement
    assert "no better val/loss" in got["stopped"]


def test_early_stopped_run_is_finished(folder, capsys):
    assert (
        main(
            [
                *QUICK,
                "optimizer.lr=0",
                "train.epochs=50",
                "train.early_stop.metric=val/loss",
                "train.early_stop.patience=1",
            ]
        )
        == 0
    )
    assert main(["resume=latest"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["resume=latest", "train.early_stop.patience=2"]) == 0
    assert result()["steps_applied"] == 3 * 4


def test_a_run_folder_cannot_bring_its_own_trust(folder, capsys):
    assert main([*USERS, "train.epochs=1", "precision=fp32"]) == 0
    assert main(["resume=latest", "train.epochs=2"]) == 2
    assert "trust=[userpkg]" in capsys.readouterr().err
    assert main(["resume=latest", "train.epochs=2", "trust=[userpkg]"]) == 0


def test_another_way_to_compute_is_allowed_at_resume(folder):
    words = [
        "model=vit",
        "train.epochs=1",
        "dataset.limit=128",
        "tracking=disabled",
        "device=cpu",
        "model.kwargs.depth=2",
    ]
    assert main(words) == 0
    assert (
        main(["resume=latest", "train.epochs=2", "model.activation_checkpointing=true", "model.channels_last=true"])
        == 0
    )
    assert result()["steps_applied"] == 4


def test_absent_early_stop_metric_warns_and_stops_without_best(folder, monkeypatch):
    monkeypatch.setattr("mprun.training.loop.eval_step", lambda *_: {"loss": 1.0})
    assert main([*QUICK, "train.epochs=9", "train.early_stop.metric=val/top1", "train.early_stop.patience=2"]) == 0
    events = [record for record in read_metrics(latest() / "metrics.jsonl") if record["kind"] == "event"]
    assert any("val/top1" in record.get("message", "") for record in events)
    assert result()["best"] is None


@pytest.mark.parametrize(
    ("number", "code"),
    # Both numbers in this process: tests/test_faults.py.
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_signal_finishes_the_step_saves_and_exits(folder, number, code):
    words = [*QUICK, "train.epochs=100000", "precision=fp32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mprun", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = Path("outputs/latest/metrics.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"val"') >= 2):
        time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert "Traceback" not in out
    got = result()
    assert got["status"] == "interrupted"
    assert checkpoint()["step"] == got["steps_applied"] > 0
    assert main(["resume=latest", f"train.steps={got['steps_applied'] + 2}"]) == 0
    assert result()["steps_applied"] == got["steps_applied"] + 2


def test_same_command_from_anywhere_and_with_chdir(folder, monkeypatch):
    """Relative paths mean: relative to where the command was typed."""
    assert main([*QUICK, "hydra.run.dir=here/run"]) == 0
    assert (folder / "here/run/result.json").is_file()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main([*QUICK, "resume=../here/run", "train.epochs=3"]) == 0
    assert json.loads((folder / "here/run/result.json").read_text())["steps_applied"] == 12
    assert list(elsewhere.iterdir()) == []


def test_a_bug_keeps_its_traceback_and_the_folder_says_failed(folder):
    Path("userpkg.py").write_text(USER.replace("x = self.x[i].clone()", "x = self.x[i].clone() if i != 5 else 1 / 0"))
    with pytest.raises(ZeroDivisionError):
        main([*USERS, "train.epochs=1", "precision=fp32"])
    got = result()
    assert got["status"] == "failed"
    assert "ZeroDivisionError" in got["error"]


@pytest.mark.slow  # on every change: a sweep of the same two precisions in tests/test_resume_rules.py
def test_sweep_runs_every_job(folder):
    words = [*QUICK, "-m", "train.epochs=1", "precision=fp32,bf16", "hydra.sweep.dir=sweep"]
    done = subprocess.run([sys.executable, "-m", "mprun", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(path.read_text())["precision"] for path in Path("sweep").rglob("result.json"))
    assert found == ["bf16", "fp32"]


def test_model_init_starts_from_given_weights(folder, capsys):
    from safetensors.torch import save_file

    assert main([*QUICK, "precision=fp16_master_dynamic"]) == 0
    saved = checkpoint()
    truth = {**saved["model"], **saved["masters"]}
    torch.save(truth, "plain.pt")
    torch.save({"state_dict": truth}, "nested.pt")
    save_file(truth, "plain.safetensors")
    torch.save({"state_dict": Evil()}, "evil.pt")
    torch.save(dict(list(truth.items())[1:]), "short.pt")
    for name in (str(latest() / "checkpoints" / "last.pt"), "plain.pt", "nested.pt", "plain.safetensors"):
        assert (
            main(
                [
                    *QUICK,
                    "precision=fp32",
                    "optimizer.lr=0",
                    "optimizer.weight_decay=0",
                    f"model.init={name}",
                    "train.epochs=1",
                ]
            )
            == 0
        )
        assert same(truth, checkpoint()["model"]) == []
    before = set(Path("outputs").rglob("*"))
    Path("page.pt").write_text("<html></html>")
    for name, said in (
        ("nope.pt", "no such file"),
        ("page.pt", "plain values; it was not loaded: Unsupported operand 60\n"),
        ("evil.pt", "more than tensors"),
        ("short.pt", "missing"),
    ):
        assert main([*QUICK, f"model.init={name}"]) == 2
        assert said in capsys.readouterr().err
    assert set(Path("outputs").rglob("*")) == before
    assert not Path("pwned").exists()


@pytest.mark.parametrize(("first", "second"), [
    ("fp32", "fp16_dynamic"), ("fp16_dynamic", "bf16"), ("fp16_master_dynamic", "fp32"), ("fp32", "bf16_master"),
    ("bf16_master", "fp16_master_dynamic"),
])  # fmt: skip
def test_another_precision_at_resume_carries_the_fp32_truth_over(folder, first, second):
    assert main([*QUICK, f"precision={first}", "train.ema.decay=0.9"]) == 0
    before = checkpoint()
    truth = {**before["model"], **before["masters"]}
    # lr 0: the truth after two more epochs must be the one before, whatever the parameters' own dtype is.
    words = ["resume=latest", f"precision={second}", "train.epochs=3", "optimizer.lr=0", "optimizer.weight_decay=0"]
    assert main(words) == 0
    after = checkpoint()
    assert same(truth, {**after["model"], **after["masters"]}) == []
    assert after["step"] == 12
    for state in after["optimizer"].values():
        assert state["exp_avg"].dtype == torch.float32
        assert state["step"].item() == 12
    half = {"bf16_master": torch.bfloat16, "fp16_master_dynamic": torch.float16}.get(second)
    if half:
        assert all(torch.equal(after["model"][name], master.to(half)) for name, master in after["masters"].items())


@pytest.mark.parametrize(
    ("first", "second"), [("fp16_pure", "fp32"), ("fp32", "bf16_pure"), ("bf16_pure", "fp16_pure")]
)
def test_another_precision_is_refused_by_name_where_there_is_no_fp32_truth(folder, capsys, first, second):
    assert main([*QUICK, f"precision={first}"]) == 0
    assert main(["resume=latest", f"precision={second}", "train.epochs=3"]) == 2
    err = capsys.readouterr().err
    assert "pure" in err
    assert "cannot be resumed" in err


def test_keep_retains_the_newest_steps_by_number_and_resume_takes_the_highest(folder):
    assert main([*QUICK, "train.epochs=3", "train.checkpoint_every=1", "train.keep=3", "precision=fp32"]) == 0
    folder_ = latest() / "checkpoints"
    assert sorted(path.name for path in folder_.iterdir()) == [
        "best.pt",
        "last.pt",
        "step_10.pt",
        "step_11.pt",
        "step_12.pt",
    ]
    (folder_ / "last.pt").unlink()
    (folder_ / "step_9.pt").write_bytes((folder_ / "step_10.pt").read_bytes())  # 9 sorts after 12 as text
    os.utime(folder_ / "step_9.pt")
    assert main(["resume=latest", "train.epochs=4"]) == 0
    assert result()["steps_applied"] == 16
    resumed = [record for record in read_metrics(latest() / "metrics.jsonl") if record.get("event") == "resume"]
    assert [record["resumed_from_step"] for record in resumed] == [12]


def test_pure_and_unscaled_announce_themselves(folder, capsys):
    for precision in ("fp16_pure", "bf16_pure", "fp16_unscaled"):
        assert main([*QUICK, f"precision={precision}", "train.epochs=1"]) == 0
        assert "negative control" in capsys.readouterr().err


def test_disabled_tracking_imports_no_wandb(folder):
    """Also not by way of timm, which imports it wherever it is installed."""
    words = [*QUICK, "train.steps=1", "dataset.limit=128"]
    lines = [[*words, "model=vit"], [*words, "model=timm", "model.name=test_resnet"]]
    code = (
        f"import sys; from mprun.cli import main; print([(main(words), 'wandb' in sys.modules) for words in {lines!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[(0, False), (0, False)]", done.stderr


def test_a_scale_of_another_kind_is_not_taken_over(folder):
    """FP32 has S = 1: as the start of a dynamic scale it would be FP16 without scaling."""
    assert main([*QUICK, "precision=fp32"]) == 0
    assert main(["resume=latest", "precision=fp16_dynamic", "train.epochs=3"]) == 0
    assert result()["loss_scale"] == 65536.0


def test_an_argument_that_is_new_at_resume_gets_its_state(folder):
    assert main([*QUICK, "precision=fp32"]) == 0
    assert main(["resume=latest", "train.epochs=3", "optimizer.kwargs.amsgrad=true"]) == 0
    assert all("max_exp_avg_sq" in entry for entry in checkpoint()["optimizer"].values())


def test_going_back_drops_the_abandoned_future(folder):
    assert main([*QUICK, "precision=fp32", "train.checkpoint_every=2", "train.keep=9"]) == 0
    run = latest()
    assert main([f"resume={run}/checkpoints/step_4.pt", "train.steps=5"]) == 0
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_2.pt", "step_4.pt", "step_5.pt"]


def test_a_warning_about_skips_moves_nothing(folder):
    """The warning replays a batch to name the culprit; the run goes on as if it had not, also when it is resumed."""
    words = [*USERS, "precision=fp16_dynamic", "precision.loss_scale.growth_interval=4", "train.steps=240", "schedule=constant",
             "train.checkpoint_every=20", "train.keep=99", "train.log_every=50", "train.eval_every=1000"]  # fmt: skip
    assert main(words) == 0
    whole = latest()
    records = read_metrics(whole / "metrics.jsonl")
    assert [r for r in records if "overflowed at loss scale" in r.get("message", "")]
    unbroken = state_of()
    assert main([f"resume={whole}/checkpoints/step_200.pt", "trust=[userpkg]"]) == 0
    assert same(unbroken, state_of()) == []


def test_non_persistent_buffers_go_on(folder):
    Path("userpkg.py").write_text(
        USER
        + """
class Drift(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("shift", torch.zeros(()), persistent=False)
    def forward(self, x):
        if self.training:
            self.shift += 0.01
        return self.linear(x + self.shift)

def drift(num_classes, input_shape):
    return Drift()
"""
    )
    words = [
        *USERS,
        "model.name=userpkg:drift",
        "precision=fp32",
        "train.checkpoint_every=1",
        "train.keep=99",
        "train.steps=12",
    ]
    assert main(words) == 0
    unbroken = state_of()
    assert unbroken["buffers"]["shift"].item() > 0.1
    assert main([f"resume={latest()}/checkpoints/step_5.pt", "trust=[userpkg]"]) == 0
    assert same(unbroken, state_of()) == []


def test_a_closed_terminal_does_not_stop_training(folder):
    command = f"{sys.executable} -m mprun {' '.join(QUICK)} train.epochs=6 2>&1 >/dev/null | head -1"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (latest() / "result.json").exists():
        time.sleep(0.1)
    assert result()["status"] == "ok"


@pytest.mark.parametrize(("code", "said"), [
    ("return Two()", "returned a tuple"),
])  # fmt: skip
def test_models_whose_output_is_no_tensor_are_refused(folder, capsys, code, said):
    Path("userpkg.py").write_text(
        USER
        + f"""
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
    def forward(self, x):
        return self.linear(x), x

def odd(num_classes, input_shape):
    {code}
"""
    )
    code = main([*USERS, "model.name=userpkg:odd", "precision=fp32", "train.epochs=1"])
    assert code in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp16_dynamic", "bf16", "fp16_master_dynamic"])
def test_torchs_transformer_layers_evaluate_to_numbers(folder, precision):
    """torch's fused evaluation of these layers does not know the CPU's autocast and gives NaN under it."""
    Path("userpkg.py").write_text(
        USER
        + """
def encoder(num_classes, input_shape):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 4))
"""
    )
    assert main([*USERS, "model.name=userpkg:encoder", f"precision={precision}", "train.epochs=1"]) == 0
    assert result()["final"]["val/loss"] < 10


def test_a_recipe_file_survives_resume(folder):
    Path("mine.yaml").write_text("# mine\ntrain:\n  epochs: 1\n  clip_norm: 0.25\n")
    words = [word for word in QUICK if not word.startswith("train.epochs")]
    assert main([*words, "recipe=./mine.yaml"]) == 0
    run = latest()
    assert main(["resume=latest", "train.epochs=2"]) == 0
    assert latest() == run
    assert to_config(OmegaConf.load(run / "config.yaml")).train.clip_norm == 0.25


@pytest.mark.parametrize("cast", ["half", "double"])
def test_a_model_that_arrives_in_another_dtype_is_refused_by_name(folder, capsys, cast):
    Path("userpkg.py").write_text(
        USER.replace("return nn.Sequential(", "return nn.Sequential(").replace(
            "nn.Linear(16, 4))", f"nn.Linear(16, 4)).{cast}()"
        )
    )
    for precision in ("fp32", "fp16_dynamic", "fp16_master_dynamic"):
        assert main([*USERS, f"precision={precision}"]) == 2
        assert "0.weight arrives as float" in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_run_stopped_on_its_last_step_can_be_concluded(folder):
    assert main(QUICK) == 0
    path = latest() / "result.json"
    path.write_text(json.dumps({**result(), "status": "interrupted"}))
    assert main(["resume=latest"]) == 0
    assert result()["status"] == "ok"
