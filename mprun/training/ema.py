"""Exponential moving average of the weights, in FP32.

``ema += (1 - d) * (weight - ema)`` after every applied step, with ``d = min(decay, (1 + n) / (10 + n))`` while it warms
up (n counts updates), so that the first average is not the initial weights. In half precision the increment
``(1 - d) * difference`` would round to nothing, so the shadow is float32 whatever the model is, and it is fed from the
master parameters. Floating-point buffers are averaged too; integer and bool buffers (``num_batches_tracked``) are copied.
A complex number is a pair of real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """The shadow of a model's weights. ``shadow`` maps names of parameters and buffers to float32 tensors."""

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], *, decay: float, warmup: bool, device: torch.device
    ) -> None:
        self.decay, self.warmup = decay, warmup
        self.shadow = {name: _fp32(tensor).detach().clone() for name, tensor in named}
        self.updates = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, named: Iterable[tuple[str, Tensor]], applied: Tensor) -> None:
        """Move the shadow towards ``named`` if ``applied`` (0-D bool on the device; not read by the host) is true."""
        n = self.updates.double()
        decay = torch.full_like(n, self.decay)
        if self.warmup:
            decay = torch.minimum(decay, (1 + n) / (10 + n))
        weight = (1 - decay).float()
        held = (~applied).float()
        pairs = [(_real(s), _real(t)) for s, t in self._pairs(named)]
        for shadow, tensor in pairs:
            if not shadow.is_floating_point():
                torch.where(applied, tensor, shadow, out=shadow)
        floats = [(s, _laid_out_as(s, _fp32(t))) for s, t in pairs if s.is_floating_point() and s.numel()]
        if floats:
            shadows, truths = (list(column) for column in zip(*floats, strict=True))
            # s - w (s - p) is a step of SGD on s with learning rate w, weight decay 1 and gradient -p. The fused kernel
            # takes both w and the flag as tensors, and where the flag is set it leaves every bit alone.
            torch._fused_sgd_(
                shadows, truths, [], weight_decay=1.0, momentum=0.0, lr=weight, dampening=0.0, nesterov=False,
                maximize=True, is_first_step=False, grad_scale=None, found_inf=held,
            )  # fmt: skip
        self.updates += applied

    def _pairs(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Shadow and truth of each tensor; a buffer that is new, or has another shape or dtype now, is taken over as it is.

        It has that form because a window was applied: otherwise the old one would have come back before.
        """
        truths = dict(named)
        for name, tensor in truths.items():
            fresh = _fp32(tensor)
            old = self.shadow.get(name)
            if old is None or (old.shape, old.dtype) != (fresh.shape, fresh.dtype):
                self.shadow[name] = fresh.detach().clone()
        for name in self.shadow.keys() - truths.keys():
            del self.shadow[name]
        return [(self.shadow[name], tensor) for name, tensor in truths.items()]

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Evaluate with the shadow: the model's own values come back at the end, bit for bit, also after an error."""
        tensors = _tensors(model)
        saved = {name: tensors[name].detach().clone() for name in self.shadow}
        try:
            _copy(tensors, self.shadow)
            yield
        finally:
            _copy(_tensors(model), saved)  # the same ones, unless the forward pass assigned new buffers

    def state_dict(self) -> dict[str, Tensor | dict[str, Tensor]]:
        """Shadow and counter, as they are."""
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take over what :meth:`state_dict` gave; the model's own names and shapes were checked before."""
        for name, tensor in saved["shadow"].items():
            if name not in self.shadow or self.shadow[name].shape != tensor.shape:
                self.shadow[name] = tensor.to(self.updates.device, copy=True)
        for name in self.shadow.keys() - saved["shadow"].keys():
            del self.shadow[name]
        _copy(self.shadow, saved["shadow"])
        self.updates.copy_(saved["updates"])  # type: ignore[arg-type]


def _fp32(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.resolve_conj().to(torch.complex64)
    return tensor.float() if tensor.is_floating_point() else tensor


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as the pairs of float32 numbers that it is made of, in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _laid_out_as(shadow: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` with the strides of ``shadow``: a fused kernel walks through memory, so an expanded buffer needs a copy."""
    return tensor if tensor.stride() == shadow.stride() else torch.empty_like(shadow).copy_(tensor)


@torch.no_grad()
def _copy(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
