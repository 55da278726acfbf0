"""Real FP16 on the CPU at FP32 speed: widen the inputs, run the FP32 kernel, round once.

What a Tensor Core computes. Its inputs are FP16; the product of two of them has at most 22 significant bits, so it is
exact in FP32; products are summed in FP32; only the finished sum is rounded to FP16:

    C = round16( alpha * sum_k A[i,k] * B[k,j] + beta * C0 )      products exact, sums in FP32, ONE rounding

FP16 -> FP32 is exact, so a processor without half arithmetic can do this with its FP32 kernels:
``mm(a.float(), b.float()).half()``. This module does that, in torch's dispatcher, for matrix products, convolutions and
attention. Bias and ``beta * C0`` join in FP32, before the rounding. torch's own CPU half kernels take 3 to 50 times as
long. In products and forward convolutions they give the same numbers (99.6 % of the entries bit for bit; the rest
differ by the order of the FP32 sum). In transposed and backward convolutions they also round partial sums, so that
they are less exact, and can overflow where the result does not.

Range. The largest FP16 is 65504, and the next value would be 65536. Rounding to nearest takes what is below the midpoint,
65520, to 65504, and everything from 65520 on to inf (the tie goes to the even significand, which is the one out of
range). The FP32 sum knows on which side it is, so overflow appears where IEEE rounding puts it. A partial sum beyond
65504 does no harm, as on a GPU. Magnitudes up to 2**-25 become 0; above that they live on as subnormals, spaced 2**-24.

Attention. Scores and probabilities stay FP32 inside the kernel; the results are rounded once. A GPU also rounds the
probabilities before they meet V. BF16 kernels are fast natively, all but one: the backward pass of CPU flash attention
takes 3 to 10 times as long as in FP32 for short sequences. At 512 tokens of width 64 they are even, at 1024 BF16 is a
quarter quicker. ``bf16`` widens that one, below ``SMALL_HEAD``.

BF16 convolutions. The native weight gradient reads memory that nobody wrote where a kernel tap meets nothing but padding
(3x3, stride 2, padding 1 on one pixel), and in volumes shorter than the kernel. FP32 is right there. ``bf16`` widens
``convolution_backward`` for these shapes; all others keep the quick kernel.

What stays native: ``mv``, ``dot``, ``addr``, reductions and pointwise operations, which are neither slow nor wrong, and
SDPA's math path (dropout, masks that need gradients), which widens to FP32 by itself. ``addbmm``, ``conv_tbc`` and
recurrent cells are composed of the operations above, on the CPU as on CUDA: one rounding per part. cuDNN adds a
convolution's bias after its rounding; here, as in oneDNN, it joins before.

How. The kernels sit on the dispatch key ``BackendSelect``, which every call passes just above the device's own kernels:
below autograd, autocast, vmap and tracing. So autograd still saves FP16 tensors, backward and compiled code (which
calls ``mm.out`` through the dispatcher) reach the same kernels, and nothing of torch's is overwritten. Other dtypes and
devices go on to the kernel they would have had, bit for bit, for 2 to 3 us a call; FP16 pays 5 to 8 us and the casts.
Replacing the "CPU" kernels themselves would cost the same, but ``get_kernel(...).call_boxed`` keeps Python's global lock
during the arithmetic, which stalls loader threads; ``redispatch`` gives it up.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mprun.errors import PrecisionError
from mprun.precision.cpu_half_kernels import (
    ATTENTION,
    BACKWARD,
    PRODUCTS,
    kernels_of,
    operation,
    torch_has_half_arithmetic,
    users,
)

SETTINGS = ("auto", "fast", "native")


def resolve(setting: str, *, device_type: str, compute_dtype: torch.dtype | None) -> str:
    """Say which FP16 kernels a run will really use.

    ``auto`` asks what torch asks itself before it hands a half product to oneDNN: ``_is_mkldnn_fp16_supported()``. It is
    true with AVX512-FP16 or AMX-FP16 on x86 and with half arithmetic on ARM, if this build makes use of them. Where
    it is false torch falls back to its slow reference loops, and ``auto`` means ``fast``.

    Args:
        setting: ``auto``, ``fast`` or ``native`` (``numerics.cpu_fp16``).
        device_type: Where the model runs, such as ``cpu`` or ``cuda``.
        compute_dtype: The policy's compute dtype, or None if it has none.

    Returns:
        ``fast``, ``native``, or ``none`` where no FP16 runs on the CPU.

    Raises:
        PrecisionError: If ``setting`` is none of the three.
    """
    if setting not in SETTINGS:
        raise PrecisionError(f"numerics.cpu_fp16={setting!r} is not one of {', '.join(SETTINGS)}")
    if device_type != "cpu" or compute_dtype is not torch.float16:
        return "none"
    if setting == "auto":
        return "native" if torch_has_half_arithmetic() else "fast"
    return setting


@contextmanager
def cpu_half_kernels(*, half: bool, bf16: bool) -> Iterator[None]:
    """Use the fast kernels for a while, in all threads of this process.

    May be nested and repeated, with any mixture of arguments: kernels stay for as long as somebody asks for them. The order
    against ``torch.autocast`` and other contexts does not matter, but forward and backward must both be inside.

    Args:
        half: FP16 products, convolutions and attention.
        bf16: The backward pass of flash attention for small heads of BF16, and of convolutions with a tap that meets padding
            only.

    Raises:
        PrecisionError: If torch lacks a hook, or if its FP32 kernels are allowed to multiply in BF16.
    """
    mine = [dtype for dtype, on in ((torch.float16, half), (torch.bfloat16, bf16)) if on]
    _check_hooks()
    if half:
        _refuse_bf16_inside_fp32()
    _change(mine, +1)
    try:
        yield
    finally:
        _change(mine, -1)


def _refuse_bf16_inside_fp32() -> None:
    """Stop if oneDNN may cut FP32 inputs to BF16: eight significant bits would lose three of FP16's eleven."""
    mkldnn: Any = torch.backends.mkldnn
    for name in ("matmul", "conv"):
        if getattr(getattr(mkldnn, name, None), "fp32_precision", "ieee") == "bf16":
            raise PrecisionError(
                f"numerics.cpu_fp16=fast needs FP32 kernels that keep FP16 inputs whole, but "
                f"torch.backends.mkldnn.{name}.fp32_precision is 'bf16'; set it to 'ieee' "
                "(torch.set_float32_matmul_precision('highest')), or use numerics.cpu_fp16=native"
            )


# --- installing -------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_libraries: dict[str, Any] = {}


def _change(dtypes: list[torch.dtype], by: int) -> None:
    """Count users per dtype, then install or remove what that asks for. Installed kernels read ``users``."""
    with _lock:
        for dtype in dtypes:
            users[dtype] += by
        used = any(users.values())
        wanted = {"attention": used, BACKWARD: used, "products": users[torch.float16] > 0}
        for group, on in wanted.items():
            if on and group not in _libraries:
                _libraries[group] = _install(group)
            elif not on and group in _libraries:
                _libraries.pop(group)._destroy()


def _install(group: str) -> Any:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels_of(group).items():
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library


def _check_hooks() -> None:
    library: Any = torch.library.Library
    present = {
        "Library.impl(with_keyset=...)": "with_keyset" in inspect.signature(library.impl).parameters,
        "Library._destroy": hasattr(library, "_destroy"),
        "OpOverload.redispatch": hasattr(torch._ops.OpOverload, "redispatch"),
        "the dispatch key BackendSelect": hasattr(torch._C.DispatchKey, "BackendSelect"),
        "torch._C._dispatch_keyset_full_after": hasattr(torch._C, "_dispatch_keyset_full_after"),
        **{f"the operation aten::{name}": operation(name) is not None for name in (*PRODUCTS, *ATTENTION)},
    }
    missing = [hook for hook, there in present.items() if not there]
    if missing:
        raise PrecisionError(
            f"numerics.cpu_fp16=fast needs {missing[0]}, which torch {torch.__version__} lacks; "
            "numerics.cpu_fp16=native works without it (slowly)"
        )
