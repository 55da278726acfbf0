"""How a step ends, on the device and on the host: verdict, packed numbers, row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

APPLIED, OVERFLOW, NONFINITE_LOSS, NONFINITE_GRAD, EMPTY = range(5)


@dataclass(frozen=True)
class Verdict:
    """What happens to a window: 0-D bool tensors on the device, exactly one of them true."""

    applied: Tensor
    overflow: Tensor
    nonfinite_loss: Tensor
    nonfinite_grad: Tensor
    empty: Tensor

    @property
    def failed(self) -> Tensor:
        """Dropped for a non-finite value."""
        return self.overflow | self.nonfinite_loss | self.nonfinite_grad

    @property
    def outcome(self) -> Tensor:
        """0-D float64 code: APPLIED, OVERFLOW, NONFINITE_LOSS, NONFINITE_GRAD or EMPTY."""
        return (
            self.overflow * OVERFLOW
            + self.nonfinite_loss * NONFINITE_LOSS
            + self.nonfinite_grad * NONFINITE_GRAD
            + self.empty * EMPTY
        ).double()


@dataclass(frozen=True)
class StepRow:
    """A step's numbers on the host."""

    loss: float
    grad_norm: float
    loss_scale: float
    lr: float
    valid_targets: int
    correct: int
    outcome: int
    steps_applied: int
    consecutive_skips: int
    inf_inputs: int

    @property
    def applied(self) -> bool:
        """Whether the optimizer step was applied."""
        return self.outcome == APPLIED


@dataclass(frozen=True)
class StepResult:
    """A step's numbers on the device, and how many micro-batches were computed.

    ``packed`` is float64 of shape (10,): the fields of :class:`StepRow`. ``loss`` is the mean over the window's valid
    targets (never times S), ``grad_norm`` the true norm before clipping, ``loss_scale`` the S of this window and
    ``lr`` the learning rate that this step used or would have used. ``inf_inputs`` counts the input tensors that the cast
    to the policy's dtype made infinite.
    """

    packed: Tensor
    micro_batches: int

    @property
    def loss(self) -> Tensor:
        """Mean loss over the window's valid targets, 0-D float64."""
        return self.packed[0]

    @property
    def grad_norm(self) -> Tensor:
        """True global gradient norm before clipping, 0-D float64; non-finite on a skip."""
        return self.packed[1]

    @property
    def loss_scale(self) -> Tensor:
        """The S of this window, 0-D float64."""
        return self.packed[2]

    @property
    def lr(self) -> Tensor:
        """The learning rate of this step, 0-D float64."""
        return self.packed[3]

    @property
    def valid_targets(self) -> Tensor:
        """How many targets counted, 0-D float64."""
        return self.packed[4]

    @property
    def applied(self) -> Tensor:
        """Whether the optimizer step was applied, 0-D bool."""
        return self.packed[6] == APPLIED

    def read(self) -> StepRow:
        """The numbers on the host. Waits for the device."""
        return unpack(self.packed.tolist())


def unpack(values: Sequence[float]) -> StepRow:
    """A row of packed numbers as a :class:`StepRow`."""
    loss, norm, scale, lr, *counts = values
    return StepRow(loss, norm, scale, lr, *(int(count) for count in counts))
