"""Image files in ImageNet's layout, decoded as they are needed.

::

    root/train/<class>/*.jpg        root/val/<class>/*.jpg

Training images are cut out at a random place and size (``resizedcrop``), or taken like validation images: the shorter
side resized to 256/224 of the wanted size, and the middle. What else ``dataset.augment`` names follows, on 8-bit pixels;
they are normalised on the device.

Each sample is decoded and cut under a seed of its own, (seed, epoch, sample index), so that any number of workers and a
resume in the middle of an epoch give the same batches, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mprun.config import Config
from mprun.data.augment import Address, Pipeline, addresses
from mprun.data.base import Batch, DataSpec, subseed
from mprun.data.finish import Finish
from mprun.data.loader import load_batches
from mprun.data.names import RESIZE, augment_names
from mprun.data.python import own_randomness, seed_cpu
from mprun.data.sampler import Sampler
from mprun.data.tensors import check_task
from mprun.errors import ConfigError, MprunError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Files = Sequence[tuple[str, int]]  # path and label


@dataclass(frozen=True)
class FolderSet:
    """What :func:`imagefolder` found.

    Attributes:
        train: training files.
        val: validation files.
        classes: names of the classes, in the order of the labels.
        image_size: side of an image as the model gets it.
        norm: mean and standard deviation per channel, of pixels from 0 to 1.
    """

    train: Files
    val: Files
    classes: tuple[str, ...]
    image_size: int
    norm: tuple[Sequence[float], Sequence[float]]


def imagefolder(
    *,
    root: str | None = None,
    image_size: int = 224,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> FolderSet:
    """List the files. Nothing is decoded.

    Args:
        root: the folder with ``train`` and ``val``, which is ``dataset.root``.
        image_size: side of an image as the model gets it, in pixels.
        mean: of the three channels, of pixels from 0 to 1.
        std: likewise.

    Raises:
        ConfigError: a folder is missing or empty, or the two sets differ in their classes.
    """
    if root is None:
        raise ConfigError("dataset.name=imagefolder needs dataset.root, a folder with train/<class>/ and val/<class>/")
    if not isinstance(image_size, int) or image_size < 1:
        raise ConfigError(f"dataset.kwargs.image_size={image_size} is not a whole number from 1 up")
    for name, values in (("mean", mean), ("std", std)):
        if not _are_three(values) or (name == "std" and min(values) <= 0):
            raise ConfigError(f"dataset.kwargs.{name}={values} must be three numbers, as in {name}=[0.5,0.5,0.5]")
    folders = [Path(root) / "train", Path(root) / "val"]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"dataset.root={root}: there is no folder {folder}; wanted: train/<class>/ and val/<class>/"
            )
    train_classes, val_classes = (_subfolders(folder) for folder in folders)
    if train_classes != val_classes:
        odd = sorted(set(train_classes) ^ set(val_classes))
        where = [f"{name} (only in {'train' if name in train_classes else 'val'})" for name in odd[:5]]
        raise ConfigError(f"dataset.root={root}: train and val differ in {len(odd)} classes: {', '.join(where)}")
    if not train_classes:
        raise ConfigError(f"dataset.root={root}: {folders[0]} has no folder; wanted: train/<class>/*.jpg")
    train, val = (_files(folder, train_classes) for folder in folders)
    if empty := [name for label, name in enumerate(train_classes) if label not in {label for _, label in train}]:
        raise ConfigError(
            f"{folders[0] / empty[0]} has no image ({len(empty)} of {len(train_classes)} classes have none)"
        )
    if not val:
        raise ConfigError(f"{folders[1]} has no image in any of its {len(val_classes)} folders")
    return FolderSet(train, val, tuple(train_classes), image_size, (tuple(mean), tuple(std)))


def _are_three(values: Any) -> bool:
    return (
        isinstance(values, Sequence)
        and len(values) == 3
        and all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
    )


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _files(folder: Path, classes: Sequence[str]) -> Files:
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    labels = {name: label for label, name in enumerate(classes)}
    found: Files = make_dataset(str(folder), labels, extensions=IMG_EXTENSIONS, allow_empty=True)
    # Hidden files are no images: what macOS and file managers leave (._0.jpg) has the name of one.
    return [(path, label) for path, label in found if not Path(path).name.startswith(".")]


@dataclass(frozen=True)
class FolderData:
    """The :class:`~mprun.data.base.Data` of image files."""

    spec: DataSpec
    files: FolderSet
    sampler: Sampler
    cut: str | None
    pipeline: Pipeline | None
    finish: Finish
    device: torch.device
    workers: int

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one training epoch."""
        return self.sampler.batches

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on, augmented."""
        load = partial(_decode, self.files.train, _transform(self.files.image_size, self.cut), self.pipeline)
        wanted = addresses(self.sampler, epoch, start)
        for address, ids, (images, labels) in load_batches(load, wanted, workers=self.workers, device=self.device):
            yield self.finish(images, labels, ids, address)

    def val_batches(self) -> Iterator[Batch]:
        """The validation files in order, in batches of the training batch size."""
        load = partial(_decode, self.files.val, _transform(self.files.image_size, None), None)
        split = torch.split(torch.arange(self.spec.val_examples), self.sampler.batch_size)
        wanted = [(Address(0, 0, number, tuple(ids.tolist())), ids) for number, ids in enumerate(split)]
        for _, ids, (images, labels) in load_batches(load, wanted, workers=self.workers, device=self.device):
            yield self.finish(images, labels, ids, None)


def _transform(size: int, cut: str | None) -> Callable[[Any], Any]:
    """From a PIL image of any size to one of ``size``."""
    from torchvision.transforms import v2

    if cut == RESIZE:
        made: Callable[[Any], Any] = v2.RandomResizedCrop(size)
    else:
        made = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    return made


def _decode(
    files: Files, transform: Callable[[Any], Any], pipeline: Pipeline | None, address: Address
) -> tuple[Tensor, Tensor]:
    """Images (B, 3, size, size), uint8, and labels (B,), int64, on the CPU.

    Raises:
        MprunError: a file cannot be decoded.
    """
    from PIL import Image
    from torchvision.transforms.v2 import functional

    images = []
    with own_randomness():
        for index in address.ids:
            path = files[index][0]
            seed_cpu(subseed("sample", address.seed, address.epoch, index))
            try:
                with Image.open(path) as image:
                    rgb = _eight_bit(image).convert("RGB")
            except (
                OSError,
                ValueError,
                SyntaxError,
                Image.DecompressionBombError,
            ) as error:  # what PIL's decoders raise
                raise MprunError(f"{path}: not a whole image ({error}); mend or remove it, then resume") from error
            images.append(functional.pil_to_tensor(transform(rgb)))
    batch = torch.stack(images)
    labels = torch.tensor([files[index][1] for index in address.ids])
    return (batch if pipeline is None else pipeline(batch, address)), labels


def _eight_bit(image: Any) -> Any:
    """A PIL image with 8 bits a channel. PIL's own conversion cuts 16-bit grey values off at 255: nearly all of them.

    Raises:
        ValueError: its numbers have no range that says what is white.
    """
    from PIL import Image

    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {'32-bit integers' if image.mode == 'I' else 'floats'}; save it with 8 or 16 bits"
        )
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))


def _spread(files: Files, limit: int | None) -> Files:
    """``limit`` files spread evenly over the list, which is sorted by class: the first ones would all be of one class."""
    count = min(len(files), limit or len(files))
    return [files[number * len(files) // count] for number in range(count)]


def folder_data(config: Config, files: FolderSet, *, device: torch.device) -> FolderData:
    """Batches of image files, as ``config`` wants them.

    Raises:
        ConfigError: the task or the augmentation does not fit.
    """
    wanted = config.dataset
    check_task(wanted)
    names = augment_names(wanted.augment)
    if RESIZE in names[1:]:
        raise ConfigError(
            f"dataset.augment={wanted.augment!r}: {RESIZE} brings files to their size and must come first"
        )
    cut, rest = (RESIZE, names[1:]) if names[:1] == (RESIZE,) else (None, names)
    files = replace(files, train=_spread(files.train, wanted.limit))
    spec = DataSpec(
        name=wanted.name,
        task=wanted.task,
        input_shape=(3, files.image_size, files.image_size),
        num_classes=len(files.classes),
        train_examples=len(files.train),
        val_examples=len(files.val),
        sha256=None,
    )
    return FolderData(
        spec,
        files,
        Sampler.of(config.train, examples=len(files.train), seed=config.seed),
        cut,
        Pipeline(rest, 0.0) if rest else None,
        Finish.of(wanted, norm=files.norm, classes=len(files.classes), device=device),
        device,
        wanted.workers,
    )
