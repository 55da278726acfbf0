"""``mprun show [overrides]``: the resolved configuration as YAML, checked, without running it. Imports no torch.

With ``resume=`` it is that of the resumed run: its saved overrides, and the new ones on top.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from mprun.compose import compose_run
from mprun.config_check import to_plain


def run(overrides: Sequence[str]) -> int:
    """Print the configuration that ``overrides`` describe; it loads back to itself."""
    composed, _ = compose_run(overrides)
    print(OmegaConf.to_yaml(OmegaConf.create(to_plain(composed.config))), end="")
    return 0
