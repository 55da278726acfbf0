"""Whole runs on a CUDA device: ``pytest -m gpu``. Every policy, resume, layouts, compiled code, memory, workers.

What a step computes is compared with the CPU in ``tests/test_gpu.py``.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from mprun.cli import main
from mprun.compose import compose
from mprun.data import build_data
from mprun.models.build import build_model
from mprun.training.build import CUBLAS, switches
from mprun.training.env import seed_everything
from mprun.training.footprint import measure, predicting
from mprun.training.result import OVERFLOW
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import train_step
from tests.test_run import same, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    # The first product of a backward thread makes its context.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
POLICIES = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "precision").glob("*.yaml"))
DIGITS = ["model=resnet", "dataset=digits", "train.batch_size=64", "tracking=disabled"]
CONTROLS = ("fp16_unscaled", "fp16_pure", "bf16_pure")  # made to go wrong


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def result() -> dict:
    return json.loads(Path("outputs/latest/result.json").read_text())


def make(device: torch.device, *words: str) -> tuple:
    """Config, state and first batch on ``device``; the state and the steps belong inside ``switches``."""
    config = compose([*DIGITS, f"device={device.type}", *words]).config
    seed_everything(config.seed)
    data = build_data(config, device=device)
    model = build_model(config.model, data.spec, trust=())
    return config, lambda: build_state(config, copy.deepcopy(model), build_schedule(config.schedule, 100), device), data


def losses(device: torch.device, *words: str, steps: int = 6) -> tuple[list[float], TrainState]:
    config, build, data = make(device, *words)
    with switches(config, device):
        state = build()
        batches = data.train_batches(0)
        found = [train_step(state, [next(batches)]).read().loss for _ in range(steps)]
    return found, state


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_twenty_steps(cuda, folder, policy):
    if policy == "tf32" and torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("no TF32 units")
    words = [f"precision={policy}", f"device={cuda.type}", "train.steps=20", "schedule=constant"]
    words += ["optimizer.lr=0.0002", "optimizer.eps=0.0001"] if policy in CONTROLS else []
    assert main([*DIGITS, *words]) == 0
    got = result()
    assert (got["status"], got["steps_applied"]) == ("ok", 20)
    assert math.isfinite(got["final"]["val/loss"])
    if policy not in CONTROLS:
        assert got["final"]["val/top1"] > 0.5
    rows = json.loads(Path("outputs/latest/modules.json").read_text())
    seen = {row["compute_dtype"] for row in rows if row["class"] in ("Linear", "Conv2d")}
    assert seen == {{"fp16": "float16", "bf16": "bfloat16"}.get(policy[:4], "float32")}


RESUMED = {
    "fp32": ["precision=fp32", "train.ema.decay=0.9"],
    "bf16": ["precision=bf16", "optimizer=sgd", "optimizer.lr=0.01"],
    "fp16 with skips": ["precision=fp16_dynamic", "precision.loss_scale.init=16777216", "precision.loss_scale.growth_interval=3"],
    "masters": ["precision=fp16_master_dynamic", "train.ema.decay=0.9", "train.accumulate=2", "train.clip_norm=0.5"],
}  # fmt: skip


@pytest.mark.parametrize("words", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("model", [["model=resnet"], ["model=vit", "model.kwargs.dropout=0.1"]], ids=["resnet", "vit"])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(cuda, folder, words, model, monkeypatch):
    """With ``deterministic=true``, for which cuBLAS must have got its workspace; dropout draws on the GPU."""
    monkeypatch.delenv(CUBLAS, raising=False)
    all_words = [*DIGITS, *model, *words, f"device={cuda.type}", "deterministic=true", "train.steps=12",
                 "train.checkpoint_every=1", "train.keep=99", "train.eval_every=5"]  # fmt: skip
    assert main(all_words) == 0
    unbroken, whole = state_of(), Path("outputs/latest").resolve()
    assert json.loads((whole / "env.json").read_text())["determinism"]["algorithms"] is True
    cut = folder / "cut"
    shutil.copytree(whole, cut)
    for path in (cut / "checkpoints").iterdir():
        if path.name != "step_7.pt":
            path.unlink()
    (cut / "result.json").unlink()
    assert main([f"resume={cut}"]) == 0
    assert same(unbroken, state_of(cut)) == []
    assert CUBLAS not in os.environ


def test_a_skip_is_decided_on_the_device(cuda):
    """No wait in the step that overflows, and not a byte of the run moves."""
    words = [
        "precision=fp16_dynamic",
        "precision.loss_scale.init=16777216",
        "train.ema.decay=0.9",
        "train.clip_norm=1.0",
    ]
    config, build, data = make(cuda, *words)
    with switches(config, cuda):
        state, window = build(), [next(data.train_batches(0))]
        first = train_step(state, window)  # loads kernels
        kept = [t.clone() for t in moving(state)]
        if cuda.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            second = train_step(state, window)
        finally:
            if cuda.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        assert [r.read().outcome for r in (first, second)] == [OVERFLOW, OVERFLOW]
        assert float(state.scale.scale) == 2.0**22
        assert all(torch.equal(a, b) for a, b in zip(kept, moving(state), strict=True))


def moving(state: TrainState) -> list[torch.Tensor]:
    """All that an applied step moves."""
    moments = [t for entry in state.optimizer.state.values() for t in entry.values()]
    shadow = list(state.ema.shadow.values()) if state.ema else []
    return [*state.model.state_dict().values(), *moments, *shadow, state.applied]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic"])
def test_channels_last_is_a_layout_and_nothing_else(cuda, policy):
    words = [f"precision={policy}", "train.ema.decay=0.9"]
    plain, _ = losses(cuda, *words)
    laid_out, state = losses(cuda, *words, "model.channels_last=true")
    assert laid_out == pytest.approx(plain, rel=1e-3 if policy == "fp32" else 3e-2)
    convolution = next(m for m in state.model.modules() if isinstance(m, torch.nn.Conv2d) and m.in_channels > 1)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    truths = [t for _, t in state.weights if t.ndim == 4 and t.shape[1] > 1]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in truths)
    moments = [state.optimizer.state[t]["exp_avg"] for t in truths]
    assert all(m.stride() == t.stride() for m, t in zip(moments, truths, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16_dynamic"])
def test_compiled_code_trains_as_eager_code_does(cuda, policy):
    eager, _ = losses(cuda, f"precision={policy}")
    compiled, _ = losses(cuda, f"precision={policy}", "model.compile=true")
    assert compiled == pytest.approx(eager, rel=1e-3 if policy == "fp32" else 5e-2)
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", ["fp32", "fp16_dynamic", "fp16_master_dynamic"])
def test_recomputed_blocks_give_the_same_numbers(cuda, policy):
    words = ["model=vit", f"precision={policy}", "model.kwargs.dropout=0.1", "deterministic=true"]
    assert losses(cuda, *words)[0] == losses(cuda, *words, "model.activation_checkpointing=true")[0]


@pytest.mark.parametrize("name", ["lamb", "rmsprop", "adagrad", "nadam"])
def test_optimizers_without_a_fused_kernel_follow_the_cpu(cuda, name):
    words = ["precision=fp32", f"optimizer.name={name}", "optimizer.lr=0.001", "train.clip_norm=1.0"]
    words += ["optimizer.betas=null"] if name in ("rmsprop", "adagrad") else []
    here, there = losses(torch.device("cpu"), *words)[0], losses(cuda, *words)[0]
    assert there == pytest.approx(here, rel=2e-3)


@pytest.mark.parametrize("policy", ["fp32", "fp16_dynamic", "fp16_master_dynamic"])
def test_the_prediction_is_near_the_allocator(cuda, policy):
    words = ["model=timm", "model.name=vit_small_patch16_224", "dataset=synthetic", "dataset.kwargs.examples=32",
             "train.batch_size=32", "train.ema.decay=0.999", f"precision={policy}", "device=cuda"]  # fmt: skip
    config = compose(words).config
    with predicting(config, cuda) as predict:
        found = predict(32)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(cuda)
    real = measure(config, cuda)
    assert real.allocator_peak is not None
    assert real.allocator_peak - before == pytest.approx(found.peak_bytes, rel=0.1)


def test_workers_made_after_the_device_was_used(cuda, folder):
    words = ["model=resnet", "dataset=synthetic", "dataset.kwargs.image_size=32", "dataset.kwargs.examples=64",
             "dataset.kwargs.classes=10", "dataset.augment=flip+randaugment", "train.batch_size=16", "train.steps=6",
             "tracking=disabled", f"device={cuda.type}", "precision=fp16_dynamic", "schedule=constant"]  # fmt: skip
    torch.ones(2, 2, device=cuda) @ torch.ones(2, 2, device=cuda)
    states = []
    for workers in (0, 2):
        assert main([*words, f"dataset.workers={workers}", "deterministic=true"]) == 0
        states.append(state_of()["model"])
    assert same(states[0], states[1]) == []


def test_evaluation_moves_nothing(cuda, folder):
    states = []
    for every in (3, 1000):
        words = [f"device={cuda.type}", "deterministic=true", "model=vit", "model.kwargs.dropout=0.1", "train.steps=12"]
        assert (
            main([*DIGITS, *words, "precision=fp16_dynamic", "train.ema.decay=0.9", f"train.eval_every={every}"]) == 0
        )
        states.append(state_of()["model"])
    assert same(states[0], states[1]) == []
