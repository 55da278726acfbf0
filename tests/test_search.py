"""``mprun search`` on models whose trouble is known: exact sets, causes that are no matter of modules, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mprun.cli import main
from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.lab.candidates import ROOT, candidates, cost, rank, uncovered
from mprun.lab.evaluate import ROUNDING, Evaluator
from mprun.lab.found import Found
from mprun.lab.local import ModuleError
from mprun.lab.reference import reference, short_run
from mprun.lab.replay import Replay
from mprun.lab.rounding import round_mantissa
from mprun.lab.search import search
from mprun.training.env import config_hash

BENCH = Path(__file__).resolve().parent.parent / "bench"
COMMON = ["device=cpu", "train.batch_size=32", "optimizer.lr=3e-3", "search.steps=12", "trust=[search_toys]"]
TOYS = [*COMMON, "model=python", "model.name=search_toys:t5", "dataset=python", "dataset.name=search_toys:tokens"]
ROWS = [*COMMON, "model=mlp", "model.kwargs.hidden=[16,16]", "dataset=python", "dataset.name=search_toys:rows"]


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    sys.modules.pop("search_toys", None)


def found(*words: str, tell=None) -> Found:
    return search(compose([*TOYS, *words], command="search").config, tell)


# --- sets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16_dynamic", "fp16_static"])
def test_one_overflowing_linear_is_the_set(precision):
    result = found(f"precision={precision}", "model.kwargs.loud=1")
    assert (result.status, result.fp32_modules) == ("found", ("blocks.1.mlp.wo",))
    assert result.minimum is not None
    assert (result.minimum.one_minimal, result.minimum.smallest) == (True, True)
    assert result.tests <= 3
    assert "times FP16's largest number" in result.evidence[0].alone
    assert "loss is nan" in result.evidence[0].without


def test_two_that_only_cure_together_are_the_set():
    result = found("precision=fp16_dynamic", "model.kwargs.loud=1", "model.kwargs.chain=true")
    assert result.fp32_modules is not None
    assert set(result.fp32_modules) == {"blocks.1.mlp.wo", "blocks.1.mlp.down"}
    assert result.minimum is not None
    assert result.minimum.smallest  # every single one was tried
    assert result.tests < 40


def test_where_the_output_returns_to_half_the_module_around_it_is_needed():
    """In ``master`` mode an FP32 module hands on half: the large number needs the one that makes it small again in FP32 too."""
    result = found("precision=fp16_master_dynamic", "model.kwargs.loud=1")
    assert (result.status, result.fp32_modules) == ("found", ("blocks.1.mlp",))
    assert result.minimum is not None
    assert result.minimum.one_minimal


@pytest.mark.parametrize("precision", ["fp16_dynamic", "bf16", "fp16_master_dynamic", "bf16_master"])
def test_a_healthy_model_needs_nothing(precision):
    result = found(f"precision={precision}")
    assert (result.status, result.fp32_modules, result.tests) == ("empty", (), 1)


def test_range_is_no_matter_of_bf16():
    assert found("precision=bf16", "model.kwargs.loud=1").status == "empty"


def test_more_fp32_is_not_always_better():
    words = ("precision=fp16_dynamic", "model.kwargs.tricky=true", "model.kwargs.loud=1")
    config = compose([*TOYS, *words]).config
    run = reference(config, steps=4, keep=[0, 4])
    evaluator = Evaluator(run, config)
    culprit, worse = "blocks.1.mlp.wo", "blocks.0.mlp.wi"
    assert evaluator.evaluate([culprit]).passes
    assert not evaluator.evaluate([culprit, worse]).passes
    assert evaluator.evaluate([culprit, worse, "blocks.0.mlp.wo"]).passes
    assert found(*words).fp32_modules == (culprit,)


def test_rules_of_the_policy_stay_in_force():
    words = ("precision=fp16_dynamic", "model.kwargs.loud=1", "model.kwargs.chain=true")
    result = found(*words, "precision.fp32_modules=[blocks.1.mlp.wo]")
    assert result.fp32_modules == ("blocks.1.mlp.down",)


ODD = """
import torch
from torch import nn

class Rms(nn.Module):  # x * x overflows in half: all zeros, and no NaN anywhere
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.w

class Center(nn.Module):  # loses 8 bits of the mantissa
    def forward(self, x):
        return (x + 300.0) - 300.0

class Scores(nn.Module):  # its own product overflows, its children are fine
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x):
        s = (self.q(x) * 300.0) @ (self.k(x) * 300.0).transpose(1, 2)
        return (s / 9e4).float().softmax(-1) @ x.float()

class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.utils.weight_norm(nn.Linear(16, 16))
    def forward(self, x):
        return self.lin(x)

class Boxed(nn.Sequential):  # where an FP32 module gives half back, only the two together keep the large number
    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.LayerNorm(16))
        nn.init.normal_(self[0].weight, std=3e5)

class Net(nn.Module):
    def __init__(self, kind, classes):
        super().__init__()
        self.embed, self.lin = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.odd = {"rms": Rms, "center": Center, "scores": Scores, "old": Old, "boxed": Boxed}[kind]()
        self.size = 400.0 if kind == "rms" else 1.0
        self.out, self.act, self.head = nn.Linear(16, 16), nn.GELU(), nn.Linear(16, classes)
    def forward(self, ids):
        x = self.lin(self.embed(ids)) * self.size
        return self.head(self.act(self.out(self.odd(x).to(x.dtype))).mean(1))

def net(*, input_shape, num_classes, kind):
    return Net(kind, num_classes)
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    (tmp_path / "oddnets.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("oddnets", None)
    yield ["model.name=oddnets:net", "trust=[search_toys,oddnets]"]
    sys.modules.pop("oddnets", None)


@pytest.mark.parametrize(
    ("kind", "precision", "modules"),
    [
        ("rms", "fp16_dynamic", ("odd",)),
        ("rms", "fp16_master_dynamic", ("odd",)),
        ("rms", "bf16", ()),
        ("center", "bf16", ("odd",)),
        ("center", "bf16_master", ("odd",)),
        ("center", "fp16_dynamic", ()),
        ("scores", "fp16_dynamic", ("odd",)),
        ("scores", "bf16_master", ()),
        ("boxed", "fp16_dynamic", ("odd.0",)),
        ("boxed", "fp16_master_dynamic", ("odd",)),
    ],
)
def test_silent_faults_and_faults_of_a_containers_own_operations_are_found(odd, kind, precision, modules):
    result = found(*odd, f"model.kwargs.kind={kind}", f"precision={precision}")
    assert result.fp32_modules == modules
    assert result.minimum is not None
    assert result.minimum.one_minimal
    if kind == "boxed" and modules == ("odd",):
        assert result.evidence[0].alone.startswith("inside it, odd.0: output reaches")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_that_cannot_be_copied_is_built_again(odd):
    assert found(*odd, "model.kwargs.kind=old", "precision=fp16_dynamic", "search.steps=4").status == "empty"


# --- causes that no module is ----------------------------------------------------------------------------------------


def test_a_learning_rate_that_explodes_is_named():
    result = found("precision=fp16_dynamic", "optimizer=sgd", "optimizer.lr=1e12")
    assert (result.status, result.fp32_modules) == ("none", None)
    assert result.cause is not None
    assert result.cause.kind in ("learning_rate", "divergence")
    moderate = search(
        compose([*ROWS, "precision=fp16_dynamic", "optimizer=sgd", "optimizer.lr=50"], command="search").config
    )
    assert moderate.cause is not None
    assert moderate.cause.kind == "learning_rate"
    assert "optimizer.lr=50 is too high" in moderate.cause.message
    assert moderate.cause.evidence["lr_that_trains"] in (5.0, 0.5)


@pytest.mark.parametrize(("value", "said"), [("nan", "is NaN or inf"), ("1e30", "not finite with the initial weights")])
def test_a_bad_sample_is_named(value, said):
    words = [*ROWS, "precision=fp16_dynamic", "dataset.kwargs.bad=17", f"dataset.kwargs.value={value}"]
    result = search(compose(words, command="search").config)
    assert (result.status, result.fp32_modules) == ("none", None)
    assert result.cause is not None
    assert result.cause.kind == "data"
    assert said in result.cause.message
    assert result.cause.evidence["sample_ids"] == [17]


def test_a_static_scale_that_overflows_is_the_cause_and_the_one_that_passes_is_told():
    result = found("precision=fp16_static", "precision.loss_scale.init=16777216", "train.loss_weight=64")
    assert (result.status, result.fp32_modules) == ("none", None)
    assert result.cause is not None
    assert result.cause.kind == "scale"
    assert result.loss_scale is not None
    assert (
        found("precision=fp16_static", f"precision.loss_scale.init={result.loss_scale}", "train.loss_weight=64").status
        == "empty"
    )


def test_no_scale_where_one_is_needed_is_the_cause():
    result = found("precision=fp16_unscaled", "train.loss_weight=3e-6")
    assert result.cause is not None
    assert result.cause.kind == "scale"
    assert "without a loss scale" in result.cause.message


def test_inputs_that_overflow_before_the_model_are_the_data():
    words = [*ROWS, "precision=fp16_master_dynamic", "dataset.kwargs.size=1e6", "optimizer.lr=1e-6"]
    result = search(compose(words, command="search").config)
    assert (result.status, result.cause and result.cause.kind) == ("none", "data")
    assert "normalise the data" in str(result.cause)


@pytest.mark.parametrize(
    ("net", "said"), [("Scores", "an operation of its own forward"), ("Loud", "beside that nothing computes in half")]
)
def test_fp32_by_another_name_is_no_set(net, said):
    words = [
        "dataset=digits", "dataset.limit=256", "train.batch_size=32", "device=cpu", "search.steps=8", "optimizer.lr=1e-9",
        "model=python", f"model.name=diagnose_nets:{net}", "trust=[diagnose_nets]", "precision=fp16_dynamic",
    ]  # fmt: skip
    assert main(["search", *words]) == 1
    (folder,) = Path("outputs/search").glob("*/*")
    result = json.loads((folder / "result.json").read_text())
    assert (result["outcome"], result["fp32_modules"], result["recommended"]) == ("none", None, None)
    assert result["cause"]["kind"] == "model"
    assert said in result["cause"]["message"]
    assert ("precision=bf16, which passes" in result["cause"]["message"]) == (net == "Loud")
    assert not [*(folder / "precision").iterdir()]


# --- the end before the end ------------------------------------------------------------------------------------------


def test_an_interrupt_keeps_the_best_set_so_far():
    def tell(items, passes, tests, best):
        if best is not None:
            raise KeyboardInterrupt

    result = found("precision=fp16_dynamic", "model.kwargs.loud=1", "model.kwargs.chain=true", tell=tell)
    assert result.status == "interrupted"
    assert result.fp32_modules is not None
    assert {"blocks.1.mlp.wo", "blocks.1.mlp.down"} <= set(result.fp32_modules)
    early = found(
        "precision=fp16_dynamic", "model.kwargs.loud=1", tell=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert (early.status, early.fp32_modules) == ("interrupted", None)


def test_a_small_budget_is_kept_and_said():
    result = found("precision=fp16_dynamic", "model.kwargs.loud=1", "model.kwargs.chain=true", "search.budget=8")
    assert result.tests <= 8
    assert result.minimum is not None
    assert result.minimum.budget_spent
    assert set(result.fp32_modules or ()) == {"blocks.1.mlp.wo", "blocks.1.mlp.down"}
    none = found("precision=fp16_dynamic", "model.kwargs.loud=1", "model.kwargs.chain=true", "search.budget=2")
    assert (none.status, none.cause and none.cause.kind) == ("none", "budget")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_precision_file_that_trains(capsys):
    words = [*TOYS, "precision=fp16_dynamic", "model.kwargs.loud=1"]
    assert main(["search", *words]) == 0
    (folder,) = Path("outputs/search").glob("*/*")
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["outcome"], result["exit_code"]) == ("ok", "found", 0)
    assert result["fp32_modules"] == ["blocks.1.mlp.wo"]
    assert result["evidence"][0]["path"] == "blocks.1.mlp.wo"
    assert "tolerance * max(4 r_m" in result["test"]
    file = folder / result["recommended"]
    assert "# output reaches" in file.read_text()
    assert OmegaConf.load(file).fp32_modules == ["blocks.1.mlp.wo"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "env.json", "precision", "result.json"]
    out = capsys.readouterr().out
    assert "1 module must stay FP32" in out
    assert "precision=" in out
    rest = [word for word in TOYS if not word.startswith("search.")]
    run = ["tracking=disabled", "train.steps=5", "model.kwargs.loud=1"]
    assert main([*rest, *run, f"precision={file}"]) == 0
    assert main([*rest, *run, "precision=fp16_dynamic"]) == 1


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_a_result(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), str(BENCH.parent)])}
    words = [
        "search",
        *TOYS,
        "precision=fp16_dynamic",
        "model.kwargs.loud=1",
        "model.kwargs.chain=true",
        "search.steps=400",
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "mprun", *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while not list(Path("outputs/search").glob("*/*/env.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in said
    (file,) = Path("outputs/search").glob("*/*/result.json")
    assert json.loads(file.read_text())["status"] == "interrupted"


def test_no_set_is_exit_status_one(capsys):
    assert main(["search", *ROWS, "precision=bf16", "dataset.kwargs.bad=17"]) == 1
    (folder,) = Path("outputs/search").glob("*/*")
    result = json.loads((folder / "result.json").read_text())
    assert (result["outcome"], result["fp32_modules"], result["cause"]["kind"]) == ("none", None, "data")
    assert result["recommended"] is None
    assert "no set of FP32 modules suffices" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_fits(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["search", *TOYS, "precision=fp16_dynamic", "model.kwargs.loud=1", "search.steps=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wide = [line for line in lines if len(line.rstrip()) > width]
    assert all("outputs/search" in line for line in wide)  # paths are printed whole, to be copied
    assert any("blocks.1.mlp.wo" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["precision=fp32"], "computes in float32 already"),
        (["precision=bf16_pure"], "keeps no FP32 weights"),
        (["-m", "precision=fp16_dynamic"], "does not know -m"),
        (["precision=fp16_dynamic", "search.budget=0"], "search.budget"),
        (["precision=fp16_dynamic", "search.tolerance=0"], "search.tolerance"),
        (["precision=fp16_dynamic", "precision.fp32_modules=[nowhere]"], "nowhere"),
    ],
)
def test_what_is_refused(words, said, capsys):
    assert main(["search", *TOYS, *words]) == 2
    assert said in capsys.readouterr().err


def test_its_keys_are_no_part_of_a_run():
    plain = to_plain(compose(TOYS).config)
    other = to_plain(compose([*TOYS, "search.budget=7", "search.tolerance=2"]).config)
    assert config_hash(plain) == config_hash(other)


# --- parts ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=30))
def test_a_rounded_mantissa_is_the_formats_where_range_does_not_matter(values):
    given = torch.tensor([v for v in values if v == 0 or abs(v) > 2.0**-14] or [1.0])
    assert torch.equal(round_mantissa(given, 10), given.half().float())
    assert torch.equal(round_mantissa(given, 7), given.bfloat16().float())


def test_rounding_a_mantissa_keeps_range_and_what_is_not_finite():
    given = torch.tensor([1e30, 1e-30, math.inf, -math.inf, math.nan])
    rounded = round_mantissa(given, 7)
    assert torch.allclose(rounded[:2], given[:2], rtol=2**-8, atol=0)
    assert rounded[2:].tolist()[:2] == [math.inf, -math.inf]
    assert math.isnan(rounded[4])


@pytest.mark.parametrize("precision", ["fp16_dynamic", "bf16", "bf16_master"])
@pytest.mark.parametrize("model", [["model=resnet"], ["model=vit", "model.kwargs.depth=2"]])
def test_healthy_models_stay_well_below_the_limit(model, precision):
    """What rounding does is foreseen: a real run's error is about r_m, so that it stays near 1/R of the limit."""
    config = compose(
        [*model, "dataset.limit=256", "device=cpu", "train.batch_size=32", f"precision={precision}"]
    ).config
    evaluator = Evaluator(reference(config, steps=6, keep=[0, 6]), config)
    result = evaluator.evaluate([])
    assert result.passes
    assert max(state.margin for state in result.states) < 2 / ROUNDING
    assert evaluator.evaluate([ROOT]).passes


@pytest.mark.parametrize(("logit", "passes"), [(17.0, False), (36.0, True)])
def test_a_gradient_that_vanished_when_all_is_learned_is_not_asked_for(logit, passes):
    """Half loses exp(-logit) either way; at 17 an FP32 run still moves by it, at 36 no run does."""
    config = compose([*ROWS, "precision=fp16_unscaled", "train.loss_weight=4"]).config
    run = reference(config, steps=2, keep=[0, 2])
    first, last = run.states
    biases = [value for name, value in last.checkpoint["model"].items() if name.endswith("bias")]
    biases[-1][0] += logit
    window = tuple(dataclasses.replace(batch, targets=torch.zeros_like(batch.targets)) for batch in last.window)
    run = dataclasses.replace(run, states=[first, dataclasses.replace(last, window=window)])
    result = Evaluator(run, config).evaluate([])
    assert result.states[0].margin < 2 / ROUNDING
    assert result.states[1].error == 1.0
    assert result.passes is passes


def test_a_curve_from_kept_states_is_the_short_run_to_the_last_bit():
    config = compose(
        [*TOYS, "precision=fp16_dynamic", "precision.loss_scale.init=16777216", "train.loss_weight=1000"]
    ).config
    run = reference(config, steps=5, keep=[0])
    curve = Replay(run, config).curve((), 5)
    assert curve == short_run(config, steps=5)
    assert curve.skips


def test_candidates_compute_or_own_something_and_containers_cost_what_they_cover():
    def row(module, compute="float32", param="float32"):
        return {"module": module, "class": "X", "compute_dtype": compute, "param_dtype": param}

    rows = [
        row(""),
        row("a", param=None),
        row("a.b"),
        row("a.c", compute=None, param=None),
        row("a.d"),
        row("e", compute=None),
    ]
    got = candidates(rows)
    assert [(c.path, c.level, c.inside) for c in got] == [
        ("a", 1, ("a.b", "a.d")),
        ("a.b", 0, ()),
        ("a.d", 0, ()),
        ("e", 0, ()),
    ]
    rows += [row("f", compute=None, param=None), row("f.x"), row("f.y"), row("g", compute=None, param=None), row("g.x")]
    assert {"f", "g"}.isdisjoint(c.path for c in candidates(rows))
    half = {c.path: c.inside for c in candidates(rows, half_borders=True)}
    assert half["f"] == ("f.x", "f.y")
    assert "g" not in half  # its rule would do no more than that of what is inside
    assert cost(["a", "a.b"], got) == 3
    assert cost(["a.b", "e"], got) == 2
    assert uncovered(["a", "a.b", "e"]) == ("a", "e")
    assert uncovered(["a", ROOT]) == (ROOT,)

    def error(path, own, beyond, db):
        return ModuleError(path, "X", db, db, "", own, beyond, "", 0.0, 0.0)

    errors = [
        error("a", False, True, 0.0),
        error("a.b", False, False, 50.0),
        error("a.d", True, True, 3.0),
        error("e", False, False, 40.0),
    ]
    assert [c.path for c in rank(got, errors)] == ["a.d", "e", "a.b", "a"]
