"""The bench of the wait for data: its arithmetic, what it leaves out, and one real run of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mprun.errors import ConfigError

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The script, with its results kept in the test's folder."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("common", "data_wait"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    common = import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    yield import_module("data_wait")
    for name in ("common", "data_wait"):
        sys.modules.pop(name, None)


def test_shares_are_taken_without_the_first_record(bench):
    given = [(9.0, 1.0), (3.0, 1.0), (1.0, 99.0), (2.0, 8.0)]  # milliseconds of waiting and of the step
    found = bench.summary([{"perf/step_ms": s, "perf/data_wait_frac": w / (w + s)} for w, s in given])
    assert found["wait_frac"] == pytest.approx(0.2)  # the middle one of 0.75, 0.01, 0.2
    assert found["mean_frac"] == pytest.approx(6 / 114)
    assert (found["wait_us"], found["step_ms"]) == (pytest.approx(2000), 8)


def test_only_cases_with_a_target_are_judged(bench):
    one = {"wait_frac": 0.03, "mean_frac": 0.04, "wait_us": 90.0, "step_ms": 3.0}
    rows = [bench.row(case, [one, {**one, "wait_frac": 0.01}, one]) for case in bench.CASES]
    assert {row["case"] for row in rows if row["target"] is None} == {
        case for case in bench.CASES if case.startswith(("synthetic", "JPEG"))
    }
    table = bench.table(rows)
    assert len(table) == sum(row["target"] is not None for row in rows)
    assert all(line["ratio"] == 0.04 and line["target"] == 0.02 and not line["met"] for line in table)


def test_sets_that_are_not_there_are_left_out_and_said(bench, monkeypatch, tmp_path, capsys):
    def nowhere(*_args: Any, **_more: Any) -> Any:
        raise ConfigError("not in any place\nset dataset.root")

    monkeypatch.setattr(bench, "import_target", lambda *_args, **_more: nowhere)
    found = dict(
        bench.usable(bench.chosen(["Fashion-MNIST, vit", "text file", "digits, vit"]), text=None, files=tmp_path)
    )
    assert list(found) == ["digits, vit"]
    assert capsys.readouterr().out.splitlines() == [
        "Fashion-MNIST, vit: left out, not in any place",
        "text file, gpt: left out, no --text",
    ]


def test_image_files_are_made_once_and_are_images(bench, tmp_path):
    bench.make_files(tmp_path, count=4, size=(20, 10))
    files = sorted((tmp_path / "train").rglob("*.jpg"))
    assert [path.parent.name for path in files] == ["a", "a", "b", "b"]
    with Image.open(files[0]) as image:
        assert image.size == (20, 10)


def test_a_real_run_is_measured_and_kept(bench, monkeypatch, tmp_path, capsys):
    words = ["data_wait", "--cases", "not augmented", "--rounds", "1", "--steps", "3", "--threads", "1", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    assert bench.main() == 0
    kept = json.loads((tmp_path / "results" / "data_wait.json").read_text())
    (row,) = kept["rows"]
    assert 0 < row["wait_frac"] < 0.5
    assert row["wait_us"] < 1e3 * row["step_ms"]
    assert [line["ratio"] for line in kept["table"]] == [row["mean_frac"]]
    printed = capsys.readouterr().out
    assert "digits not augmented, resnet" in printed
    assert ("target 2 %: met" in printed) == kept["table"][0]["met"]


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit status of the bench."""
    monkeypatch.setattr(sys, "argv", ["data_wait", *words])
    try:
        return bench.main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cases", "digits", "nosuch"], "'nosuch': in no name. There are: digits, vit;"),
        (["--cases", "text file"], "no case is left to measure"),
        (["--text", "/nope"], "/nope: not a file that can be read"),
        (["--rounds", "0"], "'0' is not a count"),
        (["--steps", "-3"], "'-3' is not a count"),
        (["--threads", "two"], "'two' is not a count: a whole number from 1 on"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench, monkeypatch, capsys, words, said):
    assert run(bench, monkeypatch, *words) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert "met" not in found.out


def test_a_case_without_a_target_is_not_said_to_meet_it(bench, monkeypatch, capsys):
    records = [{"perf/step_ms": 8.0, "perf/data_wait_frac": 0.001}] * 3
    monkeypatch.setattr(bench, "train", lambda words, *, steps: records)
    assert run(bench, monkeypatch, "--cases", "synthetic", "--rounds", "1") == 0
    assert capsys.readouterr().out.endswith("target 2 %: asked of none of these cases\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_step_of_a_run_ends_the_bench(bench, monkeypatch, tmp_path, number):
    """The run's own handler has it, and the run ends as if nothing had come."""
    runs = []

    def finish(words: list[str], *, steps: int) -> list[dict[str, Any]]:
        runs.append(words)
        bench_handler = signal.signal(number, lambda *_: None)
        os.kill(os.getpid(), number)
        signal.signal(number, bench_handler)
        return [{"perf/step_ms": 8.0, "perf/data_wait_frac": 0.001}]

    monkeypatch.setattr(bench, "train", finish)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(number)
    assert run(bench, monkeypatch, "--cases", "JPEG files, 0", "--rounds", "5") == 128 + number
    assert len(runs) == 1
    assert not list(tmp_path.iterdir()), "the image files are removed"
    assert signal.getsignal(number) is before


def test_a_run_that_a_signal_stopped_ends_the_bench_with_its_status(bench, monkeypatch):
    monkeypatch.setattr(bench, "mprun", lambda words: 143)
    assert run(bench, monkeypatch, "--cases", "digits, vit") == 143


def test_a_signal_between_runs_ends_the_bench(bench):
    with pytest.raises(SystemExit) as end, bench.stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 143
