"""Activation checkpointing, channels_last and torch.compile change how a model is computed, not what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mprun.errors import ConfigError
from mprun.training.recompute import find_blocks
from mprun.training.step import train_step
from tests.conftest import BF16, FP16, batch
from tests.test_casting import MASTER, PURE

MODES = {"fp32": {}, "bf16": BF16, "fp16": FP16, "master": MASTER, "pure": PURE}


class Block(nn.Module):
    p = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(self.p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.bn(self.conv(x))))


def network(dropout: bool = True) -> nn.Module:
    torch.manual_seed(0)
    Block.p = 0.2 if dropout else 0.0
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(Block(), Block(), Block()), nn.Flatten(), nn.Linear(4 * 36, 10)
    )


def images(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return batch(torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator))


def run(make_state, steps: int = 4, dropout: bool = True, **keys):
    state = make_state(network(dropout), **keys)
    torch.manual_seed(5)
    losses = [train_step(state, [images(i), images(i + 50)]).read().loss for i in range(steps)]
    return state, losses


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("rules", [[], ["1.1"]])
def test_activation_checkpointing_changes_no_bit(make_state, mode, rules):
    """Parameters, BatchNorm statistics and the dropout's draws are those of the plain run."""
    keys = {**mode, "precision.fp32_modules": rules if mode else []}
    plain, plain_losses = run(make_state, **keys)
    again, losses = run(make_state, **keys, **{"model.activation_checkpointing": True})
    assert losses == plain_losses
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_blocks_are_computed_twice_only_where_gradients_flow(make_state):
    calls = []
    state = make_state(network(), **{"model.activation_checkpointing": True})
    state.model[1][0].conv.register_forward_hook(lambda *_: calls.append(1))
    train_step(state, [images(0)])
    assert len(calls) == 2
    with torch.no_grad():
        state.model(images(0).inputs)
    assert len(calls) == 3


def test_blocks_found_are_outermost_and_once():
    assert list(find_blocks(network())) == ["1.0", "1.1", "1.2"]
    shared = Block()
    assert list(find_blocks(nn.Sequential(shared, shared, Block()))) == ["0", "2"]


def test_a_model_without_blocks_is_refused(make_state):
    with pytest.raises(ConfigError, match="no repeated blocks"):
        make_state(nn.Linear(2, 2), **{"model.activation_checkpointing": True})


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_channels_last_is_the_same_computation(make_state, mode):
    # Without dropout: its draws follow the memory format.
    _, plain_losses = run(make_state, dropout=False, **mode)
    other, losses = run(make_state, dropout=False, **mode, **{"model.channels_last": True})
    assert other.model[1][0].conv.weight.is_contiguous(memory_format=torch.channels_last)
    tolerance = 1e-5 if not mode else 3e-2
    assert losses == pytest.approx(plain_losses, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_equals_eager(make_state, mode, checkpointing):
    torch._dynamo.reset()
    keys = {**mode, "precision.fp32_modules": ["1.1"] if mode else [], "model.activation_checkpointing": checkpointing}
    plain, plain_losses = run(make_state, dropout=False, **keys)
    other, losses = run(make_state, dropout=False, **keys, **{"model.compile": True})
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-5 if not mode else 3e-2)
    assert losses[-1] == pytest.approx(plain_losses[-1], rel=1e-4 if not mode else 5e-2)
    for (name, mine), theirs in zip(other.model.named_buffers(), plain.model.buffers(), strict=True):
        # BatchNorm has seen each batch once, however often its blocks were computed.
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2, msg=name)


def test_a_block_that_uses_a_buffer_it_moves_is_recomputed_with_what_it_saw(make_state):
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))
            self.register_buffer("gain", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and torch.is_grad_enabled():
                self.gain.mul_(1.5)
            return torch.tanh(self.inner(x) * self.gain)

    norms = {}
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(Moving(), Moving()), nn.Linear(4, 3))
        state = make_state(model, **{"model.activation_checkpointing": on})
        window = [batch(torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        norms[on] = [train_step(state, window).read().grad_norm for _ in range(3)]
        gain = state.model[0][0].gain.item()
        assert gain == pytest.approx(1.5**3)
    assert norms[True] == norms[False]
