"""Groups, their options, and recipes: the files below ``conf/`` and ``recipes/``. Imports no torch.

A recipe is an option of the group ``recipe``, or a YAML file of the user's own. Either is read once, when it is named; its
text is hashed then, so that a run can say which text it was made from, and not only under which name.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mprun.errors import ConfigError, RecipeError, nearest
from mprun.runs import slug

GROUPS = ("model", "dataset", "precision", "optimizer", "schedule", "train", "tracking", "sweep", "recipe")
# What a recipe may not set: it would act on the machine or on other runs, not on the experiment.
COMMAND_LINE_ONLY = ("trust", "resume", "command", "hydra")
# What a file may look up: another key, or a variable of the environment that is meant for mprun, with a plain default. Others
# (a password, a key) would end up in the run folder, and those who sent the recipe may see that.
LOOKUP = re.compile(r"\$\{(?:oc\.env:\s*MPRUN_\w+\s*(?:,[^${}]*)?|[\w.\[\]-]+)\}")
# The longest recipe here has some hundred; from thousands on composing takes minutes.
MOST_VALUES = 5000


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read: what ``recipe=`` takes to name it again, and the sha256 of its text."""

    name: str
    sha256: str


# By the name that Hydra knows it under. Hydra's own store of options is global as well.
_read: dict[str, Recipe] = {}


def tree(name: str) -> Path:
    """The folder ``conf`` or ``recipes``: inside the installed package, otherwise beside it (a checkout)."""
    package = Path(__file__).resolve().parent
    for place in (package / name, package.parent / name):
        if place.is_dir():
            return place
    raise ConfigError(f"the folder {name}/ is neither in {package} nor beside it: the installation is damaged")


def options(group: str) -> dict[str, str]:
    """The options of a config group, each with the first comment line of its file."""
    root = tree("recipes") if group == "recipe" else tree("conf") / group
    found = {}
    for path in sorted(root.rglob("*.yaml")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        comments = [line.lstrip("# ").rstrip() for line in lines if line.startswith("#") and "@package" not in line]
        found[path.relative_to(root).with_suffix("").as_posix()] = comments[0] if comments else ""
    return found


def is_option(group: str, name: str) -> bool:
    """Whether ``name`` is an option of ``group``, spelled as its file is. No other option is read."""
    place = tree("recipes") if group == "recipe" else tree("conf") / group
    for part in f"{name}.yaml".split("/"):
        # Where the file system ignores upper and lower case, another spelling would be found as well.
        if part in ("", ".", "..") or (sys.platform != "linux" and place.is_dir() and part not in os.listdir(place)):
            return False
        place /= part
    return place.is_file()


def is_file(name: str) -> bool:
    """Whether ``recipe=name`` means a file of the user's own."""
    return name.endswith((".yaml", ".yml"))


def read_recipe(name: str) -> str:
    """Read the recipe ``name`` (an option, or a YAML file) and give it to Hydra; the name that Hydra knows it under.

    Raises:
        RecipeError: no such recipe, not a YAML mapping, or it sets what only the command line may.
    """
    import yaml
    from hydra.core.config_store import ConfigStore

    name = name.strip().strip("'\"")
    if name in ("none", "null", ""):
        return "none"
    path = Path(name).expanduser().resolve() if is_file(name) else tree("recipes") / f"{name}.yaml"
    if not (path.is_file() if is_file(name) else is_option("recipe", name)):
        where = path if is_file(name) else "see mprun list recipe"
        raise RecipeError(f"recipe={name} does not exist ({where}): {nearest(name, options('recipe'))}")
    try:
        text = path.read_bytes()
        root = yaml.compose(text.decode("utf-8"), Loader=yaml.SafeLoader)
        refuse_bomb(root, f"recipe {path}")
        refuse_lookups(root, f"recipe {path}")
        node = OmegaConf.load(io.StringIO(text.decode("utf-8")))
        if not isinstance(node, DictConfig):
            raise RecipeError(f"recipe {path} is not a mapping of keys")
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise RecipeError(f"recipe {path} is not readable YAML: {' '.join(str(error).split())}") from error
    for key in COMMAND_LINE_ONLY:
        if key in node:
            raise RecipeError(f"recipe {path} sets {key}: only the command line may")
    for group in GROUPS:
        if not OmegaConf.is_interpolation(node, group) and isinstance(option := node.get(group), str):
            raise RecipeError(
                f"recipe {path}: {group} is a group of keys; to choose its option write it below defaults: "
                f"'- override /{group}: {option}'"
            )
    recipe = Recipe(str(path) if is_file(name) else name, hashlib.sha256(text).hexdigest())
    option = slug(path.stem) if is_file(name) else name
    if option in _read and _read[option].name != recipe.name:  # two files of one name in different folders
        option += "-" + hashlib.sha256(recipe.name.encode()).hexdigest()[:6]
    _read[option] = recipe
    group, _, leaf = f"recipe/{option}".rpartition("/")
    ConfigStore.instance().store(group=group, name=leaf, node=node, package="_global_", provider=str(path))
    return option


def refuse_bomb(root: Any, what: str) -> None:
    """Refuse aliases of YAML, which stand for whole copies, where a few lines mean millions of values, or endlessly many.

    Raises:
        RecipeError: there are more than ``MOST_VALUES``.
    """
    sizes: dict[int, int] = {}  # by node; 0 while it is being counted

    def size(node: Any) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise RecipeError(f"{what} holds itself: an alias (*name) stands within its own anchor (&name)")
            return sizes[id(node)]
        sizes[id(node)] = 0
        parts = node.value if isinstance(node.value, list) else []
        total = 1 + sum(sum(map(size, part)) if isinstance(part, tuple) else size(part) for part in parts)
        sizes[id(node)] = total
        return total

    if root is not None and (count := size(root)) > MOST_VALUES:
        raise RecipeError(f"{what} is {count:,} values long, aliases counted; the most is {MOST_VALUES:,}")


def refuse_lookups(root: Any, what: str) -> None:
    """Refuse a file that looks up more than keys and variables of the environment with names like ``MPRUN_DATA``.

    Args:
        root: the file as YAML's nodes, after :func:`refuse_bomb`.
        what: how messages name it.

    Raises:
        RecipeError: names the text.
    """
    if root is None:
        return
    if not isinstance(root.value, list):
        # An escaped ${ is refused with the rest: nobody needs it here.
        if "${" in LOOKUP.sub("", root.value):
            raise RecipeError(
                f"{what}, line {root.start_mark.line + 1}: {root.value!r} looks up what a file may not; legal are another key, "
                "${train.steps}, and an environment variable of mprun's own, ${oc.env:MPRUN_DATA} or ${oc.env:MPRUN_DATA,null}"
            )
        return
    for part in root.value:
        for node in part if isinstance(part, tuple) else (part,):
            refuse_lookups(node, what)


def recipe_of(option: str | None) -> Recipe | None:
    """The recipe that was read as ``option``; None for none."""
    return _read.get(option or "none")


def list_recipes() -> list[str]:
    """The names of all recipes below ``recipes/``."""
    return [name for name in options("recipe") if name != "none"]
