"""The same laws on a CUDA device: ``pytest -m gpu``. Nothing here runs without one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.cli import main
from mprun.numerics.probe import Probe, Sample
from mprun.precision.cpu_autocast import POLICY
from mprun.training.build import switches
from mprun.training.env import step_rng
from mprun.training.postmortem import examine
from mprun.training.result import OVERFLOW
from mprun.training.schedule import build_schedule
from mprun.training.state import build_state
from mprun.training.step import train_step
from tests.conftest import BF16, FP16, REGRESSION, SGD, batch, make_config, toy
from tests.test_casting import MASTER, PURE, Net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # torch says so the first time
    pytest.mark.filterwarnings(
        "ignore:Attempting to run cuBLAS"
    ),  # as the first product of a backward thread makes its context
]
MODES = {"fp32": {}, "bf16": BF16, "fp16": FP16, "master": MASTER, "pure": PURE}


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


def build(device: torch.device, model: nn.Module, **keys):
    config = make_config(**keys)
    return config, lambda: build_state(config, copy.deepcopy(model), build_schedule(config.schedule, 100), device)


def net_batch(device: torch.device):
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(10, (16, 4), generator=generator), torch.randint(3, (16,), generator=generator)
    return batch(ids.to(device), labels.to(device))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steady_state_never_waits_for_the_device(cuda, mode, optimizer):
    keys = {
        **mode,
        "optimizer.name": optimizer,
        "train.clip_norm": 1.0,
        "train.ema.decay": 0.99,
        "schedule.name": "cosine",
    }
    config, make = build(cuda, Net(), **keys)
    with switches(config, cuda):
        state, window = make(), [net_batch(cuda)]
        train_step(state, window)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [train_step(state, window) for _ in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert any(result.read().applied for result in results)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_gpu_follows_the_cpu(cuda, mode):
    torch.manual_seed(0)
    model, losses = Net(), {}
    for device in (torch.device("cpu"), cuda):
        config, make = build(device, model, **mode)
        with switches(config, device):
            state = make()
            losses[device.type] = [train_step(state, [net_batch(device)]).read().loss for _ in range(5)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4 if not mode else 3e-2)


@pytest.mark.parametrize(
    ("target", "skips", "scale"), [(0.4, 0, 65536), (0.6, 1, 32768), (100, 8, 256), (40000, 17, 0.5)]
)
def test_overflow_happens_where_it_does_on_the_cpu(cuda, target, skips, scale):
    keys = {**FP16, **REGRESSION, **SGD, "optimizer.momentum": 0.0, "optimizer.lr": 0.0}
    config, make = build(cuda, toy(), **keys)
    window = [batch(torch.ones(1, 1, device=cuda), torch.full((1, 1), float(target), device=cuda))]
    with switches(config, cuda):
        state = make()
        rows = [train_step(state, window).read() for _ in range(skips + 1)]
    assert [row.outcome == OVERFLOW for row in rows] == [True] * skips + [False]
    assert rows[-1].loss_scale == scale


def test_a_skipped_step_leaves_every_byte(cuda):
    keys = {**FP16, **REGRESSION, "train.ema.decay": 0.9, "precision.loss_scale.init": 1024.0}
    config, make = build(cuda, nn.Sequential(nn.BatchNorm1d(1), toy(0.5)), **keys)
    x = torch.tensor([[1.0], [-1.0]], device=cuda)
    with switches(config, cuda):
        state = make()
        train_step(state, [batch(x, torch.tensor([[0.1], [0.2]], device=cuda))])
        before = {name: value.clone() for name, value in state.model.state_dict().items()}
        moments = [value.clone() for entry in state.optimizer.state.values() for value in entry.values()]
        assert train_step(state, [batch(x, torch.tensor([[3e4], [0.2]], device=cuda))]).read().outcome == OVERFLOW
        assert all(torch.equal(before[name], value) for name, value in state.model.state_dict().items())
        after = [value for entry in state.optimizer.state.values() for value in entry.values()]
        assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mode", [{}, FP16], ids=["fp32", "fp16"])
def test_a_sampled_step_waits_for_nothing_and_sees_what_the_cpu_sees(cuda, mode, deterministic):
    torch.manual_seed(0)
    model, samples = Net(), dict[str, Sample]()
    for device in (torch.device("cpu"), cuda):
        config, make = build(device, model, **mode, deterministic=deterministic)
        with switches(config, device):
            state, window, probe = make(), [net_batch(device)], Probe()
            train_step(state, window)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with probe.watch(state):
                    train_step(state, window, probe=probe)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            samples[device.type] = probe.read()
    here, there = samples["cpu"].modules, samples["cuda"].modules
    assert here.keys() == there.keys()
    for path, tensors in here.items():
        assert tensors.keys() == there[path].keys()
        for name, found in tensors.items():
            assert (found.count, found.nonfinite) == (there[path][name].count, 0)
            assert there[path][name].amax == pytest.approx(found.amax, rel=5e-2, abs=1e-6), (path, name)


def test_a_post_mortem_says_what_it_says_on_the_cpu(cuda):
    keys, verdicts = {**FP16, **REGRESSION, "precision.loss_scale.init": 2.0**15}, []
    for device in (torch.device("cpu"), cuda):
        config, make = build(device, toy(), **keys)
        with switches(config, device):
            state, rng = make(), step_rng(device)
            window = [batch(torch.ones(1, 1, device=device), torch.full((1, 1), 1000.0, device=device))]
            assert train_step(state, window).read().outcome == OVERFLOW
            found = examine(state, window, loss_scale=2.0**15, rng=rng)
            large = [batch(torch.full((1, 1), 3e4, device=device), torch.zeros(1, 1, device=device))]
            state.model.weight.data.fill_(3.0)
            beyond = examine(state, large, loss_scale=1.0, rng=rng)
            verdicts.append((found.kind, found.largest_scale, beyond.kind, beyond.module, beyond.factor))
    assert verdicts[0] == verdicts[1]
    assert verdicts[0][:3] == ("scale_search", 32.0, "overflow_forward")


@pytest.mark.parametrize(("name", "call"), [
    ("softmax.int", lambda x: x.softmax(-1)), ("sum", lambda x: x.sum()), ("exp", torch.exp), ("matmul", lambda x: x @ x),
    ("layer_norm", lambda x: nn.functional.layer_norm(x, (4,))), ("rsqrt", torch.rsqrt), ("cumsum", lambda x: x.cumsum(0)),
])  # fmt: skip
def test_cuda_autocast_treats_operations_as_the_cpu_table_says(cuda, name, call):
    x = torch.rand(4, 4, device=cuda, dtype=torch.float16) + 0.5
    with torch.autocast("cuda", torch.float16):
        dtype = call(x).dtype
    assert dtype == (torch.float16 if POLICY[name] == "lower_precision" else torch.float32)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16_dynamic", "fp16_master_dynamic", "bf16_master"])
def test_default_run_on_the_gpu(cuda, precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([f"precision={precision}", "model=resnet", "tracking=disabled", "device=cuda"]) == 0
    run = Path("outputs/latest")
    assert json.loads((run / "result.json").read_text())["final"]["val/top1"] >= 0.96
    env = json.loads((run / "env.json").read_text())
    assert env["tf32"] == {"matmul": precision == "tf32", "cudnn": precision == "tf32"}
