"""What ``resume=`` means for a configuration. Imports no torch.

A resumed run goes on in its own folder with its own saved overrides, and with the new ones of the command line on top.
A key that changes is either in force at once (reported), or it would make the run another run and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mprun.errors import CheckpointError
from mprun.runs import find_checkpoint, run_folder

# What the saved state was made with: another value would not continue the run.
FIXED = (
    "seed", "model.name", "model.source", "model.kwargs", "model.init",
    "dataset.name", "dataset.source", "dataset.task", "dataset.kwargs", "dataset.augment", "dataset.limit",
    "dataset.mixup", "dataset.cutmix",
    "optimizer.name", "train.batch_size", "train.accumulate", "train.shuffle", "train.drop_last",
)  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from, and the overrides that its run was started with."""

    checkpoint: Path
    run_dir: Path | None
    overrides: tuple[str, ...]


def find(overrides: Sequence[str]) -> Resume | None:
    """What the last ``resume=`` of ``overrides`` asks for; None without one, and for ``auto`` where there is no run yet.

    Raises:
        CheckpointError: nothing is there to resume.
    """
    target = next(
        (word.partition("=")[2] for word in reversed(overrides) if word.lstrip("+").startswith("resume=")), ""
    )
    target = target.strip("'\"").replace("\\", "")
    if target.lower() in ("", "null", "no", "off", "none", "false"):
        return None
    try:
        checkpoint = find_checkpoint("latest" if target == "auto" else target)
    except CheckpointError:
        if target == "auto":
            return None
        raise
    folder = run_folder(checkpoint)
    saved: tuple[str, ...] = ()
    if folder is not None and (folder / ".hydra" / "overrides.yaml").is_file():
        saved = tuple(str(item) for item in OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
    return Resume(checkpoint, folder, saved)


def merge(saved: Sequence[str], new: Sequence[str]) -> list[str]:
    """``saved`` overrides with ``new`` ones on top: a key that is given anew loses its saved value.

    ``trust`` is not taken over: only the command line gives it, and a run folder may come from a stranger.
    """
    given = {_key(word) for word in new} | {"resume", "trust"}
    return [word for word in saved if _key(word) not in given] + list(new)


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the saved and the present value."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(saved.keys() | now.keys()):
        full, old, new = f"{path}{key}", saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= changes(old, new, f"{full}.")
        elif old != new and full not in ("resume", "command", "name", "trust"):
            found[full] = (old, new)
    return found


def refuse_fixed(changed: Mapping[str, tuple[Any, Any]], checkpoint: Path, *, dynamic: bool) -> None:
    """Refuse changes under which the saved state would not be this run's state, or which could not come into force.

    Args:
        changed: from :func:`changes`.
        checkpoint: named in the message.
        dynamic: whether the loss scale was and is dynamic.

    Raises:
        CheckpointError: names every such key with both values.
    """
    fixed = [key for key in changed if any(key == item or key.startswith(f"{item}.") for item in FIXED)]
    if dynamic and "precision.loss_scale.init" in changed:
        fixed.append("precision.loss_scale.init")  # the saved scale goes on, so another start would be ignored
    if fixed:
        listed = "; ".join(f"{key} was {changed[key][0]!r}, now {changed[key][1]!r}" for key in fixed)
        raise CheckpointError(
            f"{checkpoint} cannot be resumed with other values of: {listed}\nstart a new run for these"
        )


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
