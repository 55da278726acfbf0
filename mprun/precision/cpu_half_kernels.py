"""The kernels of :mod:`mprun.precision.cpu_half`: which operations they stand for, and what each of them does.

A kernel gets the dispatcher's key set of the call; ``keys & under`` makes ``redispatch`` go to the kernel that would have run.
Nothing in here is recorded by autograd. Mixed dtypes go on unchanged as well: torch has the right error for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Kernel: TypeAlias = Callable[..., Any]
Result: TypeAlias = Literal["new", "out", "self"]  # a new tensor, the argument `out`, or the first argument in place

users: dict[torch.dtype, int] = {torch.float16: 0, torch.bfloat16: 0}  # how many ask for the kernels of a dtype now

# Every matrix product and convolution with a slow half kernel on the CPU. `linear` arrives as `addmm` or `mm`, a
# convolution of any rank, grouped or transposed, as `convolution`. Compiled code uses the `.out` forms.
_BY_RESULT: dict[Result, str] = {
    "new": "mm addmm bmm baddbmm _addmm_activation convolution convolution_backward",
    "out": "mm.out addmm.out bmm.out baddbmm.out _addmm_activation.out",
    "self": "addmm_ baddbmm_",
}
PRODUCTS: dict[str, Result] = {name: result for result, names in _BY_RESULT.items() for name in names.split()}

BACKWARD = "convolution_backward"  # the one product that BF16 needs as well

# Operation -> how many of its leading results are rounded, and for which dtypes it is slow. The logsumexp of the forward
# pass stays FP32.
ATTENTION: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (1, (torch.float16,)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (3, (torch.float16, torch.bfloat16)),
}

# BF16's backward pass of attention is slow where tokens times width of a head are fewer than this.
SMALL_HEAD = 2**15


def kernels_of(group: str) -> dict[str, Kernel]:
    """Operation -> kernel, of ``products``, ``attention`` or ``convolution_backward``."""
    under = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    if group == "attention":
        return {name: _attention(operation(name), under, *how) for name, how in ATTENTION.items()}
    if group == BACKWARD:
        return {BACKWARD: _convolution_backward(operation(BACKWARD), under)}
    forms = {"new": _returns_new, "out": _writes_out, "self": _writes_self}
    return {name: forms[how](operation(name), under) for name, how in PRODUCTS.items() if name != BACKWARD}


def operation(name: str) -> Any:
    """The ``aten`` operation of this name, or None."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def torch_has_half_arithmetic() -> bool:
    """Whether torch computes half products natively on this processor. A build without oneDNN does not."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


def _widen(keys: Any, values: tuple[Any, ...]) -> list[Any] | None:
    """FP16 tensors among ``values`` as FP32, or None unless this is a dense CPU call with FP16 tensors only."""
    if not keys.has(torch._C.DispatchKey.CPU):
        return None
    wide = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype is not torch.float16:
                return None
            value = value.float()
        wide.append(value)
    return wide


def _returns_new(operation: Any, under: Any) -> Kernel:
    # Compiled code asserts the strides that torch predicts for half: its reference loops for volumes know no channels-last.
    plain_volumes = not torch_has_half_arithmetic()

    def narrow(value: Tensor) -> Tensor:
        half = value.half()
        return half.contiguous() if plain_volumes and half.dim() == 5 else half

    def kernel(keys: Any, first: Tensor, *rest: Any, **options: Any) -> Any:
        below = keys & under
        if first.dtype is not torch.float16 or (wide := _widen(keys, rest)) is None:
            return operation.redispatch(below, first, *rest, **options)
        result = operation.redispatch(below, first.float(), *wide, **options)
        if isinstance(result, Tensor):
            return narrow(result)
        return tuple(part if part is None else narrow(part) for part in result)  # None: a gradient nobody asked for

    return kernel


def _convolution_backward(operation: Any, under: Any) -> Kernel:
    half, bf16 = _returns_new(operation, under), torch.bfloat16

    def kernel(keys: Any, *arguments: Any) -> Any:
        tensors, rest = arguments[:3], arguments[3:]  # output gradient, input, weight
        if tensors[0].dtype is torch.float16 and users[torch.float16]:
            return half(keys, *arguments)
        affected = users[bf16] and keys.has(torch._C.DispatchKey.CPU) and all(t.dtype is bf16 for t in tensors)
        if not (affected and rest[-1][1] and _gradient_reads_past_input(*tensors, *rest[1:5])):
            return operation.redispatch(keys & under, *arguments)
        result = operation.redispatch(keys & under, *(t.float() for t in tensors), *rest)
        return tuple(part if part is None else part.to(bf16) for part in result)

    return kernel


def _gradient_reads_past_input(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool
) -> bool:
    """Whether on some axis a tap is outside the input at every position; in volumes, also whether a kernel is longer."""
    source, positions = (gradient, x) if transposed else (x, gradient)
    rank = weight.dim() - 2
    for axis in range(rank):
        step, pad, gap = (values[axis if len(values) > 1 else 0] for values in (stride, padding, dilation))
        if rank == 3 and (weight.shape[axis + 2] - 1) * gap >= source.shape[axis + 2]:
            return True
        for offset in range(-pad, weight.shape[axis + 2] * gap - pad, gap):
            first = max(0, -(offset // step))  # the first position at which the tap is not left of the input
            if first >= positions.shape[axis + 2] or first * step + offset >= source.shape[axis + 2]:
                return True
    return False


def _writes_out(operation: Any, under: Any) -> Kernel:
    def kernel(keys: Any, first: Tensor, *rest: Any, out: Tensor, **options: Any) -> Any:
        below = keys & under
        half = first.dtype is torch.float16 and out.dtype is torch.float16
        if not half or (wide := _widen(keys, rest)) is None:
            return operation.redispatch(below, first, *rest, out=out, **options)
        result = first.new_empty(0, dtype=torch.float32)
        operation.redispatch(below, first.float(), *wide, out=result, **options)
        if out.shape != result.shape:
            if out.numel():  # deprecated: torch's kernel resizes it, and warns
                return operation.redispatch(below, first, *rest, out=out, **options)
            out.resize_(result.shape)
        return out.copy_(result)

    return kernel


def _writes_self(operation: Any, under: Any) -> Kernel:
    def kernel(keys: Any, target: Tensor, *rest: Any, **options: Any) -> Any:
        below = keys & under
        if target.dtype is not torch.float16 or (wide := _widen(keys, rest)) is None:
            return operation.redispatch(below, target, *rest, **options)
        result = target.float()  # a copy, which the FP32 kernel overwrites
        operation.redispatch(below, result, *wide, **options)
        return target.copy_(result)

    return kernel


def _attention(operation: Any, under: Any, rounded: int, dtypes: tuple[torch.dtype, ...]) -> Kernel:
    def kernel(keys: Any, first: Tensor, *rest: Any, **options: Any) -> Any:
        below, dtype = keys & under, first.dtype
        wanted = dtype in dtypes and users[dtype] and keys.has(torch._C.DispatchKey.CPU)
        if not wanted or (dtype is torch.bfloat16 and not small_head(rest[1])):  # of output gradient, query, key, ...
            return operation.redispatch(below, first, *rest, **options)

        def widen(value: Any) -> Any:  # logsumexp and an FP32 mask are FP32 already
            return value.float() if isinstance(value, Tensor) and value.dtype is dtype else value

        result = operation.redispatch(below, *map(widen, (first, *rest)), **{k: widen(v) for k, v in options.items()})
        return tuple(part.to(dtype) if i < rounded else part for i, part in enumerate(result))

    return kernel


def small_head(key: Tensor) -> bool:
    """Whether BF16's backward pass of attention over ``key`` (..., tokens, width) takes longer than FP32's with the casts."""
    return key.shape[-2] * key.shape[-1] < SMALL_HEAD
