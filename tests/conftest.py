"""Shared fixtures: small states built by hand, so that a test says in its own lines what it trains."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Workers share the cores. Before torch is loaded, and for child processes too.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // workers, 1)))

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from mprun import options, precision_files
from mprun.config import Config, Task
from mprun.config_check import to_config
from mprun.data.base import Batch
from mprun.training.build import switches
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state

CPU = torch.device("cpu")

FP16 = {"precision.name": "fp16_dynamic", "precision.mode": "autocast", "precision.compute_dtype": "float16",
        "precision.loss_scale.kind": "dynamic"}  # fmt: skip
BF16 = {"precision.name": "bf16", "precision.mode": "autocast", "precision.compute_dtype": "bfloat16"}
SGD = {"optimizer.name": "sgd", "optimizer.weight_decay": 0.0}


# Set-ups and single tests of ten seconds and more. Workers begin with them: at the end of the list a worker would wait for
# another's, and modules there are split between workers, which then make their fixtures twice.
FIRST = {
    f"test_{name}.py" for name in ("wandb_records", "tune", "verify", "wheel", "resume_rules", "sweeps", "tracking")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules come first. ``-m gpu`` on a machine without a GPU skips, and says so."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(autouse=True)
def no_file_was_read() -> None:
    """Names of recipe and precision files are a process's; another test's file of that name would give this one a longer name."""
    options._read.clear()
    precision_files._read.clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors are quicker with one, and sums come out the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_configs: dict[str, Config] = {}
_schema = OmegaConf.structured(Config)


def make_config(**given: Any) -> Config:
    """The schema's defaults with dotted keys set (``__`` is not needed: pass a dict with ``**``), checked.

    Checking takes longer than most small states take to train: the same keys are checked once, and each call gets a copy.
    """
    name = repr(given)
    if name not in _configs:
        node = copy.deepcopy(_schema)
        for key, value in given.items():
            OmegaConf.update(node, key, value)
        _configs[name] = to_config(node)
    return copy.deepcopy(_configs[name])


def batch(inputs: Any, targets: Tensor, ids: list[int] | None = None) -> Batch:
    """A batch with ids 0, 1, ... unless given."""
    return Batch(inputs, targets, torch.tensor(ids if ids is not None else list(range(len(targets)))))


@pytest.fixture
def make_state() -> Iterator[Callable[..., TrainState]]:
    """``make_state(model, steps=..., **{"optimizer.lr": 0.1})``: a state on the CPU, inside its switches until teardown."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def make(model: nn.Module, *, steps: int = 100, **keys: Any) -> TrainState:
            config = make_config(**keys)
            stack.enter_context(switches(config, CPU))
            return build_state(config, model, build_schedule(config.schedule, steps), CPU)

        yield make


def toy(weight: float = 0.0) -> nn.Linear:
    """One weight, no bias."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def toy_batch(target: float, x: float = 1.0) -> Batch:
    """One example of a regression."""
    return batch(torch.tensor([[x]]), torch.tensor([[target]]))


REGRESSION = {"dataset.task": Task.regression}

__all__ = ["BF16", "CPU", "FP16", "REGRESSION", "SGD", "batch", "make_config", "replace", "toy", "toy_batch"]
