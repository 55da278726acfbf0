"""Short runs of a case in memory, and what can be seen of one: how it ended, its losses, its skips, what moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from mprun.compose import compose
from mprun.config import Config
from mprun.config_check import to_config, to_plain
from mprun.errors import MprunError
from mprun.lab.reference import short_run
from mprun.training.build import device_of, switches
from mprun.training.state import TrainState
from mprun.training.step import eval_step, train_step

# What a healthy run's last losses may exceed those of FP32 by: a factor, and in absolute terms.
FACTOR, MARGIN = 1.5, 0.05
# A run whose loss has ended so far above FP32's has stalled.
STALL = 2.0
MANY_SKIPS = 10

_SCHEMA = OmegaConf.structured(Config)
ANY = {"model.name": "tests.sick.models:Mlp", "dataset.name": "tests.sick.data:vectors"}


@dataclass(frozen=True)
class Outcome:
    """How a short run went.

    Attributes:
        status: ``ok``, ``diverged``, ``skips`` (out of patience) or ``refused``.
        error: why it ended early, else None.
        losses: of the applied steps.
        skips: skipped steps.
        val: validation loss at the end; NaN if there was no end.
        unmoved: trainable parameters that are bit for bit what they were at the start.
    """

    status: str
    error: str | None
    losses: tuple[float, ...] = ()
    skips: int = 0
    val: float = float("nan")
    unmoved: frozenset[str] = frozenset()

    @property
    def first(self) -> float:
        """The loss of the first applied step."""
        return self.losses[0] if self.losses else float("nan")

    @property
    def last(self) -> float:
        """Mean of the last four losses: an epoch of 64 samples."""
        return sum(self.losses[-4:]) / len(self.losses[-4:]) if self.losses else float("nan")


@cache
def _composed(groups: tuple[str, ...]) -> DictConfig:
    node: DictConfig = OmegaConf.create(to_plain(compose(groups).config))
    return node


def config_of(words: Sequence[str]) -> Config:
    """What ``mprun.compose`` makes of ``words``, and quicker: only groups go through Hydra, and once.

    Words are merged as they come, but for groups, which come first: a later ``precision=`` takes back no ``precision.*``.
    """
    pairs = [word.partition("=")[::2] for word in words]
    groups = {key: value for key, value in pairs if "." not in key and key in ("precision", "optimizer", "tracking")}
    groups["model"] = next((value for key, value in reversed(pairs) if key == "model"), "python")
    named = [f"{key}={value}" for key, value in groups.items()]
    # Any name will do for the groups: the right one is merged with the other keys.
    names = [
        f"{key}={ANY.get(key, value) if value.startswith('tests.') else value}"
        for key, value in pairs
        if key in ("model.name", "dataset.name", "trust", "dataset")
    ]
    node = OmegaConf.merge(_SCHEMA, _composed((*named, *names)))
    for key, value in dict(pairs).items():
        if key in ANY:
            node.name = node.name.replace(ANY[key], value)
    for key, value in pairs:
        if "." in key or key in ("device", "seed"):
            OmegaConf.update(node, key, _value(value), force_add=True)
    return to_config(node)  # type: ignore[arg-type]


def _value(text: str) -> Any:
    """YAML, but that 1e-2 is a number."""
    if text.startswith("["):
        return [_value(part) if part.isdigit() else part for part in text[1:-1].split(",") if part]
    try:
        return float(text) if not text.lstrip("-").isdigit() else int(text)
    except ValueError:
        return yaml.safe_load(text)


def run(words: Sequence[str]) -> Outcome:
    """Run ``words`` for ``train.steps`` steps; an error is an outcome. The same words are run once."""
    return _run(tuple(words))


@cache
def _run(words: tuple[str, ...]) -> Outcome:
    seen: list[TrainState] = []
    start: dict[str, torch.Tensor] = {}

    def watch(state: TrainState, window: Any) -> Any:
        if not seen:
            seen.append(state)
            start.update({name: value.detach().clone() for name, value in state.weights if value.requires_grad})
        return train_step(state, window)

    try:
        config = config_of(words)
        curve = short_run(config, steps=config.train.steps or 0, watch=watch)
    except (MprunError, RuntimeError) as error:  # torch's own about a dtype, which mprun train puts into words
        return Outcome("refused", str(error))
    state = seen[0]
    unmoved = frozenset(name for name, value in state.weights if name in start and torch.equal(value, start[name]))
    val = _val(config, state) if curve.status == "ok" else float("nan")
    return Outcome(curve.status, curve.error, curve.losses, len(curve.skips), val, unmoved)


def _val(config: Config, state: TrainState) -> float:
    from mprun.data import build_data

    device = device_of(config)
    with switches(config, device):
        return eval_step(state, state.policy, build_data(config, device=device).val_batches())["loss"]


def shows(symptom: str, outcome: Outcome, fp32: Outcome, culprits: Sequence[str] = ()) -> bool:
    """Whether ``outcome`` has the symptom; ``fp32`` is what it should have been."""
    if symptom == "stops":
        return outcome.status in ("diverged", "skips")
    if symptom == "refused":
        return outcome.status == "refused"
    if outcome.status != "ok":
        return False
    return {
        "stalls": outcome.val > STALL * fp32.val + MARGIN,
        "val": outcome.val > STALL * max(fp32.val, outcome.last) + MARGIN,
        "stuck": all(any(name.startswith(f"{path}.") for name in outcome.unmoved) for path in culprits),
        "skips": outcome.skips >= MANY_SKIPS,
    }[symptom]


def healthy(outcome: Outcome, fp32: Outcome) -> bool:
    """Whether a run went through, with FP32's losses and nothing that stood still in it and moved in FP32."""
    if outcome.status != "ok" or not outcome.unmoved <= fp32.unmoved:
        return False
    return outcome.last <= FACTOR * fp32.last + MARGIN and outcome.val <= FACTOR * fp32.val + MARGIN
