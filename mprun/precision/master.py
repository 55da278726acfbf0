"""FP32 master parameters: who owns the truth when the model's own parameters are half.

An update below half an ulp of a half weight rounds away, and N lost updates lose N times the update. So the optimizer
owns a float32 copy M of every half parameter θ::

    after each micro-batch:  M.grad += float32(θ.grad);  θ.grad = None     (FP32 accumulation)
    after the optimizer:     θ := cast(M)                                  (exact: the rounded master, nothing else)

In ``autocast`` and ``full`` mode M *is* θ and nothing is copied; in ``pure`` mode too, which is what makes it a negative
control. FP32 modules have no second copy either. Tied parameters are one tensor, so they have one master; frozen ones
have none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Masters:
    """Pairs of half parameter and float32 master, and the names under which the optimizer knows the truth."""

    def __init__(self, model: nn.Module, truths: dict[str, Tensor]) -> None:
        """Pair ``model``'s (already cast) parameters with ``truths``.

        Args:
            model: after the cast.
            truths: float32 values by parameter name from before the cast. Parameters that stayed float32 need none.
        """
        self.named: list[tuple[str, Tensor]] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.by_name: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            truth: Tensor = parameter
            if name in truths and parameter.requires_grad and parameter.dtype != torch.float32:
                truth = nn.Parameter(truths[name].detach().clone(memory_format=torch.preserve_format))
                self.pairs.append((parameter, truth))
                self.by_name[name] = truth
            self.named.append((name, truth))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and truths of all parameters, frozen ones included, in the model's order."""
        return iter(self.named)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the half gradients to the masters' float32 gradients, and drop them."""
        sums, addends = [], []
        for parameter, master in self.pairs:
            grad = parameter.grad
            if grad is None:
                continue
            if (sum_ := master.grad) is None:
                master.grad = grad.float()
            else:
                sums.append(sum_)
                addends.append(grad)
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, addends)  # in float32, whatever the addends are

    @torch.no_grad()
    def write_back(self) -> None:
        """θ := cast(M), rounded to nearest."""
        if self.pairs:
            parameters, masters = zip(*self.pairs, strict=True)
            torch._foreach_copy_(list(parameters), list(masters))


def take_truths(model: nn.Module, *, mode: str) -> dict[str, Tensor]:
    """Float32 values of the trained parameters, to be taken before the cast; empty where θ is the truth itself."""
    if mode != "master":
        return {}
    return {
        name: p.detach().float() for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()
    }
