"""What a forward pass moves in a model, and how it is put back.

A window that is not applied, an evaluation, an observation and a second pass for activation checkpointing must leave the
model as it was. What a forward pass can move are buffers (and, in a few modules, parameters and extra state). It may

* write into a buffer: the old values are put back into the same tensor;
* assign another tensor of the same form: the old values come back in a new tensor, as the assigned one may be anybody's;
* change a buffer's shape or dtype, fill one that was None, register one, remove one: the old tensor comes back.

For the first two the flag that decides may stay on the device. For the third it decides what the model looks like, so the
host reads it, and waits; models that do this once (a cache that is filled) wait once.

A buffer whose elements share memory (an expanded tensor) or that is sparse cannot be written in place, so the tensor itself
is remembered, without a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

# Shape, dtype and device of a buffer; None for one that is registered as None.
Form = tuple[torch.Size, torch.dtype, torch.device] | None
# Modules with their dotted paths, in the order of ``named_modules``.
Modules = list[tuple[str, nn.Module]]
Copies = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Kept:
    """One tensor as it was: the object, its version and address, and a copy of its values (None: not copied)."""

    tensor: Tensor | None
    version: int
    address: int
    value: Tensor | None

    @property
    def written(self) -> bool:
        """Whether the tensor was written to since, in place, or given other memory."""
        now = self.tensor
        return now is not None and (now._version > self.version or _address(now) != self.address)

    @property
    def differs(self) -> bool:
        """Whether a tensor that was not :attr:`written` has other values than the copy. Waits for the device."""
        return self.tensor is not None and self.value is not None and not torch.equal(self.tensor, self.value)


@dataclass(frozen=True)
class Snapshot:
    """The buffers of a model at one moment, module by module.

    Attributes:
        buffers: per module its buffers by name, None ones too.
        transient: per module the names that its state dict leaves out.
        written: parameters that the forward pass writes to.
        extra: what ``get_extra_state`` gave, copied, of the modules that have it.
        known: the modules that were there. One that a forward pass built is left as it is: without its buffers it would
            break, and whoever built it will not do so again.
    """

    buffers: dict[nn.Module, dict[str, Kept]]
    transient: dict[nn.Module, set[str]]
    written: dict[tuple[nn.Module, str], Kept]
    extra: dict[nn.Module, Any]
    known: Set[nn.Module]

    @classmethod
    def take(
        cls,
        modules: Iterable[nn.Module],
        *,
        written: Collection[tuple[nn.Module, str]] = (),
        copies: Copies = lambda module, name: True,
        known: Set[nn.Module] | None = None,
    ) -> Snapshot:
        """The buffers of ``modules``, and the parameters ``written`` (module, name); values where ``copies`` says so.

        ``known``: all modules that are there, if ``modules`` are only those that hold something.
        """
        modules = list(modules)
        kept = {(m, name): _keep(m._parameters[name], copies(m, name)) for m, name in written}
        snapshot = cls({}, {}, kept, {}, set(modules) if known is None else known)
        for m in modules:
            if buffers := m._buffers:
                snapshot.buffers[m] = {name: _keep(t, copies(m, name)) for name, t in buffers.items()}
                if m._non_persistent_buffers_set:
                    snapshot.transient[m] = set(m._non_persistent_buffers_set)
            if has_extra_state(m):
                snapshot.extra[m] = copy.deepcopy(m.get_extra_state())
        return snapshot

    def changed(self, *, by_value: bool = False) -> set[tuple[nn.Module, str]]:
        """Buffers and watched parameters whose tensor was written to since, in place.

        Versions tell, and the host reads nothing. A write through ``.data`` leaves no trace in them: ``by_value`` compares
        values as well, and waits for the device. (NaN differs from itself and counts as written.)
        """
        return {key for key, kept in self._tensors() if kept.written or (by_value and kept.differs)}

    @torch.no_grad()
    def restore(self, modules: Iterable[nn.Module]) -> None:
        """Put everything back: the same tensors with the same values. To autograd this is no modification."""
        for module in modules:
            if module not in self.known:
                continue
            before = self.buffers.get(module, {})
            _match_names(module, before, self.transient.get(module, set()))
            for name, kept in before.items():
                module._buffers[name] = _as_before(kept)
        for (module, name), kept in self.written.items():
            _as_before(kept, into=module._parameters[name])
        for module, extra in self.extra.items():
            module.set_extra_state(copy.deepcopy(extra))

    @torch.no_grad()
    def keep_if(self, applied: Tensor, modules: Iterable[nn.Module]) -> None:
        """Leave what happened if ``applied`` (0-D bool on the device) is true, otherwise put everything back.

        The host reads the flag only where a buffer has another form now, or a module has extra state.
        """
        for module in modules:
            if (not (now := module._buffers) and module not in self.buffers) or module not in self.known:
                continue
            before = self.buffers.get(module, {})
            if now.keys() == before.keys() and all(_same_form(now[name], kept) for name, kept in before.items()):
                for name, kept in before.items():
                    new = now[name]
                    if kept.value is None or new is None:
                        continue
                    if new is kept.tensor:
                        torch.where(applied, new, kept.value, out=new)
                    else:
                        now[name] = torch.where(applied, new.detach(), kept.value)
            elif not applied:
                self.restore([module])
        for (module, name), kept in self.written.items():
            parameter, value = module._parameters[name], kept.value
            if parameter is not None and value is not None:
                torch.where(applied, parameter, value, out=parameter)
        if self.extra and not applied:
            for module, extra in self.extra.items():
                module.set_extra_state(copy.deepcopy(extra))

    def _tensors(self) -> Iterator[tuple[tuple[nn.Module, str], Kept]]:
        for module, kept_by_name in self.buffers.items():
            yield from (((module, name), kept) for name, kept in kept_by_name.items())
        yield from self.written.items()


def named_buffers(modules: Modules) -> list[tuple[str, Tensor]]:
    """``model.named_buffers()`` of a model of which those modules that have buffers are known."""
    found: dict[Tensor, str] = {}
    for path, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in found:
                found[buffer] = f"{path}.{name}" if path else name
    return [(name, buffer) for buffer, name in found.items()]


def writable(tensor: Tensor) -> bool:
    """Whether a tensor can be written in place: it is strided, and no two of its elements share memory by expansion."""
    if tensor.layout != torch.strided:
        return False
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_extra_state(module: nn.Module) -> bool:
    """Whether ``module`` saves more than tensors by ``get_extra_state``."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def forms(model: nn.Module) -> dict[str, Form]:
    """Shape, dtype and device of every buffer of ``model`` by dotted name; None for those that are registered as None."""
    return {
        f"{path}.{name}".lstrip("."): None if buffer is None else (buffer.shape, buffer.dtype, buffer.device)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }


def adopt_buffers(
    model: nn.Module,
    persistent: Mapping[str, Any],
    transient: Mapping[str, Tensor],
    *,
    late: Iterable[str],
    device: torch.device,
) -> str | None:
    """Give ``model`` the saved buffers that cannot be copied into its own.

    Those are the ones that training filled, registered, resized or removed (``late``), and those that cannot be written in
    place and have other values.

    Args:
        model: as it was built.
        persistent: the saved state dict.
        transient: saved buffers that the state dict leaves out.
        late: names, see :meth:`~mprun.training.state.TrainState.late_buffers`.
        device: where the buffers go.

    Returns:
        The name of a buffer that has no place in this model; None where all have.
    """
    saved = {**persistent, **transient}
    names = set(late)
    for name, buffer in model.named_buffers():
        if name in saved and not writable(buffer):
            same = buffer.layout == torch.strided and torch.equal(buffer, saved[name].to(buffer.device))
            names |= set() if same else {name}
    return next(
        (name for name in sorted(names) if not _adopt(model, name, saved.get(name), name in persistent, device)), None
    )


def _adopt(model: nn.Module, name: str, value: Tensor | None, persistent: bool, device: torch.device) -> bool:
    """Give ``model`` one buffer in the form of ``value`` (None: it is gone). Returns whether there is a place for it."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    if value is None:
        if attribute in module._buffers:
            module._buffers[attribute] = None
    elif attribute in module._buffers:
        module._buffers[attribute] = value.detach().to(device, copy=True)
    elif hasattr(module, attribute):
        return False
    else:
        module.register_buffer(attribute, value.detach().to(device, copy=True), persistent=persistent)
    return True


def _keep(tensor: Tensor | None, copied: bool) -> Kept:
    if tensor is None:
        return Kept(None, 0, 0, None)
    value = tensor.detach().clone() if copied and writable(tensor) else None
    return Kept(tensor, tensor._version, _address(tensor), value)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _same_form(now: Tensor | None, kept: Kept) -> bool:
    """Whether the host need not know: the same tensor, or one of the same form of which there is a copy."""
    if now is None or kept.tensor is None:
        return now is kept.tensor
    if kept.value is None:
        return now is kept.tensor
    old = kept.value
    return now.layout == old.layout and (now.shape, now.dtype, now.device) == (old.shape, old.dtype, old.device)


def _as_before(kept: Kept, into: Tensor | None = None) -> Tensor | None:
    """The tensor that was there, with its values of then."""
    tensor = kept.tensor if into is None else into
    if tensor is None or kept.value is None:
        return tensor
    if (tensor.shape, tensor.dtype, tensor.device) != (kept.value.shape, kept.value.dtype, kept.value.device):
        return kept.value.clone()  # it was resized, or given other data
    with _unsafe_preserve_version_counter(tensor):
        tensor.copy_(kept.value)
    return tensor


def _match_names(module: nn.Module, before: dict[str, Kept], transient: set[str]) -> None:
    """Remove buffers that were registered since; what was removed comes back under its name and persistence."""
    for name in [name for name in module._buffers if name not in before]:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
    module._non_persistent_buffers_set |= transient & before.keys()
