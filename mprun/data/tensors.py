"""Small image sets, held whole on the device and gathered by index.

For a set of a few megabytes a data loader costs more than the training step: Python touches each sample, worker
processes start, batches are copied over. Here an epoch is one permutation and each batch one gather on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.config import Config, Task
from mprun.data.augment import Augmentation, find_augmentation
from mprun.data.base import Batch, DataSpec, subseed
from mprun.data.sampler import Sampler
from mprun.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """Images and labels of the same length.

    Attributes:
        images: (N, C, H, W), float32.
        labels: (N,), int64.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> Split:
        """The first ``count`` examples, or all of them."""
        return Split(self.images[:count], self.labels[:count])

    def to(self, device: torch.device) -> Split:
        """The same split on ``device``."""
        return Split(self.images.to(device), self.labels.to(device))

    def gather(self, ids: Tensor) -> Batch:
        """The examples with these numbers, (B,) int64 on the CPU. Does not wait for the device."""
        index = ids.to(self.labels.device, non_blocking=True)
        return Batch(self.images[index], self.labels[index], ids)


@dataclass(frozen=True)
class ImageSet:
    """What the builder of a small image set returns.

    Attributes:
        train: training split.
        val: validation split.
        num_classes: labels are in 0 .. num_classes - 1.
        background: the value of an empty pixel, after normalisation.
        sha256: of the raw data, in hexadecimal.
    """

    train: Split
    val: Split
    num_classes: int
    background: float
    sha256: str


@dataclass(frozen=True)
class TensorData:
    """The :class:`~mprun.data.base.Data` of splits that lie on the device."""

    spec: DataSpec
    train: Split
    val: Split
    sampler: Sampler
    augment: Augmentation | None
    background: float

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one training epoch."""
        return self.sampler.batches

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on, augmented."""
        for number, ids in enumerate(self.sampler.epoch(epoch, start), start=start):
            batch = self.train.gather(ids)
            if self.augment is not None:
                generator = torch.Generator().manual_seed(subseed("augment", self.sampler.seed, epoch, number))
                batch = Batch(self.augment(batch.inputs, generator, self.background), batch.targets, ids)
            yield batch

    def val_batches(self) -> Iterator[Batch]:
        """The validation split in order, in batches of the training batch size."""
        for ids in torch.split(torch.arange(len(self.val)), self.sampler.batch_size):
            yield self.val.gather(ids)


def image_data(config: Config, images: ImageSet, *, device: torch.device) -> TensorData:
    """Batches of a small image set, as ``config`` wants them.

    Raises:
        ConfigError: the task or the augmentation does not fit.
    """
    wanted = config.dataset
    if wanted.task is not Task.classification:
        raise ConfigError(f"dataset.task={wanted.task.value} does not fit {wanted.name}: it is for classification")
    augment = find_augmentation(wanted.augment)
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
