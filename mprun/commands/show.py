"""``mprun show [overrides]``: the resolved configuration as YAML, checked, without running it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from mprun.compose import compose
from mprun.config_check import to_plain


def run(overrides: Sequence[str]) -> int:
    """Print the configuration that ``overrides`` describe; it loads back to itself."""
    print(OmegaConf.to_yaml(OmegaConf.create(to_plain(compose(overrides).config))), end="")
    return 0
