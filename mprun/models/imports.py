"""Importing timm without what it imports on the side."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_wandb() -> Iterator[None]:
    """Let an import inside take wandb for absent, if it has not been imported yet.

    timm imports wandb, for a logger of its own, wherever it is installed: half a second, and hooks in the process, which a
    run with ``tracking=disabled`` must not have.
    """
    absent = "wandb" not in sys.modules
    if absent:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules["wandb"]
