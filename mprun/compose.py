"""From words on the command line to a checked configuration. Imports Hydra, never torch.

Composition is Hydra's (groups, overrides, recipes); this module adds what users expect around it:

* ``no``, ``off``, ``false`` and ``none`` switch off an optional key (``train.clip_norm=off``, ``train.ema=no``);
* ``model.kwargs.depth=6`` works with and without ``+``, because ``kwargs`` are open;
* ``recipe=digits/vit_fp16`` and ``recipe=./mine.yaml``;
* errors of Hydra and OmegaConf as one block that names the key, the legal values and the nearest one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config import Config
from mprun.config_check import OPEN, to_config
from mprun.data import check_dataset
from mprun.errors import ConfigError, RecipeError, nearest
from mprun.models.catalog import check_model
from mprun.runs import slug

OFF_WORDS = {"no", "off", "false", "none", "null"}
# Optional keys: which words switch them off, and which key a whole node's switch means.
OPTIONAL = {
    "train.clip_norm", "train.ema.decay", "train.early_stop.metric", "train.steps", "train.eval_every",
    "train.checkpoint_every", "dataset.augment", "dataset.limit", "dataset.root", "schedule.warmup_steps",
    "schedule.warmup_frac", "precision.eval_dtype", "optimizer.momentum", "optimizer.betas", "optimizer.eps",
    "resume", "model.init", "tracking.group", "tracking.entity",
}  # fmt: skip
NODE_SWITCH = {"train.ema": "train.ema.decay", "train.early_stop": "train.early_stop.metric"}
GROUPS = ("model", "dataset", "precision", "optimizer", "schedule", "train", "tracking", "recipe")


@dataclass(frozen=True)
class Composed:
    """A checked configuration and what it was made of."""

    config: Config
    hydra: DictConfig
    overrides: tuple[str, ...]
    choices: dict[str, str]

    @property
    def run_dir(self) -> Path:
        """The folder that a new run would get."""
        return Path(self.hydra.run.dir).resolve()


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
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line.lstrip("# ").rstrip() for line in lines if line.startswith("#") and "@package" not in line]
        found[path.relative_to(root).with_suffix("").as_posix()] = comments[0] if comments else ""
    return found


def register() -> None:
    """Give Hydra the schema and the resolvers. Safe to call again."""
    from hydra.core.config_store import ConfigStore

    # Options like model=timm say `name: ???`, which OmegaConf takes only where the schema has no default either.
    schema = Config()
    schema.model.name = schema.dataset.name = MISSING
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("slug", slug, replace=True)


def prepare(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra wants them: off words, open ``kwargs``, recipe files. See the module's docstring."""
    prepared = []
    for override in overrides:
        match = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", override, flags=re.DOTALL)
        if match is None:
            prepared.append(override)
            continue
        plus, key, value = match.groups()
        if value.strip().lower() in OFF_WORDS:
            if key in NODE_SWITCH:
                key, value = NODE_SWITCH[key], "null"
            elif key in OPTIONAL:
                value = "null"
        if key == "resume" and not value.startswith(("'", '"')) and value != "null":
            # A path as the shell gave it: = and , in it are not Hydra's.
            value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if any(key.startswith(f"{node}.") for node in OPEN):
            plus = "++"
        if key == "recipe" and not plus:
            value = ",".join(_recipe_option(name) for name in value.split(","))
        prepared.append(f"{plus}{key}={value}")
    return prepared


def compose(overrides: Sequence[str], *, command: str = "train") -> Composed:
    """Compose, check and freeze the configuration that ``overrides`` describe.

    Raises:
        ConfigError: an override, key, value or combination is not legal. Nothing has been created.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    register()
    ready = prepare(overrides)
    check_words(ready)
    GlobalHydra.instance().clear()
    # One run, one uid: a resolver with a cache keeps it per config object, and each compose makes a new one.
    try:
        with initialize_config_dir(str(tree("conf")), version_base=hydra_version_base()):
            composed = hydra_compose("config", overrides=ready, return_hydra_config=True)
        hydra_node = _resolved_hydra(composed)
        node = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        config = check(node, command=command)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # Hydra raises a bare ValueError for a group or a defaults list of the wrong kind.
        raise ConfigError(translate(error, ready)) from error
    return Composed(config, hydra_node, tuple(_recorded(ready, overrides)), _choices(hydra_node))


def check(node: DictConfig, *, command: str, folder: str = "") -> Config:
    """Check a composed configuration: keys, ranges, rules, builders' arguments; make its paths absolute.

    ``folder`` is where the command was typed, if a job of a sweep runs elsewhere by now.
    """
    config = to_config(node)
    config.command = command
    check_model(config.model)
    check_dataset(config.dataset)
    for holder, key in ((config.dataset, "root"), (config.model, "init")):
        if (path := getattr(holder, key)) is not None:
            setattr(holder, key, os.path.abspath(os.path.join(folder, os.path.expanduser(path))))
    return config


def translate(error: BaseException, overrides: Sequence[str]) -> str:
    """An error of Hydra or OmegaConf in one or two lines: what was given, where, what is legal."""
    text = "\n".join(_chain(error))
    given = next((word for word in overrides if word in text), "")
    if match := re.search(r"Could not find '(\w+)/([^']*)'", text):
        group, option = match.groups()
        return f"{group}={option} is not an option of {group}: {nearest(option, options(group))} (see conf/{group}/)"
    if match := re.search(r"[Aa]mbiguous value for argument '(.+?)'", text):
        return f"{match[1]!r} has a comma: for a sweep add -m; for a value quote it twice: 'key=\"a,b\"'"
    if given.startswith("~"):
        return f"{given}: a key cannot be deleted; set it to null or a legal value"
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(match[1])
    if match := re.search(r"Key '([^']+)' (?:is )?not in", text):
        full = re.search(r"full_key: (\S+)", text)
        return _unknown_key(full[1] if full else match[1])
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{match[1]}: the key exists already; write {match[1]}=... without the plus"
    if match := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{match[1]} has no value: this option needs one, set it with {match[1]}=..."
    if match := re.search(r"You must specify '([^']+)'", text):
        return f"{match[1]} has no value: set it with {match[1]}=..."
    key = given.lstrip("+").partition("=")[0]
    if key in NODE_SWITCH or "is not a group of keys" in text or "assign primitive" in text.lower():
        return (
            f"{given} is not legal: {key} is a group of keys; set its parts, such as {NODE_SWITCH.get(key, key + '.…')}"
        )
    telling = re.compile("could not be converted|Invalid value|Cannot|must be")
    causes = [line.strip() for line in text.splitlines() if telling.search(line)]
    full = re.search(r"full_key: (\S+)", text)
    return f"{given or (full[1] if full else 'the configuration')} is not legal: {(causes or text.splitlines())[0]}"


def _chain(error: BaseException | None) -> list[str]:
    """The texts of ``error`` and of what caused it."""
    return [] if error is None else [str(error), *_chain(error.__cause__ or error.__context__)]


def _recorded(ready: Sequence[str], given: Sequence[str]) -> list[str]:
    """The overrides as a later run can read them: a recipe file by its absolute path, not by the name it had in here."""
    files = {
        slug(Path(path).stem): path for word in given if word.startswith("recipe=") for path in [word.partition("=")[2]]
    }
    kept = []
    for word in ready:
        name = word.partition("=")[2]
        path = files.get(name, "") if word.startswith("recipe=") else ""
        kept.append(f"recipe={Path(path).expanduser().resolve()}" if path.endswith((".yaml", ".yml")) else word)
    return kept


def check_words(words: Sequence[str]) -> None:
    """Refuse what Hydra's grammar cannot read, and groups that are given something other than an option.

    Raises:
        ConfigError: names the word.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for word in words:
        try:
            parsed = parser.parse_override(word)
        except HydraException as error:
            raise ConfigError(
                f"cannot read {word!r}: write key=value, and quote values that hold = , # ' or spaces twice, "
                "as in 'resume=\"a=3.pt\"'"
            ) from error
        group = parsed.key_or_group
        if not group:
            raise ConfigError(f"cannot read {word!r}: write key=value")
        if group not in GROUPS:
            continue
        if parsed.is_delete():
            raise ConfigError(f"{word}: a group always has an option; choose one with {group}=...")
        if parsed.is_add():
            raise ConfigError(f"{word}: {group} has an option already; write {word.lstrip('+')}")
        if not parsed.is_sweep_override() and not isinstance(parsed.value(), str):
            value = word.partition("=")[2]
            raise ConfigError(
                f"{word} is not an option of {group}: {nearest(value, options(group))} (see conf/{group}/)"
            )


def _unknown_key(key: str) -> str:
    node: Any = Config()
    path: list[str] = []
    for part in key.split("."):
        if not hasattr(node, part):
            where = ".".join([*path, part])
            legal = list(vars(node)) if hasattr(node, "__dict__") else []
            return f"unknown key {where}: {nearest(part, legal)}"
        node = getattr(node, part)
        path.append(part)
    return f"unknown key {key}"


def _recipe_option(name: str) -> str:
    """Register the recipe ``name`` (an option, or a YAML file) with Hydra; the option's name.

    Raises:
        RecipeError: no such recipe, or the file is not a YAML mapping.
    """
    import yaml
    from hydra.core.config_store import ConfigStore

    name = name.strip()
    if name in ("none", "null", ""):
        return "none"
    is_file = name.endswith((".yaml", ".yml"))
    path = Path(name).expanduser() if is_file else tree("recipes") / f"{name}.yaml"
    if not path.is_file():
        known = options("recipe")
        raise RecipeError(
            f"recipe={name} does not exist ({path if is_file else 'see mprun list recipe'}): {nearest(name, known)}"
        )
    try:
        node = OmegaConf.load(path)
        if not isinstance(node, DictConfig):
            raise RecipeError(f"recipe {path} is not a mapping of keys")
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"recipe {path} is not readable YAML: {' '.join(str(error).split())}") from error
    for key in ("trust", "resume", "command", "hydra"):
        if key in node:
            raise RecipeError(f"recipe {path} sets {key}: only the command line may")
    option = slug(path.stem) if is_file else name
    group, _, leaf = f"recipe/{option}".rpartition("/")
    ConfigStore.instance().store(group=group, name=leaf, node=node, package="_global_", provider=str(path))
    return option


def hydra_version_base() -> str | None:
    """Hydra 1.3 asks for a version base; later ones have a single behaviour."""
    import hydra

    return "1.3" if hydra.__version__.startswith("1.3") else None


def _resolved_hydra(composed: DictConfig) -> DictConfig:
    """The ``hydra`` node with the run folder resolved against the whole config (its other parts may stay open)."""
    folder = composed.hydra.run.dir
    node = OmegaConf.create(OmegaConf.to_container(composed.hydra, resolve=False))
    assert isinstance(node, DictConfig), "hydra is a mapping"
    node.run.dir = folder
    return node


def _choices(hydra_node: DictConfig) -> dict[str, str]:
    return {str(group): str(option) for group, option in hydra_node.runtime.choices.items() if group in GROUPS}
