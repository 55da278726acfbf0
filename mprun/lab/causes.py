"""When no set of FP32 modules suffices: is it the scale, the learning rate, the data, or the format of input and output?

Each answer comes with what was tried to get it. FP32 is asked first: what fails there is no matter of precision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mprun.config import Config
from mprun.data.base import Batch
from mprun.lab.evaluate import Evaluator, all_finite
from mprun.lab.reference import Reference, SavedState, reference
from mprun.lab.replay import Replay
from mprun.precision.policy import map_tensors
from mprun.training.blame import nonfinite_samples

ROSE = 2.0  # an FP32 loss that ends so many times above its start has diverged
LOWER = (10.0, 100.0)  # learning rates that are tried: divided by these
EXPONENTS = range(24, -15, -3)  # scales 2**k that are tried, downwards


@dataclass(frozen=True)
class Cause:
    """Why FP32 modules are no cure.

    Attributes:
        kind: ``learning_rate``, ``data``, ``scale``, ``output``, ``model``, ``divergence`` (in FP32, at every learning rate that
            was tried), ``budget`` (it ended first) or ``unknown``.
        message: in one line, with the evidence.
        evidence: the numbers.
    """

    kind: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)


def rose(losses: Sequence[float]) -> bool:
    """Whether a loss ends far above its start: the median of the last quarter is more than twice the first loss."""
    if len(losses) < 4:
        return False
    return statistics.median(losses[-max(len(losses) // 4, 1) :]) > ROSE * abs(losses[0])


def trouble_in_fp32(run: Reference, config: Config, *, steps: int) -> Cause | None:
    """What is wrong with the FP32 run itself; None if nothing is.

    Args:
        run: the reference.
        config: what it was made of.
        steps: how long it was to be.
    """
    if run.curve.status == "ok" and not rose(run.losses):
        return None
    if run.broken is not None and (found := _data(run, run.broken)) is not None:
        return found
    what = (
        f"ends at {run.curve.error}"
        if run.curve.status != "ok"
        else f"has its loss rise from {run.losses[0]:.3g} to {run.losses[-1]:.3g}"
    )
    for divisor in LOWER:
        slower = Config(**vars(config))
        slower.optimizer = type(config.optimizer)(**{**vars(config.optimizer), "lr": config.optimizer.lr / divisor})
        again = reference(slower, steps=steps, seed=run.config.seed)
        if again.curve.status == "ok" and not rose(again.losses):
            lr = slower.optimizer.lr
            return Cause(
                "learning_rate",
                f"FP32 itself {what}, and trains at optimizer.lr={lr:g} (loss {again.losses[0]:.3g} to {again.losses[-1]:.3g}): "
                f"optimizer.lr={config.optimizer.lr:g} is too high, whatever the precision",
                {
                    "lr": config.optimizer.lr,
                    "lr_that_trains": lr,
                    "first_loss": run.losses[:1],
                    "error": run.curve.error,
                },
            )
    return Cause(
        "divergence",
        f"FP32 itself {what}, also at a hundredth of optimizer.lr={config.optimizer.lr:g}: precision is not the cause",
        {"lr": config.optimizer.lr, "error": run.curve.error},
    )


def _data(run: Reference, broken: SavedState) -> Cause | None:
    """Whether the window that ended the FP32 run is bad by itself: non-finite, or too much for the initial weights already."""
    ids = [i for batch in broken.window for i in nonfinite_samples(batch)]
    if ids:
        return Cause(
            "data",
            f"the input of {samples(ids)} is NaN or inf, at step {broken.step + 1} of the FP32 run: the data is the cause",
            {"sample_ids": ids, "step": broken.step + 1},
        )
    replay = Replay(run, run.config)
    first = run.states[0]
    ids = [int(i) for batch in broken.window for i in batch.ids]
    if finite_at(replay, first, broken.window):
        return None
    others = list(run.data.train_batches(1, 0))[: len(broken.window)]
    known = {int(i) for batch in others for i in batch.ids} & set(ids)
    if not known and not finite_at(replay, first, others):
        return Cause(
            "model", "the model gives a loss or gradients that are not finite in FP32 with its initial weights", {}
        )
    one = [i for i in ids if not finite_at(replay, first, [only(broken.window, i)])] if len(ids) <= 512 else ids
    return Cause(
        "data",
        f"{samples(one or ids)} (step {broken.step + 1}) gives a loss or gradients that are not finite with the initial weights "
        "already, in FP32: the data is the cause",
        {"sample_ids": one or ids, "step": broken.step + 1},
    )


def finite_at(replay: Replay, saved: SavedState, window: Sequence[Batch]) -> bool:
    """Whether FP32 gives a finite loss and finite gradients for ``window`` with the weights of ``saved``."""
    with replay.running(None) as state:
        loss, grads = replay.gradients(state, SavedState(saved.step, saved.checkpoint, tuple(window), saved.rng))
    return math.isfinite(loss) and all_finite(grads)


def only(window: Sequence[Batch], sample: int) -> Batch:
    """A batch of one sample of ``window``, twice, for normalisations that cannot do with one."""
    batch = next(batch for batch in window if sample in batch.ids.tolist())
    place = batch.ids.tolist().index(sample)
    rows = len(batch.ids)

    def cut(t: Tensor) -> Tensor:
        return t[[place, place]] if t.ndim and t.shape[0] == rows else t

    return Batch(map_tensors(batch.inputs, cut), cut(batch.targets), batch.ids[[place, place]])


def samples(ids: Sequence[int]) -> str:
    """The first ids in words."""
    shown = ", ".join(map(str, ids[:5]))
    return f"sample{'s' if len(ids) > 1 else ''} {shown}{', ...' if len(ids) > 5 else ''}"


def scales_that_pass(evaluator: Evaluator) -> list[float]:
    """Static scales at which the candidate passes without any FP32 module, ascending: a range without gaps."""
    found: list[float] = []
    for exponent in EXPONENTS:
        passes = evaluator.evaluate((), loss_scale=2.0**exponent).passes
        if passes:
            found.insert(0, 2.0**exponent)
        elif found:
            break
    return found


def trouble_with_all(evaluator: Evaluator, why: str) -> Cause:
    """Why not even the whole model in FP32 passes: what the policy does to inputs and outputs, if that is it."""
    replay = evaluator.replay
    reach = 0.0
    with replay.running(()) as state:
        policy = state.policy
        for saved in replay.reference.states:
            for batch in saved.window:
                if any(bool(bad.any()) for bad in policy.overflowing(batch.inputs)):
                    reach = max(reach, amax(batch.inputs))
    if reach:
        name = str(policy.input_dtype).removeprefix("torch.")
        return Cause(
            "data",
            f"inputs reach {reach:.3g}, and precision.mode={policy.mode} casts them to {name} before the model, where they are "
            "inf: normalise the data, or use precision.mode=autocast",
            {"input_amax": reach},
        )
    if replay.config.precision.output_dtype.value != "float32":
        return Cause(
            "output",
            f"with every module in FP32 it fails as well ({why}); what is left is precision.output_dtype="
            f"{replay.config.precision.output_dtype.value}: use float32",
        )
    return Cause("unknown", f"with every module in FP32 it fails as well: {why}")


def amax(value: Any) -> float:
    """Largest magnitude in the floating-point tensors of ``value``."""
    found = [0.0]
    map_tensors(value, lambda t: found.append(float(t.abs().max())) if t.is_floating_point() and t.numel() else None)
    return max(found)
