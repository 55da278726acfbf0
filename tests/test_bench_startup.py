"""What happens at the start: the bench's numbers mean what they say, commands import what they need, imports run undisturbed."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mprun.config import Config
from mprun.config_check import schema, to_config
from mprun.imports import uncollected
from mprun.resume import NEEDS, idle_words, may_idle

BENCH = Path(__file__).resolve().parent.parent / "bench"
NAMES = ("startup", "startup_commands", "common")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``bench("name")`` imports a script of ``bench/`` afresh, with results kept in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(import_module("common"), "RESULTS", tmp_path / "results")
    yield import_module
    for name in NAMES:
        sys.modules.pop(name, None)


# --- the bench -------------------------------------------------------------------------------------------------------


def times(bench, **seconds):
    """Times with a first step after ``seconds``, and twice as many until the end."""
    make = bench("startup").Times
    return {name: [make(one, one / 2, 2 * one) for one in each] for name, each in seconds.items()}


def test_ratios_are_of_pairs_and_judged_against_the_same_imports(bench):
    found = times(bench, fp16_dynamic=[2, 4, 9], plain=[2, 2, 6], fp32=[1, 2, 12], plain_wandb=[4, 4, 12])
    result = {"table": []}
    bench("startup").add_steps(result, found)
    assert result["ratio"] == 1.5, "the median of 1, 2, 1.5, not the ratio of the medians"
    assert result["wall_s"] == {"mprun": 4, "plain": 2}
    half, full = result["table"]
    assert (half["ratio"], half["met"], full["ratio"], full["met"]) == (1.5, False, 1.0, True)
    rows = {row["name"]: row for row in result["steps"]}
    assert rows["fp16_dynamic"]["first_to_plain_wandb"] == 0.75
    assert rows["fp32"]["end_s"] == 4


def test_seconds_of_commands_are_judged_and_torch_fails_them(bench):
    commands = bench("startup_commands")
    found = {name: [0.5, 0.25, 0.75] for name in commands.COMMANDS} | {"python": [0.01] * 3, "hydra": [0.25] * 3}
    found["show"], found["validate --all"] = [0.5, 0.7, 0.9], [2.0] * 3
    free = {name: ["hydra"] for name in commands.COMMANDS}
    result = {"table": []}
    commands.add_commands(result, found, free)
    assert [(row["ratio"], row["met"]) for row in result["table"]] == [(0.7, True), (2.0, False)]
    assert "`show` 0.70 s" in result["table"][0]["measured"]
    assert next(row for row in result["commands"] if row["name"] == "list")["to_hydra"] == 2.0
    result = {"table": []}
    commands.add_commands(result, found, free | {"list": ["torch"]})
    assert not result["table"][0]["met"], "quick, but with torch"


def test_import_lines_are_read(bench):
    text = "import time: self [us] | cumulative | imported package\nimport time:       250 |       1000 |   torch.nn\nelse\n"
    assert bench("startup_commands").import_lines(text) == [("torch.nn", 0.25)]


def test_imports_of_both_are_listed_side_by_side(bench, monkeypatch, capsys):
    startup = bench("startup")
    own = {"fp16_dynamic": {"torch": 900.0, "hydra": 80.0}, "plain": {"torch": 910.0, "gzip": 1.0}}
    monkeypatch.setattr(startup, "import_times", own.__getitem__)
    startup.compare_imports()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert (rows[0], rows[-1]) == (["torch", "900", "910"], ["all", "980", "911"])
    assert sorted(rows[1:-1]) == [["gzip", "0", "1"], ["hydra", "80", "0"]]


def test_the_plain_script_that_is_judged_against_is_the_other_one_without_wandb(bench, tmp_path):
    startup = bench("startup")
    judged, typed = (startup.words_of(name, tmp_path / "m") for name in ("plain", "plain_wandb"))
    assert judged[1].endswith(typed[1])
    assert judged[2] == typed[2] == str(tmp_path / "m")
    words = startup.words_of("fp32", tmp_path / "run" / "m")
    assert words[:4] == ["-m", "mprun", "precision=fp32", "model=vit"]
    assert words[-1] == f"hydra.run.dir={tmp_path / 'run'}"


@pytest.mark.slow
def test_the_first_step_comes_before_the_end(bench, tmp_path):
    startup = bench("startup")
    for name in ("fp32", "plain"):
        keep = tmp_path / "kept" if name == "fp32" else None
        found = startup.job(name, keep=keep)
        assert 0.5 < found.first_s <= found.end_s < 300
        assert 0 < found.cpu_s < 2 * found.first_s + 1
    assert json.loads((tmp_path / "kept" / "result.json").read_text())["steps_applied"] == 1
    assert not (tmp_path / "kept" / "checkpoints").exists()


# --- what is imported ------------------------------------------------------------------------------------------------


def test_commands_that_do_not_train_import_nothing_heavy(bench, tmp_path):
    commands = bench("startup_commands")
    runs = tmp_path / "runs"
    (runs / "a").mkdir(parents=True)
    (runs / "a" / "config.yaml").write_text("seed: 0\n")
    (runs / "a" / "result.json").write_text('{"status": "ok", "final": {}, "best": {}}')
    for name, words in commands.COMMANDS.items():
        if name in ("validate --all", "show recipe=...", "validate recipe=..."):
            continue  # the same modules as without, only more often
        found = commands.imported(commands.words_in(words, runs), tmp_path)
        allowed = (
            {"rich"} if "table" in name else set() if words[0] in ("--version", "--help", "env", "list") else {"hydra"}
        )
        assert set(found) <= allowed, name


def test_imported_sees_what_is_there(bench, tmp_path):
    """A guard that could not see would pass."""
    commands = bench("startup_commands")
    assert "hydra" in commands.imported(["show"], tmp_path)
    assert "hydra" not in commands.imported(["list"], tmp_path)


# --- what is done once -----------------------------------------------------------------------------------------------


def test_imports_run_without_the_collector_and_leave_it_on():
    assert gc.isenabled()
    with uncollected("no_such_package"):
        assert not gc.isenabled()
        with uncollected("another"):
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one does not switch it on too early"
    assert gc.isenabled()
    gc.unfreeze()
    with uncollected("json"):
        assert gc.isenabled(), "imported already: there is nothing to gain"
    with pytest.raises(ImportError), uncollected("no_such_package"):
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()


def test_the_collector_is_on_during_training(tmp_path):
    """And what the imports have made is left out of its rounds."""
    code = (
        "import gc, sys; from mprun.cli import main; status = main(sys.argv[1:]);"
        "assert gc.isenabled(); print('frozen', gc.get_freeze_count()); sys.exit(status)"
    )
    words = [
        "model=mlp",
        "precision=fp32",
        "tracking=disabled",
        "train.steps=1",
        "dataset.limit=64",
        "tracking.report=false",
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rpartition("frozen ")[2]) > 100_000


def test_the_shared_schema_is_not_written_to():
    before = schema().model.name
    node = schema().copy()
    node.model.name = "mlp"
    assert to_config(node).model.name == "mlp"
    assert schema().model.name == before == Config().model.name


@pytest.mark.parametrize("key", sorted(NEEDS))
def test_words_that_could_be_idle_are_looked_at(key):
    assert may_idle([f"++{key}=1"])
    assert not may_idle(["model=vit", "seed=1"])
    assert not idle_words(["model=vit", "seed=1"], {}), "what is not looked at has nothing to say"


def test_no_rounds_are_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["startup", "--rounds", "0"])
    with pytest.raises(SystemExit):
        bench("startup").main()
    assert "'0' is not a count" in capsys.readouterr().err
