"""What Hydra's launchers call for a job of a sweep, and how Hydra is called.

``hydra/launcher=basic`` runs the jobs in this process, one after the other: what a run may leave behind in torch and in
the environment is put back after each (:func:`contained`). Under every other launcher (joblib, submitit, ray) a job is a
process of its own, started by the launcher's worker, so that a crash takes nothing with it but the job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.compose import Composed, check, choices_of, compose_run, hydra_version_base, prepare, recorded, register
from mprun.compose_errors import check_words, translate
from mprun.errors import ConfigError, MprunError, report
from mprun.options import is_file, list_recipes, read_recipe, tree
from mprun.precision_files import read_precision
from mprun.report.run_folders import alive
from mprun.runs import SWEEP_FILE
from mprun.sweeps.folder import Job, Sweep, claim, read_sweep, release, running_pids, set_aside, stop_file
from mprun.sweeps.jobs import (
    DONE,
    RESUME,
    Outcome,
    Running,
    done,
    failed_since,
    finish,
    record_failure,
    refused,
    start,
    state_of,
)
from mprun.sweeps.plan import key_of, planned
from mprun.sweeps.pool import ELSEWHERE_S, handlers, say

PROCESS, GRID = "hydra_plugins.mprun_sweeps.ProcessLauncher", "hydra_plugins.mprun_sweeps.GridSweeper"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


@dataclass(frozen=True)
class Task:
    """A job as a launcher calls it, possibly in another process or on another machine: it travels there pickled.

    Attributes:
        sweep: the folder of the sweep.
        in_process: the run happens in the process that calls.
        on_error_stop: no further job begins once one has failed.
        raises: a failed job is an error to the sweeper, which is not ours.
        recipes: files of recipes, which only a process that has read them knows; ``precisions``: those of precision options.
        begun: when the sweep was issued, in seconds by the clock of its file system.
    """

    sweep: str
    in_process: bool
    on_error_stop: bool
    raises: bool
    recipes: tuple[str, ...]
    begun: float
    precisions: tuple[str, ...] = ()

    def __call__(self, node: DictConfig) -> float | None:
        """Run a job unless it is done. Returns the best value of its metric."""
        register()
        for name in self.recipes:
            read_recipe(name)
        for name in self.precisions:
            read_precision(name)
        sweep = read_sweep(Path(self.sweep))
        job = _job_of(sweep)
        outcome = self._run(sweep, job, node)
        if self.on_error_stop and outcome.status not in ("ok", "interrupted", "not run"):
            stop_file(sweep.folder).touch()
        if self.raises and outcome.status != "ok":
            raise MprunError(f"{job.label}: {outcome.status} {outcome.reason}".strip())
        return outcome.value

    def _run(self, sweep: Sweep, job: Job, node: DictConfig) -> Outcome:
        while True:
            if stop_file(sweep.folder).exists():
                return Outcome(job, "not run")
            handle = claim(sweep.folder, job.folder)
            if handle is not None and alive(sweep.path(job)) != "running":
                break
            if handle is not None:
                release(handle)
            time.sleep(ELSEWHERE_S)
        if state_of(sweep.path(job)) == DONE:
            release(handle)
            outcome = done(sweep, job)
            say(sweep, job, "done before", outcome)
            return outcome
        if failed_since(sweep.path(job), self.begun):  # in another process that was issued the same sweep
            release(handle)
            return done(sweep, job)
        say(sweep, job, "started")
        if self.in_process:
            outcome = _here(sweep, job, node, handle)
        else:
            outcome = _waited(sweep, start(sweep, job, handle, own_session=False))
        say(sweep, job, outcome.status, outcome)
        return outcome


def _job_of(sweep: Sweep) -> Job:
    """The job of ``sweep.json`` whose folder Hydra has given to this call; one of its own words where there is none."""
    from hydra.core.hydra_config import HydraConfig

    settings: Any = HydraConfig.get()
    folder = os.path.relpath(Path(settings.runtime.output_dir).resolve(), sweep.folder)
    for job in sweep.jobs:
        if job.hash and os.path.normpath(job.folder) == folder:
            return job
    words = [word for word in recorded(list(settings.overrides.task)) if key_of(word).partition(".")[0] != "sweep"]
    if not any(key_of(word) == "tracking.group" for word in words):
        words.append(f"tracking.group={sweep.id}")
    swept = tuple(word for word in settings.overrides.task if word not in sweep.words)
    return Job(int(settings.job.num) + 1, swept, tuple(words), folder, folder)


def _waited(sweep: Sweep, running: Running) -> Outcome:
    """Wait for the process of a job; what asks this process to stop asks the job."""
    process = running.process

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM if number == getattr(signal, "SIGHUP", None) else number)

    with handlers(pass_on):
        code = process.wait()
    stopped = stop_file(sweep.folder).exists() or code in (130, 143)
    return finish(sweep, running, asked=abs(code) % 128 if stopped else 0)


def _here(sweep: Sweep, job: Job, node: DictConfig, handle: int) -> Outcome:
    """Run a job in this process.

    Raises:
        SystemExit: it was stopped by a signal, which means the sweep.
    """
    from mprun.commands.train import execute

    folder, begun, code = sweep.path(job), time.perf_counter(), 0
    try:
        with contained():
            if state_of(folder) == RESUME:
                trust = [word for word in job.words if key_of(word) == "trust"]
                composed, resume = compose_run([f"resume={folder}", *trust])
            else:
                set_aside(sweep.folder, folder)
                (composed, _), resume = composed_of(node, job.words), None
            code = execute(composed.config, folder, resume=resume, composed=composed)
    except MprunError as error:
        report(error)
        record_failure(sweep, job, error)
    except Exception as error:
        traceback.print_exc()
        record_failure(sweep, job, error)
    finally:
        release(handle)
    outcome = done(sweep, job)
    if code > 128:
        say(sweep, job, outcome.status, outcome)
        raise SystemExit(code)
    return Outcome(job, outcome.status, outcome.reason, time.perf_counter() - begun, outcome.result)


@contextmanager
def contained() -> Iterator[None]:
    """Put back what a run in this process may leave changed: torch's switches and defaults, the environment, the folder."""
    import torch

    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    environ, folder = dict(os.environ), os.getcwd()
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.benchmark, cudnn.deterministic, matmul.fp32_precision, cudnn.conv.fp32_precision
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        # Asked first: setting it imports torch's compiler, which takes a second.
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (deterministic, warn_only):
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic, matmul.fp32_precision, cudnn.conv.fp32_precision = flags
        torch.backends.mha.set_fastpath_enabled(fast)


def composed_of(node: DictConfig, words: Sequence[str] | None = None) -> tuple[Composed, Path]:
    """What Hydra has composed for a call, checked as if it had been composed alone, and the folder that Hydra gave it.

    Args:
        node: the configuration, without Hydra's own.
        words: those that would run it again alone; Hydra's by default.

    Raises:
        ConfigError: not legal, or it asks to resume.
    """
    from hydra.core.hydra_config import HydraConfig

    settings: Any = HydraConfig.get()
    kept = OmegaConf.masked_copy(node, [str(key) for key in node])
    config = check(kept, command="train", folder=settings.runtime.cwd)
    if config.resume is not None:
        raise ConfigError(f"resume={config.resume} continues one run: give it without Hydra's flags")
    overrides = recorded(list(settings.overrides.task)) if words is None else tuple(words)
    return Composed(config, settings, overrides, choices_of(settings)), Path(settings.runtime.output_dir).resolve()


def through_hydra(now: Sweep, ready: Sequence[str], base: DictConfig) -> int:
    """Let Hydra's sweeper and launcher run the jobs. Returns the signal that stopped them, or 0."""
    begun = (now.folder / SWEEP_FILE).stat().st_mtime
    grid = base.hydra.sweeper._target_ == GRID
    if grid:
        for _ in planned(now, [word for word in ready if key_of(word) == "hydra.sweep.subdir"]):
            pass
        _refused(now)
    else:
        now.jobs = []
        now.save()
    in_process = base.hydra.launcher._target_ == BASIC
    task = Task(
        str(now.folder),
        in_process=in_process,
        on_error_stop=base.sweep.on_error.name == "stop",
        raises=not grid,
        recipes=_files(now.words, "recipe"),
        begun=begun,
        precisions=_files(now.words, "precision"),
    )
    stopped = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        number = signal.SIGTERM if number == getattr(signal, "SIGHUP", None) else number
        again, stopped = bool(stopped), stopped or number
        stop_file(now.folder).touch()
        for pid in running_pids(now.folder):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if again else number)
        if again:
            raise KeyboardInterrupt

    words = [word for word in recorded(ready) if key_of(word) != "hydra.sweep.dir"]
    words.append(f'hydra.sweep.dir="{now.folder}"')
    if in_process:  # a run in this process has handlers of its own
        return by_hydra(["-m"], words, task)
    with handlers(handle):
        by_hydra(["-m"], words, task)
    return stopped


def _files(words: Sequence[str], group: str) -> tuple[str, ...]:
    """The files that words give to a group, whose options they are only where they have been read."""
    values = dict.fromkeys(word.partition("=")[2] for word in words if word.startswith(f"{group}="))
    return tuple(name for value in values for name in value.split(",") if is_file(name))


def _refused(now: Sweep) -> None:
    for job in now.jobs:
        if job.error:
            say(now, job, "failed", refused(now, job))


def by_hydra(flags: Sequence[str], ready: Sequence[str], task: Any) -> int:
    """Hand flags and words to Hydra, and ``task`` for the jobs. Returns 0, or the signal that stopped a job."""
    import hydra
    from hydra.errors import HydraException

    register()
    for name in list_recipes():
        try:
            read_recipe(name)
        except MprunError as error:
            # One malformed recipe must not stop runs that do not use it.
            print(f"mprun: warning: {error}", file=sys.stderr)
    ready = prepare(ready)
    check_words(ready)
    sys.argv = ["mprun", *flags, *ready]
    entry = hydra.main(version_base=hydra_version_base(), config_path=str(tree("conf")), config_name="config")(task)
    try:
        entry()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(translate(error, ready)) from error
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
        if code > 128:
            return code - 128
        raise
    return 0


def single(node: DictConfig) -> None:
    """What Hydra calls for a run that was started with one of its flags."""
    from mprun.commands.train import execute

    composed, folder = composed_of(node)
    if code := execute(composed.config, folder, composed=composed):
        raise SystemExit(code)
