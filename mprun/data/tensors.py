"""Small image sets, held whole in memory and gathered by index.

For a set of a few megabytes a data loader costs more than the training step: Python touches each sample, worker
processes start, batches are copied over. Here an epoch is one permutation, and a batch (or several small ones) one gather
on the device. Only where an augmentation takes its images one by one does the training split stay on the CPU, and
``dataset.workers`` count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from mprun.config import Config, DatasetConfig, Task
from mprun.data.augment import Address, Pipeline, addresses, find_pipeline
from mprun.data.base import Batch, DataSpec
from mprun.data.finish import Finish
from mprun.data.loader import load_batches
from mprun.data.sampler import Sampler
from mprun.errors import ConfigError

# Small batches are gathered and augmented several at a time, up to this size of images: an operation costs more than its pixels.
TOGETHER_BYTES = 2**18


@dataclass(frozen=True)
class Split:
    """Images and labels of the same length.

    Attributes:
        images: (N, C, H, W), float32 or uint8.
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

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels with these numbers, (B,) int64 on the CPU. Does not wait for the device."""
        index = ids.to(self.labels.device, non_blocking=True)
        # Not images[index]: on the CPU that looks each pixel up, this copies whole images.
        return self.images.index_select(0, index), self.labels.index_select(0, index)


@dataclass(frozen=True)
class ImageSet:
    """What the builder of a small image set returns.

    Attributes:
        train: training split.
        val: validation split.
        num_classes: labels are in 0 .. num_classes - 1.
        background: the value of an empty pixel, in the units of the images as they are here.
        sha256: of the raw data, in hexadecimal; ``None`` where there is none.
        norm: mean and standard deviation per channel, of pixels from 0 to 1, that batches of uint8 images are normalised
            with; ``None`` for float32 images that are normalised already.
        note: what a user must know about the set, said at the start of a run.
    """

    train: Split
    val: Split
    num_classes: int
    background: float
    sha256: str | None
    norm: tuple[Sequence[float], Sequence[float]] | None = None
    note: str | None = None


@dataclass(frozen=True)
class TensorData:
    """The :class:`~mprun.data.base.Data` of splits in memory, on the device unless ``pipeline.on_cpu``."""

    spec: DataSpec
    train: Split
    val: Split
    sampler: Sampler
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
        wanted = addresses(self.sampler, epoch, start)
        if self.pipeline is not None and self.pipeline.on_cpu:
            load = partial(_augmented, self.train, self.pipeline)
            for address, ids, (images, labels) in load_batches(load, wanted, workers=self.workers, device=self.device):
                yield self.finish(images, labels, ids, address)
            return
        bytes_of_batch = self.sampler.batch_size * self.train.images[:1].nbytes
        while some := list(islice(wanted, max(TOGETHER_BYTES // max(bytes_of_batch, 1), 1))):
            images, labels = self.train.gather(torch.cat([ids for _, ids in some]))
            if self.pipeline is not None:
                images = self.pipeline.together(images, [address for address, _ in some])
            parts = zip(_apart(images, some), _apart(labels, some), strict=True)
            for (address, ids), (x, y) in zip(some, parts, strict=True):
                yield self.finish(x, y, ids, address)

    def val_batches(self) -> Iterator[Batch]:
        """The validation split in order, in batches of the training batch size."""
        for ids in torch.split(torch.arange(len(self.val)), self.sampler.batch_size):
            yield self.finish(*self.val.gather(ids), ids, None)


def _apart(joined: Tensor, batches: Sequence[tuple[Address, Tensor]]) -> list[Tensor]:
    """``joined`` in pieces as long as the batches. Copies: a model may write into its input, and views share a history."""
    if len(batches) == 1:
        return [joined]
    sizes = [len(ids) for _, ids in batches]
    return [part.clone() for part in torch.split(joined, sizes)]


def _augmented(split: Split, pipeline: Pipeline, address: Address) -> tuple[Tensor, Tensor]:
    images, labels = split.gather(torch.tensor(address.ids))
    return pipeline(images, address), labels


def image_data(config: Config, images: ImageSet, *, device: torch.device) -> TensorData:
    """Batches of a small image set, as ``config`` wants them.

    Raises:
        ConfigError: the task or the augmentation does not fit.
    """
    wanted = config.dataset
    check_task(wanted)
    dtype = images.train.images.dtype
    assert (dtype == torch.uint8) == (images.norm is not None), (
        "8-bit images are normalised batch by batch, others before"
    )
    pipeline = find_pipeline(wanted.augment, background=images.background, dtype=dtype, name=wanted.name)
    train = images.train.first(wanted.limit)
    spec = DataSpec(
        name=wanted.name,
        task=wanted.task,
        input_shape=tuple(train.images.shape[1:]),
        num_classes=images.num_classes,
        train_examples=len(train),
        val_examples=len(images.val),
        sha256=images.sha256,
        note=images.note,
    )
    finish = Finish.of(wanted, norm=images.norm, classes=images.num_classes, device=device)
    sampler = Sampler.of(config.train, examples=len(train), seed=config.seed)
    train = train if pipeline is not None and pipeline.on_cpu else train.to(device)
    return TensorData(spec, train, images.val.to(device), sampler, pipeline, finish, device, wanted.workers)


def check_task(config: DatasetConfig) -> None:
    """Refuse a task that labelled images are not for."""
    if config.task is not Task.classification:
        raise ConfigError(f"dataset.task={config.task.value} does not fit {config.name}: it is for classification")
