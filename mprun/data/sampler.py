"""Which samples are in which batch: a function of (seed, epoch), computed on the CPU so that it is equal everywhere.

A GPU's ``randperm`` gives another order than the CPU's for the same seed; a comparison of devices would then compare
different runs. The permutation of even a million samples takes 20 ms on the CPU, once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.config import TrainConfig
from mprun.data.base import subseed
from mprun.errors import ConfigError


@dataclass(frozen=True)
class Sampler:
    """Splits every epoch into batches of sample indices.

    Attributes:
        examples: size of the training set.
        batch_size: samples of a batch; the last one of an epoch may be smaller.
        seed: the run's seed.
        shuffle: a new order every epoch, or the set's own.
        drop_last: leave out the last batch of an epoch if it is smaller.
    """

    examples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"train.batch_size={self.batch_size} is not at least 1")
        if self.examples < 1:
            raise ConfigError("the training set has no example")
        if self.batches < 1:
            raise ConfigError(
                f"train.drop_last=true leaves no batch: {self.examples} examples are fewer than "
                f"train.batch_size={self.batch_size}"
            )

    @classmethod
    def of(cls, train: TrainConfig, *, examples: int, seed: int) -> Sampler:
        """The sampler that ``train.*`` describes."""
        return cls(examples, train.batch_size, seed=seed, shuffle=train.shuffle, drop_last=train.drop_last)

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self.examples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, start: int = 0) -> list[Tensor]:
        """The batches of an epoch from number ``start`` on.

        Args:
            epoch: counted from 0.
            start: number of the first batch wanted, 0 to ``batches``.

        Returns:
            Sample indices, one tensor (B,) int64 on the CPU per batch.
        """
        if not 0 <= start <= self.batches:
            raise ValueError(f"start must be in 0..{self.batches}, got {start}")
        if self.shuffle:
            generator = torch.Generator().manual_seed(subseed("order", self.seed, epoch))
            order = torch.randperm(self.examples, generator=generator)
        else:
            order = torch.arange(self.examples)
        return list(torch.split(order, self.batch_size)[start : self.batches])
