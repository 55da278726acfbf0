"""Processes that load data and end without being asked to: torch's message says that much, and this says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from mprun.errors import MprunError


def alive(loader: DataLoader[Any]) -> Iterator[Any]:
    """What ``loader`` makes.

    Raises:
        MprunError: a worker process has ended without being asked to.
    """
    batches = iter(loader)
    while True:
        try:
            made = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if text := dead_worker(error):
                raise MprunError(text) from error
            raise
        yield made


def dead_worker(error: Exception) -> str | None:
    """What to tell instead of ``error``, if it is torch's about a worker process that is gone; it may arrive at any time."""
    match = re.search(r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) (.*)", str(error))
    if match is None or not isinstance(error, RuntimeError):
        return None
    how = match[2].partition(". ")[0].strip(" .")
    return f"a process that loads data (dataset.workers) is gone: it {how}\n" + (
        "the system kills what takes too much memory: use fewer dataset.workers, or smaller samples; then resume"
        if "Killed" in how
        else "the dataset's own code ended it (os._exit, a crash in a library): dataset.workers=0 shows where; then resume"
    )
