"""CUDA's autocast list on the CPU, compared with what CUDA's dispatcher does to fake tensors (no GPU needed)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mprun.errors import PrecisionError
from mprun.precision import cpu_autocast
from mprun.precision.cpu_autocast import POLICY, STAND_INS, cuda_operation_list, plan

HALF, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
A = torch.ops.aten

HALF_DTYPES = pytest.mark.parametrize("low", [HALF, BF16], ids=["float16", "bfloat16"])


class Tensors:
    """Makes positive inputs on a device, whose dtypes take turns."""

    def __init__(self, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
        self.device = device
        self.dtypes = dtypes
        self.made = 0

    def __call__(self, *shape: int) -> Tensor:
        dtype = self.dtypes[self.made % len(self.dtypes)]
        self.made += 1
        return torch.rand(*shape, device=self.device).mul(0.5).add(0.25).to(dtype)

    def index(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=torch.long)


Case = Callable[[Tensors], Any]


def _unary(name: str) -> Case:
    return lambda t: getattr(A, name).default(t(3, 4))


def _cell(name: str, gates: int) -> Case:
    return lambda t: getattr(A, name)(t(2, 3), t(2, 4), t(4 * gates, 3), t(4 * gates, 4), t(4 * gates), t(4 * gates))


def _conv(*extra: Any) -> Case:
    overload = A._convolution.default if len(extra) == 4 else A._convolution.deprecated
    return lambda t: overload(t(1, 2, 5, 5), t(2, 2, 3, 3), t(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *extra)


# Every operation of the table that a CPU tensor can reach.
ELEMENTWISE = """acos asin cosh erfinv exp expm1 linalg_vector_norm log log10 log1p log2 nuclear_norm pdist prod reciprocal
    rsqrt sinh softplus sum tan"""
CASES: dict[str, Case] = {
    **{name: _unary(name) for name in ELEMENTWISE.split()},
    "_convolution": _conv(False, False, True, True),
    "_convolution.deprecated": _conv(False, False, True),
    "_upsample_bicubic2d_aa": lambda t: A._upsample_bicubic2d_aa(t(1, 2, 4, 4), [6, 6], False, None, None),
    "_upsample_bilinear2d_aa": lambda t: A._upsample_bilinear2d_aa(t(1, 2, 4, 4), [6, 6], False, None, None),
    "_upsample_nearest_exact1d": lambda t: A._upsample_nearest_exact1d(t(1, 2, 4), [6], None),
    "_upsample_nearest_exact2d": lambda t: A._upsample_nearest_exact2d(t(1, 2, 4, 4), [6, 6], None, None),
    "_upsample_nearest_exact3d": lambda t: A._upsample_nearest_exact3d(t(1, 2, 4, 4, 4), [6, 6, 6], None, None, None),
    "addbmm": lambda t: A.addbmm(t(3, 2), t(2, 3, 4), t(2, 4, 2)),
    "addcdiv": lambda t: A.addcdiv(t(3), t(3), t(3)),
    "addcmul": lambda t: A.addcmul(t(3), t(3), t(3)),
    "addmm": lambda t: A.addmm(t(2), t(3, 4), t(4, 2)),
    "addmv": lambda t: A.addmv(t(3), t(3, 4), t(4)),
    "addr": lambda t: A.addr(t(3, 4), t(3), t(4)),
    "atan2": lambda t: A.atan2(t(3), t(3)),
    "baddbmm": lambda t: A.baddbmm(t(2, 3, 2), t(2, 3, 4), t(2, 4, 2)),
    "bilinear": lambda t: A.bilinear(t(3, 4), t(3, 5), t(2, 4, 5), t(2)),
    "binary_cross_entropy": lambda t: A.binary_cross_entropy(t(3), t(3)),
    "binary_cross_entropy_with_logits": lambda t: A.binary_cross_entropy_with_logits(t(3), t(3)),
    "bmm": lambda t: A.bmm(t(2, 3, 4), t(2, 4, 2)),
    "cdist": lambda t: A.cdist(t(3, 4), t(2, 4)),
    "chain_matmul": lambda t: A.chain_matmul([t(3, 4), t(4, 3), t(3, 2)]),
    "conv1d": lambda t: A.conv1d(t(1, 2, 5), t(2, 2, 3)),
    "conv2d": lambda t: A.conv2d(t(1, 2, 5, 5), t(2, 2, 3, 3)),
    "conv3d": lambda t: A.conv3d(t(1, 2, 5, 5, 5), t(2, 2, 3, 3, 3)),
    "conv_tbc": lambda t: A.conv_tbc(t(5, 2, 3), t(3, 3, 4), t(4)),
    "conv_transpose1d": lambda t: A.conv_transpose1d(t(1, 2, 5), t(2, 2, 3)),
    "conv_transpose2d.input": lambda t: A.conv_transpose2d.input(t(1, 2, 5, 5), t(2, 2, 3, 3)),
    "conv_transpose3d.input": lambda t: A.conv_transpose3d.input(t(1, 2, 5, 5, 5), t(2, 2, 3, 3, 3)),
    "convolution": lambda t: A.convolution(
        t(1, 2, 5, 5), t(2, 2, 3, 3), t(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "cosine_embedding_loss": lambda t: A.cosine_embedding_loss(t(3, 4), t(3, 4), t(3)),
    "cosine_similarity": lambda t: A.cosine_similarity(t(3, 4), t(3, 4)),
    "cross": lambda t: A.cross(t(2, 3), t(2, 3), 1),
    "cumprod": lambda t: A.cumprod(t(3), 0),
    "cumsum": lambda t: A.cumsum(t(3), 0),
    "dist": lambda t: A.dist(t(3), t(3)),
    "dot": lambda t: A.dot(t(3), t(3)),
    "einsum": lambda t: A.einsum("ij,jk->ik", [t(3, 4), t(4, 2)]),
    "frobenius_norm.dim": lambda t: A.frobenius_norm.dim(t(3, 4), [0]),
    "grid_sampler": lambda t: A.grid_sampler(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False),
    "group_norm": lambda t: A.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "gru_cell": _cell("gru_cell", 3),
    "hinge_embedding_loss": lambda t: A.hinge_embedding_loss(t(3), t(3)),
    "huber_loss": lambda t: A.huber_loss(t(3), t(3)),
    "index_put": lambda t: A.index_put(t(3), [t.index(2)], t(2)),
    "kl_div": lambda t: A.kl_div(t(3), t(3)),
    "l1_loss": lambda t: A.l1_loss(t(3), t(3)),
    "layer_norm": lambda t: A.layer_norm(t(3, 4), [4], t(4), t(4)),
    "linalg_matrix_norm": lambda t: A.linalg_matrix_norm(t(3, 4), 2.0),
    "linalg_matrix_norm.str_ord": lambda t: A.linalg_matrix_norm.str_ord(t(3, 4)),
    "linalg_matrix_sqrth": lambda t: A.linalg_matrix_sqrth(t(3, 3)),
    "linalg_multi_dot": lambda t: A.linalg_multi_dot([t(3, 4), t(4, 3), t(3, 2)]),
    "linalg_vecdot": lambda t: A.linalg_vecdot(t(3), t(3)),
    "linear": lambda t: A.linear(t(3, 4), t(2, 4), t(2)),
    "log_softmax.int": lambda t: A.log_softmax.int(t(3, 4), 1),
    "logsumexp": lambda t: A.logsumexp(t(3, 4), [1]),
    "lstm_cell": lambda t: A.lstm_cell(t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "margin_ranking_loss": lambda t: A.margin_ranking_loss(t(3), t(3), t(3)),
    "matmul": lambda t: A.matmul(t(3, 4), t(4, 2)),
    "mm": lambda t: A.mm(t(3, 4), t(4, 2)),
    "mse_loss": lambda t: A.mse_loss(t(3), t(3)),
    "multi_margin_loss": lambda t: A.multi_margin_loss(t(3, 4), t.index(3)),
    "multilabel_margin_loss": lambda t: A.multilabel_margin_loss(t(3, 4), t.index(3, 4)),
    "mv": lambda t: A.mv(t(3, 4), t(4)),
    "native_layer_norm": lambda t: A.native_layer_norm(t(3, 4), [4], t(4), t(4), 1e-5),
    "nll_loss": lambda t: A.nll_loss(t(3, 4), t.index(3)),
    "nll_loss2d": lambda t: A.nll_loss2d(t(1, 3, 4, 4), t.index(1, 4, 4)),
    "norm.Scalar": lambda t: A.norm.Scalar(t(3, 4)),
    "norm.ScalarOpt_dim": lambda t: A.norm.ScalarOpt_dim(t(3, 4), 2, [1]),
    "nuclear_norm.dim": lambda t: A.nuclear_norm.dim(t(3, 4), [0, 1]),
    "poisson_nll_loss": lambda t: A.poisson_nll_loss(t(3), t(3), True, False, 1e-8, 1),
    "pow.Scalar": lambda t: A.pow.Scalar(2.0, t(3)),
    "pow.Tensor_Scalar": lambda t: A.pow.Tensor_Scalar(t(3), 2.0),
    "pow.Tensor_Tensor": lambda t: A.pow.Tensor_Tensor(t(3), t(3)),
    "prelu": lambda t: A.prelu(t(3, 4), t(1)),
    "prod.dim_int": lambda t: A.prod.dim_int(t(3), 0),
    "renorm": lambda t: A.renorm(t(3, 4), 2, 0, 1.0),
    "rms_norm": lambda t: A.rms_norm(t(3, 4), [4], t(4)),
    "rnn_relu_cell": _cell("rnn_relu_cell", 1),
    "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
    "scaled_dot_product_attention": lambda t: A.scaled_dot_product_attention(
        t(1, 2, 8, 8), t(1, 2, 8, 8), t(1, 2, 8, 8)
    ),
    "scatter_add": lambda t: A.scatter_add(t(3), 0, t.index(3), t(3)),
    "smooth_l1_loss": lambda t: A.smooth_l1_loss(t(3), t(3)),
    "soft_margin_loss": lambda t: A.soft_margin_loss(t(3), t(3)),
    "softmax.int": lambda t: A.softmax.int(t(3, 4), 1),
    "sum.dim_IntList": lambda t: A.sum.dim_IntList(t(3, 4), [1]),
    "tensordot": lambda t: A.tensordot(t(3, 4), t(4, 2), [1], [0]),
    "triplet_margin_loss": lambda t: A.triplet_margin_loss(t(3, 4), t(3, 4), t(3, 4)),
    "upsample_bicubic2d": lambda t: A.upsample_bicubic2d(t(1, 2, 4, 4), [6, 6], False, None, None),
    "upsample_bilinear2d": lambda t: A.upsample_bilinear2d(t(1, 2, 4, 4), [6, 6], False, None, None),
    "upsample_linear1d": lambda t: A.upsample_linear1d(t(1, 2, 4), [6], False, None),
    "upsample_nearest1d": lambda t: A.upsample_nearest1d(t(1, 2, 4), [6], None),
    "upsample_nearest2d": lambda t: A.upsample_nearest2d(t(1, 2, 4, 4), [6, 6], None, None),
    "upsample_nearest3d": lambda t: A.upsample_nearest3d(t(1, 2, 4, 4, 4), [6, 6, 6], None, None, None),
    "upsample_trilinear3d": lambda t: A.upsample_trilinear3d(t(1, 2, 4, 4, 4), [6, 6, 6], False, None, None, None),
    "vdot": lambda t: A.vdot(t(3), t(3)),
}

# Not on CUDA's list, and how people write things. Many of these are on the CPU's list.
OTHERS: dict[str, Case] = {
    "adaptive_avg_pool3d": lambda t: A.adaptive_avg_pool3d(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool3d": lambda t: A.adaptive_max_pool3d(t(1, 2, 4, 4, 4), [2, 2, 2])[0],
    "avg_pool2d": lambda t: F.avg_pool2d(t(1, 1, 4, 4), 2),
    "avg_pool3d": lambda t: A.avg_pool3d(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "batch_norm": lambda t: F.batch_norm(t(2, 3), None, None, None, None, True),
    "cat": lambda t: A.cat([t(3), t(3)]),
    "conv1d.padding": lambda t: A.conv1d.padding(t(1, 2, 5), t(2, 2, 3), None, [1], "same"),
    "conv2d.padding": lambda t: A.conv2d.padding(t(1, 2, 5, 5), t(2, 2, 3, 3), None, [1, 1], "same"),
    "cross_entropy": lambda t: F.cross_entropy(t(3, 4), t.index(3)),
    "cross_entropy of probabilities": lambda t: F.cross_entropy(t(3, 4), t(3, 4).softmax(1)),
    "dropout": lambda t: F.dropout(t(3)),
    "embedding": lambda t: F.embedding(t.index(3), t(4, 3)),
    "exp_": lambda t: t(3).exp_(),
    "exp of integers": lambda t: t.index(3).exp(),
    "exp out": lambda t: torch.exp(t(3), out=torch.empty(3, device=t.device, dtype=HALF)),
    "gelu": lambda t: F.gelu(t(3)),
    "instance_norm": lambda t: F.instance_norm(t(2, 3, 4)),
    "linalg.norm": lambda t: torch.linalg.norm(t(3, 3)),
    "logsigmoid": lambda t: F.logsigmoid(t(3)),
    "max_pool3d": lambda t: A.max_pool3d(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "mean": lambda t: t(3).mean(),
    "mean over a dimension": lambda t: t(3, 4).mean(-1, keepdim=True),
    "normalize": lambda t: F.normalize(t(3, 4)),
    "pow_": lambda t: t(3).pow_(2),
    "quantile": lambda t: A.quantile.scalar(t(4), 0.5),
    "reflection_pad2d": lambda t: A.reflection_pad2d(t(1, 2, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": lambda t: A.replication_pad3d(t(1, 2, 4, 4, 4), [1] * 6),
    "rms by hand": lambda t: (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))(t(3, 4)),
    "sigmoid": lambda t: t(3).sigmoid(),
    "softmax to half": lambda t: t(3).softmax(0, dtype=HALF),
    "softmax to double": lambda t: t(3).softmax(0, dtype=F64),
    "softmin": lambda t: F.softmin(t(3), 0),
    "stack": lambda t: A.stack([t(3), t(3)]),
    "std": lambda t: t(3).std(),
    "sum of integers": lambda t: t.index(3).sum(),
    "sum to half": lambda t: t(3).sum(dtype=HALF),
    "Tensor.norm": lambda t: t(3).norm(),
    "trace": lambda t: A.trace(t(3, 3)),
    "transformer layer": lambda t: nn.TransformerEncoderLayer(4, 2, 8, device=t.device)(t(5, 2, 4).float()),
    "var": lambda t: t(3).var(),
    "x * x": lambda t: (lambda x: x * x)(t(3)),
    "x ** 2": lambda t: t(3) ** 2,
    "1 / x": lambda t: 1 / t(3),
    "x / 3": lambda t: t(3) / 3,
}


# What the dispatcher of this torch has for CUDA's autocast; every build registers it.
LISTED = {
    name.removeprefix("aten::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
}
NAMES = [name for name in CASES if name in LISTED]


def dtypes_of(result: Any) -> Any:
    return result.dtype if isinstance(result, Tensor) else tuple(dtypes_of(part) for part in result)


def outcome(case: Case, tensors: Tensors) -> Any:
    """The dtype or dtypes that come out, or ``raises``."""
    try:
        return dtypes_of(case(tensors))
    except (RuntimeError, TypeError, ValueError):
        return "raises"


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast on fake CUDA tensors. ``torch.autocast("cuda")`` would switch itself off without a GPU."""
    with FakeTensorMode():
        before = torch.get_autocast_dtype("cuda")
        torch.set_autocast_dtype("cuda", dtype)
        torch.set_autocast_enabled("cuda", True)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)


def has_oracle() -> bool:
    try:
        with cuda_autocast(HALF):
            return torch.empty(2, device="cuda", dtype=HALF).exp().dtype is F32
    except (RuntimeError, AssertionError):
        return False


needs_oracle = pytest.mark.skipif(not has_oracle(), reason="this build of torch has no fake CUDA tensors")
quiet = pytest.mark.filterwarnings("ignore::UserWarning")  # deprecated operations, mixed dtypes in layer_norm


@pytest.fixture
def cuda_list() -> Iterator[None]:
    with cuda_operation_list():
        yield


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_is_cudas_list() -> None:
    # Older ones list named tensors, too, for which there is an error that says so.
    named = {name for name in LISTED if "dimname" in name.lower() or ".names_" in name}
    assert not LISTED - named - POLICY.keys()
    assert {name for name, policy in plan().items() if policy == "unknown"} == named
    assert not STAND_INS.keys() & POLICY.keys()
    if torch.__version__ >= "2.14":  # the torch that the table was written for; older ones list a little less
        assert set(POLICY) == LISTED


def test_every_operation_of_the_table_has_a_case() -> None:
    assert set(CASES) == {name for name, policy in POLICY.items() if policy != "cuda_only"}


EXPECTED: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "lower_precision": lambda low: {"half": low, "float32": low, "mixed": low, "float64": F64},
    "fp32": lambda low: {"half": F32, "float32": F32, "mixed": F32, "float64": F64},
    "fp32_set_dtype": lambda low: {"half": F32, "float32": F32, "mixed": F32, "float64": F64},
    "fp32_append_dtype": lambda low: {"half": F32, "float32": F32, "mixed": F32, "float64": F64},
    "promote": lambda low: {"half": low, "float32": F32, "mixed": F32, "float64": F64},
    "banned": lambda low: dict.fromkeys(("half", "float32", "mixed", "float64"), "raises"),
}


@quiet
@HALF_DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_output_dtypes_follow_the_policy(name: str, low: torch.dtype, cuda_list: None) -> None:
    """Needs no CUDA build: the table, spelled out."""
    expected = EXPECTED[POLICY[name]](low)
    for kind, dtypes in {"half": (low,), "float32": (F32,), "mixed": (low, F32), "float64": (F64,)}.items():
        with torch.autocast("cpu", dtype=low):
            seen = outcome(CASES[name], Tensors("cpu", dtypes))
        seen = set(seen) if isinstance(seen, tuple) else {seen}
        if (
            name == "linalg_matrix_norm" and dtypes[0] is low
        ):  # dtype=float32 is asked for, and refused for half, on CUDA too
            assert seen == {"raises"}
        else:
            assert seen == {expected[kind]}, kind


@needs_oracle
@quiet
@HALF_DTYPES
@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_output_dtypes_equal_cudas(name: str, low: torch.dtype, cuda_list: None) -> None:
    case = {**CASES, **OTHERS}[name]
    if name == "gru_cell":
        pytest.skip("CUDA's cell asks for a driver")
    foreign = BF16 if low is HALF else HALF
    for dtypes in ((low,), (F32,), (low, F32), (F32, low), (F64,), (foreign,)):
        with cuda_autocast(low):
            cuda = outcome(case, Tensors("cuda", dtypes))
        with torch.autocast("cpu", dtype=low):
            cpu = outcome(case, Tensors("cpu", dtypes))
        assert cpu == cuda, dtypes


# --- values -----------------------------------------------------------------------------------------------------------


@HALF_DTYPES
def test_a_hand_written_rms_norm_survives_large_inputs(low: torch.dtype, cuda_list: None) -> None:
    x = torch.tensor([-300.0, 300.0, 300.0, -300.0]).to(low)
    with torch.autocast("cpu", dtype=low):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        squares = x * x
    assert y.dtype is F32
    assert y.tolist() == pytest.approx([-1, 1, 1, -1])
    assert squares.dtype is low  # not on CUDA's list: inf in FP16, on the GPU as well
    assert squares.isinf().all() == (low is HALF)


def test_without_the_list_the_cpu_returns_zeros() -> None:
    x = torch.tensor([-300.0, 300.0, 300.0, -300.0], dtype=HALF)
    with torch.autocast("cpu", dtype=HALF):
        assert (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).tolist() == [0, 0, 0, 0]


@quiet
@HALF_DTYPES
@pytest.mark.parametrize("name", [name for name in NAMES if POLICY[name].startswith("fp32")])
def test_values_and_gradients_are_those_of_a_float32_copy(name: str, low: torch.dtype, cuda_list: None) -> None:
    def run(up: bool) -> tuple[Tensor, list[Tensor | None]]:
        torch.manual_seed(0)
        leaves: list[Tensor] = []

        class Leaves(Tensors):
            def __call__(self, *shape: int) -> Tensor:
                leaf = (
                    super().__call__(*shape).requires_grad_(name != "soft_margin_loss" or not leaves)
                )  # its target has none
                leaves.append(leaf)
                return leaf.float() if up else leaf

        with torch.autocast("cpu", dtype=low, enabled=not up):
            result = CASES[name](Leaves("cpu", (low,)))
        first = result[0] if isinstance(result, tuple) else result
        first.sum().backward()
        return first.detach(), [leaf.grad for leaf in leaves]

    if name == "linalg_matrix_norm":
        pytest.skip("refuses half inputs, on CUDA too")
    ours, our_gradients = run(up=False)
    truth, gradients = run(up=True)
    assert ours.dtype is F32
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-6)
    for a, b in zip(our_gradients, gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype is low
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(low).eps, atol=1e-6)


def test_sums_reach_beyond_the_range_of_half(cuda_list: None) -> None:
    x = torch.full((1000,), 100.0, dtype=HALF)
    with torch.autocast("cpu", dtype=HALF):
        assert x.sum().item() == 100_000
        assert x.cumsum(0)[-1].item() == 100_000
        assert x.mean().item() == 100.0
        assert x.norm().item() == pytest.approx(100 * 1000**0.5)
        assert x.sum(dtype=HALF).isinf()


def test_batch_norm_keeps_half_activations_and_float32_statistics(cuda_list: None) -> None:
    layer = nn.BatchNorm1d(4)
    with torch.autocast("cpu", dtype=HALF):
        y = layer(torch.randn(8, 4, dtype=HALF))
    y.sum().backward()
    assert y.dtype is HALF
    assert layer.running_mean is not None
    assert layer.running_mean.dtype is layer.weight.dtype is F32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is F32


def test_binary_cross_entropy_is_banned_in_cudas_words(cuda_list: None) -> None:
    p = torch.full((3,), 0.5)
    with torch.autocast("cpu", dtype=HALF), pytest.raises(RuntimeError, match="are unsafe to autocast"):
        F.binary_cross_entropy(p, p)
    assert F.binary_cross_entropy(p, p).item() == pytest.approx(0.6931, abs=1e-4)


@quiet
@HALF_DTYPES
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_half_as_in_cudnn(kind: Any, low: torch.dtype, cuda_list: None) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 4, num_layers=2), torch.randn(5, 2, 3)
    truth = layer(x)[0]
    with torch.autocast("cpu", dtype=low):
        y = layer(x)[0]
        packed = layer(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])))[0].data
    y.float().sum().backward()
    assert y.dtype is packed.dtype is low
    torch.testing.assert_close(y.float(), truth, rtol=0, atol=0.03)
    assert all(p.grad is not None and p.grad.dtype is F32 for p in layer.parameters())


@HALF_DTYPES
def test_average_pooling_of_volumes_has_a_half_result(low: torch.dtype, cuda_list: None) -> None:
    x = torch.randn(1, 2, 4, 4, 4).to(low).requires_grad_()
    with torch.autocast("cpu", dtype=low):
        y = F.avg_pool3d(x, 2)
    y.sum().backward()
    assert y.dtype is low
    assert torch.equal(y, F.avg_pool3d(x.float(), 2).to(low))
    assert x.grad is not None
    assert x.grad.dtype is low


# --- where it holds ---------------------------------------------------------------------------------------------------


def test_only_inside_enabled_regions(cuda_list: None) -> None:
    x = torch.ones(3, dtype=HALF)
    assert x.exp().dtype is HALF
    with torch.autocast("cpu", dtype=HALF):
        assert x.exp().dtype is F32
        with torch.autocast("cpu", enabled=False):
            assert x.exp().dtype is HALF
            assert torch.addcmul(x, x, x).dtype is HALF
        assert x.exp().dtype is F32
        with torch.autocast("cpu", dtype=BF16):
            assert torch.mv(x[:, None].expand(3, 3), x).dtype is BF16
    assert x.exp().dtype is HALF


def test_inner_operations_are_not_cast_again(cuda_list: None) -> None:
    """``cosine_similarity`` runs in FP32 to its end, though it is made of operations that are lowered or promoted."""
    a, b = torch.randn(2, 64), torch.randn(2, 64)
    with torch.autocast("cpu", dtype=HALF):
        y = F.cosine_similarity(a, b)
    torch.testing.assert_close(y.double(), F.cosine_similarity(a.double(), b.double()), rtol=0, atol=1e-6)


def test_weights_are_cast_once_per_region(cuda_list: None) -> None:
    """Entries on which both lists agree stay torch's own, with its cache."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is HALF and tensor.shape == (4, 4):
            saved.append(tensor.data_ptr())
        return tensor

    with torch.autocast("cpu", dtype=HALF), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(layer(x))
    assert len(saved) >= 1
    assert len(set(saved)) == 1


def test_grad_modes_checkpointing_and_functional_transforms(cuda_list: None) -> None:
    x = torch.randn(4, 8, dtype=HALF)

    def f(t: Tensor) -> Tensor:
        return F.softmax(t, -1).pow(2).sum()

    with torch.autocast("cpu", dtype=HALF):
        expected = f(x)
        with torch.no_grad():
            assert torch.equal(f(x), expected)
        with torch.inference_mode():
            assert torch.equal(f(x), expected)
        v = x.clone().requires_grad_()
        checkpoint(f, v, use_reentrant=False).backward()
        grad = torch.func.grad(f)(x)
        rows = torch.vmap(lambda t: t.exp().sum())(x)
    assert torch.equal(v.grad, grad)
    assert grad.dtype is HALF
    assert rows.dtype is F32


def test_nothing_is_left_behind_and_nothing_warns() -> None:
    x = torch.ones(3, dtype=HALF)
    y = torch.ones(3)

    def native() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=HALF):
            return [x.exp().dtype, torch.stack([x, x]).dtype, F.avg_pool3d(x[None, :, None, None, None], 1).dtype,
                    F.binary_cross_entropy(y, y).dtype]  # fmt: skip

    before = native()
    tag = torch.compiler.config.cache_key_tag
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                with cuda_operation_list(), torch.autocast("cpu", dtype=HALF):
                    assert x.exp().dtype is F32
    finally:
        torch.set_warn_always(False)
    assert native() == before == [HALF, HALF, F32, F32]
    assert torch.compiler.config.cache_key_tag == tag


def test_nesting_in_any_order() -> None:
    def listed() -> bool:
        with torch.autocast("cpu", dtype=HALF):
            return torch.ones(3, dtype=HALF).exp().dtype is F32

    first, second = cuda_operation_list(), cuda_operation_list()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert listed()
    second.__exit__(None, None, None)
    assert not listed()
    with pytest.raises(ZeroDivisionError), cuda_operation_list():
        _ = 1 / 0
    assert not listed()


def test_an_operation_with_an_unknown_policy_raises_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this torch had put ``cosh`` on CUDA's list after the table was written."""
    # A copy without it: deleting and restoring the entry would leave the table in another order.
    monkeypatch.setattr(cpu_autocast, "POLICY", {name: policy for name, policy in POLICY.items() if name != "cosh"})
    x = torch.ones(3)
    with cuda_operation_list():
        assert x.cosh().dtype is F32
        with (
            torch.autocast("cpu", dtype=HALF),
            pytest.raises(PrecisionError, match=r"aten::cosh is on CUDA's autocast list"),
        ):
            x.cosh()


def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_ExcludeDispatchKeyGuard")
    with pytest.raises(PrecisionError, match=r"_ExcludeDispatchKeyGuard, which torch .* lacks"), cuda_operation_list():
        pass
    assert cpu_autocast._library is None


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_follows_the_list_and_forgets_it() -> None:
    """In, out and in again: neither code in memory nor torch's caches on disk may cross the border."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)

    def f(t: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=HALF):
            y = F.layer_norm(layer(t), (8,))
            z = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
            return z.softmax(-1), torch.addcmul(z, z, z).exp().sum()

    compiled = torch.compile(f, fullgraph=True)
    for inside in (False, True, False, True):
        with cuda_operation_list() if inside else warnings.catch_warnings():
            v = x.clone().requires_grad_()
            eager, (soft, total) = f(x), compiled(v)
            total.backward()
        assert soft.dtype is total.dtype is eager[1].dtype is (F32 if inside else HALF)
        torch.testing.assert_close(soft, eager[0], rtol=1e-2, atol=1e-3)
        assert v.grad is not None
        assert v.grad.dtype is F32
