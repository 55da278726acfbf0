"""Exponential moving average of the weights, in FP32.

``ema += (1 - d) * (weight - ema)`` after every applied step, with ``d = min(decay, (1 + n) / (10 + n))`` while it warms
up (n counts updates), so that the first average is not the initial weights. In half precision the increment
``(1 - d) * difference`` would round to nothing, so the shadow is float32 whatever the model is, and it is fed from the
master parameters. Floating-point buffers are averaged too; integer and bool buffers (``num_batches_tracked``) are copied.
A complex number is a pair of real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Pairs:
    """Shadows beside what they follow, so that a step need not sort hundreds of tensors.

    Attributes:
        names: of every parameter and buffer.
        tensors: the truth of each.
        strides: of each: ``p.data = ...`` can lay a parameter out anew.
        held: all shadows, in the order of the shadow's own dictionary.
        loose: what is no parameter, so that its shape and dtype may change too, with its shadow.
        shadows: those of the parameters and buffers that are float32 and lie in memory as their shadows do ...
        truths: ... and these.
        others: shadow and truth of all others.
    """

    names: list[str]
    tensors: list[Tensor]
    strides: list[tuple[int, ...]]
    held: list[Tensor]
    loose: list[tuple[Tensor, Tensor]]
    shadows: list[Tensor]
    truths: list[Tensor]
    others: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, named: list[tuple[str, Tensor]], shadow: Mapping[str, Tensor]) -> Pairs:
        """The pairs of ``named``; every name has a shadow."""
        names, tensors = [name for name, _ in named], [t for _, t in named]
        pairs = cls(names, tensors, [t.stride() for t in tensors], list(shadow.values()), [], [], [], [])
        for name, tensor in named:
            own = shadow[name]
            if type(tensor) is not nn.Parameter:
                pairs.loose.append((own, tensor))
            if tensor.dtype is torch.float32 and tensor.numel() and tensor.stride() == own.stride():
                pairs.shadows.append(own)
                pairs.truths.append(tensor)
            else:
                pairs.others.append((own, tensor))
        return pairs

    def fits(self, named: list[tuple[str, Tensor]], shadow: Mapping[str, Tensor]) -> bool:
        """Whether these are the pairs of ``named`` still: the same tensors of the same form, the same shadows."""
        return (
            len(named) == len(self.tensors)
            and len(shadow) == len(self.held)
            and all(map(is_, [t for _, t in named], self.tensors))
            and all(map(is_, shadow.values(), self.held))
            and [name for name, _ in named] == self.names
            and [t.stride() for t in self.tensors] == self.strides
            and all(_same_form(own, tensor) for own, tensor in self.loose)
        )


def _same_form(shadow: Tensor, tensor: Tensor) -> bool:
    return shadow.dtype is _shadow_dtype(tensor) and shadow.shape == tensor.shape


class Ema:
    """The shadow of a model's weights. ``shadow`` maps names of parameters and buffers to float32 tensors."""

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], *, decay: float, warmup: bool, device: torch.device
    ) -> None:
        self.decay, self.warmup = decay, warmup
        self.shadow = {name: _fp32(tensor).detach().clone() for name, tensor in named}
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self._weight = torch.tensor(1 - self.decay, dtype=torch.float32, device=device)
        self._last: Pairs | None = None

    @torch.no_grad()
    def update(self, named: Iterable[tuple[str, Tensor]], applied: Tensor) -> None:
        """Move the shadow towards ``named`` if ``applied`` is true.

        Args:
            named: the truth of every parameter and buffer by name.
            applied: 0-D bool on the device; not read by the host.
        """
        pairs = self._pairs(list(named))
        weight = self._weight
        if self.warmup:
            n = self.updates.double()
            weight = (1 - ((1 + n) / (10 + n)).clamp(max=self.decay)).float()
        shadows, targets = list(pairs.shadows), list(pairs.truths)
        for shadow, tensor in pairs.others:
            if not shadow.is_floating_point() and not shadow.is_complex():
                torch.where(applied, tensor, shadow, out=shadow)
            elif shadow.numel():
                shadows.append(_real(shadow))
                targets.append(_laid_out_as(shadows[-1], _fp32(_real(tensor))))
        if shadows:
            # s - w (s - p) is a step of SGD on s with learning rate w, weight decay 1 and gradient -p. The fused kernel
            # takes both w and the flag as tensors, and where the flag is set it leaves every bit alone.
            torch._fused_sgd_(
                shadows, targets, [], weight_decay=1.0, momentum=0.0, lr=weight, dampening=0.0, nesterov=False,
                maximize=True, is_first_step=False, grad_scale=None, found_inf=(~applied).float(),
            )  # fmt: skip
        self.updates += applied

    def _pairs(self, named: list[tuple[str, Tensor]]) -> Pairs:
        """What belongs together. Sorted anew only where a tensor or its form is not the one of the last time."""
        last = self._last
        if last is None or not last.fits(named, self.shadow):
            self._take_over(dict(named))
            last = self._last = Pairs.of(named, self.shadow)
        return last

    def _take_over(self, truths: Mapping[str, Tensor]) -> None:
        """Take over, as it is, a buffer that is new or has another shape or dtype now; forget one that is gone.

        It has that form because a window was applied: otherwise the old one would have come back before.
        """
        for name, tensor in truths.items():
            old = self.shadow.get(name)
            if old is None or old.shape != tensor.shape or old.dtype is not _shadow_dtype(tensor):
                self.shadow[name] = _fp32(tensor).detach().clone()
        if len(self.shadow) != len(truths):
            for name in self.shadow.keys() - truths.keys():
                del self.shadow[name]

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


def _shadow_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.is_floating_point():
        return torch.float32
    return torch.complex64 if tensor.is_complex() else tensor.dtype


def _fp32(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float32:
        return tensor
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
