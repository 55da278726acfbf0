"""Every optimizer name of torch and timm: it trains, a skip leaves every byte, a resume is exact; or it is refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.optim import get_optimizer_info, list_optimizers
from torch import Tensor, nn

from mprun.errors import ConfigError
from mprun.training import checkpoint
from mprun.training.build import switches
from mprun.training.optim import REFUSED, build_optimizer, find_optimizer, torch_optimizers
from mprun.training.result import APPLIED, OVERFLOW
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import train_step
from tests.conftest import CPU, FP16, batch, make_config

MASTER = {**FP16, "precision.mode": "master", "precision.param_dtype": "float16"}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "fp16_dynamic": FP16, "fp16_master_dynamic": MASTER}
NAMES = sorted({*torch_optimizers(), *list_optimizers()})
# Not timm's own code, and torch's muon takes a model without biases only.
ELSEWHERE = {name for name in list_optimizers() if isinstance(get_optimizer_info(name).opt_class, str)}
TRAINABLE = [name for name in NAMES if name not in {*REFUSED, *ELSEWHERE, "muon"}]
# The first step of ADOPT only starts its second moment.
SLOW_START = {name for name in TRAINABLE if "adopt" in name}


class Gate(nn.Module):
    """Multiplies the gradient by 1e6 while ``on``: infinite in FP16."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            x.register_hook(lambda grad: grad * 1e6)
        return x


def build(name: str, precision: str, **keys: Any) -> tuple[TrainState, Gate]:
    """A convolution, a norm and a matrix with bias, 9 to 16 numbers each."""
    given = {"optimizer.name": name, "optimizer.lr": 1e-2, "train.clip_norm": 1.0, **PRECISIONS[precision], **keys}
    if precision != "fp32":
        given["precision.loss_scale.init"] = 4096.0
    config = make_config(**given)
    torch.manual_seed(0)
    gate = Gate()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), gate, nn.Linear(8, 4))
    return build_state(config, model, build_schedule(config.schedule, 100), CPU), gate


def take(state: TrainState, gate: Gate, number: int, *, overflow: bool = False) -> int:
    generator = torch.Generator().manual_seed(number)
    gate.on = overflow
    images = torch.randn(4, 1, 4, 4, generator=generator)
    return train_step(state, [batch(images, torch.arange(4))]).read().outcome


def flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in nested containers; functions and hooks are no state."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}/{key if isinstance(key, str | int) else type(key).__name__}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from flat(item, f"{path}/{i}")
    elif isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, random.Random):
        yield path, value.getstate()
    elif not callable(value):
        yield path, value


def everything(state: TrainState) -> dict[str, Any]:
    """Model, masters, and all that the optimizer keeps, in ``state``, in its groups and in itself."""
    optimizer = state.optimizer
    # Set for a step: the finite flag, the divisor, and whether a first fused step has looked at the devices.
    passing = {"state", "param_groups", "found_inf", "grad_scale", "_need_device_dtype_check_for_fused"}
    own = {key: value for key, value in vars(optimizer).items() if key not in passing and "hook" not in key}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    parts = {
        "model": dict(state.model.state_dict()),
        "masters": state.weights.by_name,
        "state": checkpoint.optimizer_state(state),
        "groups": groups,
        "own": own,
    }
    return dict(flat(parts, ""))


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    missing = before.keys() ^ after.keys()
    return sorted([*missing, *(key for key in before.keys() & after.keys() if not same(before[key], after[key]))])


@pytest.mark.parametrize("name", sorted({*REFUSED, *ELSEWHERE, "muon", "lookahead_adam", "adamww", "SparseAdam"}))
def test_the_other_names_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=f"optimizer.name={name}") as caught:
        build(name, "fp32")
    assert len(str(caught.value).splitlines()) == 1


def test_names_are_known_in_any_case_and_a_refusal_says_what_else():
    assert find_optimizer("AdamW") == (torch.optim.AdamW, {})
    with pytest.raises(ConfigError, match="nmuon"):
        build("muon", "fp32")
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        build("adamww", "fp32")
    with pytest.raises(ConfigError, match=r"optimizer\.name=adam, and train\.ema\.decay"):
        build("lookahead_adam", "fp32")


@pytest.mark.parametrize(
    ("name", "plain"), [("cadamw", "adamwlegacy"), ("lionc", "lion"), ("nesterov", "momentum"), ("lambw", "lamb")]
)
def test_what_a_name_of_timm_adds_to_its_class_is_in_force(name, plain):
    """``cadamw`` without its caution would be AdamW under another name."""
    keys = {"optimizer.weight_decay": 0.1, "schedule.name": "constant", "schedule.warmup_steps": 5}
    (state, gate), (other, other_gate) = build(name, "fp32", **keys), build(plain, "fp32", **keys)
    implied = find_optimizer(name)[1]
    assert all(state.optimizer.param_groups[0][key] == value for key, value in implied.items())
    for number in range(4):
        take(state, gate, number)
        take(other, other_gate, number)
    assert not torch.equal(state.params[0], other.params[0])


def test_timm_names_have_timms_momentum_and_the_configuration_wins():
    assert build("nesterov", "fp32")[0].optimizer.param_groups[0]["momentum"] == 0.9
    assert build("nesterov", "fp32", **{"optimizer.momentum": 0.5})[0].optimizer.param_groups[0]["momentum"] == 0.5
    assert build("sgd", "fp32")[0].optimizer.param_groups[0]["momentum"] == 0, "torch's own default"
    changed_by_hand = build("cadamw", "fp32", **{"optimizer.kwargs": {"caution": False}})[0]
    assert changed_by_hand.optimizer.param_groups[0]["caution"] is False


def test_state_of_every_optimizer_is_float32_unless_asked_for():
    state, gate = build("adafactorbv", "fp32")
    take(state, gate, 0)
    kept = checkpoint.optimizer_state(state)["0.weight"]
    assert {v.dtype for v in kept.values() if isinstance(v, Tensor) and v.ndim} == {torch.float32}
    state, gate = build("adafactorbv", "fp32", **{"optimizer.kwargs": {"momentum_dtype": "bfloat16"}})
    take(state, gate, 0)
    assert checkpoint.optimizer_state(state)["0.weight"]["exp_avg"].dtype == torch.bfloat16


def test_what_follows_from_arguments_follows_the_configuration_at_resume(tmp_path):
    """``lionc`` decays with lr²/max_lr: a new rate at resume is the new maximum."""
    state, gate = build("lionc", "fp32", **{"optimizer.weight_decay": 0.1})
    take(state, gate, 0)
    checkpoint.save(checkpoint.snapshot(state), tmp_path / "last.pt")
    again, _ = build("lionc", "fp32", **{"optimizer.weight_decay": 0.1, "optimizer.lr": 3e-3})
    checkpoint.restore(again, checkpoint.load(tmp_path / "last.pt"), path=tmp_path / "last.pt")
    assert again.optimizer.param_groups[0]["max_lr_snapshot"] == 3e-3


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"kwargs": {"amsgrad": "banana"}}, r"optimizer\.kwargs\.amsgrad=banana is not legal: .*true or false"),
    ("adamw", {"kwargs": {"amsgrad": 1}}, r"optimizer\.kwargs\.amsgrad=1 is not legal"),
    ("adamw", {"kwargs": {"amsgrad": None}}, r"optimizer\.kwargs\.amsgrad=None is not legal"),
    ("adamw", {"kwargs": {"foreach": "yes"}}, r"optimizer\.kwargs\.foreach=yes"),
    ("adamw", {"kwargs": {"differentiable": True}}, r"optimizer\.kwargs\.differentiable=True is for gradients through"),
    ("adamw", {"kwargs": {"capturable": True}}, r"optimizer\.kwargs\.capturable=True is for steps inside a CUDA graph"),
    ("adamw", {"kwargs": {"foreach": True}, "fused": True}, r"optimizer\.fused=true: .*foreach"),
    ("adamw", {"kwargs": {"fused": True}}, r"set optimizer\.fused instead"),
    ("adamw", {"kwargs": {"eps": 1e-9}}, r"set optimizer\.eps instead"),
    ("adamw", {"kwargs": {"lr": 1.0}}, r"set optimizer\.lr instead"),
    ("adamw", {"kwargs": {"amsgard": True}}, r"optimizer\.kwargs\.amsgard .*did you mean 'amsgrad'"),
    ("adamw", {"betas": [0.9, 0.99, 0.999]}, r"optimizer\.betas=.* a list of 2 numbers"),
    ("adan", {"betas": [0.9, 0.99]}, r"optimizer\.betas=.* a list of 3 numbers"),
    ("adamw", {"momentum": 0.9}, r"optimizer\.momentum=0\.9: adamw takes no 'momentum'; .*optimizer\.momentum=null"),
    ("lion", {"eps": 1e-8}, r"optimizer\.eps=1e-08: lion takes no 'eps'; leave it out with optimizer\.eps=null"),
    ("adafactor", {"eps": 1e-8}, r"optimizer\.eps=1e-08 is not legal: eps is a list of 2 numbers"),
    ("rprop", {"weight_decay": 0.1}, r"optimizer\.weight_decay=0\.1: rprop takes none"),
    ("sgd", {"kwargs": {"nesterov": True}}, r"Nesterov momentum requires a momentum"),
    ("sgd", {"kwargs": {"dampening": "much"}}, r"optimizer\.kwargs\.dampening=much is not legal: .*finite number"),
    ("sgd", {"kwargs": {"dampening": float("nan")}}, r"optimizer\.kwargs\.dampening=nan is not legal"),
    ("rmsprop", {"kwargs": {"alpha": 2.0}}, r"finite gradients make the weights NaN or inf"),
    ("rmsprop", {"kwargs": {"alpha": -1.0}}, r"refused its arguments .*alpha"),
    ("nmuon", {"kwargs": {"algo": "banana"}}, r"refused its arguments .*banana"),
    ("nmuon", {"kwargs": {"ns_steps": 2.5}}, r"optimizer\.kwargs\.ns_steps=2\.5 is not legal: .*whole number"),
    ("mars", {"kwargs": {"mars_type": "banana"}}, r"refused its arguments .*banana"),
    ("adafactorbv", {"kwargs": {"momentum_dtype": "float17"}}, r"momentum_dtype=float17 is not legal: .*dtype"),
    ("kron", {"fused": True}, r"optimizer\.fused=true: kron has no fused kernel"),
]


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
@pytest.mark.parametrize(("name", "keys", "said"), WRONG, ids=[f"{name} {keys}" for name, keys, _ in WRONG])
def test_a_wrong_argument_is_refused_before_the_first_step(name, keys, said):
    config = make_config(**{"optimizer.name": name, **{f"optimizer.{key}": value for key, value in keys.items()}})
    with pytest.raises(ConfigError, match=said):
        build_optimizer(config.optimizer, [("w", nn.Parameter(torch.ones(2, 2)))], CPU)


def test_arguments_of_the_right_kind_arrive():
    keys = {"optimizer.kwargs": {"eps": [None, 1e-2], "foreach": False, "d": 2}, "optimizer.name": "adafactor"}
    group = build_optimizer(make_config(**keys).optimizer, [("w", nn.Parameter(torch.ones(2, 2)))], CPU).param_groups[0]
    assert (group["eps"], group["foreach"], group["d"]) == ((None, 1e-2), False, 2)
    keys = {"optimizer.name": "adamw", "optimizer.kwargs": {"amsgrad": True, "maximize": True}}
    state, gate = build("adamw", "fp32", **keys)
    assert take(state, gate, 0) == APPLIED
    assert "max_exp_avg_sq" in state.optimizer.state[state.params[0]]


def test_trying_out_draws_nothing_from_the_generators():
    before = torch.get_rng_state(), random.getstate()
    for name in ("adamw", "nmuon", "adopt"):
        build_optimizer(make_config(**{"optimizer.name": name}).optimizer, [("w", nn.Parameter(torch.ones(2, 2)))], CPU)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """A precision, inside its switches; entered once for all names, because entering takes longer than a run."""
    with switches(make_config(**PRECISIONS[request.param]), CPU):
        yield request.param


@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")  # timm's kron
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of what compiles kron
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "kron" in name else []) for name in TRAINABLE]
)
def test_every_name_trains_skips_without_a_trace_and_resumes_exactly(name, precision, tmp_path):
    state, gate = build(name, precision)
    bad = (0, 3) if precision != "fp32" else ()
    weights, ever = {"/model/0.weight", "/model/1.weight", "/model/5.weight", "/model/5.bias"}, set()
    for number in range(6):
        before = everything(state)
        outcome = take(state, gate, number, overflow=number in bad)
        moved = set(changed(before, everything(state)))
        if number in bad:
            assert (outcome, moved) == (OVERFLOW, set())
        else:
            assert outcome == APPLIED
            # Cautious optimizers and Rprop hold single weights back for a step.
            assert moved & weights or (name in SLOW_START and not ever)
            ever |= {*moved, "something"}
        if number == 4:
            checkpoint.save(checkpoint.snapshot(state), tmp_path / "last.pt")
    assert weights <= ever
    assert all(bool(p.isfinite().all()) for p in state.params)
    again, gate = build(name, precision)
    checkpoint.restore(again, checkpoint.load(tmp_path / "last.pt"), path=tmp_path / "last.pt")
    assert take(again, gate, 5) == APPLIED
    assert changed(everything(state), everything(again)) == []
