"""FP16 (and BF16 attention) on the CPU: the fast kernels against torch's own, in accuracy and in time.

    python bench/fp16_kernels.py [--threads 1] [--seconds 0.6] [--json FILE]

Columns, for every operation:

* ``error``: largest error against float64 on the same inputs, over the output and the gradients, relative to the larger of
  |reference| and rms(reference) / 100. One rounding makes 4.9e-4 in FP16 and 3.9e-3 in BF16 at most. More than that comes from
  roundings inside, and shows most where sums cancel.
* ``equal``: share of entries in which fast and native agree bit for bit
* ``inf``: with inputs scaled so that many outputs overflow: are the infinities of fast those of the native kernel, and are
  they those of float64 (magnitude 65520 and up)?
* ``native/fast``, ``fast/fp32``: ratios of times, medians over rounds in which the three take turns
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mprun.precision.cpu_half import cpu_half_kernels

Function = Callable[..., Tensor]
HALF, BF16 = torch.float16, torch.bfloat16

# name -> (function, shapes of its inputs, backward too?, dtype)
OPERATIONS: dict[str, tuple[Function, list[tuple[int, ...]], bool, torch.dtype]] = {
    "mm 256^3": (torch.mm, [(256, 256), (256, 256)], False, HALF),
    "mm 16^3": (torch.mm, [(16, 16), (16, 16)], False, HALF),
    "addmm": (torch.addmm, [(128,), (512, 64), (64, 128)], False, HALF),
    "linear, 3-D, backward": (F.linear, [(32, 17, 64), (128, 64), (128,)], True, HALF),
    "bmm": (torch.bmm, [(16, 64, 64), (16, 64, 64)], False, HALF),
    "baddbmm": (torch.baddbmm, [(16, 64, 64), (16, 64, 64), (16, 64, 64)], False, HALF),
    "mv": (torch.mv, [(512, 512), (512,)], False, HALF),
    "vector @ matrix": (torch.matmul, [(512,), (512, 512)], False, HALF),
    "conv1d": (F.conv1d, [(16, 16, 64), (32, 16, 3)], False, HALF),
    "conv2d 3x3": (lambda x, w: F.conv2d(x, w, padding=1), [(16, 16, 16, 16), (32, 16, 3, 3)], False, HALF),
    "conv2d 3x3, backward": (lambda x, w: F.conv2d(x, w, padding=1), [(16, 16, 16, 16), (32, 16, 3, 3)], True, HALF),
    "conv2d 1x1": (F.conv2d, [(16, 32, 16, 16), (32, 32, 1, 1)], False, HALF),
    "conv2d depthwise, backward": (
        lambda x, w: F.conv2d(x, w, groups=32),
        [(8, 32, 16, 16), (32, 1, 3, 3)],
        True,
        HALF,
    ),
    "conv2d stride 2": (lambda x, w: F.conv2d(x, w, stride=2), [(16, 16, 17, 17), (32, 16, 3, 3)], False, HALF),
    "conv3d, backward": (F.conv3d, [(2, 8, 8, 8, 8), (16, 8, 3, 3, 3)], True, HALF),
    "conv_transpose2d": (F.conv_transpose2d, [(8, 16, 16, 16), (16, 16, 3, 3)], False, HALF),
    "attention": (F.scaled_dot_product_attention, [(16, 4, 65, 32)] * 3, False, HALF),
    "attention, backward": (F.scaled_dot_product_attention, [(16, 4, 65, 32)] * 3, True, HALF),
    "attention, 17 tokens, backward": (F.scaled_dot_product_attention, [(64, 4, 17, 16)] * 3, True, HALF),
    "bf16 attention, 17 tokens, backward": (F.scaled_dot_product_attention, [(64, 4, 17, 16)] * 3, True, BF16),
    "bf16 attention, 65 tokens, backward": (F.scaled_dot_product_attention, [(16, 4, 65, 32)] * 3, True, BF16),
    "bf16 attention, 512 tokens, backward": (F.scaled_dot_product_attention, [(1, 4, 512, 64)] * 3, True, BF16),
}


def kernels(fast: bool) -> Any:
    """The context of one of the two contestants."""
    return cpu_half_kernels(half=True, bf16=True) if fast else nullcontext()


def evaluate(function: Function, inputs: list[Tensor], backward: bool) -> list[Tensor]:
    """The output, and the gradients of all inputs for an upstream gradient of ones."""
    if not backward:
        return [function(*inputs)]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


def accuracy(function: Function, inputs: list[Tensor], backward: bool) -> dict[str, Any]:
    """Errors of both against float64, agreement between them, and the infinities of scaled inputs."""
    reference = evaluate(function, [t.double() for t in inputs], backward)
    results = {}
    for name in ("native", "fast"):
        with kernels(name == "fast"):
            results[name] = evaluate(function, inputs, backward)
    row: dict[str, Any] = {
        f"error_{name}": max(map(relative_error, result, reference)) for name, result in results.items()
    }
    pairs = [(a == b).double().mean().item() for a, b in zip(results["native"], results["fast"], strict=True)]
    row["equal"] = min(pairs)
    row |= infinities(function, inputs, reference[0])
    return row


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Largest error relative to the reference, or to a hundredth of its rms where sums cancel."""
    floor = reference.square().mean().sqrt() / 100
    return float(((result.double() - reference).abs() / reference.abs().maximum(floor)).max())


def infinities(function: Function, inputs: list[Tensor], reference: Tensor) -> dict[str, bool | None]:
    """Whether fast overflows where native does, and where float64 says; None where the operation averages or cannot overflow."""
    if inputs[0].dtype is not HALF or function is F.scaled_dot_product_attention:
        return {"inf_as_native": None, "inf_as_float64": None}
    scale = 65504.0 / float(reference.square().mean().sqrt())
    scaled = [(t * scale**0.5).half() for t in inputs]
    native = function(*scaled).isinf()
    with kernels(True):
        fast = function(*scaled).isinf()
    truth = function(*[t.double() for t in scaled]).abs() >= 65520
    assert truth.any()
    return {"inf_as_native": torch.equal(native, fast), "inf_as_float64": torch.equal(truth, fast)}


def timing(function: Function, inputs: list[Tensor], backward: bool, seconds: float) -> dict[str, float]:
    """Median times in milliseconds, of rounds in which native, fast and FP32 take turns."""
    wide = [t.float() for t in inputs]
    contestants = {"native": (inputs, False), "fast": (inputs, True), "fp32": (wide, False)}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times["fp32"]) < 4:
        for name, (tensors, fast) in contestants.items():
            with kernels(fast):
                evaluate(function, tensors, backward)  # warm caches; its time does not count
                begin = time.perf_counter()
                evaluate(function, tensors, backward)
                times[name].append(1e3 * (time.perf_counter() - begin))
    native, fast_, fp32 = (statistics.median(times[name][1:]) for name in contestants)
    return {
        "ms_native": native,
        "ms_fast": fast_,
        "ms_fp32": fp32,
        "native_over_fast": native / fast_,
        "fast_over_fp32": fast_ / fp32,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--seconds", type=float, default=0.6, help="time per operation, at least (default 0.6)")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = {
        "torch": torch.__version__,
        "threads": options.threads,
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.machine()),
    }
    print(" ".join(f"{key}={value}" for key, value in machine.items()))
    print(
        f"{'operation':37s} {'error native':>12s} {'error fast':>10s} {'equal':>7s} {'inf':>7s} "
        f"{'native/fast':>11s} {'fast/fp32':>9s} {'fast ms':>8s}"
    )
    rows = []
    for name, (function, shapes, backward, dtype) in OPERATIONS.items():
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        row = {
            "operation": name,
            **accuracy(function, inputs, backward),
            **timing(function, inputs, backward, options.seconds),
        }
        rows.append(row)
        inf = "/".join({True: "yes", False: "NO", None: "-"}[row[key]] for key in ("inf_as_native", "inf_as_float64"))
        print(
            f"{name:37s} {row['error_native']:12.1e} {row['error_fast']:10.1e} {row['equal']:7.2%} {inf:>7s} "
            f"{row['native_over_fast']:11.1f} {row['fast_over_fp32']:9.2f} {row['ms_fast']:8.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
