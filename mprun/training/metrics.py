"""Host-side bookkeeping of a run: running means, the best evaluation, the skip rate. Plain numbers, no tensors.

NaN compares false with everything, so "is it better" is asked in a form in which NaN, inf and an absent metric are never
an improvement and can never become the best.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Means:
    """Means over the applied steps since the last log point, weighted by valid targets."""

    loss: float = 0.0
    correct: int = 0
    targets: int = 0

    def add(self, *, loss: float, correct: int, targets: int) -> None:
        """Take in one applied step: its mean loss, correct predictions and valid targets."""
        self.loss += loss * targets
        self.correct += correct
        self.targets += targets

    def take(self) -> tuple[float, float]:
        """Mean loss and top-1 since the last call (NaN without a step), and start afresh."""
        n = self.targets
        means = (self.loss / n, self.correct / n) if n else (math.nan, math.nan)
        self.loss, self.correct, self.targets = 0.0, 0, 0
        return means


@dataclass
class Best:
    """The best evaluation so far by one metric, and evaluations since.

    ``value`` is None until a finite value was seen. NaN, inf and absent values count as "no improvement".
    """

    metric: str
    mode: str
    value: float | None = None
    step: int | None = None
    epoch: int | None = None
    stale: int = 0

    def update(self, metrics: dict[str, float], *, step: int, epoch: int) -> bool:
        """Take in an evaluation; whether it is the best so far."""
        new = metrics.get(self.metric)
        better = (
            new is not None
            and math.isfinite(new)
            and (self.value is None or (new > self.value if self.mode == "max" else new < self.value))
        )
        if better:
            self.value, self.step, self.epoch, self.stale = new, step, epoch, 0
        else:
            self.stale += 1
        return better

    def summary(self) -> dict[str, Any] | None:
        """For ``result.json``: metric, value, step, epoch; None if there is no best."""
        if self.value is None:
            return None
        return {"metric": self.metric, "value": self.value, "step": self.step, "epoch": self.epoch}


@dataclass
class Examined:
    """How many skips were examined, and what is known by them.

    Attributes:
        count: post-mortems so far.
        first_loss: of the first applied step.
        search_step: applied steps when a search for the loss scale was found; ``search_scale``: how far down it has to go.
    """

    count: int = 0
    first_loss: float | None = None
    search_step: int = -1
    search_scale: float = 0.0


@dataclass
class SkipRate:
    """Share of overflows over the last ``window`` attempts; attempts before ``grace`` do not count."""

    window: int = 100
    grace: int = 100
    limit: float = 0.05
    recent: deque[bool] = field(default_factory=deque)
    warned: bool = False

    def add(self, attempt: int, skipped: bool) -> float | None:
        """Take in an attempt. The rate, at the first skip at which it is above ``limit``; otherwise None.

        At a skip, because only a step that was skipped can be examined for the cause.
        """
        if attempt <= self.grace:
            return None
        self.recent.append(skipped)
        if len(self.recent) > self.window:
            self.recent.popleft()
        rate = sum(self.recent) / len(self.recent)
        if self.warned or not skipped or len(self.recent) < self.window or rate <= self.limit:
            return None
        self.warned = True
        return rate
