"""What a low-precision run would hold in half at a state, how large it gets, and where it overflows first.

A kept state of the FP32 run is put into a model under the candidate policy, and one micro-batch of its window goes forward and
backward under :func:`mprun.numerics.trace.trace`, with a second look at the results that *are* half: their largest magnitude by
module, forward and backward. Gradients are proportional to the loss scale, so one pass at a scale S0 at which nothing overflows
says which S is the largest one:

    S_max = S0 * overflow / max |half result of a backward operation|

That covers what no module's border shows: the inside of attention, the half copies of weights and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.lab.calls import drop_gradients
from mprun.lab.reference import SavedState
from mprun.lab.replay import Replay
from mprun.numerics.operations import FILLS, MOVES, about, floats, reach
from mprun.numerics.places import Place, Places
from mprun.numerics.trace import trace
from mprun.training.record import is_memory
from mprun.training.state import TrainState
from mprun.training.step import forward_loss, valid_targets

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Overflow:
    """An operation that made infinity of finite numbers: where, and how large what it was given was."""

    module: str
    cls: str
    operation: str
    amax: float


@dataclass(frozen=True)
class Look:
    """One forward and backward pass of a state under a policy.

    Attributes:
        step: of the state.
        scale: loss scale of the pass.
        forward: half results by module: operation and largest magnitude.
        backward: the same of the backward pass, with the scale divided out.
        overflows: of the forward pass, in order; they need not have reached the loss.
        finite: whether loss and gradients are finite.
        loss: as computed.
        backward_overflows: whether anything half overflowed in the backward pass.
        error: the pass raised; what it said.
    """

    step: int
    scale: float
    forward: dict[str, tuple[str, float]]
    backward: dict[str, tuple[str, float]]
    overflows: tuple[Overflow, ...]
    finite: bool
    loss: float
    backward_overflows: bool
    error: str = ""


@dataclass
class _Halves(TorchDispatchMode):
    """Notes the largest half result of every module and direction."""

    places: Places
    peaks: dict[Place, tuple[str, float]] = field(default_factory=dict)
    backward_overflows: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    __hash__ = object.__hash__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = about(func)
        if operation.view or operation.name in FILLS or (operation.name in MOVES and operation.name != "copy"):
            return result
        for tensor in floats(result):
            if tensor.dtype in HALF:
                amax, finite = reach(tensor)
                place = self.places.now()
                if amax > self.peaks.get(place, ("", -1.0))[1]:
                    self.peaks[place] = (operation.name, amax)
                self.backward_overflows |= place[1] == "backward" and not finite
        return result


def look_at(replay: Replay, state: TrainState, saved: SavedState, scale: float) -> Look:
    """The first micro-batch of ``saved``'s window under ``state``'s policy at loss scale ``scale``; moves ``state`` there."""
    replay.place(state, saved)
    window = saved.window
    zero = torch.zeros_like(state.applied)
    valid = sum((valid_targets(batch.targets, state.task) for batch in window), start=zero)
    buffers = state.start_window()
    loss, error = float("nan"), ""
    try:
        with trace(state.model) as seen, _Halves(seen.places) as halves:
            try:
                part, _ = forward_loss(state, window[0], valid)
                seen.end(part)
                loss = float(part.detach())
                if part.requires_grad:
                    (part * scale).backward()  # type: ignore[no-untyped-call]
            except RuntimeError as raised:
                if is_memory(raised):  # no fault of the module
                    raise
                error = str(raised).splitlines()[0]
    finally:
        buffers.restore(state.model.modules())
        drop_gradients(state)
    overflows = [
        Overflow(event.module, event.cls, event.operation, event.amax)
        for event in seen.events
        if (event.kind, event.where) == ("made", "forward")
        and event.cause is None
        and event.dtype in ("float16", "bfloat16")
    ]
    first = seen.first
    if first is not None and (first.source or "").startswith("parameter "):
        name = (first.source or "").removeprefix("parameter ")
        value: torch.Tensor = saved.checkpoint["model"][name]
        module, _, own = name.rpartition(".")
        overflows.append(Overflow(module, first.cls, f"cast of its {own},", float(value.abs().amax())))
    by_direction: dict[str, dict[str, tuple[str, float]]] = {"forward": {}, "backward": {}}
    for (module, where), (operation, amax) in halves.peaks.items():
        by_direction[where][module] = (operation, amax / (scale if where == "backward" else 1.0))
    return Look(
        saved.step,
        scale,
        by_direction["forward"],
        by_direction["backward"],
        tuple(overflows),
        first is None and not error,
        loss,
        halves.backward_overflows,
        error,
    )


def settled(replay: Replay, state: TrainState, saved: SavedState, scale: float, *, lowest: float = 2.0**-14) -> Look:
    """:func:`look_at` at the first of ``scale``, ``scale / 64`` ... at which nothing half overflows in the backward pass.

    A forward pass that overflows does so at every scale: it is returned as it is.
    """
    while True:
        found = look_at(replay, state, saved, scale)
        if not found.backward_overflows or found.overflows or found.error or scale <= lowest:
            return found
        scale = max(scale / 64, lowest)


def peak(look: Look) -> float:
    """The largest half gradient of a pass, unscaled; 0 where there is none."""
    return max((amax for _, amax in look.backward.values()), default=0.0)
