"""The probe, held against hooks of the tests' own and float64; and that it changes nothing and leaves nothing behind."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.cli import main
from mprun.errors import ConfigError, MprunError
from mprun.numerics import stats as stats_module
from mprun.numerics.probe import Probe, Sample
from mprun.numerics.products import given_back
from mprun.numerics.sample import record, worst
from mprun.numerics.stats import Stats, stats
from mprun.numerics.watchable import select
from mprun.tracking import JsonlSink, RunInfo, read_metrics, read_probe
from mprun.training.env import capture_rng
from mprun.training.outcomes import underflow_advice
from mprun.training.result import OVERFLOW
from mprun.training.step import train_step
from tests.case_code import latest
from tests.conftest import BF16, FP16, SGD, batch
from tests.test_host_reads import Count

MASTER = {
    **FP16,
    "precision.name": "fp16_master_dynamic",
    "precision.mode": "master",
    "precision.param_dtype": "float16",
}
PURE = {**MASTER, "precision.name": "fp16_pure", "precision.mode": "pure"}
MODES = {"full": {}, "autocast": FP16, "bf16": BF16, "master": MASTER, "pure": PURE}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc(self.norm(x)).relu_())


class Net(nn.Module):
    """Blocks, an in-place activation after a module, and a head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(make: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def window(parts: int = 1, size: int = 5, width: int = 6) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    return [
        batch(torch.randn(size, width, generator=draw), torch.randint(0, 3, (size,), generator=draw))
        for _ in range(parts)
    ]


def sampled(state: Any, batches: list[Any], modules: tuple[str, ...] = ()) -> Sample:
    probe = Probe(modules)
    with probe.watch(state):
        train_step(state, batches, probe=probe)
    return probe.read()


def same(found: Stats, tensors: list[Tensor], factor: float = 1.0) -> bool:
    """Against float64, and the bins against frexp."""
    x = torch.cat([t.detach().reshape(-1).double() for t in tensors]) * factor
    finite = x[x.isfinite()]
    exponents = [math.frexp(v)[1] - 1 for v in finite[finite != 0].abs().tolist()]
    bins = tuple(exponents.count(e) for e in range(min(exponents), max(exponents) + 1)) if exponents else ()
    rms = float(finite.square().mean().sqrt()) if len(finite) else 0.0
    assert (found.count, found.zeros, found.nonfinite) == (len(x), int((x == 0).sum()), len(x) - len(finite))
    assert found.amax == (float(finite.abs().max()) if len(finite) else 0.0)
    assert math.isclose(found.rms, rms, rel_tol=1e-5, abs_tol=1e-30)
    assert found.bins == bins
    assert not bins or found.low == min(exponents)
    return True


def hooks_left(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks)
        for m in model.modules()
    ) + sum(len(p._backward_hooks or ()) for p in model.parameters())


# --- numbers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_the_numbers_are_those_that_hooks_see(make_state, mode: str, accumulate: int) -> None:
    """Every module's output and its gradient, every parameter, gradient and update; unscaled, in float64."""
    keys = {**MODES[mode], **SGD, "optimizer.lr": 0.5, "train.clip_norm": 0.01}
    batches = window(accumulate)
    state = make_state(made(Net), **keys)
    torch.manual_seed(1)
    found = sampled(state, batches)

    twin = make_state(made(Net), **keys)
    seen: dict[tuple[str, str], list[Tensor]] = {}

    def keep(path: str, name: str, tensor: Tensor) -> None:
        seen.setdefault((path, name), []).append(tensor.detach().clone())

    for path, module in twin.model.named_modules():
        if isinstance(module, nn.ModuleList):
            continue

        def leave(module: nn.Module, args: Any, output: Tensor, path: str = path) -> Any:
            output = output.float() if module is twin.model else output
            keep(path, "input", args[0]) if path != "act" else None
            keep(path, "activation", output)
            output.register_hook(lambda grad: keep(path, "activation_grad", grad))
            return output

        module.register_forward_hook(leave)
    before = {name: truth.detach().clone() for name, truth in twin.weights}
    used = {name: p.detach().clone() for name, p in twin.model.named_parameters()}
    taken: dict[str, Tensor] = {}

    class Eavesdropper:
        def gradients(self, state: Any) -> None:
            taken.update({name: truth.grad.clone() for name, truth in state.weights})

        def updates(self, state: Any, applied: Tensor) -> None:
            pass

    torch.manual_seed(1)
    s = float(twin.scale.scale)
    train_step(twin, batches, probe=Eavesdropper())  # type: ignore[arg-type]

    assert (found.step, found.attempt, found.loss_scale, found.applied) == (1, 1, s, True)
    for (path, name), tensors in seen.items():
        assert same(found.modules[path][name], tensors, 1 / s if name.endswith("_grad") else 1.0), (path, name)
    for name, truth in twin.weights:
        path, _, own = name.rpartition(".")
        assert same(found.modules[path][own], [used[name]])
        assert same(found.modules[path][f"{own}_grad"], [taken[name]], 1 / s)
        assert same(found.modules[path][f"{own}_update"], [truth.detach().float() - before[name].float()])
    names = {path for path, _ in seen}
    assert set(found.modules) == names
    assert all("activation_grad" in found.modules[path] for path in names)
    assert found.format == {"full": "float32", "bf16": "bfloat16"}.get(mode, "float16")


def test_an_in_place_activation_does_not_reach_what_came_before(make_state) -> None:
    found = sampled(make_state(made(Net)), window())
    assert found.modules["stem"]["activation"].zeros == 0
    assert found.modules["act"]["activation"].zeros > 0
    assert found.modules["act"]["input"] == found.modules["stem"]["activation"]


def test_what_a_product_gives_back_before_it_is_rounded() -> None:
    """Held against float64, for some rows, none of them twice; only where the module computes what its class says."""
    torch.manual_seed(0)
    linear = nn.Linear(5, 7)
    for count in (1, 2, 32, 33, 100, 1088):
        grad = torch.randn(count, 7).half()
        part = given_back(linear, grad, torch.Size((count, 5)))
        assert part is not None
        whole = grad.double() @ linear.weight.detach().double()
        far = torch.cdist(part.values.double(), whole)
        assert float(far.amin(1).max()) < 1e-5
        assert len(far.argmin(1).unique()) == len(part.values) == min(count, 32)
        assert part.of == pytest.approx(count / len(part.values))
    for conv, shape in (
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 9, 8)),
        (nn.Conv1d(4, 6, 3, dilation=2), (3, 4, 19)),
    ):
        x = torch.randn(shape, requires_grad=True)
        y = conv(x)
        grad = torch.randn_like(y).half()
        y.backward(grad.float())
        part = given_back(conv, grad, x.shape)
        assert part is not None
        assert torch.allclose(part.values, x.grad[:1], atol=1e-5)
        assert part.of == 3

    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :3]

    for module in (
        Odd(5, 7),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding="same"),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)),
    ):
        assert given_back(module, torch.ones(2, 7).half(), torch.Size((2, 5))) is None


@pytest.mark.parametrize(("size", "tokens"), [(64, 16), (32, 17), (64, 50), (96, 8)])
def test_the_rows_of_a_product_stand_for_all_tokens(size: int, tokens: int) -> None:
    """Where the first token alone has a gradient, as in front of a classifier, few of the rows have one."""
    grad = torch.zeros(size, tokens, 7)
    grad[:, 0] = 1
    part = given_back(nn.Linear(5, 7), grad.half(), torch.Size((size, tokens, 5)))
    assert part is not None
    seen = (part.values != 0).any(1).double().mean()
    assert abs(float(seen) - 1 / tokens) < 1.5 / 32


def test_what_a_product_gives_back_counts_as_often_as_there_are_rows(make_state) -> None:
    """So that modules weigh what they weigh in the run when they are taken together."""
    found = sampled(make_state(made(Net), **FP16), window(2, size=320)).modules
    for path in ("blocks.0.fc", "head"):
        assert found[path]["input_grad"].count == pytest.approx(2 * 320 * 8, rel=0.02)
        grad = sampled(make_state(made(Net), **FP16), window(2, size=20)).modules[path]["input_grad"]
        assert grad.rms > 0
        assert math.isclose(sum(grad.bins) + grad.zeros, grad.count)


@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Conv1d(4, 3, 2), nn.Flatten(), nn.Linear(9, 3)
        ),
    ],
)
def test_underflow_is_seen_where_it_happens(make_state, make: Any) -> None:
    """Gradients of 1e-9 are nothing in FP16 and normal numbers times S; a half tensor alone would show neither."""
    unscaled = {**FP16, "precision.loss_scale.kind": "none", "train.loss_weight": 3e-8}
    lost = record(sampled(make_state(made(make), **unscaled), window()))
    kept = record(
        sampled(
            make_state(
                made(make), **{**unscaled, "precision.loss_scale.kind": "dynamic", "precision.loss_scale.init": 2.0**24}
            ),
            window(),
        )
    )
    assert lost["precision/underflow_frac"] > 0.95
    assert lost["worst"][0][2] == "underflow_frac"
    assert kept["precision/underflow_frac"] < 0.02
    assert kept["precision/loss_scale"] == 2.0**24
    # In between the truth is known from FP32: the share of its activation gradients that FP16 would lose.
    near = {**unscaled, "train.loss_weight": 2e-6}
    told = record(sampled(make_state(made(make), **near), window()))["precision/underflow_frac"]
    model = made(make)
    truth = sampled(make_state(model, **{"train.loss_weight": 2e-6}), window()).gradients
    from mprun.numerics.formats import FORMATS

    assert abs(told - truth.underflow_frac(FORMATS["float16"])) < 0.25


# --- odd cases ---------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A shared module, tied weights, outputs that are no tensor, a module that is never called, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.twice = self.shared
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.many, self.nothing, self.never = Many(), Nothing(), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.nothing(x)
        out = self.many(self.twice(self.shared(x)), scale=torch.tensor(2.0))
        return self.head(self.frozen(self.second(self.first(out["a"] + out["b"][0]))))


class Many(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        return {"a": x * scale, "b": (x + 1, None), "n": torch.arange(3), "unused": x * 3}


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


@pytest.mark.parametrize("mode", MODES)
def test_odd_modules(make_state, mode: str) -> None:
    state = make_state(made(Odd), **MODES[mode])
    found = sampled(state, window()).modules
    assert found["shared"]["activation"].count == 2 * 5 * 6
    assert found["shared"]["activation_grad"].count == 2 * 5 * 6
    assert "twice" not in found
    assert found["many"]["activation"].count == 3 * 5 * 6
    assert found["many"]["activation_grad"].count == 2 * 5 * 6
    assert found["many"]["input"].count == 5 * 6 + 1
    assert "activation" not in found["nothing"]
    assert set(found["never"]) == {"weight", "bias"}
    assert {"weight", "weight_grad", "weight_update"} <= set(found["first"])
    assert not {"weight", "weight_grad"} & set(found["second"])
    assert {"weight", "bias", "activation", "activation_grad"} <= set(found["frozen"])
    assert not any(name.endswith(("weight_grad", "_update")) for name in found["frozen"])


def test_a_skipped_step_has_gradients_and_no_updates(make_state) -> None:
    state = make_state(made(Net), **{**FP16, "precision.loss_scale.init": 2.0**24})
    probe = Probe()
    batches = window()
    batches[0].inputs.mul_(1000)
    with probe.watch(state):
        result = train_step(state, batches, probe=probe)
    assert result.read().outcome == OVERFLOW
    found = probe.read()
    assert (found.applied, found.step, found.attempt) == (False, 0, 1)
    assert record(found)["precision/nonfinite_frac"] > 0
    head = found.modules["head"]
    assert "weight_grad" in head
    assert not any(name.endswith("_update") for tensors in found.modules.values() for name in tensors)
    assert record(found)["worst"][0][2] == "nonfinite_frac"
    json.dumps(record(found))


def test_a_recompute_does_not_count_twice(make_state) -> None:
    keys: dict[str, Any] = {}
    samples = []
    for wrapped in (False, True):
        state = make_state(made(Net), **keys, **{"model.activation_checkpointing": wrapped})
        torch.manual_seed(1)
        samples.append(sampled(state, window(2)))
    assert samples[0] == samples[1]


def test_checkpointing_of_the_older_kind(make_state) -> None:
    """It runs the first pass without a graph: the gradients are those of the recompute, the activations count once."""

    class Old(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    class New(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    samples = []
    for make in (New, Old):
        torch.manual_seed(1)
        state = make_state(made(make))
        torch.manual_seed(1)
        samples.append(sampled(state, window()).modules)
    assert samples[0] == samples[1]


def test_modules_to_look_at(make_state) -> None:
    state = make_state(made(Net))
    found = sampled(state, window(), ("blocks.1", "class:ReLU"))
    assert set(found.modules) == {"act", "blocks.1", "blocks.1.norm", "blocks.1.fc", "blocks.1.drop"}
    assert "weight_update" in found.modules["blocks.1.fc"]
    assert select(state.model, ()) == {path for path, _ in state.model.named_modules()}
    with pytest.raises(ConfigError, match=r"probe.modules: 'block.1' matches no module: .*blocks.1"):
        select(state.model, ("block.1",))


def test_compiled_code_shows_parameters_only(make_state) -> None:
    state = make_state(made(Net))
    state.forward = nn.Sequential(state.model)  # what stands in for compiled code is another module than the model
    found = sampled(state, window()).modules
    assert set(found["head"]) == {"weight", "weight_grad", "weight_update", "bias", "bias_grad", "bias_update"}
    assert "act" not in found


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
def test_a_module_that_its_model_compiles_is_left_alone(make_state) -> None:
    model = made(Net)
    model.blocks[0].compile(backend="eager")
    found = sampled(make_state(model), window()).modules
    assert "activation" in found["blocks.1.fc"]
    assert set(found["blocks.0.fc"]) == {"weight", "weight_grad", "weight_update", "bias", "bias_grad", "bias_update"}
    assert "blocks.0" not in found


def test_complex_parameters(make_state) -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.w).abs()

    found = sampled(make_state(made(Wave)), window()).modules[""]
    assert found["w"].count == found["w_grad"].count == found["w_update"].count == 36


# --- nothing changes, nothing stays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("mode", MODES)
def test_the_run_is_the_same_bit_for_bit(make_state, mode: str, checkpointing: bool) -> None:
    """Dropout, accumulation, clipping, EMA, a scale that has to come down first."""
    keys = {
        **MODES[mode],
        "train.clip_norm": 1.0,
        "train.ema.decay": 0.9,
        "model.activation_checkpointing": checkpointing,
    }
    if mode in ("autocast", "master"):
        keys["precision.loss_scale.init"] = 2.0**20
    ends = []
    for probed in (False, True):
        state = make_state(made(Net), **keys)
        torch.manual_seed(5)
        rows = []
        for _ in range(6):
            probe = Probe()
            if probed:
                with probe.watch(state):
                    rows.append(train_step(state, window(2), probe=probe).read())
            else:
                rows.append(train_step(state, window(2)).read())
            state.counters.attempts += 1
        tensors = [*(t for _, t in state.named_truth()), *state.model.state_dict().values()]
        tensors += [v for s in state.optimizer.state.values() for v in s.values()]
        ends.append(
            (repr(rows), [t.detach().clone() for t in tensors], capture_rng()["torch"], state.scale.state_dict())
        )
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
    assert torch.equal(torch.as_tensor(ends[0][2]), torch.as_tensor(ends[1][2]))
    assert ends[0][3] == ends[1][3]
    if mode == "autocast":
        assert "outcome=1" in ends[0][0]
        assert "outcome=0" in ends[0][0]


def test_no_hook_is_left_also_after_an_error(make_state) -> None:
    class Failing(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 7:
                super().forward(x)
                raise RuntimeError("on purpose")
            return super().forward(x)

    state = make_state(made(Failing))
    train_step(state, window())
    assert hooks_left(state.model) == 0
    sampled(state, window())
    assert hooks_left(state.model) == 0
    probe = Probe()
    with pytest.raises(RuntimeError, match="on purpose"), probe.watch(state):
        train_step(state, window(size=7), probe=probe)
    assert hooks_left(state.model) == 0
    # What was seen until then can be read; a later step is none of its business.
    assert "activation" in probe.read().modules["head"]
    rows = len(probe._rows)
    train_step(state, window())
    assert len(probe._rows) == rows


def test_a_parameter_that_is_returned_keeps_no_hook(make_state) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 3))

        def forward(self) -> Tensor:
            return self.w

    class User(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table()

    state = make_state(made(User))
    found = sampled(state, window())
    assert found.modules["table"]["activation_grad"] == found.modules["table"]["w_grad"]
    assert hooks_left(state.model) == 0


def test_on_an_accelerator_nothing_is_read_within_the_step(make_state, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there is run here: no operation of a sampled step reads a number on the host."""
    monkeypatch.setattr(
        stats_module, "_look_here", lambda pieces: stats_module._look_there(pieces, torch.device("cpu"))
    )
    state = make_state(made(Net), **FP16, **{"train.clip_norm": 1.0})
    train_step(state, window())
    probe = Probe()
    with Count() as count, probe.watch(state):
        train_step(state, window(), probe=probe)
    assert sum(count.found.values()) == 0, count.found
    generic = probe.read()
    monkeypatch.undo()
    twin = make_state(made(Net), **FP16, **{"train.clip_norm": 1.0})
    assert generic.modules.keys() == sampled(twin, window()).modules.keys()


def test_the_probe_may_be_read_later(make_state) -> None:
    """It holds numbers, no tensors of the step."""
    state = make_state(made(Net))
    probes = []
    for _ in range(3):
        probe = Probe()
        with probe.watch(state):
            train_step(state, window(), probe=probe)
        state.counters.attempts += 1
        probes.append(probe)
    assert [probe.read().step for probe in probes] == [1, 2, 3]
    assert [probe.read().attempt for probe in probes] == [1, 2, 3]
    assert probes[0].read() == probes[0].read()


# --- records -----------------------------------------------------------------------------------------------------------------


def test_the_record_and_its_worst(make_state) -> None:
    found = sampled(make_state(made(Net), **FP16), window())
    told = record(found)
    assert told["kind"] == "probe"
    assert told["format"] == "float16"
    assert told["precision/amax_grad"] == found.gradients.amax > 0
    assert told["precision/amax_activation"] == max(t["activation"].amax for t in found.modules.values())
    assert 0 < told["precision/zero_frac"] < 1
    assert json.loads(json.dumps(told)) == told
    bad = {"a": {"activation": stats(torch.tensor([math.inf, 1.0]))}, "b": {"activation": stats(torch.tensor([1e5]))},
           "c": {"activation_grad": stats(torch.tensor([1e-9, 1.0, 1.0]))}, "d": {"activation": stats(torch.ones(1))}}  # fmt: skip
    ranked = worst(bad, "float16", 1.0)
    assert [(path, label) for path, _, label, _ in ranked] == [
        ("a", "nonfinite_frac"),
        ("b", "overflow_frac"),
        ("c", "underflow_frac"),
    ]
    assert worst(bad, "float16", 65536.0)[-1][2] == "overflow_frac"


MLP = [
    "model=mlp", "model.kwargs.hidden=[8]", "dataset.limit=64", "train.batch_size=16", "train.accumulate=2", "device=cpu", "schedule=constant",
    "tracking=disabled", "probe.every=3", "train.log_every=1",
]  # fmt: skip


def test_a_run_streams_its_samples_and_resume_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*MLP, "precision=fp16_dynamic", "train.steps=8", "hydra.run.dir=whole"]) == 0
    assert main([*MLP, "precision=fp16_dynamic", "train.steps=5", "hydra.run.dir=parts"]) == 0
    assert main(["resume=parts", "train.steps=8"]) == 0
    whole, parts = read_probe(tmp_path / "whole"), read_probe(tmp_path / "parts", effective=True)
    assert [sample["attempt"] for sample in whole] == [1, 4, 7]
    assert [sample["modules"] for sample in parts] == [sample["modules"] for sample in whole]
    assert [sample["segment"] for sample in parts] == [0, 0, 1]
    records = [r for r in read_metrics(tmp_path / "whole") if r["kind"] == "probe"]
    assert [r["attempt"] for r in records] == [1, 4, 7]
    assert all("modules" not in r and "precision/underflow_frac" in r for r in records)
    assert whole[0]["loss_scale"] == 65536.0
    assert whole[0]["format"] == "float16"
    assert "weight_update" in whole[0]["modules"]["1"]
    # Neither how often nor what is looked at makes another experiment.
    assert main([*MLP, "precision=fp16_dynamic", "train.steps=8", "probe.every=0", "hydra.run.dir=off"]) == 0
    assert not (tmp_path / "off" / "probe.jsonl").exists()
    assert read_probe(tmp_path / "off") == []
    about = [json.loads((tmp_path / run / "env.json").read_text()) for run in ("whole", "off")]
    assert about[0]["config_hash"] == about[1]["config_hash"]


def test_superseded_and_torn_samples(tmp_path: Any) -> None:
    def life(step: int | None, *attempts: int) -> None:
        sink = JsonlSink()
        config: dict[str, Any] = {}
        sink.start(RunInfo(tmp_path, config, "x", 10, step, None, "train", step))  # type: ignore[arg-type]
        for n in attempts:
            sink.log(
                {
                    "kind": "probe",
                    "step": n,
                    "attempt": n,
                    "format": "float32",
                    "modules": {"a": {"n": {"amax": math.inf}}},
                }
            )
        sink.finish({})

    life(None, 1, 4, 7)
    with (tmp_path / "probe.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "att')
    assert [s["attempt"] for s in read_probe(tmp_path)] == [1, 4, 7]
    assert read_probe(str(tmp_path)) == read_probe(tmp_path)
    life(3, 4, 7)
    assert [(s["segment"], s["attempt"]) for s in read_probe(tmp_path)] == [(0, 1), (0, 4), (0, 7), (1, 4), (1, 7)]
    kept = read_probe(tmp_path, effective=True)
    assert [(s["segment"], s["attempt"]) for s in kept] == [(0, 1), (1, 4), (1, 7)]
    assert kept[0]["modules"]["a"]["n"]["amax"] == math.inf
    (tmp_path / "probe.jsonl").write_text("not json\n{}\n")
    with pytest.raises(MprunError, match=r"probe\.jsonl:1: not a JSON object"):
        read_probe(tmp_path)


def test_underflow_of_a_run_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = {}
    for precision in ("fp16_unscaled", "fp16_dynamic"):
        assert main([*MLP, f"precision={precision}", "train.steps=4", "train.loss_weight=3e-6"]) == 0
        told[precision] = [r["precision/underflow_frac"] for r in read_metrics(latest()) if r["kind"] == "probe"]
    assert min(told["fp16_unscaled"]) > 0.9
    assert max(told["fp16_dynamic"]) < 0.05


def underflow_warnings() -> list[str]:
    events = [r["message"] for r in read_metrics(latest()) if r.get("event") == "warning"]
    return [message for message in events if "become 0 in" in message]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["precision=fp16_unscaled", "train.loss_weight=3e-6"], "use a loss scale: precision=fp16_dynamic or precision=fp16_static"),
        (
            ["precision=fp16_static", "precision.loss_scale.init=1e-6", "precision.loss_scale.min=1e-7"],
            "at loss scale 1e-06: raise precision.loss_scale.init, or use a dynamic scale: precision=fp16_dynamic",
        ),
        (
            ["precision=fp16_master_static", "precision.loss_scale.init=1e-6", "precision.loss_scale.min=1e-7"],
            "raise precision.loss_scale.init, or use a dynamic scale: precision=fp16_master_dynamic",
        ),
        (
            ["precision=fp16_dynamic", "precision.loss_scale.init=1", "train.loss_weight=3e-6"],
            "raise precision.loss_scale.init, or lower precision.loss_scale.growth_interval=2000",
        ),
        (
            ["precision=fp16_pure", "precision.loss_scale.init=1", "precision.loss_scale.max=1", "train.loss_weight=3e-6"],
            "raise precision.loss_scale.max=1, at which the scale is",
        ),
    ],
)  # fmt: skip
def test_gradients_that_become_0_are_told_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*MLP, *words, "train.steps=2", "probe.every=1"]) == 0
    (message,) = underflow_warnings()
    assert message.startswith("step 1 (attempt 1): ")
    assert says in message
    assert message in " ".join(capsys.readouterr().err.split())
    assert main([f"resume={latest()}", "train.steps=4"]) == 0
    assert underflow_warnings() == [message]


def test_a_scale_that_overflows_took_down_is_not_to_be_raised(make_state: Any) -> None:
    state = make_state(made(Net), **FP16)
    said = underflow_advice(state, "float16", state.loss_scale.init / 2)
    assert said.startswith("overflows took the scale down from 65536, so FP16 is too narrow for this model: use BF16")
    assert underflow_advice(state, "bfloat16", 1.0).startswith("make the loss larger (train.loss_weight=1)")


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "fp16_dynamic", "fp16_static", "fp16_master_dynamic", "fp16_pure"]
)
def test_a_healthy_run_is_told_nothing_of_gradients(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*MLP, f"precision={precision}", "train.steps=4", "probe.every=1"]) == 0
    assert underflow_warnings() == []


def test_wrong_keys_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word, said in (
        ("probe.every=-1", "probe.every=-1 is not legal: a number of attempts from 1 up"),
        ('probe.modules=["re:("]', "probe.modules: 're:(' is not a regular expression"),
        ("probe.modules=[heda]", "probe.modules: 'heda' matches no module"),
    ):
        assert main([*MLP, word]) == 2
        assert said in capsys.readouterr().err
