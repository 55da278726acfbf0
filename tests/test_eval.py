"""``mprun eval``: a checkpoint's scores are those that the run logged, and nothing of the run is changed."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch

from mprun.cli import main
from mprun.tracking.jsonl import read_metrics

QUICK = [
    "model=mlp",
    "tracking=disabled",
    "device=cpu",
    "train.batch_size=128",
    "dataset.limit=512",
    "train.epochs=2",
    "optimizer.lr=0.003",
]


def trained(tmp_path, monkeypatch, *words):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, *words, "hydra.run.dir=run"]) == 0
    return tmp_path / "run"


def scores(capsys, *words):
    capsys.readouterr()
    code = main(["eval", *words, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def digest(folder):
    return {
        path.relative_to(folder): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("precision", ["fp16_dynamic", "bf16_master", "fp16_pure"])
def test_equals_what_the_run_logged_to_the_last_bit_and_changes_nothing(tmp_path, monkeypatch, capsys, precision):
    folder = trained(tmp_path, monkeypatch, f"precision={precision}", "train.ema.decay=0.9", "train.eval_every=3")
    before = digest(folder)
    vals = {record["step"]: record for record in read_metrics(folder) if record["kind"] == "val"}
    for which in ("last", "best"):
        code, found = scores(capsys, "run", "--checkpoint", which)
        assert code == 0
        assert found["metrics"].keys() == {"val/loss", "val/top1", "ema/loss", "ema/top1"}
        assert found["metrics"] == found["logged"] == {key: vals[found["step"]][key] for key in found["metrics"]}
    result = json.loads((folder / "result.json").read_text())
    assert scores(capsys, "run")[1]["metrics"] == {
        key: value for key, value in result["final"].items() if key[:3] in ("val", "ema")
    }
    assert digest(folder) == before


def test_another_precision_is_scored_in_it(tmp_path, monkeypatch, capsys):
    trained(tmp_path, monkeypatch, "precision=bf16")
    _, own = scores(capsys, "run")
    _, full = scores(capsys, "run", "precision=fp32", "train.batch_size=100")
    assert full["precision"] == "fp32"
    assert (own["policy"], full["policy"], full["trained_with"]) == (
        "p=f32,c=bf16,o=f32",
        "p=f32,c=f32,o=f32",
        own["policy"],
    )
    assert full["metrics"]["val/loss"] != own["metrics"]["val/loss"]
    assert full["metrics"]["val/loss"] == pytest.approx(own["metrics"]["val/loss"], rel=1e-2)
    assert full["examples"] == 899  # of the documented split


def test_weights_kept_in_half_are_scored_as_they_are_in_fp32(tmp_path, monkeypatch, capsys):
    trained(tmp_path, monkeypatch, "precision=bf16_pure")
    code, found = scores(capsys, "run", "precision=fp32")
    assert code == 0
    assert math.isfinite(found["metrics"]["val/loss"])


def test_a_moved_checkpoint_needs_no_run_folder(tmp_path, monkeypatch, capsys):
    folder = trained(tmp_path, monkeypatch)
    _, at_home = scores(capsys, "run")
    (folder / "checkpoints/last.pt").rename(tmp_path / "elsewhere.pt")
    _, moved = scores(capsys, "elsewhere.pt")
    assert moved["metrics"] == at_home["metrics"]
    assert moved["logged"] == {}


def test_prints_a_table_and_writes_json(tmp_path, monkeypatch, capsys):
    trained(tmp_path, monkeypatch)
    capsys.readouterr()
    assert main(["eval", "run", "--json", "scores.json"]) == 0
    said = capsys.readouterr().out
    assert "val/loss" in said
    assert "identical" in said
    assert json.loads((tmp_path / "scores.json").read_text())["metrics"].keys() == {"val/loss", "val/top1"}


def test_a_score_that_is_not_finite_is_exit_status_1(tmp_path, monkeypatch, capsys):
    folder = trained(tmp_path, monkeypatch)
    path = folder / "checkpoints/last.pt"
    saved = torch.load(path, weights_only=True)
    next(value for value in saved["model"].values() if value.ndim == 2).fill_(math.nan)
    torch.save(saved, path)
    code, found = scores(capsys, "run")
    assert code == 1
    assert found["metrics"]["val/loss"] == "nan"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs one run"),
        (["run", "run"], "needs one run"),
        (["nowhere"], "no such file or folder"),
        (["run", "--checkpoint", "step_7"], "there are: best, last"),
        (["."], "holds no checkpoint; give the folder of one run, or a checkpoint"),
        (["run", "--chekpoint", "best"], "--checkpoint"),
        (["run", "optimizer.lr=1"], "scored as it was trained"),
        (["run", "precision=fp17"], "fp16"),
        (["run/config.yaml"], "damaged or no checkpoint"),
        (["run/checkpoints/last.pt", "--checkpoint", "best"], "is one checkpoint"),
        (["run", "--json"], "needs a value"),
        (["run", "--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, monkeypatch, capsys, words, said):
    run = tmp_path / "run/checkpoints"
    run.mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("a: 1\n")
    content = {"format": 1, "config": {}}
    for name in ("last", "best"):
        torch.save(content, run / f"{name}.pt")
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mprun: error: ")
    assert said in error
    assert len(error.splitlines()) <= 3
