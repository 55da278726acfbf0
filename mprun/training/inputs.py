"""Why a model cannot take a dataset's inputs, asked by running it: as whole numbers, channels last, or single numbers.

mprun casts floating-point inputs only, because whole numbers may be ids. A model that wants numbers then fails in its depths,
with a message about matrices. So where the first forward pass fails, it is tried once more with each of a few changes to the
inputs; the one that makes it run is the cure, and is known to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mprun.data.base import Batch
from mprun.models.trial import BAD_VALUE
from mprun.precision.policy import map_tensors
from mprun.training.env import capture_rng, restore_rng
from mprun.training.state import TrainState

CHANNELS = (1, 3, 4)


def input_trouble(error: Exception, state: TrainState, batch: Batch) -> str | None:
    """What to tell instead of ``error``, which the forward pass of ``batch`` raised.

    Returns:
        One line that names the inputs' dtype and shape and the change that makes the model run; None if none of them does.
    """
    if not isinstance(error, BAD_VALUE):
        return None
    for changed, cure in _changes(batch.inputs):
        if _runs(state, changed):
            return (
                f"the model does not take inputs {_form(batch.inputs)} ({str(error).strip().splitlines()[0]}); {cure}"
            )
    return None


def _changes(inputs: Any) -> Iterator[tuple[Any, str]]:
    """Other inputs to try, each with what it means if they are taken."""
    numbers = map_tensors(inputs, _as_numbers)
    whole = "mprun casts floating-point inputs only, since whole numbers may be ids: return float32 from the dataset"
    if any(not t.is_floating_point() for t in _tensors(inputs)):
        yield numbers, whole + (", as in image.float() / 255" if _dtypes(inputs) == {torch.uint8} else "")
    if not isinstance(inputs, Tensor):
        return
    note = "" if inputs.is_floating_point() else ", and float32"
    if inputs.ndim == 4 and inputs.shape[3] in CHANNELS and inputs.shape[1] not in CHANNELS:
        first = f"it takes channels first: return image.permute(2, 0, 1){note} from the dataset"
        yield numbers.permute(0, 3, 1, 2).contiguous(), first
    if inputs.ndim == 1:
        yield numbers[:, None], f"it takes one with a dimension: return a tensor of shape (1,){note} from the dataset"


def _as_numbers(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor
    return tensor.real.float() if tensor.is_complex() else tensor.float()


@torch.no_grad()
def _runs(state: TrainState, inputs: Any) -> bool:
    """Whether the model takes ``inputs``. Its buffers and the random generators are left as they were."""
    buffers, rng = state.start_window(), capture_rng()
    try:
        with state.policy.region(state.device.type):
            state.model(state.policy.cast_inputs(inputs))
    except BAD_VALUE:
        return False
    finally:
        buffers.restore(state.model.modules())
        restore_rng(rng)
    return True


def _tensors(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(inputs, found.append)
    return found


def _dtypes(inputs: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in _tensors(inputs)}


def _form(inputs: Any) -> str:
    """``uint8 of shape (3, 8, 8)``, without the batch's dimension; of nested inputs all of them."""
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape[1:])}" for t in _tensors(inputs)[:4]
    )
