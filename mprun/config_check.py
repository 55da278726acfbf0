"""The border: a composed config in, a checked :class:`~mprun.config.Config` out.

Hydra accepts keys that the schema does not know when they come with ``+`` and lets ``~`` delete keys, and types say
nothing about ranges. :func:`to_config` walks all keys, then checks ranges and the rules between keys, and reports every
problem in one error, before anything is built or created.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config import Config, DType, Mode, OnOverflow, ScaleKind, Task
from mprun.errors import ConfigError, nearest
from mprun.recipes import expect_problems, meta_problems

# Free-form nodes: what they may hold is checked elsewhere (kwargs against the builder's signature).
OPEN = ("model.kwargs", "dataset.kwargs", "optimizer.kwargs", "meta", "expect")

SCHEDULES = ("constant", "cosine", "linear", "wsd", "step")
METRICS = ("val/loss", "val/top1", "ema/loss", "ema/top1")

FLOAT32_MAX = (2 - 2**-23) * 2.0**127

Rule = tuple[str, Callable[[Any], bool]]


def _positive(what: str = "") -> Rule:
    # Below the normal numbers float32 loses digits, then everything: 1e-46 is 0.
    return f"a float32 above 0 (from 2**-126 to {FLOAT32_MAX:.3g}){what}", lambda v: 2.0**-126 <= v <= FLOAT32_MAX


def _not_negative() -> Rule:
    return f"a finite float32 from 0 up (to {FLOAT32_MAX:.3g})", lambda v: 0 <= v <= FLOAT32_MAX


def _at_least(low: int) -> Rule:
    # Up to 2**53 a whole number is exact in float64, in which the numbers of a step travel.
    return f"a whole number from {low} up (to 2**53)", lambda v: low <= v <= 2**53


def _between(low: float, high: float, *, closed: bool = True) -> Rule:
    if closed:
        return f"from {low:g} to {high:g}", lambda v: low <= v <= high
    return f"from {low:g} to below {high:g}", lambda v: low <= v < high


# What float32 can hold as a normal number, whose inverse is one too.
_SCALE: Rule = ("a finite number above 0 (from 2**-126 to 2**126)", lambda v: 2.0**-126 <= v <= 2.0**126)

RANGES: dict[str, Rule] = {
    "seed": ("a whole number from 0 to 2**63 - 1", lambda v: 0 <= v < 2**63),
    "dataset.workers": ("a number of processes, from 0 to 512", lambda v: 0 <= v <= 512),
    "dataset.limit": _at_least(1),
    "dataset.mixup": _between(0, 100),
    "dataset.cutmix": _between(0, 100),
    "precision.loss_scale.init": _SCALE,
    "precision.loss_scale.min": _SCALE,
    "precision.loss_scale.max": _SCALE,
    "precision.loss_scale.growth_factor": ("a finite number above 1", lambda v: math.isfinite(v) and v > 1),
    "precision.loss_scale.backoff_factor": ("above 0 and below 1", lambda v: 0 < v < 1),
    "precision.loss_scale.growth_interval": _at_least(1),
    "precision.loss_scale.hysteresis": _at_least(1),
    "precision.loss_scale.patience": _at_least(1),
    "optimizer.lr": _not_negative(),
    "optimizer.weight_decay": _not_negative(),
    "optimizer.momentum": _between(0, 1, closed=False),
    "optimizer.eps": _positive(),
    "optimizer.betas": (
        "two or three numbers from 0 to below 1",
        lambda v: 2 <= len(v) <= 3 and all(0 <= b < 1 for b in v),
    ),
    "schedule.warmup_steps": _at_least(0),
    "schedule.warmup_frac": _between(0, 1, closed=False),
    "schedule.final": _between(0, 1),
    "schedule.decay_frac": _between(0, 1),
    "schedule.gamma": _between(0, 1),
    "schedule.milestones": ("fractions of the run, from 0 to 1", lambda v: all(0 <= fraction <= 1 for fraction in v)),
    "train.epochs": _at_least(1),
    "train.steps": _at_least(1),
    "train.batch_size": _at_least(1),
    "train.accumulate": _at_least(1),
    "train.clip_norm": _positive(", or null for no clipping"),
    "train.label_smoothing": _between(0, 1, closed=False),
    "train.loss_weight": _positive(),
    "train.ema.decay": ("from 0 to below 1, or null for no EMA", lambda v: 0 <= v < 1),
    "train.eval_every": _at_least(1),
    "train.log_every": _at_least(1),
    "train.checkpoint_every": _at_least(1),
    "train.keep": _at_least(0),
    "train.early_stop.patience": _at_least(1),
    "search.budget": _at_least(1),
    "search.tolerance": ("above 0, up to 1000", lambda v: 0 < v <= 1000),
    "search.steps": _at_least(4),
    # W&B's own limits: it would refuse to start.
    "tracking.project": (
        "1 to 128 characters without / \\ # ? % :",
        lambda v: bool(v.strip()) and len(v) <= 128 and not set(v) & set("/\\#?%:"),
    ),
    "tracking.entity": ("a user or team of W&B, or null", lambda v: bool(v.strip()) and "/" not in v),
    "tracking.group": ("1 to 128 characters, or null", lambda v: bool(v.strip()) and len(v) <= 128),
    "tracking.tags": ("tags of 1 to 64 characters", lambda v: all(tag.strip() and len(tag) <= 64 for tag in v)),
    "diagnose.steps": _at_least(1),
    "diagnose.every": _at_least(1),
    "compare.seeds": (
        "a number of seeds, or a list of different ones, as in compare.seeds=0,1,2",
        lambda v: (
            all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in v) and 0 < len(v) == len(set(v))
            if isinstance(v, list)
            else isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= 1000
        ),
    ),
    "compare.margin": _not_negative(),
    "compare.spread": _between(0, 100),
    "compare.confidence": ("above 0.5 and below 1", lambda v: 0.5 < v < 1),
    "compare.gradient_steps": ("numbers of steps from 0 up", lambda v: all(step >= 0 for step in v)),
    "probe.every": ("a number of attempts from 1 up (to 2**53), or 0 for off", lambda v: 0 <= v <= 2**53),
    "postmortem.skips": _at_least(0),
    "sweep.jobs": ("a number of jobs at once, from 1 to 1024", lambda v: 1 <= v <= 1024),
}


@cache
def schema() -> DictConfig:
    """The typed schema as OmegaConf's node. Made once, because that takes 20 ms; whoever would change it copies it first."""
    node: DictConfig = OmegaConf.structured(Config)
    return node


def to_config(composed: DictConfig) -> Config:
    """Check ``composed`` and turn it into a :class:`Config`.

    Raises:
        ConfigError: one line for every unknown, deleted or missing key, illegal value, and broken rule between keys.
    """
    problems = list(_key_problems(OmegaConf.to_container(composed, resolve=False), Config(), ""))
    problems += [f"{key} has no value: set it with {key}=..." for key in sorted(OmegaConf.missing_keys(composed))]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema(), composed))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0] + f" (key {error.full_key})") from error
    assert isinstance(config, Config), "the schema is structured"
    problems = [
        *_range_problems(config),
        *_scale_problems(config),
        *_policy_problems(config),
        *_rule_problems(config),
        *_other_problems(config),
    ]
    problems += [*expect_problems(config.expect), *meta_problems(config.meta)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def to_plain(config: Config) -> dict[str, Any]:
    """``config`` as plain containers, enums as their words: what ``config.yaml`` and W&B get."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict), "the root is a mapping"
    return {str(key): value for key, value in plain.items()}


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted ``key``."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _key_problems(given: Any, schema: Any, path: str) -> Iterable[str]:
    if not isinstance(given, dict):
        yield f"{path}={given!r} is not a group of keys; set its parts: {', '.join(f'{path}.{f.name}' for f in fields(schema))}"
        return
    legal = {f.name: getattr(schema, f.name) for f in fields(schema)}
    for name, value in given.items():
        full = f"{path}.{name}" if path else str(name)
        if name not in legal:
            yield f"unknown key {full}: {nearest(str(name), legal)}"
        elif full not in OPEN and is_dataclass(legal[name]):
            yield from _key_problems(value, legal[name], full)
    for name in legal.keys() - given.keys():
        yield f"{path + '.' if path else ''}{name} was deleted (~): every key must be present; set it to null or a legal value"


def _range_problems(config: Config) -> Iterable[str]:
    for key, (legal, test) in RANGES.items():
        value = value_at(config, key)
        if value is None:
            continue
        if not test(value):
            yield f"{key}={value} is not legal: {legal}"


def _scale_problems(config: Config) -> Iterable[str]:
    scale = config.precision.loss_scale
    if scale.on_overflow is OnOverflow.retry and scale.kind is not ScaleKind.dynamic:
        yield (
            f"precision.loss_scale.on_overflow=retry with kind={scale.kind.value}: a scale that cannot fall would run the same "
            "batch for ever; use kind=dynamic, or on_overflow=skip"
        )
    if scale.kind is ScaleKind.none:
        return
    if scale.kind is ScaleKind.static:
        pass  # stays at init, whatever min and max are
    elif scale.min > scale.max:
        yield f"precision.loss_scale.min={scale.min:g} is above precision.loss_scale.max={scale.max:g}"
    elif not scale.min <= scale.init <= scale.max:
        yield (
            f"precision.loss_scale.init={scale.init:g} is outside [min, max] = [{scale.min:g}, {scale.max:g}]; "
            "raise precision.loss_scale.max or choose another init"
        )
    if config.precision.compute_dtype is not DType.float16:
        yield (
            f"precision.loss_scale.kind={scale.kind.value} with compute_dtype={config.precision.compute_dtype.value}: "
            "only float16 needs a loss scale; set precision.loss_scale.kind=none"
        )


def _policy_problems(config: Config) -> Iterable[str]:
    p = config.precision
    half = (DType.float16, DType.bfloat16)
    where = f"(precision={p.name}; the named options are in conf/precision)"
    if p.mode is Mode.full and (p.compute_dtype is not DType.float32 or p.param_dtype is not DType.float32):
        yield f"precision.mode=full computes in float32 with float32 parameters; for half use mode autocast or master {where}"
    if p.mode is not Mode.full and p.compute_dtype not in half:
        yield f"precision.mode={p.mode.value} needs compute_dtype float16 or bfloat16, not {p.compute_dtype.value} {where}"
    if p.mode is Mode.autocast and p.param_dtype is not DType.float32:
        yield f"precision.mode=autocast keeps parameters in float32; {p.param_dtype.value} needs mode master {where}"
    if p.mode in (Mode.master, Mode.pure) and p.param_dtype is not p.compute_dtype:
        yield f"precision.mode={p.mode.value} has param_dtype equal to compute_dtype, not {p.param_dtype.value} {where}"
    if p.mode in (Mode.master, Mode.pure) and p.eval_dtype not in (None, p.compute_dtype):
        yield (
            f"precision.eval_dtype={p.eval_dtype.value} with mode={p.mode.value}: the parameters are {p.param_dtype.value}, and "
            "evaluation never casts live weights; leave it null, or train in mode autocast"
        )


def _rule_problems(config: Config) -> Iterable[str]:
    """What is wrong with a rule for modules whatever the model is; whether it matches is seen when there is one."""
    for key, rules in (
        ("precision.fp32_modules", config.precision.fp32_modules),
        ("probe.modules", config.probe.modules),
    ):
        for rule in rules:
            kind, colon, pattern = rule.partition(":")
            if not rule.strip() or (colon and not pattern.strip()):
                yield f"{key}: {rule!r} names nothing; write a glob (head, blocks.*.norm1), class:Name or re:..."
            elif colon and kind == "re":
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"{key}: {rule!r} is not a regular expression: {error}"


def _other_problems(config: Config) -> Iterable[str]:
    if config.schedule.name not in SCHEDULES:
        yield f"schedule.name={config.schedule.name} is unknown: {nearest(config.schedule.name, SCHEDULES)}"
    yield from _early_stop_problems(config)
    if config.train.label_smoothing and config.dataset.task is Task.regression:
        yield "train.label_smoothing spreads a target over classes: it has no meaning for dataset.task=regression; set it to 0"
    for key in ("mixup", "cutmix"):
        if getattr(config.dataset, key) and config.dataset.task is not Task.classification:
            yield (
                f"dataset.{key}={getattr(config.dataset, key)} mixes the targets of a classification, not of "
                f"dataset.task={config.dataset.task.value}; set it to 0"
            )
    if not config.name.strip():
        yield "name is empty: give the experiment a name, or leave the key out"


def _early_stop_problems(config: Config) -> Iterable[str]:
    metric = config.train.early_stop.metric
    if metric is None:
        return
    if metric not in METRICS:
        yield f"train.early_stop.metric={metric} is never measured: {nearest(metric, METRICS)}"
    elif metric.startswith("ema/") and config.train.ema.decay is None:
        yield (
            f"train.early_stop.metric={metric} is never measured without an EMA: set train.ema.decay (0.999, for example), "
            f"or use {metric.replace('ema/', 'val/')}"
        )
    elif metric.endswith("/top1") and config.dataset.task is Task.regression:
        yield (
            f"train.early_stop.metric={metric} is never measured for dataset.task=regression, which has no classes: "
            f"use {metric.replace('top1', 'loss')}"
        )
