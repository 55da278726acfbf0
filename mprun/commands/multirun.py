"""Hydra's own entry: ``-m`` sweeps and Hydra's flags (``--cfg``, ``--info``, ``--shell-completion`` ...)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.commands import VALUED_FLAGS
from mprun.compose import Composed, check, choices_of, hydra_version_base, prepare, recorded, register
from mprun.compose_errors import check_words, translate
from mprun.errors import ConfigError, MprunError, report
from mprun.options import list_recipes, read_recipe, tree
from mprun.runs import slug


def run(words: Sequence[str]) -> int:
    """Hand ``words`` to Hydra; with ``-m`` every job is one run in its own folder of the sweep."""
    import hydra
    from hydra.errors import HydraException

    register()
    for name in list_recipes():
        try:
            read_recipe(name)
        except MprunError as error:
            # One malformed recipe must not stop runs that do not use it.
            print(f"mprun: warning: {error}", file=sys.stderr)
    failures: list[str] = []

    def job(node: DictConfig) -> None:
        from mprun.commands.train import execute

        try:
            composed, folder = _composed(node)
            code = execute(composed.config, folder, composed=composed)
        except MprunError as error:
            # Told here and now: of all failing jobs Hydra would print the first one only, at the very end.
            report(error)
            code = error.exit_code
        if code > 128:
            raise SystemExit(code)  # stopped by a signal, which means the sweep
        if code:
            failures.append(f"ended with status {code}")

    flags, overrides = split_flags(words)
    ready = prepare(overrides)
    check_words(ready)
    sys.argv = ["mprun", *flags, *ready]
    entry = hydra.main(version_base=hydra_version_base(), config_path=str(tree("conf")), config_name="config")(job)
    try:
        entry()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(translate(error, words)) from error
    return 1 if failures else 0


def _composed(node: DictConfig) -> tuple[Composed, Path]:
    """One job as if it had been composed alone, and its folder.

    Its overrides are those that would run it again, or go on with it, alone: so the group of the sweep is among them.

    Raises:
        ConfigError: not legal, or it asks to resume.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    settings: Any = HydraConfig.get()
    config = check(OmegaConf.masked_copy(node, list(node)), command="train", folder=settings.runtime.cwd)
    if config.resume is not None:
        raise ConfigError(f"resume={config.resume} continues one run: give it without -m")
    folder = Path(settings.runtime.output_dir).resolve()
    overrides = recorded(list(settings.overrides.task))
    if settings.mode == RunMode.MULTIRUN and config.tracking.group is None:
        sweep = Path(settings.runtime.cwd, settings.sweep.dir)
        config.tracking.group = slug(sweep.resolve().name)
        kept = [word for word in overrides if not word.startswith("tracking.group=")]
        overrides = (*kept, f"tracking.group={config.tracking.group}")
    return Composed(config, settings, overrides, choices_of(settings)), folder


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (with their values) and the overrides of ``words``: Hydra's parser wants the flags first."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in VALUED_FLAGS:
            flags += [value for value in [next(rest, None)] if value is not None]
    return flags, overrides
