"""Bytes by category: a ledger of every tensor storage that is alive while code runs.

Nothing here knows whether tensors are real. Over fake tensors (shapes, strides and dtypes without memory) the ledger
predicts, over real ones it measures; the code that runs is the same.

Two questions, two numbers:

* *What does backward keep?* ``saved_tensors_hooks`` see every tensor that autograd saves. Distinct storages are counted,
  once each, apart from those that exist anyway (parameters, buffers, the batch). The name of the module that was running
  is noted, so that they can be told by module.
* *What is the most at any time?* A dispatch mode sees the result of every operation, and a weak reference to its storage says
  when it is freed. The sum of what is alive is followed up to its peak, with the share of each category at that moment:
  saved activations are at their most when forward ends, where gradients are none yet.

What a kernel takes for itself while it runs is no tensor. Whoever knows it from shapes says so (``workspace``); it counts
while the operation runs, beside arguments and results.

Not seen: the workspaces of cuDNN and cuBLAS, a device's context, and what an allocator loses by rounding (but for ``granule``)
and fragmentation.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.numerics.tensor_cores import Misfit

WORKSPACE = "kernel workspace"
# In the order of reports; the last four come and go within a step.
CATEGORIES = ("parameters", "masters", "gradients", "optimizer", "ema", "buffers", "data", "counters",
              "activations", "weight copies", "working tensors", WORKSPACE)  # fmt: skip
# Name of an operation, its arguments, what it returned -> bytes that the kernel held beside these.
Workspace = Callable[[str, Any, Any], int]

# A copy of one of these in another dtype, or to put it back later, is of the kind on the right.
_COPIES = {"parameters": "weight copies", "weight copies": "weight copies", "buffers": "buffers"}
_COPYING = {"_to_copy", "clone"}
LOSS = "(loss)"


@dataclass
class _Storage:
    """What is known of one storage: its size, its category, and the module that saved it, if one did."""

    bytes: int
    kind: str
    saved_by: str | None = None


@dataclass
class Counted:
    """What a ledger found. Bytes everywhere.

    Attributes:
        peak: by category, at the moment when the sum was largest.
        highest: by category, the most that it held at any time (moments differ, so these add up to more than the peak).
        saved: by (module path, category), what is kept for backward (``activations`` and ``weight copies``), when that was
            most. The path is that of the innermost module that was running.
        graded: names of parameters that received a gradient.
        heads: by module path, the last dimension of the queries of scaled dot-product attention.
        rows: by module path, how many rows its input has as a matrix: all dimensions but the last, multiplied.
    """

    peak: Counter[str] = field(default_factory=Counter)
    highest: Counter[str] = field(default_factory=Counter)
    saved: Counter[tuple[str, str]] = field(default_factory=Counter)
    graded: set[str] = field(default_factory=set)
    heads: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once."""
        return sum(self.peak.values())

    @property
    def saved_bytes(self) -> int:
        """Distinct storages that autograd keeps for backward, apart from what exists anyway."""
        return sum(self.saved.values())


@dataclass(frozen=True)
class Footprint:
    """What one optimizer step needs, predicted or measured.

    Attributes:
        batch_size: examples of a micro-batch.
        accumulate: micro-batches of a step.
        counted: bytes by category, at the peak and at their highest, and what each module saves.
        modules: path -> category -> bytes, of every module that owns or saves something; ``(loss)`` for the loss.
        classes: path -> name of the module's class.
        elements: category -> bytes of one element -> number of elements, for parameters and what is kept beside them.
        misfits: matrix dimensions that Tensor Cores dislike; none under float32.
        allocator_peak: what the device's allocator says, if it was measured on one that does.
    """

    batch_size: int
    accumulate: int
    counted: Counted
    modules: dict[str, Counter[str]]
    classes: dict[str, str]
    elements: dict[str, Counter[int]]
    misfits: list[Misfit]
    allocator_peak: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once."""
        return self.counted.peak_bytes

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on the batch: parameters and what is kept beside them."""
        kinds = ("parameters", "masters", "gradients", "optimizer", "ema", "buffers")
        return sum(self.counted.highest[kind] for kind in kinds)


class Ledger(TorchDispatchMode):
    """Counts storages while it is active. Use :meth:`own` for what exists already, :meth:`watching` for a model's step.

    ``found`` is filled as operations run; :meth:`start` begins anew, without forgetting what is alive.
    """

    def __init__(self, *, granule: int = 1, blind: bool = False, workspace: Workspace | None = None) -> None:
        """An empty ledger.

        Args:
            granule: sizes are rounded up to a multiple of it (CUDA's allocator: 512).
            blind: the tensors are fake. What the host reads from one and nobody knows is then made up, so that the step goes on
                as a good one: numbers are 1, conditions false, and what is asked of all elements (are they finite?) is true.
            workspace: what kernels take for themselves; nothing where nobody knows.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.granule, self.blind, self.workspace = granule, blind, workspace
        self.found = Counted()
        self.running: list[str] = []
        self._known: dict[int, _Storage] = {}
        self._refs: dict[int, Any] = {}
        self._alive: Counter[str] = Counter()
        self._saved: Counter[tuple[str, str]] = Counter()

    def start(self) -> None:
        """Forget peaks. What is alive stays on the account."""
        self.found = Counted()
        self._look()

    def own(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say of which category ``tensors`` are; the first word on a storage counts, unless it was a working tensor."""
        for tensor in tensors:
            storage = self._storage(tensor)
            if storage is not None and storage.kind == "working tensors":
                self._move(storage, kind)
        self._look()

    def alive(self, kind: str) -> int:
        """Bytes of a category that are alive now."""
        return self._alive[kind]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note what is saved for backward, by the module that runs, and which tensors are gradients."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            # Also after an error: a recompute ends with one, as soon as it has what backward asked for.
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                note: Any = parameter.register_post_accumulate_grad_hook
                handles.append(note(partial(self._accumulated, name)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self.running.clear()
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.blind and func is torch.ops.aten._local_scalar_dense.default:
            return self._read(func, args[0])
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_scaled_dot_product") and self.running and not name.endswith("_backward"):
            self.found.heads.setdefault(self.running[-1], args[0].shape[-1])
        if self.blind and name == "all":
            out.is_true = True
        kind = "working tensors"
        if name in _COPYING and (source := self._storage(args[0])) is not None:
            kind = _COPIES.get(source.kind, kind)
            if source.kind == "gradients" and self._alive["masters"]:
                kind = "gradients"  # of the masters, in float32
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._storage(tensor, kind)
        if self.workspace is not None and (extra := self.workspace(name, args, out)):
            self._alive[WORKSPACE] += extra
            self._look()
            self._alive[WORKSPACE] -= extra
        return out

    def _read(self, func: Any, tensor: Tensor) -> Any:
        try:
            return func(tensor)  # a constant, such as a learning rate, is known
        except DataDependentOutputException:
            if self.running:
                raise ValueReadError(self.running[-1]) from None
        if tensor.dtype == torch.bool:
            return hasattr(tensor, "is_true")
        return 1.0 if tensor.is_floating_point() else 1

    def _storage(self, tensor: Tensor, kind: str = "working tensors") -> _Storage | None:
        """The account of ``tensor``'s storage, opened as ``kind`` if it is new; None for a tensor that has none."""
        if tensor.layout != torch.strided:
            return None
        raw = tensor.untyped_storage()
        key = raw._cdata
        storage = self._known.get(key)
        if storage is None:
            size = -(-raw.nbytes() // self.granule) * self.granule
            storage = self._known[key] = _Storage(size, kind)
            self._refs[key] = weakref.ref(raw, partial(self._freed, key))
            self._alive[kind] += size
            self._look()
        return storage

    def _freed(self, key: int, _: Any) -> None:
        storage = self._known.pop(key)
        del self._refs[key]
        self._alive[storage.kind] -= storage.bytes
        if storage.saved_by is not None:
            self._saved[storage.saved_by, storage.kind] -= storage.bytes

    def _move(self, storage: _Storage, kind: str) -> None:
        self._alive[storage.kind] -= storage.bytes
        self._alive[kind] += storage.bytes
        storage.kind = kind

    def _look(self) -> None:
        """Keep the peaks."""
        if self._alive.total() > self.found.peak.total():
            self.found.peak = self._alive.copy()
        for kind, size in self._alive.items():
            self.found.highest[kind] = max(self.found.highest[kind], size)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = self._storage(tensor)
        if storage is None or storage.saved_by is not None or storage.kind not in ("working tensors", "weight copies"):
            return tensor
        if storage.kind == "working tensors":
            self._move(storage, "activations")
        storage.saved_by = self.running[-1] if self.running else LOSS
        self._saved[storage.saved_by, storage.kind] += storage.bytes
        if self._saved.total() > self.found.saved.total():
            self.found.saved = +self._saved
        self._look()
        return tensor

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.running.append(name)
        if args and isinstance(args[0], Tensor) and args[0].ndim:
            self.found.rows.setdefault(name, args[0].numel() // max(args[0].shape[-1], 1))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.found.graded.add(name)
            self.own("gradients", [parameter.grad])


class ValueReadError(Exception):
    """A module's forward asks for the value of a tensor that has none. ``module`` is its path."""

    def __init__(self, module: str) -> None:
        super().__init__(f"{module or 'the model'} reads a value of a tensor in its forward")
        self.module = module


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
