"""``mprun validate [overrides]``: every check that needs no training. Imports no torch.

Checked: keys, types, ranges, rules between keys, and ``kwargs`` against the builders' signatures. Not checked: what only
the device can say (``mprun env`` shows the device).
"""

from __future__ import annotations

from collections.abc import Sequence

from mprun.compose import compose


def run(overrides: Sequence[str]) -> int:
    """Check and say so in one line. An error is raised, and printed by the caller."""
    composed = compose(overrides)
    chosen = " ".join(f"{group}={option}" for group, option in composed.choices.items())
    print(f"valid: {chosen}")
    return 0
