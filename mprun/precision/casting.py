"""Carry out a plan: parameters into their dtypes, and casts at the borders of modules.

A border is a subclass of the module's own class, made once per class, whose ``forward`` casts and calls the original:

=================== ======================================= =========================================================
module is           float inputs                            float outputs
=================== ======================================= =========================================================
FP32, ``autocast``  to float32; autocast off inside         float32, as autocast's own FP32 operations give
FP32, half modes    to float32                              back to the dtype that came in; ``compute_dtype`` if none
                                                            did (embeddings), float32 inside another FP32 module
half, half modes    to ``compute_dtype``                    as computed
=================== ======================================= =========================================================

``module.__class__`` is exchanged, nothing on the instance is patched: state-dict keys, ``isinstance``, ``deepcopy``,
recompute under activation checkpointing and ``torch.compile(fullgraph=True)`` all see one ordinary forward. Tensors in
tuples, named tuples, lists and dicts are cast, integers and bools never.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mprun.errors import OverrideError
from mprun.precision.overrides import PlanEntry
from mprun.precision.policy import PrecisionPolicy, map_tensors

HALF_MODES = ("master", "pure")


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; everything else as it is."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def first_dtype(value: Any) -> torch.dtype | None:
    """The dtype of the first floating-point tensor in ``value``, None without one."""
    found: list[torch.dtype] = []
    map_tensors(value, lambda t: found.append(t.dtype) if t.is_floating_point() else None)
    return found[0] if found else None


@cache
def _bordered(cls: Any, kind: str, dtype: torch.dtype) -> type[nn.Module]:
    """The subclass of ``cls`` with a border of ``kind``: ``island`` (autocast), ``fp32`` or ``half``."""

    def island(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        args, kwargs = cast_tensors(given, torch.float32)
        with torch.autocast(_device_type(self, given), enabled=False):
            output = cls.forward(self, *args, **kwargs)
        _write_back(self, given, (args, kwargs))
        return output

    def fp32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if _one_tensor(args, kwargs):  # most modules; a shorter way to the same
            x = args[0]
            wide = x.float()
            output = cls.forward(self, wide)
            _write_back(self, x, wide)
            return cast_tensors(output, x.dtype)
        outside = first_dtype(given) or dtype
        args, kwargs = cast_tensors(given, torch.float32)
        output = cls.forward(self, *args, **kwargs)
        _write_back(self, given, (args, kwargs))
        return cast_tensors(output, outside)

    def half(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if _one_tensor(args, kwargs) and args[0].dtype is dtype:  # nothing to cast, and nothing to write back
            return cls.forward(self, *args)
        args, kwargs = cast_tensors(given, dtype)
        output = cls.forward(self, *args, **kwargs)
        _write_back(self, given, (args, kwargs))
        return output

    return subclass(cls, {"island": island, "fp32": fp32, "half": half}[kind], _bordered, kind, dtype)


def _one_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and type(args[0]) is Tensor and args[0].is_floating_point()


def subclass(cls: Any, forward: Any, make: Any, *arguments: Any) -> type[nn.Module]:
    """The subclass of ``cls`` with another ``forward``, indistinguishable otherwise.

    Pickle finds classes by their name, under which there is ``cls`` itself; it is told to call ``make(cls, *arguments)``.

    Raises:
        OverrideError: the class cannot be subclassed.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return _unpickled, (_portable(type(self)),), self.__getstate__()

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_mprun_recipe": (make, cls, *arguments),
    }
    try:
        return type(cls.__name__, (cls,), body)
    except Exception as error:  # whatever a metaclass or __init_subclass__ raises
        raise OverrideError(
            f"{cls.__name__} cannot be subclassed ({type(error).__name__}: {error}), so no cast can be put around it; let its "
            "__init_subclass__ or metaclass take a plain subclass (precision.mode=full works as it is)"
        ) from error


def plain_class(cls: Any) -> Any:
    """``cls`` without what :func:`subclass` has put around it, borders and recompute: the class as its author wrote it."""
    while "_mprun_recipe" in vars(cls):
        cls = cls._mprun_recipe[1]
    return cls


def _portable(cls: Any) -> Any:
    """A class that pickle finds, or how to make one from such a class."""
    if "_mprun_recipe" not in vars(cls):
        return cls
    make, base, *arguments = cls._mprun_recipe
    return make, _portable(base), *arguments


def _made(portable: Any) -> Any:
    """The inverse of :func:`_portable`."""
    if isinstance(portable, type):
        return portable
    make, base, *arguments = portable
    return make(_made(base), *arguments)


def _unpickled(portable: Any) -> nn.Module:
    cls = _made(portable)
    module: nn.Module = cls.__new__(cls)
    return module


def _write_back(module: nn.Module, given: Any, cast: Any) -> None:
    """What a forward wrote into its cast inputs in place goes into the inputs themselves, as without a cast.

    Compiled code cannot look; :mod:`mprun.training.observe` does, by the mark that is left here.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # inference tensors have no version
        return
    if type(cast) is Tensor and not cast._version:
        return
    copies: list[Tensor] = []
    map_tensors(cast, copies.append)
    if not any(copy._version for copy in copies):
        return
    originals: list[Tensor] = []
    map_tensors(given, originals.append)
    for original, copy in zip(originals, copies, strict=True):
        # A fresh copy has version 0; what needed no cast is the input itself.
        if copy is not original and copy._version and original.dtype != copy.dtype:
            original.copy_(copy)
            vars(module)["_mprun_writes_input"] = True


def _device_type(module: nn.Module, args: Any) -> str:
    found: list[str] = []
    map_tensors(args, lambda t: found.append(t.device.type))
    return found[0] if found else next((p.device.type for p in module.parameters()), "cpu")


def apply_plan(policy: PrecisionPolicy, plan: Sequence[PlanEntry], *, eval_autocast: bool = False) -> None:
    """Cast parameters and put borders, in place.

    In ``master`` mode float buffers stay float32, in ``pure`` mode those of half modules are cast too. Masters must have
    been taken before (see :mod:`mprun.precision.master`). ``eval_autocast``: a ``full`` policy is evaluated under autocast,
    so its FP32 modules need their borders too.
    """
    if policy.mode == "full" and not eval_autocast:
        return
    half_mode = policy.mode in HALF_MODES
    for entry in plan:
        module = entry.module
        if half_mode and not entry.fp32:
            _cast_own(module, policy.compute_dtype, buffers=policy.mode == "pure")
    for entry in plan:
        module = entry.module
        if entry.fp32 and not half_mode:
            _exchange(module, "island", torch.float32)
        elif entry.fp32 and half_mode:
            _exchange(module, "fp32", torch.float32 if entry.inner else policy.compute_dtype)
        elif half_mode and any(p.is_floating_point() for p in module.parameters(recurse=False)):
            _exchange(module, "half", policy.compute_dtype)


def _cast_own(module: nn.Module, dtype: torch.dtype, *, buffers: bool) -> None:
    """Cast what ``module`` itself holds. Parameters keep their identity, so tied ones stay tied."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if buffers:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))


def _exchange(module: nn.Module, kind: str, dtype: torch.dtype) -> None:
    if "forward" in vars(module):
        # An instance attribute would win over the class: the cast would silently not happen.
        raise OverrideError(
            f"{type(module).__name__} has a forward patched onto the instance, around which no cast can be put; "
            "move it into a class (precision.mode=full works as it is)"
        )
    cls: Any = type(module)
    module.__class__ = _bordered(cls, kind, dtype)
