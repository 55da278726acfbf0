"""The loop of a worker: take trials, watch their runs, stop the bad ones early, tell the study how they ended.

    until the study has its trials, time is up, or a signal arrives:
        end what dead workers left behind
        start trials while fewer than ``tune.jobs`` run
        look at each run: new evaluations -> report -> stop it early?  gone -> tell

One thread, no waiting for a single run. Nothing of a worker is needed to go on: the study and the run folders say it all.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mprun.errors import ConfigError
from mprun.report.run_folders import alive
from mprun.runs import locked, newest_checkpoint, turn
from mprun.sweeps.jobs import quoted, read_result
from mprun.sweeps.pool import free_gpu, gpus, handlers, threads
from mprun.tracking.jsonl import METRICS_FILE
from mprun.tuning.settings import Direction, TuneConfig
from mprun.tuning.space import Parameter, words_of
from mprun.tuning.study import BEAT_S, WORKERS, close, ended, left_behind, replace
from mprun.tuning.trial import Child, Curve, End, end_of, start, value_of

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

POLL_S = 0.1
# A run that was asked to stop saves first; one that does not get there is ended.
PATIENCE_S = 120.0
Say = Callable[[str], None]


@dataclass
class Running:
    """A trial of this worker."""

    trial: Trial
    child: Child
    curve: Curve
    beat: float


@dataclass
class Worker:
    """One process that works on a study."""

    study: Study
    settings: TuneConfig
    space: Sequence[Parameter]
    fixed: Sequence[str]
    folder: Path
    say: Say
    name: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(3)}")
    running: list[Running] = field(default_factory=list)
    stop: int | None = None
    killing: bool = False


def work(worker: Worker) -> int | None:
    """Work on the study until it has its trials. Returns the signal that stopped the worker, if one did."""
    own = worker.folder / WORKERS / worker.name
    own.mkdir(parents=True)
    begin, limit = time.monotonic(), worker.settings.timeout_s
    with locked(own), handlers(_stopper(worker)):
        try:
            while True:
                orphans = recover(worker)
                late = limit is not None and time.monotonic() - begin > limit
                if worker.stop is None and not late:
                    fill(worker)
                if not worker.running and (not orphans or worker.stop is not None or late):
                    return worker.stop
                for running in list(worker.running):
                    look(worker, running)
                time.sleep(POLL_S)
        finally:
            for running in worker.running:
                running.child.kill()
            shutil.rmtree(own, ignore_errors=True)


def recover(worker: Worker) -> int:
    """End the trials of dead workers. Returns how many of their runs are still alive: those end by themselves."""
    waiting = 0
    for trial in left_behind(worker.study, worker.folder, worker.name):
        folder = folder_of(worker.folder, trial)
        if alive(folder) == "running":
            waiting += 1
            continue
        end = end_of(folder, None)
        curve = Curve(folder / METRICS_FILE, str(worker.settings.metric))
        curve.update()
        value, why = value_of(curve, maximize=worker.settings.direction is Direction.maximize)
        if end.status == "ok" and value is not None:
            from optuna.exceptions import UpdateFinishedTrialError

            with suppress(UpdateFinishedTrialError, ValueError):
                worker.study.tell(trial.number, value)
                worker.say(f"trial {trial.number}: its worker was gone, its run had ended: {value:.6g}")
            continue
        if read_result(folder).get("status", "interrupted") != "interrupted":
            # The run has ended by itself, and would do so again.
            status, reason = ("failed", why) if end.status == "ok" else (end.status, end.reason)
            if close(worker.study, trial, {"status": status, "reason": reason}):
                worker.say(f"trial {trial.number}: its worker was gone, its run had ended: {status} {reason}")
            continue
        again = replace(worker.study, trial, end.reason or "its worker died", retry=True)
        worker.say(f"trial {trial.number}: its worker died" + ("; its values are tried again" if again else ""))
    return waiting


def fill(worker: Worker) -> None:
    """Start trials while the study needs more than there are, and this worker has room."""
    from optuna.trial import TrialState

    while len(worker.running) < worker.settings.jobs and worker.stop is None:
        with turn(worker.folder):
            taken = worker.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if len(ended(worker.study)) + len(taken) >= worker.settings.trials:
                return
            trial = worker.study.ask({part.key: part.distribution() for part in worker.space})
            trial.set_user_attr("worker", worker.name)
            trial.set_user_attr("beat", time.time())
        try:
            worker.running.append(begin_trial(worker, trial))
        except ConfigError as error:
            failed(worker, trial, End("refused", str(error).splitlines()[0]))


def begin_trial(worker: Worker, trial: Trial) -> Running:
    """Start the run of ``trial``: from its beginning, or from where the trial that it replaces was stopped.

    Raises:
        ConfigError: its values are not legal together.
    """
    folder = folder_of(worker.folder, trial)
    if newest_checkpoint(folder / "checkpoints") is not None and folder.name != str(trial.number):
        # Only what a run folder does not say of itself.
        words = [f"resume={folder}", *(word for word in worker.fixed if word.startswith("trust="))]
    else:
        folder = worker.folder / str(trial.number)
        words = [*words_of(worker.fixed, worker.space, trial.params), f"hydra.run.dir={quoted(folder)}"]
    folder.mkdir(parents=True, exist_ok=True)
    trial.set_user_attr("folder", folder.name)
    gpu = free_gpu(gpus(os.environ), [running.child.gpu for running in worker.running])
    child = start(words, folder, threads(worker.settings.jobs, os.environ), gpu)
    curve = Curve(folder / METRICS_FILE, str(worker.settings.metric))
    return Running(trial, child, curve, time.time())


def folder_of(folder: Path, trial: Trial | FrozenTrial) -> Path:
    """Where the run of ``trial`` is. Its name comes from the storage, so workers never share one by chance."""
    name = str(trial.user_attrs.get("folder", trial.number))
    return folder / (name if name.isdigit() else str(trial.number))


def look(worker: Worker, running: Running) -> None:
    """See what a run has measured since, and whether it is gone."""
    child, now = running.child, time.time()
    gone = child.ended()  # before the curve is read for the last time
    new = running.curve.update()
    if gone:
        worker.running.remove(running)
        finish(worker, running)
        return
    if now - running.beat > BEAT_S:
        running.beat = now
        running.trial.set_user_attr("beat", now)
    if worker.stop is not None:
        child.ask("stopped")
    elif new and not child.asked and _hopeless(running):
        child.ask("pruned")
    if worker.killing or (child.asked and time.monotonic() - child.asked_at > PATIENCE_S):
        child.kill()


def _hopeless(running: Running) -> bool:
    """Report what is new; whether the study would rather stop this trial.

    Its steps are evaluations, counted from 1: with another batch size an epoch has other steps, and nothing could be
    compared. NaN is not reported: what to do about it is decided by the run.
    """
    values = running.curve.ordered()
    told = running.trial.study.get_trials(deepcopy=False)[running.trial.number].intermediate_values
    for number, value in enumerate(values, start=1):
        if number not in told and math.isfinite(value):
            running.trial.report(value, number)
    return bool(values) and math.isfinite(values[-1]) and running.trial.should_prune()


def finish(worker: Worker, running: Running) -> None:
    """Tell the study how a trial ended."""
    from optuna.trial import TrialState

    trial, child = running.trial, running.child
    end = end_of(child.folder, child.process.returncode)
    trial.set_user_attr("status", end.status)
    trial.set_user_attr("seconds", round(time.monotonic() - child.started, 2))
    stopped = end.status in ("interrupted", "killed")
    if end.status == "ok":
        value, reason = value_of(running.curve, maximize=worker.settings.direction is Direction.maximize)
        if value is not None:
            worker.study.tell(trial, value)
            worker.say(_told(worker, trial, "ok", f"{worker.settings.metric} {value:.6g}"))
            return
        end = End("failed", reason)
    elif stopped and child.asked == "pruned":
        trial.set_user_attr("status", "pruned")
        worker.study.tell(trial, state=TrialState.PRUNED)
        values = running.curve.ordered()
        worker.say(
            _told(worker, trial, "pruned", f"{worker.settings.metric} {values[-1]:.6g} at evaluation {len(values)}")
        )
        return
    elif stopped and child.asked == "stopped":
        frozen = worker.study.get_trials(deepcopy=False)[trial.number]
        replace(worker.study, frozen, "stopped with its worker", retry=False)
        worker.say(_told(worker, trial, "stopped", "goes on when the study does"))
        return
    failed(worker, trial, end)


def failed(worker: Worker, trial: Trial, end: End) -> None:
    """Tell the study that a trial has no value."""
    from optuna.trial import TrialState

    trial.set_user_attr("status", end.status)
    trial.set_user_attr("reason", end.reason)
    worker.study.tell(trial, state=TrialState.FAIL)
    worker.say(_told(worker, trial, end.status, end.reason))


def _told(worker: Worker, trial: Trial, state: str, what: str) -> str:
    """One line about a trial that has ended."""
    done = len(ended(worker.study))
    values = " ".join(part.word(_short(trial.params[part.key])) for part in worker.space)
    return f"{done}/{worker.settings.trials}  trial {trial.number}  {state:<7} {what}  {values}"


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _stopper(worker: Worker) -> Callable[[int, FrameType | None], None]:
    """SIGINT and SIGTERM ask the worker to stop; a second one ends its runs at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if worker.stop is None:
            worker.stop = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            worker.say(f"{signal.Signals(number).name}: the runs save and stop; once more to kill them")
        else:
            worker.killing = True

    return handle
