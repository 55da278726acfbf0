"""Hydra's own entry: ``-m`` sweeps and Hydra's flags (``--cfg``, ``--info``, ``--shell-completion`` ...)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.compose import check, options, prepare, register, translate, tree
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
        config = check(OmegaConf.masked_copy(node, list(node)), command="train")
        code = execute(config, Path(settings.runtime.output_dir).resolve())
        if code:
            failures.append(f"job {settings.job.num} ended with status {code}")

    arguments = prepare(words)
    sys.argv = ["mprun", *arguments]
    entry = hydra.main(version_base="1.3", config_path=str(tree("conf")), config_name="config")(job)
    try:
        entry()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(translate(error, words)) from error
    return 1 if failures else 0
