"""The memory of a training step: predicted from shapes alone, or measured on real tensors, by the same code.

A prediction runs :func:`mprun.training.step.train_step` itself, on fake tensors: torch knows their shape, strides, dtype
and device, computes those of every result, and allocates nothing. So what the policy casts, what autograd saves, what a
checkpointed block gives up, what masters and EMA add is not modelled here: it happens, in the sight of a
:class:`~mprun.numerics.memory.Ledger`.

Compiled code may save less and recompute more than what is counted here: a ``model.compile`` is estimated uncompiled.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mprun.config import Config, DatasetSource, Fp32Matmul
from mprun.data import build_data
from mprun.data.base import Batch, DataSpec
from mprun.imports import import_compiler
from mprun.models.build import build_model
from mprun.numerics.memory import Counted, Footprint, Ledger, Workspace
from mprun.numerics.tensor_cores import misfits
from mprun.precision.policy import map_tensors
from mprun.precision.workspace import cpu_workspace
from mprun.training.build import build, switches
from mprun.training.fakes import Untouched, explained, make_fake, resized
from mprun.training.run import make_plan
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import train_step

CUDA_GRANULE = 512  # what CUDA's caching allocator rounds to


@contextmanager
def predicting(config: Config, device: torch.device) -> Iterator[Callable[[int], Footprint]]:
    """A function from batch size to :class:`Footprint`, for the run that ``config`` describes. It may be called repeatedly.

    Args:
        config: checked. Its dataset is built, and two examples of it are looked at.
        device: of the run. On a machine without that device, the fake tensors are the CPU's: under the same operation list, so
            with the same dtypes; what differs is what a few kernels save (the mask of a dropout, attention with dropout).

    Raises:
        ConfigError: as building raises it, or the model's forward depends on values.
    """
    config = copy.deepcopy(config)
    config.model.compile = False
    pretended = device.type == "cuda" and not torch.cuda.is_available()
    if pretended:
        config.precision.fp32_matmul = Fp32Matmul.ieee  # takes the same memory, and needs no GPU to be legal
    here = torch.device("cpu") if pretended else device
    granule = CUDA_GRANULE if device.type == "cuda" else 1
    with switches(config, here) as kernels:
        workspace = _workspace(device, kernels)
        import_compiler()
        spec, example, held = _look(config)
        with Untouched():
            model = build_model(config.model, spec, trust=config.trust)
        batches = max(spec.train_examples // config.train.batch_size, 1)
        schedule = build_schedule(config.schedule, make_plan(config, batches).steps)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            make_fake(model, here, channels_last=config.model.channels_last)
            with Ledger(blind=True), explained(config.model.name):
                state = build_state(config, model, schedule, here)
        del model.to

        def predict(batch_size: int) -> Footprint:
            with mode, explained(config.model.name):
                window = [resized(example, batch_size, here) for _ in range(config.train.accumulate)]
                data = [torch.empty(held, dtype=torch.uint8, device=here)]
                # From the third micro-batch on nothing is new.
                ledger = Ledger(granule=granule, blind=True, workspace=workspace)
                return footprint(state, window[:2], data + [t for b in window for t in _tensors(b)],
                                 accumulate=config.train.accumulate, ledger=ledger)  # fmt: skip

        yield predict


def measure(config: Config, device: torch.device) -> Footprint:
    """One real step (two, where the optimizer makes its state in the first) of the run that ``config`` describes."""
    config = copy.deepcopy(config)
    config.model.compile = False
    with switches(config, device) as kernels:
        state, data, _ = build(config, device)
        window = list(islice(data.train_batches(0), config.train.accumulate))
        tensors = [*_held(data, device), *(t for batch in window for t in _tensors(batch))]
        granule = CUDA_GRANULE if device.type == "cuda" else 1
        ledger = Ledger(granule=granule, workspace=_workspace(device, kernels))
        found = footprint(state, window, tensors, accumulate=len(window), ledger=ledger)
        if device.type == "cuda":
            found = replace(found, allocator_peak=torch.cuda.max_memory_allocated(device))
        return found


def footprint(
    state: TrainState, window: Sequence[Batch], data: Sequence[Tensor], *, accumulate: int, ledger: Ledger
) -> Footprint:
    """Take a training step with ``state`` and count. The state moves, as in any step.

    Args:
        state: real or fake.
        window: micro-batches of one step; two stand for more.
        data: tensors that lie on the device beside the state, those of ``window`` among them.
        accumulate: micro-batches that the step has in truth.
        ledger: empty.
    """
    ledger.own("parameters", state.model.parameters())
    ledger.own("masters", (master for _, master in state.weights.pairs))
    ledger.own("buffers", state.model.buffers())
    ledger.own("ema", state.ema.shadow.values() if state.ema is not None else ())
    ledger.own("data", data)
    ledger.own("optimizer", _optimizer_tensors(state, state.params))
    ledger.own(
        "counters", [*_held(state, state.device), *(t for g in state.optimizer.param_groups for t in _tensors(g))]
    )
    with ledger, ledger.watching(state.model):
        if not state.fused and not state.optimizer.state:
            train_step(state, window)
            ledger.own("optimizer", _optimizer_tensors(state, state.params))
        ledger.start()
        train_step(state, window)
    computing = (
        [(e.path, e.module) for e in state.plan if not e.fp32] if state.policy.compute_dtype.itemsize == 2 else []
    )
    modules, elements = _by_module(state, ledger.found)
    return Footprint(
        batch_size=len(window[0].targets),
        accumulate=accumulate,
        counted=ledger.found,
        modules=modules,
        classes={name: type(module).__name__ for name, module in state.model.named_modules()},
        elements=elements,
        misfits=misfits(computing, ledger.found.rows, ledger.found.heads),
    )


def largest_batch(predict: Callable[[int], Footprint], limit: int, *, start: int) -> Footprint | None:
    """The footprint of the largest micro-batch whose peak is at most ``limit`` bytes; None if not even 1 fits.

    Memory is linear in the batch but for a change of the moment of the peak. So the next guess is the line through the two
    nearest known points, and the answer is only taken once it fits and one more does not. (2**30 is large enough, too.)
    """
    low, high = predict(1), predict(max(start, 2))
    if low.peak_bytes > limit:
        return None
    while high.peak_bytes <= limit:  # start was too small: go where the line says, and a little beyond
        slope = max((high.peak_bytes - low.peak_bytes) / (high.batch_size - low.batch_size), 1e-9)
        reach = int(min((limit - high.peak_bytes) / slope, 2.0**30)) + high.batch_size
        if high.batch_size >= 2**30:
            return high
        low, high = high, predict(max(reach, high.batch_size) + 1)
    while high.batch_size - low.batch_size > 1:
        slope = (high.peak_bytes - low.peak_bytes) / (high.batch_size - low.batch_size)
        guess = low.batch_size + int((limit - low.peak_bytes) / slope)
        middle = predict(min(max(guess, low.batch_size + 1), high.batch_size - 1))
        low, high = (middle, high) if middle.peak_bytes <= limit else (low, middle)
    return low


# --- from a configuration to fake tensors -----------------------------------------------------------------------------


def _look(config: Config) -> tuple[DataSpec, Batch, int]:
    """The facts of the dataset, a batch of at most two examples of it, and how many bytes of it lie on the device."""
    small = copy.deepcopy(config)
    small.train.batch_size, small.dataset.workers = 2, 0
    cpu = torch.device("cpu")
    random = config.dataset.source is DatasetSource.mprun and config.dataset.name == "synthetic"
    with Untouched() if random else nullcontext():
        data = build_data(small, device=cpu)
    example = next(iter(data.train_batches(0)))
    return data.spec, example, sum(_storage_bytes(_held(data, cpu)))


def _workspace(device: torch.device, kernels: str) -> Workspace | None:
    """What the kernels of the CPU take for themselves (``kernels``: see :func:`switches`); of a GPU's nobody knows."""
    return partial(cpu_workspace, fast_half=kernels == "fast") if device.type == "cpu" else None


# --- who owns what ----------------------------------------------------------------------------------------------------


def _by_module(state: TrainState, counted: Counted) -> tuple[dict[str, Counter[str]], dict[str, Counter[int]]]:
    """Bytes by module and category, and elements by category and size."""
    modules: dict[str, Counter[str]] = {}
    elements: dict[str, Counter[int]] = {}

    def add(name: str, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            modules.setdefault(name.rpartition(".")[0], Counter())[kind] += tensor.numel() * tensor.element_size()
            elements.setdefault(kind, Counter())[tensor.element_size()] += tensor.numel()

    for name, parameter in state.model.named_parameters():
        add(name, "parameters", [parameter])
    for name, truth in state.weights:
        if name in state.weights.by_name:
            add(name, "masters", [truth])
        if name in counted.graded:
            add(name, "gradients", [truth])
        add(name, "optimizer", _optimizer_tensors(state, [truth]))
    for name, buffer in state.model.named_buffers():
        add(name, "buffers", [buffer])
    for name, shadow in state.ema.shadow.items() if state.ema is not None else ():
        add(name, "ema", [shadow])
    for (path, kind), size in counted.saved.items():
        modules.setdefault(path, Counter())[kind] += size
    return modules, elements


def _optimizer_tensors(state: TrainState, params: Iterable[Tensor]) -> list[Tensor]:
    held = state.optimizer.state
    return [t for p in params if p in held for t in _tensors(held[p])]


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in ``value``: a batch, or something nested; parameters of an optimizer's group are left out."""
    if isinstance(value, Batch):
        return _tensors((value.inputs, value.targets))
    if isinstance(value, dict) and "params" in value:
        value = {key: item for key, item in value.items() if key != "params"}
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def _held(value: Any, device: torch.device) -> list[Tensor]:
    """Tensors on ``device`` in the fields of a dataclass, and of dataclasses in those."""
    found: list[Tensor] = []
    for item in (getattr(value, field.name) for field in fields(value)):
        if isinstance(item, Tensor):
            found += [item] if item.device.type == device.type else []
        elif is_dataclass(item) and not isinstance(item, type):
            found += _held(item, device)
    return found


def _storage_bytes(tensors: Iterable[Tensor]) -> Iterator[int]:
    yield from {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()
