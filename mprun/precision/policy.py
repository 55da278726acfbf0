"""A precision policy as one frozen value.

A policy answers four questions about a training run: in which format the parameters live (``param_dtype``), in which
format matrix products and convolutions are computed (``compute_dtype``), what comes out of the model
(``output_dtype``), and who owns the FP32 truth (``mode``):

======== ===================== ============================================== =========================
mode     parameters            compute                                        FP32 truth
======== ===================== ============================================== =========================
full     float32               float32, products ``ieee`` or ``tf32``         the parameters
autocast float32               per operation: products in ``compute_dtype``,  the parameters
                               range-sensitive operations in float32
master   ``compute_dtype``     ``compute_dtype``                              master parameters
pure     ``compute_dtype``     ``compute_dtype``                              nobody (negative control)
======== ===================== ============================================== =========================

The policy never changes during a run and is never replaced by another: :func:`check_support` raises where a device
cannot do what the policy names.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ContextManager  # noqa: UP035

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mprun.config import DType, PrecisionConfig
from mprun.errors import ConfigError, PrecisionError

SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
LONG = {short: dtype for dtype, short in SHORT.items()}
# torch's flags for sums in half inside a matrix product.
IN_HALF = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of a configured format."""
    return {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16, DType.float16: torch.float16}[dtype]


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which formats a run uses. ``str(policy)`` is ``p=f32,c=f16,o=f32``; :meth:`parse` reads it back."""

    mode: str = "full"
    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    fp32_matmul: str = "ieee"
    fp32_modules: tuple[str, ...] = ()
    name: str = "custom"

    def __str__(self) -> str:
        """Short text of the three dtypes."""
        return f"p={SHORT[self.param_dtype]},c={SHORT[self.compute_dtype]},o={SHORT[self.output_dtype]}"

    @classmethod
    def parse(cls, text: str, **fields: Any) -> PrecisionPolicy:
        """The policy whose dtypes ``text`` (``p=f32,c=f16,o=f32``) names; other fields by keyword.

        Raises:
            PrecisionError: the text is not three known formats.
        """
        try:
            parts = dict(item.split("=") for item in text.split(","))
            p, c, o = (LONG[parts.pop(key)] for key in "pco")
        except (KeyError, ValueError):
            parts = {"": ""}
        if parts:
            raise PrecisionError(f"{text!r} is not a policy: write p=f32,c=f16,o=f32 with f32, bf16 or f16")
        return cls(param_dtype=p, compute_dtype=c, output_dtype=o, **fields)

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> PrecisionPolicy:
        """The policy that a (checked) ``precision`` node describes."""
        return cls(
            mode=config.mode.value,
            param_dtype=to_torch(config.param_dtype),
            compute_dtype=to_torch(config.compute_dtype),
            output_dtype=to_torch(config.output_dtype),
            fp32_matmul=config.fp32_matmul.value,
            fp32_modules=tuple(config.fp32_modules),
            name=config.name,
        )

    def for_eval(self, eval_dtype: DType | None) -> PrecisionPolicy:
        """The policy of evaluation: this one, or its parameters computed in ``eval_dtype`` (weights are never cast)."""
        if eval_dtype is None or to_torch(eval_dtype) == self.compute_dtype:
            return self
        dtype = to_torch(eval_dtype)
        mode = "full" if dtype == torch.float32 else "autocast"
        return PrecisionPolicy(mode, self.param_dtype, dtype, self.output_dtype, self.fp32_matmul, self.fp32_modules)

    def region(self, device_type: str) -> ContextManager[Any]:
        """The context of one forward pass: a fresh autocast region in ``autocast`` mode, nothing otherwise.

        A region must not span an optimizer step or a swap of weights: autocast caches the half copies of weights
        until the region ends.
        """
        if self.mode == "autocast":
            return torch.autocast(device_type, dtype=self.compute_dtype)
        return nullcontext()

    def cast_inputs(self, inputs: Any, *, channels_last: bool = False) -> Any:
        """``inputs`` with every floating-point tensor in the dtype that the model expects.

        In ``full`` and ``autocast`` mode that is float32 (autocast casts per operation), in ``master`` and ``pure``
        the compute dtype. Goes through tuples, lists and dicts; integer and bool tensors (ids, labels, masks) are
        returned as they are. With ``channels_last``, images (4-D) come in that memory format.
        """
        target = self.input_dtype

        def cast(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return t.to(target, memory_format=torch.channels_last) if channels_last and t.ndim == 4 else t.to(target)

        return map_tensors(inputs, cast)

    @property
    def input_dtype(self) -> torch.dtype:
        """What :meth:`cast_inputs` casts to."""
        return torch.float32 if self.mode in ("full", "autocast") else self.compute_dtype

    def overflowing(self, inputs: Any) -> list[Tensor]:
        """Where :meth:`cast_inputs` makes a finite number infinite: bool tensors, not read by the host.

        One for every tensor of a wider range than the dtype that it is cast to, in its shape; mostly there is none.
        """
        wide: list[Tensor] = []
        largest = torch.finfo(self.input_dtype).max

        def look(t: Tensor) -> None:
            if t.is_floating_point() and torch.finfo(t.dtype).max > largest:
                wide.append(t.to(self.input_dtype).isinf() & t.isfinite())

        map_tensors(inputs, look)
        return wide

    def cast_output(self, output: Tensor) -> Tensor:
        """The model's output in ``output_dtype``; the loss is computed in float32 in any case.

        Raises:
            ConfigError: the model returned something other than one real tensor.
        """
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"the model returned a {type(output).__name__}, not a tensor: mprun needs the logits (or predictions) alone; "
                "return them from forward, or wrap the model"
            )
        if output.is_complex():
            raise ConfigError(
                f"the model returned a {str(output.dtype).removeprefix('torch.')} tensor; no loss here takes complex "
                "numbers: return .real, .abs() or torch.view_as_real of it"
            )
        if type(output) is not Tensor and type(output).__torch_dispatch__ is Tensor.__torch_dispatch__:
            output = output.as_subclass(Tensor)  # a subclass would spread over the loss into counters and checkpoints
        return output.to(self.output_dtype) if output.is_floating_point() else output


def map_tensors(value: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it, through (named) tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {key: map_tensors(item, function) for key, item in value.items()}
        if type(value) is dict:
            return items
        same = copy.copy(value)  # a defaultdict, a user's own mapping: its constructor may want something else
        for key, item in items.items():
            same[key] = item
        return same
    if isinstance(value, PackedSequence):
        return value._replace(data=map_tensors(value.data, function))
    if isinstance(value, tuple):
        parts = [map_tensors(item, function) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [map_tensors(item, function) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        filled = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(
                    filled, field.name, map_tensors(getattr(value, field.name), function)
                )  # also if frozen
        return filled
    return value


def check_support(policy: PrecisionPolicy, device: torch.device) -> None:
    """Refuse, before any work, what ``device`` cannot do as named.

    Raises:
        PrecisionError: names the field, the device and what would work.
    """
    if policy.fp32_matmul == "tf32":
        if device.type != "cuda":
            raise PrecisionError(
                f"precision.fp32_matmul=tf32 (precision={policy.name}): device {device.type!r} has no TF32 units; "
                "use precision=fp32 here, or device=cuda on an Ampere or later GPU"
            )
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise PrecisionError(
                f"precision.fp32_matmul=tf32: {torch.cuda.get_device_name(device)} has no TF32 units "
                "(compute capability below 8.0); use precision=fp32"
            )
    if policy.compute_dtype == torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise PrecisionError(
            f"precision.compute_dtype=bfloat16: {torch.cuda.get_device_name(device)} computes no BF16; "
            "use precision=fp16_dynamic"
        )


@contextmanager
def matmul_precision(policy: PrecisionPolicy) -> Iterator[None]:
    """Set how products are computed on a GPU, and put the flags back at the end.

    FP32 (matmul and cuDNN alike): torch leaves cuDNN's TF32 on by default; under ``ieee`` both are off, under ``tf32`` both
    are on. Half: partial sums are added in FP32 and rounded once. torch lets cuBLAS add them in half by default, which
    overflows earlier and rounds more often than the policy says.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    tf32 = policy.fp32_matmul == "tf32"
    wanted: dict[tuple[Any, str], bool] = {(matmul, "allow_tf32"): tf32, (cudnn, "allow_tf32"): tf32}
    wanted |= {(matmul, name): False for name in IN_HALF}
    before = {(where, name): getattr(where, name) for where, name in wanted}
    _set_flags(wanted)
    try:
        yield
    finally:
        _set_flags(before)


def _set_flags(flags: dict[tuple[Any, str], Any]) -> None:
    for (where, name), value in flags.items():
        setattr(where, name, value)
