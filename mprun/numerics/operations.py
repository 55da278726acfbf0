"""What an operation of torch reads, writes and makes, as :mod:`mprun.numerics.trace` needs to know it.

Everything is read off the operation's schema; a few short lists name what a schema does not say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_LISTS: dict[str, str] = {
    # They write the numbers that they are told to.
    "fills": "fill full full_like new_full masked_fill where constant_pad_nd index_fill scalar_tensor",
    # What they return is whatever lay in memory.
    "uninitialised": "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize",
    # In place, without looking at what was there before.
    "overwrites": "copy zero fill normal uniform bernoulli random exponential log_normal cauchy geometric",
    # They move numbers and make none: a module reaches nothing by them.
    "moves": "clone copy cat stack index index_select gather constant_pad_nd lift_fresh contiguous flip roll",
    # They write to the running statistics that they are given, which their schemas do not say.
    "updates": "batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats "
    "batch_norm_gather_stats_with_counts batch_norm_update_stats",
}
FILLS, UNINITIALISED, OVERWRITES, MOVES, UPDATES = (frozenset(names.split()) for names in _LISTS.values())
RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True)
class Operation:
    """An operation by its schema.

    Attributes:
        name: plain, such as ``mm``, ``softmax``, ``cast``: without what marks inner and in-place forms.
        writes: whether it writes to arguments.
        view: whether it only makes a view of its argument.
        outs: keyword arguments that it writes to without reading them (``out=``).
        slots: every argument's name, and whether it is written to.
    """

    name: str
    writes: bool
    view: bool
    outs: frozenset[str]
    slots: tuple[tuple[str, bool], ...]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments whose numbers it reads."""
        if not self.writes:
            return args, kwargs
        given = {key: value for key, value in kwargs.items() if key not in self.outs}
        return args[1:] if self.name in OVERWRITES else args, given

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments that it writes to."""
        found = [value for value, (_, write) in zip(args, self.slots, strict=False) if write]
        return found + [kwargs[name] for name, write in self.slots if write and name in kwargs]

    def unread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments that only their own new values depend on: running statistics of a batch norm in training."""
        given = {slot: value for value, (slot, _) in zip(args, self.slots, strict=False)} | kwargs
        training = given.get("training", given.get("train", self.name in UPDATES))
        return [given[slot] for slot in RUNNING if slot in given] if training else []


@cache
def about(func: Any) -> Operation:
    """The :class:`Operation` behind an overload such as ``torch.ops.aten.mm.default``."""
    schema = func._schema
    name = schema.name.partition("::")[2].strip("_").removeprefix("native_")
    aliases = [(a.name, a.alias_info, a.kwarg_only) for a in schema.arguments]
    hidden = RUNNING if name in UPDATES else ()
    slots = tuple((slot, slot in hidden or (alias is not None and alias.is_write)) for slot, alias, _ in aliases)
    writes = any(write for _, write in slots)
    return Operation(
        name="cast" if name == "to_copy" else name,
        writes=writes,
        view=not writes and any(alias is not None for _, alias, _ in aliases),
        outs=frozenset(name for name, alias, keyword in aliases if keyword and alias is not None and alias.is_write),
        slots=slots,
    )


@dataclass(frozen=True)
class Look:
    """What a tensor was like: its largest finite magnitude, whether all of it was finite, whether NaN was in it."""

    tensor: Tensor
    amax: float
    finite: bool
    nan: bool

    @classmethod
    def at(cls, tensor: Tensor) -> Look:
        """Look now. Waits for the device."""
        amax, finite = reach(tensor)
        return cls(tensor, amax, finite, not finite and bool(tensor.isnan().any()))


def reach(tensor: Tensor) -> tuple[float, bool]:
    """The largest finite magnitude in ``tensor`` (0 if there is none), and whether all of it is finite. Waits for the device."""
    x = tensor.detach()
    if not x.numel():
        return 0.0, True
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = (x.float() if x.dtype.itemsize == 1 else x).abs()
    most = float(x.amax())
    if math.isfinite(most):
        return most, True
    return float(torch.where(x.isfinite(), x, 0).amax()), False


def floats(value: Any) -> list[Tensor]:
    """The tensors in ``value`` that can hold NaN and that can be looked at."""
    return [
        t
        for t in pytree.tree_leaves(value)
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.layout == torch.strided
    ]


def writes_inf(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a plain number among the arguments is NaN or inf."""
    return any(isinstance(value, float) and not math.isfinite(value) for value in pytree.tree_leaves((args, kwargs)))


def chosen(name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether non-finite numbers of an input get into the result. Only of operations that choose by element is more known."""
    if kwargs or name not in ("masked_fill", "where") or len(args) != 3:
        return True
    mask, no, yes = (args[1], args[0], args[2]) if name == "masked_fill" else (args[0], args[2], args[1])
    return any(
        bool((taken & ~tensor.isfinite()).any()) for source, taken in ((yes, mask), (no, ~mask)) if source is tensor
    )
