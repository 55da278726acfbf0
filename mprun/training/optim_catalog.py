"""Which optimizers there are and what they take, without importing torch or timm.

``torch/optim/__init__.py`` imports each of its optimizers in a line of its own, and timm describes each of its own by a
call ``OptimInfo(name=..., opt_class=...)``. Reading these two files takes milliseconds and is enough to refuse a misspelt
name or argument before anything is imported. Values are checked when the optimizer is built; and where the files do not
look as expected, nothing is refused here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from mprun.config import OptimizerConfig
from mprun.errors import ConfigError, nearest
from mprun.signatures import Signature, legal_kwargs

# Optimizers that the training loop cannot serve, and why.
REFUSED = {
    "lbfgs": "evaluates the loss several times inside one step, which neither loss scaling nor a skipped step can follow",
    "sparseadam": "takes sparse gradients only",
    "adahessian": "needs second derivatives, for which the graph would have to be kept",
}
# Keys of the config that are arguments too: given in optimizer.kwargs they would compete with their own key. (``eps`` is
# not here: where it is a pair, it can only be given there.)
OWN_KEYS = ("lr", "weight_decay", "momentum", "betas", "fused", "params")

_TORCH = re.compile(r"^from (torch\.optim\.\w+) import (\w+) as \2$", re.MULTILINE)
_TIMM = "timm.optim._optim_factory"


def check_optimizer(config: OptimizerConfig) -> None:
    """Check name and arguments without importing anything.

    Raises:
        ConfigError: an unknown name, an optimizer that cannot be served, or an argument that it does not take.
    """
    name = config.name.lower()
    if name in REFUSED:
        raise ConfigError(
            f"optimizer.name={config.name} {REFUSED[name]}; choose a first-order optimizer such as adamw or sgd"
        )
    known = optimizers()
    if not known or name.startswith("lookahead_"):  # the latter is refused where the optimizer is built, with a hint
        return
    if name not in known:
        raise ConfigError(f"optimizer.name={config.name} is unknown: {nearest(name, list(known))}")
    signature = _signature(known[name])
    if signature.open:
        return
    for key in ("momentum", "betas", "eps"):
        if (value := getattr(config, key)) is not None and key not in signature.names:
            raise ConfigError(
                f"optimizer.{key}={value}: {config.name} takes no {key!r}; leave it out with optimizer.{key}=null; "
                f"legal: {', '.join(name for name in signature.names if name != 'params')}"
            )
    if config.weight_decay and "weight_decay" not in signature.names:
        raise ConfigError(f"optimizer.weight_decay={config.weight_decay}: {config.name} takes none; set it to 0")
    for key in config.kwargs:
        if key in OWN_KEYS:
            raise ConfigError(f"optimizer.kwargs.{key}: set optimizer.{key} instead, it is a key of its own")
        if key not in signature.names:
            raise ConfigError(
                f"optimizer.kwargs.{key} is no argument of {config.name}: {nearest(key, list(signature.names))}"
            )


@lru_cache(maxsize=1)
def optimizers() -> dict[str, str]:
    """Every optimizer of torch and timm: lower-case name -> ``pkg.mod:Class``, empty where that cannot be read.

    A name that both have is torch's, as where the optimizer is built. Empty if one of the files is not as expected.
    """
    init, factory = _file("torch", "optim/__init__.py"), _file("timm", "optim/_optim_factory.py")
    if init is None or factory is None:
        return {}
    ours = {name.lower(): f"{module}:{name}" for module, name in _TORCH.findall(init.read_text(encoding="utf-8"))}
    ours.pop("optimizer", None)
    theirs: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for node in ast.walk(ast.parse(factory.read_bytes())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "register_alias" and len(node.args) == 2:
            alias, meant = (ast.unparse(argument).strip("'\"") for argument in node.args)
            aliases[alias] = meant
        if ast.unparse(node.func) != "OptimInfo":
            continue
        given: dict[str | None, ast.expr] = dict(zip(("name", "opt_class"), node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords}
        name, cls = given.get("name"), given.get("opt_class")
        if not isinstance(name, ast.Constant) or cls is None:
            return {}
        theirs[str(name.value)] = _target(cls, ours)
    theirs |= {alias: theirs[name] for alias, name in aliases.items() if name in theirs}
    return {**theirs, **ours} if ours and theirs else {}


def _target(cls: ast.expr, ours: dict[str, str]) -> str:
    """``pkg.mod:Class`` of an ``opt_class``; empty where it is none that could be read (a kernel of another package)."""
    text = ast.unparse(cls)
    if text.startswith("torch.optim."):
        return ours.get(text.rpartition(".")[2].lower(), "")
    return f"{_TIMM}:{text}" if isinstance(cls, ast.Name) else ""


def _signature(target: str) -> Signature:
    return legal_kwargs(target) if target else Signature(open=True)


def _file(package: str, name: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places), ""), name) if places else None
    return path if path is not None and path.is_file() else None
