"""The GPT against an attention written out in float64, and its tied matrix through every precision, EMA and resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.errors import ConfigError
from mprun.models.gpt import GPT, gpt
from mprun.training import checkpoint
from mprun.training.state import TrainState
from mprun.training.step import eval_step, train_step
from tests.conftest import BF16, FP16, batch
from tests.test_casting import MASTER, PURE

MODES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16, "master": MASTER, "pure": PURE}
TASK = {"dataset.task": "language_model", "optimizer.lr": 3e-3}
CONTEXT, VOCAB = 12, 29


pytestmark = pytest.mark.usefixtures("one_thread")


def model(seed: int = 0, **keys: Any) -> GPT:
    torch.manual_seed(seed)
    made = gpt(input_shape=(CONTEXT,), num_classes=VOCAB, **{"depth": 2, "dim": 16, "heads": 4, **keys})
    assert isinstance(made, GPT)
    return made


def ids(seed: int = 1, rows: int = 5, length: int = CONTEXT) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def window(seed: int = 1):
    """Tokens that can be learned: each follows from the one before."""
    starts = torch.randint(VOCAB, (8, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + 3 * torch.arange(CONTEXT + 1)) % VOCAB
    return [batch(rows[:, :-1], rows[:, 1:].clone())]


def written_out(net: GPT, tokens: Tensor) -> Tensor:
    """The network of the docstrings in float64, position by position and head by head, from the parameters alone."""
    p = {name: value.detach().double() for name, value in net.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean()
        scaled = centred / (centred.square().mean() + 1e-5).sqrt() * p[f"{name}.weight"]
        return scaled + p[f"{name}.bias"] if f"{name}.bias" in p else scaled

    def linear(x: Tensor, name: str) -> Tensor:
        out = p[f"{name}.weight"] @ x
        return out + p[f"{name}.bias"] if f"{name}.bias" in p else out

    logits = []
    for row in tokens.tolist():
        stream = [p["wte.weight"][token] + p["wpe.weight"][place] for place, token in enumerate(row)]
        for number, block in enumerate(net.blocks):
            heads, here = block.attn.heads, f"blocks.{number}"
            wide = [linear(norm(x, f"{here}.norm1"), f"{here}.attn.qkv") for x in stream]
            dim = len(stream[0])
            size = dim // heads
            for t in range(len(row)):
                merged = []
                for head in range(heads):
                    part = slice(head * size, (head + 1) * size)
                    query = wide[t][:dim][part]
                    keys = [w[dim : 2 * dim][part] for w in wide[: t + 1]]
                    values = [w[2 * dim :][part] for w in wide[: t + 1]]
                    weights = [math.exp(float(query @ key) / math.sqrt(size)) for key in keys]
                    merged.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
                stream[t] = stream[t] + linear(torch.cat(merged), f"{here}.attn.proj")
            for t, x in enumerate(stream):
                inner = linear(norm(x, f"{here}.norm2"), f"{here}.mlp.fc1")
                inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
                stream[t] = x + linear(inner, f"{here}.mlp.fc2")
        logits.append(torch.stack([p["wte.weight"] @ norm(x, "norm") for x in stream]))
    return torch.stack(logits)


def stirred(net: GPT) -> GPT:
    """Parameters far from the start, so that every one of them matters."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_it_is_the_network_written_out(bias: bool, heads: int) -> None:
    net, tokens = stirred(model(bias=bias, heads=heads)), ids(rows=2)
    wanted = written_out(net, tokens)
    torch.testing.assert_close(net.double()(tokens), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(net.float()(tokens).double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_precision_computes_it_up_to_its_rounding(make_state, mode):
    net, tokens = stirred(model()), ids(rows=2)
    wanted = written_out(net, tokens)
    state = make_state(net, **mode, **TASK)
    eps = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}[state.policy.compute_dtype]
    state.model.eval()
    with torch.no_grad():
        got = state.run_forward(tokens)
    assert got.shape == (2, CONTEXT, VOCAB)
    error = (got.double() - wanted).norm() / wanted.norm()
    assert 0 < float(error) < 4 * eps


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_token_changes_no_logit_before_it(make_state, mode):
    state = make_state(stirred(model()), **mode, **TASK)
    state.model.eval()
    tokens = ids()
    before = state.run_forward(tokens)
    for t in (0, 1, 7, CONTEXT - 1):
        changed = tokens.clone()
        changed[:, t] = (tokens[:, t] + 1) % VOCAB
        after = state.run_forward(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert bool((after[:, t:] != before[:, t:]).any(2).all()), "and every one from there on"


def test_positions_count_and_shorter_sequences_are_prefixes() -> None:
    net, tokens = stirred(model()), ids()
    torch.testing.assert_close(net(tokens[:, :5]), net(tokens)[:, :5])
    turned = net(tokens.flip(1)).flip(1)
    assert not torch.allclose(turned[:, -1], net(tokens)[:, 0])
    with pytest.raises(ConfigError, match="a sequence of 13 tokens is longer than the gpt's context of 12"):
        net(ids(length=13))


def test_it_starts_as_documented() -> None:
    net = model(dim=256, depth=8, bias=True)
    stds = {name: float(p.detach().std()) for name, p in net.named_parameters()}
    for name, std in stds.items():
        if name.endswith(("proj.weight", "fc2.weight")):
            assert std == pytest.approx(0.02 / 4, rel=0.05), name
        elif name.endswith("weight") and "norm" not in name:
            assert std == pytest.approx(0.02, rel=0.05), name
    assert {float(p.detach().abs().max()) for name, p in net.named_parameters() if name.endswith("bias")} == {0.0}
    first = nn.functional.cross_entropy(model()(ids()).flatten(0, 1), ids(2).flatten())
    assert float(first.detach()) == pytest.approx(math.log(VOCAB), abs=0.02), "at the start all symbols are alike"


def test_names_and_sizes() -> None:
    net = model(depth=1, bias=False)
    assert [name for name, _ in net.named_parameters()] == [
        "wte.weight", "wpe.weight", "blocks.0.norm1.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight",
        "blocks.0.norm2.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "norm.weight"]  # fmt: skip
    assert sum(p.numel() for p in net.parameters()) == (VOCAB + CONTEXT) * 16 + 12 * 16 * 16 + 3 * 16
    assert model(dim=16, bias=True).get_parameter("blocks.1.mlp.fc1.bias").shape == (64,)


@pytest.mark.parametrize("place", ["drop", "blocks.0.attn.drop", "blocks.0.mlp.drop", "attention"])
def test_dropouts_act_in_training_only(place: str) -> None:
    net, tokens = stirred(model(dropout=0.5)), ids()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for block in net.blocks:
        block.attn.dropout = 0.5 if place == "attention" else 0.0
    if place != "attention":
        net.get_submodule(place).p = 0.5
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"input_shape": (1, 8, 8)},
            r"takes sequences of token ids \(T,\), not inputs of shape \(1, 8, 8\): use dataset=",
        ),
        ({"dim": 10}, r"model\.kwargs\.dim=10 is not a multiple of model\.kwargs\.heads=4"),
        ({"depth": 0}, r"model\.kwargs\.depth=0 is not at least 1"),
        ({"heads": 0}, r"model\.kwargs\.heads=0 is not at least 1"),
        ({"dropout": 1.0}, r"model\.kwargs\.dropout=1\.0 is not from 0 to below 1"),
    ],
)
def test_sizes_that_do_not_fit_are_explained(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpt(**{"input_shape": (CONTEXT,), "num_classes": VOCAB, **keys})


# -- the tied matrix ----------------------------------------------------------------------------------------------


def tied(state: TrainState) -> bool:
    net: Any = state.model
    return net.head.weight is net.wte.weight


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("rules", [[], ["head"], ["wte"]], ids=str)
def test_the_tied_matrix_has_one_master_and_stays_tied(make_state, mode, rules):
    state = make_state(
        model(), **mode, **TASK, **{"precision.fp32_modules": rules if mode else [], "train.ema.decay": 0.9}
    )
    owned = [p for group in state.optimizer.param_groups for p in group["params"]]
    assert len(owned) == len(list(model().parameters())) == len({id(p) for p in owned})
    assert "head.weight" not in dict(state.weights)
    norms = sum("norm" in name for name, _ in model().named_parameters())
    if mode is MASTER:
        assert len(state.weights.pairs) == len(owned) - norms - (1 if rules else 0), "FP32 modules own no second copy"
    else:
        assert not state.weights.pairs
    losses = [train_step(state, window()).read().loss for _ in range(12)]
    assert tied(state)
    assert losses[-1] < losses[0]
    net: Any = state.model
    truth = dict(state.weights)["wte.weight"]
    assert torch.equal(net.head.weight, truth.to(net.wte.weight.dtype))
    assert state.ema is not None
    assert "head.weight" not in state.ema.shadow
    kept = net.wte.weight.detach().clone()
    with state.ema.swapped_in(net):
        assert tied(state)
        assert torch.equal(net.head.weight, state.ema.shadow["wte.weight"].to(kept.dtype))
    assert torch.equal(net.wte.weight, kept)


def test_the_tied_gradient_is_the_sum_of_both_uses() -> None:
    net, tokens = stirred(model()).double(), ids()
    loss = net(tokens).logsumexp(-1).sum()
    (both,) = torch.autograd.grad(loss, [net.wte.weight])
    untied = stirred(model()).double()
    untied.head.weight = nn.Parameter(untied.wte.weight.detach().clone())
    apart = torch.autograd.grad(untied(tokens).logsumexp(-1).sum(), [untied.wte.weight, untied.head.weight])
    torch.testing.assert_close(both, apart[0] + apart[1])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_resume_is_the_unbroken_run(make_state, mode, tmp_path):
    keys = {**mode, **TASK, "train.ema.decay": 0.9}
    torch.manual_seed(3)
    whole = make_state(model(dropout=0.1), **keys)
    torch.manual_seed(5)
    for seed in range(3):
        train_step(whole, window(seed))
    checkpoint.save(checkpoint.snapshot(whole), tmp_path / "a.pt")
    for seed in range(3, 6):
        train_step(whole, window(seed))
    again = make_state(model(seed=9, dropout=0.1), **keys)
    checkpoint.restore(again, checkpoint.load(tmp_path / "a.pt"), path=tmp_path / "a.pt")
    assert tied(again)
    for seed in range(3, 6):
        train_step(again, window(seed))
    for (name, mine), (_, theirs) in zip(whole.named_truth(), again.named_truth(), strict=True):
        assert torch.equal(mine, theirs), name
    assert whole.ema is not None
    assert again.ema is not None
    assert all(torch.equal(value, again.ema.shadow[name]) for name, value in whole.ema.shadow.items())


@pytest.mark.parametrize("mode", ["fp16", "bf16", "master"])
def test_low_precision_learns_as_fp32_does(make_state, mode):
    def losses(keys: dict[str, Any]) -> list[float]:
        state = make_state(model(), **keys, **TASK)
        return [train_step(state, window(seed % 5)).read().loss for seed in range(60)]

    full, low = losses({}), losses(MODES[mode])
    assert full[-1] < 0.5 * full[0]
    early, late = {"fp16": (1e-3, 0.02), "bf16": (1e-2, 0.1), "master": (1e-2, 0.05)}[mode]
    assert low[:10] == pytest.approx(full[:10], rel=early)
    assert low[-1] == pytest.approx(full[-1], rel=late)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_activation_checkpointing_changes_no_bit(make_state, mode):
    def run(on: bool) -> tuple[list[float], dict[str, Tensor]]:
        state = make_state(model(dropout=0.2), **mode, **TASK, **{"model.activation_checkpointing": on})
        torch.manual_seed(5)
        losses = [train_step(state, window(seed)).read().loss for seed in range(4)]
        return losses, dict(state.model.state_dict())

    (plain, values), (again, others) = run(False), run(True)
    assert plain == again
    assert all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_equals_eager(make_state, mode, checkpointing):
    def run(on: bool) -> list[float]:
        torch._dynamo.reset()
        keys = {"model.compile": on, "model.activation_checkpointing": checkpointing}
        state = make_state(model(), **mode, **TASK, **keys)
        return [train_step(state, window(seed)).read().loss for seed in range(8)]

    plain, compiled = run(False), run(True)
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5 if not mode else 1e-2)
    assert compiled == pytest.approx(plain, rel=1e-4 if not mode else 0.1 if mode is PURE else 2e-2)


# -- what is measured ---------------------------------------------------------------------------------------------


def test_loss_and_accuracy_are_per_token(make_state):
    net, rows = stirred(model()), [*window(1), *window(2)]
    rows[1].targets[:3, 5:] = -100
    state = make_state(net, **TASK)
    scores = eval_step(state, state.policy, rows)
    logits = torch.cat([written_out(net, b.inputs) for b in rows]).flatten(0, 1)
    targets = torch.cat([b.targets for b in rows]).flatten()
    counted = targets != -100
    nats = -logits.log_softmax(-1)[counted, targets[counted]]
    assert scores["loss"] == pytest.approx(float(nats.mean()), rel=1e-5)
    assert scores["top1"] == float((logits.argmax(-1)[counted] == targets[counted]).double().mean())
    assert train_step(state, rows).read().loss == pytest.approx(scores["loss"], rel=1e-5)
