"""Which sample or module is to blame, for an error message. Nothing here runs while training is healthy.

:func:`nonfinite_samples` and :func:`input_overflow` look at a batch; :func:`dtype_trouble` reads off a traceback which module
an error of torch about a dtype came from; :func:`kernel_trouble` knows torch's refusal under ``deterministic=true``. Where
non-finite numbers come from otherwise: :mod:`mprun.training.postmortem`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mprun.data.base import Batch
from mprun.precision.policy import map_tensors
from mprun.training.state import TrainState
from mprun.training.verdict import some


def nonfinite_samples(batch: Batch) -> list[int]:
    """Ids of the samples of ``batch`` whose float inputs or targets hold NaN or inf."""
    bad = torch.zeros(len(batch.ids), dtype=torch.bool)

    def look(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.ndim and tensor.shape[0] == len(bad):
            bad.logical_or_(
                ~tensor.detach().isfinite().flatten(1 if tensor.ndim > 1 else 0).reshape(len(bad), -1).all(1).cpu()
            )
        return tensor

    map_tensors(batch.inputs, look)
    look(batch.targets)
    return [int(i) for i in batch.ids[bad]]


def input_overflow(state: TrainState, window: Sequence[Batch]) -> str | None:
    """One clause that names the samples of ``window`` with an input that the cast makes infinite; None without one."""
    bad = []
    for batch in window:
        for found in state.policy.overflowing(batch.inputs):
            rows = found.flatten(1).any(1) if found.ndim > 1 else found
            bad += batch.ids[rows.cpu()].tolist() if rows.shape == batch.ids.shape else batch.ids.tolist()
    if not bad:
        return None
    dtype = state.policy.input_dtype
    return (
        f"an input of sample {some(sorted(set(bad)))} becomes inf when precision.mode={state.policy.mode} casts it to "
        f"{str(dtype).removeprefix('torch.')}, whose largest number is {torch.finfo(dtype).max:g}: normalise the data, or use "
        "precision.mode=autocast with an FP32 rule for the module that takes it"
    )


# What torch says where a module cannot be computed in half as it is written, and what to do about it.
DTYPE_TROUBLE = {
    r"cannot be converted to type \S+ without overflow": (
        "a constant is beyond the range of {dtype}: use torch.finfo(x.dtype).min, or keep the module in FP32: "
        "precision.fp32_modules=[{path}]"
    ),
    r"unsafe to autocast|binary_cross_entropy of half": (
        "return logits and use binary_cross_entropy_with_logits (BCEWithLogitsLoss)"
    ),
    r"maximum recursion depth": (
        "if its forward calls super(type(self), self), write super(): the module's class gets a subclass that casts its inputs"
    ),
    # '"cdist" not implemented for 'Half'', 'Low precision dtypes not supported', 'must be either float or double' ...
    r"not implemented for '(Half|BFloat16|ComplexHalf)'|[Ll]ow precision|[Uu]nsupported (dtype|ScalarType) \w*(Half|BFloat16)"
    r"|(either|other than) float (or|and) double|float, double|Float or Double": (
        "torch has no {dtype} kernel for it here: compute it in float32 (x.float()), or keep the module in FP32: "
        "precision.fp32_modules=[{path}]"
    ),
    # 'mat1 and mat2 must have the same dtype, but got Float and Half' and its relatives, some of which name no dtype at all.
    # A clash of other dtypes (Double and Float) is there in FP32 too, and is not ours to explain.
    r"(?s)(?!.*types: Long)(?=.*(Half|BFloat16)|(?!.*(Float|Double|Long|Int|Bool|float|double|long|int\b)))"
    r"(?=.*(same dtype|scalar type|should be the same|dtypes match|dtype to be equal|expected dtype))": (
        "give new tensors the dtype of the input (dtype=x.dtype), or keep the module in FP32: precision.fp32_modules=[{path}]"
    ),
}
# The same, from the backward pass of a function of the user's own.
CUSTOM_BACKWARD = (
    "decorate its forward with @torch.amp.custom_fwd and its backward with @torch.amp.custom_bwd (device_type=...), "
    "or cast what they take"
)


def dtype_trouble(error: Exception, state: TrainState) -> str | None:
    """What to tell instead of ``error``, if it is about a dtype: the module it came from, where, and the cure.

    Returns:
        Two lines; None for any other error, and in ``full`` mode, where mprun has cast nothing.
    """
    cure = next((cure for pattern, cure in DTYPE_TROUBLE.items() if re.search(pattern, str(error))), None)
    if cure is None or state.policy.mode == "full" or not isinstance(error, RuntimeError | TypeError):
        return None
    names = {module: path for path, module in state.model.named_modules()}
    subject, path = f"the model itself ({type(state.model).__name__})", ""
    trace = error.__traceback__
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        # The first argument, which need not be called self.
        owner = values.get(code.co_varnames[0]) if code.co_argcount else None
        where = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        if isinstance(owner, nn.Module) and owner in names:
            path = names[owner]
            subject = f"{path or 'the model itself'} ({type(owner).__name__}, {where})"
        elif isinstance(owner, torch.autograd.function.BackwardCFunction):
            function = type(owner).__name__.removesuffix("Backward")
            path, subject, cure = "", f"the backward of {function} ({where})", CUSTOM_BACKWARD
        trace = trace.tb_next
    return (
        f"{subject} does not run at precision={state.policy.name}: {str(error).strip().splitlines()[0]}\n"
        + cure.format(path=path or "'**'", dtype=str(state.policy.compute_dtype).removeprefix("torch."))
    )


def kernel_trouble(error: Exception) -> str | None:
    """What to tell instead of ``error``, if torch has no reproducible kernel for an operation; None for any other error."""
    found = re.match(r"(\S+)[^.]* does not have a deterministic implementation", str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    return (
        f"deterministic=true: torch has no reproducible kernel for {found[1]} on this device, and the model needs it; use "
        "deterministic=false"
    )
