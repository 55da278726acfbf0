"""Exponential moving average of the weights, in FP32.

``ema += (1 - d) * (weight - ema)`` after every applied step, with ``d = min(decay, (1 + n) / (10 + n))`` while it warms
up (n counts updates), so that the first average is not the initial weights. In half precision the increment
``(1 - d) * difference`` would round to nothing, so the shadow is float32 whatever the model is, and it is fed from the
master parameters. Floating-point buffers are averaged too; integer and bool buffers (``num_batches_tracked``) are copied.
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
        weight = torch.where(applied, 1 - decay, torch.zeros_like(decay)).float()
        for name, tensor in named:
            shadow = self.shadow[name]
            if shadow.is_floating_point():
                # torch.where and not lerp alone: lerp with weight 0 would turn -0 into +0, and NaN * 0 into NaN.
                torch.where(applied, torch.lerp(shadow, _fp32(tensor), weight), shadow, out=shadow)
            else:
                torch.where(applied, tensor, shadow, out=shadow)
        self.updates += applied

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Evaluate with the shadow: the model's own values come back at the end, bit for bit, also after an error."""
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        saved = {name: tensors[name].detach().clone() for name in self.shadow}
        try:
            _copy(tensors, self.shadow)
            yield
        finally:
            _copy(tensors, saved)

    def state_dict(self) -> dict[str, Tensor | dict[str, Tensor]]:
        """Shadow and counter, as they are."""
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take over what :meth:`state_dict` gave. Shapes are checked by the copy."""
        _copy(self.shadow, saved["shadow"])
        self.updates.copy_(saved["updates"])  # type: ignore[arg-type]


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@torch.no_grad()
def _copy(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
