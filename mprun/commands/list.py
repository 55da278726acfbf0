"""``mprun list [GROUP]``: groups, options and recipes, each with its one-line description. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mprun.errors import ConfigError, nearest
from mprun.options import GROUPS, options


def run(words: Sequence[str]) -> int:
    """Print the options of one group, or of all."""
    unknown = [word for word in words if word not in GROUPS]
    if unknown:
        raise ConfigError(f"list {unknown[0]}: there is no such group: {nearest(unknown[0], GROUPS)}")
    for group in words or GROUPS:
        found = options(group)
        width = max((len(name) for name in found), default=0)
        print(f"{group}=")
        for name, text in found.items():
            print(f"  {name:<{width}}  {text}".rstrip())
    return 0
