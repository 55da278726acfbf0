"""Between Hydra's launchers and sweepers and the jobs of a sweep. Imports no torch.

``hydra/sweeper=grid`` asks here which jobs are left to do, whatever launcher runs them. ``hydra/launcher=process`` runs
here the batches of any other sweeper, which thinks them out one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mprun.compose import prepare, recorded
from mprun.errors import MprunError
from mprun.runs import SWEEP_FILE
from mprun.sweeps.folder import Job, Sweep, read_sweep
from mprun.sweeps.jobs import DONE, Outcome, done, state_of
from mprun.sweeps.plan import key_of, planned
from mprun.sweeps.pool import run_pool


def left(folder: str) -> list[list[str]]:
    """The overrides of the jobs in ``folder``/``sweep.json`` that have to run, as Hydra takes them."""
    sweep = read_sweep(Path(folder))
    return [
        [*prepare(job.words), f"hydra.sweep.subdir={job.folder}"]
        for job in sweep.jobs
        if job.hash and job.same_as is None and state_of(sweep.path(job)) != DONE
    ]


def launch(config: Any, batches: Sequence[Sequence[str]], first: int) -> list[Any]:
    """Run a batch of jobs that a sweeper has thought out, each in a process of its own.

    Args:
        config: Hydra's, of the sweep.
        batches: the overrides of each job.
        first: the number of the first one, from 0.

    Returns:
        A ``JobReturn`` for each: the best value of its metric, or its error.
    """
    from hydra.core.utils import JobReturn, JobStatus

    folder = Path(str(config.hydra.sweep.dir)).resolve()
    sweep = read_sweep(folder) if (folder / SWEEP_FILE).is_file() else Sweep(folder, ())
    jobs = [
        Job(first + index + 1, tuple(words), recorded([word for word in words if not _hydra(word)]))
        for index, words in enumerate(batches)
    ]
    sweep.jobs[first:] = jobs
    sweep.save()
    how = [word for words in batches[:1] for word in words if key_of(word) == "hydra.sweep.subdir"]
    pool = run_pool(
        sweep,
        planned(sweep, how, first=first),
        width=int(config.sweep.jobs),
        on_error_stop=config.sweep.on_error.name == "stop",
    )
    by_number = {outcome.job.number: outcome for outcome in pool.outcomes}
    if pool.signal:
        raise SystemExit(128 + pool.signal)
    returns = []
    for job in sweep.jobs[first:]:
        outcome = by_number.get(job.same_as or job.number)
        if outcome is None:  # of an earlier batch, or stopped before it began
            outcome = done(sweep, job) if job.same_as is not None else Outcome(job, "not run")
        ret = JobReturn(overrides=list(batches[job.number - first - 1]))
        ret.status = JobStatus.COMPLETED if outcome.status == "ok" else JobStatus.FAILED
        ret.return_value = outcome.value if outcome.status == "ok" else MprunError(outcome.reason or outcome.status)
        returns.append(ret)
    return returns


def _hydra(word: str) -> bool:
    return key_of(word).startswith(("hydra.", "hydra/", "sweep."))
