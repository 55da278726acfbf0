"""Where a non-finite number was born, and how far each module's numbers reach. For post-mortems: it reads the host a lot.

Inside :func:`trace` every operation is seen, forward and backward (a ``TorchDispatchMode``), with the module that runs it
(:mod:`mprun.numerics.places`). NaN and inf by themselves are no crime: masks are made of ``-inf``, and softmax takes them
away again. What counts is what *reaches the end* (the loss, the gradients). So every non-finite tensor carries the event
that it stems from, and the events of what arrives are asked in the end:

======= ============================================================================== ==================================
event   what happened                                                                  what comes of it downstream
======= ============================================================================== ==================================
made    an operation made NaN or inf out of finite numbers (an overflow, 0/0, log(0))  carried on until a result is finite
written a fill wrote it on purpose (``masked_fill``, ``full``, ``where``), or memory   carried on; an operation that makes
        is uninitialised (``empty``)                                                   NaN of a mere inf is a made event,
given   it was there already: a parameter, a buffer, an input, a constant              with this one as its ``cause``
======= ============================================================================== ==================================

Where several meet, NaN and ``+inf`` made go before ``-inf`` made, and these before what was written or given as inf (which
a mask would be); of equals the earliest. ``masked_fill`` and ``where`` are followed by element, so an overflow that a mask
covers is forgotten. Everything else goes by tensors, that is, by their memory: views share what they carry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.numerics.operations import (
    FILLS,
    MOVES,
    UNINITIALISED,
    Look,
    Operation,
    about,
    chosen,
    floats,
    reach,
    writes_inf,
)
from mprun.numerics.places import Place, Places, Where


@dataclass(frozen=True)
class Event:
    """Where non-finite numbers came from.

    Attributes:
        number: events in the order in which they happened.
        kind: ``made``, ``written`` or ``given``.
        module: dotted path (``""`` is the model), or ``places.LOSS``, ``places.INPUT`` outside of it.
        cls: the module's class.
        operation: such as ``mm``, ``pow``, ``softmax``, ``cast``; without ``_`` of in-place or inner forms.
        where: ``forward`` or ``backward``.
        dtype: of the result.
        amax: the largest finite magnitude among the operation's inputs.
        shape: of the result.
        index: of the first bad number in it.
        rows: the indices along dimension 0 that have a bad number.
        value: that bad number.
        nth: which call of this operation in this module and direction it was, counted from 0.
        source: what it is that was given: ``parameter NAME``, ``buffer NAME``, a name passed to :func:`trace`, or ``constant``.
        cause: the written or given inf that the operation made NaN of.
    """

    number: int
    kind: str
    module: str
    cls: str
    operation: str
    where: Where
    dtype: str
    amax: float
    shape: tuple[int, ...]
    index: tuple[int, ...]
    rows: tuple[int, ...]
    value: float
    nth: int = 0
    source: str | None = None
    cause: Event | None = None

    @property
    def soft(self) -> bool:
        """Whether it may be a mask: an inf that was written, or given as a constant, buffer or input."""
        return self.kind != "made" and not math.isnan(self.value) and not (self.source or "").startswith("parameter")

    @property
    def rank(self) -> tuple[int, int]:
        """The smallest one is to blame."""
        return (2 if self.soft else 1 if self.value == -math.inf else 0), self.number


@dataclass(frozen=True)
class Peak:
    """The largest finite magnitude that any operation of a module gave, which one it was, and in which format."""

    operation: str
    amax: float
    dtype: str


@dataclass
class Trace:
    """What :func:`trace` saw.

    Attributes:
        events: every event, also those of which nothing came.
        peaks: by module path and direction.
        reach: what each single call of an operation gave, by module path, direction, operation and its number among them; the
            same call has the same key in another run of the same model.
    """

    places: Places
    given: dict[int, tuple[StorageWeakRef, str]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    peaks: dict[Place, Peak] = field(default_factory=dict)
    reach: dict[tuple[str, Where, str, int], float] = field(default_factory=dict)
    _carried: dict[int, tuple[StorageWeakRef, Event]] = field(default_factory=dict)
    _calls: Counter[tuple[str, Where, str]] = field(default_factory=Counter)
    _nth: int = 0
    _ends: list[Event] = field(default_factory=list)

    @property
    def first(self) -> Event | None:
        """What is to blame for the first non-finite number at the end; None if nothing non-finite got there."""
        return self._ends[0] if self._ends else None

    def end(self, *tensors: Tensor | None) -> bool:
        """Tell that ``tensors`` (the loss; the gradients) are results: what they carry is to blame. Whether all are finite.

        The first call that is given something non-finite decides.
        """
        found = [self._of(tensor) for tensor in tensors if tensor is not None and not reach(tensor)[1]]
        self._ends += sorted(found, key=lambda event: event.rank)[:1]
        return not found

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and look at what it made."""
        operation = about(func)
        if operation.view:
            return func(*args, **kwargs)
        inputs = floats(operation.read(args, kwargs))
        # An operation in place destroys its input.
        before = [Look.at(t) for t in inputs] if operation.writes else None
        result = func(*args, **kwargs)
        results = floats((result, operation.written(args, kwargs)) if operation.writes else result)
        if operation.name in UNINITIALISED:
            for tensor in results:
                if not reach(tensor)[1]:
                    self._carry(tensor, self._event("written", operation.name, tensor, 0.0))
            return result
        place = self.places.now()
        self._nth = self._calls[(*place, operation.name)]
        self._calls[(*place, operation.name)] += 1
        for tensor in results:
            amax, finite = reach(tensor)
            if operation.name not in MOVES:
                self._peak(place, operation.name, amax, tensor.dtype)
            if not finite:
                self._carry(
                    tensor, self._origin(operation, tensor, before or [Look.at(t) for t in inputs], args, kwargs)
                )
        return result

    def _origin(self, operation: Operation, result: Tensor, looks: Sequence[Look], args: Any, kwargs: Any) -> Event:
        """The event that ``result`` carries."""
        name, amax = operation.name, max((look.amax for look in looks), default=0.0)
        unread = {id(tensor) for tensor in operation.unread(args, kwargs) if tensor is not result}
        bad = [look for look in looks if not look.finite and chosen(name, look.tensor, args, kwargs)]
        bad = [look for look in bad if id(look.tensor) not in unread]
        if not bad:
            written = name in FILLS and writes_inf(args, kwargs)
            return self._event("written" if written else "made", name, result, amax)
        carried = min((self._of(look.tensor) for look in bad), key=lambda event: event.rank)
        if carried.soft and bool(result.isnan().any()) and not any(look.nan for look in bad):
            return self._event("made", name, result, amax, cause=carried)
        return carried

    def _of(self, tensor: Tensor) -> Event:
        """The event that a non-finite ``tensor`` carries; if nobody saw it come, it was given."""
        key = tensor.untyped_storage()._cdata
        if key in self._carried:
            return self._carried[key][1]
        source = self.given[key][1] if key in self.given else "constant"
        event = self._event("given", "", tensor, reach(tensor)[0], source=source)
        self._carry(tensor, event)
        return event

    def _carry(self, tensor: Tensor, event: Event) -> None:
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being given to another storage.
        self._carried[storage._cdata] = (_weak(storage), event)

    def _event(self, kind: str, name: str, tensor: Tensor, amax: float, **more: Any) -> Event:
        module, where = self.places.now()
        bad = ~tensor.detach().isfinite()
        flat = int(bad.reshape(-1).to(torch.uint8).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)] if tensor.ndim else []
        rows = bad.reshape(len(bad), -1).any(1).nonzero()[:, 0].tolist() if tensor.ndim else []
        number = tensor.detach().reshape(-1)[flat]
        event = Event(
            number=len(self.events),
            kind=kind,
            module=module,
            cls=self.places.class_of(module),
            operation=name,
            where=where,
            dtype=str(tensor.dtype).removeprefix("torch."),
            amax=amax,
            shape=tuple(tensor.shape),
            index=tuple(index),
            rows=tuple(rows),
            value=math.nan if number.is_complex() else float(number),
            nth=self._nth,
            **more,
        )
        self.events.append(event)
        return event

    def _peak(self, place: Place, name: str, amax: float, dtype: torch.dtype) -> None:
        if place not in self.peaks or amax > self.peaks[place].amax:
            self.peaks[place] = Peak(name, amax, str(dtype).removeprefix("torch."))
        key = (*place, name, self._nth)
        self.reach[key] = max(self.reach.get(key, 0.0), amax)


class _Watch(TorchDispatchMode):
    """Hands every operation to a trace."""

    def __init__(self, seen: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.seen.see(func, args, kwargs or {})


@contextmanager
def trace(model: nn.Module, given: Mapping[str, Tensor] | None = None) -> Iterator[Trace]:
    """Watch every operation inside the block: forward passes of ``model``, losses, backward passes.

    Its numbers are not changed, and nothing is left behind on the model. Code that was compiled is not seen.

    Args:
        model: in any precision mode; modules are named by their path in it.
        given: other tensors to call by name where they are non-finite already, such as inputs.

    Yields:
        A :class:`Trace`. The gradients of the parameters that are there when the block ends count as its end; the loss should
        be handed to :meth:`Trace.end`.
    """
    seen = Trace(Places(model))
    named: dict[str, Tensor] = {f"parameter {name}": p for name, p in model.named_parameters()}
    named |= {f"buffer {name}": b for name, b in model.named_buffers()}
    for name, tensor in (named | dict(given or {})).items():
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            seen.given[storage._cdata] = (_weak(storage), name)
    with seen.places.watch(), _Watch(seen):
        yield seen
    seen.end(*(p.grad for p in model.parameters() if p.grad is not None and p.grad.layout == torch.strided))


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
