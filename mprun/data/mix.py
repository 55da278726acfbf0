"""Mixup and CutMix: each image is blended with, or patched from, the image before it in the batch.

With a weight w drawn once per batch from Beta(alpha, alpha) and a partner j = i - 1 (a batch is shuffled anyway)::

    mixup    image = w image_i + (1 - w) image_j                                      target = w onehot_i + (1 - w) onehot_j
    cutmix   image = image_i with a box of image_j; the box has a share of about      target the same, with w the share of
             1 - w of the area and its middle anywhere, cut off at the border         pixels that is really left

Targets become class probabilities, (B, C) float32, so the loss is the cross-entropy with them; label smoothing is the
loss's and is applied there, once. ``train/top1`` counts a prediction as right if it is the class of the larger share.
The validation set is never mixed.

The draws are those of a generator that is seeded with the batch's address, on the CPU: a batch made alone is the batch
of the sequence, on every device, and nothing global is drawn from.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.data.augment import Address
from mprun.data.base import subseed


@dataclass(frozen=True)
class Mix:
    """``dataset.mixup`` and ``dataset.cutmix``.

    Attributes:
        mixup: alpha of mixup, 0 is off.
        cutmix: alpha of CutMix, 0 is off. With both on, each batch gets one of them, with equal probability.
        num_classes: length of a target.
    """

    mixup: float
    cutmix: float
    num_classes: int

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return self.mixup > 0 or self.cutmix > 0

    def __call__(self, images: Tensor, labels: Tensor, address: Address) -> tuple[Tensor, Tensor]:
        """Mix the batch at ``address``.

        Args:
            images: (B, C, H, W), floating point, any device. Not changed.
            labels: (B,), int64.
            address: where the draws come from.

        Returns:
            Images of the same shape, and class probabilities (B, ``num_classes``), float32.
        """
        draws = random.Random(subseed("mix", address.seed, address.epoch, address.number))
        patched = draws.random() < 0.5 if self.mixup > 0 and self.cutmix > 0 else self.cutmix > 0
        alpha = self.cutmix if patched else self.mixup
        share = draws.betavariate(alpha, alpha)
        partner = images.roll(1, 0)
        if patched:
            height, width = images.shape[-2:]
            top, bottom, left, right = _box(draws, height, width, area=1 - share)
            images = images.clone()
            images[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / (height * width)
        else:
            images = images * share + partner * (1 - share)
        own = torch.zeros(len(labels), self.num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
        return images, own * share + own.roll(1, 0) * (1 - share)


def _box(draws: random.Random, height: int, width: int, *, area: float) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of a box like the image in shape, with ``area`` of its area before it is cut off."""
    side = math.sqrt(area)
    middle_y, middle_x = draws.randrange(height), draws.randrange(width)
    half_y, half_x = round(side * height / 2), round(side * width / 2)
    return (
        max(middle_y - half_y, 0),
        min(middle_y + half_y, height),
        max(middle_x - half_x, 0),
        min(middle_x + half_x, width),
    )
