"""``mprun list [GROUP]``: groups, options and recipes, each with its one-line description. Imports no torch.

In a terminal long descriptions are wrapped beside the names; elsewhere an option is a line, for grep.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from mprun.errors import ConfigError, nearest
from mprun.options import GROUPS, options


def run(words: Sequence[str]) -> int:
    """Print the options of one group, or of all."""
    unknown = [word for word in words if word not in GROUPS]
    if unknown:
        raise ConfigError(f"list {unknown[0]}: there is no such group: {nearest(unknown[0], GROUPS)}")
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for group in words or GROUPS:
        found = options(group)
        width = max((len(name) for name in found), default=0)
        print(f"{group}=")
        for name, text in found.items():
            print(option_line(name, text, width, columns))
    return 0


def option_line(name: str, text: str, width: int, columns: int) -> str:
    """An option and its description, names ``width`` wide; wrapped at ``columns`` cells, 0 for one line."""
    line, indent = f"  {name:<{width}}  {text}".rstrip(), " " * (width + 4)
    if len(line) <= columns or columns < len(indent) + 20:
        return line
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
