"""Odd models: each trains right in every mode, near FP32 and bit for bit where nothing may move, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint as recomputed

from mprun.cli import main
from mprun.errors import ConfigError, MprunError, OverrideError, PrecisionError
from mprun.training import checkpoint
from mprun.training.blame import dtype_trouble
from mprun.training.ema import Ema
from mprun.training.observe import check_plan, observe
from mprun.training.step import eval_step, train_step
from tests.conftest import BF16, FP16, SGD, batch
from tests.test_casting import MASTER, PURE, gradients

HALF = {"fp16": FP16, "master": MASTER, "pure": PURE}
MODES = {"full": {}, **HALF}
FLAT = {**SGD, "optimizer.lr": 0.05, "precision.loss_scale.init": 256.0}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
WINDOW = batch(X, torch.arange(8) % 4)
IDS = batch(torch.arange(32).reshape(8, 4) % 10, torch.arange(8) % 4)
SEQUENCE = batch(torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 4)

modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
half_modes = pytest.mark.parametrize("mode", HALF.values(), ids=HALF)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def keys(mode: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A mode with plain SGD and, where the mode has one, a scale that does not overflow."""
    scale = {} if mode in ({}, BF16) else {"precision.loss_scale.init": 256.0}
    return {**mode, **SGD, "optimizer.lr": 0.05, **scale, **more}


def seeded(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build()


def tensors(state) -> dict[str, Tensor]:
    """Copies of all that a skipped window, an evaluation or an observation must leave as it was."""
    found = {f"θ.{name}": p for name, p in state.model.named_parameters()}
    found |= {f"M.{name}": p for name, p in state.weights}
    found |= {f"buffer.{name}": value for name, value in state.model.named_buffers()}
    if state.ema is not None:
        found |= {f"ema.{name}": value for name, value in state.ema.shadow.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def skip(state, window=WINDOW) -> None:
    """A window of two micro-batches that is not applied: its loss is NaN."""
    weight, state.loss_weight = state.loss_weight, float("nan")
    assert not train_step(state, [window, window]).read().applied
    state.loss_weight = weight


def through_a_checkpoint(state, build, make, path):
    """The state of a new process that resumed from where ``state`` is."""
    checkpoint.save(checkpoint.snapshot(state), path)
    fresh = make(seeded(build))
    checkpoint.restore(fresh, checkpoint.load(path), path=path)
    return fresh


def near_fp32(make_state, build, mode, window=WINDOW, *, tolerance=2e-2, **more):
    """Loss and every gradient of one window against those of the same model in float32."""
    expected_loss, expected = gradients(make_state(seeded(build), **keys({})), window)
    state = make_state(seeded(build), **keys(mode, **more))
    check_plan(state, observe(state, window))
    loss, found = gradients(state, window)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert found.keys() == expected.keys()
    overall = torch.stack([grad.abs().norm() for grad in expected.values()]).norm()
    for name, grad in found.items():
        error = (grad.to(expected[name].dtype) - expected[name]).abs().norm()
        assert error < tolerance * max(expected[name].abs().norm(), 0.3 * overall), name
    return state


# --- buffers --------------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """A linear layer and a buffer ``q``; subclasses say how it starts, what a forward does to it and how it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.start()

    def start(self) -> None:
        self.register_buffer("q", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.touch(y.detach().float().mean(0))
        return y if getattr(self, "q", None) is None else y + 0.01 * self.q.float().mean().to(y.dtype)

    def touch(self, mean: Tensor) -> None:
        raise NotImplementedError


class Grows(Buffered):
    def start(self) -> None:
        self.register_buffer("q", torch.zeros(0, 4))

    def touch(self, mean: Tensor) -> None:
        self.q = torch.cat([self.q, mean[None]])


class FilledLate(Buffered):
    def start(self) -> None:
        self.register_buffer("q", None)

    def touch(self, mean: Tensor) -> None:
        self.q = mean if self.q is None else 0.9 * self.q + 0.1 * mean


class RegisteredLate(Buffered):
    def start(self) -> None:
        pass

    def touch(self, mean: Tensor) -> None:
        if not hasattr(self, "q"):
            self.register_buffer("q", mean)


class RegisteredLateUnsaved(RegisteredLate):
    def touch(self, mean: Tensor) -> None:
        if not hasattr(self, "q"):
            self.register_buffer("q", mean, persistent=False)


class Assigned(Buffered):
    def touch(self, mean: Tensor) -> None:
        self.q = 0.9 * self.q + 0.1 * mean


class ChangesDtype(Buffered):
    def touch(self, mean: Tensor) -> None:
        self.q = self.q.double() + mean


class Removed(Buffered):
    def touch(self, mean: Tensor) -> None:
        if hasattr(self, "q") and self.training:
            del self.q


class Resized(Buffered):
    def touch(self, mean: Tensor) -> None:
        self.q.resize_(self.q.numel() + 1).fill_(mean.mean())


class OtherData(Buffered):
    def touch(self, mean: Tensor) -> None:
        self.q.data = self.q.data + mean


class Counts(Buffered):
    def start(self) -> None:
        self.register_buffer("q", torch.zeros(4, dtype=torch.int64), persistent=False)

    def touch(self, mean: Tensor) -> None:
        self.q += (mean > 0).long() + 1


class Flips(Buffered):
    def start(self) -> None:
        self.register_buffer("q", torch.zeros(4, dtype=torch.bool))

    def touch(self, mean: Tensor) -> None:
        self.q.logical_not_()


class Turns(Buffered):
    def start(self) -> None:
        self.register_buffer("q", torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.q.mul_(1j)
        return y + 0.1 * self.q.real.to(y.dtype)


class Expanded(Buffered):
    def start(self) -> None:
        self.register_buffer("q", torch.ones(1).expand(4))

    def touch(self, mean: Tensor) -> None:
        pass


class ExpandedThenAssigned(Expanded):
    def touch(self, mean: Tensor) -> None:
        self.q = self.q * 1.01


class Views(Buffered):
    def start(self) -> None:
        self.register_buffer("base", torch.zeros(6))
        self.register_buffer("q", self.base[:4])

    def touch(self, mean: Tensor) -> None:
        self.base += 1


class MovesInEvaluation(Buffered):
    def touch(self, mean: Tensor) -> None:
        if not self.training:
            self.q += 1


KINDS = [Grows, FilledLate, RegisteredLate, RegisteredLateUnsaved, Assigned, ChangesDtype, Removed, Resized, OtherData, Counts,
         Flips, Turns, Expanded, ExpandedThenAssigned, Views, MovesInEvaluation]  # fmt: skip


@modes
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_a_forward_does_to_a_buffer_is_undone_averaged_and_resumed(make_state, tmp_path, kind, mode):
    def make(model):
        return make_state(model, **keys(mode, **{"train.ema.decay": 0.5}))

    state = make(seeded(kind))
    untouched = tensors(state)
    check_plan(state, observe(state, WINDOW))
    skip(state)
    eval_step(state, state.policy, [WINDOW, WINDOW])
    assert same(tensors(state), untouched), "before the first step"
    for _ in range(2):
        assert train_step(state, [WINDOW]).read().applied
    before = tensors(state)
    skip(state)
    assert same(tensors(state), before), "a skipped window"
    scores = []
    for _ in range(2):
        scores.append(eval_step(state, state.policy, [WINDOW, WINDOW]))
        with state.ema.swapped_in(state.model):
            scores.append(eval_step(state, state.policy, [WINDOW, WINDOW]))
    assert scores[:2] == scores[2:]
    assert same(tensors(state), before), "an evaluation"
    resumed = through_a_checkpoint(state, kind, make, tmp_path / "a.pt")
    assert same(tensors(resumed), before), "a checkpoint"
    losses = [[train_step(s, [WINDOW]).read().loss for _ in range(2)] for s in (state, resumed)]
    assert losses[0] == losses[1]
    assert same(tensors(resumed), tensors(state)), "the resumed run"
    for name, value in state.model.named_buffers():
        if name in state.ema.shadow and not (value.is_floating_point() or value.is_complex()):
            assert torch.equal(state.ema.shadow[name], value), "copied, not averaged"


def test_complex_weights_are_averaged_like_real_ones(make_state):
    """A complex number is a pair of real ones; a copy would be no average."""
    start, moved = (
        torch.complex(torch.ones(3, 2), torch.zeros(3, 2)),
        torch.complex(torch.zeros(3, 2), torch.ones(3, 2)),
    )
    for shape in (lambda t: t, lambda t: t.T, lambda t: t.conj().conj_physical(), lambda t: t.to(torch.complex128)):
        ema = Ema([("w", shape(start))], decay=0.75, warmup=False, device=torch.device("cpu"))
        ema.update([("w", shape(moved))], torch.tensor(False))
        assert torch.equal(ema.shadow["w"], shape(start))
        ema.update([("w", shape(moved))], torch.tensor(True))
        expected = torch.complex(torch.full((3, 2), 0.75), torch.full((3, 2), 0.25))
        assert torch.equal(ema.shadow["w"], shape(expected).to(torch.complex64))


def test_the_average_takes_over_a_buffer_that_appears_or_grows(make_state):
    state = make_state(seeded(FilledLate), **keys({}, **{"train.ema.decay": 0.5, "train.ema.warmup": False}))
    assert "q" not in state.ema.shadow
    skip(state)
    assert "q" not in state.ema.shadow, "nothing was applied"
    values = []
    for _ in range(2):
        train_step(state, [WINDOW])
        values.append(state.model.q.clone())
    assert torch.equal(state.ema.shadow["q"], torch.lerp(values[0], values[1], 0.5))
    state = make_state(seeded(Grows), **keys({}, **{"train.ema.decay": 0.5}))
    for _ in range(3):
        train_step(state, [WINDOW])
    assert torch.equal(state.ema.shadow["q"], state.model.q)
    assert state.model.q.shape == (3, 4)


@modes
@pytest.mark.parametrize(
    "kind", [Grows, FilledLate, Assigned, Counts, Expanded, OtherData], ids=lambda kind: kind.__name__
)
def test_a_block_that_is_computed_twice_moves_its_buffers_once(make_state, mode, kind):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.back = kind(), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.back(self.inner(x))

    def build():
        return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(6, 4))

    plain = make_state(seeded(build), **keys(mode))
    again = make_state(seeded(build), **keys(mode, **{"model.activation_checkpointing": True}))
    losses = [[train_step(state, [WINDOW, WINDOW]).read().loss for _ in range(3)] for state in (plain, again)]
    assert losses[0] == losses[1]
    assert same(tensors(plain), tensors(again))


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
def test_a_sparse_buffer_is_left_alone(make_state, tmp_path):
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)
            self.register_buffer("edges", torch.eye(8).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, self.a(x).float())

    def make(model):
        return make_state(model, **keys(MASTER, **{"train.ema.decay": 0.5}))

    state = make(seeded(Graph))
    train_step(state, [WINDOW])
    skip(state)
    eval_step(state, state.policy, [WINDOW])
    resumed = through_a_checkpoint(state, Graph, make, tmp_path / "a.pt")
    assert resumed.model.edges.is_sparse
    assert train_step(resumed, [WINDOW]).read().loss == train_step(state, [WINDOW]).read().loss


def test_a_resume_into_a_model_without_a_place_for_a_late_buffer_is_refused(make_state, tmp_path):
    state = make_state(seeded(RegisteredLate), **keys({}))
    train_step(state, [WINDOW])
    checkpoint.save(checkpoint.snapshot(state), tmp_path / "a.pt")

    class Other(RegisteredLate):
        def start(self) -> None:
            self.q = "taken"

    with pytest.raises(MprunError, match="no place for its buffer q"):
        checkpoint.restore(make_state(Other(), **keys({})), checkpoint.load(tmp_path / "a.pt"), path=tmp_path / "a.pt")


def test_evaluation_that_begins_to_write_later_is_named(make_state):
    class Late(Buffered):
        calls = 0

        def touch(self, mean: Tensor) -> None:
            Late.calls += not self.training
            if Late.calls == 2:
                self.q += 1

    state = make_state(seeded(Late), **keys({}))
    with pytest.raises(ConfigError, match=r"evaluation wrote to the buffer q, but not in its first batch"):
        eval_step(state, state.policy, [WINDOW, WINDOW])


def test_evaluation_that_writes_past_the_version_counter_moves_nothing(make_state):
    """``buffer.data.add_()`` is an old habit, and leaves no trace in the tensor's version."""

    class Data(Buffered):
        def touch(self, mean: Tensor) -> None:
            self.q.data.add_(1)

    state = make_state(seeded(Data), **keys({}))
    before = state.model.q.clone()
    for batches in (1, 3):
        eval_step(state, state.policy, [WINDOW] * batches)
        assert torch.equal(state.model.q, before)


# --- state beside tensors -------------------------------------------------------------------------------------------------


class Extra(nn.Module):
    """Counts its training passes in plain Python, and saves the count as extra state."""

    def __init__(self, wrap: Any = lambda n: {"n": n, "names": ["a"]}) -> None:
        super().__init__()
        self.a, self.n, self.wrap = nn.Linear(6, 4), 0, wrap

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.a(x) * (1 + 0.01 * self.n)

    def get_extra_state(self) -> Any:
        return self.wrap(self.n)

    def set_extra_state(self, state: Any) -> None:
        self.n = state["n"]


@modes
def test_extra_state_is_undone_and_resumed(make_state, tmp_path, mode):
    def make(model):
        return make_state(model, **keys(mode))

    state = make(seeded(Extra))
    observe(state, WINDOW)
    train_step(state, [WINDOW])
    skip(state)
    eval_step(state, state.policy, [WINDOW])
    assert state.model.n == 1
    resumed = through_a_checkpoint(state, Extra, make, tmp_path / "a.pt")
    assert resumed.model.n == 1
    assert train_step(resumed, [WINDOW]).read().loss == train_step(state, [WINDOW]).read().loss
    checkpoint.load_init(Extra(), tmp_path / "a.pt")


def test_nothing_of_a_model_lies_in_its_checkpoint_any_more(make_state, tmp_path):
    """Reading maps the file. A module keeps the very tensor that ``set_extra_state`` gets; if it lay in the file, whoever writes
    over the file would end the process."""

    class Keeps(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)
            self.kept = torch.arange(5000.0)

        def get_extra_state(self) -> Any:
            return {"kept": [self.kept]}

        def set_extra_state(self, state: Any) -> None:
            (self.kept,) = state["kept"]

    path = tmp_path / "a.pt"
    checkpoint.save(checkpoint.snapshot(make_state(Keeps())), path)
    state, started = make_state(Keeps()), Keeps()
    checkpoint.restore(state, checkpoint.load(path), path=path)
    checkpoint.load_init(started, path)
    path.write_bytes(b"another file")
    assert torch.equal(state.model.kept, torch.arange(5000.0))
    assert torch.equal(started.kept, torch.arange(5000.0))


def test_extra_state_that_a_checkpoint_cannot_hold_is_refused(make_state):
    class GetOnly(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    for model, words in [
        (Extra(lambda n: {"n": {1, 2}}), "holds a set"),
        (Extra(lambda n: [object()]), "holds a object"),
        (Extra(lambda n: len), "holds a builtin_function"),
        (GetOnly(6, 4), "no set_extra_state"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_state(model)


# --- models that cannot be trained as they arrive, or do not stay the same ----------------------------------------------------


def tied_by_a_view(view: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(view(model[0].weight.detach()))
    return model


def with_parameter(tensor: Tensor) -> nn.Module:
    model = nn.Linear(6, 4)
    model.extra = nn.Parameter(tensor)
    return model


def with_aliasing_buffer() -> nn.Module:
    model = nn.Linear(6, 4)
    model.register_buffer("alias", model.weight.detach()[1:])
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@modes
@pytest.mark.parametrize(("build", "words"), [
    (lambda: tied_by_a_view(lambda w: w), "0.weight and 1.weight are two tensors in the same memory"),
    (lambda: tied_by_a_view(lambda w: w.t()), "0.weight and 1.weight"),
    (with_aliasing_buffer, "weight and alias are two tensors"),
    (lambda: with_parameter(torch.zeros(1).expand(4)), "parameter extra is expanded"),
    (lambda: with_parameter(torch.zeros(4, dtype=torch.float64)), "extra arrives as float64, not float32"),
    (lambda: with_parameter(torch.zeros(4, dtype=torch.complex128)), "extra arrives as complex128, not complex64"),
    (lambda: with_parameter(torch.zeros(4, device="meta")), "parameter extra has no values yet"),
    (lambda: nn.Sequential(nn.LazyLinear(4)), "parameter 0.weight has no values yet"),
    (lambda: nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False)), "buffer 1.running_mean has no values yet"),
    (lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 4))), r"0 is TorchScript \(RecursiveScriptModule\)"),
    (lambda: torch.jit.trace(nn.Linear(6, 4), X), "the model is TorchScript"),
], ids=["view", "transposed view", "buffer", "expanded", "float64", "complex128", "meta", "lazy", "lazy norm", "script", "trace"])  # fmt: skip
def test_what_cannot_be_trained_right_is_refused_by_name(make_state, build, words, mode):
    with pytest.raises(ConfigError, match=words) as caught:
        make_state(build(), **keys(mode))
    assert len(str(caught.value).splitlines()) == 1


@modes
def test_what_looks_odd_but_is_not(make_state, mode):
    """Disjoint pieces of one memory, one parameter under two names, parameters of no and of one element, unused ones."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(6 * 8 + 8 * 4) * 0.3
            self.w1, self.w2 = nn.Parameter(flat[:48].view(8, 6)), nn.Parameter(flat[48:].view(4, 8))
            both = torch.randn(4, 8) * 0.3
            self.left, self.right = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
            self.again = self.w1
            self.none, self.scalar, self.unused = (nn.Parameter(torch.ones(s)) for s in ((0, 4), (), (3, 3)))

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(F.linear(x, self.again).tanh(), self.w2) * self.scalar + self.none.sum()
            return x @ (self.left @ self.right.t())

    state = near_fp32(make_state, Odd, mode)
    assert state.model.again is state.model.w1
    assert "unused" not in checkpoint.optimizer_state(state) or torch.equal(
        state.model.unused.float(), torch.ones(3, 3)
    )


class Changing(nn.Module):
    """Does something to its parameters at pass ``at``."""

    def __init__(self, what: Any, at: int) -> None:
        super().__init__()
        self.a, self.b, self.what, self.at, self.calls = nn.Linear(6, 6), nn.Linear(6, 4), what, at, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == self.at:
            self.what(self)
        self.calls += 1
        return self.b(self.a(x).tanh())


CHANGES = {
    "adds the parameter c": lambda m: setattr(m, "c", nn.Parameter(torch.zeros(3))),
    "adds the parameter c.weight": lambda m: setattr(m, "c", nn.Linear(2, 2)),
    "exchanges the parameter a.weight": lambda m: setattr(m.a, "weight", nn.Parameter(m.a.weight.detach().clone())),
    "removes the parameter a.bias": lambda m: setattr(m.a, "bias", None),
    "a.weight was frozen during training": lambda m: m.a.requires_grad_(False),
}


@modes
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("words", CHANGES)
def test_a_model_whose_parameters_change_is_refused_at_once(make_state, words, at, mode):
    state = make_state(Changing(CHANGES[words], at), **keys(mode))
    look = observe if at == 0 else lambda state, window: [train_step(state, [window]) for _ in range(at + 1)]
    with pytest.raises(ConfigError, match=words):
        look(state, WINDOW)


def test_unfreezing_during_training_is_refused(make_state):
    model = Changing(lambda m: m.a.requires_grad_(True), 1)
    model.a.requires_grad_(False)
    state = make_state(model, **keys(FP16))
    train_step(state, [WINDOW])
    with pytest.raises(ConfigError, match=r"a\.weight was unfrozen during training.*model\.init"):
        train_step(state, [WINDOW])


def all_in_eval() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()


def root_in_train() -> nn.Module:
    model = all_in_eval()
    model.training = True
    return model


def test_a_model_in_eval_mode_as_a_whole_is_refused_and_a_part_of_it_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["trust=[tests]", "tracking=disabled", "device=cpu", "model=python", "dataset=python", "train.epochs=1",
             "dataset.name=tests.case_code:rows", "train.batch_size=8"]  # fmt: skip
    assert main([*words, "model.name=tests.test_odd_models:all_in_eval"]) == 2
    assert "arrives in eval() mode" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*words, "model.name=tests.test_odd_models:root_in_train"]) == 0


# --- parameters that the forward pass writes to -----------------------------------------------------------------------------


def with_max_norm() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 6, max_norm=1.0), nn.Flatten(), nn.Linear(24, 4))


@pytest.mark.parametrize("mode", [{}, FP16, PURE], ids=["full", "fp16", "pure"])
def test_max_norm_moves_nothing_but_in_an_applied_step(make_state, mode):
    state = make_state(seeded(with_max_norm), **keys(mode, **{"train.ema.decay": 0.5}))
    before = tensors(state)
    observe(state, IDS)
    skip(state, IDS)
    eval_step(state, state.policy, [IDS, IDS])
    assert same(tensors(state), before)
    train_step(state, [IDS])
    norms = state.model[0].weight.float().norm(dim=1)
    assert bool((norms < 1.2).all()), "renormalised, then one step"
    if not mode:
        plain = seeded(with_max_norm)
        F.cross_entropy(plain(IDS.inputs), IDS.targets).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.05 * p.grad
        for p, q in zip(plain.parameters(), state.model.parameters(), strict=True):
            torch.testing.assert_close(q, p)


def test_a_write_that_a_master_would_not_see_is_refused_and_the_rule_helps(make_state):
    state = make_state(seeded(with_max_norm), **keys(MASTER))
    with pytest.raises(PrecisionError, match=r"parameter 0\.weight .*max_norm.*precision\.fp32_modules=\[0\]"):
        observe(state, IDS)
    near_fp32(make_state, with_max_norm, MASTER, IDS, **{"precision.fp32_modules": ["0"]})


# --- parametrizations ---------------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def parametrized(kind: Any) -> Any:
    return lambda: nn.Sequential(kind(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 4))


PARAMETRIZATIONS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "a user's own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
}


@pytest.mark.parametrize("mode", [FP16, MASTER], ids=["fp16", "master"])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS)
def test_parametrizations_are_float32_and_their_layers_are_not(make_state, tmp_path, kind, mode):
    state = near_fp32(make_state, parametrized(kind), mode)
    table = {row["module"]: row for row in observe(state, WINDOW)}
    assert table["0"]["compute_dtype"] == "float16"
    originals = [p.dtype for name, p in state.model.named_parameters() if "parametrizations" in name]
    assert set(originals) == {torch.float32}
    if mode is MASTER:
        assert table["0.parametrizations.weight"]["rule"] == "parametrization"
        assert not any("parametrizations" in name for name in state.weights.by_name), "their own masters"
    before = tensors(state)
    skip(state)
    assert same(tensors(state), before), "the vectors of a power iteration come back too"
    twin = copy.deepcopy(state.model)
    for model in (twin, state.model):
        model.eval()
    x = state.policy.cast_inputs(X)
    with torch.no_grad(), state.policy.region("cpu"):
        assert torch.equal(twin(x), state.model(x))


# --- what half cannot do is told, with the module and a cure ---------------------------------------------------------------------


class Op(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def around(function: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(6, 8), Op(function), nn.Linear(8, 4))


def spd(x: Tensor) -> Tensor:
    return x.T @ x + torch.eye(8, dtype=x.dtype)


NO_KERNEL = {
    "inverse": lambda x: x @ torch.linalg.inv(spd(x)),
    "solve": lambda x: torch.linalg.solve(spd(x), x.T).T,
    "cholesky": lambda x: x @ torch.linalg.cholesky(spd(x)),
    "svd": lambda x: x * torch.linalg.svdvals(x)[0],
    "fft": lambda x: torch.fft.fft(x).abs(),
    "quantile": lambda x: x - x.quantile(0.5, dim=-1, keepdim=True),
    "log determinant": lambda x: x * torch.logdet(spd(x)),
}
MIXED = {
    "matmul": lambda x: x @ torch.eye(8),
    "index_put": lambda x: torch.zeros(8, 8).index_put((torch.arange(8),), x),
    "scatter_add": lambda x: torch.zeros(8, 8).scatter_add(0, torch.zeros(8, 8, dtype=torch.long), x),
    "lerp": lambda x: torch.lerp(x, torch.zeros(8, 8), 0.5),
}


@pytest.mark.parametrize("mode", [MASTER, PURE], ids=["master", "pure"])
@pytest.mark.parametrize(
    ("name", "function", "cure"),
    [(name, f, "x.float()") for name, f in NO_KERNEL.items()]
    + [(name, f, "dtype=x.dtype") for name, f in MIXED.items()],
)
def test_an_operation_that_half_cannot_do_is_told_and_the_rule_makes_it_right(make_state, name, function, cure, mode):
    state = make_state(seeded(around(function)), **keys(mode))
    with pytest.raises(RuntimeError) as caught:
        observe(state, WINDOW)
    text = dtype_trouble(caught.value, state)
    assert text is not None
    assert text.startswith("1 (Op, test_odd_models.py:")
    assert cure in text
    assert text.endswith("precision.fp32_modules=[1]")
    assert len(text.splitlines()) == 2
    near_fp32(make_state, around(function), mode, tolerance=6e-2, **{"precision.fp32_modules": ["1"]})


def test_a_type_error_about_a_half_dtype_is_told_and_other_errors_are_not(make_state):
    state = make_state(seeded(around(lambda x: x + float(x.detach().numpy().max()) * 0)), **keys({**BF16, "precision.mode": "master", "precision.param_dtype": "bfloat16"}))  # fmt: skip
    with pytest.raises(TypeError) as caught:
        observe(state, WINDOW)
    assert "1 (Op, " in dtype_trouble(caught.value, state)
    for function in (
        lambda x: x @ torch.ones(3, 3, dtype=x.dtype),
        lambda x: F.embedding(x, torch.ones(3, 8)),
        lambda x: 1 / 0,
    ):
        state = make_state(seeded(around(function)), **keys(MASTER))
        with pytest.raises(Exception, match=r".") as caught:
            observe(state, WINDOW)
        assert dtype_trouble(caught.value, state) is None


class Product(torch.autograd.Function):
    """Saves what it was given: under autocast its backward meets a half gradient and a float32 weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class CastProduct(Product):
    """The same with torch's decorators."""

    forward = staticmethod(torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)(Product.forward))
    backward = staticmethod(torch.amp.custom_bwd(device_type="cpu")(Product.backward))


class Multiplies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(8, 8) * 0.3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.w)


def test_a_function_with_a_backward_of_its_own(make_state):
    def build(function):
        return lambda: nn.Sequential(nn.Linear(6, 8), Multiplies(function), nn.Linear(8, 4))

    state = make_state(seeded(build(Product)), **keys(FP16))
    with pytest.raises(RuntimeError) as caught:
        train_step(state, [WINDOW])
    text = dtype_trouble(caught.value, state)
    assert text.startswith("the backward of Product (test_odd_models.py:")
    assert "custom_fwd" in text
    for mode in HALF.values():
        near_fp32(make_state, build(CastProduct), mode)
        near_fp32(make_state, build(Product), mode, **{"precision.fp32_modules": ["1"]})


# --- borders ------------------------------------------------------------------------------------------------------------------


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.inner(x)


class Residual(nn.Module):
    """Uses what a sub-module wrote into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Linear(6, 8), WritesInput(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y + self.r(y))


@half_modes
def test_writing_into_the_input_in_place_reaches_it_through_a_cast(make_state, mode):
    near_fp32(make_state, Residual, mode, **{"precision.fp32_modules": ["r"]})
    state = make_state(seeded(Residual), **keys(mode, **{"precision.fp32_modules": ["r"]}))
    state.forward = nn.Sequential(state.model)  # as torch.compile gives another module
    with pytest.raises(OverrideError, match=r"r \(WritesInput\) writes into its input in place"):
        observe(state, WINDOW)


@dataclass(frozen=True)
class Carried:
    y: Tensor
    more: dict[str, Tensor]
    number: int = 3


class Boxed(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, *, box: Carried) -> Carried:
        assert box.y.dtype == box.more["z"].dtype
        return Carried(self.inner(box.y + box.more["z"]), box.more)


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Linear(6, 8), Boxed(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        out = self.r(box=Carried(x, {"z": x.detach()}))
        return self.b(self.r(box=out).y)


@half_modes
def test_dataclasses_and_keywords_are_cast_at_borders(make_state, mode):
    near_fp32(make_state, Boxes, mode)
    state = near_fp32(make_state, Boxes, mode, **{"precision.fp32_modules": ["r"]})
    seen = []
    state.model.r.register_forward_hook(
        lambda m, args, out: seen.append((out.y.dtype, out.more["z"].dtype, out.number))
    )
    train_step(state, [WINDOW])
    outside = torch.float32 if mode is FP16 else torch.float16
    assert set(seen) == {(outside, outside, 3)}


class Encoder(nn.Module):
    """Its inner module is reached past its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.r(self.r.encode(x))


@half_modes
def test_a_module_inside_an_fp32_module_is_fp32_when_called_from_elsewhere(make_state, mode):
    state = near_fp32(make_state, Outer, mode, **{"precision.fp32_modules": ["r"]})
    assert {row["compute_dtype"] for row in observe(state, WINDOW) if row["module"].startswith("r.")} == {"float32"}


class Tagged(Tensor):
    """A tensor subclass that spreads over everything computed from it."""


def test_a_tensor_subclass_does_not_spread_into_the_state(make_state, tmp_path):
    class Tags(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).as_subclass(Tagged)

    state = make_state(seeded(lambda: Tags(6, 4)), **keys(FP16))
    train_step(state, [WINDOW])
    assert type(state.applied) is Tensor
    checkpoint.save(checkpoint.snapshot(state), tmp_path / "a.pt")
    assert checkpoint.load(tmp_path / "a.pt")["step"] == 0  # counted by the loop, which is not here


@modes
@pytest.mark.parametrize(("wrong", "words"), [
    (lambda y: (y, y), "returned a tuple"), (lambda y: None, "returned a NoneType"), (lambda y: {"logits": y}, "returned a dict"),
    (lambda y: Carried(y, {}), "returned a Carried"), (lambda y: iter([y]), "returned a list_iterator"),
    (lambda y: y.float().to(torch.complex64), "returned a complex64 tensor"),
], ids=["tuple", "none", "dict", "dataclass", "iterator", "complex"])  # fmt: skip
def test_an_output_without_a_loss_is_refused_before_the_run(make_state, wrong, words, mode):
    state = make_state(nn.Sequential(nn.Linear(6, 4), Op(wrong)), **keys(mode))
    with pytest.raises(ConfigError, match=words):
        observe(state, WINDOW)


class CountsNames(nn.Module):
    """A base class that wants an argument of its subclasses."""

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)


class Named(CountsNames, tag="a"):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


class SuperOfType(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super(type(self), self).forward(x)


def test_classes_that_bear_no_subclass_are_named(make_state):
    with pytest.raises(OverrideError, match=r"Named cannot be subclassed \(TypeError"):
        make_state(Named(), **keys(MASTER))
    near_fp32(make_state, Named, FP16)
    state = make_state(nn.Sequential(SuperOfType(6, 4)), **keys(MASTER))
    with pytest.raises(RecursionError) as caught:
        observe(state, WINDOW)
    assert "0 (SuperOfType, " in (text := dtype_trouble(caught.value, state))
    assert "write super()" in text


def pickled_net() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)]
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks), norm=nn.LayerNorm(6), head=nn.Linear(6, 4)))


@modes
@pytest.mark.parametrize("again", [pickle.loads, None], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_prepared_model_can_be_copied_and_pickled(make_state, mode, again, recompute):
    rules = {"precision.fp32_modules": ["head"], "model.activation_checkpointing": recompute}
    state = make_state(seeded(pickled_net), **keys(mode, **rules))
    train_step(state, [WINDOW])
    twin = pickle.loads(pickle.dumps(state.model)) if again else copy.deepcopy(state.model)
    assert [type(module) for module in twin.modules()] == [type(module) for module in state.model.modules()]
    for model in (twin, state.model):
        model.eval()
    with torch.no_grad(), state.policy.region("cpu"):
        x = state.policy.cast_inputs(X)
        assert torch.equal(twin(x), state.model(x))


# --- everything else trains near FP32 ---------------------------------------------------------------------------------------------


class Through(nn.Module):
    """A module between two linear layers, used in a given way."""

    def __init__(self, inner: nn.Module, use: Any, width: int = 8) -> None:
        super().__init__()
        self.a, self.inner, self.b, self.use = nn.Linear(6, 8), inner, nn.Linear(width, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.use(self.inner, self.a(x)))


def stepped(cell: Any, x: Tensor) -> Tensor:
    state = None
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
    return state[0] if isinstance(state, tuple) else state


def packed(rnn: Any, x: Tensor) -> Tensor:
    lengths = torch.tensor([5, 4, 3, 3, 2, 2, 1, 1])
    out, _ = rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].sum(1)


def uncast(inner: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.exp(-inner(x.float()).square()).to(x.dtype)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 8))


SEQUENCES = {
    "LSTM": lambda: Through(nn.LSTM(8, 8, batch_first=True), lambda m, x: m(x)[0][:, -1]),
    "GRU, two layers, both ways": lambda: Through(nn.GRU(8, 8, 2, batch_first=True, bidirectional=True), lambda m, x: m(x)[0][:, -1], 16),
    "RNN": lambda: Through(nn.RNN(8, 8, batch_first=True), lambda m, x: m(x)[0][:, -1]),
    "packed LSTM": lambda: Through(nn.LSTM(8, 8, batch_first=True), packed),
    "LSTMCell": lambda: Through(nn.LSTMCell(8, 8), stepped),
    "GRUCell": lambda: Through(nn.GRUCell(8, 8), stepped),
    "attention": lambda: Through(nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)[0].mean(1)),
    "encoder": lambda: Through(nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True), lambda m, x: m(x).mean(1)),
    "decoder": lambda: Through(nn.TransformerDecoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True), lambda m, x: m(x, x).mean(1)),
}  # fmt: skip
ROWS = {
    "Bilinear": lambda: Through(nn.Bilinear(8, 8, 8), lambda m, x: m(x, x)),
    "Bilinear of the input": lambda: nn.Sequential(Op(lambda x: x), Squares()),
    "PReLU": lambda: Through(nn.PReLU(), lambda m, x: m(x)),
    "transposed convolution": lambda: Through(nn.ConvTranspose1d(1, 2, 3), lambda m, x: m(x[:, None]).flatten(1), 20),
    "circular convolution": lambda: Through(nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"), lambda m, x: m(x[:, None]).flatten(1), 16),
    "adaptive softmax": lambda: Through(nn.AdaptiveLogSoftmaxWithLoss(8, 8, [2]), lambda m, x: m.log_prob(x)),
    "instance norm": lambda: Through(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), lambda m, x: m(x.view(8, 2, 4)).flatten(1)),
    "one module twice": lambda: Through(nn.Linear(8, 8), lambda m, x: m(m(x).tanh())),
    "autocast switched off": lambda: Through(nn.Identity(), uncast),
    "checkpoint": lambda: Through(block(), lambda m, x: recomputed(m, x, use_reentrant=False)),
    "reentrant checkpoint": lambda: Through(block(), lambda m, x: recomputed(m, x, use_reentrant=True) if x.requires_grad else m(x)),
}  # fmt: skip


class Squares(nn.Module):
    """A bilinear form of the raw input, which autocast promotes to float32, the widest of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


@half_modes
@pytest.mark.parametrize("name", [*SEQUENCES, *ROWS])
def test_modules_that_are_not_plain_layers_train_near_fp32(make_state, name, mode):
    build = {**SEQUENCES, **ROWS}[name]
    torch.manual_seed(5)  # dropout of both runs
    near_fp32(make_state, build, mode, SEQUENCE if name in SEQUENCES else WINDOW, tolerance=3e-2)


@pytest.mark.parametrize("name", ["spectral", "weight"])
def test_old_norms_by_hook_train_or_say_which_rule(make_state, name):
    """Their power iteration mixes float32 buffers with the half weight of master mode."""

    def build():
        with pytest.warns() if name == "weight" else pytest.MonkeyPatch.context():
            old = getattr(nn.utils, f"{name}_norm")(nn.Linear(6, 8))
        return nn.Sequential(old, nn.Tanh(), nn.Linear(8, 4))

    near_fp32(make_state, build, FP16)
    if name == "weight":
        near_fp32(make_state, build, MASTER)
        return
    state = make_state(seeded(build), **keys(MASTER))
    with pytest.raises(RuntimeError) as caught:
        observe(state, WINDOW)
    assert dtype_trouble(caught.value, state).endswith("precision.fp32_modules=[0]")
    near_fp32(make_state, build, MASTER, **{"precision.fp32_modules": ["0"]})
