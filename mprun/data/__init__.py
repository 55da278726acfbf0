"""Datasets by name. Importing this package imports no torch; building a dataset does.

A new set of small images is a function that returns :class:`mprun.data.tensors.ImageSet` and a line in ``DATASETS``; a
text one that returns :class:`mprun.data.text.TextSet`. Anything else (large files, nested inputs) is a
``dataset=python`` of the user's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mprun.config import Config, DatasetConfig, DatasetSource
from mprun.data.base import Batch, Data, DataSpec, subseed
from mprun.data.names import augment_names
from mprun.errors import ConfigError, nearest
from mprun.signatures import check_kwargs, import_target, legal_kwargs

if TYPE_CHECKING:
    import torch

__all__ = ["DATASETS", "Batch", "Data", "DataSpec", "build_data", "check_dataset", "subseed", "target_of"]

DATASETS: dict[str, str] = {
    "digits": "mprun.data.digits:digits",
    "mnist": "mprun.data.torchvision_sets:mnist",
    "fashion_mnist": "mprun.data.torchvision_sets:fashion_mnist",
    "cifar10": "mprun.data.torchvision_sets:cifar10",
    "cifar100": "mprun.data.torchvision_sets:cifar100",
    "imagefolder": "mprun.data.imagefolder:imagefolder",
    "synthetic": "mprun.data.synthetic:synthetic",
    "python_docs": "mprun.data.text:python_docs",
    "text": "mprun.data.text:text",
}


def target_of(config: DatasetConfig) -> str:
    """The ``pkg.mod:attr`` whose signature ``dataset.kwargs`` must fit.

    Raises:
        ConfigError: ``dataset.name`` is unknown.
    """
    if config.source is DatasetSource.python:
        return config.name
    if config.name not in DATASETS:
        raise ConfigError(f"dataset.name={config.name!r} is unknown: {nearest(config.name, list(DATASETS))}")
    return DATASETS[config.name]


def check_dataset(config: DatasetConfig) -> None:
    """Check name and ``kwargs`` without importing or reading anything.

    Raises:
        ConfigError: an unknown name or keyword.
    """
    target = target_of(config)
    if config.source is DatasetSource.python:
        check_kwargs(target, config.kwargs, key="dataset.kwargs")
        for key in ("mixup", "cutmix"):
            if getattr(config, key):
                raise ConfigError(
                    f"dataset.{key}={getattr(config, key)}: a python dataset is not mixed; return class probabilities as targets"
                )
        return
    augment_names(config.augment)
    check_kwargs(target, config.kwargs, key="dataset.kwargs", reserved=["root"])
    if config.root is not None and "root" not in legal_kwargs(target).names:
        raise ConfigError(f"dataset.root={config.root}: {config.name} reads no folder; leave dataset.root out")


def build_data(config: Config, *, device: torch.device) -> Data:
    """Make the dataset of a run.

    Args:
        config: ``dataset.*``, the batching keys of ``train.*``, ``seed`` and ``trust`` are read.
        device: where the batches shall be.

    Returns:
        Small built-in sets lie on the device; a ``python`` set is read through a ``DataLoader``.

    Raises:
        ConfigError: the dataset cannot be built as configured.
    """
    check_dataset(config.dataset)
    if config.dataset.source is DatasetSource.python:
        from mprun.data.python import build_python_data

        return build_python_data(config, device=device)
    made = import_target(target_of(config.dataset), trust=["mprun"], key="dataset.name")(**_arguments(config.dataset))
    # What the builder returned says how batches are made of it.
    from mprun.data.tensors import ImageSet, image_data

    if isinstance(made, ImageSet):
        return image_data(config, made, device=device)
    from mprun.data.imagefolder import FolderSet, folder_data

    if isinstance(made, FolderSet):
        return folder_data(config, made, device=device)
    from mprun.data.text import TextSet, text_data

    if isinstance(made, TextSet):
        return text_data(config, made, device=device)
    raise TypeError(f"the builder of dataset.name={config.dataset.name} returned {type(made).__name__}")


def _arguments(config: DatasetConfig) -> dict[str, Any]:
    """What the builder is called with: ``dataset.kwargs``, and ``dataset.root`` where it reads a folder."""
    takes_root = "root" in legal_kwargs(target_of(config)).names
    return {**config.kwargs, "root": config.root} if takes_root else dict(config.kwargs)
