"""What the machine and the checkout say about themselves: package versions, git state, processor, driver.

Everything here is a best effort for the record of a run: what cannot be found is null, nothing raises, nothing takes
longer than ``GIT_TIMEOUT_S``, and no program but git is started.
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 2.0
DIFF_LIMIT_BYTES = 100_000
UNTRACKED_LIMIT = 50


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Installed versions from package metadata, without importing anything; null for what is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state(folder: Path, *, tracked: str | None = None) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the checkout around ``folder``; null outside one, without git, or if too slow.

    Args:
        folder: any folder of the checkout.
        tracked: a file in ``folder`` that must be under version control. A package installed into a virtual environment
            inside somebody's checkout lies in that checkout but is no part of it.

    Returns:
        ``root commit dirty diff diff_truncated untracked``; ``dirty`` is null where git could not say (no commit yet).
    """
    deadline = time.monotonic() + GIT_TIMEOUT_S
    top = _git(folder, deadline, "rev-parse", "--show-toplevel")
    if top is None or (tracked and _git(folder, deadline, "ls-files", "--error-unmatch", tracked) is None):
        return None
    root = Path(top.rstrip("\n"))
    commit = _git(root, deadline, "rev-parse", "--verify", "HEAD")
    # A repository can name programs that git would start to show a difference; making a record must not run them.
    diff = _git(root, deadline, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    others = _git(root, deadline, "ls-files", "--others", "--exclude-standard")
    kept = (diff or "").encode()[:DIFF_LIMIT_BYTES].decode(errors="ignore")
    return {
        "root": str(root),
        "commit": commit.strip() if commit else None,
        "dirty": None if diff is None or others is None else bool(diff or others),
        "diff": kept,
        "diff_truncated": len(kept) < len(diff or ""),
        "untracked": (others or "").splitlines()[:UNTRACKED_LIMIT],
    }


def _git(folder: Path, deadline: float, *arguments: str) -> str | None:
    """What git prints, cut a little after ``DIFF_LIMIT_BYTES``; null if it fails, is absent, or passes the deadline."""
    # A hook that started the run would otherwise point git to its own repository.
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    limit = DIFF_LIMIT_BYTES + 8
    try:
        # Read through a pipe up to the cap: the difference of a large checkout need not fit into memory.
        with subprocess.Popen(
            ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *arguments],
            cwd=folder,
            env={**own, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
            watchdog.start()
            try:
                text = process.stdout.read(limit)
                if len(text) == limit:
                    process.kill()
            finally:
                process.wait()
                watchdog.cancel()
    except OSError:
        return None
    return text.decode(errors="replace") if process.returncode == 0 or len(text) == limit else None


def describe_host() -> dict[str, Any]:
    """Name, system, processor and number of processors of this machine."""
    return {
        "name": platform.node(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
    }


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver, from ``/proc``; null where there is none, or no Linux."""
    for line in read_lines("/proc/driver/nvidia/version"):
        numbers = [word for word in line.split() if word[:1].isdigit() and "." in word]
        if numbers:
            return numbers[0]
    return None


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    for line in read_lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_lines(path: str) -> list[str]:
    """The lines of a text file of the system; none if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
