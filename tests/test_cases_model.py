"""Public bug reports about what half precision does inside a model: masks, sums, statistics, inputs, masters, EMA."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from mprun.cli import main
from mprun.precision.policy import PrecisionPolicy
from mprun.training.ema import Ema
from mprun.training.postmortem import examine
from mprun.training.result import APPLIED, NONFINITE_LOSS
from mprun.training.step import eval_step, train_step
from tests import case_code
from tests.case_code import ROWS, TOY, TRUST, checkpoint, latest, records, result
from tests.conftest import BF16, CPU, FP16, REGRESSION, SGD, batch, toy, toy_batch
from tests.test_casting import MASTER, PURE
from tests.test_faults import everything, moved

BF16_MASTER = {**BF16, "precision.mode": "master", "precision.param_dtype": "bfloat16"}
NAMED = ["fp32", "bf16", "fp16_dynamic", "fp16_static", "fp16_master_dynamic", "bf16_master", "fp16_pure", "bf16_pure"]
FP16_NAMED = [name for name in NAMED if name.startswith("fp16")]


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


def user(model: str, dataset: str = "rows", *words: str) -> list[str]:
    return [*TRUST, "model=python", f"model.name=tests.case_code:{model}", "dataset=python", f"dataset.name=tests.case_code:{dataset}",
            "train.batch_size=8", "train.epochs=1", "optimizer.lr=1e-3", *words]  # fmt: skip


def start_scale(precision: str, value: float) -> list[str]:
    """The word that sets the loss scale's start, for a precision that has one."""
    return [f"precision.loss_scale.init={value:g}"] if precision.startswith("fp16_") else []


# --- constants that half cannot hold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", NAMED)
def test_a_mask_of_minus_1e9_is_an_error_that_says_where_and_what_to_do(folder, capsys, precision):  # case C17
    code = main(user("Masked", "rows", f"precision={precision}"))
    if precision not in FP16_NAMED:
        assert code == 0, "float32 and bfloat16 hold -1e9"
        return
    assert code == 2
    err = capsys.readouterr().err
    for part in (
        "blocks.1 (Attention, case_code.py:",
        "torch.finfo",
        "precision.fp32_modules=[blocks.1]",
        f"precision={precision}",
    ):
        assert part in err
    assert len(err.splitlines()) == 2
    assert not list(folder.iterdir()), "told by the first batch, before there is a run folder"


@pytest.mark.parametrize("precision", FP16_NAMED)
def test_the_rule_that_the_error_names_makes_it_run(folder, precision):  # case C17
    assert main(user("Masked", "rows", f"precision={precision}", "precision.fp32_modules=[blocks.1]")) == 0
    rows = {row["module"]: row for row in json.loads((latest() / "modules.json").read_text())}
    assert (rows["blocks.1.qkv"]["compute_dtype"], rows["blocks.0.qkv"]["compute_dtype"]) == ("float32", "float16")


@pytest.mark.parametrize(
    "mode", [{}, BF16, FP16, MASTER, PURE, BF16_MASTER], ids=["fp32", "bf16", "fp16", "master", "pure", "bf16_master"]
)
def test_padding_gets_no_attention_in_any_mode(make_state, mode):  # case C17
    state = make_state(case_code.Masked(mask=None), **mode)
    row = train_step(state, [batch(torch.randn(8, 6), torch.arange(8) % 4)]).read()
    assert row.outcome == APPLIED
    for block in state.model.blocks:
        assert torch.equal(block.weights[:, :, 3:], torch.zeros_like(block.weights[:, :, 3:]))
        torch.testing.assert_close(block.weights.float().sum(-1), torch.ones(8, 5), rtol=1e-2, atol=1e-2)


def test_a_dtype_error_in_the_middle_of_a_run_names_its_module_too(folder, capsys, monkeypatch):  # case C28
    """The first batch is fine; later the model writes half numbers into a float32 tensor of its own."""
    inner, calls = case_code.Mixed.forward, []

    def forward(self, x):
        calls.append(1)
        return inner(self, x) if len(calls) > 4 else self.inner(x)

    monkeypatch.setattr(case_code.Mixed, "forward", forward)
    assert main(user("Mixed", "rows", "precision=fp16_dynamic")) == 1
    err = capsys.readouterr().err
    assert "mprun: error: the model itself (Mixed, case_code.py:" in err
    assert "dtype=x.dtype" in err
    got = result()
    assert (got["status"], got["steps_applied"]) == ("failed", 3)
    calls.clear()
    assert main(user("Mixed", "rows", "precision=fp16_dynamic", "precision.fp32_modules=['**']")) == 0


def test_an_error_of_the_users_own_keeps_its_traceback(folder, monkeypatch):
    def forward(self, x):
        raise RuntimeError("my own")

    monkeypatch.setattr(case_code.Mixed, "forward", forward)
    with pytest.raises(RuntimeError, match="my own"):
        main(user("Mixed", "rows", "precision=fp16_dynamic"))


@pytest.mark.parametrize("precision", ["fp32", *(name for name in NAMED if name != "fp32")])
def test_bce_of_probabilities_is_refused_in_every_half_mode(folder, capsys, precision):  # case C22
    """sigmoid(12) is 1 in half, and the loss would be 100 instead of 12."""
    words = [
        *TOY,
        "dataset.kwargs.values=[0,0]",
        "optimizer.lr=0",
        f"precision={precision}",
        *start_scale(precision, 128),
    ]
    code = main([*words, "model.name=tests.case_code:Probability"])
    if precision == "fp32":
        assert code == 0
        # The toy's own loss squares it; float32 knows 1 - sigmoid(12) to 1 % only.
        assert records("train")[0]["train/loss"] ** 0.5 == pytest.approx(12.0, abs=0.01)
    else:
        assert code == 2
        err = capsys.readouterr().err
        assert "the model itself (Probability" in err
        assert f"precision={precision}" in err
        assert "BCEWithLogitsLoss" in err
        assert len(err.splitlines()) == 2
        assert not list(folder.iterdir())
    assert main([*words, "model.name=tests.case_code:Probability", "model.kwargs.logits=true"]) == 0
    assert records("train")[0]["train/loss"] ** 0.5 == pytest.approx(12.0, abs=0.01)


# --- sums and statistics ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [FP16, BF16, MASTER, PURE], ids=["fp16", "bf16", "master", "pure"])
def test_4096_samples_are_counted_exactly(make_state, mode):  # case C21
    """A counter in FP16 would stop at 2048, one in BF16 at 256, and a sum of losses with it."""
    torch.manual_seed(0)
    model = nn.Linear(12, 4)
    samples = [batch(torch.randn(1, 12), torch.zeros(1, dtype=torch.int64)) for _ in range(4096)]
    with torch.no_grad():
        model.bias.copy_(torch.tensor([9.0, 0, 0, 0]))
    states = [make_state(copy, **keys) for copy, keys in ((nn.Linear(12, 4), {}), (model, mode))]
    states[0].model.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    plain, half = (eval_step(state, state.policy, samples) for state in states)
    assert half["top1"] == plain["top1"] == 1.0
    # The mean of what the half model says, each loss taken in float64: no sum has lost anything.
    state = states[1]
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(state.run_forward(s.inputs).float(), s.targets).double() for s in samples]
    assert half["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)
    assert half["loss"] == pytest.approx(plain["loss"], rel=2e-2)


def test_training_sums_are_exact_beyond_what_half_can_count(folder):  # case C21
    """4096 samples between two log points, all of them with loss 1: the mean is 1."""
    values = ["dataset.kwargs.values=[1.0]", "dataset.kwargs.repeat=4096"]
    for precision in ("fp16_dynamic", "bf16"):
        words = [
            *TOY,
            f"precision={precision}",
            *values,
            "optimizer.lr=0",
            "train.log_every=100000",
            "train.batch_size=64",
            *start_scale(precision, 1024),
        ]
        assert main(words) == 0
        (record,) = records("train")
        assert (record["step"], record["train/loss"]) == (64, 1.0)


def bn_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def test_batch_norm_is_not_poisoned_by_a_batch_that_is_skipped(make_state):  # case C24
    """One input of 1e5 is inf in FP16: BatchNorm's running mean would be inf for ever, its variance NaN, and so evaluation."""
    good = batch(torch.linspace(-1, 1, 8)[:, None], torch.zeros(8, 1))
    x = torch.linspace(-1, 1, 8)[:, None].clone()
    x[3] = 1e5
    bad = batch(x, torch.zeros(8, 1))
    state = make_state(
        bn_net(),
        **{
            **FP16,
            **REGRESSION,
            **SGD,
            "optimizer.lr": 0.01,
            "precision.loss_scale.init": 1024.0,
            "train.ema.decay": 0.9,
        },
    )
    train_step(state, [good])
    before = everything(state)
    row = train_step(state, [bad]).read()
    assert row.outcome == NONFINITE_LOSS
    assert moved(before, state) == []
    assert state.model[1].num_batches_tracked.item() == 1
    assert (
        "the input of sample 3 reaches 1e+05, more than 1000 times" in examine(state, [bad], loss_scale=1024.0).message
    )
    assert moved(before, state) == [], "nor by the replay that finds the culprit"
    for _ in range(3):
        assert train_step(state, [good]).read().applied
    assert state.model[1].num_batches_tracked.item() == 4
    assert eval_step(state, state.policy, [good])["loss"] == pytest.approx(0.0, abs=2.0)
    with state.ema.swapped_in(state.model):
        assert eval_step(state, state.policy, [good])["loss"] == pytest.approx(0.0, abs=2.0)


# --- inputs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic", "fp16_master_dynamic", "bf16_master", "fp16_pure"])
def test_only_floats_of_nested_batches_are_cast_and_an_overflow_is_told(
    folder, monkeypatch, capsys, precision
):  # case C26
    arrived = []
    forward = case_code.Nested.forward
    monkeypatch.setattr(case_code.Nested, "forward", lambda self, batch: arrived.append(batch) or forward(self, batch))
    words = [f"precision={precision}", "train.shuffle=false", "train.epochs=2", "precision.on_nonfinite_loss=skip",
             "dataset.kwargs.n=16"]  # fmt: skip
    assert main(user("Nested", "nested", *words)) == 0
    half = {"fp16_master_dynamic": torch.float16, "bf16_master": torch.bfloat16, "fp16_pure": torch.float16}.get(
        precision, torch.float32
    )
    for seen in arrived:
        assert (seen["ids"].dtype, seen["pair"][1].dtype) == (torch.int64, torch.bool)
        assert seen["ids"][0].tolist() in ([2049, 30521, 50256, 0], [2049, 30521, 50256, 8])
        assert (seen["pair"][0].dtype, seen["list"][0].dtype) == (half, half)
        assert isinstance(seen["pair"], tuple | list)
    told = [record["message"] for record in records("event") if "becomes inf" in record.get("message", "")]
    if half is torch.float16:
        (message,) = told  # once, though it happens in every epoch
        for part in ("sample 5 ", "float16", "65504", "normalise"):
            assert part in message
        assert "sample 5 becomes inf" in capsys.readouterr().err
    else:
        assert told == [], "1.7e9 is finite in bfloat16 and float32"


def test_an_input_beyond_half_that_spoils_the_loss_stops_the_run_naming_it(folder, capsys):  # case C26
    values = "dataset.kwargs.values=[0.1,0.1,70000]"  # a target is never cast, so it may be large
    assert (
        main([*TOY, "precision=fp16_master_dynamic", values, "precision.loss_scale.init=0.5", "train.clip_norm=1e-3"])
        == 0
    )
    assert main(user("net", "rows_beyond", "precision=fp16_master_dynamic")) == 1
    err = capsys.readouterr().err
    assert "sample 3 becomes inf when precision.mode=master casts it to float16" in err


def test_a_batch_of_inf_is_bad_data_and_not_an_overflow_of_the_cast():
    policy = PrecisionPolicy("master", torch.float16, torch.float16)
    x = {"a": torch.tensor([1.0, float("inf"), float("nan"), 65519.0, 65520.0, -1e30]), "b": [torch.tensor([10**9])]}
    (found,) = policy.overflowing(x)
    assert found.tolist() == [False, False, False, False, True, True]
    assert policy.cast_inputs(x)["a"].isinf().tolist() == [False, True, False, False, True, True]
    assert PrecisionPolicy().overflowing({"a": torch.tensor([1e300], dtype=torch.float64)})[0].tolist() == [True]
    assert PrecisionPolicy().overflowing(x) == [], "float32 into float32: nothing to look at"


# --- masters, optimizer state, EMA --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MASTER, BF16_MASTER], ids=["fp16", "bf16"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_in_half_modes_moves_what_has_a_gradient_and_nothing_else(make_state, mode, optimizer):  # case C32
    """eps 1e-8 and a squared gradient of 1e-8 are 0 in FP16: an unused row would become 0/0, a used one would not move by lr."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 1)
            nn.init.constant_(self.table.weight, 0.5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    keys = {
        **REGRESSION,
        "optimizer.name": optimizer,
        "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.0,
        "precision.loss_scale.init": 1024.0,
    }
    state = make_state(Rows(), **{**mode, **keys})
    before = dict(state.weights)["table.weight"].clone()
    # d/dw (w - t)^2 = 2 (w - t) = 1e-4
    assert train_step(state, [batch(torch.tensor([1]), torch.tensor([[0.5 - 5e-5]]))]).read().applied
    after = dict(state.weights)["table.weight"]
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert (before[1] - after[1]).item() == pytest.approx(1e-3, rel=1e-2)
    for value in next(iter(state.optimizer.state.values())).values():
        assert value.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp16_master_dynamic", "bf16_master"])
def test_progress_below_a_half_ulp_survives_a_resume(folder, precision):  # case C36
    """Masters rebuilt from the half weights would be back at the start: the half weights have not moved in 20 steps."""
    words = [*TOY, f"precision={precision}", "model.name=tests.case_code:one", "dataset.kwargs.values=[2.0]",
        "dataset.kwargs.repeat=20",
             "optimizer.lr=5e-6", *start_scale(precision, 1024), "train.checkpoint_every=10", "train.keep=9"]  # fmt: skip
    assert main(words) == 0
    whole = checkpoint()
    middle = latest() / "checkpoints" / "step_10.pt"
    assert whole["model"]["weight"].item() == 1.0
    assert whole["masters"]["weight"].item() == pytest.approx(1 + 20 * 2 * 5e-6, rel=1e-5)
    (folder / "copy/checkpoints").mkdir(parents=True)
    for name in ("config.yaml", ".hydra/overrides.yaml"):
        (folder / "copy" / name).parent.mkdir(exist_ok=True)
        (folder / "copy" / name).write_bytes((latest() / name).read_bytes())
    (folder / "copy/checkpoints/step_10.pt").write_bytes(middle.read_bytes())
    assert main(["resume=copy", "trust=[tests]"]) == 0
    resumed = checkpoint(folder / "copy")
    assert torch.equal(resumed["masters"]["weight"], whole["masters"]["weight"])
    assert torch.equal(resumed["model"]["weight"], resumed["masters"]["weight"].to(resumed["model"]["weight"].dtype))


@pytest.mark.parametrize(
    ("mode", "half"), [(MASTER, torch.float16), (BF16_MASTER, torch.bfloat16)], ids=["fp16", "bf16"]
)
def test_a_slow_ema_moves_though_half_could_not(make_state, mode, half):  # case C44
    """Weight 1.1, shadow 1.0, decay 0.9999, 10000 updates: 1.06321. In half 1e-4 of the difference rounds away."""
    state = make_state(toy(1.0), **mode, **{"train.ema.decay": 0.9999, "train.ema.warmup": False}, **REGRESSION)
    assert state.model.weight.dtype == half
    with torch.no_grad():
        dict(state.weights)["weight"].fill_(1.1)
    for _ in range(10_000):
        state.ema.update(state.named_truth(), torch.tensor(True))
    assert state.ema.shadow["weight"].dtype == torch.float32
    assert state.ema.shadow["weight"].item() == pytest.approx(1.06321, abs=1e-4)


def test_ema_is_fed_from_the_masters_and_copies_integers(make_state):  # case C44
    """The half weight stays 1.0 while the master moves on: the shadow must follow the master."""
    model = nn.Sequential(nn.BatchNorm1d(1), toy(1.0))
    model.register_buffer("flag", torch.tensor(False))
    state = make_state(
        model,
        **MASTER,
        **{**REGRESSION, **SGD, "optimizer.lr": 1e-5, "train.ema.decay": 0.0, "train.ema.warmup": False},
    )
    for step in range(3):
        model.flag.fill_(step == 2)
        row = train_step(state, [batch(torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [-2.0]]))]).read()
        assert row.applied
    master = dict(state.weights)["1.weight"]
    assert state.model[1].weight.item() == 1.0
    assert master.item() > 1.0
    assert state.ema.shadow["1.weight"].item() == master.item()
    assert (state.ema.shadow["0.num_batches_tracked"].item(), state.ema.shadow["0.num_batches_tracked"].dtype) == (
        3,
        torch.int64,
    )
    assert (state.ema.shadow["flag"].item(), state.ema.shadow["flag"].dtype) == (True, torch.bool)


def test_ema_of_half_parameters_without_masters_is_float32_too():
    half = {"weight": torch.full((3,), 1.0, dtype=torch.bfloat16)}
    ema = Ema(half.items(), decay=0.9999, warmup=False, device=CPU)
    half["weight"].fill_(2.0)
    for _ in range(100):
        ema.update(half.items(), torch.tensor(True))
    assert ema.shadow["weight"][0].item() == pytest.approx(2 - 0.9999**100, rel=1e-5)


# --- evaluation --------------------------------------------------------------------------------------------------------------------


def test_evaluation_gives_the_model_back_as_it_was(make_state):  # case C43
    """Dropout on, BatchNorm training, one sub-module frozen in eval mode; also when evaluation fails half-way."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 32),
        nn.BatchNorm1d(32),
        nn.Dropout(0.5),
        nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5)),
        nn.Linear(32, 4),
    )
    model[3].eval()
    state = make_state(model, **FP16)
    data = [batch(torch.randn(16, 6), torch.arange(16) % 4) for _ in range(3)]
    flags = {name: module.training for name, module in model.named_modules()}
    assert sorted(set(flags.values())) == [False, True]
    train_step(state, data[:1])
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    frozen = buffers["3.0.running_mean"].clone()
    scores = [eval_step(state, state.policy, data) for _ in range(2)]
    assert scores[0] == scores[1], "no dropout in evaluation"

    def broken():
        yield data[0]
        raise OSError("the disk has gone")

    with pytest.raises(OSError, match="gone"):
        eval_step(state, state.policy, broken())
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    with torch.no_grad():
        assert not torch.equal(state.run_forward(data[0].inputs), state.run_forward(data[0].inputs)), (
            "dropout is on again"
        )
    train_step(state, data[:1])
    assert torch.equal(model[3][0].running_mean, frozen)


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic", "fp16_master_dynamic"])
def test_how_often_one_evaluates_changes_no_bit(folder, precision):  # case C43
    weights = []
    for every in (2, 100_000):
        words = [
            *ROWS,
            f"precision={precision}",
            "train.epochs=2",
            f"train.eval_every={every}",
            "train.ema.decay=0.9",
            "model.kwargs.restless=true",
        ]
        assert main(words) == 0
        weights.append(checkpoint())
    for key in ("model", "masters", "ema"):
        flat = [torch.utils._pytree.tree_leaves(saved[key]) for saved in weights]
        assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


@pytest.mark.parametrize("precision", ["fp16_dynamic", "fp16_static", "fp16_master_dynamic"])
def test_half_is_real_on_the_cpu_and_on_the_record(folder, precision):  # case C13
    """A scale that switches itself off on the CPU would skip nothing: the first step must overflow, and the record must say half."""
    assert (
        main([*TOY, f"precision={precision}", "dataset.kwargs.values=[0.6,0.1]", "precision.loss_scale.init=65536"])
        == 0
    )
    assert [record["precision/loss_scale"] for record in records("skip")][:1] == [65536.0]
    (row,) = json.loads((latest() / "modules.json").read_text())
    assert (row["class"], row["compute_dtype"], row["output_dtype"]) == ("Linear", "float16", "float16")


def test_one_overflow_in_a_hundred_toy_steps_is_one_skip(make_state):  # case C13
    state = make_state(toy(), **FP16, **{**REGRESSION, **SGD, "optimizer.lr": 0.01})
    outcomes = [train_step(state, [toy_batch(0.6)]).read().applied for _ in range(100)]
    assert outcomes == [False] + [True] * 99
