"""The operation that made the first non-finite number which arrives at the end, its module and direction; and how far modules reach."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.numerics.faults import Fault, inject
from mprun.numerics.places import INPUT, LOSS
from mprun.numerics.trace import trace
from tests.conftest import BF16, FP16, SGD, batch
from tests.test_casting import MASTER, PURE

HALF = torch.float16


def run(model, x, *, loss=lambda y: y.float().square().mean(), scale=1.0, **options):
    """Forward, loss and backward inside a trace."""
    model.zero_grad(set_to_none=True)
    with trace(model, **options) as seen:
        value = loss(model(x))
        seen.end(value)
        (value * scale).backward()
    return seen


def blame(seen):
    assert seen.first is not None
    return seen.first.module, seen.first.operation, seen.first.where


class Block(nn.Module):
    """Residual, two Linears, and operations of its own."""

    def __init__(self, dim: int = 4, factor: float = 1.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.factor = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False), factor

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        return x + self.fc2(self.fc1(x).relu())


def stack(*factors: float, dim: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dim, factor) for factor in factors))


def big(linear: nn.Linear, value: float) -> None:
    nn.init.constant_(linear.weight, value)


# --- forward ----------------------------------------------------------------------------------------------------------


def test_names_the_linear_whose_product_overflows():
    model = stack(1, 1, 1).to(HALF)
    big(model[1].fc2, 3e4)
    big(model[1].fc1, 100.0)
    seen = run(model, torch.ones(3, 4, dtype=HALF))
    assert blame(seen) == ("1.fc2", "mm", "forward")
    assert (seen.first.cls, seen.first.dtype, seen.first.value) == ("Linear", "float16", math.inf)
    assert (seen.first.shape, seen.first.index, seen.first.rows) == ((3, 4), (0, 0), (0, 1, 2))


def test_names_the_container_for_its_own_operations():
    assert blame(run(stack(1, 1e5).to(HALF), torch.ones(3, 4, dtype=HALF))) == ("1", "mul", "forward")


def test_rows_say_which_samples():
    x = torch.ones(6, 4)
    x[[2, 5]] = 3e38
    seen = run(stack(1, 9.0), x)
    assert blame(seen)[:2] == ("1", "mul") or seen.first.module.startswith("0")
    assert set(seen.first.rows) == {2, 5}
    assert seen.first.index[0] == 2


def test_a_healthy_pass_has_no_culprit_and_its_peaks_are_the_true_ones():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    big(model[0], 2.0)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    seen = run(model, x, loss=lambda y: y.sum() * 8)
    assert seen.first is None
    assert not seen.events
    assert (seen.peaks["0", "forward"].amax, seen.peaks["0", "forward"].operation) == (20.0, "mm")
    assert seen.peaks["0", "backward"].amax == 32.0  # the weight's gradient: 8 * 4
    assert seen.reach["1", "forward", "relu", 0] == 20.0
    assert seen.peaks[LOSS, "forward"].amax == 160.0 * 4


@pytest.mark.parametrize("module", ["0", "0.fc1", "1", "1.fc2", "2.fc1", "2", ""])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_fault_on_purpose_is_found_where_it_is(module, value, where):
    model = stack(1, 1, 1)
    with inject(model, Fault(module, 1, where=where, value=value)) as injector:
        seen = run(model, torch.randn(3, 4))
    assert injector.strikes
    path, operation, direction = blame(seen)
    assert operation == "add"  # the fault's own
    assert direction == where
    if where == "forward":
        assert path == module
    # The gradient of an output is spoiled before the module's own backward, in that of what follows: or the module's, by engine.
    else:
        assert path in (module, *FOLLOWS[module])


FOLLOWS = {"0": ["1"], "0.fc1": ["0"], "1": ["2"], "1.fc2": ["1"], "2.fc1": ["2"], "2": [LOSS], "": ["2", LOSS]}


def test_parallel_branches_and_a_module_that_is_called_twice():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return (q @ k.transpose(1, 2)).softmax(-1) @ v

    model = nn.Sequential(Attention()).to(HALF)
    big(model[0].v, 6e4)
    assert blame(run(model, torch.ones(2, 3, 4, dtype=HALF))) == ("0.v", "mm", "forward")
    big(model[0].v, 1.0)
    big(model[0].q, 300.0)
    big(model[0].k, 300.0)
    assert blame(run(model, torch.ones(2, 3, 4, dtype=HALF))) == ("0", "bmm", "forward")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    twice = Twice().to(HALF)
    big(twice.a, 200.0)
    big(twice.b, 1.0)
    seen = run(twice, torch.ones(2, 4, dtype=HALF))
    assert blame(seen) == ("a", "mm", "forward")
    assert [event.number for event in seen.events] == [0]


def test_the_loss_and_the_input_are_no_modules():
    seen = run(stack(1), torch.ones(3, 4), loss=lambda y: (y - y).log().sum() * 1.0)
    assert blame(seen) == (LOSS, "log", "forward")
    assert seen.first.cls == ""
    model = stack(1).to(HALF)
    with trace(model) as seen:
        model(torch.full((3, 4), 1e5).to(HALF)).float().sum().backward()
    assert blame(seen) == (INPUT, "cast", "forward")
    assert seen.first.amax == 1e5


# --- backward ---------------------------------------------------------------------------------------------------------


def test_backward_overflow_is_that_of_the_module_whose_node_ran():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    for linear, weight in zip(model, (1.0, 1e-3, 1e3), strict=True):
        big(linear, weight)
    model.to(HALF)
    seen = run(model, torch.full((2, 4), 1e-2, dtype=HALF), loss=lambda y: y.float().sum(), scale=100.0)
    assert blame(seen) == ("2", "mm", "backward")
    assert seen.first.amax == 1e3


def test_sqrt_at_zero_and_the_where_trap():
    class Trap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, x.sqrt(), torch.zeros_like(x))

    model = nn.Sequential(nn.Linear(4, 4), Trap())
    big(model[0], 0.0)
    nn.init.zeros_(model[0].bias)
    seen = run(model, torch.ones(2, 4))
    assert blame(seen)[0::2] == ("1", "backward")
    # A ReLU in front drops the NaN: it reaches no gradient.
    seen = run(nn.Sequential(model[0], nn.ReLU(), model[1]), torch.ones(2, 4))
    assert seen.events
    assert seen.first is None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x.square() / 0.0


def test_custom_function():
    class Cubed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Cubed(), nn.Linear(4, 4))
    assert blame(run(model, torch.randn(2, 4))) == ("1", "div", "backward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    class Again(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Again(Block()), Again(Block()), nn.Linear(4, 1))
    plain = nn.Sequential(model[0], model[1].block, model[2].block, model[3])
    torch.manual_seed(1)
    x = torch.randn(2, 4)
    healthy, reference = run(model, x), run(plain, x)
    assert healthy.first is None
    for path, at in (("1.fc1", "1.block.fc1"), ("2.fc2", "2.block.fc2"), ("3", "3"), ("0", "0")):
        for where in ("forward", "backward"):
            assert healthy.peaks[at, where] == reference.peaks[path, where], (path, where)
    with inject(model, Fault("1.block.fc1", 1, where="backward")):
        seen = run(model, x)
    assert blame(seen)[0] in ("1.block.fc1", "1.block")
    assert blame(seen)[2] == "backward"
    big(model[1].block.fc1, 1.0)
    big(model[1].block.fc2, 3e38)
    big(model[0], 1.0)
    assert blame(run(model, torch.ones(2, 4))) == ("1.block.fc2", "mm", "forward")


# --- what is harmless -------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Causal attention with a mask of -inf, then a Linear."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("bias", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        future = torch.ones(3, 3, dtype=torch.bool).triu(1)
        if self.how == "masked_fill":
            scores = scores.masked_fill(future, -math.inf)
        elif self.how == "buffer":
            scores = scores + self.bias.to(scores.dtype)
        elif self.how == "made":
            scores = scores + torch.full((3, 3), -math.inf, dtype=x.dtype).triu(1)
        elif self.how == "where":
            scores = torch.where(future, -math.inf, scores)
        elif self.how == "log":
            scores = scores + (~future).to(scores.dtype).log()
        elif self.how == "in_place":
            scores[:, future] = -math.inf
        elif self.how == "sdpa":
            return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype)))
        return self.out(scores.softmax(-1) @ v)


@pytest.mark.parametrize("how", ["masked_fill", "buffer", "made", "where", "log", "in_place", "sdpa"])
def test_a_mask_is_harmless_and_what_overflows_later_is_named(how):
    torch.manual_seed(0)
    model = nn.Sequential(Masked(how), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)).to(HALF)
    x = torch.randn(2, 3, 4, dtype=HALF)
    assert run(model, x).first is None
    big(model[1], 6e4)
    big(model[0].out, 1.0)
    big(model[0].qkv, 1.0)
    seen = run(model, x.abs() + 1)
    assert blame(seen) == ("1", "mm", "forward")


@pytest.mark.parametrize("how", ["masked_fill", "buffer", "where", "in_place"])
def test_scores_that_overflow_behind_a_mask_are_named(how):
    model = nn.Sequential(Masked(how)).to(HALF)
    big(model[0].qkv, 1.0)
    x = torch.full((1, 3, 4), 100.0, dtype=HALF)  # q = k = 400, q @ k = 640000
    assert blame(run(model, x)) == ("0", "bmm", "forward")


def test_an_overflow_that_a_mask_covers_is_forgotten():
    class Covered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y.masked_fill(y.isinf(), 1.0))

    model = Covered().to(HALF)
    big(model.a, 3e4)
    big(model.b, 1.0)
    x = torch.ones(2, 4, dtype=HALF)
    assert run(model, x).first is None
    big(model.b, 6e4)
    assert blame(run(model, x)) == ("b", "mm", "forward")


def test_a_row_that_is_masked_as_a_whole():
    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.tensor([True, False])[:, None], -math.inf).softmax(-1)

    seen = run(nn.Sequential(nn.Linear(4, 4), Whole()), torch.randn(2, 4))
    assert blame(seen) == ("1", "softmax", "forward")
    assert (seen.first.cause.operation, seen.first.cause.kind) == ("masked_fill", "written")
    assert seen.first.rows == (0,)


def test_topk_sort_and_uninitialised_memory():
    class Filler(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = torch.full_like(x, -math.inf).scatter(1, x.topk(2).indices, x.topk(2).values)
            memory = torch.empty(x.shape)
            memory.fill_(math.nan)
            out = memory.new_empty(x.shape)
            out.copy_(kept.softmax(-1))
            return out.sort(-1).values + torch.zeros_like(x)

    model = nn.Sequential(nn.Linear(4, 4), Filler(), nn.Linear(4, 4, bias=False))
    x = torch.randn(2, 4)
    assert run(model, x).first is None
    model[0].weight.data.fill_(3e38)
    assert blame(run(model, x.abs()))[0] == "0"


# --- what was there before --------------------------------------------------------------------------------------------


def test_bad_parameters_inputs_and_buffers_are_given():
    model = stack(1, 1)
    x = torch.randn(3, 4)
    x[1, 2] = math.nan
    first = run(model, x, given={"the input": x}).first
    assert (first.kind, first.source, first.index, first.rows) == ("given", "the input", (1, 2), (1,))
    x[1, 2] = math.inf
    first = run(model, x, given={"the input": x}).first
    assert "the input" in (first.source, first.cause and first.cause.source)
    with torch.no_grad():
        model[1].fc1.weight[0, 0] = math.inf
    first = run(model, torch.randn(3, 4)).first
    assert (first.kind, first.source) == ("given", "parameter 1.fc1.weight")


@pytest.mark.parametrize("before", [0.0, math.nan], ids=["finite", "poisoned"])
@pytest.mark.parametrize(
    "norm",
    [lambda: nn.BatchNorm1d(4), lambda: nn.InstanceNorm1d(4, track_running_stats=True)],
    ids=["batch", "instance"],
)
def test_running_statistics_in_training_are_not_to_blame(norm, before):
    """The pass itself makes them NaN, or an earlier one has: what it makes of its input does not depend on them."""
    model = nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), norm(), nn.Flatten(), nn.Linear(20, 2))
    model[1].running_mean.fill_(before)
    if math.isnan(before):
        assert run(model, torch.randn(3, 2, 5)).first is None
        model[1].running_mean.fill_(before)
    nn.init.constant_(model[0].weight, -3e38)
    seen = run(model, torch.ones(3, 2, 5))
    assert (*blame(seen), seen.first.kind, seen.first.value) == ("0", "convolution", "forward", "made", -math.inf)
    assert model[1].running_var.isnan().all()


def test_running_statistics_in_evaluation_are_given():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_var[1] = math.nan
    first = run(model, torch.randn(3, 2)).first
    assert (first.kind, first.source, first.index) == ("given", "buffer 1.running_var", (1,))


# --- under mprun's policies -------------------------------------------------------------------------------------------


def window_of(x, classes=2):
    return [batch(x, torch.arange(len(x)) % classes)]


class Norm(nn.Module):
    """Written by hand: squares overflow in FP16 from 256 on."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x * x).mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("mode", [FP16, MASTER, PURE], ids=["autocast", "master", "pure"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_every_mode(make_state, mode, checkpointing):
    from mprun.training.step import accumulate

    torch.manual_seed(0)
    body = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    model = nn.Sequential(body, nn.Linear(4, 2))
    big(body[1][0], 4e4)
    big(body[0][0], 1.0)
    state = make_state(model, **mode, **SGD, **{"model.activation_checkpointing": checkpointing})
    with trace(state.model) as seen:
        sums = accumulate(state, window_of(torch.ones(4, 4)))
        seen.end(sums.loss, *(p.grad for p in state.params))
    assert blame(seen) == ("0.1.0", "addmm", "forward")
    assert seen.first.dtype == "float16"


def test_casts_belong_to_the_module_that_casts(make_state):
    """A module after an FP32 module casts its input to half; that is where 1e5 becomes inf."""
    from mprun.training.step import accumulate

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    big(model[0], 2.5e4)
    for mode in (FP16, MASTER):
        state = make_state(nn.Sequential(*model), **mode, **{"precision.fp32_modules": ["0"]})
        with trace(state.model) as seen:
            seen.end(accumulate(state, window_of(torch.ones(4, 4))).loss)
        assert blame(seen)[1:] == ("cast", "forward")
        assert blame(seen)[0] == ("1" if mode is FP16 else "0")
        assert seen.first.amax == 1e5
        break


def test_hand_written_norm_and_fp32_rule(make_state):
    from mprun.training.step import accumulate

    for rules, expected in (([], ("1", "mul", "forward")), (["1"], None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), Norm(4), nn.Linear(4, 2))
        big(model[0], 75.0)
        state = make_state(model, **FP16, **{"precision.fp32_modules": rules, "precision.loss_scale.init": 1.0})
        with trace(state.model) as seen:
            seen.end(accumulate(state, window_of(torch.ones(4, 4))).loss)
        if expected is None:
            assert seen.first is None
        else:
            assert seen.events[0].module == "1"
            assert seen.events[0].operation == "mul"


def test_bfloat16(make_state):
    from mprun.training.step import accumulate

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    big(model[0], 3e38)
    state = make_state(model, **BF16)
    with trace(state.model) as seen:
        seen.end(accumulate(state, window_of(torch.ones(4, 4))).loss)
    assert (*blame(seen), seen.first.dtype) == ("0", "mm", "forward", "bfloat16")


def test_dicts_tuples_and_writes_in_place():
    class Inner(nn.Module):
        def forward(self, given):
            y = given["x"].clone()
            y[:, 0] *= 1e5
            return {"y": (y, given["x"])}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.inner, self.head = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

        def forward(self, x):
            y, x = self.inner({"x": self.lin(x)})["y"]
            return self.head(y) + x

    model = Outer().to(HALF)
    seen = run(model, torch.ones(3, 4, dtype=HALF) * 10)
    assert blame(seen) == ("inner", "mul", "forward")


def test_nothing_is_left_behind_and_numbers_are_the_same():
    x = torch.randn(3, 4)
    grads = []
    for watched in (False, True):
        model = nn.Sequential(stack(1, 2), nn.Dropout(0.5))
        torch.manual_seed(5)
        if watched:
            run(model, x)
        else:
            model(x).float().square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_hooks_go_when_the_model_raises():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(4, 4), Broken())
    with pytest.raises(ValueError, match="no"), trace(model):
        model(torch.ones(1, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
