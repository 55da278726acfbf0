"""What a forward pass moves in a model beside parameters and buffers: plain attributes. A post-mortem puts them back.

Modules count their calls, keep a hidden state or a history, flip ``training``, draw from a generator of their own. A step does
that once, with or without a post-mortem, so what its replays did has to be undone. Remembered is whatever can be reached from
the modules' attributes through lists, dicts, sets, tuples and objects of classes that are neither torch's nor Python's own:
which objects there are, the values of tensors and arrays, the state of generators. Out of reach are globals and class
attributes, iterators, and what sits in closures.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from mprun.training.buffers import writable

Undo = Callable[[], None]
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "mprun"})


class Attributes:
    """The attributes of modules as they are now. See the module's docstring.

    Args:
        modules: all modules of a model. Their parameters and buffers are left to others.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._undo: list[Undo] = []
        self._known: dict[int, Any] = {}  # by id; the objects are held, so that no id comes twice
        own = list(modules)
        for module in own:
            self._known |= {id(entry): entry for entry in (module._parameters, module._buffers)}
        self._keep(own)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back: the same objects with the same content. May be called again after a further change."""
        for undo in self._undo:
            undo()

    def _keep(self, first: Any) -> None:
        """Remember ``first`` and what can be reached from it."""
        waiting = deque([first])  # no recursion: structures may be deep, and run in circles
        while waiting:
            value = waiting.popleft()
            if value is None or isinstance(value, bool | int | float | str | bytes) or id(value) in self._known:
                continue
            self._known[id(value)] = value
            if isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, list | deque | set):
                waiting.extend(value)
                self._undo.append(_undo_collection(value))
            elif isinstance(value, dict):
                waiting.extend(value.values())
                self._undo.append(_undo_dict(value))
            elif (undo := _undo_values(value)) is not None:
                self._undo.append(undo)
            elif isinstance(value, nn.Module) or _is_of_the_user(value):
                waiting.append(vars(value))


def _is_of_the_user(value: Any) -> bool:
    """Whether ``value`` is an object, with attributes, of a class that is neither Python's nor torch's."""
    return type(value).__module__.partition(".")[0] not in _FOREIGN and hasattr(value, "__dict__")


def _undo_collection(value: Any) -> Undo:
    before = list(value)

    def undo() -> None:
        if len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True)):
            return
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)

    return undo


def _undo_dict(value: dict[Any, Any]) -> Undo:
    before = dict(value)

    def undo() -> None:
        if list(value) == list(before) and all(value[key] is item for key, item in before.items()):
            return
        value.clear()
        value.update(before)

    return undo


def _undo_values(value: Any) -> Undo | None:
    """How to put back the numbers in ``value``; None if it is nothing that holds numbers."""
    if isinstance(value, Tensor):
        return _undo_tensor(value)
    if isinstance(value, np.ndarray):
        return _undo_array(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: None if torch.equal(value.get_state(), state) else _void(value.set_state(state))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        numpy_state = bits.state
        return lambda: setattr(bits, "state", numpy_state)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        python_state = value.getstate()
        return lambda: value.setstate(python_state)
    return None


def _undo_tensor(tensor: Tensor) -> Undo:
    """Parameters do not move in a replay; sparse tensors and those of inference mode can hardly be written to."""
    if isinstance(tensor, nn.Parameter) or tensor.is_inference() or tensor.is_nested or not writable(tensor):
        return _nothing
    before = tensor.detach().clone()

    def undo() -> None:
        if tensor.shape != before.shape or tensor.dtype != before.dtype:
            tensor.data = before.clone()
            return
        with _unsafe_preserve_version_counter(tensor):  # also what was written past the counter comes back
            tensor.copy_(before)

    return undo


def _undo_array(array: Any) -> Undo:
    if not array.flags.writeable or isinstance(array, np.memmap):
        return _nothing
    before = array.copy()

    def undo() -> None:
        array[...] = before

    return undo


def _void(_: Any) -> None:
    pass


def _nothing() -> None:
    pass
