"""Datasets by name. Importing this package imports no torch; building a dataset does.

A new set of small images is a function that returns :class:`mprun.data.tensors.ImageSet` and a line in ``DATASETS``.
Anything else (large files, text, nested inputs) is a ``dataset=python`` of the user's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mprun.config import Config, DatasetConfig, DatasetSource, Task
from mprun.data.base import Batch, Data, DataSpec, subseed
from mprun.errors import ConfigError, nearest
from mprun.signatures import check_kwargs, import_target

if TYPE_CHECKING:
    import torch

__all__ = ["DATASETS", "Batch", "Data", "DataSpec", "build_data", "check_dataset", "subseed", "target_of"]

DATASETS: dict[str, str] = {"digits": "mprun.data.digits:digits"}


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
    check_kwargs(target_of(config), config.kwargs, key="dataset.kwargs")


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
    return _build_image_data(config, device=device)


def _build_image_data(config: Config, *, device: torch.device) -> Data:
    from mprun.data.augment import find_augmentation
    from mprun.data.sampler import Sampler
    from mprun.data.tensors import TensorData

    wanted = config.dataset
    if wanted.task is not Task.classification:
        raise ConfigError(f"dataset.task={wanted.task.value} does not fit {wanted.name}: it is for classification")
    augment = find_augmentation(wanted.augment)
    images = import_target(target_of(wanted), trust=["mprun"], key="dataset.name")(**wanted.kwargs)
    train = images.train.first(wanted.limit).to(device)
    spec = DataSpec(
        name=wanted.name,
        task=wanted.task,
        input_shape=tuple(images.train.images.shape[1:]),
        num_classes=images.num_classes,
        train_examples=len(train),
        val_examples=len(images.val),
        sha256=images.sha256,
    )
    sampler = Sampler.of(config.train, examples=len(train), seed=config.seed)
    return TensorData(spec, train, images.val.to(device), sampler, augment, images.background)
