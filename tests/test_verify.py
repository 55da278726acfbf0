"""``verify`` and ``cp``: what a recipe may expect, how runs are held to it, and which recipes run at all."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun import compose as compose_module
from mprun.cli import main
from mprun.commands import verify as command
from mprun.commands.verify import Asked, cannot_run, parse
from mprun.compose import compose
from mprun.config import Config
from mprun.errors import ConfigError
from mprun.recipes import EXPECTABLE, OPS, Expectation, expectations, judge, seeds_of

ROOT = Path(__file__).resolve().parent.parent
QUICK = """# @package _global_
# A quick recipe.
defaults:
  - override /model: mlp
  - override /dataset: digits
  - override /precision: fp32
train:
  steps: 3
tracking:
  mode: disabled
device: cpu
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(expect: str, name: str = "mine.yaml", text: str = QUICK) -> str:
    Path(name).write_text(text + "expect:\n" + expect)
    return f"./{name}"


def verdict_file() -> dict[str, Any]:
    (path,) = Path("outputs/verify").glob("*/*/verify.json")
    content: dict[str, Any] = json.loads(path.read_text())
    assert path.parent.parent.name in ("mine", "all")
    return content


# --- what may be expected ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{metric: val/top2, op: '>=', value: 1}", ["val/top2", "did you mean 'val/top1'"]),
        ("{metric: val/top1, op: '=>', value: 1}", ["expect[0].op='=>'", ">="]),
        ("{metric: val/top1, op: '>='}", ["expect[0] has no value"]),
        ("{metric: val/top1, value: 1}", ["expect[0] has no op"]),
        ("{op: '>=', value: 1}", ["expect[0] has no metric"]),
        ("{metric: val/top1, op: '>=', value: good}", ["'good' is not a finite number"]),
        ("{metric: val/top1, op: '>=', value: .nan}", ["not a finite number"]),
        ("{metric: val/top1, op: '>=', value: true}", ["not a finite number"]),
        ("{metric: val/top1, op: '>=', value: 1, tolerance: -1}", ["tolerance=-1"]),
        ("{metric: val/top1, op: '>=', value: 1, tolerence: 1}", ["expect[0].tolerence", "did you mean 'tolerance'"]),
        ("{metric: status, op: '==', value: divergd}", ["divergd", "did you mean 'diverged'"]),
        ("{metric: status, op: '>=', value: ok}", ["op='>='", "=="]),
        ("{metric: status, op: '==', value: ok, tolerance: 1}", ["tolerance=1", "word"]),
        ("{metric: val/top1, op: '>=', value: 1, measured: {sedes: [1]}}", ["measured.sedes", "did you mean 'seeds'"]),
        ("{metric: val/top1, op: '>=', value: 1, measured: {seeds: [1, 1]}}", ["seeds=[1, 1]"]),
        ("nothing", ["expect[0]='nothing' is not a mapping"]),
    ],
)
def test_a_wrong_expectation_is_refused_before_anything_runs(folder, capsys, line, said):
    assert main(["validate", f"recipe={recipe(f'  - {line}')}"]) == 2
    error = capsys.readouterr().err
    for text in said:
        assert text in error
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ("{requires: gpuu}", "did you mean 'gpu'"),
        ("{seeds: 3}", "meta.seeds=3"),
        ("{seeds: [0, -1]}", "meta.seeds"),
        ("{seeds: []}", "meta.seeds"),
    ],
)
def test_wrong_seeds_and_needs_are_refused(folder, capsys, meta, said):
    Path("mine.yaml").write_text(QUICK + f"meta: {meta}\n")
    assert main(["validate", "recipe=./mine.yaml"]) == 2
    assert said in capsys.readouterr().err


def test_what_a_run_records_can_be_expected(folder):
    """Every number in the ``final`` of a run with all there is has a name that ``expect`` knows."""
    words = ["model=mlp", "precision=fp16_dynamic", "train.steps=2", "train.ema=off", "tracking=disabled", "device=cpu",
             "train.ema.decay=0.9", "train.log_every=1", "hydra.run.dir=run"]  # fmt: skip
    assert main(words) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert set(result["final"]) <= set(EXPECTABLE)
    for metric in EXPECTABLE:
        line = Expectation(metric, "==", "ok" if metric in ("status", "best.metric") else 0.0)
        assert judge(line, {0: result}).why != "absent: seed 0", metric


# --- how runs are held to it ------------------------------------------------------------------------------------------


def held(op: str, value: Any, got: list[Any], *, tolerance: float = 0.0, metric: str = "val/top1") -> Any:
    results = {
        seed: {"status": item} if metric == "status" else {"final": {} if item is None else {metric: item}}
        for seed, item in enumerate(got)
    }
    return judge(Expectation(metric, op, value, tolerance), results)


@pytest.mark.parametrize(
    ("op", "value", "tolerance", "got", "passed"),
    [
        (">=", 0.98, 0.01, [0.97, 0.97, 0.2], True),  # the median; 0.97 exactly, where 0.98 - 0.01 is a bit above
        (">=", 0.98, 0.01, [0.9699, 0.9, 1.0], False),
        ("<=", 2, 1, [3, 3, 9], True),
        ("<=", 2, 1, [4, 4, 0], False),
        (">", 0.0, 0.0, [0.0], False),
        ("<", 1.0, 0.0, [1.0], False),
        ("<", 1.0, 0.5, [1.4], True),
        ("==", 0.0, 0.0, [0.0, 0.0], True),
        ("==", 0.5, 0.1, [0.6], True),
        ("==", 0.5, 0.1, [0.61], False),
        ("<=", 1.0, 0.0, [math.inf], False),
        (">=", 1.0, 0.0, [math.inf], True),
    ],
)
def test_a_number_passes_by_its_median(op, value, tolerance, got, passed):
    verdict = held(op, value, got, tolerance=tolerance)
    assert verdict.passed is passed
    assert verdict.got == statistics.median(got)


@given(
    st.sampled_from(OPS),
    st.floats(-1e6, 1e6),
    st.floats(0, 1e6),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
)
def test_the_order_of_seeds_is_no_matter_and_a_wider_tolerance_never_fails_more(op, value, tolerance, got):
    verdict = held(op, value, got, tolerance=tolerance)
    assert held(op, value, sorted(got), tolerance=tolerance).passed is verdict.passed
    if verdict.passed:
        assert held(op, value, got, tolerance=2 * tolerance + 1).passed


@pytest.mark.parametrize("op", OPS)
def test_absent_and_nan_fail_on_any_seed(op):
    absent, nan = held(op, 0.5, [0.5, None, 0.5], tolerance=9), held(op, 0.5, [0.5, math.nan, 0.5], tolerance=9)
    assert (absent.passed, absent.got, absent.why) == (False, None, "absent: seed 1")
    assert not nan.passed
    assert math.isnan(nan.got)
    assert not judge(Expectation("val/top1", op, 0.5, 9), {}).passed


def test_a_word_must_be_the_same_on_every_seed():
    assert held("==", "diverged", ["diverged", "diverged"], metric="status").passed
    mixed = held("==", "diverged", ["diverged", "ok"], metric="status")
    assert (mixed.passed, mixed.got) == (False, "mixed")
    assert not held("==", "ok", [None], metric="status").passed


def test_a_recipe_that_does_not_speak_of_the_status_expects_ok():
    line = {"metric": "val/top1", "op": ">=", "value": 0.9}
    assert [item.metric for item in expectations([line])] == ["status", "val/top1"]
    status = {"metric": "status", "op": "==", "value": "diverged"}
    assert [item.value for item in expectations([line, status])] == [0.9, "diverged"]


def test_seeds_come_from_meta_then_from_the_measurement():
    measured = expectations([{"metric": "val/top1", "op": ">=", "value": 0, "measured": {"seeds": [4, 5]}}])
    assert seeds_of({"seeds": [1]}, measured, 9) == [1]
    assert seeds_of({}, measured, 9) == [4, 5]
    assert seeds_of({}, [], 9) == [9]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["a/b"], Asked("a/b", ())),
        (["recipe=a/b", "seed=1", "--seeds", "0,2"], Asked("a/b", ("seed=1",), (0, 2))),
        (["train.steps=1", "./a.yaml", "--seeds=3", "--dry"], Asked("./a.yaml", ("train.steps=1",), (3,), dry=True)),
        (["--all", "device=cpu"], Asked(None, ("device=cpu",), all=True)),
    ],
)
def test_words_of_verify(words, asked):
    assert parse(words) == asked


@pytest.mark.parametrize(
    "words",
    [[], ["a", "b"], ["a", "recipe=b"], ["--all", "a"], ["a", "--seed", "1"], ["a", "--seeds", "x"], ["a", "--seeds"], ["a", "--seeds=1,1"], ["a", "--seeds=0,00"],
     ["a", "--seeds", "0", "--seeds", "1"], ["a", "-m"]],
)  # fmt: skip
def test_words_that_do_not_fit_verify(words):
    with pytest.raises(ConfigError):
        parse(words)


def test_verify_runs_every_seed_and_writes_what_it_found(folder, capsys):
    lines = "  - {metric: val/top1, op: '<=', value: 1}\n  - {metric: steps_applied, op: '==', value: 4}\n"
    path = recipe(lines)
    assert main(["verify", path, "--seeds", "0,5", "train.steps=4"]) == 0
    shown, content = capsys.readouterr().out, verdict_file()
    assert shown.count("PASS") == 4  # status, two lines, the verdict
    assert "seed 5" in shown
    assert "verify.json" in shown
    assert content["passed"]
    assert content["seeds"] == [0, 5]
    assert "median" in content["statistic"]
    applied = next(line for line in content["lines"] if line["metric"] == "steps_applied")
    assert (applied["each"], applied["got"], applied["passed"]) == ({"0": 4, "5": 4}, 4.0, True)
    for run in content["runs"]:
        result = json.loads((Path(run["run_dir"]) / "result.json").read_text())
        assert (result["seed"], run["status"], run["exit_status"]) == (run["seed"], "ok", 0)
    assert content["env"]["versions"]["torch"]
    assert content["env"]["device"]["type"] == "cpu"


def test_a_line_that_fails_an_absent_metric_and_a_run_that_diverges_fail(folder, capsys):
    lines = (
        "  - {metric: val/top1, op: '>=', value: 0.99}\n  - {metric: ema/top1, op: '>=', value: 0}\n"
        "  - {metric: steps_applied, op: '==', value: 0}\n"
    )
    text = QUICK.replace("fp32", "fp16_static") + "precision: {loss_scale: {init: 16777216, patience: 3}}\n"
    assert main(["verify", recipe(lines, text=text)]) == 1
    shown, content = capsys.readouterr().out, verdict_file()
    assert [line["passed"] for line in content["lines"]] == [False, False, False, True]
    assert "absent: seed 0" in shown
    (run,) = content["runs"]
    assert run["status"] == "diverged"
    assert "LossScaleError" in run["error"]


def test_a_recipe_may_expect_to_diverge(folder):
    text = QUICK.replace("fp32", "fp16_static") + "precision: {loss_scale: {init: 16777216, patience: 3}}\n"
    lines = "  - {metric: status, op: '==', value: diverged}\n  - {metric: steps_skipped, op: '==', value: 3}\n"
    assert main(["verify", recipe(lines, text=text)]) == 0
    assert [line["got"] for line in verdict_file()["lines"]] == ["diverged", 3.0]


def test_a_run_without_a_result_is_a_fail_line(folder, monkeypatch):
    """Killed as by the system's memory killer: no ``result.json``, and the next seed runs all the same."""
    Path("user_killed.py").write_text(
        "import os, signal, torch\n"
        "def net(num_classes, input_shape):\n"
        "    if torch.initial_seed() == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    path = recipe("  - {metric: steps_applied, op: '==', value: 3}\n")
    words = ["model=python", "model.name=user_killed:net", "trust=[user_killed]"]
    assert main(["verify", path, "--seeds", "0,1", *words]) == 1
    content = verdict_file()
    assert [run["status"] for run in content["runs"]] == ["refused", "ok"]
    assert content["runs"][0]["exit_status"] == 128 + signal.SIGKILL
    assert [line["passed"] for line in content["lines"]] == [False, False]
    assert content["lines"][1]["each"] == {"0": None, "1": 3}


def test_sigterm_stops_verify_and_its_run_saves(folder):
    path = recipe("  - {metric: steps_applied, op: '==', value: 100000}\n")
    words = ["verify", path, "--seeds", "0,1", "train.steps=100000", "train.log_every=1"]
    with Path("out").open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "mprun", *words], stdout=out)
    deadline = time.monotonic() + 60
    while not (found := list(Path("outputs/verify").glob("*/*/seed_0/metrics.jsonl"))) or not found[0].stat().st_size:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert "STOPPED" in Path("out").read_text()
    content = verdict_file()
    assert (content["stopped"], content["passed"], len(content["runs"])) == (143, False, 1)
    assert content["runs"][0]["status"] == "interrupted"
    assert list(Path("outputs").rglob("last.pt"))


def test_verify_needs_lines_and_a_recipe_that_exists(folder, capsys):
    assert main(["verify", recipe("  []\n")]) == 2
    assert "expects nothing" in capsys.readouterr().err
    assert main(["verify", "digits/vit_fp61"]) == 2
    assert "digits/vit_fp16" in capsys.readouterr().err


# --- verify --all -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recipes(folder, monkeypatch):
    """A ``recipes/`` of the test's own beside the real ``conf/``, for the runs' processes, too."""
    own = folder / "recipes"
    (own / "group").mkdir(parents=True)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "import pathlib, sys, mprun.compose as c\nreal = c.tree\n"
        f"own = lambda name: pathlib.Path({str(own)!r}) if name == 'recipes' else real(name)\n"
        "[setattr(m, 'tree', own) for m in list(sys.modules.values()) if getattr(m, 'tree', None) is real]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    real = compose_module.tree

    def tree(name: str) -> Path:
        return own if name == "recipes" else real(name)

    for module in [
        module
        for name, module in sys.modules.items()
        if name.startswith("mprun.") and getattr(module, "tree", None) is real
    ]:
        monkeypatch.setattr(module, "tree", tree)
    return own


def test_verify_all_runs_what_it_can_and_says_what_it_leaves_out(recipes, capsys):
    good = QUICK + "expect:\n  - {metric: steps_applied, op: '==', value: 3}\n"
    (recipes / "group" / "good.yaml").write_text(good)
    (recipes / "empty.yaml").write_text(QUICK + "expect: []\n")
    (recipes / "gpu.yaml").write_text(good + "meta: {requires: gpu}\n")
    (recipes / "cuda.yaml").write_text(good.replace("device: cpu", "device: cuda"))
    (recipes / "bad.yaml").write_text("train: [1\n")
    (recipes / "stranger.yaml").write_text(good + "dataset: {source: python, name: 'os:system', augment: null}\n")
    assert main(["verify", "--all"]) == 1
    shown = capsys.readouterr().out
    content = verdict_file_of_all()
    assert content["passed"] == ["group/good"]
    assert "empty" in content["left_out"]
    assert "expects nothing" in content["left_out"]["empty"]
    if not gpu():
        assert "needs a GPU" in content["left_out"]["gpu"]
        assert "device=cuda" in content["left_out"]["cuda"]
    assert "FAIL  bad: refused" in shown
    assert "left out  empty" in shown
    assert "bad" in content["refused"]
    assert "stranger" in content["refused"] | content["left_out"]


def verdict_file_of_all() -> dict[str, Any]:
    (path,) = Path("outputs/verify/all").glob("*/verify.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def test_verify_all_dry_runs_nothing(recipes, capsys):
    (recipes / "good.yaml").write_text(QUICK + "expect:\n  - {metric: steps_applied, op: '==', value: 3}\n")
    assert main(["verify", "--all", "--dry"]) == 0
    assert "would run good with seed 0" in capsys.readouterr().out
    assert not Path("outputs").exists()


def test_data_and_packages_that_are_not_here_are_a_reason(folder, monkeypatch):
    def config(*words: str) -> Config:
        return compose([*words, "tracking=disabled"]).config

    assert cannot_run(config("model=mlp"), []) == ""
    Path("no_data.py").write_text("def rows():\n    raise FileNotFoundError('rows.npz')\n")
    monkeypatch.syspath_prepend(str(folder))
    words = ["dataset=python", "dataset.name=no_data:rows", "model=mlp"]
    assert "trust=[no_data]" in cannot_run(config(*words), [])
    monkeypatch.setattr(command, "versions", lambda names: dict.fromkeys(names))
    assert cannot_run(config("model=timm", "model.name=test_vit"), []) == "needs timm, which is not installed"


# --- recipes of strangers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["validate", "train", "verify"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dataset: {source: python, name: 'os:system', augment: null, kwargs: {command: 'touch ran'}}", "trust=[os]"),
        ("model: {source: python, name: 'stranger:net'}", "trust=[stranger]"),
        ("dataset: {source: python, name: 'stranger:net', augment: null}", "trust=[stranger]"),
        ("trust: [stranger]", "only the command line"),
        ("model: {_target_: os.system}", "_target_"),
    ],
)
def test_a_stranger_s_recipe_runs_no_code(folder, capsys, monkeypatch, command, text, said):
    Path("stranger.py").write_text("open('ran', 'w')\ndef net(**kwargs): ...\n")
    monkeypatch.syspath_prepend(str(folder))
    Path("mine.yaml").write_text(QUICK + text + "\nexpect: [{metric: status, op: '==', value: ok}]\n")
    code = main([*([] if command == "train" else [command]), "recipe=./mine.yaml"])
    error = capsys.readouterr().err
    assert not Path("ran").exists()
    assert not Path("outputs").exists()
    if command == "validate" and said.startswith("trust="):
        return  # checks that need no import do not ask for trust
    assert code == 2
    assert said in error


def test_a_malformed_recipe_harms_only_itself(recipes, capsys):
    (recipes / "good.yaml").write_text(QUICK)
    (recipes / "bad.yaml").write_text("# bad\ntrain: [1\n")
    (recipes / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["show", "recipe=good"]) == 0
    assert main(["list", "recipe"]) == 0
    assert main(["-m", "recipe=good", "seed=1", "train.steps=1"]) == 0
    assert main(["validate", "recipe=bad"]) == 2
    assert "bad.yaml" in capsys.readouterr().err


def test_recipes_are_swept_and_the_command_line_wins(recipes):
    for name, steps in (("one", 1), ("two", 2)):
        (recipes / f"{name}.yaml").write_text(
            QUICK.replace("steps: 3", f"steps: {steps}") + f"optimizer: {{lr: 0.{steps}}}\n"
        )
    assert main(["-m", "recipe=one,two", "optimizer.lr=0.5"]) == 0
    assert sorted(
        json.loads(path.read_text())["steps_applied"] for path in Path("outputs/sweeps").rglob("result.json")
    ) == [1, 2]
    for path in Path("outputs/sweeps").rglob("config.yaml"):
        if path.parent.name != ".hydra":
            assert "lr: 0.5" in path.read_text()


# --- cp ---------------------------------------------------------------------------------------------------------------


def test_cp_copies_and_the_copy_runs(folder, capsys):
    assert main(["cp", "digits/vit_fp16", "mine.yaml"]) == 0
    assert "recipe=./mine.yaml" in capsys.readouterr().out
    assert Path("mine.yaml").read_bytes() == (ROOT / "recipes" / "digits" / "vit_fp16.yaml").read_bytes()
    assert main(["validate", "recipe=./mine.yaml"]) == 0
    Path("sub").mkdir()
    assert main(["cp", "recipe=./mine.yaml", "sub"]) == 0
    assert Path("sub/mine.yaml").read_bytes() == Path("mine.yaml").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits/vit_fp16", "there.yaml"], "exists"),
        (["digits/vit_fp61", "new.yaml"], "digits/vit_fp16"),
        (["digits/vit_fp16", "new"], ".yaml"),
        (["digits/vit_fp16", "no/such/folder.yaml"], "cannot be written"),
        (["digits/vit_fp16"], "cp RECIPE FILE"),
        (["../conf/config", "new.yaml"], "no such recipe"),
        (["digits", "new.yaml"], "no such recipe"),
        (["digits/vit_fp16", "a,b.yaml"], "grammar"),
    ],
)
def test_cp_refuses(folder, capsys, words, said):
    Path("there.yaml").write_text("mine")
    assert main(["cp", *words]) == 2
    assert said in capsys.readouterr().err
    assert Path("there.yaml").read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["there.yaml"]


def test_a_recipe_s_name_leads_nowhere_else(folder, capsys):
    assert main(["validate", "recipe=../conf/config"]) == 2
    assert "recipe=../conf/config does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("all_", [False, True])
def test_a_place_that_cannot_be_written_is_named(folder, capsys, recipes, all_):
    Path("outputs").write_text("a file")
    words = ["--all"] if all_ else [recipe("  - {metric: val/top1, op: '>=', value: 0}\n")]
    assert main(["verify", *words]) == 2
    assert "cannot create the folder outputs/verify/" in capsys.readouterr().err


def test_cp_imports_no_torch(folder):
    code = "import sys; from mprun.cli import main; status = main(sys.argv[1:]); sys.exit(status or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "cp", "digits/vit_fp16", "mine.yaml"], check=False)
    assert done.returncode == 0
