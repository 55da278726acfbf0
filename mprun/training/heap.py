"""Keep freed memory for the next step instead of handing it back to the system and asking for it again.

What it is about. A training step on the CPU allocates and frees the same tensors again and again. The C library (glibc) gives
large blocks their own mapping, and returns the free end of its heap to the system, both from sizes on that it adapts to the
past. With unlucky sizes every step returns its memory and gets it back as fresh pages; each of these costs a page fault,
one or two microseconds for 4 KiB, ten times as long as it takes to convert what is on it to FP16. Which sizes are
unlucky differs by model, precision and batch, so that one precision looks slow where only its allocations are. FP16 suffers
most, since its kernels widen into short-lived FP32 tensors.

What is done. Blocks up to 32 MiB (the most that glibc allows) come from the heap, and its free end stays. torch does the
same with the memory of a GPU. No number changes. The peak of memory stays what it was, but the process sits near it while
it trains; at the end what is free goes back.

Whoever set glibc's variables or tunables for this has decided: nothing is done. Neither is anything done for other C
libraries; and where another ``malloc`` was loaded before, glibc's thresholds have no effect.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_FROM_BYTES = 32 * 2**20
TRIMMED_FROM_BYTES = 2**31 - 1  # an int

_lock = threading.Lock()
_users = 0


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Keep freed host memory in the process for a while. May be nested; counts for all threads.

    glibc's thresholds can be set but not read, so they stay; what is free is returned once, when the last user leaves.

    Yields:
        Whether it is kept.
    """
    global _users
    libc = _glibc() if not decided(os.environ) else None
    kept = libc is not None and _keep(libc)
    with _lock:
        _users += kept
    try:
        yield kept
    finally:
        with _lock:
            _users -= kept
            last = kept and not _users
        if last and libc is not None:
            libc.malloc_trim(0)


def decided(environment: Mapping[str, str]) -> bool:
    """Whether the environment sets a threshold of glibc's malloc."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}" in tunables
        for name in ("trim_threshold", "mmap_threshold", "top_pad", "mmap_max")
    )


def _keep(libc: Any) -> bool:
    return bool(
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, TRIMMED_FROM_BYTES)
    )


def _glibc() -> Any:
    """The C library of this process if it is glibc, else None."""
    try:
        if platform.libc_ver()[0] != "glibc":  # looks into the interpreter's file where the system does not say
            return None
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None
