"""The folder of a sweep: ``sweep.json``, the folders of its jobs, and who runs which of them. Imports no torch.

``sweep.json`` says what the sweep consists of: words, folder of the call, commit, versions, and for each job its words,
the hash of its configuration and its folder. It never says how a job ended: that is in the job's own ``result.json``,
which cannot be out of date.

Whoever starts a job holds a claim on it: a lock on ``.claims/<folder>``, which the job's process inherits. So it lasts
until both have ended, however they ended, and two processes that issue the same sweep share its jobs.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprun.errors import CheckpointError
from mprun.runs import LOCK_FILE, OUTPUTS, SWEEP_FILE, slug, turn
from mprun.training.env import atomic_write_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SWEEPS = "sweeps"
CLAIMS, EARLIER, STOP = ".claims", ".earlier", "stop"
FORMAT = 1


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        number: from 1, in the order of the words.
        swept: the words in which the jobs differ.
        words: all words of its run, as if it were started alone.
        hash: of its configuration; empty as long as it is not composed, and where it cannot be.
        folder: of its run, below the folder of the sweep; empty as long as it is not composed.
        error: why it cannot be composed.
        same_as: the number of an earlier job with the same configuration.
        left_out: words that do nothing beside the others of this job, and are not among its ``words``.
    """

    number: int
    swept: tuple[str, ...]
    words: tuple[str, ...]
    hash: str = ""
    folder: str = ""
    error: str = ""
    same_as: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What tells the job from the others, for people."""
        return " ".join(self.swept)


@dataclass
class Sweep:
    """A sweep and its folder. ``words`` are as typed, but with absolute paths; ``about`` says where it comes from."""

    folder: Path
    words: tuple[str, ...]
    jobs: list[Job] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """What names the sweep elsewhere: the group of its runs in W&B, ``sweep`` in their ``env.json``."""
        return slug(self.folder.name)

    def save(self) -> None:
        """Write ``sweep.json``, and make the folder."""
        content = {
            "format": FORMAT,
            "id": self.id,
            "words": self.words,
            **self.about,
            "jobs": [vars(job) for job in self.jobs],
        }
        try:
            (self.folder / CLAIMS).mkdir(parents=True, exist_ok=True)
            atomic_write_json(self.folder / SWEEP_FILE, content)
        except OSError as error:
            raise CheckpointError(f"cannot write the folder of the sweep, {self.folder}: {error.strerror}") from error

    def path(self, job: Job) -> Path:
        """The run folder of ``job``."""
        return self.folder / job.folder


def read_sweep(folder: Path) -> Sweep:
    """The sweep in ``folder``.

    Raises:
        CheckpointError: there is none, or its ``sweep.json`` cannot be read.
    """
    path = folder / SWEEP_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{path} was written by another version of mprun: start a new sweep")
        jobs = [_job(item) for item in content.pop("jobs")]
        words = tuple(map(str, content.pop("words")))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no sweep: it has no {SWEEP_FILE}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    content.pop("id", None)
    return Sweep(folder, words, jobs, content)


def _job(item: dict[str, Any]) -> Job:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    return Job(**values)


def newest_with(words: Sequence[str], outputs: Path | None = None, *, kind: str = SWEEPS) -> Sweep | None:
    """The newest sweep below ``outputs/sweeps`` (or another ``kind``) that was issued with the same words; None without one."""
    found = []
    for path in (outputs or Path(OUTPUTS)).glob(f"{kind}/*/*/{SWEEP_FILE}"):
        try:
            sweep = read_sweep(path.parent.resolve())
        except CheckpointError:
            continue
        if sweep.words == tuple(words):
            found.append(sweep)
    return max(found, key=lambda sweep: (str(sweep.about.get("created")), sweep.folder.name), default=None)


def save_first(sweep: Sweep, before: Path | None) -> Sweep | None:
    """Save a new sweep below ``outputs/sweeps``, unless the same one has just been begun by another process.

    Args:
        sweep: its first job is composed.
        before: the folder of an earlier sweep with the same words that is not to be gone on with.

    Returns:
        The other process's sweep; None if ``sweep`` was saved.
    """
    place = Path(OUTPUTS, SWEEPS)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {place}: {error.strerror}") from error
    with turn(place):
        other = newest_with(sweep.words)
        if other is not None and other.folder != before and other.jobs and other.jobs[0].hash == sweep.jobs[0].hash:
            return other
        sweep.save()
    return None


def claim(sweep: Path, name: str) -> int | None:
    """Take the job in folder ``name`` for this process and those that it starts with this file open.

    Returns:
        An open file, to be closed by :func:`release`; None while somebody else has the job.
    """
    handle = os.open(_claim_file(sweep, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(handle)
            return None
        # A file system without locks: nobody is kept out.
    return handle


def release(handle: int) -> None:
    """Let go of a job; a process that still has the file open keeps it."""
    os.close(handle)


def _claim_file(sweep: Path, name: str) -> Path:
    return sweep / CLAIMS / (slug(name) if name not in ("", ".") else "job")


def write_pid(handle: int, pid: int) -> None:
    """Write into a claim which process runs the job, for :func:`running_pids`."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps({"host": os.uname().nodename, "pid": pid}).encode(), 0)


def running_pids(sweep: Path) -> list[int]:
    """The processes of this machine that run jobs of the sweep right now."""
    pids = []
    for path in (sweep / CLAIMS).iterdir():
        try:
            about = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        handle = claim(sweep, path.name)
        if handle is not None:
            release(handle)
        elif about.get("host") == os.uname().nodename:
            pids.append(int(about["pid"]))
    return pids


def set_aside(sweep: Path, folder: Path) -> None:
    """Move what an earlier attempt has left in a job's folder to ``.earlier``: the job begins anew, and nothing is lost."""
    if not folder.is_dir():
        return
    keep = (CLAIMS, EARLIER, SWEEP_FILE, LOCK_FILE)
    entries = [entry for entry in folder.iterdir() if entry.name not in keep]
    if not entries:
        return
    place = sweep / EARLIER / f"{slug(folder.name)}-{uuid.uuid4().hex[:6]}"
    place.mkdir(parents=True)
    for entry in entries:
        entry.rename(place / entry.name)


def stop_file(sweep: Path) -> Path:
    """While this file exists, no further job of the sweep begins."""
    return sweep / CLAIMS / STOP
