"""``tune.*``: how a study searches. These are keys of the command, not of a run: no run's configuration holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config import Config, Task
from mprun.config_check import METRICS
from mprun.errors import ConfigError, nearest

PREFIX = "tune."
OFF_WORDS = ("null", "none", "no", "off", "false")
# Keys that may be switched off, or be left to what follows from the run.
OPTIONAL = ("study", "storage", "metric", "direction", "timeout_s")


class Direction(Enum):
    """Which values of the metric are better."""

    minimize = "minimize"
    maximize = "maximize"


class Sampler(Enum):
    """Who proposes values: ``tpe`` learns from the finished trials, ``random`` does not."""

    tpe = "tpe"
    random = "random"


class Pruner(Enum):
    """Who stops a trial early: ``median`` (worse than half of the others), ``hyperband`` (brackets), or nobody."""

    median = "median"
    hyperband = "hyperband"
    none = "none"


@dataclass
class TuneConfig:
    """``tune.*``.

    Attributes:
        trials: how many finished trials the study is to have in all, whoever ran them.
        study: its name; by default of dataset and model.
        storage: a file or a database URL; by default ``study.db`` in the study's folder.
        metric: what is optimized; by default what a run calls its best.
        direction: by default it follows from the metric.
        warmup: evaluations of a run before it may be stopped early.
        startup: trials that must have finished before one may be stopped early (median).
        jobs: trials at once in this process.
        timeout_s: after so many seconds this process starts no further trial.
        seed: of the sampler.
        verbose: whether Optuna's own log is shown.
    """

    trials: int = 20
    study: str | None = None
    storage: str | None = None
    metric: str | None = None
    direction: Direction | None = None
    sampler: Sampler = Sampler.tpe
    pruner: Pruner = Pruner.median
    warmup: int = 3
    startup: int = 5
    jobs: int = 1
    timeout_s: float | None = None
    seed: int = 0
    verbose: bool = False


def read_settings(words: Sequence[str]) -> TuneConfig:
    """The settings in ``tune.key=value`` words.

    Raises:
        ConfigError: an unknown key, or a value that is not legal; nothing has been created.
    """
    legal = [field.name for field in fields(TuneConfig)]
    given: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        name = key.removeprefix(PREFIX)
        if name not in legal or not equals:
            raise ConfigError(f"unknown key {key}: {nearest(name, legal)} (write {PREFIX}KEY=VALUE)")
        value = _unquoted(value.strip())
        given[name] = None if name in OPTIONAL and value.lower() in OFF_WORDS else value
    try:
        node = OmegaConf.merge(OmegaConf.structured(TuneConfig), given)
        settings = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{PREFIX}{error.full_key or ''}: {_first(error)}") from error
    assert isinstance(settings, TuneConfig), "the schema is structured"
    _check(settings)
    return settings


def metric_of(config: Config) -> str:
    """What a run calls its best: the metric of early stopping, else top-1 of a classification, else the loss."""
    if config.train.early_stop.metric is not None:
        return config.train.early_stop.metric
    return "val/top1" if config.dataset.task is Task.classification else "val/loss"


def completed(settings: TuneConfig, config: Config) -> TuneConfig:
    """``settings`` with what follows from a run's configuration filled in: study, metric and direction.

    Raises:
        ConfigError: a run of ``config`` does not measure the metric.
    """
    metric = settings.metric or metric_of(config)
    if metric.startswith("ema/") and config.train.ema.decay is None:
        raise ConfigError(f"{PREFIX}metric={metric} is never measured without an EMA: set train.ema.decay")
    if metric.endswith("/top1") and config.dataset.task is Task.regression:
        raise ConfigError(f"{PREFIX}metric={metric} is never measured for a regression, which has no classes")
    direction = settings.direction or (Direction.minimize if metric.endswith("/loss") else Direction.maximize)
    study = settings.study or f"{config.dataset.name}-{config.model.name}"
    return replace(settings, metric=metric, direction=direction, study=study)


def _check(settings: TuneConfig) -> None:
    problems = []
    for key, low in (("trials", 1), ("warmup", 0), ("startup", 0), ("jobs", 1), ("seed", 0)):
        if not low <= getattr(settings, key) < 2**31:
            problems.append(f"{PREFIX}{key}={getattr(settings, key)} is not legal: a whole number from {low} up")
    if settings.timeout_s is not None and not (math.isfinite(settings.timeout_s) and settings.timeout_s > 0):
        problems.append(f"{PREFIX}timeout_s={settings.timeout_s:g} is not legal: seconds above 0")
    if settings.metric is not None and settings.metric not in METRICS:
        problems.append(f"{PREFIX}metric={settings.metric} is no metric of a run: {nearest(settings.metric, METRICS)}")
    if problems:
        raise ConfigError("\n".join(problems))


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _first(error: OmegaConfBaseException) -> str:
    return " ".join(str(error).splitlines()[0].split())
