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


def test_explain_names_a_container_whose_own_operation_overflows(make_state):
    from mprun.training.blame import explain
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
    text = explain(state, [batch(torch.full((4, 4), 200.0), torch.zeros(4, dtype=torch.long))])
    assert "0 (Scores)" in text
    assert torch.equal(random, torch.get_rng_state())
