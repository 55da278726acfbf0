"""Augmentation of whole batches, on their device, with draws that do not depend on the device.

An augmentation is a function ``(images, generator, background) -> images``. What is random is drawn from the CPU
generator it is given, a few integers per image; the pixels are moved where they are. So the GPU augments exactly as the
CPU does, without a copy of the images and without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mprun.errors import ConfigError, nearest

Augmentation = Callable[[Tensor, torch.Generator, float], Tensor]


def shift(images: Tensor, generator: torch.Generator, background: float) -> Tensor:
    """Move half of the images by up to one pixel each way.

    An image is chosen with probability 1/2; a chosen one moves by one of the 9 offsets in {-1, 0, 1}², drawn evenly,
    and ``background`` comes in at the border.

    Args:
        images: (B, C, H, W), any float dtype and device. Not changed.
        generator: a CPU generator, drawn from.
        background: the value of an empty pixel.

    Returns:
        The moved images, as ``images`` in shape, dtype and device.
    """
    count, channels, height, width = images.shape
    chosen = torch.rand(count, generator=generator) < 0.5
    offsets = torch.randint(-1, 2, (2, count), generator=generator) * chosen
    down, right = offsets.to(images.device, non_blocking=True)
    padded = functional.pad(images, (1, 1, 1, 1), value=background)
    rows = torch.arange(height, device=images.device) + 1 - down[:, None]
    columns = torch.arange(width, device=images.device) + 1 - right[:, None]
    sample = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


AUGMENTATIONS: dict[str, Augmentation] = {"shift": shift}


def find_augmentation(name: str | None) -> Augmentation | None:
    """The augmentation that ``dataset.augment`` names; ``None`` for null and ``none``.

    Raises:
        ConfigError: there is no such augmentation.
    """
    if name is None or name == "none":
        return None
    if name not in AUGMENTATIONS:
        raise ConfigError(f"dataset.augment={name!r} is unknown: {nearest(name, ['none', *AUGMENTATIONS])}")
    return AUGMENTATIONS[name]
