"""No hidden copies: what is allocated, counted byte by byte, beside what shapes predict; and the bench that measures it."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.compose import compose
from mprun.errors import CheckpointError
from mprun.precision.cpu_half import cpu_half_kernels
from mprun.precision.workspace import cpu_workspace
from mprun.training import checkpoint
from mprun.training.build import build, switches
from mprun.training.footprint import predicting
from mprun.training.step import train_step
from tests.conftest import CPU

ROOT = Path(__file__).resolve().parent.parent
A = torch.ops.aten
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """``bench/memory_peak.py`` as a module."""
    sys.path.insert(0, str(ROOT / "bench"))
    spec = importlib.util.spec_from_file_location("memory_peak", ROOT / "bench" / "memory_peak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "bench"))


# --- what kernels take for themselves ---------------------------------------------------------------------------------


def beside(bench: ModuleType, call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that ``call`` holds at its worst moment beside its results, and these."""
    kept: list[Any] = [call()]  # once before: libraries make caches
    kept.clear()
    most = bench.allocated(lambda: kept.append(call()))
    made = kept[0] if isinstance(kept[0], tuple) else (kept[0],)
    return most - sum(t.untyped_storage().nbytes() for t in made if t is not None), kept[0]


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_fp32_copies_of_a_half_product_are_counted_to_the_byte(bench: ModuleType, name: str) -> None:
    a, b = torch.randn(2, 96, 160).half(), torch.randn(2, 160, 224).half()
    given = (a, b) if "b" in name[:2] else (a[0], b[0])
    if "add" in name:
        given = (torch.randn(224).half(), *given)
    with cpu_half_kernels(half=True, bf16=False):
        extra, out = beside(bench, lambda: getattr(A, name)(*given))
        assert cpu_workspace(name, given, out, fast_half=True) == extra > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_copies_of_attention_are_counted(bench: ModuleType, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(4, 4, 256, 64).to(dtype) for _ in range(3))
    with cpu_half_kernels(half=True, bf16=True):
        out = getattr(A, FLASH)(q, k, v)
        given = (out[0], q, k, v, *out, 0.0, False)
        extra, grads = beside(bench, lambda: getattr(A, f"{FLASH}_backward")(*given))
    predicted = cpu_workspace(f"{FLASH}_backward", given, grads, fast_half=True)
    assert 0.75 * extra < predicted <= extra  # the kernel's own buffers, one for each thread, are not counted


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "kernel"), [((64, 64), 3), ((64, 256), 1)])
def test_fp32_copies_of_a_half_convolution_are_counted(
    bench: ModuleType, form: torch.memory_format, channels: tuple[int, int], kernel: int
) -> None:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape).half().to(memory_format=form)

    x, w = tensor(4, channels[0], 32, 32), tensor(channels[1], channels[0], kernel, kernel)
    sizes = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    with cpu_half_kernels(half=True, bf16=False):
        extra, y = beside(bench, lambda: A.convolution(x, w, None, *sizes))
        assert cpu_workspace("convolution", (x, w, None, *sizes), y, fast_half=True) == pytest.approx(extra, rel=0.1)
        given = (y, x, w, [0], *sizes, [True, True, False])
        extra, grads = beside(bench, lambda: A.convolution_backward(*given))
        assert cpu_workspace("convolution_backward", given, grads, fast_half=True) == pytest.approx(extra, rel=0.1)


def test_other_kernels_take_nothing() -> None:
    a = torch.randn(8, 8)
    assert cpu_workspace("mm", (a, a), a @ a, fast_half=True) == 0
    assert cpu_workspace("mm", (a.half(), a.half()), a.half(), fast_half=False) == 0
    assert cpu_workspace("relu", (a.half(),), a.half(), fast_half=True) == 0


@pytest.mark.parametrize("policy", ["fp16_dynamic", "fp16_master_dynamic", "bf16", "bf16_master"])
@pytest.mark.parametrize("model", ["vit", "resnet"])
def test_the_peak_in_half_is_what_the_allocator_says(bench: ModuleType, model: str, policy: str) -> None:
    config = compose([f"model={model}", f"precision={policy}", "train.ema.decay=0.9", "train.batch_size=64"]).config
    with switches(config, CPU):
        state, data, _ = build(config, CPU)
        window = [next(iter(data.train_batches(0)))]
        train_step(state, window)
        grown = bench.allocated(lambda: train_step(state, window))
    with predicting(config, CPU) as predict:
        found = predict(config.train.batch_size)
    highest = found.counted.highest
    standing = sum(highest[kind] for kind in bench.STANDING) + highest["buffers"] // 2
    assert found.peak_bytes - standing == pytest.approx(grown, rel=0.07)


# --- saving and resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "fp16_master_dynamic"])
def test_saving_and_resuming_make_no_copy_of_the_state(bench: ModuleType, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "last.pt"
    words = ["model=mlp", "model.kwargs.hidden=[512,512]", f"precision={policy}", "train.ema.decay=0.9"]
    config = compose(words).config
    with switches(config, CPU):
        state, data, _ = build(config, CPU)
        train_step(state, [next(iter(data.train_batches(0)))])
        size = sum(t.nbytes for t in (*state.model.parameters(), *state.weights.by_name.values()))
        assert bench.allocated(lambda: checkpoint.save(checkpoint.snapshot(state), path)) < 0.01 * size
        before = {name: truth.detach().clone() for name, truth in state.weights}
        moments = [s["exp_avg"].clone() for s in state.optimizer.state.values()]
        saved = checkpoint.load(path)
        train_step(state, [next(iter(data.train_batches(0)))])
        assert bench.allocated(lambda: checkpoint.restore(state, saved, path=path)) < 0.01 * size
        assert all(torch.equal(before[name], truth) for name, truth in state.weights)
        now = [s["exp_avg"] for s in state.optimizer.state.values()]
        assert all(map(torch.equal, moments, now))
        # What was read is copied: the state is not tied to the file, which training must not write to.
        mapped = {t.untyped_storage().data_ptr() for t in saved["model"].values()}
        assert not mapped & {t.untyped_storage().data_ptr() for t in state.model.state_dict().values()}


def test_a_checkpoint_whose_bytes_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save({"format": checkpoint.FORMAT, "values": torch.arange(4096)}, path)
    assert torch.equal(checkpoint.load(path)["values"], torch.arange(4096))
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(99, 103).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: the checksum of its part"):
        checkpoint.load(path)


def test_a_file_of_older_torch_is_read_without_a_map(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    torch.save({"weight": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    assert checkpoint.load(path, own=False)["weight"].tolist() == [0, 1, 2]


# --- the bench --------------------------------------------------------------------------------------------------------


def test_a_tensor_that_an_import_set_aside_is_counted(bench: ModuleType) -> None:
    """``mprun.imports.uncollected`` freezes what is alive, a rehearsal's model too: no leak must hide there."""
    before = sum(bench.distinct(CPU).values())
    kept = torch.zeros(12_345)
    gc.freeze()
    assert sum(bench.distinct(CPU).values()) - before == kept.nbytes


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the memory of a process as Linux tells it"
)
def test_the_bench_measures_a_step(bench: ModuleType) -> None:
    words = ["model=mlp", "model.kwargs.hidden=[1024,1024]", "precision=fp16_master_dynamic", bench.EMA]
    row = {"model": "mlp", "policy": "fp16_master_dynamic", "with": [bench.EMA], **bench.run_worker(words, [])}
    assert row["estimate"] == sum(row["categories"].values())
    assert row["allocator"] == pytest.approx(row["estimate"], rel=0.02)
    assert row["resident"] == pytest.approx(
        row["estimate"], rel=0.25
    )  # pages and libraries: coarse, the model is small
    assert row["left"] < 2**16  # nothing of weight outlives a state that is dropped
    assert 0 <= row["held"] < 0.01 * row["state"]
    lines = {line["what"]: line for line in bench.judged([row])}
    assert len(lines) == 4
    assert all(line["met"] == (line["ratio"] <= line["target"]) for line in lines.values())
    assert row["phases"]["save"] < 0.1 * row["state"]
    bench.print_row(row)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--rows", "resnet50", "--policies", "bf16_master"],
            "no row has one of --policies bf16_master (there are resnet50: fp32",
        ),
        (["--policies", "fp17"], "'fp16_master_dynamic'"),
        (["--rows", "mlp"], "'vit_small'"),
    ],
)
def test_a_choice_without_rows_is_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory_peak", *words])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err
