"""Does a library's model take this dataset's images? Asked with one image, before anything is trained.

Many models of timm and torchvision are built without complaint for images that they cannot take: they halve the image
until nothing is left, or have positions for one size only. What then comes out of the depth of a forward pass says
little. So one empty image goes through each new model, and where it fails, other sizes and smaller patches are tried (on
torch's ``meta`` device, without memory or arithmetic), so that what the error advises is known to work.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mprun.errors import ConfigError

# What a builder or a forward pass raises when a value makes no sense to it.
BAD_VALUE = (TypeError, ValueError, AssertionError, RuntimeError, ArithmeticError, LookupError, AttributeError)

SIDES = (8, 16, 24, 28, 32, 48, 64, 96, 128, 160, 192, 224, 240, 256, 299, 320, 384, 448, 512)
PATCHES = (16, 8, 4, 2, 1)

# (C, H, W) and further keyword arguments to a model
Make = Callable[[tuple[int, ...], dict[str, Any]], nn.Module]


def fitting_model(make: Make, shape: tuple[int, ...], *, name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Build a model and see that it takes images of ``shape``.

    Args:
        make: builds the model for images (C, H, W), with arguments beside ``kwargs``. Draws from the global CPU generator.
        shape: (C, H, W) of the dataset.
        name: ``model.name``, for messages.
        kwargs: ``model.kwargs``; a patch size that is given there is not second-guessed.

    Returns:
        The model, in training mode.

    Raises:
        ConfigError: it cannot be built, or its forward pass fails; the message names a size or argument that works, if
            one was found.
    """
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = make(shape, {})
            run_once(model, shape)
    except (ConfigError, *BAD_VALUE) as error:  # what was told on the way to it is not worth a second message
        advice = _what_works(make, shape, patches=() if "patch_size" in kwargs else PATCHES)
        if isinstance(error, ConfigError):
            if not advice:  # the arguments are to blame, and the message says so
                raise
            reason = str(error.__cause__ or error)
        else:
            reason = str(error) or type(error).__name__
        _, height, width = shape
        given = f" with model.kwargs={kwargs}" if kwargs and not advice else ""
        raise ConfigError(
            f"model.name={name}{given} cannot take images of {height} x {width} pixels: "
            f"{reason.strip().splitlines()[0].rstrip('.')}; "
            + (advice or "no size up to 512 x 512 was found that it takes")
        ) from error
    for warning in told:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return model


def run_once(model: nn.Module, shape: tuple[int, ...]) -> None:
    """One forward pass in evaluation mode, on zeros; nothing of the model and no random generator moves.

    Raises:
        ValueError: part of the image would never be seen, or the output is not one tensor.
    """
    _refuse_cropping(model, shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.eval()
        output = model(torch.zeros(1, *shape))
        model.train()
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"its output is a {type(output).__name__}, not one tensor of logits")


def _refuse_cropping(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Patches of timm's cut off, without a word, the pixels that do not fill one: of 28 x 28 a patch of 16 sees 16 x 16."""
    embed: Any = getattr(model, "patch_embed", None)
    timm = sys.modules.get("timm.layers")  # where it is not imported yet, the model is none of its own
    if timm is None or type(embed) is not timm.PatchEmbed or embed.dynamic_img_pad:
        return
    if any(side % patch for side, patch in zip(shape[1:], embed.patch_size, strict=True)):
        size = " x ".join(map(str, embed.patch_size))
        raise ValueError(f"its patches of {size} do not divide them")


def _what_works(make: Make, shape: tuple[int, ...], *, patches: tuple[int, ...]) -> str:
    """What to do instead, tried: the smallest larger size that the model takes, and the largest patch for this one."""
    channels, height, width = shape
    larger = [side for side in SIDES if side > min(height, width)]
    sizes = [(count, side, side) for count in dict.fromkeys((channels, 3)) for side in larger]
    smaller = [patch for patch in patches if patch < min(height, width)]
    size = next((size for size in sizes if _works(make, size, {})), None)
    patch = next((patch for patch in smaller if _works(make, shape, {"patch_size": patch})), None)
    found = []
    if size is not None:
        only = f" pixels of {size[0]} channels" if size[0] != channels else ""
        found.append(f"it takes {size[1]} x {size[2]}{only}")
    if patch is not None:
        found.append(f"model.kwargs.patch_size={patch} makes it fit")
    return ", or ".join(found)


def _works(make: Make, shape: tuple[int, ...], extra: dict[str, Any]) -> bool:
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_once(make(shape, extra), shape)
    except (ConfigError, *BAD_VALUE):
        return False
    return True
