"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100: where their files are looked for, and how they become an ``ImageSet``.

``dataset.root`` is looked through first, for the files themselves and for the folders that torchvision makes; without it
the places of packages and of earlier downloads. What is found is read as it is. What is not found is downloaded by
torchvision, which checks it, where there is a network: into ``dataset.root`` if that is given and exists, otherwise into
the user's cache folder.

Pixels stay 8-bit; batches are normalised with the published mean and standard deviation of the training pixels.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mprun.data.formats import Bytes, read_batches, read_idx
from mprun.data.tensors import ImageSet, Split
from mprun.errors import ConfigError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DOWNLOAD_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Published:
    """What is known of a published set.

    Attributes:
        name: as in ``dataset.name``.
        kind: torchvision's class.
        num_classes: labels are below it.
        mean: of the training pixels from 0 to 1, per channel.
        std: likewise.
        folder: the folder that holds the files, below one's root, in torchvision's layout.
        train: files of the training set.
        test: files of the test set, which is the validation set here.
        archive: a file that holds all of them.
        package: a Debian package that brings the set, and the folder where it puts it.
    """

    name: str
    kind: str
    num_classes: int
    mean: Sequence[float]
    std: Sequence[float]
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    archive: str | None = None
    package: tuple[str, str] | None = None


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_MNIST = Published("mnist", "MNIST", 10, (0.1307,), (0.3081,), "MNIST/raw", IDX_FILES[:2], IDX_FILES[2:])
_FASHION_MNIST = Published(
    "fashion_mnist", "FashionMNIST", 10, (0.2860,), (0.3530,), "FashionMNIST/raw", IDX_FILES[:2], IDX_FILES[2:],
    package=("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"),
)  # fmt: skip
_CIFAR10 = Published(
    "cifar10", "CIFAR10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    "cifar-10-batches-py", _BATCHES, ("test_batch",), archive="cifar-10-python.tar.gz",
)  # fmt: skip
_CIFAR100 = Published(
    "cifar100", "CIFAR100", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
    "cifar-100-python", ("train",), ("test",), archive="cifar-100-python.tar.gz",
)  # fmt: skip


def mnist(*, root: str | None = None) -> ImageSet:
    """Handwritten digits, 60000 and 10000 images of 1 x 28 x 28 pixels. See the module's docstring for ``root``."""
    return _load(_MNIST, root)


def fashion_mnist(*, root: str | None = None) -> ImageSet:
    """Pieces of clothing, in the format of MNIST. See the module's docstring for ``root``."""
    return _load(_FASHION_MNIST, root)


def cifar10(*, root: str | None = None) -> ImageSet:
    """50000 and 10000 photographs of 3 x 32 x 32 pixels. See the module's docstring for ``root``."""
    return _load(_CIFAR10, root)


def cifar100(*, root: str | None = None) -> ImageSet:
    """As CIFAR-10, in 100 classes. See the module's docstring for ``root``."""
    return _load(_CIFAR100, root)


def cache_folder() -> Path:
    """Where downloads go without ``dataset.root``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mprun" / "datasets"


def _load(known: Published, root: str | None) -> ImageSet:
    places = [Path(root)] if root is not None else _usual_places(known)
    found = next((place for base in places if (place := _find(known, base))), None) or _download(known, places)
    read = _read_idx_split if known.archive is None else _read_batch_split
    parts = [read(known, found, files) for files in (known.train, known.test)]
    digest = hashlib.sha256()
    for images, labels in parts:
        digest.update(images.tobytes())
        digest.update(labels.astype(np.uint8).tobytes())
    train, val = (
        Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))) for images, labels in parts
    )
    return ImageSet(train, val, known.num_classes, 0.0, digest.hexdigest(), norm=(known.mean, known.std))


# -- finding the files --------------------------------------------------------------------------------------------


def _usual_places(known: Published) -> list[Path]:
    return [*([Path(known.package[1])] if known.package else []), cache_folder()]


def _find(known: Published, base: Path) -> Path | None:
    """The folder below ``base`` (or ``base``) that holds all files, or the archive; ``None`` if there is none."""
    for folder in (base / known.folder, base):
        if all(_file(folder, name) for name in (*known.train, *known.test)):
            return folder
    if known.archive is None:
        return None
    return next((path for path in (base / known.archive, base) if path.is_file()), None)


def _file(folder: Path, name: str) -> Path | None:
    """``name`` in ``folder``, plain or gzipped."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _download(known: Published, places: list[Path]) -> Path:
    """Let torchvision fetch and check the set; the folder it is in then.

    Raises:
        ConfigError: it cannot, with all that would have been found.
    """
    base = places[-1]
    files = ", ".join(f"{name}[.gz]" if known.archive is None else name for name in (*known.train, *known.test))
    archive = f", or {known.archive}" if known.archive else ""
    package = f"\nor install Debian's package {known.package[0]}" if known.package else ""
    missing = (
        f"dataset.name={known.name}: not in {' or '.join(map(str, places))} (looked there and in {known.folder}/ for {files}"
        f"{archive}){{}}\nset dataset.root= to the folder that has them{package}"
    )
    if base != cache_folder() and not base.is_dir():
        raise ConfigError(missing.format("; there is no such folder"))
    from torchvision import datasets

    print(f"dataset.name={known.name}: downloading to {base}", file=sys.stderr)
    try:
        with _timeout():
            getattr(datasets, known.kind)(root=str(base), download=True)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise ConfigError(missing.format(f", and cannot be downloaded: {reason[0]}")) from error
    found = _find(known, base)
    assert found is not None, "torchvision's layout is one of those that are looked for"
    return found


@contextmanager
def _timeout() -> Iterator[None]:
    """A server that does not answer is given up; torchvision would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# -- reading them -------------------------------------------------------------------------------------------------


def _read_idx_split(known: Published, folder: Path, files: tuple[str, ...]) -> tuple[Bytes, Any]:
    """Images (N, 1, H, W) and labels (N,) of one split."""
    paths = [path for name in files if (path := _file(folder, name))]  # all, or the folder would not have been chosen
    images, labels = (read_idx(path, dims=dims) for path, dims in zip(paths, (3, 1), strict=True))
    _check_labels(known, labels, len(images), paths[1])
    return images[:, None], labels


def _read_batch_split(known: Published, place: Path, files: tuple[str, ...]) -> tuple[Bytes, Any]:
    """Images (N, 3, 32, 32) and labels (N,) of one split."""
    key = "fine_labels" if known.num_classes == 100 else "labels"
    images, found = read_batches(place, list(files), label_key=key)
    labels = np.array(found, dtype=np.int64)
    _check_labels(known, labels, len(images), place)
    return images, labels


def _check_labels(known: Published, labels: Any, images: int, where: Path) -> None:
    if len(labels) != images or not images:
        raise ConfigError(f"{where}: {len(labels)} labels for {images} images of {known.name}")
    if labels.min() < 0 or labels.max() >= known.num_classes:
        raise ConfigError(
            f"{where}: labels from {labels.min()} to {labels.max()}; {known.name} has {known.num_classes} classes"
        )
