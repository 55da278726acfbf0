"""From words on the command line to a checked configuration. Imports Hydra, never torch.

Composition is Hydra's (groups, overrides, recipes); this module adds what users expect around it:

* ``no``, ``off``, ``false`` and ``none`` switch off an optional key (``train.clip_norm=off``, ``train.ema=no``);
* ``model.kwargs.depth=6`` works with and without ``+``, because ``kwargs`` are open;
* ``recipe=digits/vit_fp16`` and ``recipe=./mine.yaml``, ``precision=./mine.yaml``;
* errors of Hydra and OmegaConf as one block that names the key, the legal values and the nearest one.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.compose_errors import NODE_SWITCH, check_words, translate
from mprun.config import Config
from mprun.config_check import OPEN, schema, to_config, to_plain
from mprun.data import check_dataset
from mprun.errors import ConfigError
from mprun.models.catalog import check_model
from mprun.options import GROUPS, options, read_recipe, recipe_of, tree
from mprun.precision_files import precision_file_of, read_precision, restored
from mprun.resume import Resume, find, idle_words, may_idle
from mprun.runs import slug
from mprun.training.optim_catalog import check_optimizer

__all__ = ["GROUPS", "Composed", "check", "check_words", "choices_of", "compose", "compose_node", "compose_run",
           "hydra_version_base", "options", "prepare", "recorded", "register", "translate", "tree"]  # fmt: skip

OFF_WORDS = {"no", "off", "false", "none", "null"}
# Optional keys: which words switch them off, and which key a whole node's switch means.
OPTIONAL = {
    "train.clip_norm", "train.ema.decay", "train.early_stop.metric", "train.steps", "train.eval_every",
    "train.checkpoint_every", "dataset.augment", "dataset.limit", "dataset.root", "schedule.warmup_steps",
    "schedule.warmup_frac", "precision.eval_dtype", "optimizer.momentum", "optimizer.betas", "optimizer.eps",
    "resume", "model.init", "tracking.group", "tracking.entity",
}  # fmt: skip
# Keys that hold a path: it means relative to where the command is typed, and is recorded so that it means the same later.
PATHS = ("dataset.root", "model.init", "resume")


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


@cache
def register() -> None:
    """Give Hydra the schema and the resolvers, once a process. Safe to call again."""
    from hydra.core.config_store import ConfigStore

    # Options like model=timm say `name: ???`, which OmegaConf takes only where the schema has no default either.
    node = copy.deepcopy(schema())
    node.model.name = node.dataset.name = MISSING
    ConfigStore.instance().store(name="schema", node=node)
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    # A sweep without a name gets one before its folder is made (mprun/sweeps/plan.py).
    OmegaConf.register_new_resolver("slug", lambda text: slug("sweep" if text is None else str(text)), replace=True)


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
        if key in PATHS:
            value = _absolute(value, several=key != "resume")
        if any(key.startswith(f"{node}.") for node in OPEN) or (key in OPEN and value.lstrip().startswith("{")):
            plus = "++"
        if key == "recipe" and not plus:
            value = ",".join(read_recipe(name) for name in value.split(","))
        if key == "precision" and not plus:
            value = ",".join(read_precision(name) for name in value.split(","))
        prepared.append(f"{plus}{key}={value}")
    return prepared


def compose(overrides: Sequence[str], *, command: str = "train") -> Composed:
    """Compose, check and freeze the configuration that ``overrides`` describe.

    Raises:
        ConfigError: an override, key, value or combination is not legal. Nothing has been created.
    """
    from hydra.errors import HydraException

    ready = prepare(overrides)
    check_words(ready)
    composed = compose_node(ready)
    try:
        hydra_node = _resolved_hydra(composed)
        node = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        config = check(node, command=command)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(translate(error, ready)) from error
    return Composed(config, hydra_node, recorded(ready), choices_of(hydra_node))


def compose_node(ready: Sequence[str]) -> DictConfig:
    """What Hydra makes of prepared overrides, unchecked, with its own node ``hydra``.

    Raises:
        ConfigError: an override does not fit.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    register()
    GlobalHydra.instance().clear()
    # One run, one uid: a resolver with a cache keeps it per config object, and each compose makes a new one.
    try:
        with initialize_config_dir(str(tree("conf")), version_base=hydra_version_base()):
            node: DictConfig = hydra_compose("config", overrides=list(ready), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # Hydra raises a bare ValueError for a group or a defaults list of the wrong kind.
        raise ConfigError(translate(error, ready)) from error
    return node


def compose_run(overrides: Sequence[str]) -> tuple[Composed, Resume | None]:
    """What ``mprun train`` would run: :func:`compose`, and with ``resume=`` the saved overrides of that run underneath.

    Returns:
        The composed run, and what it resumes, if anything.

    Raises:
        ConfigError: see :func:`compose`.
        CheckpointError: there is nothing to resume, or an override cannot come into force.
    """
    resume = find(overrides)
    words = list(overrides)
    if resume is not None:
        words = restored(resume.words, overrides, resume.run_dir) if resume.run_dir else resume.words
    composed = compose(words)
    if resume is None and may_idle(overrides) and (idle := idle_words(overrides, to_plain(composed.config))):
        raise ConfigError("\n".join(idle))
    if resume is not None:
        composed.config.resume = str(resume.checkpoint)
        if (saved := resume.saved_config()) is not None:
            resume.check(saved, to_plain(composed.config))
    return composed, resume


def check(node: DictConfig, *, command: str, folder: str = "") -> Config:
    """Check a composed configuration: keys, ranges, rules, builders' arguments; make its paths absolute.

    ``folder`` is where the command was typed, if a job of a sweep runs elsewhere by now.
    """
    config = to_config(node)
    if config.command not in (Config.command, command):
        raise ConfigError(
            f"command={config.command} does nothing: the command is the first word, mprun {config.command} ..."
        )
    config.command = command
    check_model(config.model)
    check_dataset(config.dataset)
    check_optimizer(config.optimizer)
    for holder, key in ((config.dataset, "root"), (config.model, "init")):
        if (path := getattr(holder, key)) is not None:
            setattr(holder, key, os.path.abspath(os.path.join(folder, os.path.expanduser(path))))
    return config


def recorded(ready: Sequence[str]) -> tuple[str, ...]:
    """Prepared overrides as a later run can read them: recipes and files by the name that names them anywhere, not only here."""
    kept = []
    for word in ready:
        key, _, value = word.partition("=")
        read = recipe_of(value) if key == "recipe" else precision_file_of(value) if key == "precision" else None
        kept.append(f"{key}={read.name}" if read else word)
    return tuple(kept)


def _absolute(value: str, *, several: bool) -> str:
    """A path from the command line absolute, and quoted so that nothing in it is Hydra's grammar.

    Args:
        value: as typed; with quotes, Hydra's own grammar has it (functions of a sweep and interpolations too).
        several: a comma separates the values of a sweep.
    """
    if value in ("null", "auto", "latest", "") or "${" in value or re.fullmatch(r"\w+\(.*\)|\[.*\]", value):
        return value
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        paths = [value[1:-1].replace(f"\\{value[0]}", value[0])]
    else:
        paths = [path.replace("\\=", "=") for path in value.split(",")] if several else [value]
    return ",".join(_quoted(os.path.abspath(os.path.expanduser(path.strip()))) for path in paths)


def _quoted(path: str) -> str:
    if re.fullmatch(r"[\w./@%+:-]+", path):
        return path
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


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


def choices_of(hydra_node: DictConfig) -> dict[str, str]:
    """The option of every group, from Hydra's own record."""
    return {str(group): str(option) for group, option in hydra_node.runtime.choices.items() if group in GROUPS}
