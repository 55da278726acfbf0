"""FP32 rules: from an ordered list of patterns to a plan, module by module.

A rule is

* a glob over the dotted module path, in whole components: ``head``, ``blocks.*.norm1``, ``**.attn`` (``*`` stands for one
  component or a part of it, ``**`` for any number of components, also none);
* ``class:LayerNorm``: modules of that class or a subclass of it (the bare or the full dotted name);
* ``re:...``: a regular expression that matches the whole path.

A match covers the module and everything inside it. The first rule that matches is the one that *won*. After the rules of
the config come the rules of the mode: in ``master`` mode every normalisation layer is FP32, because means and variances
are sums that grow by small increments, and so are parametrizations (weight and spectral norm, orthogonal matrices: norms,
decompositions and inverses of weights), and a module that shares a parameter with an FP32 module.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from mprun.errors import OverrideError

NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
# Normalisation layers of libraries that subclass none of torch's, looked up only where the library is in use already.
LIBRARY_NORMS = {
    "timm.layers": ("RmsNorm", "RmsNorm2d", "SimpleNorm", "SimpleNorm2d", "FrozenBatchNormAct2d"),
    "torchvision.ops": ("FrozenBatchNorm2d",),
}


@dataclass(frozen=True)
class PlanEntry:
    """What is planned for one module.

    Attributes:
        path: dotted path (the first one, if the module has several).
        module: the module itself.
        rule: what decided: a rule of the config, ``norm``, ``parametrization``, ``tied:<path>``, or ``mode``.
        fp32: whether parameters and arithmetic are float32.
        inner: every path to the module leads through another FP32 module, which has cast its inputs already.
    """

    path: str
    module: nn.Module
    rule: str
    fp32: bool
    inner: bool = False


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a normalisation layer, by ``isinstance``."""
    if isinstance(module, NORMS):
        return True
    for package, names in LIBRARY_NORMS.items():
        loaded = sys.modules.get(package)
        classes = tuple(cls for name in names if isinstance(cls := getattr(loaded, name, None), type))
        if isinstance(module, classes):
            return True
    return False


def matches(rule: str, path: str, module: nn.Module) -> bool:
    """Whether ``rule`` names ``module`` at ``path`` itself (not something around it).

    Raises:
        OverrideError: a regular expression that does not compile.
    """
    kind, colon, pattern = rule.partition(":")
    if colon and kind == "class":
        return any(pattern in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__)
    if colon and kind == "re":
        try:
            return re.fullmatch(pattern, path) is not None
        except re.error as error:
            raise OverrideError(f"precision.fp32_modules: {rule!r} is not a regular expression: {error}") from error
    return _glob(rule.split("."), path.split(".") if path else [])


def hits(rule: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths of ``modules`` that ``rule`` names itself.

    A rule without a wildcard is looked up, so that a list of as many names as there are modules costs no more than that.

    Raises:
        OverrideError: a regular expression that does not compile.
    """
    if rule.startswith(("class:", "re:")) or any(char in rule for char in "*?["):
        return [path for path, module in modules.items() if matches(rule, path, module)]
    return [rule] if rule and rule in modules else []


def _glob(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_glob(pattern[1:], parts[skip:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _glob(pattern[1:], parts[1:])


def make_plan(model: nn.Module, rules: Sequence[str], *, mode: str) -> list[PlanEntry]:
    """Decide for every module of ``model``, in module order.

    Args:
        model: before any cast.
        rules: ``precision.fp32_modules``.
        mode: the policy's mode; ``full`` needs no rule, ``master`` adds the normalisation layers.

    Raises:
        OverrideError: a rule that matches nothing; the message lists the nearest paths and classes.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = list(modules.items())
    first_rule: dict[str, str] = {}
    for item in rules:
        found = hits(item, modules)
        if not found:
            raise OverrideError(_unmatched(item, paths))
        for path in found:
            first_rule.setdefault(path, item)
    won: dict[nn.Module, str] = {}
    inner_at: dict[nn.Module, list[bool]] = {}
    covered: dict[str, str] = {}
    for path, module in paths:
        own = first_rule.get(path)
        around = next((covered[parent] for parent in _parents(path) if parent in covered), None)
        rule: str | None = own or around
        if rule is None and mode == "master":
            rule = "norm" if is_norm(module) else "parametrization" if isinstance(module, ParametrizationList) else None
        inner_at.setdefault(module, []).append(around is not None)
        if rule is not None:
            covered[path] = rule
            won.setdefault(module, rule)
    _spread_over_tied(paths, won)
    first = {module: path for path, module in reversed(paths)}
    return [
        PlanEntry(
            first[module], module, won.get(module, "mode"), module in won, module in won and all(inner_at[module])
        )
        for module in dict.fromkeys(module for _, module in paths)
    ]


def _parents(path: str) -> Iterable[str]:
    """The paths around ``path``, innermost first, down to the root ``""``."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _spread_over_tied(paths: Sequence[tuple[str, nn.Module]], won: dict[nn.Module, str]) -> None:
    """A parameter has one dtype: a module that shares one with an FP32 module becomes FP32 too."""
    owners: dict[object, list[tuple[str, nn.Module]]] = {}
    for path, module in paths:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((path, module))
    shared: dict[nn.Module, list[list[tuple[str, nn.Module]]]] = {}
    todo = deque(sharing for sharing in owners.values() if len(sharing) > 1)
    for sharing in todo:
        for _, module in sharing:
            shared.setdefault(module, []).append(sharing)
    while todo:  # A shares with B, B with C: until nothing more follows
        sharing = todo.popleft()
        source = next((path for path, module in sharing if module in won), None)
        for _, module in sharing:
            if source is not None and module not in won:
                won[module] = f"tied:{source}"
                todo.extend(shared[module])


def _unmatched(rule: str, paths: Sequence[tuple[str, nn.Module]]) -> str:
    kind, colon, pattern = rule.partition(":")
    if colon and kind == "class":
        names = sorted({type(module).__name__ for _, module in paths})
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:10]
        return f"precision.fp32_modules: {rule!r} matches no module; classes here: {', '.join(near)}"
    names = [path for path, _ in paths if path]
    near = difflib.get_close_matches(pattern if colon else rule, names, n=5, cutoff=0.4) or names[:10]
    return (
        f"precision.fp32_modules: {rule!r} matches no module; nearest of {len(names)} paths: {', '.join(near)} "
        "(a glob matches whole components: blocks.*.norm1, **.attn; also class:LayerNorm and re:...)"
    )
