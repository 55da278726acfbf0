"""The last part of every batch of images, on the run's device: 8-bit pixels to normalised float32, then mixup and CutMix.

8-bit images take a quarter of the memory and of the transfer; to normalise a batch costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.config import DatasetConfig
from mprun.data.augment import Address
from mprun.data.base import Batch
from mprun.data.mix import Mix


@dataclass(frozen=True)
class Finish:
    """Turns gathered and augmented images into a batch.

    Attributes:
        mean: (C, 1, 1) float32 on the device, in units of the pixels; ``None`` for images that are normalised already.
        std: the same for the standard deviation.
        mix: carried out on training batches.
    """

    mean: Tensor | None
    std: Tensor | None
    mix: Mix

    @classmethod
    def of(
        cls,
        config: DatasetConfig,
        *,
        norm: tuple[Sequence[float], Sequence[float]] | None,
        classes: int,
        device: torch.device,
    ) -> Finish:
        """As ``config`` wants it. ``norm`` is mean and standard deviation per channel, of pixels from 0 to 1."""
        mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) * 255 for v in norm) if norm else (None, None)
        return cls(mean, std, Mix(config.mixup, config.cutmix, classes))

    def __call__(self, images: Tensor, labels: Tensor, ids: Tensor, address: Address | None) -> Batch:
        """The batch. Without an ``address`` (validation) nothing is mixed."""
        if self.mean is not None and self.std is not None:
            images = images.float().sub_(self.mean).div_(self.std)
        if address is None or not self.mix.active:
            return Batch(images, labels, ids)
        return Batch(*self.mix(images, labels, address), ids)
