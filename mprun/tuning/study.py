"""A study: where its trials are kept, who proposes their values, and which of them nobody is running any more.

The storage is a database of Optuna's: SQLite in the study's folder, or any URL. Every worker of a study talks to it, and
to nothing else but the study's folder. A trial goes through these states::

    WAITING  --a worker takes it-->  RUNNING  -->  COMPLETE (a finite value) | PRUNED (stopped early) | FAIL

A worker that dies leaves RUNNING trials behind. They are found by the worker's lock, where its folder is on this disk, and
by the age of its last sign of life otherwise. Such a trial becomes FAIL, marked as ``replaced``, and a new one with the same
values waits in its place. Replaced trials count for nothing; the sampler does not look at them either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.errors import ConfigError
from mprun.report.run_folders import alive
from mprun.runs import LOCK_FILE, turn
from mprun.tuning.settings import PREFIX, Pruner, Sampler, TuneConfig
from mprun.tuning.space import Parameter, key_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

WORKERS = "workers"
ABOUT = "mprun"
# A worker on another disk gives a sign of life this often, and is taken for dead after so long without one.
BEAT_S, DEAD_S = 30.0, 300.0
# How often a trial is run again whose worker died.
RETRIES = 1
DATABASE = "study.db"


def open_study(settings: TuneConfig, folder: Path, space: Sequence[Parameter], fixed: Sequence[str]) -> Study:
    """The study of this name, new or gone on with.

    Args:
        settings: completed.
        folder: of the study; it exists.
        space: the searched keys.
        fixed: the words that all trials share.

    Raises:
        ConfigError: the storage cannot be used, or its study searches something else.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.INFO if settings.verbose else optuna.logging.ERROR)
    url = storage_url(settings, folder)
    about = describe(settings, space, fixed)
    try:
        with turn(folder):
            # Workers wait for each other's transactions; SQLite gives up after five seconds otherwise.
            wait = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
            storage = optuna.storages.RDBStorage(url, engine_kwargs=wait)
            study = optuna.create_study(
                study_name=settings.study,
                storage=storage,
                direction=settings.direction.value if settings.direction else None,
                sampler=addressed(settings),
                pruner=build_pruner(settings),
                load_if_exists=True,
            )
            if ABOUT not in study.user_attrs:
                if study.trials:
                    raise ConfigError(
                        f"{PREFIX}study={settings.study} is a study of another program; choose another name"
                    )
                if any(path.name.isdigit() for path in folder.iterdir()):
                    raise ConfigError(
                        f"{folder} holds the trials of a study that is not in {shown_url(url)}\n"
                        f"choose another {PREFIX}study, give the storage of that one, or remove the folder"
                    )
                study.set_user_attr(ABOUT, about)
    except (SQLAlchemyError, ImportError, RuntimeError) as error:
        said = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise ConfigError(
            f"{PREFIX}storage={shown_url(url)} cannot be used: {said[0] if said else type(error).__name__}\n"
            "give a file, or a database URL whose driver is installed, such as sqlite:///study.db"
        ) from error
    refuse_other(study.user_attrs[ABOUT], about, str(settings.study))
    return study


def storage_url(settings: TuneConfig, folder: Path) -> str:
    """The database URL; a plain path means an SQLite file."""
    where = settings.storage or str(folder / DATABASE)
    return where if "://" in where else f"sqlite:///{Path(where).expanduser().absolute()}"


def shown_url(url: str) -> str:
    """The URL without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url.partition("://")[0] + "://..."


def describe(settings: TuneConfig, space: Sequence[Parameter], fixed: Sequence[str]) -> dict[str, Any]:
    """What makes trials comparable: what is searched, what is fixed, what is optimized."""
    assert settings.direction is not None, "settings are completed"
    return {
        "searched": {key_of(part.key): part.text.replace(" ", "") for part in space},
        "fixed": {key_of(word): word.partition("=")[2] for word in fixed if not key_of(word).startswith("tracking")},
        "optimized": {"metric": settings.metric, "direction": settings.direction.value},
    }


def refuse_other(then: Mapping[str, Any], now: Mapping[str, Any], name: str) -> None:
    """Refuse to mix trials that cannot be compared.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    told = []
    for part in ("searched", "fixed", "optimized"):
        old, new = then.get(part, {}), now[part]
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                told.append(f"{key}: {part} {old.get(key, '(nothing)')} then, {new.get(key, '(nothing)')} now")
    if told:
        lines = "\n".join(told)
        raise ConfigError(f"{PREFIX}study={name} holds trials of another search; give this one another name\n{lines}")


def build_sampler(kind: Sampler, seed: int) -> BaseSampler:
    """The sampler of Optuna's for ``kind``."""
    from optuna.samplers import RandomSampler, TPESampler

    return RandomSampler(seed=seed) if kind is Sampler.random else TPESampler(seed=seed)


def build_pruner(settings: TuneConfig) -> BasePruner:
    """The pruner of Optuna's; its steps are evaluations of a run, counted from 1."""
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if settings.pruner is Pruner.median:
        return MedianPruner(n_startup_trials=settings.startup, n_warmup_steps=settings.warmup + 1)
    if settings.pruner is Pruner.hyperband:
        return HyperbandPruner(min_resource=settings.warmup + 1, max_resource="auto")
    return NopPruner()


def addressed(settings: TuneConfig) -> BaseSampler:
    """The sampler, whose random numbers belong to (seed, number of the trial).

    Otherwise a worker that starts with the study's seed would propose again what the first one did: a study that is gone
    on with would repeat its first trials, and two workers would run everything twice.
    """
    from optuna.samplers import BaseSampler

    class Addressed(BaseSampler):
        inner = build_sampler(settings.sampler, settings.seed)

        def before_trial(self, study: Study, trial: FrozenTrial) -> None:
            # Trial numbers stay far below this prime, so no two pairs share a seed in practice.
            self.inner = build_sampler(settings.sampler, (settings.seed * 1_000_003 + trial.number) % 2**32)
            self.inner.before_trial(study, trial)

        def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
            return self.inner.infer_relative_search_space(study, trial)

        def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
            return self.inner.sample_relative(study, trial, search_space)

        def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
            return self.inner.sample_independent(study, trial, param_name, param_distribution)

    return Addressed()


def replaced(trial: FrozenTrial) -> bool:
    """Whether another trial runs with its values in its place."""
    return bool(trial.user_attrs.get("replaced"))


def ended(study: Study) -> list[FrozenTrial]:
    """The trials that count: finished, and not replaced."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished() and not replaced(trial)]


def left_behind(study: Study, folder: Path, own: str) -> list[FrozenTrial]:
    """The running trials of workers other than ``own`` that are dead."""
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [trial for trial in running if trial.user_attrs.get("worker") != own and not _has_worker(trial, folder)]


def _has_worker(trial: FrozenTrial, folder: Path) -> bool:
    worker = trial.user_attrs.get("worker")
    if worker and (folder / WORKERS / worker / LOCK_FILE).is_file():
        return alive(folder / WORKERS / worker) != "killed"
    begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return time.time() - float(trial.user_attrs.get("beat", begun)) < DEAD_S


def replace(study: Study, trial: FrozenTrial, reason: str, *, retry: bool) -> bool:
    """End ``trial`` as failed, and let one with the same values wait in its place.

    Args:
        study: of the trial.
        trial: running, with nobody to run it.
        reason: what became of it.
        retry: whether this counts as one of its :data:`RETRIES`; when they are used up, it stays failed.

    Returns:
        Whether a new one waits. False also where another worker was faster.
    """
    attrs = trial.user_attrs
    retries = int(attrs.get("retries", 0)) + retry
    again = retries <= RETRIES
    if not close(study, trial, {"reason": reason, "replaced": again}):
        return False
    if again:
        kept = {"retries": retries, "of": attrs.get("of", trial.number)}
        if "folder" in attrs:
            kept["folder"] = attrs["folder"]
        study.enqueue_trial(trial.params, user_attrs=kept)
    return again


def close(study: Study, trial: FrozenTrial, about: Mapping[str, Any]) -> bool:
    """End the trial of another worker as failed, with attributes. False where another worker was faster."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    try:
        for key, value in about.items():
            study._storage.set_trial_user_attr(trial._trial_id, key, value)
        study.tell(trial.number, state=TrialState.FAIL)
    except (UpdateFinishedTrialError, ValueError):
        return False
    return True
