r"""Learning-rate schedules: pure functions of the step, no state, no ``scheduler.step()`` to forget.

A schedule multiplies every learning rate by a number in [0, 1]. Its argument is the index s of the *applied* optimizer
step about to be taken, counted from 0. A step that an overflow drops does not move s, so warm-up, decay and total
length come out the same however often the loss scale had to back off (an epoch-counting or attempt-counting schedule
would drift), and a resumed run has nothing to restore: the step count says it all.

With T total steps and W warm-up steps, every schedule is a ramp followed by one of five shapes::

    m(s) = (s + 1) / W      for s < W     the peak, exactly 1, is reached with applied step number W
    m(s) = shape(s)         afterwards

Warm-up starts at 1/W and not at 0, because a step with multiplier 0 would be spent on nothing. The decaying shapes
``cosine``, ``linear`` and ``wsd`` start from the peak step P = max(W - 1, 0) and are exactly ``final`` at the last
step, index T - 1. At or after T the last value is kept. A run of one step takes it at the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mprun.config import ScheduleConfig
from mprun.errors import ConfigError, nearest


@dataclass(frozen=True)
class Schedule:
    """A learning-rate multiplier as a value: call it with a step. Made by :func:`build_schedule`.

    Attributes:
        name: one of ``SHAPES``.
        total_steps: applied optimizer steps of the whole run, T.
        warmup_steps: length of the linear ramp, W.
        final: the multiplier at the last step of a decaying shape, and the floor of ``step``.
        decay_frac: the part of the run that ``wsd`` spends on decay.
        milestones: where ``step`` drops, as fractions of the run.
        gamma: the factor of each drop of ``step``.
    """

    name: str
    total_steps: int
    warmup_steps: int = 0
    final: float = 0.0
    decay_frac: float = 0.2
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1

    @property
    def peak_step(self) -> int:
        """Index of the first step with multiplier 1."""
        return max(self.warmup_steps - 1, 0)

    def __call__(self, step: int) -> float:
        """The multiplier of applied step ``step``, counted from 0.

        >>> [round(Schedule("cosine", total_steps=6, warmup_steps=2)(s), 3) for s in range(6)]
        [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        step = min(step, self.total_steps - 1)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return SHAPES[self.name](step, self)

    def table(self) -> list[float]:
        """Every multiplier from step 0 to ``total_steps``, for a plot or a test."""
        return [self(step) for step in range(self.total_steps + 1)]


def constant(step: int, schedule: Schedule) -> float:
    """m(s) = 1. ``final`` does not matter.

    >>> Schedule("constant", total_steps=4, warmup_steps=2).table()
    [0.5, 1.0, 1.0, 1.0, 1.0]
    """
    return 1.0


def cosine(step: int, schedule: Schedule) -> float:
    """m(s) = final + (1 - final) (1 + cos(pi p)) / 2, where p runs from 0 at the peak step to 1 at the last step.

    >>> [round(m, 3) for m in Schedule("cosine", total_steps=5, final=0.1).table()]
    [1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """
    return _blend(0.5 * (1.0 + math.cos(math.pi * _progress(step, schedule.peak_step, schedule))), schedule.final)


def linear(step: int, schedule: Schedule) -> float:
    """m(s) = 1 - (1 - final) p, where p runs from 0 at the peak step to 1 at the last step.

    >>> Schedule("linear", total_steps=5).table()
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _blend(1.0 - _progress(step, schedule.peak_step, schedule), schedule.final)


def wsd(step: int, schedule: Schedule) -> float:
    """Warm-up, stable, decay: 1, then linear to ``final`` over the last ``decay_frac`` of the run.

    The decay takes D = round(decay_frac T) steps, at least one, and never begins before the peak.

    >>> Schedule("wsd", total_steps=10, warmup_steps=2).table()
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    decay_steps = max(round(schedule.decay_frac * schedule.total_steps), 1)
    start = max(schedule.total_steps - 1 - decay_steps, schedule.peak_step)
    return _blend(1.0 - _progress(step, start, schedule), schedule.final)


def step_decay(step: int, schedule: Schedule) -> float:
    """m(s) = max(gamma^n, final), where n counts the milestones f with round(f T) <= s.

    A milestone that falls into the warm-up takes effect when the warm-up is over.

    >>> Schedule("step", total_steps=4, gamma=0.5).table()
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    passed = sum(round(fraction * schedule.total_steps) <= step for fraction in schedule.milestones)
    return max(schedule.gamma**passed, schedule.final)


SHAPES: dict[str, Callable[[int, Schedule], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
    "step": step_decay,
}


def build_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
    """Make the schedule of a run.

    Args:
        config: ``schedule.*``. The warm-up is ``warmup_steps``, or ``warmup_frac`` of the run rounded to whole steps,
            or nothing; ``warmup_steps`` wins.
        total_steps: applied optimizer steps of the whole run, at least 1.

    Returns:
        A callable value.

    Raises:
        ConfigError: an unknown name, a value out of its range, or a warm-up that leaves no
            step after it (a one-step warm-up is none, and always fits).

    >>> build_schedule(ScheduleConfig(name="linear", warmup_frac=0.05), 100).warmup_steps
    5
    """
    if config.name not in SHAPES:
        raise ConfigError(f"schedule.name={config.name!r} is unknown: {nearest(config.name, list(SHAPES))}")
    if total_steps < 1:
        raise ConfigError(f"a run needs at least 1 optimizer step, got {total_steps} (see train.steps, train.epochs)")
    fractions = {"final": config.final, "warmup_frac": config.warmup_frac or 0.0, "decay_frac": config.decay_frac}
    fractions |= {"gamma": config.gamma} | {f"milestones[{i}]": m for i, m in enumerate(config.milestones)}
    for key, value in fractions.items():
        if not 0.0 <= value <= 1.0:  # NaN fails this too
            raise ConfigError(f"schedule.{key}={value} is not between 0 and 1")
    return Schedule(
        name=config.name,
        total_steps=total_steps,
        warmup_steps=_warmup_steps(config, total_steps),
        final=config.final,
        decay_frac=config.decay_frac,
        milestones=tuple(config.milestones),
        gamma=config.gamma,
    )


def _warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Steps of warm-up, from whichever of the two keys is given."""
    if config.warmup_steps is not None and config.warmup_steps < 0:
        raise ConfigError(f"schedule.warmup_steps={config.warmup_steps} is negative")
    key = "warmup_frac" if config.warmup_steps is None else "warmup_steps"
    steps = round((config.warmup_frac or 0.0) * total_steps) if config.warmup_steps is None else config.warmup_steps
    if steps >= total_steps and steps > 1:
        raise ConfigError(
            f"schedule.{key}={getattr(config, key)} is a warm-up of {steps} steps in a run of {total_steps}: "
            f"no step would be left at the full learning rate; give at most {total_steps - 1} steps"
        )
    return steps


def _progress(step: int, start: int, schedule: Schedule) -> float:
    """How far ``step`` is from ``start`` (0) to the last step (1); 0 where there is no room between them."""
    room = schedule.total_steps - 1 - start
    return min(max((step - start) / room, 0.0), 1.0) if room > 0 else 0.0


def _blend(weight: float, final: float) -> float:
    """``final`` at weight 0 and 1 at weight 1, both exactly."""
    return weight + (1.0 - weight) * final
