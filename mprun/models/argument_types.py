"""Whether the values of ``model.kwargs`` are of the types that an own builder's annotations name.

Without it a word where a number belongs would fail deep inside, or not at all: ``class_token=maybe`` is true for Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from mprun.errors import ConfigError

SAID: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a word",
    type(None): "null",
}


def check_types(build: Callable[..., Any], kwargs: Mapping[str, Any], *, key: str) -> None:
    """Refuse a value that is not of its parameter's type.

    Args:
        build: annotated with ``int float bool str None``, sequences of them, and unions.
        kwargs: by parameter; one that ``build`` does not have is not looked at.
        key: where they stand in the config, as in ``model.kwargs``.

    Raises:
        ConfigError: names key, value and what is legal.
    """
    hints = get_type_hints(build)
    for name, value in kwargs.items():
        if name in hints and not _fits(value, hints[name]):
            raise ConfigError(f"{key}.{name}={value!r} is not {_said(hints[name])}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in SAID:
        return isinstance(value, hint)
    if get_origin(hint) is Sequence:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(_fits(item, get_args(hint)[0]) for item in value)
    return any(_fits(value, part) for part in get_args(hint)) or not get_args(hint)


def _said(hint: Any) -> str:
    if hint in SAID:
        return SAID[hint]
    if get_origin(hint) is Sequence:
        return f"a list, each of it {_said(get_args(hint)[0])}, such as [1,2]"
    return " or ".join(_said(part) for part in get_args(hint))
