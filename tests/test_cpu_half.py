"""Fast FP16 on the CPU: one rounding, IEEE overflow, everything else untouched.

The reference is float64 on the same half inputs. A result that was rounded once is at most half an ulp from it, plus what
K additions in FP32 may lose:  |y - ref| <= 2**-11 |ref| + 2**-25 + K 2**-24 sum|a||b|.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.errors import PrecisionError
from mprun.precision import cpu_half
from mprun.precision import cpu_half_kernels as kernels_module
from mprun.precision.cpu_half import cpu_half_kernels, resolve
from mprun.precision.cpu_half_kernels import ATTENTION, PRODUCTS
from mprun.precision.workspace import cpu_workspace

HALF, BF16 = torch.float16, torch.bfloat16
INF = float("inf")
ROUND = {HALF: 2.0**-11, BF16: 2.0**-8}  # half an ulp, relative
TINY = {HALF: 2.0**-25, BF16: 0.0}  # half the spacing of subnormals

Operation = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fast() -> Iterator[None]:
    with cpu_half_kernels(half=True, bf16=True):
        yield


def installed(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "BackendSelect"))


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = HALF, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(f: Operation, tensors: list[Tensor]) -> list[Tensor]:
    """Output and all input gradients for an upstream gradient that is the same for every dtype."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = f(*leaves)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(HALF).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


LINEAR: dict[str, tuple[Operation, tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((17, 33), (33, 9))),
    "mm of transposed": (lambda a, b: torch.mm(a.t(), b.t()), ((33, 17), (9, 33))),
    "addmm": (torch.addmm, ((9,), (17, 33), (33, 9))),
    "addmm alpha beta": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), ((17, 9), (17, 33), (33, 9))),
    "linear": (F.linear, ((2, 5, 33), (7, 33), (7,))),
    "bmm": (torch.bmm, ((3, 5, 33), (3, 33, 7))),
    "bmm of views": (lambda a, b: torch.bmm(a[:, ::2], b.mT), ((3, 9, 33), (3, 7, 33))),
    "baddbmm": (torch.baddbmm, ((3, 5, 7), (3, 5, 33), (3, 33, 7))),
    "mv": (torch.mv, ((17, 33), (33,))),
    "addmv": (torch.addmv, ((17,), (17, 33), (33,))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((3, 5, 33), (3, 7, 33))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), ((2, 4, 11), (6, 4, 3), (6,))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), ((2, 4, 7, 7), (6, 4, 3, 3), (6,))),
    "conv2d strided": (lambda x, w: F.conv2d(x, w, stride=2, padding=(1, 2)), ((2, 4, 9, 9), (6, 4, 3, 3))),
    "conv2d dilated": (lambda x, w: F.conv2d(x, w, dilation=2), ((2, 4, 9, 9), (6, 4, 3, 3))),
    "conv2d grouped": (lambda x, w: F.conv2d(x, w, groups=2), ((2, 4, 7, 7), (6, 2, 3, 3))),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=4), ((2, 4, 7, 7), (4, 1, 3, 3))),
    "conv2d same": (lambda x, w: F.conv2d(x, w, padding="same"), ((2, 4, 7, 7), (6, 4, 3, 3))),
    "conv2d 1x1": (F.conv2d, ((2, 8, 7, 7), (6, 8, 1, 1))),
    "conv3d": (F.conv3d, ((2, 4, 5, 5, 5), (6, 4, 3, 3, 3))),
    "conv_transpose1d": (F.conv_transpose1d, ((2, 4, 11), (4, 6, 3))),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        ((2, 4, 5, 5), (4, 6, 3, 3), (6,)),
    ),
    "conv_transpose2d grouped": (lambda x, w: F.conv_transpose2d(x, w, groups=2), ((2, 4, 5, 5), (4, 3, 3, 3))),
    "conv_transpose3d": (F.conv_transpose3d, ((1, 4, 4, 4, 4), (4, 3, 2, 2, 2))),
}


# --- one rounding -----------------------------------------------------------------------------------------------------


def excess(result: Tensor, reference: Tensor, magnitude: Tensor, additions: int = 1000) -> float:
    """How far ``result`` is from ``reference``, in units of the bound above (1 is the bound)."""
    bound = ROUND[HALF] * reference.abs() + TINY[HALF] + additions * 2.0**-24 * magnitude
    return float(((result.double() - reference).abs() / bound).max())


@pytest.mark.parametrize("name", LINEAR)
def test_output_and_gradients_are_rounded_once(name: str, fast: None) -> None:
    f, shapes = LINEAR[name]
    tensors = inputs(*shapes)
    results = with_gradients(f, tensors)
    references = with_gradients(f, [t.double() for t in tensors])
    # The operations are linear in each input: absolute values in, sums of absolute products out.
    leaves = [t.double().abs().requires_grad_() for t in tensors]
    y = f(*leaves)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(HALF).double().abs()
    magnitudes = [y.detach(), *torch.autograd.grad(y, leaves, upstream)]
    for result, reference, magnitude in zip(results, references, magnitudes, strict=True):
        assert result.dtype is HALF
        assert excess(result, reference, magnitude, additions=100) <= 1.0


@pytest.mark.parametrize("name", LINEAR)
def test_agrees_with_the_native_kernels(name: str) -> None:
    """Forward nearly bit for bit. Native convolutions round partial sums in backward: there fast may only be better."""
    f, shapes = LINEAR[name]
    tensors = inputs(*shapes)
    reference = with_gradients(f, [t.double() for t in tensors])
    native = with_gradients(f, tensors)
    with cpu_half_kernels(half=True, bf16=False):
        fast = with_gradients(f, tensors)
    if "transpose" not in name.replace("transposed", ""):
        assert (fast[0] == native[0]).double().mean() >= 0.98
    for ours, theirs, truth in zip(fast, native, reference, strict=True):
        assert ours.shape == theirs.shape
        assert [s for s, n in zip(ours.stride(), ours.shape, strict=True) if n > 1] == [
            s for s, n in zip(theirs.stride(), theirs.shape, strict=True) if n > 1
        ]
        torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3 * float(truth.abs().max()))
        assert (ours - truth).abs().mean() <= 1.02 * (theirs - truth).abs().mean()


def test_a_single_product_is_the_correctly_rounded_one(fast: None) -> None:
    """K = 1: every entry must equal the float64 product rounded directly to FP16, subnormals and infinities included."""
    bits = np.random.default_rng(0).integers(0, 2**16, size=(2, 400), dtype=np.uint16)
    a, b = bits.view(np.float16)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy((a.astype(np.float64)[:, None] * b.astype(np.float64)[None, :]).astype(np.float16))
    column, row = torch.from_numpy(a)[:, None], torch.from_numpy(b)[None, :]
    for result in (
        column @ row,
        torch.bmm(column[None], row[None])[0],
        F.conv1d(column[..., None], row.t()[..., None])[..., 0],
    ):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12).flatmap(lambda k: st.lists(st.integers(0, 2**16 - 1), min_size=2 * k, max_size=2 * k)))
def test_any_halves_give_the_fp32_product_rounded(patterns: list[int]) -> None:
    values = torch.from_numpy(
        np.array(patterns, dtype=np.uint16).view(np.float16)
    )  # NaN, inf and subnormals among them
    a, b = values.view(2, 1, -1)[0], values.view(2, -1, 1)[1]
    with cpu_half_kernels(half=True, bf16=False):
        result = a @ b
    torch.testing.assert_close(result, (a.float() @ b.float()).half(), rtol=0, atol=0, equal_nan=True)


# 256 * 255.875 = 65504, the largest FP16, plus `extra`.
BOUNDARY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b, c: torch.mm(torch.cat([a, torch.ones_like(a)], 1), torch.cat([b, c], 0)),
    "addmm": lambda a, b, c: torch.addmm(c, a, b),
    "addmm_": lambda a, b, c: c.clone().addmm_(a, b),
    "linear bias": lambda a, b, c: F.linear(a, b.t(), c[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None]),
    "baddbmm_": lambda a, b, c: c[None].clone().baddbmm_(a[None], b[None]),
    "bmm": lambda a, b, c: torch.bmm(torch.cat([a, torch.ones_like(a)], 1)[None], torch.cat([b, c], 0)[None]),
    "addmv": lambda a, b, c: torch.addmv(c[0], a, b[:, 0]),
    "addmv_": lambda a, b, c: c[0].clone().addmv_(a, b[:, 0]),
    "conv2d bias": lambda a, b, c: F.conv2d(a[..., None, None], b[..., None, None], c[0]),
    "conv_transpose1d bias": lambda a, b, c: F.conv_transpose1d(a[..., None], b[..., None], c[0]),
}


@pytest.mark.parametrize("name", BOUNDARY)
@pytest.mark.parametrize(
    ("extra", "expected"), [(0.0, 65504.0), (15.0, 65504.0), (15.992, 65504.0), (16.0, INF), (-32.0, 65472.0)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_is_where_ieee_puts_it(name: str, extra: float, expected: float, sign: int, fast: None) -> None:
    a = torch.tensor([[256.0 * sign]], dtype=HALF)
    b = torch.tensor([[255.875]], dtype=HALF)
    c = torch.tensor([[extra * sign]], dtype=HALF)
    assert BOUNDARY[name](a, b, c).flatten().tolist() == [expected * sign]


def test_partial_sums_beyond_the_range_do_no_harm(fast: None) -> None:
    a = torch.full((1, 3), 256.0, dtype=HALF)
    assert (a @ torch.tensor([[256.0], [256.0], [-384.0]], dtype=HALF)).item() == 256.0 * 128


@pytest.mark.parametrize(("power", "expected"), [(-24, 2.0**-24), (-25, 0.0), (-26, 0.0)])
def test_underflow_is_gradual(power: int, expected: float, fast: None) -> None:
    a, b = torch.tensor([[2.0**-12]], dtype=HALF), torch.tensor([[2.0 ** (power + 12)]], dtype=HALF)
    assert (a @ b).item() == expected
    above = (
        a * 1.5
    ) @ b  # 1.5 * 2**-25 is nearer to 2**-24 than to 0; 1.5 * 2**-24 is a tie, and goes to the even 2 * 2**-24
    assert above.item() == {-24: 2 * 2.0**-24, -25: 2.0**-24, -26: 0.0}[power]


def test_same_infinities_as_native() -> None:
    a, b = (t * 60 for t in inputs((32, 64), (64, 32)))
    native = a @ b
    with cpu_half_kernels(half=True, bf16=False):
        fast = a @ b
    assert 0.02 < native.isinf().double().mean() < 0.5
    assert torch.equal(native.isinf(), fast.isinf())
    assert (native == fast).double().mean() > 0.98


# --- attention --------------------------------------------------------------------------------------------------------

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "float mask": {"attn_mask": (torch.arange(81.0).view(9, 9) % 17 - 8) / 4},
    "bool mask": {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril(2)},
    "scale": {"scale": 0.5},
}


def attention(kind: str, dtype: torch.dtype) -> Operation:
    options = dict(MASKS[kind])
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(dtype)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_against_float64_and_native(kind: str, dtype: torch.dtype) -> None:
    tensors = [t.transpose(1, 2) for t in inputs(*[(2, 9, 3, 16)] * 3, dtype=dtype)]
    reference = with_gradients(attention(kind, torch.float64), [t.double() for t in tensors])
    native = with_gradients(attention(kind, dtype), tensors)
    with cpu_half_kernels(half=dtype is HALF, bf16=dtype is BF16):
        fast = with_gradients(attention(kind, dtype), tensors)
    output, *gradients = fast
    if dtype is HALF:  # rounded once; the BF16 forward pass is torch's
        assert ((output.double() - reference[0]).abs() <= ROUND[dtype] * reference[0].abs() + 2.0**-18).all()
    # Backward starts from the rounded output, whose error every entry of a row shares.
    for result, truth in zip(gradients, reference[1:], strict=True):
        assert (result.double() - truth).abs().max() <= 4 * ROUND[dtype] * truth.abs().max()
    for ours, theirs, truth in zip(fast, native, reference, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert (ours - truth).abs().mean() <= 1.02 * (theirs - truth).abs().mean()


def test_logsumexp_stays_float32(fast: None) -> None:
    q = inputs((1, 2, 8, 16))[0]
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert (out.dtype, logsumexp.dtype) == (HALF, torch.float32)


def test_each_dtype_is_a_separate_choice() -> None:
    def gradient(dtype: torch.dtype) -> Tensor:
        return with_gradients(attention("causal", dtype), inputs(*[(4, 4, 33, 16)] * 3, dtype=dtype))[1]

    native = {dtype: gradient(dtype) for dtype in (HALF, BF16)}
    for half, bf16 in product([False, True], repeat=2):
        with cpu_half_kernels(half=half, bf16=bf16):
            assert torch.equal(gradient(HALF), native[HALF]) is not half
            assert torch.equal(gradient(BF16), native[BF16]) is not bf16
            assert installed("mm") is half


@pytest.mark.parametrize(("tokens", "width"), [(511, 64), (512, 64), (64, 512), (2000, 16), (2048, 16)])
def test_bf16_attention_is_widened_where_its_head_is_small(tokens: int, width: int) -> None:
    tensors = inputs(*[(1, 1, tokens, width)] * 3, dtype=BF16)
    native = with_gradients(attention("causal", BF16), tensors)
    with cpu_half_kernels(half=False, bf16=True):
        ours = with_gradients(attention("causal", BF16), tensors)
    assert torch.equal(ours[0], native[0])  # the forward pass is torch's
    widened = tokens * width < 2**15
    assert all(torch.equal(a, b) for a, b in zip(ours, native, strict=True)) is not widened
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, logsumexp = operation(*tensors, 0.0, True)
    given = (ours[0], *tensors, ours[0], logsumexp, 0.0, True)
    held = cpu_workspace(f"{operation.__name__}_backward", given, ours[1:], fast_half=False)
    assert (held > 0) is widened  # what is not widened holds no FP32 copies


@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.5}, {"attn_mask": torch.zeros(9, 9, dtype=HALF, requires_grad=True)}]
)
def test_the_math_path_of_attention_works(options: dict[str, Any], fast: None) -> None:
    tensors = [t.requires_grad_() for t in inputs(*[(2, 3, 9, 16)] * 3)]
    y = F.scaled_dot_product_attention(*tensors, **options)
    y.float().square().sum().backward()
    assert y.dtype is HALF
    assert all(t.grad is not None and t.grad.dtype is HALF and t.grad.isfinite().all() for t in tensors)


# --- BF16 convolutions with a tap that meets nothing but padding ------------------------------------------------------

# Input, kernel, stride, padding, transposed. Without the cure the weight gradients are wrong (observed up to 1e38).
PADDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, bool]] = {
    "one pixel": ((4, 64, 1, 1), (64, 64, 3, 3), 2, 1, False),
    "one column": ((4, 64, 5, 1), (32, 64, 3, 3), 3, 1, False),
    "two columns": ((4, 16, 4, 2), (16, 16, 3, 3), 3, 1, False),
    "large kernel": ((1, 16, 1, 1), (32, 16, 7, 7), 3, 3, False),
    "even kernel": ((1, 16, 2, 1), (64, 16, 2, 2), 2, 1, False),
    "volume": ((1, 32, 9, 1, 16), (32, 32, 5, 3, 3), 2, 1, False),
    "short volume": ((1, 32, 2, 6, 6), (32, 32, 3, 3, 3), 1, 1, False),
    "transposed": ((2, 32, 1, 1), (32, 32, 3, 3), 2, 1, True),
}


def fill_free_memory_with_garbage() -> None:
    sizes = [2**k for k in range(6, 19, 2)] * 8
    del [torch.full((size,), 1e30) for size in sizes][:]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", PADDED)
def test_bf16_gradients_of_taps_in_the_padding(name: str, bias: bool) -> None:
    image, kernel, stride, padding, transposed = PADDED[name]
    rank = len(image) - 2
    where = [stride] * rank, [padding] * rank, [1] * rank, transposed, [0] * rank, 1

    def convolve(x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        return torch.convolution(x, w, b[0] if b else None, *where)

    def results(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = convolve(*leaves)
        upstream = inputs(tuple(y.shape), dtype=BF16, seed=1)[0].to(y.dtype)
        fill_free_memory_with_garbage()
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    tensors = inputs(image, kernel, *[(kernel[0],)] * bias, dtype=BF16)
    references = results(*[t.double() for t in tensors])
    with cpu_half_kernels(half=False, bf16=True):
        for _ in range(3):
            for result, reference in zip(results(*tensors), references, strict=True):
                assert result.dtype is BF16
                error = (result.double() - reference).abs()
                assert (error <= 1.001 * ROUND[BF16] * reference.abs() + 1e-5 * reference.abs().max()).all()


@given(
    n=st.integers(1, 6),
    k=st.integers(1, 5),
    s=st.integers(1, 4),
    p=st.integers(0, 4),
    d=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_taps_in_the_padding_are_the_ones_without_gradient(
    n: int, k: int, s: int, p: int, d: int, transposed: bool
) -> None:
    """A tap meets only padding exactly where its gradient vanishes for positive inputs."""
    x, w = torch.ones(1, 1, n, dtype=torch.float64), torch.ones(1, 1, k, dtype=torch.float64, requires_grad=True)
    if (n - 1) * s - 2 * p + d * (k - 1) + 1 < 1 if transposed else n + 2 * p < d * (k - 1) + 1:
        return
    y = torch.convolution(x, w, None, [s], [p], [d], transposed, [0], 1)
    y.sum().backward()
    assert w.grad is not None
    found = kernels_module._gradient_reads_past_input(y, x, w, [s], [p], [d], transposed)
    assert found == bool((w.grad == 0).any())


def test_bf16_convolutions_whose_taps_all_meet_the_input_stay_native() -> None:
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=2, padding=1)

    tensors = inputs((2, 16, 8, 8), (16, 16, 3, 3), dtype=BF16)
    native = with_gradients(convolve, tensors)
    with cpu_half_kernels(half=True, bf16=True):
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(convolve, tensors), native, strict=True))


# --- everything else is untouched -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("name", LINEAR)
def test_other_float_types_are_bit_identical(name: str, dtype: torch.dtype) -> None:
    f, shapes = LINEAR[name]
    before = with_gradients(f, inputs(*shapes, dtype=dtype))
    with cpu_half_kernels(half=True, bf16=True):
        during = with_gradients(f, inputs(*shapes, dtype=dtype))
    for a, b in zip(before, during, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_float32_attention_is_bit_identical() -> None:
    tensors = inputs(*[(2, 3, 9, 16)] * 3, dtype=torch.float32)
    before = with_gradients(attention("causal", torch.float32), tensors)
    with cpu_half_kernels(half=True, bf16=True):
        during = with_gradients(attention("causal", torch.float32), tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))


def test_integers_complex_sparse_and_meta_pass_through(fast: None) -> None:
    n = torch.arange(9).view(3, 3)
    assert torch.equal(n @ n, (n.double() @ n.double()).long())
    c = torch.randn(3, 3, dtype=torch.complex64)
    torch.testing.assert_close(torch.mm(c, c.mH), c @ c.conj().t())
    assert torch.mm(torch.eye(3, dtype=HALF).to_sparse(), n.half()).tolist() == n.tolist()
    assert (torch.empty(2, 3, dtype=HALF, device="meta") @ torch.empty(3, 5, dtype=HALF, device="meta")).shape == (2, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda h, f: torch.mm(h, f),
        lambda h, f: torch.mm(f, h),
        lambda h, f: torch.addmm(f, h, h),
        lambda h, f: torch.bmm(h[None], f[None]),
        lambda h, f: torch.mm(h, h, out=f.clone()),
        lambda h, f: h.clone().addmm_(h, f),
        lambda h, f: F.conv1d(h, f[..., None]),
        lambda h, f: torch.mm(h, h[:2]),
        lambda h, f: torch.addmm(h[:2], h, h),
    ],
)
def test_wrong_calls_are_wrong_in_torchs_own_words(call: Operation) -> None:
    h = torch.ones(3, 3, dtype=HALF)
    with pytest.raises(RuntimeError) as native:
        call(h, h.float())
    with cpu_half_kernels(half=True, bf16=True), pytest.raises(RuntimeError) as ours:
        call(h, h.float())
    assert str(ours.value).replace("float", "c10::Half") == str(native.value).replace("float", "c10::Half")


# --- forms of calls ---------------------------------------------------------------------------------------------------


def test_out_arguments(fast: None) -> None:
    a, b, c = inputs((5, 33), (33, 7), (5, 7))
    for out in (torch.empty(5, 7, dtype=HALF), torch.empty(0, dtype=HALF), torch.empty(7, 5, dtype=HALF).t()):
        address = out.data_ptr()
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, a @ b)
        assert out.data_ptr() == address or address == 0
    assert torch.equal(torch.addmm(c, a, b, alpha=2, out=torch.empty(5, 7, dtype=HALF)), torch.addmm(c, a, b, alpha=2))
    assert torch.equal(torch.bmm(a[None], b[None], out=torch.empty(1, 5, 7, dtype=HALF))[0], a @ b)
    assert torch.equal(torch.mv(a, b[:, 0], out=torch.empty(5, dtype=HALF)), torch.mv(a, b[:, 0]))
    with pytest.warns(UserWarning, match="resized"):
        assert torch.mm(a, b, out=torch.empty(2, 2, dtype=HALF)).shape == (5, 7)


def test_in_place_writes_into_the_tensor_and_its_views(fast: None) -> None:
    a, b, c = inputs((5, 33), (33, 7), (8, 7))
    expected = torch.addmm(c[:5], a, b)
    base = c.clone()
    view = base[:5]
    version = base._version
    assert view.addmm_(a, b) is view
    assert torch.equal(base[:5], expected)
    assert torch.equal(base[5:], c[5:])
    assert base._version > version


def test_expanded_inputs(fast: None) -> None:
    a, b = inputs((1, 5, 33), (3, 33, 7))
    assert torch.equal(torch.bmm(a.expand(3, -1, -1), b), torch.bmm(a.repeat(3, 1, 1), b))
    assert torch.equal(torch.addmm(b[0, 0].expand(5, 7), a[0], b[0]), torch.addmm(b[0, 0].repeat(5, 1), a[0], b[0]))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int], fast: None) -> None:
    a = torch.empty(shape, dtype=HALF, requires_grad=True)
    y = a @ torch.ones(shape[1], 3, dtype=HALF)
    assert torch.equal(y, torch.zeros(shape[0], 3, dtype=HALF))
    y.sum().backward()
    assert a.grad is not None
    assert a.grad.shape == shape
    assert F.conv2d(torch.empty(0, 2, 5, 5, dtype=HALF), torch.ones(3, 2, 3, 3, dtype=HALF)).shape == (0, 3, 3, 3)


def test_gradients_that_nobody_asked_for(fast: None) -> None:
    x, w = inputs((1, 2, 5, 5), (3, 2, 3, 3))
    w.requires_grad_()
    F.conv2d(x, w).sum().backward()
    assert w.grad is not None
    assert w.grad.dtype is HALF
    assert x.grad is None


def test_grad_modes_checkpointing_and_functional_transforms(fast: None) -> None:
    x, w = inputs((4, 8), (8, 8))
    expected = x @ w
    with torch.no_grad():
        assert torch.equal(x @ w, expected)
    with torch.inference_mode():
        assert torch.equal(x @ w, expected)
        assert torch.equal(F.conv1d(x[None], w[:, :4, None]), F.conv1d(x[None], w[:, :4, None]))
    v = w.clone().requires_grad_()
    checkpoint(lambda t: torch.tanh(x @ t), v, use_reentrant=False).sum().backward()
    plain = torch.func.grad(lambda t: torch.tanh(x @ t).sum())(w)
    assert torch.equal(v.grad, plain)
    assert torch.equal(torch.vmap(torch.mv, in_dims=(None, 0))(w, x), (x @ w.t()))


def test_double_backward(fast: None) -> None:
    def second(dtype: torch.dtype) -> Tensor:
        x, w = (t.to(dtype).requires_grad_() for t in inputs((2, 3, 7, 7), (4, 3, 3, 3)))
        (first,) = torch.autograd.grad(F.conv2d(x, w).square().mean(), w, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(HALF).double(), second(torch.float64), rtol=1e-2, atol=1e-2)


def test_autograd_still_saves_halves(fast: None) -> None:
    saved: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    layer = nn.Linear(8, 8).half()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(torch.ones(2, 8, dtype=HALF, requires_grad=True))
    assert set(saved) == {HALF}


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(8, 8, num_layers=2, bidirectional=True), (5, 2, 8)),
    "gru": (lambda: nn.GRU(8, 8), (5, 2, 8)),
    "lstm cell": (lambda: nn.LSTMCell(8, 8), (2, 8)),
    "gru cell": (lambda: nn.GRUCell(8, 8), (2, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "encoder layer, eval": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (2, 5, 8)),
    "bilinear": (lambda: _Twice(nn.Bilinear(8, 8, 4)), (3, 8)),
}


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x)


@pytest.mark.parametrize("name", MODULES)
def test_modules_train_in_half(name: str, fast: None) -> None:
    torch.manual_seed(0)
    build, shape = MODULES[name]
    module = build().half()
    wide = build().double()
    wide.load_state_dict(module.state_dict())
    outputs = []
    for m, dtype in ((module, HALF), (wide, torch.float64)):
        y = m(inputs(shape)[0].to(dtype))
        y = y if isinstance(y, Tensor) else y[0]
        y.square().mean().backward()
        outputs.append(y)
    torch.testing.assert_close(outputs[0].double(), outputs[1], rtol=1e-2, atol=1e-2)
    for p, q in zip(module.parameters(), wide.parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.dtype is HALF
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=5e-2, atol=5e-3)


def test_autocast_calls_the_same_kernels(fast: None) -> None:
    layer, x = nn.Linear(33, 7), torch.randn(5, 33)
    with torch.autocast("cpu", dtype=HALF):
        y = layer(x)
        expected = F.linear(x.half(), layer.weight.half(), layer.bias.half())
    y.sum().backward()
    assert y.dtype is HALF
    assert torch.equal(y, expected)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


def test_threads(fast: None) -> None:
    a, b = inputs((40, 40), (40, 40))
    results: list[Tensor] = []

    def work() -> None:
        x = a.clone().requires_grad_()
        for _ in range(20):
            (grad,) = torch.autograd.grad((x @ b).sum(), x)
        results.append(grad)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.slow
def test_other_threads_run_during_a_product(fast: None) -> None:
    """The lock of the interpreter is free during the arithmetic: a ticking thread never waits for a whole product."""
    a = torch.randn(2000, 2000)
    gaps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    seconds = (time.perf_counter() - start) / 3
    stop.set()
    thread.join()
    assert sorted(gaps)[-2] < 0.5 * seconds


# --- installing and removing ------------------------------------------------------------------------------------------


def test_nothing_is_left_behind_and_nothing_warns() -> None:
    a, b = inputs((64, 256), (256, 64))
    native = a @ b
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                with cpu_half_kernels(half=True, bf16=True):
                    assert all(installed(name) for name in (*PRODUCTS, *ATTENTION))
                assert not any(installed(name) for name in (*PRODUCTS, *ATTENTION))
    finally:
        torch.set_warn_always(False)
    assert torch.equal(a @ b, native)


def test_nesting_in_any_order() -> None:
    first = cpu_half_kernels(half=True, bf16=False)
    second = cpu_half_kernels(half=True, bf16=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # not the last one in
    assert installed("mm")
    second.__exit__(None, None, None)
    assert not installed("mm")
    with cpu_half_kernels(half=False, bf16=False):
        assert not any(installed(name) for name in (*PRODUCTS, *ATTENTION))
    with pytest.raises(ZeroDivisionError), cpu_half_kernels(half=True, bf16=True):
        _ = 1 / 0
    assert not installed("mm")


def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch._ops.OpOverload, "redispatch")
        with (
            pytest.raises(PrecisionError, match=r"redispatch, which torch .* lacks; numerics.cpu_fp16=native"),
            cpu_half_kernels(half=True, bf16=False),
        ):
            pass
    monkeypatch.setitem(PRODUCTS, "no_such_product.out", "out")
    with (
        pytest.raises(PrecisionError, match=r"aten::no_such_product.out"),
        cpu_half_kernels(half=True, bf16=False),
    ):
        pass
    assert not installed("mm")


def test_fp32_kernels_that_multiply_in_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reduced:
        fp32_precision = "bf16"

    monkeypatch.setattr(torch.backends.mkldnn, "matmul", Reduced(), raising=False)
    with (
        pytest.raises(PrecisionError, match=r"mkldnn.matmul.fp32_precision"),
        cpu_half_kernels(half=True, bf16=False),
    ):
        pass
    with cpu_half_kernels(half=False, bf16=True):
        assert installed(next(iter(ATTENTION)))


# --- which kernels run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "arithmetic", "expected"),
    [
        ("auto", "cpu", HALF, False, "fast"),
        ("auto", "cpu", HALF, True, "native"),
        ("fast", "cpu", HALF, True, "fast"),
        ("native", "cpu", HALF, False, "native"),
        ("auto", "cuda", HALF, False, "none"),
        ("fast", "cuda", HALF, False, "none"),
        ("fast", "cpu", BF16, False, "none"),
        ("auto", "cpu", torch.float32, False, "none"),
        ("auto", "cpu", None, False, "none"),
    ],
)
def test_resolve(
    setting: str,
    device: str,
    dtype: torch.dtype | None,
    arithmetic: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_half, "torch_has_half_arithmetic", lambda: arithmetic)
    assert resolve(setting, device_type=device, compute_dtype=dtype) == expected


def test_resolve_refuses_other_words() -> None:
    with pytest.raises(PrecisionError, match=r"numerics.cpu_fp16='quick' is not one of auto, fast, native"):
        resolve("quick", device_type="cpu", compute_dtype=HALF)


def test_auto_agrees_with_the_processor() -> None:
    flags = torch.cpu.get_capabilities()
    has = any(flags.get(name, False) for name in ("avx512_fp16", "amx_fp16", "fp16_arith", "avx_ne_convert", "avx10_1"))
    if not has:
        assert resolve("auto", device_type="cpu", compute_dtype=HALF) == "fast"


# --- torch.compile ----------------------------------------------------------------------------------------------------


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.volume, self.image, self.up = (
            nn.Conv3d(8, 16, 3),
            nn.Conv2d(3, 8, 3, groups=1),
            nn.ConvTranspose2d(8, 4, 3),
        )
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16, bias=False)

    def forward(self, image: Tensor, volume: Tensor) -> Tensor:
        y = F.relu(self.image(image))
        tokens = self.second(F.gelu(self.first(y.flatten(2).transpose(1, 2))))
        q = tokens.unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q)
        return (
            self.up(y).float().mean()
            + torch.bmm(tokens, tokens.mT).float().mean()
            + mixed.float().mean()
            + self.volume(volume).float().mean()
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiled_code_runs_the_same_kernels(channels_last: bool, fast: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Small().half()
    image, volume = inputs((2, 3, 8, 8), (4, 8, 12, 12, 12))
    if channels_last:
        image = image.contiguous(memory_format=torch.channels_last)
        volume = volume.contiguous(memory_format=torch.channels_last_3d)
    losses, gradients = [], []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        loss = run(image, volume)
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad.double().clone() for p in model.parameters() if p.grad is not None])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3, abs=1e-4)
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=5e-2, atol=1e-3 + 1e-2 * float(eager.abs().max()))
    calls: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(image, volume).backward()
    calls = [event.name for event in profile.events()]
    assert "aten::_slow_conv2d_forward" not in calls  # the half reference loop
    assert calls.count("aten::mm") > 0
