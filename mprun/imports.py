"""Importing torch and timm without what that costs on the side."""

from __future__ import annotations

import gc
import importlib
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


@contextmanager
def uncollected(package: str) -> Iterator[None]:
    """Import ``package`` inside with the garbage collector off; does nothing where it is imported already.

    Such an import makes hundreds of thousands of objects, nearly all of which live as long as the process. The collector
    looks at them again and again and finds next to nothing, for a good part of the time that the import takes; and it would
    go on doing so during training, so they are left out of its later rounds.

    What the import threw away is collected first. A module that looks at its own frame leaves a cycle behind, which holds the
    frames of all callers: set aside with the rest, it would keep whatever they hold (a model, a checkpoint) for good.
    For the same reason nothing large should be alive at the call: a model that holds itself would never be freed.
    """
    if package in sys.modules or not gc.isenabled():
        yield
        return
    if "torch" in sys.modules:
        gc.collect()  # what an earlier run in this process left behind is not set aside either; before torch there was none
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)  # everything since the collector was switched off
        gc.freeze()
        gc.enable()


def import_compiler() -> None:
    """Import torch's compiler, which torch does anyway for the first optimizer; to be called before there is a model."""
    with uncollected("torch._dynamo"):
        importlib.import_module("torch._dynamo")
