"""Can this model be trained as it arrives? Asked once, before anything of it is moved or cast; and does it stay the same?

Every policy starts from float32 values that belong to one parameter each, behind modules whose class can be given a border.
What is not so is refused by name here, because later it would train wrong without a word: two parameters in one piece of
memory are updated twice, and come apart where one of them is cast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mprun.errors import ConfigError
from mprun.training.buffers import has_extra_state, writable

# A module's own parameters by name; None for one that is registered as None.
ParameterDict = Mapping[str, nn.Parameter | None]


def check_arrival(model: nn.Module) -> None:
    """Refuse a model that no policy could train right.

    Raises:
        ConfigError: names the first module, parameter or buffer that stands in the way.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is TorchScript ({type(module).__name__}), whose code can be given no cast and is not "
                "seen into: build the nn.Module that it was made from (model.compile=true makes it fast)"
            )
        if has_extra_state(module):
            _check_extra_state(name, module)
    for name, p in model.named_parameters():
        _check_values("parameter", name, p)
        _check_dtype(name, p)
        if not writable(p):
            raise ConfigError(
                f"parameter {name} is {'expanded: its elements share memory' if p.layout == torch.strided else 'sparse'}; "
                "make it a dense tensor of its own (.clone()), and expand it in forward"
            )
    for name, buffer in model.named_buffers():
        _check_values("buffer", name, buffer)
    _refuse_shared_memory(model)


def refuse_eval_mode(model: nn.Module) -> None:
    """Refuse to train a model that was left in eval mode as a whole; frozen parts are the builder's business.

    Raises:
        ConfigError: no module of ``model`` is in training mode.
    """
    if not any(module.training for module in model.modules()):
        raise ConfigError(
            "the model arrives in eval() mode, every module of it, so dropout and batch statistics would stay off: call .train() "
            "at the end of its builder; to freeze parts of it, call .eval() on those parts only"
        )


@dataclass(frozen=True)
class Parameters:
    """The parameters that a run trains: which tensors they are, and which require a gradient, does not change any more."""

    named: tuple[tuple[str, Tensor, bool], ...]
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        """Those of ``model``, as they are now."""
        held = _held(module._parameters for module in model.modules())
        return cls(tuple((n, p, p.requires_grad) for n, p in model.named_parameters()), tuple(held))

    def refuse_changed(self, model: nn.Module, parameters: Iterable[ParameterDict]) -> None:
        """See that the modules of ``model`` hold the same parameters as at the start.

        Args:
            model: the model.
            parameters: what its modules hold them in, in the order of ``named_modules``; empty ones may be left out.

        Raises:
            ConfigError: one was added, exchanged or removed.
        """
        now = _held(parameters)
        if len(now) == len(self.held) and all(map(is_, now, self.held)):
            return
        before, after = {name: p for name, p, _ in self.named}, dict(model.named_parameters())
        names = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
        name = next(iter(names), "?")
        what = "adds" if name not in before else "exchanges" if name in after else "removes"
        raise ConfigError(
            f"the forward pass {what} the parameter {name}: the optimizer owns those that the model had when it was built; "
            "create parameters in __init__, and change their values by training only"
        )

    def refuse_toggled(self) -> None:
        """See that the same parameters require a gradient as at the start.

        Raises:
            ConfigError: one was frozen or unfrozen.
        """
        for name, p, trainable in self.named:
            if p.requires_grad is not trainable:
                raise ConfigError(
                    f"parameter {name} was {'frozen' if trainable else 'unfrozen'} during training: what is trained is settled "
                    "when the model is built; train in stages with a second run (model.init=<checkpoint of the first>)"
                )


def _held(parameters: Iterable[ParameterDict]) -> list[Tensor]:
    return [p for own in parameters for p in own.values() if p is not None]


def _check_values(kind: str, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer) or tensor.is_meta:
        raise ConfigError(
            f"{kind} {name} has no values yet (a lazy or meta module): initialise the model in its builder"
        )


def _check_dtype(name: str, p: Tensor) -> None:
    wanted = torch.complex64 if p.is_complex() else torch.float32
    if (p.is_floating_point() or p.is_complex()) and p.dtype != wanted:
        raise ConfigError(
            f"parameter {name} arrives as {str(p.dtype).removeprefix('torch.')}, not {str(wanted).removeprefix('torch.')}: the "
            "precision policy casts parameters, a model must not do it itself (look for .half(), .double() or a default dtype)"
        )


def _check_extra_state(name: str, module: nn.Module) -> None:
    """A checkpoint holds plain values and tensors only, so that reading one runs no code."""
    if type(module).set_extra_state is nn.Module.set_extra_state:
        raise ConfigError(
            f"{name or 'the model'} ({type(module).__name__}) has get_extra_state() but no set_extra_state(), so its state could "
            "not be put back at resume: define both"
        )
    if (kind := _not_plain(module.get_extra_state())) is not None:
        raise ConfigError(
            f"{name or 'the model'} ({type(module).__name__}): its get_extra_state() holds a {kind}, which a checkpoint cannot: "
            "return tensors, numbers, strings, and lists and dicts of them"
        )


def _not_plain(value: Any) -> str | None:
    """The type of the first thing in ``value`` that a checkpoint does not hold."""
    if type(value) in (dict, OrderedDict):
        return next((kind for item in [*value, *value.values()] if (kind := _not_plain(item)) is not None), None)
    if type(value) in (list, tuple, torch.Size):
        return next((kind for item in value if (kind := _not_plain(item)) is not None), None)
    if value is None or type(value) in (bool, int, float, complex, str, bytes, Tensor, nn.Parameter):
        return None
    return type(value).__name__


def _refuse_shared_memory(model: nn.Module) -> None:
    """Two parameters, or a parameter and a buffer, must not be the same memory. One parameter under two names is tied."""
    by_storage: dict[int, list[tuple[str, Tensor, bool]]] = {}
    tensors: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in model.named_parameters()]
    tensors += [(name, buffer, False) for name, buffer in model.named_buffers() if buffer.layout == torch.strided]
    for name, tensor, trained in tensors:
        if tensor.numel() and (address := tensor.untyped_storage().data_ptr()):  # fake tensors lie nowhere
            by_storage.setdefault(address, []).append((name, tensor, trained))
    for sharing in by_storage.values():
        if _all_apart([(tensor, trained) for _, tensor, trained in sharing]):
            continue
        for i, (name, p, trained) in enumerate(sharing):
            other = next((other for other, t, _ in sharing[i + 1 :] if trained and _overlap(p, t)), None)
            if other is not None:
                raise ConfigError(
                    f"parameter {name} and {other} are two tensors in the same memory (one is a view of the other): they would "
                    "be updated twice in FP32 and come apart in half; to tie them use one parameter under both names"
                )


def _all_apart(sharing: Sequence[tuple[Tensor, bool]]) -> bool:
    """Whether no trained tensor has an element in common with another, all in one storage; parameters come first.

    One look at each element, however many tensors are slices of one vector; pair by pair it would be the square of that.
    """
    if len(sharing) < 2:
        return True
    if len({tensor.dtype for tensor, _ in sharing}) > 1:
        return False
    taken = torch.zeros(max(_end(tensor) for tensor, _ in sharing), dtype=torch.bool)
    for tensor, trained in sharing:
        place = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if place.any():
            return False
        if trained:
            place.fill_(True)
    return True


def _overlap(p: Tensor, other: Tensor) -> bool:
    """Whether an element of ``p`` is an element of ``other``, both in one storage."""
    if p.dtype != other.dtype:
        return True
    end = max(_end(p), _end(other))
    mask = torch.zeros(end, dtype=torch.bool)
    mask.as_strided(p.shape, p.stride(), p.storage_offset()).fill_(True)
    return bool(mask.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _end(tensor: Tensor) -> int:
    """One beyond the last element, counted from the start of the storage."""
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + 1 + steps
