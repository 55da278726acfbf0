"""Why a window was not applied, for each kind of reason; what the message says is true; and the run does not notice."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.config import Task
from mprun.numerics.faults import Fault, inject
from mprun.training.env import step_rng
from mprun.training.postmortem import examine
from mprun.training.replay import run_again
from mprun.training.step import train_step
from tests.conftest import BF16, CPU, FP16, REGRESSION, SGD, batch, toy, toy_batch
from tests.test_casting import MASTER, PURE
from tests.test_faults import everything, moved

HALF_MODES = pytest.mark.parametrize("mode", [FP16, MASTER, PURE], ids=["autocast", "master", "pure"])
S1 = {"precision.loss_scale.init": 1.0}


def big(linear: nn.Linear, value: float) -> nn.Linear:
    nn.init.constant_(linear.weight, value)
    return linear


def labels(x: Tensor, classes: int = 2) -> list:
    return [batch(x, torch.arange(len(x)) % classes)]


def verdict_of(state, window, **options):
    """The verdict on a window that is not applied, and nothing has moved by it."""
    rng = step_rng(CPU)
    row = train_step(state, window).read()
    assert not row.applied
    before, random = everything(state), torch.get_rng_state()
    types = [type(m) for m in state.model.modules()]
    pointers = [p.data_ptr() for p in state.model.parameters()]
    verdict = examine(state, window, loss_scale=row.loss_scale, rng=rng, **options)
    assert moved(before, state) == []
    assert torch.equal(random, torch.get_rng_state())
    assert [type(m) for m in state.model.modules()] == types
    assert [p.data_ptr() for p in state.model.parameters()] == pointers
    assert all(p.grad is None for p in (*state.model.parameters(), *state.params))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in state.model.modules())
    return verdict


def applied_with(make_state, model, window, keys, rules):
    """Whether a run with these FP32 rules, built from the start, applies the window."""
    state = make_state(model, **{**keys, **S1, "precision.fp32_modules": list(rules)})
    return train_step(state, window).read().applied


# --- the loss scale -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [2.0**16, 2.0**24])
def test_scale_search(make_state, init):
    """The weight's gradient is 1.5 * 3 * S: finite up to S = 2^13."""
    state = make_state(toy(1.0), **FP16, **SGD, **REGRESSION, **{"precision.loss_scale.init": init})
    verdict = verdict_of(state, [toy_batch(0.0, 1.5)])
    assert (verdict.kind, verdict.largest_scale) == ("scale_search", 2.0**13)
    assert verdict.message == (
        f"scale search: the gradients overflow at loss scale {'65536' if init < 2**20 else '2^24'} and are finite at 1; "
        "the largest that this batch takes is 8192; nothing to do"
    )
    assert verdict.replays <= 2 + math.ceil(math.log2(math.log2(init)))
    assert run_again(state, [toy_batch(0.0, 1.5)], scale=2.0**13).finite
    assert not run_again(state, [toy_batch(0.0, 1.5)], scale=2.0**14).finite


def test_scale_search_of_a_static_scale_and_of_a_floor_says_what_to_set(make_state):
    keys = {**FP16, **SGD, **REGRESSION}
    window = [toy_batch(0.0, 1.5)]
    verdict = verdict_of(make_state(toy(1.0), **{**keys, "precision.loss_scale.kind": "static"}), window)
    assert "set precision.loss_scale.init=8192, or precision.loss_scale.kind=dynamic" in verdict.message
    verdict = verdict_of(make_state(toy(1.0), **{**keys, "precision.loss_scale.min": 2.0**15}), window)
    assert "lower precision.loss_scale.min=32768, which is above it" in verdict.message


def test_what_is_to_be_set_is_exact(make_state):
    """%g would write 4.1943e+06, which is another number."""
    keys = {**FP16, **SGD, **REGRESSION, "precision.loss_scale.kind": "static", "precision.loss_scale.init": 2.0**24}
    verdict = verdict_of(make_state(toy(1.0), **keys), [toy_batch(1 - 2.0**-6, 0.99)])
    assert verdict.largest_scale == 2.0**22
    assert "set precision.loss_scale.init=4194304, or" in verdict.message


def test_factor_of_the_rule_decides_which_scales_are_reached(make_state):
    keys = {**FP16, **SGD, **REGRESSION, "precision.loss_scale.backoff_factor": 0.1, "precision.loss_scale.init": 1e5}
    assert verdict_of(make_state(toy(1.0), **keys), [toy_batch(0.0, 1.5)]).largest_scale == pytest.approx(1e4)


# --- overflow in the forward pass ----------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))


@HALF_MODES
def test_large_weights(make_state, mode):
    def model() -> nn.Sequential:
        net = mlp()
        big(net[0], 1.0)
        nn.init.zeros_(net[0].bias)
        big(net[2], 7500.0)
        big(net[3], 1e-3)
        return net

    window = labels(torch.ones(4, 4))
    verdict = verdict_of(make_state(model(), **{**mode, **SGD, **S1}), window)
    assert (verdict.kind, verdict.module, verdict.cls, verdict.operation) == ("overflow_forward", "2", "Linear", "mm")
    assert verdict.amax == pytest.approx(1.2e5, rel=1e-3)
    assert (verdict.limit, verdict.where) == (65504.0, "forward")
    assert (
        "overflow in the forward pass: 2 (Linear) mm reaches 1.2e+05 in FP32, 1.8x FP16's largest 65504; "
        in verdict.message
    )
    if (
        mode is not FP16
    ):  # an FP32 module gives its surroundings half, where 1.2e5 is inf: only all of them together would do
        assert verdict.fp32_modules == ()
        assert verdict.message.endswith("no set of up to 8 FP32 modules was found that helps; use BF16")
        return
    assert verdict.message.endswith(", or use BF16")
    assert applied_with(make_state, model(), window, {**mode, **SGD}, verdict.fp32_modules)
    for left in verdict.fp32_modules:  # none of them without effect
        others = [rule for rule in verdict.fp32_modules if rule != left]
        assert not applied_with(make_state, model(), window, {**mode, **SGD}, others)
    assert verdict.fp32_modules == ("2", "3")  # module 3 would cast its input to half
    assert "keep these in FP32: precision.fp32_modules=[2,3], or use BF16" in verdict.message


class Norm(nn.Module):
    """Written by hand: squares overflow in FP16 from 256 on."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x * x).mean(-1, keepdim=True).sqrt().reciprocal().clamp(min=1e-3)


class Attention(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.q, self.k = big(nn.Linear(4, 4, bias=False), value), big(nn.Linear(4, 4, bias=False), value)
        self.v = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return (scores.softmax(-1) @ self.v(x)).mean(1)


@HALF_MODES
def test_attention_scores_behind_a_mask(make_state, mode):
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(Attention(100.0)), nn.Linear(4, 2))

    window = labels(torch.ones(2, 3, 4))
    verdict = verdict_of(make_state(model(), **{**mode, **SGD, **S1}), window)
    assert (verdict.kind, verdict.module, verdict.operation) == ("overflow_forward", "0.0", "bmm")
    assert verdict.amax == pytest.approx(4 * 400.0**2)
    assert verdict.fp32_modules == ("0.0",)
    assert "precision.fp32_modules=[0.0], or use BF16" in verdict.message
    assert applied_with(make_state, model(), window, {**mode, **SGD}, verdict.fp32_modules)


def test_masters_beyond_the_format(make_state):
    """The half copy of a weight is inf; FP32's 7e4 is none."""
    state = make_state(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Linear(4, 2)), **{**MASTER, **SGD, **S1}
    )
    with torch.no_grad():
        dict(state.weights)["0.0.weight"].fill_(7e4)
        state.weights.write_back()
    x = torch.zeros(4, 4)
    x[:, 0] = 1e-3
    verdict = verdict_of(state, labels(x))
    assert verdict.message.startswith(
        "overflow in the forward pass: the parameter 0.0.weight reaches 7e+04 in FP32, 1.1x FP16's largest"
    )
    assert verdict.fp32_modules == ("0.0",)


def test_rules_that_are_in_force_stay_in_what_is_proposed(make_state):
    net = nn.Sequential(nn.Linear(4, 4), Attention(100.0), nn.Linear(4, 2))
    big(net[0], 0.25)
    keys = {**FP16, **SGD, **S1, "precision.fp32_modules": ["2"]}
    verdict = verdict_of(make_state(net, **keys), labels(torch.ones(2, 3, 4)))
    assert verdict.fp32_modules == ("1",)
    assert "precision.fp32_modules=[2,1]" in verdict.message


def test_one_sample_is_named(make_state):
    net = nn.Sequential(big(nn.Linear(4, 4, bias=False), 1000.0), nn.Linear(4, 2))
    x = torch.ones(8, 4)
    x[5] = 20.0
    verdict = verdict_of(make_state(net, **FP16, **SGD, **S1), labels(x))
    assert (verdict.kind, verdict.module, verdict.sample_ids) == ("overflow_forward", "0", (5,))
    assert "in sample 5;" in verdict.message


def test_samples_are_counted_by_all_their_rows(make_state):
    """40 tokens a sample: the first sample alone has more bad rows than anybody wants to read."""
    net = nn.Sequential(big(nn.Linear(4, 4, bias=False), 3e4), nn.Flatten(), nn.Linear(160, 2))
    verdict = verdict_of(make_state(net, **FP16, **SGD, **S1), labels(torch.ones(3, 40, 4)))
    assert verdict.sample_ids == (0, 1, 2)
    assert "in sample" not in verdict.message


def test_no_rule_helps_where_the_model_itself_overflows(make_state):
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = big(nn.Linear(4, 2, bias=False), 100.0)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return (y * y) * 1e-6

    verdict = verdict_of(make_state(Whole(), **FP16, **SGD, **S1), labels(torch.ones(4, 4)))
    assert (verdict.kind, verdict.module, verdict.fp32_modules) == ("overflow_forward", "", ())
    assert "the model (Whole) mul reaches 1.6e+05" in verdict.message
    assert "no set of up to 8 FP32 modules was found that helps; use BF16" in verdict.message


@pytest.mark.parametrize("mode", [MASTER, PURE], ids=["master", "pure"])
def test_inputs_beyond_the_format(make_state, mode):
    x = torch.ones(4, 4)
    x[2, 1] = 1e5
    verdict = verdict_of(make_state(mlp(), **{**mode, **SGD, **S1}), labels(x))
    assert (verdict.kind, verdict.sample_ids) == ("overflow_forward", (2,))
    assert "an input of sample 2 becomes inf" in verdict.message


def test_activation_checkpointing_and_accumulation(make_state):
    def block(value: float) -> nn.Module:
        return nn.Sequential(big(nn.Linear(4, 4, bias=False), value), nn.ReLU())

    net = nn.Sequential(nn.Sequential(block(0.25), block(1e5), block(1e-6)), nn.Linear(4, 2))
    keys = {**FP16, **SGD, **S1, "model.activation_checkpointing": True}
    good = batch(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long), ids=[10, 11, 12, 13])
    bad = batch(
        torch.ones(4, 4) * torch.tensor([[0.0], [1.0], [0.0], [0.0]]),
        torch.ones(4, dtype=torch.long),
        ids=[20, 21, 22, 23],
    )
    verdict = verdict_of(make_state(net, **keys), [good, bad, good])
    # The weight itself is beyond FP16: the module's cast of it is what overflows.
    assert (verdict.kind, verdict.module) == ("overflow_forward", "0.1.0")
    assert verdict.operation == "cast"
    assert verdict.amax == 1e5
    assert "0.1.0" in verdict.fp32_modules


def test_bf16_has_its_own_limit(make_state):
    """3.4e38 is a float32, and rounds to inf in BF16."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    big(net[0], 3.4e38)
    big(net[1], 1e-38).requires_grad_(False)  # its gradient, too, would be beyond FP32
    x = torch.zeros(4, 4)
    x[:, 0] = 1.0
    verdict = verdict_of(make_state(net, **BF16, **SGD), labels(x))
    assert (verdict.kind, verdict.module, verdict.dtype) == ("overflow_forward", "0", "bfloat16")
    assert verdict.limit == pytest.approx(3.3895e38, rel=1e-4)
    assert "BF16's largest 3.38953e+38" in verdict.message
    assert "use BF16" not in verdict.message
    assert verdict.fp32_modules


# --- overflow in the backward pass ----------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """The identity; its backward squares 600 in the format of the gradient, whatever the loss scale."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        large = torch.full_like(grad, 600.0)
        return large * large * 1e-6 * grad


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x)


@pytest.mark.parametrize("mode", [FP16, MASTER], ids=["autocast", "master"])
def test_a_backward_that_overflows_at_any_scale(make_state, mode):
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Squared()), nn.Linear(4, 2))

    window, keys = labels(torch.randn(4, 4)), {**mode, **SGD}
    verdict = verdict_of(make_state(model(), **keys), window)
    assert (verdict.kind, verdict.module, verdict.cls, verdict.where) == (
        "overflow_backward",
        "1.0",
        "Squared",
        "backward",
    )
    assert verdict.message == (
        "overflow in the backward pass: 1.0 (Squared) mul reaches 3.6e+05 in FP32, 5.5x FP16's largest 65504; "
        "keep it in FP32: precision.fp32_modules=[1.0], or use BF16"
    )
    assert applied_with(make_state, model(), window, keys, ["1.0"])


def test_gradients_that_need_a_scale_below_one(make_state):
    """d loss / d (output of 0) is 6000 * 600 = 3.6e6, which half takes times 2^-6."""
    net = nn.Sequential(big(nn.Linear(4, 4, bias=False), 1e-4), big(nn.Linear(4, 1, bias=False), 600.0))
    window = [batch(torch.full((1, 4), 1e-3), torch.full((1, 1), -3000.0))]
    keys = {**FP16, **SGD, **REGRESSION, "precision.loss_scale.min": 1.0}
    verdict = verdict_of(make_state(net, **keys), window)
    assert (verdict.kind, verdict.largest_scale) == ("scale_search", 2.0**-6)
    assert verdict.message.endswith(
        "the largest that this batch takes is 2^-6; lower precision.loss_scale.min=1, which is above it"
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_fault_that_stays_in_every_pass_breaks_fp32_too(make_state, where, value):
    state = make_state(mlp(), **FP16, **SGD)
    with inject(state.model, Fault("2", 1, micro_batch=None, where=where, value=value)):
        row = train_step(state, labels(torch.randn(4, 4))).read()
        verdict = examine(state, labels(torch.randn(4, 4)), loss_scale=row.loss_scale)
    assert (verdict.kind, verdict.where, verdict.operation) == ("divergence", where, "add")
    assert verdict.module in (("2",) if where == "forward" else ("2", "3"))


def test_a_passing_fault_is_not_reproduced(make_state):
    state = make_state(mlp(), **FP16, **SGD)
    window = labels(torch.randn(4, 4))
    with inject(state.model, Fault("2", 1, micro_batch=0)):
        row = train_step(state, window).read()
        verdict = examine(state, window, loss_scale=row.loss_scale)
    assert verdict.kind == "unreproduced"
    assert "a second pass over the same batch stays finite" in verdict.message


def test_dropout_is_drawn_as_it_was(make_state):
    """Half of the time the large unit is dropped, and the window is finite."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.lin = nn.Dropout(0.5), big(nn.Linear(1, 2, bias=False), 5e4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.drop(x))

    seen = set()
    for seed in range(12):
        state = make_state(Net(), **FP16, **SGD, **S1)
        torch.manual_seed(seed)
        rng = step_rng(CPU)
        applied = train_step(state, labels(torch.ones(1, 1))).read().applied
        torch.rand(7)
        state = make_state(Net(), **FP16, **SGD, **S1)
        assert run_again(state, labels(torch.ones(1, 1)), scale=1.0, rng=rng).finite == applied
        seen.add(applied)
    assert seen == {False, True}


# --- not precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, FP16, BF16, MASTER], ids=["fp32", "fp16", "bf16", "master"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_samples_are_named(make_state, mode, value):
    x = torch.randn(6, 4)
    x[[1, 4], 2] = value
    verdict = verdict_of(
        make_state(mlp(), **mode, **SGD), [batch(x, torch.zeros(6, dtype=torch.long), ids=list(range(30, 36)))]
    )
    assert (verdict.kind, verdict.sample_ids) == ("bad_data", (31, 34))
    assert verdict.message == "bad data, not precision: the input of sample 31, 34 is NaN or inf"


def test_bad_targets_and_absurd_samples(make_state):
    keys = {**FP16, **SGD, **REGRESSION}
    net = nn.Sequential(nn.Linear(4, 1))
    targets = torch.zeros(4, 1)
    targets[3] = math.nan
    verdict = verdict_of(make_state(net, **keys), [batch(torch.randn(4, 4), targets)])
    assert (verdict.kind, verdict.sample_ids) == ("bad_data", (3,))
    assert "the target of sample 3" in verdict.message
    targets[:, 0] = torch.tensor([1.0, 2.0, 1e25, 1.0])
    verdict = verdict_of(make_state(copy.deepcopy(net), **keys), [batch(torch.randn(4, 4), targets)])
    assert (verdict.kind, verdict.sample_ids) == ("bad_data", (2,))
    assert "the target of sample 2 reaches 1e+25, more than 1000 times the others" in verdict.message
    x = torch.rand(5, 4)
    x[2, 0] = 1e30
    for mode in ({}, FP16):
        verdict = verdict_of(
            make_state(copy.deepcopy(net), **{**mode, **SGD, **REGRESSION}), [batch(x, torch.zeros(5, 1))]
        )
        assert (verdict.kind, verdict.sample_ids) == ("bad_data", (2,))
        assert "the input of sample 2 reaches 1e+30, more than 1000 times the others" in verdict.message


def test_a_mask_of_inf_in_the_input_is_no_bad_data(make_state):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = big(nn.Linear(4, 4, bias=False), 3e4), nn.Linear(4, 2)

        def forward(self, given: dict) -> Tensor:
            return self.head(self.lin(given["x"]) * given["mask"].softmax(-1))

    mask = torch.zeros(4, 4)
    mask[:, 3] = -math.inf
    window = [batch({"x": torch.ones(4, 4), "mask": mask}, torch.zeros(4, dtype=torch.long))]
    verdict = verdict_of(make_state(Net(), **FP16, **SGD, **S1), window)
    assert (verdict.kind, verdict.module, verdict.operation) == ("overflow_forward", "lin", "mm")


def test_divergence(make_state):
    """A learning rate of 1e30: after one step FP32 overflows as well."""
    for mode in ({}, FP16, BF16):
        torch.manual_seed(0)
        state = make_state(mlp(), **{**mode, **SGD, **S1, "optimizer.lr": 1e30})
        window = labels(torch.randn(4, 4))
        assert train_step(state, window).read().applied
        verdict = verdict_of(state, window)
        assert verdict.kind == "divergence"
        assert "divergence, not precision: FP32 overflows too" in verdict.message
        assert "lower the learning rate" in verdict.message


def test_divergence_before_fp32_overflows(make_state):
    torch.manual_seed(0)
    state = make_state(mlp(), **{**FP16, **SGD, **S1, "optimizer.lr": 1e4})
    window = labels(torch.randn(4, 4))
    first = train_step(state, window).read()
    verdict = verdict_of(state, window, first_loss=first.loss)
    assert verdict.kind == "divergence"
    assert verdict.message.startswith("divergence, not precision: the loss is ")
    assert f"{first.loss:.3g} at the first step" in verdict.message


def test_bad_parameters_and_undefined_operations(make_state):
    state = make_state(mlp(), **FP16, **SGD)
    with torch.no_grad():
        state.model[2].weight[0, 0] = math.nan
    verdict = verdict_of(state, labels(torch.randn(4, 4)))
    assert "the parameter 2.weight is already NaN or inf" in verdict.message

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu().log()

    verdict = verdict_of(make_state(nn.Sequential(nn.Linear(4, 2), Log()), **FP16, **SGD), labels(torch.randn(8, 4)))
    assert verdict.kind == "divergence"
    assert (
        "not precision, FP32 breaks too: 1 (Log) log of the forward pass makes -inf of finite numbers"
        in verdict.message
    )

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dead = torch.zeros_like(x, dtype=torch.bool)
            dead[3] = True
            return x.masked_fill(dead, -math.inf).softmax(-1)

    verdict = verdict_of(make_state(nn.Sequential(nn.Linear(4, 2), Whole()), **FP16, **SGD), labels(torch.randn(8, 4)))
    assert verdict.sample_ids == (3,)
    assert "1 (Whole) softmax makes NaN of the inf from 1 (Whole) masked_fill in sample 3" in verdict.message


def test_a_later_state_is_said(make_state):
    state = make_state(nn.Sequential(Attention(100.0), nn.Linear(4, 2)), **FP16, **SGD, **S1)
    verdict = verdict_of(state, labels(torch.ones(2, 3, 4)), moved=7)
    assert verdict.message.endswith("(with the weights of 7 steps later)")
    assert Task.classification  # the default task


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_in_half_is_blamed_for_its_eps_and_the_cure_works(make_state, fused):
    """Adam's second moment and its eps are 0 in FP16: 0/0 at any learning rate, and FP32 finds NaN in the weights."""
    base = {
        **PURE,
        "optimizer.name": "adam",
        "optimizer.fused": fused,
        "optimizer.lr": 1e-4,
        "precision.loss_scale.init": 1.0,
    }
    window = [batch(torch.full((4, 3), 1e-3), torch.zeros(4, dtype=torch.int64))]

    def run(**keys: Any) -> tuple[Any, bool]:
        torch.manual_seed(0)
        state = make_state(nn.Linear(3, 2), **{**base, **keys})
        return state, all(train_step(state, window).read().applied for _ in range(3))

    state, fine = run()
    if not fine:
        found = examine(state, window, loss_scale=1.0)
        assert (found.kind, "learning rate" in found.message) == ("divergence", False)
        assert "of an optimizer in FP16, where its eps=1e-08 is 0: the parameter " in found.message
        assert found.message.endswith("keep FP32 weights (precision.mode=master), or set optimizer.eps=0.0001")
    assert fine == fused
    assert run(**{"optimizer.eps": 1e-4})[1]
    assert run(**{"precision.mode": "master"})[1]
