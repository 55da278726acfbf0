"""A model and batches without memory: fake tensors, which have shape, strides, dtype and device, and no values.

The model's builder runs on real tensors, because builders read values (timm's read drop-path rates off a ``linspace``). But what
is large is never written to (:class:`Untouched`), and memory that nobody has touched is only an address. Then parameters and
buffers are exchanged for fake ones (:func:`make_fake`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.data.base import Batch
from mprun.errors import ConfigError
from mprun.numerics.memory import ValueReadError
from mprun.precision.policy import map_tensors

LARGE = 2**16  # elements: more than a builder reads values from
# In-place operations that write no element.
SHAPING = {"resize_", "detach_", "transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_", "set_", "resize_as_"}


class Untouched(TorchDispatchMode):
    """Leaves large tensors unwritten: memory that is reserved and never touched costs nothing, and no time to fill."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if (
            name.endswith("_")
            and name not in SHAPING
            and args
            and isinstance(args[0], Tensor)
            and args[0].numel() > LARGE
        ):
            return args[0]
        if name in ("randint", "rand", "randn"):
            kept = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device")}
            size = next(arg for arg in args if isinstance(arg, list | tuple))
            return torch.empty(size, **kept) if torch.Size(size).numel() > LARGE else func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def make_fake(model: nn.Module, device: torch.device, *, channels_last: bool) -> None:
    """Exchange parameters and buffers for fake tensors on ``device``, in place; shared ones stay shared.

    Must run inside a fake mode. ``Module.to`` cannot move fake parameters, so the model is made where it should be, and its
    ``to`` does nothing until it is deleted.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor, device, channels_last=channels_last)
                    holder[name] = made[id(tensor)]  # type: ignore[assignment]
    model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]


def _fake(tensor: Tensor, device: torch.device, *, channels_last: bool) -> Tensor:
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return tensor  # refused in a moment, with the right message
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if channels_last and tensor.ndim == 4:
        new = new.to(memory_format=torch.channels_last)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def resized(example: Batch, batch_size: int, device: torch.device) -> Batch:
    """A fake batch of ``batch_size`` examples that look like those of ``example``."""
    count = len(example.ids)

    def resize(tensor: Tensor) -> Tensor:
        batched = tensor.ndim > 0 and tensor.shape[0] == count
        shape = (batch_size, *tensor.shape[1:]) if batched else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device=device)

    return Batch(
        map_tensors(example.inputs, resize), resize(example.targets), torch.empty(batch_size, dtype=torch.int64)
    )


class UnpredictableError(ConfigError):
    """The model cannot be run without values; a real step can still be measured."""


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Say what it means if a model cannot be run without values."""
    try:
        with warnings.catch_warnings():
            # The check for parameters that share memory asks where they lie: a fake one lies nowhere.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except (
        ValueReadError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        raise _unpredictable(name, error) from error
    except (RuntimeError, TypeError, NotImplementedError) as error:
        # ".numpy() is not supported for tensor subclasses", and what else cannot be had from a tensor without memory.
        if re.search(r"tensor subclass|FakeTensor|[Mm]eta (tensor|device)|data pointer", str(error)):
            raise _unpredictable(name, error) from error
        raise


def _unpredictable(name: str, error: Exception) -> UnpredictableError:
    return UnpredictableError(
        f"model.name={name} cannot be estimated from shapes alone, because what it computes depends on values "
        f"({str(error).strip().splitlines()[0]}); estimate --measure takes one real step instead"
    )
