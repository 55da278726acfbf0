"""The memory of a step: predictions from shapes held against real tensors, the allocator, and sums done by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mprun.cli import main
from mprun.commands.estimate import UNITS, parse, size_of
from mprun.compose import compose
from mprun.config import Config
from mprun.errors import ConfigError
from mprun.numerics.memory import Counted, Footprint, Ledger
from mprun.numerics.tensor_cores import misfits
from mprun.training.build import build, switches
from mprun.training.env import peak_memory_bytes
from mprun.training.fakes import LARGE, Untouched
from mprun.training.footprint import footprint, largest_batch, measure, predicting
from mprun.training.state import TrainState
from mprun.training.step import forward_loss, train_step, valid_targets
from tests.conftest import CPU, batch

SMALL = ("dataset=synthetic", "dataset.kwargs.examples=16", "dataset.kwargs.val_examples=2", "train.batch_size=8")
MODELS = {
    "vit": ("model=vit",),
    "resnet": ("model=resnet",),
    "mlp": ("model=mlp",),
    "gpt": ("model=gpt", "dataset=python_docs"),
    "test_vit": ("model=timm", "model.name=test_vit", "dataset.kwargs.image_size=160", *SMALL),
    "test_resnet": ("model=timm", "model.name=test_resnet", "dataset.kwargs.image_size=64", *SMALL),
}
POLICIES = ("fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic")


def configured(*words: str) -> Config:
    return compose(words).config


def predicted(*words: str, batch_size: int | None = None) -> Footprint:
    config = configured(*words)
    with predicting(config, CPU) as predict:
        return predict(batch_size or config.train.batch_size)


def distinct(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def really_saved(config: Config) -> int:
    """Bytes that autograd keeps of one real forward pass and its loss, apart from parameters, buffers and the batch."""
    with switches(config, CPU):
        state, data, _ = build(config, CPU)
        first = next(iter(data.train_batches(0)))
        there = [*state.model.parameters(), *state.model.buffers(), first.inputs, first.targets]
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward_loss(state, first, valid_targets(first.targets, state.task))
        return sum(size for key, size in distinct(kept).items() if key not in distinct(there))


# --- predicted against real -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_saved_tensors_are_predicted_within_five_percent(model: str, policy: str) -> None:
    words = (*MODELS[model], f"precision={policy}")
    real = really_saved(configured(*words))
    assert real > 1000
    assert predicted(*words).counted.saved_bytes == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    "words",
    [
        ("model=vit", "precision=fp32"),
        ("model=vit", "precision=fp32", "train.accumulate=3", "train.ema.decay=0.9", "train.clip_norm=1"),
        ("model=vit", "precision=fp32", "model.activation_checkpointing=true"),
        ("model=gpt", "dataset=python_docs", "precision=fp32", "optimizer=sgd"),
    ],
    ids=["plain", "window", "checkpointing", "gpt"],
)
def test_the_peak_is_what_the_allocator_says(words: tuple[str, ...]) -> None:
    """In FP32, whose kernels on the CPU take little for themselves: every allocation and release of a step, added up."""
    config = configured(*words)
    with switches(config, CPU):
        state, data, _ = build(config, CPU)
        window = [b for b, _ in zip(data.train_batches(0), range(config.train.accumulate), strict=False)]
        train_step(state, window)
        with torch.profiler.profile(profile_memory=True) as profile:
            train_step(state, window)
        found = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = growth = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        now += event.nbytes()
        growth = max(growth, now)
    full = predicted(*words)
    before = sum(full.counted.highest[kind] for kind in ("parameters", "optimizer", "ema", "data", "counters"))
    assert full.peak_bytes - before == pytest.approx(growth, rel=0.01)


def test_a_measured_step_counts_what_a_predicted_one_does() -> None:
    words = ("model=vit", "precision=bf16", "train.ema.decay=0.9", "train.batch_size=32")
    config = configured(*words)
    found, real = predicted(*words), measure(config, CPU)
    assert found.peak_bytes == real.peak_bytes
    assert found.counted.peak == real.counted.peak
    assert found.modules == real.modules
    assert real.batch_size == 32


# --- what is counted --------------------------------------------------------------------------------------------------


RESNET50 = ("model=timm", "model.name=resnet50", "dataset=synthetic", "train.batch_size=256", "optimizer=adam")


def test_resnet50_by_formula() -> None:
    before = peak_memory_bytes(CPU)
    found = predicted(*RESNET50, "precision=fp32")
    full = found.counted.highest
    assert full["parameters"] == full["gradients"] == 25_557_032 * 4
    assert full["optimizer"] == 25_557_032 * 8 + 161 * 4  # two moments, and a step count for each of 161 tensors
    states = full["parameters"] + full["gradients"] + full["optimizer"]
    assert states == pytest.approx(409e6, rel=1e-3)
    # Half parameters but for normalisation layers (53,120), masters of the half ones, FP32 gradients of all: 18 bytes, not 16.
    sizes = predicted(*RESNET50, "precision=fp16_master_dynamic", batch_size=8).elements
    assert sizes["parameters"] == {2: 25_503_912, 4: 53_120}
    assert sizes["masters"] == {4: 25_503_912}
    assert sizes["gradients"] == {4: 25_557_032}
    # Activations are tens of gigabytes, and nothing of it was allocated.
    assert 18e9 < full["activations"] < 30e9
    assert peak_memory_bytes(CPU) - before < 0.5e9


def test_a_multilayer_perceptron_by_hand(make_state: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    state: TrainState = make_state(model, **{"optimizer.name": "adamw", "train.ema.decay": 0.9})
    window = [batch(torch.randn(10, 16), torch.randint(8, (10,)))]
    found = footprint(state, window, [window[0].inputs, window[0].targets], accumulate=1, ledger=Ledger())
    weights = 16 * 32 + 32 + 32 * 8 + 8
    full = found.counted.highest
    assert full["parameters"] == full["gradients"] == full["ema"] == 4 * weights
    assert full["masters"] == full["weight copies"] == 0
    assert full["optimizer"] == 8 * weights + 4 * 4
    assert full["data"] == 10 * 16 * 4 + 10 * 8
    # ReLU keeps its result, which is the second layer's input too: one storage. The loss keeps the log-probabilities.
    assert found.modules["1"] == {"activations": 10 * 32 * 4}
    assert found.modules["(loss)"]["activations"] == pytest.approx(10 * 8 * 4, abs=16)
    assert found.modules["2"]["parameters"] == 4 * (32 * 8 + 8)
    assert "activations" not in found.modules["2"]


def test_autocast_keeps_half_copies_of_weights_once() -> None:
    found = predicted("model=mlp", "precision=fp16_dynamic")
    linears = [name for name, kind in found.classes.items() if kind == "Linear"]
    # The first layer's weight is not needed for a gradient of the data; biases are not needed at all.
    copies = {name: found.modules[name]["weight copies"] for name in linears}
    assert copies == {"1": 0, "3": 2 * 128 * 128, "5": 2 * 128 * 10}
    assert not predicted("model=mlp", "precision=fp16_master_dynamic").counted.highest["weight copies"]


def test_half_activations_are_about_half_and_islands_are_not() -> None:
    full, half = predicted("model=gpt", "dataset=python_docs", "precision=fp32"), predicted(
        "model=gpt", "dataset=python_docs", "precision=bf16"
    )  # fmt: skip
    island = predicted("model=gpt", "dataset=python_docs", "precision=bf16", "precision.fp32_modules=[blocks.0.mlp]")

    def kept(found: Footprint, prefix: str) -> int:
        return sum(size for (path, kind), size in found.counted.saved.items()
                   if path.startswith(prefix) and kind == "activations")  # fmt: skip

    assert kept(half, "blocks.0.mlp") * 2 == kept(full, "blocks.0.mlp")
    assert kept(island, "blocks.0.mlp") >= kept(full, "blocks.0.mlp")
    assert kept(island, "blocks.1.mlp") == kept(half, "blocks.1.mlp")


def test_checkpointing_saves_less_and_accumulation_no_more() -> None:
    words = ("model=vit", "precision=bf16")
    plain = predicted(*words)
    recomputed = predicted(*words, "model.activation_checkpointing=true")
    assert recomputed.counted.saved_bytes < plain.counted.saved_bytes / 3
    assert recomputed.peak_bytes < plain.peak_bytes
    windows = predicted(*words, "train.accumulate=4")
    assert windows.counted.saved_bytes == plain.counted.saved_bytes
    # While the second micro-batch goes forward the gradients of the first one are there, and the window's batches too.
    assert windows.counted.peak["gradients"] == plain.counted.highest["gradients"]
    grown = windows.counted.peak["data"] - plain.counted.peak["data"]
    assert grown == 3 * plain.batch_size * (64 * 4 + 8)


def test_an_optimizer_that_makes_its_state_in_the_first_step_is_counted_with_it() -> None:
    for name, states in (("adamw", 2), ("nadamw", 2), ("rmsprop", 1)):
        found = predicted("model=mlp", f"optimizer.name={name}", "optimizer.betas=null", "optimizer.eps=null",
                          "optimizer.fused=false", "precision=fp32")  # fmt: skip
        parameters = found.counted.highest["parameters"]
        assert found.counted.peak["optimizer"] == pytest.approx(states * parameters, rel=0.01), name


def test_frozen_parameters_have_no_gradient_and_unused_memory_is_given_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    config = configured("model=mlp", "precision=fp32")
    from mprun.training.schedule import build_schedule
    from mprun.training.state import build_state

    with switches(config, CPU):
        state = build_state(config, model, build_schedule(config.schedule, 10), CPU)
        ledger = Ledger()
        window = [batch(torch.randn(3, 4), torch.randint(4, (3,)))]
        found = footprint(state, window, [window[0].inputs], accumulate=1, ledger=ledger)
    assert found.counted.highest["gradients"] == found.counted.highest["parameters"] // 2
    assert found.modules["0"].keys() == {"parameters"}
    assert ledger.alive("gradients") == 0
    assert ledger.alive("activations") < 100  # a few scalars of the state


def test_a_builder_sees_the_values_that_it_reads() -> None:
    with Untouched():
        small, large = torch.zeros(10).add_(3), torch.full((LARGE + 1,), 2.0)
        kept = large.sum().item()
        large.fill_(7.0)
        shape = torch.zeros(2, LARGE).t_().shape
    assert small.tolist() == [3.0] * 10
    assert large.sum().item() == kept
    assert shape == (LARGE, 2)
    words = ("model=vit", "model.kwargs.drop_path=0.5", "model.kwargs.dropout=0.1", "precision=fp32")
    assert predicted(*words).counted.saved_bytes == pytest.approx(really_saved(configured(*words)), rel=0.05)


# --- the largest batch ------------------------------------------------------------------------------------------------


def made_up(batch_size: int, size: int) -> Footprint:
    return Footprint(batch_size, 1, Counted(peak=Counter({"data": size})), {}, {}, {}, [])


@given(
    fixed=st.integers(0, 10**9), other=st.integers(0, 10**9), slope=st.integers(1, 10**7), steep=st.integers(1, 10**7),
    limit=st.integers(1, 10**11), start=st.integers(1, 5000),
)  # fmt: skip
def test_the_largest_batch_fits_and_one_more_does_not(
    fixed: int, other: int, slope: int, steep: int, limit: int, start: int
) -> None:
    """For any peak that is the larger of two moments, each linear in the batch."""
    calls = 0

    def peak(size: int) -> int:
        return max(fixed + slope * size, other + steep * size)

    def predict(size: int) -> Footprint:
        nonlocal calls
        calls += 1
        return made_up(size, peak(size))

    best = largest_batch(predict, limit, start=start)
    assert calls < 60
    if best is None:
        assert peak(1) > limit
    else:
        assert peak(best.batch_size) <= limit
        assert limit < peak(best.batch_size + 1) or best.batch_size >= 2**30


def test_the_largest_batch_of_a_model() -> None:
    config = configured("model=resnet", "precision=fp16_dynamic")
    limit = 20 * 2**20
    with predicting(config, CPU) as predict:
        best = largest_batch(predict, limit, start=config.train.batch_size)
        assert best is not None
        assert best.peak_bytes <= limit < predict(best.batch_size + 1).peak_bytes


# --- dimensions -------------------------------------------------------------------------------------------------------


def test_dimensions_that_tensor_cores_dislike() -> None:
    words = (
        "model=vit",
        "model.kwargs.embed_dim=48",
        "model.kwargs.num_heads=4",
        "precision=bf16",
        "train.batch_size=63",
    )
    found = {(item.module, item.dimension): (item.size, item.better) for item in predicted(*words).misfits}
    assert found[("patch_embed.proj", "in_channels")] == (1, 8)
    assert found[("head", "out_features")] == (10, 16)
    assert found[("head", "rows (batch x tokens)")] == (63, 64)
    assert found[("blocks.2.attn", "head_dim")] == (12, 16)
    assert ("blocks.0.mlp.fc1", "rows (batch x tokens)") not in found  # 63 x 16 tokens
    kept = predicted(*words, "precision.fp32_modules=[head]").misfits
    assert "head" not in {item.module for item in kept}
    assert predicted("model=vit", "precision=fp32").misfits == []


def test_the_vocabulary_of_a_gpt_is_told() -> None:
    found = predicted("model=gpt", "dataset=python_docs", "precision=fp16_dynamic", "train.batch_size=8")
    assert [(item.module, item.dimension, item.size) for item in found.misfits] == [("head", "out_features", 103)]


def test_depthwise_convolutions_are_no_misfits() -> None:
    modules = [("a", nn.Conv2d(12, 12, 3, groups=12)), ("b", nn.Conv2d(12, 16, 1)), ("c", nn.Conv2d(1, 8, 1))]
    found = [(item.module, item.dimension, item.size) for item in misfits(modules, {}, {})]
    assert found == [("b", "in_channels", 12), ("c", "in_channels", 1)]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
def test_the_tables_fit_the_terminal(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["model=gpt", "dataset=python_docs", "precision=fp16_master_dynamic", "train.ema.decay=0.99",
             "--memory", "64MiB", "--measure", "--top=3"]  # fmt: skip
    assert main(["estimate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in ("masters", "activations", "optimizer", "blocks.0", "more", "out_features",
                 "largest batch", "saved tensors predicted", "not counted"):  # fmt: skip
        assert part in text, part
    assert ("state" in text) is (width == 80)


def test_every_number_goes_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "memory.json"
    assert main(["estimate", "model=mlp", "precision=bf16", "--measure", "--memory=1MiB", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    found = content["predicted"]
    assert found["peak_bytes"] == sum(found["peak_by_category"].values()) == content["measured"]["peak_bytes"]
    by_module = sum(sizes.get("activations", 0) + sizes.get("weight copies", 0) for sizes in found["modules"].values())
    assert by_module == found["saved_bytes"] == content["measured"]["saved_bytes"]
    assert content["largest"]["peak_bytes"] <= content["memory"] == 2**20
    assert content["config"]["precision"]["name"] == "bf16"
    assert (
        sum(sizes.get("parameters", 0) for sizes in found["modules"].values())
        == found["full_by_category"]["parameters"]
    )


def test_a_past_run_beside_its_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=mlp", "precision=fp16_dynamic", "train.epochs=1", "tracking=disabled", "device=cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "mprun", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert main(["estimate", "outputs/latest", "--json", "found.json"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    content = json.loads(Path("found.json").read_text())
    result = json.loads((tmp_path / "outputs" / "latest" / "result.json").read_text())
    assert content["run"]["peak_memory_bytes"] == result["peak_memory"]
    assert content["config"]["precision"]["name"] == "fp16_dynamic"
    assert "resident memory of the whole process" in text
    assert main(["estimate", "outputs/latest", "train.batch_size=3"]) == 2
    assert "is estimated as it ran" in capsys.readouterr().err
    (tmp_path / "outputs" / "latest" / "result.json").unlink()
    assert main(["estimate", "latest"]) == 2
    assert "the run must have ended" in capsys.readouterr().err


def test_a_gpu_is_estimated_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "memory.json"
    assert main(["estimate", "model=mlp", "precision=tf32", "device=cuda", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert all(size % 512 == 0 for size in content["predicted"]["peak_by_category"].values())
    assert content["device"] == "cuda"
    if not torch.cuda.is_available():
        assert "no GPU here" in capsys.readouterr().out
        assert main(["estimate", "model=mlp", "device=cuda", "--measure"]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic"])
def test_the_peak_on_a_gpu(policy: str) -> None:
    words = ("model=timm", "model.name=resnet18", "dataset=synthetic", "train.batch_size=64", "device=cuda", f"precision={policy}",
             "dataset.kwargs.examples=128")  # fmt: skip
    config = configured(*words)
    device = torch.device("cuda")
    with predicting(config, device) as predict:
        found = predict(64)
    real = measure(config, device)
    assert found.counted.saved_bytes == pytest.approx(real.counted.saved_bytes, rel=0.05)
    assert real.allocator_peak is not None
    assert found.peak_bytes == pytest.approx(real.allocator_peak, rel=0.15)


READS_VALUES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y if y.sum().item() > 0 else -y
"""


def test_a_model_that_reads_values_is_refused_by_name(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reads_values.py").write_text(READS_VALUES)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["model=python", "model.name=reads_values:Net", "trust=[reads_values]", "precision=fp32", "tuned=none"][:4]
    assert main(["estimate", *words]) == 2
    told = capsys.readouterr().err
    assert "depends on values" in told
    assert "estimate --measure" in told


def test_a_model_that_reads_values_can_be_measured_alone(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reads_values_too.py").write_text(READS_VALUES)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "estimate",
        "model=python",
        "model.name=reads_values_too:Net",
        "trust=[reads_values_too]",
        "precision=fp32",
    ]
    target = tmp_path / "memory.json"
    assert main([*words, "--measure", "--json", str(target)]) == 0
    content = json.loads(target.read_text())
    assert "predicted" not in content
    assert "depends on values" in content["unpredicted"]
    assert content["measured"]["peak_by_category"]["parameters"] == (64 * 10 + 10) * 4
    told = capsys.readouterr().out
    assert "memory of a step, measured: digits-" in told
    assert "nothing: model.name=reads_values_too:Net" in told
    assert main([*words, "--measure", "--memory=1GiB"]) == 2, "the batch that fits is found from predictions alone"
    assert "--memory cannot be found" in capsys.readouterr().err


def test_memory_beyond_every_batch_is_not_said_to_be_too_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "model=mlp", "--memory=999999TiB"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "and more in 999999 TiB" in told
    assert "would be too much" not in told


def test_a_model_beyond_memory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "model=mlp", "model.kwargs.hidden=[1000000000000]"]) == 2
    told = capsys.readouterr().err
    assert "model.name=mlp does not fit into memory: one of its tensors takes" in told
    assert "do not fit mlp" not in told


def test_sizes() -> None:
    assert size_of("24GiB") == 24 * 2**30
    assert size_of("1.5 GB") == 1_500_000_000
    assert {size_of(f"1{unit}") for unit in UNITS} == set(UNITS.values())
    for wrong in ("24", "GiB", "-1GiB", "0MiB", "24gib", "24GiBs", "nanGiB", "1e400GiB"):
        with pytest.raises(ConfigError, match="--memory"):
            size_of(wrong)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memry", "3GiB"], "did you mean '--memory'"),
        (["--memory"], "needs a value"),
        (["--top", "0"], "--top 0"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at"),
        (["nowhere"], "no run folder"),
    ],
)
def test_words_that_make_no_sense(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(words)
