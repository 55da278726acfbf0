"""``rerun``: the same words give the same numbers, what has changed is said, and nothing of a stranger's folder is trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mprun.cli import main
from mprun.commands.rerun import again, parse

QUICK = ["model=mlp", "precision=fp16_dynamic", "train.steps=4", "tracking=disabled", "device=cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def latest() -> Path:
    return Path("outputs/latest").resolve()


def read(name: str, run: Path | None = None) -> Any:
    return json.loads(((run or latest()) / name).read_text())


def edit(run: Path, name: str, **values: Any) -> None:
    content = read(name, run)
    for key, value in values.items():
        node = content
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        node[last] = value
    (run / name).write_text(json.dumps(content))


def test_a_rerun_is_the_same_run_in_a_new_folder(folder, capsys):
    assert main([*QUICK, "seed=3", "hydra.run.dir=outputs/first"]) == 0
    first = latest()
    capsys.readouterr()
    assert main(["rerun", "latest"]) == 0
    shown = capsys.readouterr().out
    assert latest() != first
    assert read("result.json")["final"] == read("result.json", first)["final"] | read("result.json")["final"]
    assert all(read("result.json")["final"][key] == value for key, value in read("result.json", first)["final"].items())
    assert read("result.json")["seed"] == 3
    assert "no drift" in shown
    assert shown.count("identical") >= 3
    assert read("rerun.json") == {"of": str(first), "drift": {}}


def test_a_rerun_of_a_rerun_and_of_a_resumed_run_start_at_the_beginning(folder):
    assert main(QUICK) == 0
    assert main(["resume=latest", "train.steps=6"]) == 0
    resumed = latest()
    assert main(["rerun", "latest"]) == 0
    assert latest() != resumed
    assert read("result.json")["steps_applied"] == 6
    assert main(["rerun", str(latest() / "checkpoints" / "last.pt")]) == 0
    assert read("rerun.json")["drift"] == {}


def test_new_words_win_and_are_drift(folder, capsys):
    assert main([*QUICK, "optimizer.lr=0.001"]) == 0
    assert main(["rerun", "latest", "optimizer.lr=0.5", "seed=7"]) == 0
    assert read("rerun.json")["drift"]["config"] == {"optimizer.lr": [0.001, 0.5], "seed": [0, 7]}
    assert "optimizer.lr  0.001 -> 0.5" in capsys.readouterr().out


def test_every_kind_of_drift_is_named_and_dry_runs_nothing(folder, capsys):
    assert main(QUICK) == 0
    run = latest()
    edit(run, "env.json", git__commit="0" * 40, versions__torch="1.0.0", data_sha256="abc", device__name="another")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("batch_size: 64", "batch_size: 32"))
    before = sorted(Path("outputs").rglob("*"))
    capsys.readouterr()
    assert main(["rerun", "latest", "--dry"]) == 0
    shown = capsys.readouterr().out
    for part in ("train.batch_size  32 -> 64", "commit  0000", "torch  1.0.0 ->", "sha256  abc ->", "name  another ->"):
        assert part in shown
    assert sorted(Path("outputs").rglob("*")) == before


def test_a_recipe_file_that_changed_is_drift(folder):
    Path("mine.yaml").write_text("# mine\ntrain:\n  clip_norm: 0.25\n")
    assert main([*QUICK, "recipe=./mine.yaml"]) == 0
    Path("mine.yaml").write_text("# mine\ntrain:\n  clip_norm: 0.5\n")
    assert main(["rerun", "latest"]) == 0
    assert read("rerun.json")["drift"]["config"] == {"train.clip_norm": [0.25, 0.5]}


def test_trust_is_not_taken_over(folder, capsys, monkeypatch):
    Path("rerun_pkg.py").write_text(
        "import torch\ndef net(num_classes, input_shape):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    words = [*QUICK[1:], "model=python", "model.name=rerun_pkg:net"]
    assert main([*words, "trust=[rerun_pkg]"]) == 0
    assert main(["rerun", "latest"]) == 2
    assert "trust=[rerun_pkg]" in capsys.readouterr().err
    assert main(["rerun", "latest", "trust=[rerun_pkg]"]) == 0
    assert read("rerun.json")["drift"] == {}


def test_saved_words_that_are_no_longer_legal_are_named(folder, capsys):
    assert main(QUICK) == 0
    (latest() / ".hydra" / "overrides.yaml").write_text("- model=mlp\n- train.clip_nrom=1\n")
    assert main(["rerun", "latest"]) == 2
    assert "clip_nrom" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs one run"),
        (["a", "b"], "needs one run"),
        (["latest", "--dyr"], "--dry"),
        (["latest", "resume=latest"], "resume=RUN"),
        (["latest"], "no run yet"),
        (["nowhere"], "no such folder"),
        (["."], "no run folder"),
        (["a-sweep"], "is a sweep; give the folder of one of its runs"),
    ],
)
def test_what_cannot_be_rerun(folder, capsys, words, said):
    Path("a-sweep").mkdir()
    Path("a-sweep/sweep.json").write_text("{}")
    assert main(["rerun", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["env.json", "config.yaml", ".hydra/overrides.yaml"])
def test_a_damaged_folder_is_named(folder, capsys, damage):
    assert main(QUICK) == 0
    run = latest()
    (run / damage).write_text("{[")
    assert main(["rerun", "latest"]) == 2
    assert str(run) in capsys.readouterr().err
    shutil.rmtree(run / ".hydra")
    assert main(["rerun", "latest"]) == 2


def test_words():
    assert parse(["a=1", "x", "--dry"]) == ("x", ["a=1"], True)
    saved = ["seed=1", "trust=[os]", "hydra.run.dir=x", "+a.b=2", "resume=latest"]
    assert again(saved, ["+a.b=3", "hydra.run.dir=y"]) == ["seed=1", "+a.b=3", "hydra.run.dir=y"]
