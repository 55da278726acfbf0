"""Run folders and checkpoints on the disk: names, how to find them, ``outputs/latest``. Imports no torch.

A run folder is ``outputs/<experiment>/<YYYYmmdd-HHMMSS>-<uid>/``. Names made here hold no ``=``, comma, ``#``, quote or
space, so that they can be pasted back into an override as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mprun.errors import CheckpointError

OUTPUTS = "outputs"
LATEST = "latest"
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
