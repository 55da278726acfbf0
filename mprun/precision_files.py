"""``precision=./mine.yaml``: a precision option in a file of the user's own. Imports no torch.

The file is what ``conf/precision/*.yaml`` are: the keys of ``precision.*`` without that prefix. It says ``mode`` and
``compute_dtype`` itself, or names the option that it starts from::

    defaults: [fp16_dynamic]
    fp32_modules: [head]

A key that is left out has the schema's default, ``name`` is the file's. The file is read once, when it is named, and
everything in it is checked then, so that an error names the file and the key; its text is hashed, so that a run can say
which text it was made from.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mprun.config import Config, LossScaleConfig, PrecisionConfig
from mprun.config_check import to_config
from mprun.errors import ConfigError, MprunError, nearest
from mprun.options import Recipe, is_file, is_option, options, refuse_bomb, refuse_lookups
from mprun.runs import slug

GROUP = "precision"
OWN = "_self_"

# By the name that Hydra knows it under. Hydra's own store of options is global as well.
_read: dict[str, Recipe] = {}


def read_precision(name: str) -> str:
    """The option that ``precision=name`` means; a file is read, checked and given to Hydra first.

    Raises:
        ConfigError: there is no such file, or something in it is not legal; names file and key.
    """
    bare = name.strip().strip("'\"")
    if not is_file(bare):
        return name
    path = Path(bare).expanduser().resolve()
    node, text = _load(path, bare)
    problems = list(_problems(node))
    if problems:
        raise ConfigError("\n".join(f"precision={bare}: {problem}" for problem in problems))
    if "name" not in node:
        node.name = slug(path.stem)
    return _give(node, Recipe(str(path), hashlib.sha256(text).hexdigest()))


def restored(words: Sequence[str], given: Sequence[str], folder: Path) -> list[str]:
    """``words`` of the run in ``folder``, also where a file that they name is gone.

    The values of a precision file are in the run's ``config.yaml``; an option is made of them. A recipe cannot be made again
    from there, because its values and those of the options below it are one by then.

    Args:
        words: the saved overrides with ``given`` on top.
        given: what was typed; it must exist.
        folder: of the run.

    Raises:
        ConfigError: a file is gone that nothing can stand in for; says what to do.
    """
    return [word if word in given else _restored(word, folder) for word in words]


def _restored(word: str, folder: Path) -> str:
    key, _, value = word.partition("=")
    name = value.strip().strip("'\"")
    if key not in (GROUP, "recipe") or not is_file(name) or Path(name).expanduser().exists():
        return word
    gone = f"{key}={name}, with which {folder} was started, does not exist any more"
    if key == "recipe":
        raise ConfigError(
            f"{gone}: put the file back there (config.yaml in that folder holds all its values), or start a new run"
        )
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
        node = _parsed(OmegaConf.to_yaml(OmegaConf.create(plain[GROUP])).encode(), name)
        sha256 = json.loads((folder / "env.json").read_text(encoding="utf-8"))["precision_file"]["sha256"]
        problem = next(iter(_problems(node)), "")
    except (MprunError, OSError, ValueError, KeyError, TypeError, YAMLError, OmegaConfBaseException) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem:
        raise ConfigError(
            f"{gone}, and that folder cannot stand in for it ({problem})\nput the file back, or give precision=... anew"
        )
    return f"{key}={_give(node, Recipe(name, str(sha256)))}"


def _give(node: DictConfig, found: Recipe) -> str:
    """Give Hydra ``node`` as an option that is named like the file ``found``; the option's name."""
    from hydra.core.config_store import ConfigStore

    path = Path(found.name)
    option = slug(path.stem)
    taken = is_option(GROUP, option)
    if taken or (option in _read and _read[option].name != found.name):  # a file fp32.yaml is not the option fp32
        option += "-" + hashlib.sha256(found.name.encode()).hexdigest()[:6]
    _read[option] = found
    ConfigStore.instance().store(group=GROUP, name=option, node=node, provider=str(path))
    return option


def precision_file_of(option: str | None) -> Recipe | None:
    """The file that was read as ``option``: its path and the sha256 of its text; None for an option of ``conf/``."""
    return _read.get(option or "")


def _load(path: Path, given: str) -> tuple[DictConfig, bytes]:
    """The mapping in ``path``, and its text."""
    if not path.is_file():
        raise ConfigError(
            f"precision={given} does not exist ({path}); the named options are {', '.join(sorted(options(GROUP)))}"
        )
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"precision={given} is not readable: {' '.join(str(error).split())}") from error
    return _parsed(text, given), text


def _parsed(text: bytes, given: str) -> DictConfig:
    """The mapping that ``text`` is, without bombs and lookups."""
    import yaml

    try:
        root = yaml.compose(text.decode("utf-8"), Loader=yaml.SafeLoader)
        refuse_bomb(root, f"precision={given}")
        refuse_lookups(root, f"precision={given}")
        node = OmegaConf.load(io.StringIO(text.decode("utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, OmegaConfBaseException) as error:
        raise ConfigError(f"precision={given} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"precision={given} is not a mapping of keys (mode, compute_dtype, loss_scale ...)")
    return node


def _problems(node: DictConfig) -> Iterable[str]:
    """What is wrong with the file, one line each, every one with its key."""
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict), "a DictConfig"
    starts = plain.pop("defaults", None)
    unknown = [*_unknown(plain)]
    if unknown:
        yield from unknown
        return
    if starts is not None:
        yield from _default_problems(node.get("defaults"))
    elif missing := [key for key in ("mode", "compute_dtype") if key not in plain]:
        yield (
            f"{' and '.join(missing)} missing: a file is a whole option; say it, or start from one of conf/precision with "
            "defaults: [fp16_dynamic]"
        )
        return
    yield from _value_problems(plain, whole=starts is None)


def _unknown(plain: Mapping[Any, Any]) -> Iterable[str]:
    if "precision" in plain and isinstance(plain["precision"], dict):
        yield "unknown key precision: write its keys at the top level (mode, compute_dtype, ...), as in conf/precision"
        return
    legal, scale = vars(PrecisionConfig()), vars(LossScaleConfig())
    for key in plain:
        if key not in legal:
            yield f"unknown key {key}: {nearest(str(key), legal)}"
    given = plain.get("loss_scale", {})
    if not isinstance(given, dict):
        yield f"loss_scale={given!r} is not a group of keys; its parts: {', '.join(scale)}"
        return
    for key in given:
        if key not in scale:
            yield f"unknown key loss_scale.{key}: {nearest(str(key), scale)}"


def _default_problems(given: Any) -> Iterable[str]:
    known = options(GROUP)
    if not isinstance(given, ListConfig):
        yield f"defaults={given!r} is not a list of options, such as [fp16_dynamic]"
        return
    for item in given:
        if item != OWN and (not isinstance(item, str) or item not in known):
            yield f"defaults: {item} is not an option of precision: {nearest(str(item), known)}"


def _value_problems(plain: dict[Any, Any], *, whole: bool) -> Iterable[str]:
    """Wrong types; of a file that starts from nothing also ranges and the rules between keys."""
    root = OmegaConf.structured(Config)
    for key, value in plain.items():
        parts = value.items() if key == "loss_scale" else [(None, value)]
        for part, item in parts:
            full = f"precision.{key}" + (f".{part}" if part else "")
            try:
                OmegaConf.update(root, full, item)
            except (OmegaConfBaseException, ValueError) as error:
                yield f"{full.partition('.')[2]}={item!r} is not legal: {str(error).splitlines()[0]}"
                return
    if whole:
        try:
            to_config(root)
        except ConfigError as error:
            yield from str(error).splitlines()
        except OmegaConfBaseException as error:
            yield f"{error.full_key or 'a value'} is not legal: {str(error).splitlines()[0]}"
