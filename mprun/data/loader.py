"""Batches that take work on the CPU, made in ``dataset.workers`` processes or, with 0, in this one.

A worker gets the address of a batch and makes all of it, so that it is the same batch whoever makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mprun.data.augment import Address
from mprun.data.workers import alive
from mprun.errors import MprunError

Load = Callable[[Address], tuple[Tensor, Tensor]]


class _Made(Dataset[Any]):
    """Batches by address."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def __getitem__(self, address: Address) -> Any:
        """The batch; or a user's error, handed over whole, since one raised in a worker would arrive as a traceback."""
        try:
            return self.load(address)
        except MprunError as error:
            return error


def load_batches(
    load: Load, wanted: Iterable[tuple[Address, Tensor]], *, workers: int, device: torch.device
) -> Iterator[tuple[Address, Tensor, tuple[Tensor, Tensor]]]:
    """Make the batches at ``wanted``, in that order, and copy them to the device.

    Args:
        load: makes images and labels, on the CPU; must depend on the address only.
        wanted: addresses, each with its sample numbers.
        workers: processes; 0 makes the batches here, one by one.
        device: where images and labels go.

    Yields:
        Address, sample numbers, and images and labels on the device.

    Raises:
        MprunError: what ``load`` raised.
    """
    listed = list(wanted)
    if not listed:
        return
    loader: DataLoader[Any] = DataLoader(
        _Made(load),
        batch_size=None,
        sampler=[address for address, _ in listed],
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),  # without it the loader draws from the global generator
    )
    for (address, ids), made in zip(listed, alive(loader), strict=True):
        if isinstance(made, MprunError):
            raise made
        images, labels = (part.to(device, non_blocking=True) for part in made)
        yield address, ids, (images, labels)
