"""The learning-rate multiplier where the step count is: on the device.

A schedule is a pure function of the applied step, in Python. The host does not know on an accelerator which step that is
(an overflow may have dropped some), so it lays out the next few thousand multipliers as a tensor and lets the device look
its own up. A step moves the count by one at most: after as many calls as there are entries, and not before, the host
reads the count once and lays out the next ones. Memory and start-up do not depend on the length of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mprun.training.schedule import Schedule

ENTRIES = 4096


@dataclass
class Rates:
    """Multipliers of ``schedule`` for the steps ``first`` to ``first + ENTRIES - 1``, good for ``left`` more calls."""

    schedule: Schedule
    device: torch.device
    first: int = 0
    left: int = 0
    values: Tensor | None = None

    def at(self, applied: Tensor) -> Tensor:
        """The multiplier of applied step ``applied`` (0-D int64 on the device): 0-D, float64 on the CPU, else float32.

        To be called once a step; every ``ENTRIES`` calls it waits for the device.
        """
        if self.values is None or self.left == 0:
            self._lay_out(int(applied))
        assert self.values is not None, "laid out"
        self.left -= 1
        return self.values.take(applied - self.first)

    def moved(self) -> None:
        """The count has jumped (a checkpoint was restored): look it up at the next call."""
        self.left = 0

    def _lay_out(self, first: int) -> None:
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        multipliers = [self.schedule(step) for step in range(first, first + ENTRIES)]
        self.first, self.left = first, ENTRIES
        self.values = torch.tensor(multipliers, dtype=dtype, device=self.device)
