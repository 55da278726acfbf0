"""The names of augmentations, readable without torch, so that a misspelt one is refused before anything is imported.

``dataset.augment`` holds names joined by ``+``, which are carried out in that order.
"""

from __future__ import annotations

from mprun.errors import ConfigError, nearest

# Whole batches, on their device, any set of images.
BATCHWISE = ("shift", "crop", "flip")
# Image by image, on the CPU, only images of 8-bit pixels.
SAMPLEWISE = ("randaugment", "trivialaugment")
# How an image file is brought to its size; only sets of files, and first of all.
RESIZE = "resizedcrop"


def augment_names(augment: str | None) -> tuple[str, ...]:
    """The names in ``dataset.augment``; none for null and ``none``.

    Raises:
        ConfigError: there is no such augmentation, or one comes twice.

    >>> augment_names("crop+flip")
    ('crop', 'flip')
    """
    if augment is None or augment == "none":
        return ()
    names = tuple(augment.split("+"))
    legal = ("none", *BATCHWISE, *SAMPLEWISE, RESIZE)
    for name in names:
        if name == "none":
            raise ConfigError(f"dataset.augment={augment!r}: none stands alone")
        if name not in legal:
            raise ConfigError(f"dataset.augment={name!r} is unknown: {nearest(name, legal)}; join names by +")
        if names.count(name) > 1:
            raise ConfigError(f"dataset.augment={augment!r}: {name} comes twice; give each name once")
    return names
