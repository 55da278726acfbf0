"""``mprun cp RECIPE FILE``: a copy of a recipe to change and to run as ``recipe=./FILE``. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mprun.compose import options, tree
from mprun.errors import ConfigError, RecipeError, nearest
from mprun.options import is_file

USAGE = "write mprun cp RECIPE FILE, as in mprun cp digits/vit_fp16 mine.yaml"


def run(words: Sequence[str]) -> int:
    """Copy a recipe byte for byte. An existing file is never written over.

    Raises:
        ConfigError: not two words, or a target that cannot be written.
        RecipeError: there is no such recipe.
    """
    if len(words) != 2:
        raise ConfigError(f"cp takes a recipe and a file, not {' '.join(words) or 'nothing'}: {USAGE}")
    source = _recipe(words[0].removeprefix("recipe="))
    target = Path(words[1]).expanduser()
    if target.is_dir():
        target /= source.name
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"cp: {words[1]} must end with .yaml, otherwise recipe={words[1]} would look for a recipe of that name"
        )
    if odd := set(target.name) & set(",'\""):
        raise ConfigError(f"cp: {words[1]} holds {' '.join(sorted(odd))}, which recipe= would read as its own grammar")
    try:
        with target.open("xb") as file:
            file.write(source.read_bytes())
    except FileExistsError:
        raise ConfigError(f"cp: {target} exists and is not written over; choose another name") from None
    except OSError as error:
        raise ConfigError(f"cp: {target} cannot be written: {error.strerror}") from error
    path = target if target.is_absolute() else f"./{target}"
    print(f"copied to {target}; run it with: mprun {shlex.quote(f'recipe={path}')}")
    return 0


def _recipe(name: str) -> Path:
    own = is_file(name)
    path = Path(name).expanduser() if own else tree("recipes") / f"{name}.yaml"
    known = options("recipe")
    if not path.is_file() or (not own and name not in known):
        raise RecipeError(f"cp {name}: there is no such recipe (see mprun list recipe): {nearest(name, known)}")
    return path
