"""The steady state never waits for the device: no operation that reads a number on the host, between log points."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.training.step import train_step
from tests.conftest import BF16, FP16
from tests.test_casting import MASTER, PURE, Net, net_batch

SYNCHRONISING = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "_assert_async",
    "masked_select",
    "unique",
    "equal",
    "is_same_size",
}


# On the CPU these read memory without an operation that could be counted.
READERS = ("tolist", "numpy", "__array__")


class Count(TorchDispatchMode):
    """Counts operations after which the host has waited for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.on = True
        self.methods = {name: getattr(torch.Tensor, name) for name in READERS}

    def __enter__(self) -> Any:
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, self._counting(name, method))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for name, method in self.methods.items():
            setattr(torch.Tensor, name, method)

    def _counting(self, name: str, method: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.found[name] += 1
            return method(tensor, *args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        copies_to_host = (
            name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu") and args[0].device.type != "cpu"
        )
        if self.on and (name in SYNCHRONISING or copies_to_host):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [{}, BF16, FP16, MASTER, PURE], ids=["fp32", "bf16", "fp16", "master", "pure"])
@pytest.mark.parametrize(
    ("optimizer", "allowed"), [("adamw", 0), ("sgd", 0), ("adagrad", 0), ("rmsprop", 1), ("lamb", 1)]
)
def test_fifty_steps_without_a_host_read(make_state, mode, optimizer, allowed):
    """None with a fused optimizer, at most one a step otherwise; with clipping, EMA, a schedule, BatchNorm and skips."""
    keys = {
        "optimizer.name": optimizer,
        "train.clip_norm": 1.0,
        "train.ema.decay": 0.99,
        "schedule.name": "cosine",
        "schedule.warmup_steps": 3,
    }
    if mode in (FP16, MASTER, PURE):
        keys["precision.loss_scale.init"] = 2.0**22  # some steps overflow: a skip must not read either
    state = make_state(Net(), **{**mode, **keys})
    results = []
    window = [net_batch()]
    train_step(state, window)
    counts = Count()
    if allowed:
        # What a third-party optimizer reads inside its own step is its own affair.
        state.optimizer.register_step_pre_hook(lambda *_: setattr(counts, "on", False))
        state.optimizer.register_step_post_hook(lambda *_: setattr(counts, "on", True))
    with counts as count:
        for _ in range(50):
            results.append(train_step(state, window))
    assert sum(count.found.values()) <= 50 * allowed, count.found
    rows = [result.read() for result in results]
    if mode is not PURE:  # which may fall apart, and then skips for good
        assert sum(row.applied for row in rows) >= 30
    if mode in (FP16, MASTER):
        assert not all(row.applied for row in rows)


def test_the_counter_sees_what_it_should():
    with Count() as count:
        bool(torch.ones(()) > 0)
        torch.ones(()).item()
        torch.ones(3).tolist()
        torch.ones(3).numpy()
    assert count.found == {"_local_scalar_dense": 2, "tolist": 1, "numpy": 1}
