"""Which arguments of an optimizer the configuration gives, each checked for its kind against the constructor's signature.

``optimizer.momentum``, ``betas`` and ``eps`` are keys of their own because most optimizers have them; everything else goes
through ``optimizer.kwargs``. A constructor checks little of what it is given: Python takes ``amsgrad="banana"`` for true.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from mprun.config import OptimizerConfig
from mprun.errors import ConfigError, nearest
from mprun.training.optim_catalog import OWN_KEYS

# Arguments that mean nothing in this loop.
REFUSED_KWARGS = {
    "differentiable": "is for gradients through the optimizer itself, which nothing here asks for",
    "capturable": "is for steps inside a CUDA graph, and no graph is captured",
}


def read_arguments(config: OptimizerConfig, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """What ``config`` gives to a constructor with ``parameters``, beside the learning rate and the groups.

    Raises:
        ConfigError: names the key that the constructor does not take, or whose value is of another kind.
    """
    arguments: dict[str, Any] = {}
    for key in ("momentum", "betas", "eps"):
        value = getattr(config, key)
        if value is None:
            continue
        if key not in parameters:
            raise ConfigError(
                f"optimizer.{key}={value}: {config.name} takes no {key!r}; leave it out with optimizer.{key}=null; "
                f"legal: {_legal(parameters)}"
            )
        arguments[key] = _checked(f"optimizer.{key}", value, parameters[key])
    if config.weight_decay and "weight_decay" not in parameters:
        raise ConfigError(f"optimizer.weight_decay={config.weight_decay}: {config.name} takes none; set it to 0")
    for key, value in config.kwargs.items():
        where = f"optimizer.kwargs.{key}"
        number = key == "eps" and not (key in parameters and isinstance(parameters[key].default, tuple))
        if key in OWN_KEYS or number:  # torch's Adafactor takes a pair, which can only be given here
            raise ConfigError(f"{where}: set optimizer.{key} instead, it is a key of its own")
        if key not in parameters:
            raise ConfigError(f"{where} is no argument of {config.name}: {nearest(key, list(parameters))}")
        if key in REFUSED_KWARGS and value:
            raise ConfigError(f"{where}={value} {REFUSED_KWARGS[key]}; leave it out")
        arguments[key] = _checked(where, value, parameters[key])
    return arguments


def _checked(where: str, value: Any, parameter: inspect.Parameter) -> Any:
    """``value``, if it is of the kind that ``parameter``'s default and annotation say; lists as tuples, dtypes by name.

    Python would take ``amsgrad="banana"`` for true, and three betas until the first step unpacks them.

    Raises:
        ConfigError: it is of another kind.
    """
    default, said = parameter.default, str(parameter.annotation)
    words = "str" in said
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value is None:
        legal, fits = "a value", default is None or "None" in said or "Optional" in said
    elif "dtype" in said:
        legal, fits = "the name of a dtype", isinstance(getattr(torch, str(value), None), torch.dtype)
        value = getattr(torch, str(value)) if fits else value
    elif isinstance(default, bool) or "bool" in said:
        legal, fits = "true or false", isinstance(value, bool)
    elif isinstance(default, tuple) or ("uple" in said and not words):
        size = len(default) if isinstance(default, tuple) else 2
        legal, fits = f"a list of {size} numbers", isinstance(value, list | tuple) and len(value) == size
        fits = fits and all(isinstance(v, int | float | None) and not isinstance(v, bool) for v in value)
        value = tuple(value) if fits else value
    elif said in ("int", "<class 'int'>"):
        legal, fits = "a whole number", number and isinstance(value, int)
    elif isinstance(default, int | float) or ("float" in said and not words):
        legal, fits = "a finite number", number
    else:
        legal, fits = "a word", isinstance(value, str | list)
    if not fits:
        raise ConfigError(f"{where}={value} is not legal: {parameter.name} is {legal}")
    return value


def _legal(parameters: Mapping[str, Any]) -> str:
    return ", ".join(
        name for name in parameters if name not in ("params", "foreach", "maximize", "capturable", "differentiable")
    )
