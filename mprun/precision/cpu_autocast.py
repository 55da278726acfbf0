"""CUDA's autocast list on the CPU, so that a laptop tells the truth about the GPU.

What autocast is. A table from operation to policy. An operation in the table casts its floating-point inputs (never
float64) before it runs; every other operation takes its inputs as they come:

    lower_precision    to FP16 or BF16        mm, conv2d, linear, attention, recurrent cells
    fp32               to FP32                exp, pow, rsqrt, layer_norm, losses, cdist
    fp32_set_dtype     asks for dtype=float32 where the caller gave none: sum, softmax, cumsum
    fp32_append_dtype  the same, through another overload: norm
    promote            to the widest input    dot, addcmul, index_put, grid_sampler
    banned             raises                 binary_cross_entropy

Why it matters. torch has one table per device, and they differ in more than 150 entries. The CPU's leaves exp, sum, pow,
norm, softmax and layer_norm in half. A hand-written RMSNorm, ``x * rsqrt(x.pow(2).mean() + eps)``, on x = +-300 then gets
300**2 = 90000 = inf in FP16, rsqrt(inf) = 0, and returns zeros, with no NaN in sight. CUDA's table has ``pow`` and
``rsqrt`` in FP32, and it returns +-1. What neither table protects is ``x * x``: inf on both.

The list is CUDA's, whatever one thinks of it, and the same for FP16 and BF16. ``mean``, ``var``, ``batch_norm``, ``sigmoid``,
``gelu``, in-place and ``out=`` variants are not on it: half in, half out, with FP32 accumulation inside the kernel. ``cat``
and ``stack`` promote by themselves. Where the CPU's own entry has CUDA's effect it stays, with torch's cache of cast
weights; so ``linear`` and ``conv2d`` cost what they did.

Where the CPU cannot follow: ``fft_*``, ``stft`` and ``linalg_*`` are not on CUDA's list and have no half kernels on the CPU.
They raise for half inputs, as most of them do on CUDA; cast with ``.float()``.

How. Functions on the dispatch key ``AutocastCPU``, above autograd: casts are differentiated, and gradients come back in
the dtype of the input. An entry costs 3 to 8 us a call beyond its casts. ``torch.autocast("cpu", enabled=False)`` masks
the key, hence all of this. Compiled code has its casts baked in, and torch's caches do not know of this list. So compiled
code is dropped (``torch._dynamo.reset``) when the list comes and goes, and the caches on disk are kept apart by a tag.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mprun.errors import PrecisionError

Function: TypeAlias = Callable[..., Any]

_LISTS: dict[str, str] = {
    "lower_precision": """
        _convolution _convolution.deprecated addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot
        linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention""",
    "fp32": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss
        layer_norm linalg_matrix_sqrth log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss
        pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss
        softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_trilinear3d""",
    "fp32_set_dtype": """
        cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod prod.dim_int
        softmax.int sum sum.dim_IntList""",
    "fp32_append_dtype": "norm.Scalar norm.ScalarOpt_dim",
    "promote": """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot""",
    "banned": "binary_cross_entropy",
    # Kernels of a CUDA library: no CPU tensor ever gets there.
    "cuda_only": """
        _cudnn_rnn _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell cudnn_convolution
        cudnn_convolution_transpose""",
}

# Operation -> policy. The keys are CUDA's list.
POLICY: dict[str, str] = {name: policy for policy, names in _LISTS.items() for name in names.split()}

# Not on CUDA's list, but needed to have the same effect as on CUDA. Recurrent layers are `_cudnn_rnn` there, which casts to half
# (the CPU's own entry, `mkldnn_rnn_layer`, fails in FP16); `avg_pool3d` has a half kernel there and none here.
STAND_INS: dict[str, str] = {
    **{
        f"{cell}.{form}": "lower_precision"
        for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for form in ("input", "data")
    },
    "avg_pool3d": "half_through_fp32",
}

# On both lists with another policy on the CPU's. All others on both lists agree, and are left to torch.
_DISAGREE = frozenset({"binary_cross_entropy", "grid_sampler"})

_BANNED_MESSAGE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: half probabilities round to 0 "
    "and 1, whose log is -inf. Drop the sigmoid and use binary_cross_entropy_with_logits or BCEWithLogitsLoss."
)
_UNKNOWN_MESSAGE = (
    "aten::{name} is on CUDA's autocast list in torch {torch}, with a policy that mprun does not know; "
    "call it in a torch.autocast('cpu', enabled=False) region, on inputs of the dtype that it should have"
)


@contextmanager
def cuda_operation_list() -> Iterator[None]:
    """Make ``torch.autocast("cpu")`` follow CUDA's operation list for a while, in all threads of this process.

    Changes nothing outside of autocast regions. May be nested and repeated. Compile in the thread that entered. An
    operation that this torch has put on CUDA's list since the table was written raises when it is called under autocast.

    Raises:
        PrecisionError: If torch lacks a hook.
    """
    _check_hooks()
    compiler: Any = torch.compiler.config
    _change(+1)
    try:
        compiler.cache_key_tag = compiler.cache_key_tag.removesuffix(_CACHE_TAG) + _CACHE_TAG
        yield
    finally:
        _change(-1)
        if _library is None:
            compiler.cache_key_tag = compiler.cache_key_tag.removesuffix(_CACHE_TAG)


# --- installing -------------------------------------------------------------------------------------------------------

_CACHE_TAG = "+cuda-operation-list"
_lock = threading.Lock()
_users = 0
_library: Any = None


def _change(by: int) -> None:
    global _users, _library
    with _lock:
        if by > 0 and _library is None:
            _library = _install()
            _forget_compiled_code()
        _users += by
        if _users == 0:
            _library._destroy()
            _library = None
            _forget_compiled_code()


def _install() -> Any:
    """Register CUDA's policies, and let the operations that only the CPU lists fall through to their kernels."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns about replaced kernels; replacing them is the point
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, policy in plan().items():
            function = torch.library.fallthrough_kernel if policy == "fallthrough" else _FUNCTIONS[policy](name)
            library.impl(name, function, "AutocastCPU")
    return library


def _forget_compiled_code() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _check_hooks() -> None:
    private = ("_ExcludeDispatchKeyGuard", "_dispatch_has_kernel_for_dispatch_key", "_dispatch_get_all_op_names")
    missing = [f"torch._C.{hook}" for hook in private if not hasattr(torch._C, hook)]
    if missing or not hasattr(torch.compiler.config, "cache_key_tag"):
        raise PrecisionError(
            f"CUDA's autocast list on the CPU needs {(*missing, 'torch.compiler.config.cache_key_tag')[0]}, "
            f"which torch {torch.__version__} lacks; precision=fp32 works without it"
        )


def plan() -> dict[str, str]:
    """What has to be registered for this torch: operation -> policy, ``fallthrough`` or ``unknown``.

    Operations on which both devices' lists agree are not in the plan.
    """
    cuda, cpu = _lists()
    agree = (cuda & cpu & POLICY.keys()) - _DISAGREE
    result = {name: POLICY.get(name, "unknown") for name in cuda - agree if POLICY.get(name) != "cuda_only"}
    return result | dict.fromkeys(cpu - cuda, "fallthrough") | STAND_INS


@cache
def _lists() -> tuple[frozenset[str], frozenset[str]]:
    """CUDA's and the CPU's list, as the dispatcher has them before this module changes the latter."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    cuda, cpu = ([n.removeprefix("aten::") for n in names if has(n, f"Autocast{device}")] for device in ("CUDA", "CPU"))
    return frozenset(cuda), frozenset(cpu)


# --- policies ---------------------------------------------------------------------------------------------------------

_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_ELIGIBLE = frozenset({torch.float16, torch.bfloat16, torch.float32})  # never float64, integers or complex


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _off() -> Any:
    """Autocast off for this call and all it is composed of, as in torch's own wrappers."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _ELIGIBLE and value.is_cpu


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every eligible tensor in it as ``dtype``."""
    if isinstance(value, Tensor):
        if value.dtype is dtype or not _eligible(value):
            return value
        return value.float() if dtype is torch.float32 else value.to(dtype)  # float() parses faster than to()
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value


def _call(operation: Any, args: tuple[Any, ...], options: dict[str, Any], dtype: torch.dtype) -> Any:
    if options:
        options = {name: _cast(option, dtype) for name, option in options.items()}
    with _off():
        return operation(*[_cast(arg, dtype) for arg in args], **options)


def _casting(name: str, dtype: torch.dtype | None) -> Function:
    """Cast to ``dtype``, or to whatever the region's dtype is when called."""
    operation = _operation(name)
    return lambda *args, **options: _call(operation, args, options, dtype or torch.get_autocast_dtype("cpu"))


def _fp32_set_dtype(name: str) -> Function:
    """Does not cast: the kernel reads half and accumulates and returns FP32. A dtype that the caller gave stands."""
    operation = _operation(name)
    position = [argument.name for argument in operation._schema.arguments].index("dtype")

    def function(*args: Any, **options: Any) -> Any:
        given = args[position] if len(args) > position else options.get("dtype")
        if given is None and _eligible(args[0]):
            args, options["dtype"] = args[:position], torch.float32
        with _off():
            return operation(*args, **options)

    return function


def _fp32_append_dtype(name: str) -> Function:
    overload, defaults = {  # of p, and of p, dim, keepdim: trailing defaults do not arrive
        "norm.Scalar": ("norm.ScalarOpt_dtype", (2,)),
        "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (None, None, False)),
    }[name]
    operation = _operation(overload)

    def function(x: Tensor, *args: Any) -> Any:
        with _off():
            return operation(x, *args, *defaults[len(args) :], dtype=torch.float32 if _eligible(x) else x.dtype)

    return function


def _promote(name: str) -> Function:
    operation = _operation(name)

    def function(*args: Any, **options: Any) -> Any:
        lower = torch.get_autocast_dtype("cpu")
        seen = {value.dtype for value in (*args, *options.values()) if _eligible(value)}
        if seen - {lower, torch.float32}:
            raise RuntimeError(f"{name} under autocast to {lower} takes {lower} and torch.float32, but got {seen}")
        return _call(operation, args, options, torch.float32 if torch.float32 in seen else lower)

    return function


def _half_through_fp32(name: str) -> Function:
    operation = _operation(name)
    return lambda x, *args, **options: _call(operation, (x, *args), options, torch.float32).to(x.dtype)


def _raising(error: type[Exception], message: str) -> Function:
    def function(*args: Any, **options: Any) -> Any:
        raise error(message)

    return function


_FUNCTIONS: dict[str, Callable[[str], Function]] = {
    "lower_precision": lambda name: _casting(name, None),
    "fp32": lambda name: _casting(name, torch.float32),
    "fp32_set_dtype": _fp32_set_dtype,
    "fp32_append_dtype": _fp32_append_dtype,
    "promote": _promote,
    "half_through_fp32": _half_through_fp32,
    "banned": lambda name: _raising(RuntimeError, _BANNED_MESSAGE),
    "unknown": lambda name: _raising(PrecisionError, _UNKNOWN_MESSAGE.format(name=name, torch=torch.__version__)),
}
