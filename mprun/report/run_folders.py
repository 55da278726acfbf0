"""Run folders as rows: where they are, and what their ``config.yaml`` and ``result.json`` say. Imports no torch.

Only these two files of a folder are read, with libyaml and json, so that a sweep of hundreds is read in a fraction of a
second. What is wrong with a folder is said in its row; no folder can keep the others from being shown.

The status of a run is what ``result.json`` says. Without that file it is told from the lock that a writing process holds:
``running`` while one does, ``killed`` where none does, ``running?`` where the folder has no lock file to ask. A folder
that cannot be read is ``broken``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mprun.errors import ConfigError
from mprun.report.summary import shown_path
from mprun.runs import LATEST, LOCK_FILE, OUTPUTS
from mprun.training.env import from_json

try:
    import fcntl
except ImportError:  # pragma: no cover  (Windows)
    fcntl = None  # type: ignore[assignment]

CONFIG, RESULT = "config.yaml", "result.json"
COMPARISON = "compare.json"  # beside the result of a comparison, whose runs lie below
OK, BROKEN = "ok", "broken"
NESTED = ("final", "best", "checkpoint", "wandb")  # mappings, null where there is nothing to say
# libyaml's loader is ten times as fast; a PyYAML built without it has only its own.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RunRow:
    """One run folder.

    Attributes:
        config: the resolved configuration with dotted keys; empty if it cannot be read.
        result: ``result.json`` with dotted keys, final metrics under their own names (``val/loss``).
        reason: the first line of what went wrong, or empty.
    """

    folder: Path
    status: str
    reason: str
    config: dict[str, Any]
    result: dict[str, Any]


def find_runs(targets: Sequence[str]) -> list[Path]:
    """The run folders in ``targets``, in natural order, each once.

    Args:
        targets: run folders, folders above them, or ``latest``; ``outputs/`` if there are none.

    Raises:
        ConfigError: a folder does not exist, or holds no run.
    """
    found: dict[Path, Path] = {}
    for target in targets or (OUTPUTS,):
        path = Path(OUTPUTS) / LATEST if target == LATEST else Path(target).expanduser()
        if path.is_file():
            path = path.parent
        if path.is_symlink():
            path = shown_path(path.resolve())
        if not path.is_dir():
            what = "there is no run yet" if target in (LATEST, OUTPUTS) else "no such folder"
            raise ConfigError(f"{target}: {what} ({path}); give run folders, a folder above them, or latest")
        runs = sorted(_runs_below(path), key=lambda run: natural(str(run)))
        if not runs:
            raise ConfigError(f"{target}: no run lies in this folder (a run folder holds {CONFIG})")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_below(folder: Path) -> Iterator[Path]:
    """Run folders at or below ``folder``. Links are not followed: ``outputs/latest`` is a run that lies there anyway."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        yield folder  # its row says that it cannot be read
        return
    names = {entry.name for entry in entries}
    if names & {CONFIG, RESULT} and COMPARISON not in names:
        yield folder
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _runs_below(Path(entry.path))


def read_run(folder: Path) -> RunRow:
    """The row of one folder. Raises nothing: what is wrong with it is its ``reason``."""
    problems: list[str] = []
    config = _mapping(folder / CONFIG, problems)
    result = _mapping(folder / RESULT, problems) if (folder / RESULT).exists() else None
    if result is None and not problems:
        status, reason = alive(folder), ""
    else:
        result = result or {}
        status, reason = str(result.get("status", BROKEN)), first_line(result.get("error"))
        if "status" not in result and not problems:
            problems.append(f"{RESULT}: says no status")
        if not (folder / CONFIG).exists() and result.get("status", OK) != OK:
            problems = []  # a job of a sweep that was refused never had a configuration; its result says why
    if problems:
        status, reason = BROKEN, "; ".join(problems)
    return RunRow(folder, status, reason, flatten(config or {}), flat_result(result or {}))


def _mapping(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The mapping in a YAML or JSON file; None, and a line in ``problems``, where there is none."""
    try:
        content = path.read_bytes()
        value = yaml.load(content, Loader=LOADER) if path.suffix == ".yaml" else from_json(json.loads(content))
    except OSError as error:
        problems.append(f"{path.name}: {(error.strerror or str(error)).lower()}")
    except (ValueError, RecursionError) as error:
        problems.append(
            f"{path.name}: not JSON ({first_line(error)})" if path.suffix == ".json" else f"{path.name}: not YAML"
        )
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problems.append(f"{path.name}: not YAML" + (f" (line {mark.line + 1})" if mark else ""))
    else:
        if isinstance(value, dict):
            return {str(key): item for key, item in value.items()}
        problems.append(f"{path.name}: not a mapping of keys")
    return None


def alive(folder: Path) -> str:
    """``running``, ``killed`` or ``running?``: whether a process holds the lock of a folder without a result.

    A shared lock is asked for, and given back at once, so that askers do not see each other.
    """
    status = "running?"
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return status
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = "killed"
    except BlockingIOError:
        status = "running"
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(handle)
    return status


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay values, an empty mapping is nothing.

    >>> flatten({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1})
    {'optimizer.lr': 0.1, 'optimizer.betas': [0.9, 0.99], 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flat_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """``result.json`` with dotted keys; the final metrics go by their own names, the precision by the configuration's key."""
    final = result.get("final")
    flat = flatten(final) if isinstance(final, Mapping) else {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.") if key != "final" else {}
        elif key == "precision":
            flat["precision.name"] = value
        elif value is not None or key not in NESTED:
            flat[key] = value
    return flat


def first_line(text: object) -> str:
    """The first line of a message; empty for none."""
    return next(iter(str(text).strip().splitlines()), "") if text is not None else ""


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which 9 comes before 10."""
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders as short as they are still told apart: paths below the folder they have in common.

    ``<stamp>-<uid>`` becomes its uid where the uids differ.
    """
    paths = [folder.absolute() for folder in folders]
    if len(paths) < 2:
        return [path.name for path in paths]
    common = Path(os.path.commonpath([path.parent for path in paths]))
    names = [path.relative_to(common).as_posix() for path in paths]
    uids = [re.sub(r"^.*\d{8}-\d{6}-(?=[0-9a-z]+$)", "", name) for name in names]
    return uids if len(set(uids)) == len(uids) and max(map(len, uids)) < max(map(len, names)) else names
