"""What a ``pkg.mod:attr`` name accepts, read from its source; and the one way to import such a name.

Keyword arguments in the config (``model.kwargs.depth=6``) are checked before anything runs, and the check must be
neither slow nor dangerous: importing torch takes seconds, and importing a stranger's module runs a stranger's code.
So the signature is *read*, not asked for. The source is found as Python would find it, but by hand::

    pkg      located by importlib.util.find_spec, which imports nothing for a top-level name
    pkg.mod  a file or a folder below it
    attr     a def or a class in the parsed file, or an import of it, which is followed (from .x import attr)

Only names are taken from the syntax tree; no default value and no decorator is evaluated. Where reading cannot tell
(a compiled module, ``Net = partial(...)``, a ``**kwargs`` used for anything but ``super().__init__(**kwargs)``) the
signature is *open*: anything is accepted here, and the builder has the last word.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mprun.errors import ConfigError, nearest

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Bases without an __init__, as written in a class statement; and where the one lives whose __init__ takes nothing.
_PLAIN_BASES = frozenset({"object", "ABC", "Generic", "Protocol", "nn.Module", "torch.nn.Module", "data.Dataset"})
_MODULE = ("torch.nn.modules.module", "Module")
_MAX_HOPS = 16  # imports and bases followed before giving up, so that a cycle ends


@dataclass(frozen=True)
class Signature:
    """The keyword arguments of a callable.

    Attributes:
        names: what can be given by keyword, in the order of the source.
        required: those of ``names`` that have no default.
        open: other keywords are accepted too (``**kwargs``), or the source could not tell.
    """

    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    open: bool = False


_UNKNOWN = Signature(open=True)
_NO_INIT = Signature()  # compared by identity: a class whose bases, as far as read, define no __init__


def legal_kwargs(target: str) -> Signature:
    """Read the keyword arguments of a function, or of a class's ``__init__``, without importing it.

    Args:
        target: ``pkg.mod:attr``.

    Returns:
        The signature, without ``self``, positional-only parameters and ``*args``.

    Raises:
        ConfigError: there is no such package, module or attribute.

    >>> legal_kwargs("mprun.models.mlp:mlp").names
    ('input_shape', 'num_classes', 'hidden', 'dropout', 'norm')
    """
    module, attr = _split(target)
    found = _lookup(module, attr, 0)
    if found is None:
        raise ConfigError(f"{target}: the module has no {attr!r}: {nearest(attr, public_names(module))}")
    return found


def check_kwargs(target: str, given: Mapping[str, Any], *, key: str, reserved: Collection[str] = ()) -> None:
    """Refuse keywords that a callable does not take.

    Args:
        target: ``pkg.mod:attr``.
        given: the keywords from the config; only their names are looked at.
        key: where they stand in the config, as in ``model.kwargs``.
        reserved: parameters that the runner fills in by itself; giving one of them is an error too.

    Raises:
        ConfigError: names the wrong keyword, the nearest right one, and all right ones.
    """
    try:
        signature = legal_kwargs(target)
    except ConfigError as error:
        named = f"{key.rpartition('.')[0]}.name={target}"
        raise ConfigError(f"{named}: {str(error).removeprefix(f'{target}: ')}") from error
    legal = [name for name in signature.names if name not in reserved]
    for name in given:
        if name in reserved:
            others = "" if signature.open else f"; legal: {', '.join(legal) or 'none'}"
            raise ConfigError(f"{key}.{name} is filled in by the runner and cannot be given{others}")
        if name not in legal and not signature.open:
            raise ConfigError(f"{key}.{name} is not a parameter of {_split(target)[1]}: {nearest(str(name), legal)}")


def import_target(target: str, *, trust: Collection[str], key: str) -> Any:
    """Import what ``pkg.mod:attr`` names, if its top-level package is trusted.

    Args:
        target: ``pkg.mod:attr``.
        trust: top-level packages whose code may run (only the command line sets this).
        key: where the name stands in the config, as in ``model.name``.

    Raises:
        ConfigError: the package is not trusted, or has no such module or attribute. An error *inside* the imported
            code is its author's to see, with its traceback: it passes through.
    """
    module, attr = _split(target)
    top = module.partition(".")[0]
    if top not in trust:
        raise ConfigError(f"{key}={target} runs code of {top!r}, which is not trusted; to allow it: 'trust=[{top}]'")
    legal_kwargs(target)  # what is missing is reported before any code runs
    return getattr(importlib.import_module(module), attr)


def public_names(module: str) -> list[str]:
    """The public functions, classes and re-exports of a module, in alphabetical order, read from its source.

    Raises:
        ConfigError: there is no such module.
    """
    path = _locate(module)
    nodes = _parse(path) if path else []
    names = [node.name for node in nodes if isinstance(node, _Function | ast.ClassDef)]
    names += [a.asname or a.name for node in nodes if isinstance(node, ast.ImportFrom) for a in node.names]
    return sorted({name for name in names if name.isidentifier() and not name.startswith("_")})


def _split(target: str) -> tuple[str, str]:
    module, _, attr = target.partition(":")
    if not attr.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{target!r} is not of the form pkg.mod:attr (as in my_pkg.nets:Net)")
    return module, attr


# -- finding the file ---------------------------------------------------------------------------------------------


def _locate(module: str) -> Path | None:
    """The ``.py`` file of a dotted module; ``None`` if it has no source (compiled, built in, namespace package)."""
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None:
        raise ConfigError(f"{module!r}: there is no package {top!r} (is its folder on PYTHONPATH?)")
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    source = Path(spec.origin or "")
    for part in parts:
        listing = [path for folder in folders for path in sorted(folder.glob("[!.]*"))]
        inside = [path for path in listing if path.name.partition(".")[0] == part]
        packages = [path for path in inside if path.is_dir()]
        initial = [path / "__init__.py" for path in packages if (path / "__init__.py").is_file()]
        files = [path for path in inside if path.suffix in (".py", ".so", ".pyd")]
        if not packages and not files:
            legal = sorted({path.stem for path in listing if path.stem.isidentifier() and path.stem[0] != "_"})
            raise ConfigError(f"{module!r}: there is no module {part!r}: {nearest(part, legal)}")
        source = [*initial, *files, Path()][0]
        folders = [initial[0].parent] if initial else [] if files else packages
    return source if source.suffix == ".py" else None


@lru_cache(maxsize=64)
def _parse(path: Path) -> list[ast.stmt]:
    """The statements at module level, also those under ``if``, ``try`` and ``with``."""

    def flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            for block in ("body", "handlers", "orelse", "finalbody"):
                if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                    yield from flatten(getattr(node, block, []))

    try:
        return list(flatten(ast.parse(path.read_bytes()).body))
    except SyntaxError as error:
        raise ConfigError(f"{path} cannot be read as Python: {error}") from error


# -- finding the definition ---------------------------------------------------------------------------------------


def _lookup(module: str, attr: str, hops: int) -> Signature | None:
    """The signature of ``attr`` as bound in ``module``; ``None`` if it is not bound there."""
    path = _locate(module)
    if path is None or hops > _MAX_HOPS:
        return _UNKNOWN
    nodes = _parse(path)
    for node in reversed(nodes):  # the last definition is the one in force; @overload stubs come before it
        if isinstance(node, _Function) and node.name == attr:
            return _of_function(node)
        if isinstance(node, ast.ClassDef) and node.name == attr:
            return _of_class(node, module, hops)
    stars = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == attr:
                    return _follow(_origin(node, module, path), alias.name, hops) or _UNKNOWN
                if alias.name == "*":
                    stars.append(_origin(node, module, path))
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == attr for t in node.targets):
            return (_lookup(module, node.value.id, hops + 1) if isinstance(node.value, ast.Name) else None) or _UNKNOWN
    if any(isinstance(node, _Function) and node.name == "__getattr__" for node in nodes):
        return _UNKNOWN  # a module that makes its attributes on demand
    return next((found for star in stars if (found := _follow(star, attr, hops))), None)


def _follow(module: str, attr: str, hops: int) -> Signature | None:
    """Look ``attr`` up in a module that another one imports; a module that is not installed knows nothing."""
    try:
        return _lookup(module, attr, hops + 1)
    except ConfigError:
        return None


def _origin(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The absolute name of the module that ``from ... import`` reads, relative dots resolved."""
    parts = module.split(".")
    up = node.level - (path.name == "__init__.py")  # one dot means the package itself
    base = parts[: len(parts) - up] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


# -- reading the definition ---------------------------------------------------------------------------------------


def _of_function(node: _Function, *, method: bool = False) -> Signature:
    spec = node.args
    plain = spec.args[1:] if method and not spec.posonlyargs else spec.args
    without = len(plain) - len(spec.defaults)  # defaults belong to the last positional parameters
    required = [a.arg for a in plain[: max(without, 0)]]
    required += [a.arg for a, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None]
    return Signature(tuple(a.arg for a in [*plain, *spec.kwonlyargs]), frozenset(required), spec.kwarg is not None)


def _of_class(node: ast.ClassDef, module: str, hops: int) -> Signature:
    init = next((n for n in node.body if isinstance(n, _Function) and n.name == "__init__"), None)
    if (module, node.name) == _MODULE:
        return _NO_INIT
    if init is None:
        decorators = {_last_name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
        return _UNKNOWN if "dataclass" in decorators else _of_bases(node, module, hops)
    own = _of_function(init, method=True)
    call = _super_call(init) if own.open else None
    if call is None:
        return own
    base = _of_bases(node, module, hops)
    taken = {*own.names, *(k.arg for k in call.keywords), *base.names[: len(call.args)]}
    inherited = [name for name in base.names if name not in taken]
    return Signature((*own.names, *inherited), own.required | (base.required & set(inherited)), base.open)


def _of_bases(node: ast.ClassDef, module: str, hops: int) -> Signature:
    """The signature that a class inherits: of its first base that has one."""
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base  # Generic[T]
        if ast.unparse(plain) in _PLAIN_BASES:
            continue
        inherited = _lookup(module, plain.id, hops + 1) if isinstance(plain, ast.Name) else None
        if inherited is not _NO_INIT:
            return inherited or _UNKNOWN
    return _NO_INIT


def _super_call(init: _Function) -> ast.Call | None:
    """The call ``super().__init__(..., **kwargs)``, if handing on is all that is done with ``kwargs``."""
    name = init.args.kwarg.arg if init.args.kwarg else ""
    uses = [n for n in ast.walk(init) if isinstance(n, ast.Name) and n.id == name]
    for call in (n for n in ast.walk(init) if isinstance(n, ast.Call)):
        handed_on = any(k.arg is None and k.value in uses for k in call.keywords)
        if handed_on and len(uses) == 1 and ast.unparse(call.func) == "super().__init__":
            return call
    return None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
