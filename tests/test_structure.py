"""What a model holds is looked up again whenever it may have changed, and only then."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mprun.compose import compose
from mprun.errors import ConfigError
from mprun.training.buffers import named_buffers
from mprun.training.build import build, switches
from mprun.training.loop import save
from mprun.training.observe import observe
from mprun.training.run import Run, best_of
from mprun.training.step import train_step
from mprun.training.structure import Structure
from tests.conftest import FP16, batch


def small() -> nn.Module:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3))
    model = nn.Sequential(nn.Linear(2, 2), inner, nn.Sequential(nn.Identity(), nn.Linear(3, 2)))
    model.again = inner[0]  # one module under two names
    return model


def check(found: Structure, model: nn.Module) -> None:
    now = found.current()
    assert now.buffered == [(path, m) for path, m in model.named_modules() if m._buffers]
    assert [p for own in now.parameters for p in own.values()] == list(model.parameters())
    assert named_buffers(now.buffered) == list(model.named_buffers())
    assert now.modules == set(model.modules())


SPARE = nn.BatchNorm1d(2)  # made before, so that torch has nothing to tell

CHANGES = {
    "a module is added": lambda m: m.add_module("new", nn.Linear(1, 1)),
    "a module is assigned": lambda m: setattr(m[1], "new", nn.Linear(1, 1)),
    "a module is exchanged": lambda m: m[1].__setitem__(0, nn.Linear(2, 3)),
    "a module is removed": lambda m: setattr(m, "again", None),
    "a module is appended": lambda m: m[2].append(nn.BatchNorm1d(2)),
    "a buffer is registered": lambda m: m[1][1].register_buffer("seen", torch.zeros(1)),
    "a transient buffer is registered": lambda m: m[2][0].register_buffer("seen", torch.zeros(1), persistent=False),
    "a module is deleted": lambda m: m._modules.pop("again", None),
    "a module is put in before others": lambda m: m[2].insert(0, SPARE),
    "a module is written into the dictionary": lambda m: m._modules.update(spare=SPARE),
    "a buffer is written into the dictionary": lambda m: m[1][1]._buffers.update(seen=torch.zeros(1)),
    "a parameter is assigned": lambda m: setattr(m[1][1], "scale", nn.Parameter(torch.ones(1))),
}


@given(changes=st.lists(st.sampled_from(list(CHANGES)), max_size=5))
def test_what_is_known_is_what_a_fresh_look_finds_after_any_change(changes):
    model = small()
    found = Structure(model)
    check(found, model)
    for change in changes:
        CHANGES[change](model)
        check(found, model)


def test_steps_of_an_unchanged_model_look_nothing_up(make_state, monkeypatch):
    state = make_state(small(), **{**FP16, "train.ema.decay": 0.9})
    window = [batch(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))]
    train_step(state, window)
    looks, look = [], Structure.look
    monkeypatch.setattr(Structure, "look", lambda self: looks.append(1) or look(self))
    for _ in range(5):
        train_step(state, window)
    assert looks == []
    nn.Linear(1, 1)  # anything that registers, anywhere
    train_step(state, window)
    assert len(looks) == 1


def test_a_function_that_assigns_a_buffer_is_compiled_once():
    """What torch tells of registrations is compiled into it; with a count in it each call would be compiled anew."""

    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(2))

        def forward(self, x):
            self.average = self.average * 0.5 + x
            return x + self.average

    made = []
    model = Averaging()
    compiled = torch.compile(model, backend=lambda graph, _: made.append(1) or graph.forward)
    for _ in range(6):
        compiled(torch.ones(2))
    assert len(made) <= 2  # the first call meets the buffer that was registered, the others one that was computed
    assert model.average.tolist() == [2 - 2**-5] * 2


def test_a_module_that_is_dropped_leaves_the_average_too(make_state):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    state = make_state(model, **{"train.ema.decay": 0.9})
    window = [batch(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))]
    train_step(state, window)
    del model[1]
    train_step(state, window)
    with state.ema.swapped_in(model):
        assert state.ema.shadow.keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("name", ["2.1.weight", "2.1"])
def test_a_deletion_is_refused(make_state, name):
    """torch does not tell of it; the optimizer would go on with a parameter that nothing uses."""
    state = make_state(small())
    window = [batch(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))]
    path, _, attribute = name.rpartition(".")
    inner = state.model.get_submodule(path)
    inner.forward = lambda x: delattr(inner, attribute) or x[:, :2]  # in the middle of a step
    with pytest.raises(ConfigError, match=r"removes the parameter 2\.1\.weight"):
        train_step(state, window)


def test_an_exchange_behind_torchs_back_is_refused_before_a_checkpoint_is_written(tmp_path, monkeypatch):
    """A module written into its parent's dictionary: torch does not tell of it, and there are as many as before."""
    config = compose(["model=mlp", "dataset.limit=64", "tracking=disabled", "device=cpu"]).config
    with switches(config, torch.device("cpu")):
        state, data, plan = build(config, torch.device("cpu"))
        run = Run(config, state, data, plan, [], tmp_path, best_of(config))
        save(run)
        name, layer = next((n, m) for n, m in state.model.named_modules() if isinstance(m, nn.Linear))
        path, _, attribute = name.rpartition(".")
        state.model.get_submodule(path)._modules[attribute] = copy.deepcopy(layer)
        with pytest.raises(ConfigError, match=f"exchanges the parameter {name}.weight"):
            save(run)


@pytest.mark.parametrize("registers", [False, True])
def test_a_buffer_that_a_lost_window_deleted_comes_back_also_if_something_was_registered_meanwhile(
    make_state, registers
):
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Identity()
            self.seen.register_buffer("count", torch.ones(2))
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            del self.seen.count
            if registers:
                nn.Linear(1, 1)
            return self.layer(x) * 1e30

    state = make_state(Forgets(), **FP16)
    train_step(state, [batch(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))])
    assert not state.applied
    assert torch.equal(state.model.seen.count, torch.ones(2))


def test_the_average_follows_a_parameter_that_is_laid_out_anew(make_state):
    """A weight constraint may write ``p.data = ...``; the fused kernel walks through memory and must not meet other strides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    state = make_state(model, **{"train.ema.decay": 0.5, "train.ema.warmup": False})
    expected = model[0].weight.detach().clone()
    for number in range(4):
        train_step(state, [batch(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))])
        expected = torch.lerp(expected, model[0].weight.detach(), 0.5)
        assert torch.allclose(state.ema.shadow["0.weight"], expected, atol=1e-7), number
        model[0].weight.data = (model[0].weight.data / 2).t().contiguous().t()


def test_a_module_that_the_first_forward_builds_keeps_its_buffers(make_state):
    """A cache, or statistics without parameters: deleting what it holds would break the next forward pass."""

    class Builds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "norm"):
                self.norm = nn.BatchNorm1d(2, affine=False)
            return self.norm(self.layer(x)) * self.factor

    for lost in (False, True):
        model = Builds()
        model.factor = 1e30 if lost else 1.0
        state = make_state(model, **{**FP16, "train.ema.decay": 0.9})
        window = [batch(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))]
        if not lost:
            observe(state, window[0])
        train_step(state, window)
        model.factor = 1.0
        seen = [int(model.norm.num_batches_tracked)]
        for factor in (1e30, 1.0):  # from then on it is a module like any other: a lost window leaves it alone
            model.factor = factor
            train_step(state, window)
            seen.append(int(model.norm.num_batches_tracked))
        assert seen[1:] == [seen[0], seen[0] + 1]
