"""Random images with random labels, for measuring speed and nothing else: no accuracy on them means anything."""

from __future__ import annotations

import torch

from mprun.data.base import subseed
from mprun.data.tensors import ImageSet, Split
from mprun.errors import ConfigError


def synthetic(
    *, image_size: int = 224, channels: int = 3, classes: int = 1000, examples: int = 1024, val_examples: int = 64
) -> ImageSet:
    """Make the set, the same for every seed.

    Args:
        image_size: side of an image in pixels.
        channels: colours.
        classes: labels are in 0 .. classes - 1.
        examples: training images; they are held in memory, 150 kB each at the default size.
        val_examples: validation images.

    Returns:
        Images, uint8, and labels, drawn evenly.

    Raises:
        ConfigError: a size below 1.
    """
    sizes = {
        "image_size": image_size,
        "channels": channels,
        "classes": classes,
        "examples": examples,
        "val_examples": val_examples,
    }
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"dataset.kwargs.{name}={value} is not a whole number from 1 up")
    generator = torch.Generator().manual_seed(subseed("synthetic"))
    count = examples + val_examples
    try:
        images = torch.randint(256, (count, channels, image_size, image_size), generator=generator, dtype=torch.uint8)
    except RuntimeError as error:
        size = count * channels * image_size**2
        raise ConfigError(
            f"dataset.kwargs: {count} images of {image_size} x {image_size} take {size:,} bytes, which is beyond the memory"
        ) from error
    labels = torch.randint(classes, (count,), generator=generator)
    return ImageSet(
        train=Split(images[:examples], labels[:examples]),
        val=Split(images[examples:], labels[examples:]),
        num_classes=classes,
        background=0.0,
        sha256=None,
        norm=((0.5,) * channels, (0.2887,) * channels),  # of evenly drawn values
        note="dataset=synthetic is random images with random labels, for measuring speed: loss and accuracy mean nothing",
    )
