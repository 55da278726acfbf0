"""Augmentation of batches, with draws that depend on the address of a batch or sample and not on the device.

Two kinds, which ``dataset.augment`` may join in any order:

* batchwise (``shift``, ``crop``, ``flip``): what is random is drawn from a CPU generator that belongs to the batch, a
  few integers per image; the pixels are moved where they are. So the GPU augments exactly as the CPU does, without a
  copy of the images and without waiting for the device;
* samplewise (``randaugment``, ``trivialaugment``): torchvision's, for 8-bit images on the CPU. They draw from the global
  generator, which is seeded for each sample with (seed, epoch, sample index) and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from mprun.data.base import subseed
from mprun.data.names import BATCHWISE, RESIZE, SAMPLEWISE, augment_names
from mprun.data.python import own_randomness, seed_cpu
from mprun.data.sampler import Sampler
from mprun.errors import ConfigError

CROP_PADDING = 4

Samplewise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Address:
    """Which batch this is; everything random about it follows from here.

    Attributes:
        seed: the run's.
        epoch: counted from 0.
        number: of the batch within the epoch.
        ids: the numbers of its B samples.
    """

    seed: int
    epoch: int
    number: int
    ids: tuple[int, ...]


def _draw_shift(count: int, generator: torch.Generator) -> Tensor:
    """Move half of the images by up to one pixel each way: how far down and right, (2, count), int64.

    An image is chosen with probability 1/2; a chosen one moves by one of the 9 offsets in {-1, 0, 1}², drawn evenly.
    """
    chosen = torch.rand(count, generator=generator) < 0.5
    return torch.randint(-1, 2, (2, count), generator=generator) * chosen


def _draw_crop(count: int, generator: torch.Generator) -> Tensor:
    """Pad by 4 pixels on all sides and cut the old size out, at one of 9 x 9 places drawn evenly: as :func:`_draw_shift`."""
    return torch.randint(-CROP_PADDING, CROP_PADDING + 1, (2, count), generator=generator)


def _draw_flip(count: int, generator: torch.Generator) -> Tensor:
    """Swap left and right in half of the images: in which, (count,), bool."""
    return torch.rand(count, generator=generator) < 0.5


def _flip(images: Tensor, chosen: Tensor, background: float) -> Tensor:
    """Images (B, C, H, W) of any dtype and device, those ``chosen`` swapped."""
    wanted = torch.arange(len(images)) + len(images) * chosen
    # Choosing whole images copies them; torch.where looks at each pixel, which takes longer on the CPU.
    return torch.cat((images, images.flip(-1))).index_select(0, wanted.to(images.device, non_blocking=True))


def _move(images: Tensor, offsets: Tensor, margin: int, background: float) -> Tensor:
    """Move image i by ``offsets[0, i]`` down and ``offsets[1, i]`` right; both within ``margin``.

    Args:
        images: (B, C, H, W), any dtype and device. Not changed.
        offsets: (2, B), int64, on the CPU.
        margin: the largest of them.
        background: comes in at the border.
    """
    down, right = offsets
    padded = functional.pad(images, (margin,) * 4, value=background)
    height, width = images.shape[2:]
    # A row of the result is a piece of a row of ``padded``, W pixels that lie together: one copy, where indexing by image
    # and place would look each pixel up. ``pieces`` has one for every place that a row can begin at, and is a view.
    pieces = padded.flatten().unfold(0, width, 1)
    moves = (down * padded.shape[3] + right).to(images.device, non_blocking=True)
    begins = _row_begins(len(images), images.shape[1], height, width, margin, images.device) - moves[:, None]
    return pieces.index_select(0, begins.flatten()).view(images.shape)


@lru_cache(maxsize=8)  # batches of an epoch have one size, its last one and the validation set's may have others
def _row_begins(count: int, channels: int, height: int, width: int, margin: int, device: torch.device) -> Tensor:
    """Where the rows of images that stay in place begin in the flat padded batch: (count, channels * height), int64."""
    tall, wide = height + 2 * margin, width + 2 * margin
    planes = torch.arange(count * channels, device=device).view(count, channels, 1) * (tall * wide)
    rows = (torch.arange(height, device=device) + margin) * wide + margin
    return (planes + rows).flatten(1)


@dataclass(frozen=True)
class Batchwise:
    """An augmentation of whole batches.

    Attributes:
        draw: what is random, for so many images, from a CPU generator; belongs to a batch.
        move: carries out what was drawn; for several batches in one go as well.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    move: Callable[[Tensor, Tensor, float], Tensor]

    def __call__(self, images: Tensor, generator: torch.Generator, background: float) -> Tensor:
        """One batch.

        Args:
            images: (B, C, H, W), any dtype and device. Not changed.
            generator: a CPU generator, drawn from.
            background: the value of an empty pixel.

        Returns:
            The moved images, as ``images`` in shape, dtype and device.
        """
        return self.move(images, self.draw(len(images), generator), background)


shift = Batchwise(_draw_shift, lambda images, drawn, background: _move(images, drawn, 1, background))
crop = Batchwise(_draw_crop, lambda images, drawn, background: _move(images, drawn, CROP_PADDING, background))
flip = Batchwise(_draw_flip, _flip)

_BATCHWISE = {"shift": shift, "crop": crop, "flip": flip}
assert tuple(_BATCHWISE) == BATCHWISE, "names.py lists them for those who must not import torch"


def _samplewise(name: str) -> Samplewise:
    from torchvision.transforms import v2  # a second: only where it is needed

    makers = {"randaugment": v2.RandAugment, "trivialaugment": v2.TrivialAugmentWide}
    transform: Samplewise = makers[name]()
    return transform


@dataclass(frozen=True)
class Pipeline:
    """What ``dataset.augment`` names, ready to be carried out. Picklable, so that workers can have it."""

    names: tuple[str, ...]
    background: float

    @property
    def on_cpu(self) -> bool:
        """Whether a part of it takes its images one by one, on the CPU."""
        return any(name in SAMPLEWISE for name in self.names)

    def __call__(self, images: Tensor, address: Address) -> Tensor:
        """Augment the batch at ``address``.

        Args:
            images: (B, C, H, W); uint8 and on the CPU if the pipeline is ``on_cpu``. Not changed.
            address: where all draws come from. One generator serves the batchwise parts, one after the other.

        Returns:
            Images of the same shape, dtype and device.
        """
        return self.together(images, [address])

    def together(self, images: Tensor, addresses: Sequence[Address]) -> Tensor:
        """Augment several batches, whose images follow one another, each as a call of its own would.

        On a batch of a few kilobytes every operation costs more than its pixels, on a GPU a launch.
        """
        generators = [
            torch.Generator().manual_seed(subseed("augment", at.seed, at.epoch, at.number)) for at in addresses
        ]
        for name in self.names:
            if (part := _BATCHWISE.get(name)) is not None:
                drawn = [part.draw(len(at.ids), own) for at, own in zip(addresses, generators, strict=True)]
                images = part.move(images, torch.cat(drawn, -1), self.background)
            else:
                each = torch.split(images, [len(at.ids) for at in addresses])
                done = [_one_by_one(name, some, at) for some, at in zip(each, addresses, strict=True)]
                images = torch.cat(done)
        return images


def _one_by_one(name: str, images: Tensor, address: Address) -> Tensor:
    transform, done = _samplewise(name), []
    with own_randomness():
        for image, index in zip(images, address.ids, strict=True):
            seed_cpu(subseed(name, address.seed, address.epoch, index))
            done.append(transform(image))
    return torch.stack(done)


def addresses(sampler: Sampler, epoch: int, start: int = 0) -> Iterator[tuple[Address, Tensor]]:
    """The addresses of an epoch's batches from number ``start`` on, each with its sample numbers, (B,) int64."""
    for number, ids in enumerate(sampler.epoch(epoch, start), start=start):
        yield Address(sampler.seed, epoch, number, tuple(ids.tolist())), ids


def find_pipeline(augment: str | None, *, background: float, dtype: torch.dtype, name: str) -> Pipeline | None:
    """The pipeline that ``dataset.augment`` describes for images in memory; ``None`` for null and ``none``.

    Args:
        augment: names joined by ``+``.
        background: the value of an empty pixel.
        dtype: of the pixels.
        name: of the dataset, for messages.

    Raises:
        ConfigError: there is no such augmentation, or it does not fit these images.
    """
    names = augment_names(augment)
    if RESIZE in names:
        raise ConfigError(
            f"dataset.augment={augment!r}: {RESIZE} cuts image files to size; the images of {name} have one size "
            f"already, use crop"
        )
    if dtype != torch.uint8:
        refuse_samplewise(names, f"the pixels of {name} are not 8-bit; legal: none, {', '.join(BATCHWISE)}")
    return Pipeline(names, background) if names else None


def refuse_samplewise(names: Sequence[str], why: str) -> None:
    """Raise a ConfigError if a name is samplewise."""
    for name in names:
        if name in SAMPLEWISE:
            raise ConfigError(f"dataset.augment={name!r} does not fit: {why}")
