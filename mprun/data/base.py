"""What the training loop knows of a dataset: its facts, its batches, and that a batch depends on its address only.

A batch has an address, ``(seed, epoch, batch index)``. Everything random about it (which samples, which augmentation)
comes from a generator that is seeded with a hash of that address, and from nothing else. Three things follow:

* a run that resumes at batch 7 of epoch 3 asks for batch 7 of epoch 3. There is no sampler state to save, nothing to
  replay, and the batches are those of the unbroken run, bit for bit;
* a batch that is run again, after an overflow or under a detector, is the same batch;
* the global random generators are never drawn from, so that data and dropout cannot disturb each other.

The seed of a stream is a hash of its address, not a sum: with ``seed + epoch``, epoch 1 of seed 0 would be epoch 0 of
seed 1, and two "independent" runs would share most of their data order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mprun.config import Task

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # the label that the loss leaves out; torch's own default


@dataclass(frozen=True)
class DataSpec:
    """Facts of a dataset that models, losses and reports are built from.

    Attributes:
        name: as in ``dataset.name``.
        task: what the targets mean.
        input_shape: one input without the batch dimension, (C, H, W) for images; of the first tensor for nested inputs.
        num_classes: classes, or symbols of a vocabulary, or outputs of a regression.
        train_examples: number of training examples in use, after ``dataset.limit``.
        val_examples: number of validation examples.
        sha256: of the raw data, in hexadecimal; ``None`` where reading all of it would cost too much.
        note: what a user must know about the data, said at the start of a run; ``None`` if nothing.
    """

    name: str
    task: Task
    input_shape: tuple[int, ...]
    num_classes: int
    train_examples: int
    val_examples: int
    sha256: str | None
    note: str | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B examples, on the run's device.

    Attributes:
        inputs: a tensor (B, ...), or tensors nested in tuples, lists and dicts.
        targets: (B, ...), int64 labels (``IGNORE``, -100, is left out by the loss), class probabilities (B, classes), or float
            values of a regression.
        ids: (B,), int64, always on the CPU: which samples these are, counted in the training (or validation) set.
    """

    inputs: Any
    targets: Tensor
    ids: Tensor


class Data(Protocol):
    """A dataset that is ready for training."""

    @property
    def spec(self) -> DataSpec:
        """Facts that do not change."""

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one training epoch, at least 1."""

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on; those before it are neither made nor drawn for."""

    def val_batches(self) -> Iterator[Batch]:
        """The validation set in its own order, without augmentation, the same every time."""


def subseed(*address: str | int) -> int:
    """A 63-bit seed for the random stream with this address.

    >>> subseed("order", 0, 1) == subseed("order", 1, 0)
    False
    """
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
