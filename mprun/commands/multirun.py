"""``-m`` sweeps, and Hydra's own flags (``--cfg``, ``--info``, ``--shell-completion`` ...).

A sweep is a folder with a ``sweep.json`` and a run folder for each job. Its jobs run in processes of their own, started
here (``mprun.sweeps.pool``); with another ``hydra/launcher`` or ``hydra/sweeper`` Hydra starts them, and what it calls
for each is :class:`mprun.commands.sweep_task.Task`. The folders, what is skipped
and resumed, and the table at the end are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mprun import __version__
from mprun.commands import VALUED_FLAGS
from mprun.commands.sweep_task import GRID, PROCESS, by_hydra, single, through_hydra
from mprun.compose import check_words, compose_node, prepare, register
from mprun.config_check import RANGES
from mprun.errors import CheckpointError, ConfigError
from mprun.report.summary import shown_path
from mprun.runs import SWEEP_FILE
from mprun.sweeps.folder import Job, Sweep, newest_with, read_sweep, save_first, stop_file
from mprun.sweeps.jobs import finished
from mprun.sweeps.plan import expand, identity, key_of, new_folder, plan, planned, refuse
from mprun.sweeps.pool import cores, run_pool
from mprun.sweeps.summary import print_table, rows_of
from mprun.training.env import PACKAGES
from mprun.training.host import git_state, versions

SWEEP_FLAGS = ("-m", "--multirun")


def run(words: Sequence[str]) -> int:
    """A sweep, or what one of Hydra's flags asks for. Returns the exit status."""
    flags, overrides = split_flags(words)
    if not set(flags) & set(SWEEP_FLAGS):
        return by_hydra(flags, overrides, single)
    if others := [flag for flag in flags if flag not in SWEEP_FLAGS]:
        raise ConfigError(
            f"{others[0]} does not go with -m; a folder with more options is hydra.searchpath=[file://...]"
        )
    return sweep(overrides)


def sweep(overrides: Sequence[str], folder: Path | None = None) -> int:
    """Begin a sweep or go on with it. Returns 0, 1 where a job failed, 130 and 143 after a signal.

    Args:
        overrides: the words, without flags.
        folder: of the sweep to go on with; found by the words if it is not given.

    Raises:
        ConfigError: no job could run with these words. Nothing was created.
    """
    register()
    ready = prepare(overrides)
    check_words(ready)
    refuse(ready, ())
    base = _base(ready)
    jobs = expand(ready, {str(key): str(value) for key, value in (base.hydra.sweeper.get("params") or {}).items()})
    now, begun = _which(ready, base, jobs, folder)
    end = 1
    try:
        end = _run(now, ready, base, begun=begun)
    finally:
        if (now.folder / SWEEP_FILE).is_file():
            if begun and finished(now):
                print("all jobs of this sweep are finished; sweep.new=true begins a new one")
            print_table(now)
    return end


def _base(ready: Sequence[str]) -> DictConfig:
    """The configuration of the sweep itself: that of words which are not swept.

    Raises:
        ConfigError: they do not fit, or ask of ``sweep.*`` what is not legal.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    base = compose_node([word for word in ready if not parser.parse_override(word).is_sweep_override()])
    legal, test = RANGES["sweep.jobs"]
    if not test(base.sweep.jobs):
        raise ConfigError(f"sweep.jobs={base.sweep.jobs} is not legal: {legal}")
    given = {key_of(word) for word in ready}
    if "sweep.jobs" in given and base.hydra.launcher._target_ != PROCESS:
        raise ConfigError(
            "sweep.jobs is for hydra/launcher=process; other launchers have a key of their own, such as hydra.launcher.n_jobs"
        )
    return base


def _which(ready: Sequence[str], base: DictConfig, jobs: list[Job], folder: Path | None) -> tuple[Sweep, bool]:
    """The sweep that these words mean, and whether it had begun before.

    Raises:
        ConfigError: no job could run.
        CheckpointError: the folder holds another sweep.
    """
    words = identity(ready)
    explicit = folder or (new_folder(base, jobs) if any(key_of(word) == "hydra.sweep.dir" for word in ready) else None)
    old = None
    if explicit is not None and (explicit / SWEEP_FILE).is_file():
        old = read_sweep(explicit)
        if old.words != words:
            raise CheckpointError(
                f"{explicit} holds the sweep of other words: {' '.join(old.words)}\nchoose another folder, or these words"
            )
    elif explicit is None and not base.sweep.new:
        old = newest_with(words)
    before = old.folder if old else None
    place = explicit or (old.folder if old else new_folder(base, jobs))
    # The first job tells whether the words still mean what they meant; the others are composed one by one.
    jobs[0] = plan(jobs[0], Sweep(place, ()).id, _where(ready))
    refuse(ready, jobs)
    if old is not None and old.jobs and old.jobs[0].hash and old.jobs[0].hash != jobs[0].hash:
        if explicit is not None:
            raise CheckpointError(f"{place}: these words mean another configuration by now; choose another folder")
        print("these words mean another configuration than when they were last issued: a new sweep")
        old, place = None, new_folder(base, jobs)
        jobs[0] = plan(jobs[0], Sweep(place, ()).id, _where(ready))
    if old is None:
        fresh = Sweep(place, words, jobs, {"created": datetime.now(UTC).isoformat(timespec="seconds")})
        if explicit is None and not base.sweep.new:
            old = save_first(fresh, before)
        if old is None:
            return fresh, False
    known = {job.swept: job for job in old.jobs if job.hash}
    trust = [word for word in ready if key_of(word) == "trust"]
    old.jobs = [_trusted(known[job.swept], job.number, trust) if job.swept in known else job for job in jobs]
    return old, True


def _trusted(job: Job, number: int, trust: Sequence[str]) -> Job:
    """A job from ``sweep.json`` with the trust of this command line: a folder may come from a stranger."""
    kept = tuple(word for word in job.words if key_of(word) != "trust")
    return replace(job, number=number, words=(*kept, *trust))


def _where(ready: Sequence[str]) -> list[str]:
    return [word for word in ready if key_of(word) == "hydra.sweep.subdir"]


def _run(now: Sweep, ready: Sequence[str], base: DictConfig, *, begun: bool) -> int:
    """Run what is left of a sweep. Returns the exit status."""
    about = {"cwd": os.getcwd(), "launcher": str(base.hydra.launcher._target_).rpartition(".")[2]}
    now.about = {**about, **now.about}
    now.save()
    stop_file(now.folder).unlink(missing_ok=True)
    for line in _opening(now, base):
        print(line, flush=True)
    if (base.hydra.launcher._target_, base.hydra.sweeper._target_) == (PROCESS, GRID):
        pool = run_pool(
            now,
            _described(now, planned(now, _where(ready)), begun=begun),
            width=int(base.sweep.jobs),
            on_error_stop=base.sweep.on_error.name == "stop",
        )
        stopped = pool.signal
    else:
        stopped = through_hydra(now, ready, base)
    _describe(now, begun=False)
    if stopped:
        return 128 + stopped
    rows = rows_of(now)
    return 0 if rows and all(row.status == "ok" for row in rows) else 1


def _opening(now: Sweep, base: DictConfig) -> Iterator[str]:
    count, jobs = len(now.jobs), int(base.sweep.jobs)
    yield f"sweep of {count} job{'s' * (count != 1)} in {shown_path(now.folder)}"
    if jobs > 1:
        share = max(1, cores() // jobs)
        given = os.environ.get("OMP_NUM_THREADS")
        yield f"{jobs} at once, OMP_NUM_THREADS={given or share} each" + (" (as set)" if given else "")


def _described(now: Sweep, jobs: Iterator[Job], *, begun: bool) -> Iterator[Job]:
    """Write down commit and versions once the first job has been started, which need not wait for it."""
    for index, job in enumerate(jobs):
        if index == 1:
            _describe(now, begun=begun)
        yield job


def _describe(now: Sweep, *, begun: bool) -> None:
    """Write down commit and versions; say so where a sweep goes on with another commit."""
    git = git_state(Path(__file__).parent, tracked=Path(__file__).name) or git_state(Path.cwd()) or {}
    about = {
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "versions": {"mprun": __version__, **versions(PACKAGES)},
    }
    if "commit" not in now.about:
        now.about |= about
        now.save()
    elif begun and now.about["commit"] != about["commit"]:
        print(f"the sweep began at commit {_short(now.about['commit'])}, and goes on at {_short(about['commit'])}")


def _short(commit: Any) -> str:
    return str(commit)[:10] if commit else "unknown"


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (with their values) and the overrides of ``words``: Hydra's parser wants the flags first."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in VALUED_FLAGS:
            flags += [value for value in [next(rest, None)] if value is not None]
    return flags, overrides
