"""Public bug reports about loss scaling, skipped steps, accumulation and schedules, as numbers that were worked out by hand.

Most run one weight (0) on one input (1) with squared error: its gradient meets FP16 as 2 (w - target) S.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from mprun.cli import main
from mprun.training.build import switches
from mprun.training.result import APPLIED, EMPTY, NONFINITE_GRAD, NONFINITE_LOSS, OVERFLOW
from mprun.training.schedule import build_schedule
from mprun.training.state import build_state
from mprun.training.step import train_step
from tests.case_code import TOY, checkpoint, records, result
from tests.conftest import BF16, CPU, FP16, REGRESSION, SGD, batch, make_config, toy, toy_batch
from tests.test_casting import MASTER
from tests.test_faults import everything, moved

WEIGHT = {**REGRESSION, "optimizer.weight_decay": 0.0}
PLAIN = {**REGRESSION, **SGD, "optimizer.momentum": 0.0}
STATIC = {**FP16, "precision.name": "fp16_static", "precision.loss_scale.kind": "static"}


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


# --- what a skipped step may move ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam unfused"])
def test_a_skipped_first_step_shifts_nothing_that_follows(make_state, optimizer):  # case C01
    """Zeroing the gradients and stepping would move momentum and Adam; counting attempts would move schedule and EMA."""
    name, _, unfused = optimizer.partition(" ")
    momentum = {"optimizer.momentum": 0.9} if name == "sgd" else {}
    keys = {
        **WEIGHT,
        **momentum,
        "optimizer.name": name,
        "optimizer.lr": 0.1,
        "optimizer.fused": False if unfused else None,
    }
    state = make_state(toy(), **FP16, **keys, **{"train.ema.decay": 0.9, "train.ema.warmup": False})
    before = everything(state)
    row = train_step(state, [toy_batch(0.6)]).read()
    assert (row.outcome, row.loss_scale, row.steps_applied) == (OVERFLOW, 65536.0, 0)
    assert moved(before, state) == []
    assert (state.scale.scale.item(), state.scale.growth_tracker.item()) == (32768.0, 0)
    weights = []
    for _ in range(2):
        assert train_step(state, [toy_batch(0.6)]).read().applied
        weights.append(state.model.weight.item())
    assert weights == pytest.approx({"sgd": [0.120020, 0.324033], "adam": [0.100000, 0.199116]}[name], abs=5e-6)
    assert (state.applied.item(), state.ema.updates.item()) == (2, 2)
    # 0 -> 0.1 w1 -> 0.9 (0.1 w1) + 0.1 w2: two updates, not three.
    assert state.ema.shadow["weight"].item() == pytest.approx(0.09 * weights[0] + 0.1 * weights[1], rel=1e-5)


def test_a_skipped_step_does_not_advance_the_learning_rate(folder):  # case C01
    """Warm-up over two steps, in a whole run: the first attempt is skipped, and the first applied step is the first of the warm-up."""
    values = "dataset.kwargs.values=[0.6,0.6,0.6]"
    words = [
        *TOY,
        "precision=fp16_dynamic",
        values,
        "optimizer.momentum=0.9",
        "schedule.warmup_steps=2",
        "train.ema.decay=0.9",
        "train.epochs=1",
    ]
    assert main(words) == 0
    rates = [(record["step"], record["attempt"], record["train/lr"]) for record in records("train")]
    assert rates == [(1, 2, pytest.approx(0.05)), (2, 3, pytest.approx(0.1))]
    assert [(record["step"], record["attempt"], record["reason"]) for record in records("skip")] == [(0, 1, "overflow")]
    got, saved = result(), checkpoint()
    assert (got["steps_applied"], got["steps_skipped"], got["loss_scale"]) == (2, 1, 32768.0)
    assert (saved["ema"]["updates"].item(), saved["step"]) == (2, 2)


def test_a_group_that_overflows_holds_back_the_others_and_the_scale_moves_once(make_state):  # case C15
    """Two parameter sets (weights that decay, gains that do not), and only the second one's gradient is infinite."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.half() @ self.a.half() * 1e-3 + self.b.half() * 100

    state = make_state(
        Two(),
        **FP16,
        **{**WEIGHT, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.1, "precision.loss_scale.init": 1024.0},
    )
    assert len(state.optimizer.param_groups) == 2
    before = everything(state)
    assert train_step(state, [toy_batch(1.0)]).read().outcome == OVERFLOW
    assert moved(before, state) == []
    assert state.scale.scale.item() == 512.0


@pytest.mark.parametrize(
    "words", [["optimizer.name=lbfgs"], ["optimizer.name=LBFGS", "precision=fp32"], ["optimizer=lbfgs"]]
)
def test_an_optimizer_that_calls_the_loss_again_is_refused_by_name(folder, capsys, words):  # case C15
    assert main([*TOY, "dataset.kwargs.values=[1]", "precision=fp16_dynamic", *words]) == 2
    err = capsys.readouterr().err
    assert "lbfgs" in err.lower()
    assert "adamw" in err
    assert list(folder.iterdir()) == []


# --- clipping ----------------------------------------------------------------------------------------------------------------


def test_clipped_and_logged_norms_are_those_of_fp32(make_state):  # case C05
    generator = torch.Generator().manual_seed(0)
    window = [batch(torch.randn(16, 12, generator=generator), torch.randint(5, (16,), generator=generator))]
    norms = {}
    for name, mode in {"fp32": {}, "fp16": FP16, "master": {**MASTER, "precision.loss_scale.init": 65536.0}}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 5))
        state = make_state(model, **{**mode, **SGD, "optimizer.lr": 0.5, "train.clip_norm": 0.1})
        norms[name] = [train_step(state, window).read().grad_norm for _ in range(5)]
        assert min(norms[name]) > 0.1
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=1e-2)
    assert norms["master"] == pytest.approx(norms["fp32"], rel=1e-2)


@pytest.mark.parametrize(
    "optimizer", [["optimizer.lr=0.01"], ["optimizer.name=adamw", "optimizer.momentum=null"], ["optimizer.fused=false"]]
)
def test_clipping_accumulation_a_tail_and_an_overflow_get_along(folder, optimizer):  # case C04
    """10 micro-batches in windows of 4: two windows and a tail, twice; sample 5 overflows in the first epoch only."""
    values = [0.1] * 10
    values[5] = 1000.0  # 2 * 1000 / 4 * 256 overflows; at the scale of 128 that follows it does not
    words = [*TOY, "precision=fp16_dynamic", "precision.loss_scale.init=256", f"dataset.kwargs.values={values}".replace(" ", ""),
             "train.accumulate=4", "train.clip_norm=1.0", "train.epochs=2", *optimizer]  # fmt: skip
    assert main(words) == 0
    got = result()
    assert (got["steps_applied"], got["steps_skipped"], got["counters"]["attempts"], got["loss_scale"]) == (
        5,
        1,
        6,
        128.0,
    )
    assert [(record["attempt"], record["step"]) for record in records("skip")] == [(2, 1)]
    assert [(record["attempt"], record["step"]) for record in records("train")] == [
        (1, 1),
        (3, 2),
        (4, 3),
        (5, 4),
        (6, 5),
    ]


# --- what the scale cannot cure ------------------------------------------------------------------------------------------------


def test_endless_nan_stops_the_run_and_the_scale_stays(folder, capsys):  # case C08
    """200 batches of NaN, all of which may be skipped: patience ends it, with names, before anything is ruined."""
    words = [*TOY, "precision=fp16_dynamic", "precision.on_nonfinite_loss=skip", "dataset.kwargs.values=[1.0]",
        "dataset.kwargs.repeat=200",
             "dataset.kwargs.nan_at=-1", "precision.loss_scale.patience=20", "train.checkpoint_every=1"]  # fmt: skip
    assert main(words) == 1
    err = capsys.readouterr().err
    for part in (
        "step 1 (attempt 20)",
        "20 steps in a row",
        "sample 19",
        "loss scale 65536",
        "bad data, not precision",
    ):
        assert part in err
    got = result()
    assert (got["status"], got["steps_applied"], got["counters"]["nonfinite"], got["loss_scale"]) == (
        "diverged",
        0,
        20,
        65536.0,
    )


def test_after_200_nan_batches_a_good_one_is_an_ordinary_step(make_state):  # case C08
    """GradScaler is at scale 0 by then: 0-scaled gradients times 1/0 turn the weight into NaN in a step that counts as applied."""
    state = make_state(toy(), **FP16, **PLAIN, **{"optimizer.lr": 0.1, "precision.loss_scale.patience": 1000})
    for count in range(200):
        row = train_step(state, [toy_batch(0.25, x=float("nan"))]).read()
        assert (row.outcome, row.consecutive_skips) == (NONFINITE_LOSS, count + 1)
    assert (state.model.weight.item(), state.scale.scale.item()) == (0.0, 65536.0)
    assert train_step(state, [toy_batch(0.25)]).read().applied
    assert state.model.weight.item() == pytest.approx(0.05)


def test_endless_overflow_ends_at_the_floor_with_the_weights_as_they_were(folder, capsys):  # case C08
    """Targets that overflow at any scale: the scale stops at its floor, the run at its patience."""
    words = [*TOY, "precision=fp16_dynamic", "dataset.kwargs.values=[60000.0]",
        "dataset.kwargs.repeat=60", "precision.loss_scale.min=4",
             "precision.loss_scale.patience=30", "train.checkpoint_every=1"]  # fmt: skip
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "30 steps in a row" in err
    assert "loss scale 4 (its floor)" in err
    assert "the largest that this batch takes is 0.5; lower precision.loss_scale.min=4, which is above it" in err
    got = result()
    assert (got["status"], got["steps_applied"], got["steps_skipped"], got["loss_scale"]) == ("diverged", 0, 30, 4.0)


def test_a_static_scale_never_writes_an_infinite_gradient(folder, capsys):  # case C11 (a)
    words = [*TOY, "precision=fp16_static", "precision.loss_scale.init=65536", "dataset.kwargs.values=[1.0]",
        "dataset.kwargs.repeat=9",
             "precision.loss_scale.patience=5"]  # fmt: skip
    assert main(words) == 1
    assert "5 steps in a row" in capsys.readouterr().err
    got = result()
    assert (got["steps_applied"], got["steps_skipped"], got["loss_scale"]) == (0, 5, 65536.0)


# --- windows, tails, schedules, logs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic", "bf16_master", "fp16_master_dynamic"])
@pytest.mark.parametrize(
    ("batches", "epochs", "weight", "steps"), [(5, 1, 0.36, 2), (5, 2, 0.5904, 4), (3, 1, 0.2, 1), (4, 1, 0.2, 1)]
)
def test_the_tail_of_an_epoch_is_a_window_with_its_own_divisor(
    folder, precision, batches, epochs, weight, steps
):  # case C38
    """w += 0.2 (1 - w) a window of any length; a tail divided by 4, dropped, or carried over gives other numbers."""
    words = [
        *TOY,
        f"precision={precision}",
        *(["precision.loss_scale.init=1024"] if "fp16" in precision else []),
        "dataset.kwargs.values=[1.0]",
        f"dataset.kwargs.repeat={batches}",
        "train.accumulate=4",
        f"train.epochs={epochs}",
    ]
    assert main(words) == 0
    assert checkpoint()["model"]["weight"].item() == pytest.approx(weight, rel=5e-3 if "bf16" in precision else 1e-3)
    assert result()["steps_applied"] == steps
    assert [record["step"] for record in records("train")] == list(range(1, steps + 1))


@pytest.mark.parametrize("skip", [False, True])
def test_the_schedule_counts_applied_windows(folder, capsys, skip):  # case C40
    """12 micro-batches in windows of 4, two epochs: 6 steps, peak at the second, 0 beyond the last; with a skip 5, same peak."""
    values = [0.1] * 12
    values[5 if skip else 0] = 1000.0 if skip else 0.1
    words = [*TOY, "precision=fp16_dynamic", "precision.loss_scale.init=256", f"dataset.kwargs.values={values}".replace(" ", ""),
             "train.accumulate=4", "train.epochs=2", "schedule=cosine", "schedule.warmup_steps=2", "schedule.warmup_frac=null", "schedule.final=0"]  # fmt: skip
    assert main(words) == 0
    rates = [record["train/lr"] for record in records("train")]
    assert len(rates) == result()["steps_applied"] == (5 if skip else 6)
    assert rates.index(max(rates)) == 1
    assert max(rates) == pytest.approx(0.1)
    assert rates[0] == pytest.approx(0.05)
    full = build_schedule(make_config(**{"schedule.name": "cosine", "schedule.warmup_steps": 2}).schedule, 6)
    assert rates == pytest.approx([0.1 * full(step) for step in range(len(rates))], rel=1e-5)
    if not skip:
        assert rates[-1] == pytest.approx(0.0, abs=1e-9), "the last step is the end of the decay"
    assert "lr_scheduler" not in capsys.readouterr().err


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_logs_carry_neither_scale_nor_divisor_nor_the_spike(folder, precision, accumulate):  # case C41
    """lr 0, target 1, and a spike that only FP16 skips: the loss is 1.0 and the norm 2.0 wherever a step was applied."""
    values = [1.0] * 16
    scale = [] if precision == "fp32" else ["precision.loss_scale.init=1024"]
    if precision != "fp32":
        values[6] = 1e4
    words = [
        *TOY,
        f"precision={precision}",
        *scale,
        f"dataset.kwargs.values={values}".replace(" ", ""),
        f"train.accumulate={accumulate}",
        "optimizer.lr=0",
    ]
    assert main(words) == 0
    applied = records("train")
    assert {(record["train/loss"], record["train/grad_norm"]) for record in applied} == {(1.0, 2.0)}
    skipped = records("skip")
    assert len(skipped) == (precision != "fp32")
    assert len(applied) == 16 // accumulate - len(skipped)
    for record in skipped:
        assert (record["reason"], record["precision/skipped_steps"], 6 in record["sample_ids"]) == ("overflow", 1, True)
    assert result()["final"]["train/loss"] == 1.0


def test_a_skip_between_two_log_points_stays_out_of_their_mean(folder):  # case C41
    values = [1.0] * 8
    values[4] = 1e4
    words = [
        *TOY,
        "precision=fp16_dynamic",
        "precision.loss_scale.init=1024",
        f"dataset.kwargs.values={values}".replace(" ", ""),
        "optimizer.lr=0",
    ]
    assert main([*words, "train.log_every=3"]) == 0
    assert [(record["step"], record["attempt"], record["train/loss"]) for record in records("train")] == [
        (3, 3, 1.0),
        (6, 7, 1.0),
        (7, 8, 1.0),
    ]


# --- the law ---------------------------------------------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "fp16_dynamic": FP16,
    "fp16_static": STATIC,
    "bf16": BF16,
    "fp16_master_dynamic": MASTER,
    "bf16_master": {**BF16, "precision.mode": "master", "precision.param_dtype": "bfloat16"},
}
MICRO = {"good": 0.5, "overflow": 3e4, "nan": 0.5, "ignored": 0.5}


def law_batch(kind: str, seed: int) -> Any:
    """8 rows of 6 numbers in 4 classes. ``overflow``: a logit's gradient is large only once a scale multiplies it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)
    if kind == "nan":
        x[3, 2] = float("nan")
    if kind == "ignored":
        y[:] = -100
    return batch(x, y)


class Overflowing(nn.Module):
    """Its gradient is multiplied by 1e6 in backward while ``on``: infinite in FP16 at the usual scales, fine in BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on and x.requires_grad:
            x.register_hook(lambda grad: grad * 1e6)
        return x


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    optimizer=st.sampled_from(["adamw", "sgd", "rmsprop"]),
    windows=st.lists(
        st.lists(st.sampled_from(["good", "good", "overflow", "nan", "ignored"]), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    ),
    clip=st.sampled_from([None, 1.0]),
    hysteresis=st.integers(1, 2),
)
@example(
    policy="bf16_master", optimizer="rmsprop", windows=[["good", "good", "overflow"], ["good"]], clip=None, hysteresis=1
)
def test_what_is_not_applied_moves_nothing(policy, optimizer, windows, clip, hysteresis):
    """For any sequence of windows: applied moves, everything else leaves every bit; S obeys overflows and nothing else."""
    half = policy.startswith("fp16")
    keys = {
        "optimizer.name": optimizer,
        "optimizer.lr": 1e-2,
        "train.clip_norm": clip,
        "train.ema.decay": 0.9,
        "precision.loss_scale.hysteresis": hysteresis,
    }
    if half:
        keys |= {"precision.loss_scale.init": 4096.0, "precision.loss_scale.growth_interval": 2}
    if optimizer == "sgd":
        keys["optimizer.momentum"] = 0.9
    config = make_config(**{**POLICIES[policy], **keys})
    torch.manual_seed(0)
    gate = Overflowing()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), gate, nn.Linear(8, 4))
    with ExitStack() as stack:
        stack.enter_context(switches(config, CPU))
        state = build_state(config, model, build_schedule(config.schedule, 100), CPU)
        kinds: list[str] = []
        model.register_forward_pre_hook(lambda *_: setattr(gate, "on", kinds.pop(0) == "overflow"))
        applied, skips = 0, 0
        for number, window in enumerate(windows):
            kinds[:] = window
            before, scale = everything(state), state.scale.state_dict()
            row = train_step(state, [law_batch(kind, 10 * number + i) for i, kind in enumerate(window)]).read()
            after = state.scale.state_dict()
            first = next((kind for kind in window if kind == "nan" or (kind == "overflow" and half)), None)
            expected = {"nan": NONFINITE_LOSS, "overflow": OVERFLOW, None: APPLIED}[first]
            if first is None and set(window) == {"ignored"}:
                expected = EMPTY
            assert row.outcome == expected, (row, window)
            assert row.outcome != NONFINITE_GRAD
            if expected == APPLIED:
                applied, skips = applied + 1, 0
                # Every part of the state has something that moved. (A half weight need not: its master is finer.)
                changed = set(moved(before, state))
                assert {"model.1.num_batches_tracked", "ema", "applied"} <= changed
                assert any(name.endswith("0.weight") for name in changed), changed
            else:
                skips += expected != EMPTY
                assert moved(before, state) == []
            assert (state.applied.item(), after["consecutive_skips"]) == (applied, skips)
            assert all(p.grad is None for p in state.params)
            assert all(p.grad is None for p in state.model.parameters())
            if not half or policy == "fp16_static" or expected in (EMPTY, NONFINITE_LOSS):
                assert {**after, "consecutive_skips": 0} == {**scale, "consecutive_skips": 0}
            elif expected == OVERFLOW:
                assert after["scale"] == (scale["scale"] if scale["hysteresis_left"] > 1 else scale["scale"] / 2)
                assert after["growth_tracker"] == 0
            else:
                assert after["scale"] == scale["scale"] * (2 if scale["growth_tracker"] == 1 else 1)
