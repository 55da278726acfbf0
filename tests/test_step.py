"""One training step against independent references: a plain loop, torch.amp.GradScaler, closed forms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mprun.errors import ConfigError
from mprun.numerics.faults import Fault, inject
from mprun.training.result import APPLIED, EMPTY, NONFINITE_LOSS, OVERFLOW
from mprun.training.step import accumulate, eval_step, gradient_norm, nonfinite, train_step
from tests.conftest import BF16, FP16, REGRESSION, SGD, batch, toy, toy_batch

MASTER_ = {"precision.name": "m", "precision.mode": "master", "precision.param_dtype": "float16", "precision.compute_dtype": "float16",
           "precision.loss_scale.kind": "dynamic", "precision.loss_scale.init": 256.0}  # fmt: skip
TOY = {**REGRESSION, **SGD, "optimizer.momentum": 0.0}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 5))


def data(n: int = 50, size: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 12, generator=generator), torch.randint(5, (size,), generator=generator)) for _ in range(n)
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adam"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_fp32_equals_a_plain_loop_bit_for_bit_over_50_steps(make_state, optimizer, clip):
    batches = data()
    extra = {"optimizer.momentum": 0.9} if optimizer == "sgd" else {}
    keys = {
        "optimizer.name": optimizer,
        "optimizer.lr": 1e-2,
        "train.clip_norm": clip,
        "optimizer.weight_decay": 0.0,
        **extra,
    }
    state = make_state(network(), **keys)
    torch.manual_seed(7)
    for x, y in batches:
        train_step(state, [batch(x, y)])

    plain = network()
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    arguments = {"weight_decay": 0.0, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    loop = cls(plain.parameters(), lr=1e-2, fused=True, **arguments)
    torch.manual_seed(7)
    for x, y in batches:
        F.cross_entropy(plain(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        loop.step()
        loop.zero_grad()
    for (name, mine), theirs in zip(state.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fp16_equals_autocast_and_grad_scaler(make_state, clip):
    """Scale 2**16 and a growth every 5 steps: the same skips and scales, and weights equal to FP32 rounding."""
    batches = data(30)
    keys = {
        "optimizer.lr": 1e-2,
        "train.clip_norm": clip,
        "optimizer.weight_decay": 0.0,
        "precision.loss_scale.growth_interval": 5,
    }
    state = make_state(network(), **FP16, **keys)
    plain = network()
    loop = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    scales = []
    torch.manual_seed(7)
    for x, y in batches:
        result = train_step(state, [batch(x, y)]).read()
        scales.append((result.loss_scale, result.applied))
    torch.manual_seed(7)
    for number, (x, y) in enumerate(batches):
        with torch.autocast("cpu", torch.float16):
            output = plain(x)
        scaler.scale(F.cross_entropy(output.float(), y)).backward()
        scaler.unscale_(loop)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip if clip is not None else float("inf"))
        before = scaler.get_scale()
        scaler.step(loop)
        scaler.update()
        loop.zero_grad()
        assert scales[number] == (before, bool(norm.isfinite()))
    for mine, theirs in zip(state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(k=st.integers(1, 8))
def test_k_micro_batches_equal_one_batch(k):
    from mprun.training.schedule import build_schedule
    from mprun.training.state import build_state
    from tests.conftest import CPU, make_config

    x, y = data(1, size=24)[0]
    y[::5] = -100  # ignored labels: micro-batches differ in valid targets, so a mean of means would be wrong
    config = make_config(**{**SGD, "optimizer.lr": 0.1})
    model = network().eval()
    one = build_state(config, copy.deepcopy(model), build_schedule(config.schedule, 9), CPU)
    many = build_state(config, copy.deepcopy(model), build_schedule(config.schedule, 9), CPU)
    first = train_step(one, [batch(x, y)]).read()
    parts = [batch(a, b) for a, b in zip(x.tensor_split(k), y.tensor_split(k), strict=True)]
    second = train_step(many, parts).read()
    assert first.valid_targets == second.valid_targets == int((y != -100).sum())
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    for a, b in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("power", [0, 4, 10, 15])
def test_clipping_is_independent_of_the_scale(make_state, power):
    state = make_state(
        toy(), **FP16, **{**TOY, "optimizer.lr": 1.0, "train.clip_norm": 0.25, "precision.loss_scale.init": 2.0**power}
    )
    row = train_step(state, [toy_batch(0.25)]).read()
    assert row.grad_norm == 0.5
    assert state.model.weight.item() == pytest.approx(0.25, rel=1e-5)


def test_clip_acts_on_the_true_norm_not_the_scaled_one(make_state):
    state = make_state(toy(), **FP16, **{**TOY, "optimizer.lr": 1.0, "train.clip_norm": 1.0})
    row = train_step(state, [toy_batch(0.25)]).read()
    assert (state.model.weight.item(), row.grad_norm) == (0.5, 0.5)


@pytest.mark.parametrize(("target", "skips", "scale"), [(0.4, 0, 65536), (0.6, 1, 32768), (1, 2, 16384), (100, 8, 256), (1000, 11, 32), (40000, 17, 0.5)])  # fmt: skip
def test_overflow_happens_where_fp16_ends(make_state, target, skips, scale):
    """S * 2 * |w - T| >= 65520 rounds to inf; the scale falls until it fits."""
    state = make_state(toy(), **FP16, **{**TOY, "optimizer.lr": 0.0})
    outcomes = []
    for _ in range(skips + 1):
        outcomes.append(train_step(state, [toy_batch(float(target))]).read())
    assert [row.outcome for row in outcomes] == [OVERFLOW] * skips + [APPLIED]
    assert outcomes[-1].loss_scale == scale


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "rmsprop", "nadamw"])
def test_a_skipped_step_leaves_every_byte(make_state, optimizer):
    """With fused and unfused optimizers, from torch and timm, on the very first step and later."""
    keys = {**REGRESSION, "optimizer.name": optimizer, "train.ema.decay": 0.9, "train.clip_norm": 1.0}
    if optimizer == "sgd":
        keys["optimizer.momentum"] = 0.9
    model = nn.Sequential(nn.BatchNorm1d(1), toy(0.5))
    state = make_state(model, **FP16, **{**keys, "precision.loss_scale.init": 2.0**10})
    good = batch(torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.1], [0.2]]))
    bad = batch(torch.tensor([[1.0], [-1.0]]), torch.tensor([[3e4], [0.2]]))
    for window in (bad, good, bad):
        before = _bytes(state)
        row = train_step(state, [window]).read()
        after = _bytes(state)
        if window is bad:
            assert row.outcome == OVERFLOW
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before), [
                k for k in before if not torch.equal(before[k], after[k])
            ]
        else:
            assert row.applied
            assert not torch.equal(before["1.weight"], after["1.weight"])
            assert not torch.equal(before["0.num_batches_tracked"], after["0.num_batches_tracked"])


def _bytes(state) -> dict[str, torch.Tensor]:
    from mprun.training.checkpoint import optimizer_state

    found = {name: value.clone() for name, value in state.model.state_dict().items()}
    for name, entry in optimizer_state(state).items():
        found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in entry.items()}
    found |= {f"ema/{name}": value.clone() for name, value in state.ema.shadow.items()}
    found["ema/updates"] = state.ema.updates.clone()
    found["applied"] = state.applied.clone()
    return found


def test_first_bad_micro_batch_ends_the_window(make_state):
    state = make_state(toy(), **FP16, **TOY)
    seen = []
    state.model.register_forward_hook(lambda *_: seen.append(1))
    result = train_step(state, [toy_batch(0.1), toy_batch(1000.0), toy_batch(0.1), toy_batch(0.1)])
    assert (result.read().outcome, result.micro_batches, len(seen)) == (OVERFLOW, 2, 2)
    assert state.model.weight.item() == 0.0


def test_learning_rate_counts_applied_steps(make_state):
    """Warm-up over 2 steps, cosine to 0 over 6, one skip in between: the schedule waits for the skipped step."""
    schedule = {"schedule.name": "cosine", "schedule.warmup_steps": 2}
    state = make_state(
        toy(), steps=6, **FP16, **{**TOY, "optimizer.lr": 0.1, **schedule, "precision.loss_scale.init": 1024.0}
    )
    rates = []
    for target in (0.1, 0.1, 1000.0, 0.1, 0.1):
        row = train_step(state, [toy_batch(target)]).read()
        rates.append((row.applied, round(row.lr, 6)))
    wanted = [state.schedule(step) * 0.1 for step in range(4)]
    assert [rate for applied, rate in rates if applied] == pytest.approx(wanted, abs=1e-6)
    assert wanted[1] == 0.1
    assert rates[2] == (False, rates[3][1])


def test_logged_numbers_carry_neither_scale_nor_divisor(make_state):
    for precision in ({}, FP16):
        for k in (1, 4):
            state = make_state(toy(), **precision, **{**TOY, "optimizer.lr": 0.0})
            for _ in range(3):
                row = train_step(state, [toy_batch(1.0)] * k).read()
            assert (row.loss, row.grad_norm) == (1.0, 2.0)


def test_window_of_ignored_labels_moves_nothing_and_is_counted_as_empty(make_state):
    state = make_state(network(), **FP16, **{"train.ema.decay": 0.9})
    x, _ = data(1)[0]
    before = _bytes(state)
    row = train_step(state, [batch(x, torch.full((8,), -100))]).read()
    after = _bytes(state)
    assert (row.outcome, row.loss, row.valid_targets, row.consecutive_skips) == (EMPTY, 0.0, 0, 0)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert state.scale.scale.item() == 65536.0


@pytest.mark.parametrize("precision", [FP16, BF16, {}], ids=["fp16", "bf16", "fp32"])
def test_non_finite_loss_is_not_an_overflow(make_state, precision):
    state = make_state(toy(), **precision, **TOY)
    row = train_step(state, [toy_batch(1.0, x=float("nan"))]).read()
    assert row.outcome == NONFINITE_LOSS
    assert state.model.weight.item() == 0.0
    assert state.scale.scale.item() == (65536.0 if precision is FP16 else 1.0)


def test_static_overflow_is_skipped_and_the_scale_stays(make_state):
    state = make_state(toy(), **{**FP16, "precision.loss_scale.kind": "static"}, **{**TOY, "optimizer.lr": 0.1})
    for count in (1, 2, 3):
        row = train_step(state, [toy_batch(1.0)]).read()
        assert (row.outcome, row.consecutive_skips) == (OVERFLOW, count)
    assert (state.model.weight.item(), state.scale.scale.item()) == (0.0, 65536.0)


def test_half_output_is_real_on_the_cpu(make_state):
    state = make_state(toy(), **FP16, **TOY)
    seen = []
    state.model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    train_step(state, [toy_batch(0.6)])
    assert seen == [torch.float16]
    assert state.scale.scale.item() == 32768.0


def test_no_gradient_at_all_is_an_error(make_state):
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = toy(), toy()
            self.used.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    state = make_state(Detached(), **TOY)
    with pytest.raises(ConfigError, match="trainable"):
        train_step(state, [toy_batch(1.0)])


@pytest.mark.parametrize("keys", [{}, FP16], ids=["fp32", "fp16"])
def test_sparse_gradients_are_refused_by_name_in_a_window_of_several_micro_batches(make_state, keys):
    """Between micro-batches there is then no gradient to look at."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten())
    state = make_state(model, **keys, **{"optimizer.name": "sgd"})
    window = [batch(torch.tensor([[1], [2]]), torch.tensor([0, 1])) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"gradient of 0\.weight is sparse"):
        train_step(state, window)


@pytest.mark.parametrize("keys", [{**FP16, "precision.loss_scale.init": 256.0}, MASTER_], ids=["fp16", "master"])
def test_a_window_may_begin_with_a_micro_batch_that_gives_no_gradient(make_state, keys):
    class Late(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.item() > 0 else x

    state = make_state(Late(1, 1), **keys, **TOY)
    assert train_step(state, [toy_batch(1.0, x=-1.0), toy_batch(1.0)]).read().outcome == APPLIED
    with pytest.raises(ConfigError, match="none of the 2 trainable parameters received a gradient"):
        train_step(state, [toy_batch(1.0, x=-1.0)] * 2)


def test_a_complex_gradient_may_be_a_conjugated_view(make_state):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5 + 0.25j]))

        def forward(self, x):
            return (self.weight.conj() * torch.complex(x, 2 * x)).real

    model = Turned()
    plain = copy.deepcopy(model)
    state = make_state(model, **TOY)
    row = train_step(state, [toy_batch(1.0)]).read()
    (plain(torch.ones(1, 1)) - 1).square().sum().backward()
    assert plain.weight.grad.is_conj()
    assert row.grad_norm == pytest.approx(plain.weight.grad.abs().item(), rel=1e-6)
    assert model.weight.item() == pytest.approx((plain.weight - state.base_lr * plain.weight.grad).item(), rel=1e-6)


def test_parameter_without_gradient_is_left_alone(make_state):
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    state = make_state(Half(), **REGRESSION, **{"optimizer.weight_decay": 0.5, "optimizer.lr": 0.1})
    before = state.model.unused.weight.clone()
    train_step(state, [toy_batch(1.0)])
    assert torch.equal(state.model.unused.weight, before)


def test_evaluation_restores_flags_counts_exactly_and_works_after_an_error(make_state):
    model = nn.Sequential(nn.Linear(12, 5), nn.Dropout(0.5))
    model[1].eval()
    state = make_state(model, **FP16)
    x = torch.zeros(1, 12)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([0.0, 0, 9, 0, 0]))
    scores = eval_step(state, state.policy, (batch(x, torch.tensor([2])) for _ in range(4096)))
    assert scores["top1"] == 1.0
    assert scores["loss"] == pytest.approx(4 * 2.718281828**-9, rel=0.05)
    assert [module.training for module in model] == [True, False]
    with pytest.raises(RuntimeError):
        eval_step(state, state.policy, [batch(torch.zeros(1, 13), torch.tensor([2]))])
    assert [module.training for module in (model, *model)] == [True, True, False]


@pytest.mark.parametrize("looks", [True, False], ids=["cpu", "as_on_a_gpu"])
def test_the_first_bad_micro_batch_decides_whether_or_not_the_rest_is_computed(make_state, monkeypatch, looks):
    """[overflow, NaN] is an overflow and [NaN, overflow] is not, also where the host does not look in between."""
    bad, nan = toy_batch(1000.0), toy_batch(1.0, x=float("nan"))
    for window, outcome in (([bad, nan], OVERFLOW), ([nan, bad], NONFINITE_LOSS)):
        state = make_state(toy(), **FP16, **TOY)
        if not looks:
            state.device = torch.device("meta")  # any device at which the host does not look
            monkeypatch.setattr("mprun.training.step.torch.zeros", lambda *a, device=None, **k: _ZEROS(*a, **k))
            monkeypatch.setattr(
                state, "run_forward", lambda inputs, policy=None, state=state: _forward_on_cpu(state, inputs)
            )
        row = train_step(state, window).read()
        assert row.outcome == outcome
        monkeypatch.undo()


@pytest.mark.parametrize("keys", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("watch", [False, True])
def test_who_was_first_bad_is_found_out_also_where_gradients_are_looked_at_only_when_in_doubt(make_state, keys, watch):
    """A gradient of inf in micro-batch 0, then a loss or an input of NaN or inf: what came first decides."""
    found = []
    for value in (float("nan"), float("inf")):
        model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
        state = make_state(model, **keys, **TOY)
        with inject(model, Fault("2", attempt=1, micro_batch=0, where="backward", value=math.inf)):
            window = [toy_batch(0.1), toy_batch(0.1, x=value), toy_batch(0.1)]
            sums = accumulate(state, window, watch=watch)
            found.append(bool(sums.lost) and not bool(sums.bad_input) and math.isfinite(sums.loss.item()))
            assert sums.micro_batches == (1 if watch or keys is FP16 else 2)
    assert found == [True, True]


_ZEROS = torch.zeros


def _forward_on_cpu(state, inputs):
    with torch.autocast("cpu", torch.float16):
        return state.model(inputs).float()


@pytest.mark.parametrize("mode", [FP16, MASTER_], ids=["autocast", "master"])
def test_an_infinite_input_is_not_an_overflow_even_if_the_loss_stays_finite(make_state, mode):
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    state = make_state(model, **mode, **TOY)
    x = float("inf") if mode is FP16 else 1e6  # in master mode the cast makes it infinite
    row = train_step(state, [toy_batch(0.5, x=x)]).read()
    assert row.outcome == NONFINITE_LOSS
    assert row.loss < float("inf")
    assert state.scale.scale.item() == mode.get("precision.loss_scale.init", 65536.0)


def test_unfused_pure_with_a_scale_below_one_applies_no_infinity(make_state):
    """Dividing a half gradient by S < 1 can overflow, so the test must look behind the division."""
    keys = {**MASTER_, "precision.mode": "pure", "precision.loss_scale.init": 0.5, "optimizer.fused": False}
    state = make_state(toy(), **{**TOY, **keys, "optimizer.lr": 1.0})
    row = train_step(state, [toy_batch(40000.0)]).read()
    assert row.outcome == OVERFLOW
    assert state.model.weight.item() == 0.0


def test_integer_labels_of_any_width(make_state):
    x, y = data(1)[0]
    losses = {
        dtype: train_step(make_state(network().eval()), [batch(x, y.to(dtype))]).read().loss
        for dtype in (torch.int64, torch.int32, torch.uint8)
    }
    assert len(set(losses.values())) == 1


def test_ema_reads_buffers_of_any_layout(make_state):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("expanded", torch.ones(1).expand(5))
            self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).T)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    state = make_state(Odd(), **{"train.ema.decay": 0.5})
    for _ in range(2):
        train_step(state, [batch(torch.ones(2, 4), torch.tensor([0, 1]))])
    assert torch.equal(state.model.expanded, torch.ones(5))
    with state.ema.swapped_in(state.model):
        assert torch.equal(state.model.transposed, torch.arange(6.0).reshape(2, 3).T)
    assert torch.equal(state.ema.shadow["transposed"], torch.arange(6.0).reshape(2, 3).T)


def test_regression_of_another_shape_is_refused_not_reshaped(make_state):
    state = make_state(nn.Linear(1, 3), **REGRESSION)
    with pytest.raises(ConfigError, match=r"\(2, 3\).*\(3, 2\)"):
        train_step(state, [batch(torch.ones(2, 1), torch.ones(3, 2))])
    assert train_step(make_state(toy(), **REGRESSION), [batch(torch.ones(2, 1), torch.ones(2))]).read().applied


def test_the_norm_of_half_gradients_is_summed_in_float32(make_state):
    """1000 gradients of 3000 have a norm of 94868, beyond what FP16 holds; each of them is finite."""
    from tests.test_casting import PURE

    state = make_state(nn.Linear(1000, 1, bias=False), **{**PURE, "precision.loss_scale.init": 1.0})
    grads = [torch.full((1, 1000), 3000.0, dtype=torch.float16)]
    norm, bad = gradient_norm(state, grads)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(3000 * 1000**0.5, rel=1e-6)
    assert not bad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@given(n=st.integers(1, 200), data=st.data())
def test_one_nonfinite_number_is_found_wherever_it_stands_and_the_largest_is_finite(dtype, value, n, data):
    start, largest = torch.zeros((), dtype=torch.bool), torch.finfo(dtype).max
    values = torch.full((n, 2), largest, dtype=dtype)
    values[::2] = -largest
    assert not nonfinite({"inputs": [values, torch.arange(3), values[:0]]}, start=start)
    values[data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 1))] = value
    assert nonfinite({"inputs": [values.T]}, start=start)
