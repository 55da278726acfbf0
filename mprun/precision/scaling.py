"""The loss scale S as a value, and the rule that moves it.

The chain rule carries a factor from the loss to every gradient, so the loss is multiplied by S once and the gradients
are divided by S once. Small gradients then survive FP16 (whose smallest non-zero is 2**-24), and S cancels. This is
the only module that multiplies or divides by S or changes it.

The dynamic rule (Micikevicius et al., arXiv 1710.03740; the trajectory is that of ``torch.amp.GradScaler``)::

    overflow:          growth_tracker = 0;   S = max(S * backoff_factor, min)
    applied step:      growth_tracker += 1;  when it reaches growth_interval: S = min(S * growth_factor, max), tracker = 0
    anything else      (non-finite loss, empty batch): S and tracker stay

``hysteresis`` is the number of overflows in a row that it takes to back off; an applied step refills it. A static S
never moves, but its overflows are found and counted all the same.

Everything is 0-D tensors on the run's device and ``adjust`` is made of tensor operations only, so a step needs no
answer from the device to go on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mprun.config import LossScaleConfig, ScaleKind


@dataclass(frozen=True)
class ScaleState:
    """Where the loss scale stands. 0-D tensors on one device.

    Attributes:
        scale: S, float32.
        growth_tracker: applied steps since the last change of S or overflow, int64.
        hysteresis_left: overflows in a row that are still tolerated, int64, at least 1.
        consecutive_skips: windows in a row that were not applied for a non-finite value, int64.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor
    consecutive_skips: Tensor

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers. Waits for the device."""
        return {f.name: getattr(self, f.name).item() for f in fields(self)}


@dataclass(frozen=True)
class LossScale:
    """The rule: what S starts from and how it moves. ``kind`` is ``none``, ``static`` or ``dynamic``."""

    kind: str = "none"
    init: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min: float = 2.0**-14
    max: float = 2.0**24
    hysteresis: int = 1
    patience: int = 50

    @classmethod
    def from_config(cls, config: LossScaleConfig) -> LossScale:
        """The rule that a (checked) ``precision.loss_scale`` node describes."""
        return cls(
            kind=config.kind.value,
            **{f.name: getattr(config, f.name) for f in fields(cls) if f.name != "kind"},
        )

    @property
    def active(self) -> bool:
        """Whether there is a scale at all, and with it skipped steps."""
        return self.kind != ScaleKind.none.value

    def start(self, device: torch.device | str = "cpu") -> ScaleState:
        """The state before the first step."""

        def integer(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int64, device=device)

        scale = torch.tensor(self.init if self.active else 1.0, dtype=torch.float32, device=device)
        return ScaleState(scale, integer(0), integer(self.hysteresis), integer(0))

    def save(self, state: ScaleState) -> dict[str, Any]:
        """``state`` and this rule's kind as plain values. Waits for the device."""
        return {"kind": self.kind, **state.state_dict()}

    def load(self, saved: dict[str, Any], device: torch.device | str = "cpu") -> ScaleState:
        """The state that :meth:`save` wrote, within this rule's limits.

        Only a dynamic scale that goes on as a dynamic one is taken over (moved to the border if ``[min, max]`` has changed):
        what another kind had is no result of a search, so the scale starts from ``init``. Skips in a row are counted on
        wherever the kind is the same.
        """
        state = self.start(device)
        if self.kind != saved["kind"]:
            return state
        if self.kind != "dynamic":
            state.consecutive_skips.fill_(saved["consecutive_skips"])
            return state
        scale = min(max(float(saved["scale"]), self.min), self.max)
        values = {**saved, "scale": scale, "hysteresis_left": min(int(saved["hysteresis_left"]), self.hysteresis)}
        for f in fields(state):
            getattr(state, f.name).fill_(values[f.name])
        return state

    def scaled(self, loss: Tensor, state: ScaleState) -> Tensor:
        """``loss * S`` (float32 scalar); the loss itself where there is no scale."""
        return loss * state.scale if self.active else loss

    def inverse(self, state: ScaleState) -> Tensor:
        """1/S, float32, computed in float64 and rounded once."""
        return state.scale.double().reciprocal().float()

    def adjust(self, state: ScaleState, *, overflow: Tensor, applied: Tensor, failed: Tensor) -> ScaleState:
        """The state after a window. All arguments are 0-D bool tensors; none is read by the host.

        Args:
            state: before the window.
            overflow: the gradients were non-finite because of S (the loss was finite).
            applied: the optimizer step was applied.
            failed: the window was dropped for any non-finite value, ``overflow`` included.
        """
        skips = torch.where(applied, torch.zeros_like(state.consecutive_skips), state.consecutive_skips + failed)
        if self.kind != "dynamic":
            return ScaleState(state.scale, state.growth_tracker, state.hysteresis_left, skips)
        tracker = state.growth_tracker + applied
        grow = tracker >= self.growth_interval
        back_off = overflow & (state.hysteresis_left <= 1)
        # In float64 and rounded once, as GradScaler does: 0.9 is not a float32.
        wide = state.scale.double()
        grown = (wide * self.growth_factor).clamp(max=self.max).float()
        shrunk = (wide * self.backoff_factor).clamp(min=self.min).float()
        scale = torch.where(back_off, shrunk, torch.where(grow, grown, state.scale))
        tracker = torch.where(overflow | grow, torch.zeros_like(tracker), tracker)
        left = torch.where(overflow, (state.hysteresis_left - 1).clamp(min=1), state.hysteresis_left)
        left = torch.where(applied, torch.full_like(left, self.hysteresis), left)
        return ScaleState(scale, tracker, left, skips)
