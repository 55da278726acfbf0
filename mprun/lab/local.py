"""The local error of each module: run alone under a candidate policy on what the FP32 run gave it, and compared with FP32.

A module gets the inputs of the FP32 run, in the dtype in which they would arrive under the candidate policy, and the FP32 run's
gradients of its outputs, times S and rounded as they would arrive. What it makes of them is held against the module in FP32::

    forward SQNR   10 log10( sum y^2 / sum (y - y')^2 )            over all its outputs
    gradient SQNR  the smaller one of that over the gradients of its inputs, and that over those of its parameters (over S)

So errors do not add up along the network, and whose fault it is can be read off: rounding alone leaves some 60 dB in FP16 and
40 in BF16, a sum of squares that overflows inside a hand-written RMSNorm leaves 0 dB, without any NaN. Gradients of a module are
taken together: the gradient of a bias that has none by construction (before a softmax or a BatchNorm) is all noise in FP32 too.

Leaves come before what is around them. A container whose children are all fine and which itself is not has its culprit among
its own operations. Random numbers and buffers are those of the FP32 call, in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from mprun.config import Config
from mprun.lab.calls import Call, arrivals, floats, record
from mprun.lab.module_error import BEYOND_DB, ModuleError, least_gradient_db, rounding_db, why_of
from mprun.lab.reference import Reference, SavedState, lab_config, undisturbed
from mprun.numerics.formats import FORMATS, Format
from mprun.numerics.parity import energy_db
from mprun.precision.policy import map_tensors
from mprun.training import checkpoint
from mprun.training.buffers import Snapshot
from mprun.training.build import build, switches
from mprun.training.env import restore_rng
from mprun.training.record import is_memory
from mprun.training.state import TrainState

__all__ = ["ModuleError", "local_errors", "with_owners"]

NEVER_OWN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def local_errors(reference: Reference, config: Config, states: Sequence[SavedState]) -> list[ModuleError]:
    """The local error of every module that is called, in module order, the worst one over ``states``.

    Args:
        reference: the FP32 run that the states are of.
        config: its ``precision`` is the candidate policy; the scale of gradients is ``loss_scale.init`` where it has one.
        states: at least one.

    Raises:
        MprunError: the policy is refused.
    """
    found: dict[str, ModuleError] = {}
    # Recompute would call modules twice, from within backward.
    plain, candidate = lab_config(reference.config), lab_config(config)
    plain.model.activation_checkpointing = candidate.model.activation_checkpointing = False
    device = reference.device
    # The half kernels of the outer one do not touch the FP32 model; the inner one has its products exact.
    with undisturbed(), switches(candidate, device), switches(plain, device):
        true, _, _ = build(plain, device)
        cast, _, _ = build(candidate, device)
        for saved in states:
            for error in _at(true, cast, saved):
                before = found.get(error.path)
                found[error.path] = error if before is None else _worse(before, error)
    order = [path for path, _ in true.model.named_modules() if path in found]
    return with_owners([found[path] for path in order])


def with_owners(errors: Sequence[ModuleError]) -> list[ModuleError]:
    """``own`` filled in: a module that is beyond rounding while nothing inside it is."""
    bad = [error.path for error in errors if error.beyond]

    def inside(path: str) -> bool:
        return any(other != path and (not path or other.startswith(f"{path}.")) for other in bad)

    return [replace(error, own=error.beyond and not inside(error.path)) for error in errors]


def _worse(a: ModuleError, b: ModuleError) -> ModuleError:
    """Two states of one module: the worse number of each kind, the words of the worse one."""
    said = min(a, b, key=lambda e: (not e.beyond, not e.nonfinite, min(e.forward_sqnr_db, e.grad_sqnr_db)))
    return replace(
        said,
        forward_sqnr_db=min(a.forward_sqnr_db, b.forward_sqnr_db),
        grad_sqnr_db=min(a.grad_sqnr_db, b.grad_sqnr_db),
        input_amax=max(a.input_amax, b.input_amax),
        output_amax=max(a.output_amax, b.output_amax),
    )


def _at(true: TrainState, cast: TrainState, saved: SavedState) -> list[ModuleError]:
    """The errors at one state."""
    for state in (true, cast):
        checkpoint.restore(state, saved.checkpoint, path=Path("the reference run"))
    restore_rng(saved.rng)
    arrive, trouble = arrivals(cast, saved.window)
    restore_rng(saved.rng)
    calls = record(true, saved.window)
    scale = cast.loss_scale.init if cast.loss_scale.active else 1.0
    fp32 = {entry.path for entry in cast.plan if entry.fp32}
    modules = dict(cast.model.named_modules())
    errors = []
    for path, module in true.model.named_modules():
        if path in fp32 or path not in calls or type(module) in NEVER_OWN:
            continue
        pairs = [
            _pair(call, module, modules[path], _dtypes(arrive.get(path, []), index, call, cast), cast, scale)
            for index, call in enumerate(calls[path])
        ]
        errors.append(_judge(path, module, pairs, FORMATS[_name(cast)], scale))
    if trouble and not any(error.nonfinite == "error" for error in errors):
        errors.append(
            ModuleError("", type(true.model).__name__, -math.inf, -math.inf, "error", False, True, trouble, 0, 0)
        )
    return errors


def _name(state: TrainState) -> str:
    return str(state.policy.compute_dtype).removeprefix("torch.")


def _dtypes(seen: list[list[torch.dtype]], index: int, call: Call, cast: TrainState) -> list[torch.dtype]:
    """The dtypes of a call's arguments; half for a call that the other pass did not get to."""
    count = len(floats(call.given))
    if index < len(seen) and len(seen[index]) == count:
        return seen[index]
    return [cast.policy.compute_dtype] * count


@dataclass(frozen=True)
class _Result:
    """What a module gave in one call: outputs, gradients of inputs and parameters (over S); or what it raised.

    ``arrived``: the gradients of its outputs as they were given to it, over S.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    input_grads: list[Tensor | None]
    parameter_grads: list[Tensor | None]
    arrived: list[Tensor | None]
    error: str = ""


def _pair(
    call: Call,
    module: nn.Module,
    cast: nn.Module,
    dtypes: list[torch.dtype],
    state: TrainState,
    scale: float,
) -> tuple[_Result, _Result]:
    """One call in FP32 and under the candidate policy."""
    try:
        rounded = _alone(cast, call, call.output_grads, dtypes, state, scale)
    except RuntimeError as error:
        if is_memory(error):  # no fault of the module
            raise
        rounded = _Result([], [], [], [], [], str(error).splitlines()[0])
    # A gradient that was lost before it got here is the scale's fault, not this module's: FP32 gets it as it arrived.
    given = [
        g if a is None or g is None else torch.where(a.isfinite(), a, g)
        for g, a in zip_longest(call.output_grads, rounded.arrived)
    ]
    return _alone(module, call, given, [t.dtype for t in floats(call.given)], None, 1.0), rounded


def _alone(
    module: nn.Module,
    call: Call,
    output_grads: Sequence[Tensor | None],
    dtypes: list[torch.dtype],
    state: TrainState | None,
    scale: float,
) -> _Result:
    """Run ``module`` on copies of a call's arguments in ``dtypes``, and backward from ``output_grads`` times ``scale``."""
    places = iter(zip(call.leaves, dtypes, strict=True))

    def copy(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t.clone()
        needs, dtype = next(places)
        return t.detach().to(dtype, copy=True).requires_grad_(needs)

    leaves = map_tensors(call.given, copy)
    inputs = floats(leaves)
    # A module may write into its arguments, which a leaf forbids: it gets a copy that autograd knows.
    args, kwargs = map_tensors(leaves, lambda t: t.clone())
    buffers = Snapshot.take(module.modules())
    restore_rng(call.rng)
    try:
        if state is None:
            output = module(*args, **kwargs)
        else:
            with state.policy.region(state.device.type):
                output = module(*args, **kwargs)
    finally:
        buffers.restore(module.modules())
    outputs = floats(output)
    parameters = list(module.parameters())
    wanted = [t for t in [*inputs, *parameters] if t.requires_grad]
    arrived = [
        (g.float() * scale).to(o.dtype) if g is not None and o.requires_grad and o.shape == g.shape else None
        for o, g in zip(outputs, output_grads, strict=False)
    ]
    pairs = [(o, g) for o, g in zip(outputs, arrived, strict=False) if g is not None]
    grads: dict[int, Tensor | None] = {}
    if pairs and wanted:
        given = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        grads = {id(t): None if g is None else g.float() / scale for t, g in zip(wanted, given, strict=True)}
    return _Result(
        [t.detach() for t in inputs],
        [o.detach() for o in outputs],
        [grads.get(id(t)) for t in inputs],
        [grads.get(id(t)) for t in parameters],
        [None if g is None else g.float() / scale for g in arrived],
    )


def _judge(
    path: str, module: nn.Module, pairs: Sequence[tuple[_Result, _Result]], form: Format, scale: float
) -> ModuleError:
    """From the two results of each call to the error of a module."""
    forward = backward = math.inf
    nonfinite, error = "", ""
    for exact, rounded in pairs:
        if rounded.error:
            nonfinite, error, forward = "error", rounded.error, -math.inf
            continue
        backward = min(
            backward,
            _sqnr(exact.input_grads, rounded.input_grads),
            _sqnr(exact.parameter_grads, rounded.parameter_grads),
        )
        forward = min(forward, _sqnr(exact.outputs, rounded.outputs))
        nonfinite = nonfinite or _nonfinite(exact, rounded)
    into = max((_amax(exact.inputs) for exact, _ in pairs), default=0.0)
    out = max((_amax(exact.outputs) for exact, _ in pairs), default=0.0)
    beyond = bool(nonfinite) or forward < rounding_db(form) - BEYOND_DB or backward < least_gradient_db(form)
    why = why_of(nonfinite, error, forward, backward, into, out, form, scale)
    return ModuleError(path, type(module).__name__, forward, backward, nonfinite, False, beyond, why, into, out)


def _sqnr(exact: Sequence[Tensor | None], rounded: Sequence[Tensor | None]) -> float:
    """SQNR over several tensors taken together; what one side does not have is left out."""
    signal = noise = 0.0
    for a, b in zip(exact, rounded, strict=False):
        if a is None or b is None or a.shape != b.shape:
            continue
        a, b = a.double(), b.double()
        known = a.isfinite()  # what FP32 itself cannot hold (a mask of -inf) is nobody's error
        signal += float(a[known].square().sum())
        noise += float((a - b)[known].square().sum()) if bool(b[known].isfinite().all()) else math.inf
    return energy_db(signal, noise)


def _nonfinite(exact: _Result, rounded: _Result) -> str:
    """The first thing that is finite in FP32 and not under the policy."""
    for name, a, b in (
        ("input", exact.inputs, rounded.inputs),
        ("output", exact.outputs, rounded.outputs),
        ("gradient", [*exact.input_grads, *exact.parameter_grads], [*rounded.input_grads, *rounded.parameter_grads]),
    ):
        for x, y in zip(a, b, strict=False):
            if x is not None and y is not None and x.shape == y.shape and bool((x.isfinite() & ~y.isfinite()).any()):
                return name
    return ""


def _amax(tensors: Sequence[Tensor]) -> float:
    finite = (torch.where(t.isfinite(), t, 0).abs() for t in tensors if t.numel())
    return max((float(t.amax()) for t in finite), default=0.0)
