"""One job of a sweep as a process of its own: whether it has to run, how it is started, and how it ended. No torch.

What becomes of a job follows from its folder (:func:`state_of`):

    result.json says ok                                        done: it is not run again
    cut off (interrupted, killed from outside, no result),
        and there is a checkpoint                              resumed: exact, so the result is that of an unbroken run
    anything else (failed, oom, diverged, never begun)         begun anew; what was there goes to ``.earlier``

In every case there is a ``result.json`` in the end: where the process could not write it, this module does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mprun.processes import last_words
from mprun.runs import newest_checkpoint
from mprun.sweeps.folder import Job, Sweep, release, set_aside, write_pid
from mprun.training.env import atomic_write_json, from_json

LOG, RESULT = "job.log", "result.json"
DONE, RESUME, FRESH = "done", "resume", "fresh"
# Whoever sends one of these has nothing against the run itself. (A crash of the run's own is SIGSEGV, SIGABRT, SIGBUS ...)
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT")
# What a result.json has; null in one that is written for a run that could not.
NUMBERS = (
    "name", "dataset", "precision", "seed", "steps_applied", "steps_skipped", "best", "checkpoint", "loss_scale", "train_s",
    "examples_per_s", "peak_memory", "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a job ended, here and now or before."""

    job: Job
    status: str
    reason: str = ""
    seconds: float | None = None
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metric(self) -> tuple[str, float] | None:
        """Name and value of the metric that is shown for the job."""
        final = self.result.get("final") or {}
        names = ("val/top1", "val/loss", "train/loss")
        return next(((name, float(final[name])) for name in names if final.get(name) is not None), None)

    @property
    def value(self) -> float | None:
        """What a sweeper that searches gets to see: the best value of the run's metric."""
        best = (self.result.get("best") or {}).get("value")
        return float(best) if best is not None else None


@dataclass
class Running:
    """A job that has been started."""

    job: Job
    process: subprocess.Popen[bytes]
    claim: int
    how: str
    begun: float
    log: IO[bytes]
    before: tuple[int, int] | None
    gpu: str | None = None


def read_result(folder: Path) -> dict[str, Any]:
    """``result.json`` of a run folder; empty where there is none that can be read."""
    try:
        found = from_json(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def state_of(folder: Path) -> str:
    """``done``, ``resume`` or ``fresh``; see the module's docstring."""
    result = read_result(folder)
    if result.get("status") == "ok":
        return DONE
    known = (folder / "config.yaml").is_file() and (folder / ".hydra" / "overrides.yaml").is_file()
    if not known or newest_checkpoint(folder / "checkpoints") is None:
        return FRESH
    cut_off = not result or result.get("status") == "interrupted" or result.get("signal") in FROM_OUTSIDE
    return RESUME if cut_off else FRESH


def failed_since(folder: Path, moment: float) -> bool:
    """Whether a job has failed after ``moment`` (seconds, by the clock of the file system), so that it has had its turn."""
    mark, status = _mark(folder), read_result(folder).get("status")
    late = mark is not None and mark[1] > moment * 1e9
    return late and status not in (None, "ok", "interrupted") and state_of(folder) == FRESH


def finished(sweep: Sweep) -> bool:
    """Whether every job of the sweep has ended well."""
    return bool(sweep.jobs) and all(job.hash and state_of(sweep.path(job)) == DONE for job in sweep.jobs)


def command(job: Job, folder: Path, how: str) -> list[str]:
    """The command line of a job's process."""
    trust = [word for word in job.words if word.lstrip("+").startswith("trust=")]
    words = [f"resume={folder}", *trust] if how == RESUME else [*job.words, f"hydra.run.dir={quoted(folder)}"]
    return [sys.executable, "-m", "mprun", *words]


def quoted(path: Path) -> str:
    """A path as Hydra's grammar reads it."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def start(
    sweep: Sweep,
    job: Job,
    claim: int,
    *,
    own_session: bool = True,
    env: Mapping[str, str] | None = None,
    gpu: str | None = None,
) -> Running:
    """Start the process of a claimed job, which is not done; its output goes to ``job.log``.

    Args:
        sweep: what it belongs to.
        job: composed without error.
        claim: from :func:`mprun.sweeps.folder.claim`; the process keeps it, too.
        own_session: the keyboard's Ctrl-C does not reach the process; whoever started it passes it on.
        env: environment variables beside those of this process.
        gpu: which GPU is meant by ``env``.
    """
    folder = sweep.path(job)
    how = state_of(folder)
    if how == FRESH:
        set_aside(sweep.folder, folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = command(job, folder, how)
    log = (folder / LOG).open("ab")
    log.write(f"$ mprun {' '.join(words[3:])}\n".encode())
    log.flush()
    begun = time.perf_counter()
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
            env={**os.environ, **(env or {})},
            pass_fds=(claim,) if os.name == "posix" else (),
        )
    except BaseException:
        log.close()
        raise
    write_pid(claim, process.pid)
    return Running(job, process, claim, how, begun, log, _mark(folder), gpu)


def finish(sweep: Sweep, running: Running, *, asked: int = 0) -> Outcome:
    """What became of a process that has ended. Writes ``result.json`` where it could not; lets go of the claim.

    Args:
        sweep: what it belongs to.
        running: its process has ended.
        asked: the signal with which it was asked to stop, if it was.
    """
    folder, code = sweep.path(running.job), running.process.returncode
    seconds = time.perf_counter() - running.begun
    running.log.close()
    try:
        result = read_result(folder)
        if not result or (code != 0 and _mark(folder) == running.before):
            result = _told(sweep, running, result, seconds, asked)
            atomic_write_json(folder / RESULT, result)
    finally:
        release(running.claim)
    return Outcome(running.job, str(result.get("status")), reason_of(result.get("error")), seconds, result)


def _told(sweep: Sweep, running: Running, before: Mapping[str, Any], seconds: float, asked: int) -> dict[str, Any]:
    """The result of a run that wrote none: why, and what an earlier life of it had reached."""
    code, log = running.process.returncode, sweep.path(running.job) / LOG
    if code < 0:
        name = _signal_name(-code)
        status = "interrupted" if asked and -code == asked else "failed"
        error = f"killed by {name} after {seconds:.0f} s"
        if name == "SIGKILL" and not asked:
            error += " (by hand, or because the system was out of memory)"
    elif asked and code in (128 + asked, 1, 2):
        name, status, error = _signal_name(asked), "interrupted", f"stopped by {_signal_name(asked)} before it began"
    else:
        name, status = None, "failed"
        error = last_words(log).removeprefix("mprun: error: ") or f"ended with status {code} and said nothing"
    return _result(sweep, running.job, status, error, before) | {"signal": name, "wall_s": seconds}


def _result(sweep: Sweep, job: Job, status: str, error: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    empty = dict.fromkeys(NUMBERS) | {"final": {}, "run_dir": str(sweep.path(job))}
    return {
        **empty,
        **(before or {}),
        "status": status,
        "error": error,
        "sweep": sweep.id,
        "overrides": list(job.swept),
    }


def refused(sweep: Sweep, job: Job) -> Outcome:
    """Say in a folder of its own why a job cannot be composed."""
    folder = sweep.path(job)
    folder.mkdir(parents=True, exist_ok=True)
    result = _result(sweep, job, "failed", job.error)
    atomic_write_json(folder / RESULT, result)
    (folder / "error.txt").write_text(job.error + "\n", encoding="utf-8")
    return Outcome(job, "failed", reason_of(job.error.partition(": ")[2] or job.error), None, result)


def record_failure(sweep: Sweep, job: Job, error: BaseException) -> None:
    """Say in the folder of a job why it failed, unless its run has said so itself."""
    folder = sweep.path(job)
    if not read_result(folder):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_json(folder / RESULT, _result(sweep, job, "failed", f"{type(error).__name__}: {error}"))


def done(sweep: Sweep, job: Job) -> Outcome:
    """The outcome of a job that had ended before."""
    result = read_result(sweep.path(job))
    return Outcome(job, str(result.get("status")), reason_of(result.get("error")), None, result)


def reason_of(text: object) -> str:
    """The first line of an error, without the name of its class."""
    line = next(iter(str(text or "").strip().splitlines()), "")
    name, colon, rest = line.partition(": ")
    return rest if colon and name.isidentifier() and name.endswith(("Error", "Exception")) else line


def _mark(folder: Path) -> tuple[int, int] | None:
    """What tells one ``result.json`` from another that was written in its place."""
    try:
        about = (folder / RESULT).stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
