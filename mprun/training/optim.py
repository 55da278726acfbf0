"""Optimizers by name, from ``torch.optim`` or timm.

Weight decay applies to matrices only (``ndim >= 2``): decaying gains and biases of normalisation layers pulls them to
zero for no benefit. ``fused`` optimizers take the finite flag and a gradient divisor as tensors, so that a step can be
skipped on the device without the host knowing; they are chosen wherever torch has one for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.config import OptimizerConfig
from mprun.errors import ConfigError, nearest

# Fused kernels that obey grad_scale and found_inf, with the arguments under which the fused update is not the plain one.
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
# Optimizers that this loop cannot serve, and why.
REFUSED = {
    "lbfgs": "evaluates the loss several times inside one step, which neither loss scaling nor a skipped step can follow",
    "sparseadam": "takes sparse gradients only",
    "adahessian": "needs second derivatives, for which the graph would have to be kept",
}
# Keys of the config that are arguments too: given in optimizer.kwargs they would compete with their own key.
OWN_KEYS = ("lr", "weight_decay", "momentum", "betas", "eps", "fused", "params")


def torch_optimizers() -> dict[str, type[Optimizer]]:
    """``torch.optim`` classes by lower-case name."""
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    }


def optimizer_class(name: str) -> type[Optimizer]:
    """The class that ``optimizer.name`` names: torch's if it has one, otherwise timm's.

    Raises:
        ConfigError: unknown name, or an optimizer that needs a closure.
    """
    known = torch_optimizers()
    if name.lower() in REFUSED:
        raise ConfigError(
            f"optimizer.name={name} {REFUSED[name.lower()]}; choose a first-order optimizer such as adamw or sgd"
        )
    if name.lower() in known:
        return known[name.lower()]
    from timm.optim import get_optimizer_class, list_optimizers

    names = list_optimizers()
    if name.lower() not in names:
        raise ConfigError(f"optimizer.name={name} is unknown: {nearest(name, [*known, *names])}")
    return get_optimizer_class(name.lower(), bind_defaults=False)  # type: ignore[no-any-return]


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
        ConfigError: unknown name or argument, ``fused=true`` where there is no fused kernel, or nothing to train.
    """
    cls = optimizer_class(config.name)
    parameters = dict(inspect.signature(cls).parameters)
    arguments: dict[str, Any] = {**config.kwargs}
    for key in OWN_KEYS:
        if key in arguments:
            raise ConfigError(f"optimizer.kwargs.{key}: set optimizer.{key} instead, it is a key of its own")
    for key in ("momentum", "betas", "eps"):
        value = getattr(config, key)
        if value is None:
            continue
        if key not in parameters:
            raise ConfigError(f"optimizer.{key}={value}: {config.name} takes no {key!r}; legal: {_legal(parameters)}")
        arguments[key] = tuple(value) if key == "betas" else value
    unknown = [key for key in arguments if key not in parameters]
    if unknown:
        raise ConfigError(
            f"optimizer.kwargs.{unknown[0]} is no argument of {config.name}: {nearest(unknown[0], list(parameters))}"
        )
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter (requires_grad is false everywhere): nothing to train")
    fused = use_fused(config, cls, arguments, [p for _, p in trainable], device)
    lr: float | Tensor = config.lr
    if fused:
        # float64 on the CPU, so that the update equals the one with a Python float; CUDA's kernel reads float32.
        lr = torch.tensor(config.lr, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        arguments["fused"] = True
    groups = []
    for decay, chosen in ((config.weight_decay, True), (0.0, False)):
        members = [(name, p) for name, p in trainable if (p.ndim >= 2) is chosen]
        if members:
            names, tensors = zip(*members, strict=True)
            groups.append({"params": list(tensors), "names": list(names), "weight_decay": decay})
    if "weight_decay" not in parameters:
        if config.weight_decay:
            raise ConfigError(f"optimizer.weight_decay={config.weight_decay}: {config.name} takes none; set it to 0")
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        optimizer: Optimizer = cls(groups, lr=lr, **arguments)  # type: ignore[call-arg]
    except (TypeError, ValueError, RuntimeError, AssertionError, ImportError, LookupError) as error:
        raise ConfigError(f"optimizer.name={config.name} refused its arguments {arguments}: {error}") from error
    if fused:
        _allocate_state(optimizer)
    return optimizer


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


def _legal(parameters: dict[str, Any]) -> str:
    return ", ".join(
        name for name in parameters if name not in ("params", "foreach", "maximize", "capturable", "differentiable")
    )
