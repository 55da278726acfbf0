"""What a training step's numbers look like, module by module: a probe that is there for one step and gone after it.

::

    probe = Probe()
    with probe.watch(state):                       # hooks on
        train_step(state, window, probe=probe)     # two calls inside: gradients(), updates()
    sample = probe.read()                          # hooks are off; the host waits for the device here, and only here

Of every module that is called: ``input`` and ``activation`` (its float inputs and outputs) and ``activation_grad`` (the gradient
of those outputs); of every parameter p: p as the forward pass uses it, ``p_grad`` and ``p_update`` of the truth that the
optimizer owns (the FP32 master where there is one): ``weight weight_grad weight_update bias ...``. Micro-batches, several
calls of one module and several outputs are taken together. Values are unscaled: gradients are divided by S.

**A half tensor cannot tell what it has lost.** In an FP16 run a gradient arrives rounded; what became 0 is 0, and the tensor has
no underflow. So underflow is looked for where it happens. A float32 gradient that is about to be cast shows it (the
model's own ``activation_grad`` is therefore that of the float32 logits). And what a ``Linear`` or convolution gives back is
computed once more in float32 from a few rows (images) of its output's gradient: ``input_grad``, before rounding, counted as
often as there are such rows.

**Nothing of the run changes.** The hooks read; no random number is drawn; a recompute of activation checkpointing, which runs
during backward, is not counted. Tensors are looked at in the hook, before an in-place operation that follows.
Compiled code has no hooks: there only parameters are seen. Whatever breaks in looking loses the sample, never the step:
:meth:`Probe.read` says what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mprun.numerics.products import given_back
from mprun.numerics.sample import ACTIVATION, ACTIVATION_GRAD, INPUT, INPUT_GRAD, Sample
from mprun.numerics.stats import HEAD, PACKED, measure, merged, unpack
from mprun.numerics.watchable import floats, has_numbers, recomputing, select, version, visible
from mprun.training.state import TrainState

__all__ = ["Probe", "Sample"]


@dataclass
class _Call:
    """Who waits for the gradient of one tensor: module paths, and the products among them with their input's shape."""

    paths: list[str] = field(default_factory=list)
    products: list[tuple[str, nn.Module, torch.Size]] = field(default_factory=list)


class Probe:
    """Looks at one training step. See the module's docstring.

    Args:
        modules: patterns in the manner of ``precision.fp32_modules``; a match covers what is inside. All modules if empty.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.rules = tuple(modules)
        self._reset()

    def _reset(self) -> None:
        self._rows: list[Tensor] = []
        self._index: dict[str, dict[str, list[int]]] = {}
        self._gradients: list[int] = []
        self._flow: list[int] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int | None, int]] = {}
        self._waiting: dict[int, tuple[weakref.ref[Tensor], int | None, _Call]] = {}
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}
        self._inverse: Tensor | None = None
        self._device = torch.device("cpu")
        self._end: Tensor | None = None
        self._attempt, self._format, self._error = 0, "", ""

    @contextmanager
    def watch(self, state: TrainState) -> Iterator[Probe]:
        """Look at the step that is made inside. Whatever ends the block, no hook is left.

        Raises:
            ConfigError: a pattern matches no module.
        """
        self._reset()
        self._attempt, self._format = state.counters.attempts + 1, _short(state.policy.compute_dtype)
        self._device, self._half = state.device, state.policy.compute_dtype == torch.float16
        self._inverse = state.loss_scale.inverse(state.scale) if state.loss_scale.active else None
        self._end = torch.stack(
            [state.applied.double(), state.scale.scale.double(), torch.zeros_like(state.applied).double()]
        )
        self._selected = select(state.model, self.rules)
        try:
            self._safely("the weights", lambda: self._weights(state))
            if state.forward is state.model:
                for path, module in visible(state.model, self._selected).items():
                    self._hook(path, module, state if module is state.model else None)
            yield self
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._seen, self._waiting, self._before = [], {}, {}, {}

    def _safely(self, what: str, look: Callable[[], None]) -> None:
        """``look``; after an error nothing is looked at any more. An explanation must not cost the run that it explains."""
        if self._error:
            return
        try:
            look()
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            self._error = f"at {what}: {type(error).__name__}: {first}"

    # --- modules -----------------------------------------------------------------------------------------------------

    def _hook(self, path: str, module: nn.Module, root: TrainState | None) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not recomputing():
                self._safely(path, lambda: self._note(path, INPUT, floats((args, kwargs), self._device)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            replaced = None
            if root is not None and type(output) is Tensor and output.is_floating_point():
                # The cast that follows in any case, made here: its gradient is the loss's own, in float32.
                output = replaced = root.policy.cast_output(output)
            self._safely(path, lambda: self._leave(path, module, (args, kwargs), output))
            return replaced

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, with_kwargs=True))

    def _leave(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        given = next((t for t in floats(inputs, self._device) if t.requires_grad), None)
        made = floats(output, self._device)
        if not recomputing():
            self._note(path, ACTIVATION, made)
        for tensor in made:
            if tensor.requires_grad and torch.is_grad_enabled():
                self._await(path, tensor, module, given)

    def _note(self, path: str, name: str, tensors: Sequence[Tensor]) -> None:
        """Look at ``tensors`` as they are now; one that was looked at already, and not written to since, is not again."""
        for tensor in tensors:
            known, now = self._seen.get(id(tensor)), version(tensor)
            if known is not None and known[0]() is tensor and known[1] == now is not None:
                row = known[2]
            else:
                row = self._add(measure(tensor))
                self._seen[id(tensor)] = (weakref.ref(tensor), now, row)
            self._enter(path, name, row)

    def _await(self, path: str, tensor: Tensor, module: nn.Module, given: Tensor | None) -> None:
        """Have the gradient of ``tensor`` looked at when it arrives, once for all modules that return this very tensor."""
        known = self._waiting.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            call = known[2]
        else:
            call = _Call()
            self._waiting[id(tensor)] = (weakref.ref(tensor), tensor._version, call)
            hook = tensor.register_hook(lambda grad: self._safely(path, lambda: self._arrived(call, grad)))  # type: ignore[no-untyped-call]
            self._handles.append(hook)
        call.paths.append(path)
        if self._half and given is not None and tensor.dtype == torch.float16:
            call.products.append((path, module, given.shape))

    def _arrived(self, call: _Call, grad: Tensor) -> None:
        if not has_numbers(grad, self._device):
            return
        row = self._add(measure(grad, self._inverse))
        self._gradients.append(row)
        if not self._half or grad.dtype != torch.float16:
            self._flow.append(row)
        for path in call.paths:
            self._enter(path, ACTIVATION_GRAD, row)
        for path, module, shape in call.products:
            part = given_back(module, grad, shape)
            if part is not None:
                row = self._add(_times(measure(part.values, self._inverse), part.of))
                self._flow.append(row)
                self._enter(path, INPUT_GRAD, row)

    # --- parameters --------------------------------------------------------------------------------------------------

    def _weights(self, state: TrainState) -> None:
        own = dict(state.model.named_parameters())
        for name, truth in self._parameters(state):
            self._enter(*_placed(name), self._add(measure(own[name] if name in state.weights.by_name else truth)))

    def gradients(self, state: TrainState) -> None:
        """Look at the truth's gradients. To be called when all are collected, before anything divides or clips them."""

        def look() -> None:
            for name, truth in self._parameters(state):
                if truth.grad is not None:
                    self._enter(*_placed(name, "_grad"), self._add(measure(truth.grad, self._inverse)))
                    self._before[name] = truth.detach().clone(memory_format=torch.preserve_format)

        self._safely("the gradients", look)

    def updates(self, state: TrainState, applied: Tensor) -> None:
        """Look at what the optimizer changed. To be called after its step.

        Args:
            state: whose :meth:`gradients` were looked at.
            applied: whether there was a step, 0-D bool on the device.
        """

        def look() -> None:
            for name, truth in self._parameters(state):
                if name in self._before:
                    self._enter(*_placed(name, "_update"), self._add(measure(truth, minus=self._before.pop(name))))

        self._safely("the updates", look)
        assert self._end is not None, "inside watch"
        self._end = self._end + torch.stack([applied.double(), torch.zeros_like(self._end[0]), applied.double()])

    def _parameters(self, state: TrainState) -> list[tuple[str, Tensor]]:
        return [
            (name, truth)
            for name, truth in state.weights
            if _placed(name)[0] in self._selected and (truth.is_floating_point() or truth.is_complex())
        ]

    # --- rows --------------------------------------------------------------------------------------------------------

    def _add(self, packed: Tensor) -> int:
        self._rows.append(packed)
        return len(self._rows) - 1

    def _enter(self, path: str, name: str, row: int) -> None:
        self._index.setdefault(path, {}).setdefault(name, []).append(row)

    def read(self) -> Sample:
        """The numbers, on the host. Waits for the device, once; may be called long after the step.

        Raises:
            RuntimeError: something broke while looking, so there is no sample; the step was not touched by that.
        """
        if self._error:
            raise RuntimeError(self._error)
        assert self._end is not None, "watch comes first"
        end = torch.cat([self._end, self._end.new_zeros(PACKED - len(self._end))])
        table = torch.stack([end, *self._rows]).cpu()
        step, scale, applied = table[0, :3].tolist()
        found = [unpack(row) for row in table[1:]]
        modules = {
            path: {
                name: merged([found[row] for row in rows])
                for name, rows in tensors.items()
                if applied or not name.endswith("_update")
            }
            for path, tensors in self._index.items()
        }
        activations = {row for tensors in self._index.values() for row in tensors.get(ACTIVATION, ())}
        return Sample(
            step=int(step),
            attempt=self._attempt,
            format=self._format,
            loss_scale=scale,
            applied=bool(applied),
            modules=modules,
            gradients=merged([found[row] for row in self._gradients]),
            activations=merged([found[row] for row in sorted(activations)]),
            flow=merged([found[row] for row in self._flow]),
        )


def _times(packed: Tensor, weight: float) -> Tensor:
    """The numbers of ``weight`` times as many values; amax stays. Reads nothing from an accelerator."""
    scaled = (packed * weight).round()
    scaled[3], scaled[4] = packed[3], packed[4] * weight
    scaled[0] = scaled[1] + scaled[2] + scaled[HEAD:].sum()
    return scaled


def _placed(name: str, suffix: str = "") -> tuple[str, str]:
    path, _, own = name.rpartition(".")
    return path, own + suffix


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
