"""A window of a run in progress once more, also under another policy; afterwards the run is as it was.

What a replay shares with the step that it repeats: parameters (the FP32 truth, where the model's own are half), buffers,
batch, random numbers of torch. What may be different: the loss scale, the formats, the FP32 rules. The model is not copied.
Its modules get their own classes back and its parameters the truth, and from there it is made ready for the other policy
by the functions that make a run ready (:mod:`mprun.precision.casting`), so a replay computes what a run of that policy would.
Compiled code is left out: it calls no hooks, and numbers may differ in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mprun.data.base import Batch
from mprun.numerics.places import Where
from mprun.numerics.trace import Event, trace
from mprun.precision.casting import apply_plan, plain_class
from mprun.precision.master import Masters, take_truths
from mprun.precision.overrides import make_plan
from mprun.precision.policy import PrecisionPolicy, map_tensors
from mprun.training.attributes import Attributes
from mprun.training.env import capture_rng, restore_rng, restore_step_rng
from mprun.training.recompute import apply_checkpointing, is_recomputed
from mprun.training.state import TrainState
from mprun.training.step import accumulate, gradient_norm

INPUTS, TARGETS = "the input", "the target"


@dataclass(frozen=True)
class Replay:
    """How a window went.

    Attributes:
        loss: mean over the window's valid targets, unscaled.
        finite: whether it would have been applied: loss and gradients are finite.
        finite_loss: whether the loss is.
        first: what is to blame, where it is not finite and was traced.
        micro_batches: how many were computed; on the CPU the last of them is the one that was lost.
        reach: the largest finite magnitude of every operation's result, where it was traced (see
            :class:`~mprun.numerics.trace.Trace`).
        order: the modules without inner ones as they ran in the forward pass, where it was traced.
    """

    loss: float
    finite: bool
    finite_loss: bool
    micro_batches: int
    first: Event | None
    reach: Mapping[tuple[str, Where, str, int], float]
    order: Sequence[str]


@dataclass
class Exam:
    """A window that is examined, and how often it was run again (``replays``).

    Attributes:
        rng: torch's generators at its start; None if nobody knows.
        first_loss: the loss that the run began with; None if nobody knows.
    """

    state: TrainState
    window: Sequence[Batch]
    rng: Mapping[str, Any] | None = None
    first_loss: float | None = None
    replays: int = 0
    began: float = field(default_factory=time.monotonic)
    attributes: Attributes = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = Attributes(self.state.model.modules())

    @property
    def spent_s(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.began

    def run(self, scale: float = 1.0, policy: PrecisionPolicy | None = None, *, traced: bool = False) -> Replay:
        """:func:`run_again`, counted. Attributes of modules are put back too, so that every replay finds the same ones."""
        self.replays += 1
        try:
            return run_again(self.state, self.window, scale=scale, rng=self.rng, policy=policy, traced=traced)
        finally:
            self.attributes.restore()


def run_again(
    state: TrainState,
    window: Sequence[Batch],
    *,
    scale: float,
    rng: Mapping[str, Any] | None = None,
    policy: PrecisionPolicy | None = None,
    traced: bool = False,
) -> Replay:
    """Forward and backward of ``window``, and everything put back: buffers, gradients, parameters, random states.

    Args:
        state: at a step border. Its own loss scale, optimizer and counters play no part.
        window: the micro-batches.
        scale: S.
        rng: from :func:`~mprun.training.env.step_rng`; None to draw from the present one.
        policy: the run's own if None.
        traced: whether to watch every operation, which takes many times as long.
    """
    present, buffers = capture_rng(), state.start_window()
    try:
        with under(state, policy or state.policy) as other:
            other.scale = replace(state.scale, scale=torch.full_like(state.scale.scale, scale))
            if rng is not None:
                restore_step_rng(rng, state.device)
            return _run(other, window, traced)
    finally:
        buffers.restore(list(state.model.modules()))
        for p in (*state.model.parameters(), *state.params):
            p.grad = None
        restore_rng(present)


def _run(state: TrainState, window: Sequence[Batch], traced: bool) -> Replay:
    with trace(state.model, _named(window)) if traced else nullcontext(None) as seen:
        sums = accumulate(state, window, watch=True)
        grads = [p.grad for p in state.params if p.grad is not None and p.grad.layout == torch.strided]
        norm = gradient_norm(state, grads)[0] if grads else sums.loss.new_zeros(())
        if seen is not None:
            seen.end(sums.loss)
            seen.end(*grads)
            seen.end(norm)
    loss, finite = float(sums.loss), bool(sums.loss.isfinite() & norm.isfinite())
    first, reach, order = (seen.first, seen.reach, seen.places.order) if seen is not None else (None, {}, ())
    return Replay(loss, finite, bool(sums.loss.isfinite()), sums.micro_batches, first, reach, order)


def _named(window: Sequence[Batch]) -> dict[str, Tensor]:
    """The tensors of the batches by name, for events to be told apart from constants."""
    named: dict[str, Tensor] = {}

    def name(what: str, tensor: Tensor) -> Tensor:
        named[f"{what} #{len(named)}"] = tensor
        return tensor

    for batch in window:
        map_tensors(batch.inputs, lambda t: name(INPUTS, t))
        name(TARGETS, batch.targets)
    return named


@contextmanager
def under(state: TrainState, policy: PrecisionPolicy) -> Iterator[TrainState]:
    """``state`` with its model made ready for ``policy``; at the end the model has its classes and parameters back.

    Raises:
        OverrideError: a rule of ``policy`` matches nothing, or no cast can be put around a module.
    """
    if policy == state.policy:
        yield replace(state, forward=state.model)
        return
    model = state.model
    classes = {module: type(module) for module in model.modules()}
    tensors = [(p, p.data) for p in model.parameters()]
    recomputed = is_recomputed(model)
    try:
        for module, cls in classes.items():
            module.__class__ = plain_class(cls)
        _widen(state)
        plan = make_plan(model, policy.fp32_modules, mode=policy.mode)
        truths = take_truths(model, mode=policy.mode)
        apply_plan(policy, plan)
        if recomputed:
            apply_checkpointing(model)
        weights = Masters(model, truths)
        params = [p for _, p in weights if p.requires_grad]
        yield replace(state, forward=model, policy=policy, plan=plan, weights=weights, params=params)
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
        for p, data in tensors:
            p.grad = None
            p.data = data


@torch.no_grad()
def _widen(state: TrainState) -> None:
    """Half parameters become their masters (float32 of themselves, where they have none), half buffers float32."""
    for parameter, master in state.weights.pairs:
        parameter.data = master.detach().clone() if state.written else master.detach()
    for module in state.model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        if state.policy.mode == "pure":
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype in (torch.float16, torch.bfloat16):
                    module._buffers[name] = buffer.float()
