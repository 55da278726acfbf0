"""From a checked configuration to a :class:`~mprun.training.loop.Run` that is ready to go, and the switches around it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mprun.config import Config
from mprun.data import build_data
from mprun.data.base import Data
from mprun.errors import CheckpointError, ConfigError
from mprun.imports import import_compiler
from mprun.models.build import build_model
from mprun.numerics.watchable import select
from mprun.precision.cpu_autocast import cuda_operation_list
from mprun.precision.cpu_half import cpu_half_kernels, resolve
from mprun.precision.policy import PrecisionPolicy, check_support, matmul_precision
from mprun.training.checkpoint import load_init
from mprun.training.env import resolve_device, seed_everything
from mprun.training.heap import freed_memory_kept
from mprun.training.run import Plan, make_plan
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state

# What torch asks for where products on a GPU are to be the same in every run.
CUBLAS, REPRODUCIBLE = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


@contextmanager
def switches(config: Config, device: torch.device) -> Iterator[str]:
    """Everything global that a run sets, put back at the end: TF32 flags, determinism, CPU kernels and operation list.

    On the CPU freed memory stays in the process meanwhile.

    Yields:
        Which kernels compute FP16 on the CPU: ``fast``, ``native`` or ``none``.

    Raises:
        PrecisionError: the device or this torch cannot do what the policy names.
        ConfigError: ``deterministic`` on a GPU, and the environment asks cuBLAS for the contrary.
    """
    policy = PrecisionPolicy.from_config(config.precision)
    check_support(policy, device)
    check_support(policy.for_eval(config.precision.eval_dtype), device)
    dtypes = {policy.compute_dtype, policy.for_eval(config.precision.eval_dtype).compute_dtype}
    half_dtype = torch.float16 if torch.float16 in dtypes else None
    kernels = resolve(config.numerics.cpu_fp16.value, device_type=device.type, compute_dtype=half_dtype)
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(policy))
        stack.enter_context(_determinism(config.deterministic, device))
        if dtypes & {torch.float16, torch.bfloat16}:
            stack.enter_context(_no_fused_attention_layer())
        if device.type == "cpu":
            stack.enter_context(freed_memory_kept())
        if device.type == "cpu" and dtypes & {torch.float16, torch.bfloat16}:
            stack.enter_context(cuda_operation_list())
            stack.enter_context(cpu_half_kernels(half=kernels == "fast", bf16=torch.bfloat16 in dtypes))
        yield kernels


@contextmanager
def _no_fused_attention_layer() -> Iterator[None]:
    """Switch off the call in which torch evaluates a transformer layer past its modules, borders included.

    It asks only whether the autocast of CUDA is on: under the CPU's it would mix half inputs with float32 weights, into NaN.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _determinism(on: bool, device: torch.device) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark
    with _reproducible_cublas() if on and device.type == "cuda" else nullcontext():
        _set_deterministic(on)
        if on:
            cudnn.benchmark = False
        try:
            yield
        finally:
            _set_deterministic(before[0])
            cudnn.benchmark = before[1]


@contextmanager
def _reproducible_cublas() -> Iterator[None]:
    """Give cuBLAS the workspace with which its results are reproducible. Without it torch refuses every product.

    Raises:
        ConfigError: the environment holds another setting.
    """
    given = os.environ.get(CUBLAS)
    if given is not None and given not in REPRODUCIBLE:
        raise ConfigError(
            f"deterministic=true: with the environment variable {CUBLAS}={given!r} cuBLAS may give other numbers in every run; "
            f"unset it, or set it to {' or '.join(REPRODUCIBLE)}"
        )
    os.environ.setdefault(CUBLAS, REPRODUCIBLE[0])
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(CUBLAS, None)


def _set_deterministic(on: bool) -> None:
    # Asked first, because setting it imports torch's compiler, which takes a second.
    if torch.are_deterministic_algorithms_enabled() != on:
        torch.use_deterministic_algorithms(on)


def device_of(config: Config) -> torch.device:
    """The device that ``config`` names, on this machine."""
    return resolve_device(config.device)


def build(config: Config, device: torch.device, *, resuming: bool = False) -> tuple[TrainState, Data, Plan]:
    """Seed, then build data, model, schedule and state. Must run inside :func:`switches`.

    Raises:
        ConfigError: a name, argument or combination is not legal.
    """
    seed_everything(config.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    import_compiler()
    data = build_data(config, device=device)
    model = build_model(config.model, data.spec, trust=config.trust)
    if config.model.init is not None and not resuming:  # a checkpoint holds what became of it
        _start_from(model, config.model.init)
    mark = fingerprint(model) if config.model.init is None or not resuming else None
    plan = make_plan(config, data.batches_per_epoch)
    if plan.steps < 1:
        raise ConfigError(
            f"an epoch has no batch: {data.spec.train_examples} examples, train.batch_size={config.train.batch_size}, "
            f"train.drop_last={config.train.drop_last}; use a smaller batch or train.drop_last=false"
        )
    schedule = build_schedule(config.schedule, plan.steps)
    state = build_state(config, model, schedule, device)
    state.num_classes, state.fingerprint = data.spec.num_classes, mark
    select(model, config.probe.modules)  # a pattern that names nothing is refused before the run has a folder
    return state, data, plan


def fingerprint(model: nn.Module) -> str:
    """12 hex digits by which two initialisations are told apart: names, shapes, and up to 4,096 values of each parameter.

    A hash of every value would take seconds for a large model, and initialisations that differ do so everywhere.
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.layout != torch.strided or nn.parameter.is_lazy(parameter) or parameter.is_meta:
            continue
        found.update(f"{name} {tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()
        some = values[:: max(values.numel() // 4096, 1)].cpu()
        found.update((some.float() if some.is_floating_point() else some).contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _start_from(model: nn.Module, path: str) -> None:
    """Load ``model.init``; an error about the file names the key that asked for it."""
    try:
        load_init(model, Path(path))
    except CheckpointError as error:
        if "model.init" in str(error):
            raise
        raise CheckpointError(f"model.init={path}: {str(error).removeprefix(f'{path}: ')}") from error
