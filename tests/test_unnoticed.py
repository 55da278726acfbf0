"""A run does not notice the lab: odd models with the probe at every step and with every skip examined, against neither."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mprun.numerics import probe as probe_module
from mprun.training.attributes import Attributes
from tests.conftest import FP16
from tests.test_casting import MASTER
from tests.test_examination import HIGH, ROWS, content, fitted, held, same

NET = {**ROWS, "model.name": "tests.test_unnoticed:make"}
MODES = {"full": {}, "autocast": {**FP16, **HIGH}, "master": {**MASTER, **HIGH}}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.side, self.drop, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.between(x, self.fc(x)).relu()))

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h


# --- what sits in attributes -------------------------------------------------------------------------------------------------


class Counts(Base):
    calls = 0

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 + 0.1 * self.calls)


class Remembers(Base):
    """The hidden state of the window before."""

    hidden: Tensor | None = None

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        if self.hidden is not None and len(self.hidden) == len(h):
            h = h + 0.5 * self.hidden
        self.hidden = h.detach()
        return h


class Averages(Base):
    """A tensor that is no buffer and is written in place, past the version counter too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.data = torch.zeros(8), torch.zeros(8)

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        new = x.detach().float().mean()
        self.mean.mul_(0.9).add_(new)
        self.data.data.add_(new)
        return h + self.mean + self.data


@dataclass
class Notes:
    seen: list[float] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)


class Keeps(Base):
    """Lists, dicts, and an object of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.notes, self.recent, self.array = Notes(), deque(maxlen=3), np.zeros(2)

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        self.notes.seen.append(0.1)
        self.notes.by_name["calls"] = self.notes.by_name.get("calls", 0) + 1
        self.recent.append(len(self.notes.seen))
        self.array += 0.01
        return h + 0.1 * sum(self.recent) + 0.01 * self.notes.by_name["calls"] + float(self.array[0])


class Draws(Base):
    """Generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy, self.python = (
            torch.Generator().manual_seed(1),
            np.random.default_rng(1),
            random.Random(1),
        )

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h * (torch.rand(h.shape, generator=self.torch) > 0.2) + self.numpy.random() + self.python.random()


class Flips(Base):
    """``training`` of a part, and a rate that grows."""

    calls = 0

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        self.calls += 1
        self.drop.train(self.training and self.calls % 2 == 0)
        self.drop.p = min(0.5, self.drop.p + 0.02)
        return h


class Hides(Base):
    """A module that is not registered: its statistics are nobody's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.BatchNorm1d(8, affine=False)]

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        self.hidden[0].train(self.training)
        self.hidden[0](h.detach().float())
        return h + self.hidden[0].running_mean


STATEFUL = [Counts, Remembers, Averages, Keeps, Draws, Flips, Hides]

# --- what a hook may not touch or cannot see -------------------------------------------------------------------------------


class Functional(Base):
    """Modules under vmap and grad, whose tensors have no memory."""

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        again = torch.func.vmap(self.side)(x)
        return h + again + torch.func.vmap(torch.func.grad(lambda q: self.side(q).float().sum()))(x).mean()


class Inference(Base):
    def between(self, x: Tensor, h: Tensor) -> Tensor:
        with torch.inference_mode():
            other = self.side(x)
        return h + other.clone()


class Strange(nn.Module):
    """Outputs of every kind."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().float()
        return {
            1: torch.nested.nested_tensor([x[0], x[1, :4]]),
            "jagged": torch.nested.nested_tensor([x[0, :, None], x[1, :4, None]], layout=torch.jagged),
            "meta": x.to("meta"),
            "sparse": x.to_sparse(),
            "fp8": (x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)),
            "complex": torch.view_as_complex(x.reshape(-1, 2).contiguous()),
            "others": [None, "text", 3, lambda: 0, torch.zeros(0), torch.zeros(1).expand(5, 5)],
        }


class Returns(Base):
    def __init__(self) -> None:
        super().__init__()
        self.strange = Strange()

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        self.strange(x)
        return h


class Frozen(Base):
    """A frozen encoder: torch's fast path, whose last bit is another, is left once a hook is on it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).requires_grad_(False)
        self.embed = nn.Linear(1, 32).requires_grad_(False)
        self.out = nn.Linear(32, 8)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.encoder.eval()
        return self

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        padded = torch.zeros(len(x), 6, dtype=torch.bool)
        padded[:, 4:] = True
        return h + self.out(self.encoder(self.embed(x[..., None]), src_key_padding_mask=padded).mean(1))


HOOKED = [Functional, Inference, Returns, Frozen]
KINDS = {kind.__name__: kind for kind in [*STATEFUL, *HOOKED, Base]}


def make(kind: str) -> nn.Module:
    return KINDS[kind]()


def both(folder: Any, keys: dict[str, Any]) -> tuple[Any, list[dict[str, Any]], Any]:
    on, said = fitted(folder / "on", {**keys, "probe.every": 1, "postmortem.skips": 50})
    off, silent = fitted(folder / "off", {**keys, "probe.every": 0, "postmortem.skips": 0})
    assert same(content(on), content(off))
    kinds = ("skip", "val")
    assert same(*([record for record in records if record["kind"] in kinds] for records in (said, silent)))
    return on, said, off


def warnings(said: list[dict[str, Any]]) -> list[str]:
    return [record["message"] for record in said if record.get("event") == "warning"]


@pytest.mark.parametrize("mode", ["autocast", "master"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_what_replays_do_to_attributes_is_undone(tmp_path, kind, mode):
    run, said, _ = both(tmp_path, {**NET, **MODES[mode], "model.kwargs": {"kind": kind.__name__}})
    assert run.state.counters.skipped > 3
    assert run.state.counters.applied > 1
    assert held(said)
    assert not any(record["verdict"] == "failed" for record in held(said))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", HOOKED)
def test_the_probe_looks_at_odd_modules_and_past_what_has_no_numbers(tmp_path, kind, mode):
    run, said, _ = both(tmp_path, {**NET, **MODES[mode], "model.kwargs": {"kind": kind.__name__}})
    samples = [record for record in said if record["kind"] == "probe"]
    assert len(samples) == run.state.counters.attempts
    assert {"fc", "head"} <= samples[-1]["modules"].keys()
    assert not any("probe" in line for line in warnings(said))


@pytest.mark.parametrize("place", ["forward", "backward", "parameters"])
def test_a_probe_that_breaks_is_told_once_and_costs_the_run_nothing(tmp_path, monkeypatch, place):
    real, calls = probe_module.measure, Counter[str]()

    def broken(tensor: Tensor, factor: Any = None, **more: Any) -> Tensor:
        backward = torch._C._current_graph_task_id() != -1
        where = "backward" if backward else "parameters" if isinstance(tensor, nn.Parameter) else "forward"
        if where == place:
            calls[where] += 1
            raise torch.OutOfMemoryError("no memory\nwith details")
        return real(tensor, factor, **more)

    monkeypatch.setattr(probe_module, "measure", broken)
    run, said, _ = both(tmp_path, {**NET, **MODES["autocast"], "model.kwargs": {"kind": "Base"}})
    assert calls[place]
    assert run.state.counters.applied > 3
    assert not any(record["kind"] == "probe" for record in said)
    (line,) = [line for line in warnings(said) if "probe" in line]
    assert line.startswith("the probe could not sample attempt 1, at ")
    assert "OutOfMemoryError: no memory; training is not touched by it; " in line


# --- attributes themselves -----------------------------------------------------------------------------------------------


def test_attributes_come_back_as_the_same_objects_as_often_as_asked():
    model = Base()
    inner: list[Any] = [1, 2]
    inner.append(inner)  # in a circle
    model.list, model.dict, model.set = inner, defaultdict(list, {"a": inner}), {1, 2}
    model.tensor, model.graph = torch.ones(3), torch.ones(2, requires_grad=True) * 2
    model.tuple = (model.tensor, {"deep": torch.zeros(2)})
    model.wide = torch.zeros(1).expand(4)
    kept = Attributes(model.modules())
    before, tensor = dict(vars(model)), model.tensor
    for _ in range(2):
        model.list.clear()
        model.dict["b"].append(1)
        model.set.add(3)
        model.tensor.fill_(7)
        model.tensor = torch.zeros(9)
        model.tuple[1]["deep"].data.fill_(5)
        model.tuple[1]["deep"] = None
        model.drop.p, model.new = 0.9, "new"
        model.head.eval()
        kept.restore()
        assert vars(model).keys() == before.keys()
        assert all(vars(model)[name] is value for name, value in before.items())
        assert model.list[:2] == [1, 2]
        assert model.list[2] is inner
        assert dict(model.dict) == {"a": inner}
        assert model.set == {1, 2}
        assert model.tensor is tensor
        assert torch.equal(tensor, torch.ones(3))
        assert torch.equal(model.tuple[1]["deep"], torch.zeros(2))
        assert model.drop.p == 0.2
        assert model.head.training
    tensor.resize_(5)
    kept.restore()
    assert torch.equal(tensor, torch.ones(3))
    model.graph.sum().backward()  # still part of its graph


def test_parameters_and_what_others_own_is_left_alone():
    model = Base()
    model.all = list(model.parameters())
    model.also = model.fc.weight.detach()  # a view of a parameter: the same values are written to it, if any
    kept = Attributes(model.modules())
    with torch.no_grad():
        model.head.weight.fill_(3.0)
    kept.restore()
    assert bool((model.head.weight == 3.0).all())
