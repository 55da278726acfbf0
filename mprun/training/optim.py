"""Optimizers by name, from ``torch.optim`` or timm.

Weight decay applies to matrices only (``ndim >= 2``): decaying gains and biases of normalisation layers pulls them to
zero for no benefit. ``fused`` optimizers take the finite flag and a gradient divisor as tensors, so that a step can be
skipped on the device without the host knowing; they are chosen wherever torch has one for the device.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.config import OptimizerConfig
from mprun.errors import ConfigError, nearest
from mprun.training.optim_arguments import read_arguments
from mprun.training.optim_catalog import REFUSED

# Fused kernels that obey grad_scale and found_inf.
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
# What a constructor or a first step raises when a value makes no sense to it.
_BAD_VALUE = (
    TypeError,
    ValueError,
    RuntimeError,
    AssertionError,
    ImportError,
    LookupError,
    ArithmeticError,
    AttributeError,
)


def torch_optimizers() -> dict[str, type[Optimizer]]:
    """``torch.optim`` classes by lower-case name."""
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    }


def find_optimizer(name: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class that ``optimizer.name`` names (torch's if it has one, otherwise timm's), and the arguments in the name.

    Many of timm's names are a class with arguments: ``cadamw`` is AdamW with ``caution``, ``nesterov`` SGD with Nesterov
    momentum. What has a momentum there has 0.9 by default, as with timm's own factory.

    Raises:
        ConfigError: unknown name, or an optimizer that this loop cannot serve.
    """
    known, wanted = torch_optimizers(), name.lower()
    if wanted in REFUSED:
        raise ConfigError(
            f"optimizer.name={name} {REFUSED[wanted]}; choose a first-order optimizer such as adamw or sgd"
        )
    if wanted in known:
        return known[wanted], {}
    from timm.optim import get_optimizer_info, list_optimizers

    names = list_optimizers()
    if wanted.startswith("lookahead_"):
        raise ConfigError(
            f"optimizer.name={name}: Lookahead moves the weights behind the back of the optimizer that it wraps; use "
            f"optimizer.name={wanted.removeprefix('lookahead_')}, and train.ema.decay for an average of the weights"
        )
    if wanted not in names:
        raise ConfigError(f"optimizer.name={name} is unknown: {nearest(name, [*known, *names])}")
    info = get_optimizer_info(wanted)
    if isinstance(info.opt_class, str):
        package = info.opt_class.partition(".")[0]
        raise ConfigError(
            f"optimizer.name={name} is a kernel of {package}, which mprun does not run; choose one of torch's or timm's own"
        )
    implied = {**({"momentum": 0.9} if info.has_momentum else {}), **(info.defaults or {})}
    if "momentum_dtype" in inspect.signature(info.opt_class).parameters:
        implied["momentum_dtype"] = torch.float32  # half by default: the state of an optimizer is float32 here
    return info.opt_class, implied


def build_optimizer(config: OptimizerConfig, named: Iterable[tuple[str, Tensor]], device: torch.device) -> Optimizer:
    """The optimizer of ``config`` over ``named`` parameters (those that require grad), on ``device``.

    Args:
        config: the ``optimizer`` node.
        named: pairs of name and parameter, as the optimizer will own them (masters, where there are any).
        device: where the parameters live; decides whether a fused kernel exists.

    Returns:
        An optimizer whose ``param_groups`` carry ``names``. If it is fused, ``lr`` is a 0-D tensor and the state of every
        parameter exists already: a fused kernel allocates state even in a step that it then skips.

    Raises:
        ConfigError: unknown name or argument, a value that makes no sense, ``fused=true`` where there is no fused kernel,
            or nothing to train.
    """
    cls, implied = find_optimizer(config.name)
    given = read_arguments(config, dict(inspect.signature(cls).parameters))
    arguments = {**implied, **given}
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter (requires_grad is false everywhere): nothing to train")
    fused = use_fused(config, cls, arguments, [p for _, p in trainable], device)
    lr: float | Tensor = config.lr
    try:
        _try_out(cls, arguments)
        if fused:
            # float64 on the CPU, so that the update equals the one with a Python float; CUDA's kernel reads float32.
            lr = torch.tensor(config.lr, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
            arguments["fused"] = True
        optimizer: Optimizer = cls(_groups(config, cls, trainable), lr=lr, **arguments)  # type: ignore[call-arg]
    except _BAD_VALUE as error:
        hint = (
            "; optimizer.name=nmuon gives what is no matrix to AdamW" if "Muon only supports 2D" in str(error) else ""
        )
        raise ConfigError(
            f"optimizer.name={config.name} refused its arguments {given}: {error or type(error).__name__}{hint}"
        ) from error
    if fused:
        _allocate_state(optimizer)
    _keep_generator(optimizer)
    return optimizer


def _groups(config: OptimizerConfig, cls: type[Optimizer], trainable: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    decays = "weight_decay" in inspect.signature(cls).parameters
    groups = []
    for decay, chosen in ((config.weight_decay, True), (0.0, False)):
        members = [(name, p) for name, p in trainable if (p.ndim >= 2) is chosen]
        if members:
            names, tensors = zip(*members, strict=True)
            group = {"params": list(tensors), "names": list(names)}
            groups.append({**group, "weight_decay": decay} if decays else group)
    return groups


def _try_out(cls: type[Optimizer], arguments: dict[str, Any]) -> None:
    """Three steps on four numbers: many constructors look at their arguments when they step, and then it is too late.

    Raises:
        Exception: whatever the optimizer raises.
        ValueError: finite gradients made a weight NaN or inf.
    """
    weight = torch.nn.Parameter(torch.tensor([[0.5, -0.25], [1.0, 0.125]]))
    optimizer = cls([weight], lr=1e-3, **arguments)  # type: ignore[call-arg]
    if _generator(optimizer) is not None:
        return  # compiled at its first step, which takes seconds
    for _ in range(3):
        weight.grad = weight.detach().clone()
        optimizer.step()
    if not weight.isfinite().all():
        raise ValueError("with them finite gradients make the weights NaN or inf")


def use_fused(
    config: OptimizerConfig, cls: type[Optimizer], arguments: dict[str, Any], params: list[Tensor], device: torch.device
) -> bool:
    """Whether the fused kernel is used: asked for, or possible and not refused (``optimizer.fused=false``)."""
    reason = ""
    if cls.__module__.split(".")[0] != "torch" or cls.__name__ not in FUSED:
        reason = f"{config.name} has no fused kernel"
    elif arguments.get("dampening") or arguments.get("differentiable") or arguments.get("foreach"):
        reason = "dampening, differentiable and foreach exclude it"
    elif device.type not in ("cpu", "cuda") or (cls.__name__ == "Adagrad" and device.type != "cpu"):
        reason = f"there is none for {config.name} on {device.type}"
    elif not all(p.is_floating_point() for p in params):
        reason = "complex parameters exclude it"
    if reason and config.fused:
        raise ConfigError(f"optimizer.fused=true: {reason}; use optimizer.fused=false")
    return not reason and config.fused is not False


def is_fused(optimizer: Optimizer) -> bool:
    """Whether ``step()`` obeys ``grad_scale`` and ``found_inf``."""
    return bool(optimizer.param_groups[0].get("fused"))


def _allocate_state(optimizer: Optimizer) -> None:
    """Give every parameter the state that its first fused step would create, all zero."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if kind in ("Adam", "AdamW"):
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            elif kind == "SGD" and group["momentum"]:
                # Zero momentum gives the first step buf = grad, as torch's own first step does (dampening is 0 here).
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def _generator(optimizer: Optimizer) -> random.Random | None:
    """The random generator that an optimizer (timm's kron) keeps for itself."""
    found = getattr(optimizer, "rng", None)
    return found if isinstance(found, random.Random) else None


def _keep_generator(optimizer: Optimizer) -> None:
    """Keep an optimizer's own random generator in its first group, where a checkpoint finds it."""
    generator, group = _generator(optimizer), optimizer.param_groups[0]
    if generator is None:
        return
    group["generator"] = generator.getstate()

    def before(*_: Any) -> None:
        generator.setstate(group["generator"])

    def after(*_: Any) -> None:
        group["generator"] = generator.getstate()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
