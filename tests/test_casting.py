"""FP32 rules and half modes: what is planned is what runs, at every border, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mprun.errors import OverrideError
from mprun.precision.casting import apply_plan
from mprun.precision.overrides import make_plan, matches
from mprun.precision.policy import IN_HALF, PrecisionPolicy, matmul_precision
from mprun.training.step import train_step
from tests.conftest import FP16, REGRESSION, batch, toy, toy_batch

MASTER = {"precision.name": "fp16_master_dynamic", "precision.mode": "master", "precision.param_dtype": "float16",
          "precision.compute_dtype": "float16", "precision.loss_scale.kind": "dynamic", "precision.loss_scale.init": 256.0}  # fmt: skip
PURE = {**MASTER, "precision.name": "fp16_pure", "precision.mode": "pure"}


class MyNorm(nn.LayerNorm):
    """A subclass, as class rules must see."""


class Pair(nn.Module):
    """Returns a dict and a tuple of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.inner(x)
        return {"y": y, "more": (y + 1, torch.arange(3))}


class Net(nn.Module):
    """Embedding, linears, a norm subclass, a shared module, a module with structured output, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.first = nn.Linear(8, 8)
        self.norm = MyNorm(8)
        self.shared = nn.Linear(8, 8)
        self.pair = Pair()
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("offset", torch.full((8,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(ids).mean(1)) + self.offset
        x = self.shared(nn.functional.gelu(self.shared(self.norm(x))))
        x = self.bn(self.pair(x)["y"] + self.pair(x)["more"][0])
        return self.head(nn.functional.gelu(x))


def net_batch():
    generator = torch.Generator().manual_seed(3)
    return batch(torch.randint(10, (16, 4), generator=generator), torch.randint(3, (16,), generator=generator))


def gradients(state, window) -> tuple[float, dict[str, torch.Tensor]]:
    """The unscaled gradients of one window, caught by running the step with lr 0 and a spy on the optimizer."""
    caught: dict[str, torch.Tensor] = {}
    step = state.optimizer.step

    def spy() -> None:
        for name, p in state.weights:
            if p.grad is not None:
                # A fused optimizer divides by the scale itself.
                caught[name] = p.grad / (state.scale.scale if state.fused and state.loss_scale.active else 1)
        step()

    state.optimizer.step = spy
    row = train_step(state, [window]).read()
    return row.loss, caught


@pytest.mark.parametrize("mode", [FP16, MASTER], ids=["autocast", "master"])
@pytest.mark.parametrize(
    "rules",
    [[], ["shared"], ["embed"], ["head"], ["class:LayerNorm"], ["pair"], ["re:(first|pair.inner)"], ["bn"], ["**"]],
)
@pytest.mark.parametrize("frozen_bn", [False, True])
def test_every_border_runs_and_gradients_match_fp32(make_state, mode, rules, frozen_bn):
    def build(**keys):
        model = Net()
        model.bn.train(not frozen_bn)
        return make_state(model, **{"optimizer.lr": 0.0, "optimizer.weight_decay": 0.0, **keys})

    reference_loss, reference = gradients(build(), net_batch())
    loss, found = gradients(build(**mode, **{"precision.fp32_modules": rules}), net_batch())
    assert loss == pytest.approx(reference_loss, rel=1e-2)
    assert found.keys() == reference.keys()
    # A bias in front of BatchNorm has gradient zero: what is left of it is rounding, so small gradients are held against
    # the global norm.
    overall = torch.stack([grad.norm() for grad in reference.values()]).norm()
    for name, grad in found.items():
        assert grad.dtype == torch.float32
        difference = (grad - reference[name]).norm() / reference[name].norm().clamp(min=0.2 * overall)
        # Batch statistics of 16 nearly equal rows amplify the inputs' rounding; with frozen statistics nothing does.
        assert difference < (1e-2 if frozen_bn else 5e-2), name


@pytest.mark.parametrize("mode", [MASTER, PURE], ids=["master", "pure"])
def test_dtypes_of_half_modes(make_state, mode):
    state = make_state(Net(), **mode)
    dtypes = {name: p.dtype for name, p in state.model.named_parameters()}
    norms = torch.float32 if mode is MASTER else torch.float16
    for name, dtype in dtypes.items():
        assert dtype == (norms if name.startswith(("norm.", "bn.")) else torch.float16), name
    buffers = {name: b.dtype for name, b in state.model.named_buffers()}
    assert buffers["offset"] == (torch.float32 if mode is MASTER else torch.float16)
    assert buffers["bn.running_mean"] == norms
    assert buffers["count"] == buffers["bn.num_batches_tracked"] == torch.int64


def test_inside_is_float32_and_outside_is_half_again(make_state):
    seen = {}
    state = make_state(Net(), **MASTER, **{"precision.fp32_modules": ["pair", "head"]})
    for name in ("pair.inner", "first", "head", "norm", "shared"):
        module = state.model.get_submodule(name)
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.__setitem__(name, (m.weight.dtype, out.dtype))
        )
    outputs = []
    state.model.pair.register_forward_hook(
        lambda m, args, out: outputs.append((out["y"].dtype, out["more"][0].dtype, out["more"][1].dtype))
    )
    train_step(state, [net_batch()])
    f32, f16 = torch.float32, torch.float16
    assert seen["pair.inner"] == (f32, f32)
    assert seen["first"] == (f16, f16)
    assert seen["head"][0] == f32
    assert seen["norm"][0] == f32
    assert set(outputs) == {(f16, f16, torch.int64)}


@pytest.mark.parametrize("mode", [FP16, MASTER, PURE], ids=["autocast", "master", "pure"])
def test_hand_written_rms_norm_overflows_in_half_and_a_rule_cures_it(make_state, mode):
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.gain

    def build(rules):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), Rms())
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(4))
        return make_state(model, **REGRESSION, **mode, **{"optimizer.lr": 0.0, "precision.fp32_modules": rules})

    x = torch.tensor([[-300.0, 300, 300, 300]])
    caught = {}
    for rules in ([], ["1"]):
        state = build(rules)
        state.model.register_forward_hook(
            lambda m, a, out, rules=rules: caught.__setitem__(len(rules), out.detach().float())
        )
        _, grads = gradients(state, batch(x, torch.zeros(1, 4)))
    assert torch.equal(caught[0], torch.zeros(1, 4))
    torch.testing.assert_close(caught[1], torch.tensor([[-1.0, 1, 1, 1]]), rtol=1e-3, atol=1e-3)
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), Rms())
    with torch.no_grad():
        plain[0].weight.copy_(torch.eye(4))
    plain(x).square().sum().div(4).backward()
    torch.testing.assert_close(grads["1.gain"].float(), plain[1].gain.grad, rtol=1e-2, atol=1e-2)


def test_masters_keep_what_half_would_lose(make_state):
    """100 steps of 1e-3 (BF16) and 1e-4 (FP16) from weight 1.0; without masters nothing moves."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * x

    def run(dtype, mode, lr):
        keys = {"precision.mode": mode, "precision.param_dtype": dtype, "precision.compute_dtype": dtype,
                "optimizer.name": "sgd", "optimizer.lr": lr, "optimizer.weight_decay": 0.0, **REGRESSION}  # fmt: skip
        state = make_state(Weight(), **keys)
        for _ in range(100):
            # d/dw mean((w x - t)^2) = 2 (w x - t) x = 1 where t = w x - 0.5
            with torch.no_grad():
                target = state.model.w.float() - 0.5
            train_step(state, [batch(torch.ones(1, 1), target.reshape(1, 1))])
        return dict(state.weights)["w"].item(), state.model.w.item()

    assert run("bfloat16", "master", 1e-3) == (pytest.approx(0.9, abs=1e-4), 0.8984375)
    assert run("float16", "master", 1e-4) == (pytest.approx(0.98999, abs=2e-5), 0.990234375)
    assert run("bfloat16", "pure", 1e-3) == (1.0, 1.0)
    assert run("float16", "pure", 1e-4) == (1.0, 1.0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_write_back_is_exact_and_state_is_float32(make_state, optimizer):
    state = make_state(Net(), **MASTER, **{"optimizer.name": optimizer})
    for _ in range(5):
        train_step(state, [net_batch()])
    assert len(state.weights.pairs) > 5
    for parameter, master in state.weights.pairs:
        assert torch.equal(parameter, master.to(torch.float16))
        for value in state.optimizer.state[master].values():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert value.dtype == torch.float32
        assert parameter.grad is None


def test_tied_parameters_have_one_master_and_stay_tied(make_state):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    for rules in ([], ["head"]):
        state = make_state(
            Tied(),
            **MASTER,
            **{"dataset.task": "language_model", "precision.fp32_modules": rules, "train.ema.decay": 0.5},
        )
        train_step(state, [batch(torch.arange(10)[None], torch.arange(10)[None])])
        assert state.model.head.weight is state.model.embed.weight
        assert len(state.params) == 1
        assert len(state.weights.pairs) == (0 if rules else 1)
        assert [entry.rule for entry in state.plan] == (["mode", "tied:head", "head"] if rules else ["mode"] * 3)


def test_frozen_parameters_have_no_master_and_no_state(make_state):
    model = nn.Sequential(toy(1.0), toy(1.0))
    model[0].weight.requires_grad_(False)
    state = make_state(model, **MASTER, **REGRESSION)
    train_step(state, [toy_batch(0.5)])
    assert len(state.weights.pairs) == 1
    assert state.model[0].weight.item() == 1.0
    assert [name for group in state.optimizer.param_groups for name in group["names"]] == ["1.weight"]


@pytest.mark.parametrize("mode", ["autocast", "master"])
def test_deepcopy_keeps_the_borders(mode):
    policy = PrecisionPolicy(mode, torch.float16 if mode == "master" else torch.float32, torch.float16)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    apply_plan(policy, make_plan(model, ["0"], mode=mode))
    twin = copy.deepcopy(model)
    x = policy.cast_inputs(torch.randn(3, 4))
    with policy.region("cpu"):
        assert torch.equal(model(x), twin(x))
    assert isinstance(twin[0], nn.Linear)
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert repr(twin) == repr(model)


@pytest.mark.parametrize(("rule", "path", "yes"), [
    ("head", "head", True), ("head", "blocks.head", False), ("**.head", "head", True), ("**.head", "a.b.head", True),
    ("blocks.*.norm1", "blocks.3.norm1", True), ("blocks.*.norm1", "blocks.3.x.norm1", False), ("blocks.*", "blocks", False),
    ("blocks.**", "blocks", True), ("blocks.**", "blocks.0.attn.qkv", True), ("blocks.[01].norm?", "blocks.1.norm2", True),
    ("re:blocks\\.\\d+", "blocks.12", True), ("re:blocks", "blocks.12", False), ("class:Linear", "x", True), ("class:Module", "x", True),
    ("class:torch.nn.modules.linear.Linear", "x", True), ("class:Conv2d", "x", False),
])  # fmt: skip
def test_patterns(rule, path, yes):
    assert matches(rule, path, nn.Linear(1, 1)) is yes


def test_a_rule_that_matches_nothing_lists_near_names():
    with pytest.raises(OverrideError, match=r"'haed' matches no module.*head"):
        make_plan(Net(), ["haed"], mode="autocast")
    with pytest.raises(OverrideError, match=r"class:LayerNrm.*MyNorm|class:LayerNrm.*Linear"):
        make_plan(Net(), ["class:LayerNrm"], mode="autocast")
    with pytest.raises(OverrideError, match="not a regular expression"):
        make_plan(Net(), ["re:("], mode="autocast")


def test_first_rule_wins_and_covers_what_is_inside():
    plan = {entry.path: entry for entry in make_plan(Net(), ["pair.inner", "pair", "class:Linear"], mode="master")}
    assert (plan["pair"].rule, plan["pair.inner"].rule, plan["pair.inner"].inner) == ("pair", "pair.inner", True)
    assert (plan["head"].rule, plan["norm"].rule, plan["bn"].rule, plan["embed"].rule) == (
        "class:Linear",
        "norm",
        "norm",
        "mode",
    )


def test_a_forward_patched_onto_the_instance_is_refused():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].forward = lambda x: x
    policy = PrecisionPolicy("autocast", torch.float32, torch.float16)
    with pytest.raises(OverrideError, match="patched"):
        apply_plan(policy, make_plan(model, ["0"], mode="autocast"))


@pytest.mark.parametrize("mode", [MASTER, PURE], ids=["master", "pure"])
def test_torchs_transformer_layers_evaluate_through_their_borders(make_state, mode):
    """torch's fast path would hand FP32 norm weights and half activations to one fused call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(24, 3)
    )
    state = make_state(model, **mode)
    window = batch(torch.randn(5, 3, 4), torch.randint(3, (5,)))
    train_step(state, [window])
    model.eval()
    with torch.no_grad():
        assert state.run_forward(window.inputs).isfinite().all()


def test_complex_parameters_train_unscaled_and_scaled(make_state):
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.fft.ifft(torch.fft.fft(x.float()) * self.w)).real.sum(-1, keepdim=True)

    weights = {}
    for name, mode in (("fp32", {}), ("fp16", FP16), ("master", MASTER)):
        state = make_state(
            Spectral(),
            **mode,
            **REGRESSION,
            **{"optimizer.lr": 1e-2, "train.clip_norm": 1.0, "optimizer.weight_decay": 0.0},
        )
        for _ in range(3):
            assert train_step(state, [batch(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5]]))]).read().applied
        weights[name] = state.model.w.detach().clone()
    assert weights["fp32"].dtype == torch.complex64
    assert not torch.equal(weights["fp32"], torch.ones(3, dtype=torch.complex64))
    torch.testing.assert_close(weights["fp16"], weights["fp32"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weights["master"], weights["fp32"], rtol=1e-3, atol=1e-3)


def test_sparse_gradients_are_refused_by_name(make_state):
    from mprun.errors import ConfigError

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    state = make_state(Sparse(), **{"optimizer.name": "sgd"})
    with pytest.raises(ConfigError, match=r"table.weight is sparse.*sparse=False"):
        train_step(state, [batch(torch.arange(4), torch.tensor([0, 1, 2, 0]))])


def test_tied_parameters_spread_fp32_through_a_chain():
    a, b, c = nn.Linear(4, 4, bias=False), nn.Bilinear(4, 4, 4, bias=False), nn.Linear(4, 4)
    model = nn.ModuleDict({"c": c, "b": b, "a": a})
    b.extra, b.shared = a.weight, c.weight
    plan = {entry.path: entry for entry in make_plan(model, ["a"], mode="master")}
    assert plan["b"].fp32
    assert plan["c"].fp32


def test_evaluation_in_half_keeps_the_fp32_rules_of_an_fp32_run(make_state):
    state = make_state(Net(), **{"precision.eval_dtype": "float16", "precision.fp32_modules": ["head"]})
    seen = {}
    for name in ("first", "head"):
        state.model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: seen.__setitem__(name, out.dtype)
        )
    from mprun.config import DType

    with torch.no_grad():
        state.run_forward(net_batch().inputs, state.policy.for_eval(DType.float16))
    assert seen == {"first": torch.float16, "head": torch.float32}


def test_sums_of_half_products_stay_in_fp32_and_torchs_flags_come_back():
    """torch's default lets cuBLAS add partial sums in half, which overflows earlier than the policy says."""
    matmul: Any = torch.backends.cuda.matmul
    before = {flag: getattr(matmul, flag) for flag in IN_HALF}
    assert True in before.values(), "torch has another default now"
    with matmul_precision(PrecisionPolicy()):
        assert not any(getattr(matmul, flag) for flag in IN_HALF)
    assert {flag: getattr(matmul, flag) for flag in IN_HALF} == before
