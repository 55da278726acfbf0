"""Run folders and checkpoints on the disk: names, how to find them, whose they are, ``outputs/latest``. Imports no torch.

A run folder is ``outputs/<experiment>/<YYYYmmdd-HHMMSS>-<uid>/``. Names made here hold no ``=``, comma, ``#``, quote or
space, so that they can be pasted back into an override as they are.

A folder belongs to one run, and one process at a time writes it: whoever does holds a lock on its file ``.lock``. The
operating system takes the lock back when the process ends, however it ends, so there is never a stale one to remove.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mprun.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

OUTPUTS = "outputs"
LATEST = "latest"
LOCK_FILE = ".lock"
SWEEP_FILE = "sweep.json"
STEP_FILE = re.compile(r"step_(\d+)\.pt")


def slug(text: str) -> str:
    """``text`` as a folder name: every character outside ``[A-Za-z0-9._-]`` becomes ``-``, never empty, never hidden."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def point_latest(run_dir: Path) -> None:
    """Let ``outputs/latest`` point to ``run_dir``, atomically, if the run lies below a folder ``outputs``.

    Where links are not possible the file system's refusal is ignored: nothing but ``latest`` depends on it.
    """
    outputs = next((parent for parent in run_dir.parents if parent.name == OUTPUTS), None)
    if outputs is None:
        return
    fresh = outputs / f".{LATEST}-{os.getpid()}"
    try:
        fresh.symlink_to(os.path.relpath(run_dir, outputs), target_is_directory=True)
        fresh.replace(outputs / LATEST)
    except OSError:
        fresh.unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to go on from in a ``checkpoints`` folder: ``last.pt``, else the highest ``step_<n>.pt``, else none."""
    last = folder / "last.pt"
    if last.is_file():
        return last
    steps = [(int(match[1]), path) for path in folder.glob("step_*.pt") if (match := STEP_FILE.fullmatch(path.name))]
    return max(steps)[1] if steps else None


def find_checkpoint(target: str, *, outputs: Path | None = None) -> Path:
    """The checkpoint file that ``resume=target`` means.

    Args:
        target: a checkpoint file, a run folder, its ``checkpoints`` folder, or ``latest``.
        outputs: where ``latest`` is looked up; ``outputs/`` of the current folder by default.

    Raises:
        CheckpointError: nothing is there, or the folder holds no checkpoint.
    """
    path = (outputs or Path(OUTPUTS)) / LATEST if target == LATEST else Path(target).expanduser()
    if not path.exists():
        what = "there is no run yet" if target == LATEST else "no such file or folder"
        raise CheckpointError(f"resume={target}: {what} ({path}); give a checkpoint, a run folder, or resume=latest")
    path = path.resolve()
    if path.is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if found := newest_checkpoint(folder):
            return found
    raise CheckpointError(
        f"resume={target}: {path} holds no checkpoint (looked for checkpoints/last.pt and step_<n>.pt)"
    )


def run_folder(checkpoint: Path) -> Path | None:
    """The run folder that ``checkpoint`` belongs to, or None for a file outside of one."""
    folder = checkpoint.parent.parent
    return folder if checkpoint.parent.name == "checkpoints" and (folder / "config.yaml").is_file() else None


def sweep_of(run_dir: Path) -> str | None:
    """The id of the sweep whose job has the folder ``run_dir``: the name of the folder around it that holds ``sweep.json``."""
    near = (run_dir.resolve(), *run_dir.resolve().parents[:3])
    return next((slug(folder.name) for folder in near if (folder / SWEEP_FILE).is_file()), None)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that writes the run folder ``folder``, which exists.

    Where a file system knows no locks, or lets nobody make the file, nothing is locked: what is wrong with the folder will
    be told by what is written next.

    Raises:
        CheckpointError: another process is writing it. Nothing was changed.
    """
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    # A forked child, such as a worker that loads data, would keep the lock alive after this process is gone.
    _held.add(handle)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise CheckpointError(
                        f"{folder} is being written by another run, which holds its {LOCK_FILE}\n"
                        "wait for its end, stop it, or start a run in another folder"
                    ) from error
        yield
    finally:
        if handle in _held:
            _held.discard(handle)
            os.close(handle)


@contextmanager
def turn(folder: Path, seconds: float = 120.0) -> Iterator[None]:
    """Be the only process on this disk that does something in ``folder``; waits for the others.

    Raises:
        CheckpointError: another one had it all the time.
    """
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except CheckpointError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        yield


_held: set[int] = set()


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def refuse_used(folder: Path, *, but_result: bool = False) -> None:
    """Refuse a folder that holds a run, where a new one is to begin.

    Args:
        folder: where the run is to go.
        but_result: a result without a checkpoint does not count: nothing is there to go on from.

    Raises:
        CheckpointError: it holds checkpoints or a result. Nothing was changed.
    """
    if newest_checkpoint(folder / "checkpoints") or (folder / "checkpoints" / "best.pt").exists():
        raise CheckpointError(
            f"{folder} holds the checkpoints of a run already: go on with resume={folder}, or choose another folder"
        )
    if (folder / "result.json").exists() and not but_result:
        raise CheckpointError(f"{folder} holds the result of a run already: choose another folder, or remove this one")
