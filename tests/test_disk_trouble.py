"""Disks that are full, places that cannot be written, files that are damaged: said in one line, and never more lost than that file."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any

import pytest

from mprun.cli import main
from mprun.tracking import read_metrics
from mprun.training import checkpoint
from mprun.training.env import atomic_write_text
from tests.case_code import latest
from tests.test_examination import same

QUICK = [
    "model=mlp",
    "dataset=digits",
    "dataset.limit=64",
    "train.batch_size=32",
    "precision=fp16_dynamic",
    "tracking=disabled",
    "tracking.report=false",
    "probe.every=1",
]


@pytest.mark.parametrize("damage", ["folder", "nonsense"])
def test_a_damaged_file_of_samples_costs_no_run(tmp_path, monkeypatch, capsys, damage):
    """The samples go to a file of their own; a run is resumed without it, and equals one whose file is whole."""
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK, "train.steps=2"]) == 0
    run = latest()
    whole = run.with_name("whole")
    shutil.copytree(run, whole)
    assert main([f"resume={whole}", "train.steps=4"]) == 0
    samples = run / "probe.jsonl"
    text = samples.read_text()
    samples.unlink()
    if damage == "folder":
        samples.mkdir()
    else:
        samples.write_text(f"nonsense\n{text}")
    capsys.readouterr()
    assert main([f"resume={run}", "train.steps=4"]) == 0
    said = capsys.readouterr().err
    both = [checkpoint.load(path / "checkpoints" / "last.pt") for path in (whole, run)]
    assert same(*({key: one[key] for key in ("model", "optimizer", "scale", "rng")} for one in both))
    told = [record["message"] for record in read_metrics(run) if record.get("event") == "warning"]
    if damage == "folder":
        assert said.count("mprun: warning: ") == 1
        (line,) = [line for line in told if "probe.jsonl: cannot be written" in line]
        assert line.endswith("the run goes on without the modules' statistics")
    assert sum(record["kind"] == "probe" for record in read_metrics(run)) == 4


@pytest.mark.parametrize("words", [["diagnose", "diagnose.steps=2"], ["search", "search.steps=4"], ["compare"]])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").write_text("in the way")
    quick = [word for word in QUICK if words[0] != "compare" or not word.startswith("precision=")]
    assert main([words[0], *quick, "train.steps=4", *words[1:]]) == 2
    said = capsys.readouterr()
    assert "cannot create " in said.err
    assert "FP32 run" not in said.out + said.err


def test_a_disk_that_is_full_is_told_in_one_line_by_every_command(tmp_path, monkeypatch, capsys):
    import mprun.commands.search as command

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "outputs/search/env.json")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_write_start", full)
    assert main(["search", *QUICK, "train.steps=4", "search.steps=4"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "mprun: error: outputs/search/env.json cannot be written: No space left on device; make room and start again\n"
    )


def test_a_failed_write_says_of_which_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space left") as error:
        atomic_write_text(tmp_path / "a.txt", "text")
    assert error.value.filename == str(tmp_path / "a.txt")
    assert not list(tmp_path.iterdir())
