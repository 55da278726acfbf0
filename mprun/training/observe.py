"""Which dtypes really occur, module by module: the content of ``modules.json``.

One forward pass of one batch is watched from two sides: hooks know which module is running, a dispatch mode sees the
operands of every operation that reaches a kernel. So the table shows what happened, not what was planned; and where
the two differ the run stops (:func:`check_plan`): what the config names is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.data.base import Batch
from mprun.errors import OverrideError, PrecisionError
from mprun.precision.policy import map_tensors
from mprun.training.arrival import refuse_eval_mode
from mprun.training.env import capture_rng, restore_rng
from mprun.training.state import TrainState
from mprun.training.targets import batch_norm_explained

# Operations whose operands' dtype is the dtype of the arithmetic; casts, views and fills say nothing.
SILENT = {"_to_copy", "view", "_unsafe_view", "t", "transpose", "permute", "detach", "clone", "expand", "slice", "select",
          "unbind", "split", "copy_", "alias", "as_strided", "reshape", "squeeze", "unsqueeze", "cat", "empty_like"}  # fmt: skip
HALF_BCE = "binary_cross_entropy of half probabilities, which round to 0 and 1, whose log is -inf"
PRODUCT_MODULES = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_linear", "mkldnn_convolution"}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operand dtypes of every operation under the name of the module that is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        self.seen: dict[str, dict[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.running and name not in SILENT:
            floats: list[Tensor] = []
            map_tensors(list(args), lambda t: floats.append(t) if t.is_floating_point() else None)
            if name == "binary_cross_entropy" and floats[0].dtype in (torch.float16, torch.bfloat16):
                raise RuntimeError(HALF_BCE)
            if any(t.ndim for t in floats):
                # A normalisation of half inputs with float32 statistics is float32 arithmetic: the wider operand decides. A
                # number (0-D) does not.
                dtype = reduce(torch.promote_types, (t.dtype for t in floats if t.ndim))
                self.seen.setdefault(self.running[-1], {}).setdefault(name, _short(dtype))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def observe(state: TrainState, batch: Batch) -> list[dict[str, Any]]:
    """The precision table of ``state``'s model: one row a module, in module order.

    Returns:
        Rows with ``module class rule param_dtype compute_dtype output_dtype``. ``rule`` is what decided (the mode, or the
        FP32 rule that won). ``compute_dtype`` is the dtype of the module's own matrix products if it has any, otherwise of
        its first operation; null for a module that computes nothing itself. Buffers and RNG are left as they were.
    """
    refuse_eval_mode(state.model)
    watch, outputs = _Watch(), {}
    handles = []
    for name, module in state.model.named_modules():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            watch.running.append(name)

        def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            watch.running.pop()
            dtypes: list[torch.dtype] = []
            map_tensors(output, lambda t: dtypes.append(t.dtype))
            outputs[name] = ",".join(dict.fromkeys(_short(dtype) for dtype in dtypes))

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    buffers, rng = state.start_window(), capture_rng()
    values = {name: (p._version, p.data_ptr(), p.detach().clone()) for name, p in state.model.named_parameters()}
    try:
        with batch_norm_explained([batch]), watch, state.policy.region(state.device.type):
            output = state.model(state.policy.cast_inputs(batch.inputs))
        state.parameters.refuse_changed(state.model, (module._parameters for module in state.model.modules()))
        state.parameters.refuse_toggled()
        state.policy.cast_output(output)
    finally:
        for handle in handles:
            handle.remove()
        buffers.restore(state.model.modules())
        restore_rng(rng)
    _note_written(state, values)
    _refuse_lost_writes(state)
    return [
        {
            "module": entry.path,
            "class": type(entry.module).__name__,
            "rule": entry.rule if entry.rule != "mode" else f"mode:{state.policy.mode}",
            "param_dtype": ",".join(dict.fromkeys(_short(p.dtype) for p in entry.module.parameters(recurse=False)))
            or None,
            "compute_dtype": _compute_dtype(watch.seen.get(entry.path, {})),
            "output_dtype": outputs.get(entry.path),
        }
        for entry in state.plan
    ]


def _note_written(state: TrainState, before: dict[str, tuple[int, int, Tensor]]) -> None:
    """Put back the parameters that the forward pass wrote to, and remember which they are.

    Raises:
        PrecisionError: one of them is the half copy of a master, which would know nothing of it.
    """
    written = set()
    for path, module in state.model.named_modules(remove_duplicate=False):
        for attribute, p in module._parameters.items():
            name = f"{path}.{attribute}".lstrip(".")
            if p is None or name not in before:
                continue
            version, address, value = before[name]
            if p._version == version and p.data_ptr() == address and torch.equal(p, value):
                continue
            p.copy_(value)
            written.add((module, attribute))
            if name in state.weights.by_name:
                why = "; it has max_norm" if getattr(module, "max_norm", None) is not None else ""
                raise PrecisionError(
                    f"parameter {name} is written to by the forward pass ({type(module).__name__}{why}), and at "
                    f"precision={state.policy.name} its FP32 master would not follow: keep it in FP32, "
                    f"""precision.fp32_modules=[{path or "'**'"}]"""
                )
    state.written = frozenset(written)


def _refuse_lost_writes(state: TrainState) -> None:
    """What a module writes into its cast input in place comes back into the input; compiled code cannot look for that.

    Raises:
        OverrideError: a module does so, and the model is compiled.
    """
    for path, module in state.model.named_modules() if state.forward is not state.model else ():
        if getattr(module, "_mprun_writes_input", False):
            raise OverrideError(
                f"{path or 'the model'} ({type(module).__name__}) writes into its input in place, which is a cast copy here, and "
                "compiled code would lose that: make the operation not in place, or use model.compile=false"
            )


def check_plan(state: TrainState, rows: Sequence[dict[str, Any]]) -> None:
    """Hold what was seen against the plan.

    Raises:
        PrecisionError: an FP32 module computed in half, or a module's products ran in another dtype than the policy's.
    """
    for entry, row in zip(state.plan, rows, strict=True):
        seen = row["compute_dtype"]
        wanted = "float32" if entry.fp32 else _short(state.policy.compute_dtype)
        # Autocast promotes a bilinear form to the widest of its inputs; what it does to every other product is known.
        promoted = isinstance(entry.module, nn.Bilinear) and state.policy.mode == "autocast"
        products = isinstance(entry.module, PRODUCT_MODULES) and not promoted
        if (
            row["output_dtype"] is None
            and entry.rule in state.policy.fp32_modules
            and not entry.inner
            and row["param_dtype"]
        ):
            raise OverrideError(
                f"precision.fp32_modules: {entry.rule!r} names {entry.path} ({row['class']}), which is never called: what is "
                "around it uses its weights directly, so the rule would have no effect; name the module around it"
            )
        if seen is None or seen == wanted or not (products or entry.fp32):
            continue
        where = entry.path or "the model itself"
        cure = (
            "its forward leaves the precision that it was given (a cast or an autocast region of its own): remove that"
            if entry.fp32 or state.policy.mode == "full"
            else f"if the model wants it so, say it: precision.fp32_modules=[{entry.path}]"
        )
        raise PrecisionError(
            f"{where} ({row['class']}) computes in {seen}, but precision={state.policy.name} plans {wanted} "
            f"(rule {row['rule']}); {cure}"
        )


def _compute_dtype(seen: dict[str, str]) -> str | None:
    products = [dtype for operation, dtype in seen.items() if operation in PRODUCTS]
    return next(iter(products or seen.values()), None)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
