"""Hydra's own entry: ``-m`` sweeps and Hydra's flags (``--cfg``, ``--info``, ``--shell-completion`` ...)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.commands import VALUED_FLAGS
from mprun.compose import check, check_words, hydra_version_base, options, prepare, register, translate, tree
from mprun.errors import ConfigError, MprunError


def run(words: Sequence[str]) -> int:
    """Hand ``words`` to Hydra; with ``-m`` every job is one run in its own folder of the sweep."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    register()
    for name in options("recipe"):
        if name != "none":
            try:
                prepare([f"recipe={name}"])
            except MprunError as error:
                # One malformed recipe must not stop runs that do not use it.
                print(f"mprun: warning: {error}", file=sys.stderr)
    failures: list[str] = []

    def job(node: DictConfig) -> None:
        from mprun.commands.train import execute

        settings: Any = HydraConfig.get()
        config = check(OmegaConf.masked_copy(node, list(node)), command="train", folder=settings.runtime.cwd)
        if config.resume is not None:
            raise ConfigError(f"resume={config.resume} continues one run: give it without -m")
        code = execute(config, Path(settings.runtime.output_dir).resolve())
        if code:
            failures.append(f"job {settings.job.num} ended with status {code}")

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
