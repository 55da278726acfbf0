"""``modules.json`` says what was seen, and a difference between plan and reality stops the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mprun.errors import PrecisionError
from mprun.training.observe import check_plan, observe
from tests.conftest import BF16, FP16
from tests.test_casting import MASTER, PURE, Net, net_batch


def table(state):
    rows = observe(state, net_batch())
    check_plan(state, rows)
    return {row["module"]: row for row in rows}


@pytest.mark.parametrize(("mode", "half", "norm"), [
    ({}, "float32", "float32"), (FP16, "float16", "float32"), (BF16, "bfloat16", "float32"), (MASTER, "float16", "float32"),
    (PURE, "float16", "float16"),
], ids=["fp32", "fp16", "bf16", "master", "pure"])  # fmt: skip
def test_table_shows_dtypes_really_seen(make_state, mode, half, norm):
    rows = table(make_state(Net(), **mode))
    assert rows["first"]["compute_dtype"] == rows["first"]["output_dtype"] == half
    assert rows["first"]["param_dtype"] == ("float32" if mode in ({}, FP16, BF16) else half)
    assert rows["norm"]["compute_dtype"] == rows["bn"]["compute_dtype"] == norm
    assert rows["norm"]["class"] == "MyNorm"


def test_table_names_the_rule_that_won_and_nothing_moves(make_state):
    state = make_state(Net(), **FP16, **{"precision.fp32_modules": ["pair", "class:LayerNorm"]})
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    random = torch.get_rng_state()
    rows = table(state)
    assert (rows["pair"]["rule"], rows["pair.inner"]["rule"], rows["norm"]["rule"]) == (
        "pair",
        "pair",
        "class:LayerNorm",
    )
    assert rows["pair.inner"]["compute_dtype"] == rows["pair.inner"]["output_dtype"] == "float32"
    assert rows["head"]["rule"] == "mode:autocast"
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in state.model.state_dict().items())


class Stubborn(nn.Module):
    """A module that does not compute in what it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed, self.linear, self.dtype = nn.Embedding(10, 8), nn.Linear(8, 3), dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).mean(1)
        if self.dtype == torch.float32:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())
        with torch.autocast("cpu", self.dtype):
            return self.linear(x)


def test_a_model_that_leaves_the_policy_is_stopped(make_state):
    with pytest.raises(
        PrecisionError, match=r"linear \(Linear\) computes in float32, .*float16.*fp32_modules=\[linear\]"
    ):
        table(make_state(Stubborn(torch.float32), **FP16))
    assert table(make_state(Stubborn(torch.float32), **FP16, **{"precision.fp32_modules": ["linear"]}))
    with pytest.raises(PrecisionError, match="computes in bfloat16"):
        table(make_state(Stubborn(torch.bfloat16)))
    with pytest.raises(PrecisionError, match="computes in bfloat16"):
        table(make_state(Stubborn(torch.bfloat16), **FP16))


def test_a_rule_for_a_module_that_is_never_called_is_refused(make_state):
    """MultiheadAttention uses out_proj's weights without calling it."""
    from mprun.errors import OverrideError

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn, self.head = (
                nn.Embedding(10, 8),
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.Linear(8, 3),
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.head(self.attn(x, x, x)[0].mean(1))

    with pytest.raises(OverrideError, match=r"attn.out_proj.*never called"):
        table(make_state(Attention(), **FP16, **{"precision.fp32_modules": ["**.out_proj"]}))
    assert (
        table(make_state(Attention(), **FP16, **{"precision.fp32_modules": ["attn"]}))["attn"]["output_dtype"]
        == "float32"
    )


def test_a_post_mortem_names_a_container_whose_own_operation_overflows(make_state):
    from mprun.training.postmortem import examine
    from tests.conftest import batch

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            return self.out((q @ q.T) @ q)

    state = make_state(nn.Sequential(Scores()), **FP16)
    with torch.no_grad():
        state.model[0].q.weight.copy_(torch.eye(4))
    random = torch.get_rng_state()
    window = [batch(torch.full((4, 4), 200.0), torch.zeros(4, dtype=torch.long))]
    text = examine(state, window, loss_scale=65536.0).message
    assert "0 (Scores) mm reaches 1.6e+05" in text
    assert torch.equal(random, torch.get_rng_state())


def test_an_overflow_is_explained_at_the_scale_of_its_step(make_state):
    """S = 2^14 overflows in the weight's gradient, 1.5 * 3 * 2^14 = 73728; by the time somebody asks, S is 2^13."""
    from mprun.training.postmortem import examine
    from mprun.training.step import train_step
    from tests.conftest import REGRESSION, SGD, toy, toy_batch

    keys = {**FP16, **SGD, **REGRESSION, "precision.loss_scale.init": 2.0**14}
    state, window = make_state(toy(1.0), **keys), [toy_batch(0.0, 1.5)]
    row = train_step(state, window).read()
    assert (row.applied, row.loss_scale, state.scale.scale.item()) == (False, 2.0**14, 2.0**13)
    assert "stays finite" in examine(state, window, loss_scale=2.0**13).message
    assert "the gradients overflow at loss scale 16384" in examine(state, window, loss_scale=row.loss_scale).message
    assert state.scale.scale.item() == 2.0**13
    # Of four micro-batches each has a quarter of the loss, which is in range.
    assert "stays finite" in examine(state, window * 4, loss_scale=row.loss_scale).message


def test_an_explanation_leaves_no_gradient_behind(make_state):
    """In master mode the half gradients are not the optimizer's; what stays of them would go into the next step."""
    from mprun.training.postmortem import examine
    from mprun.training.step import train_step
    from tests.conftest import REGRESSION, SGD, toy, toy_batch

    keys = {**MASTER, **SGD, **REGRESSION, "precision.loss_scale.init": 2.0**10}
    state, other = make_state(toy(1.0), **keys), make_state(toy(1.0), **keys)
    examine(state, [toy_batch(0.0, 1.5)], loss_scale=2.0**20)
    assert all(p.grad is None for p in state.model.parameters())
    for each in (state, other):
        train_step(each, [toy_batch(0.0, 1.0)])
    assert torch.equal(dict(state.weights)["weight"], dict(other.weights)["weight"])
