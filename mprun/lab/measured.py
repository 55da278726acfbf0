"""What a comparison has measured beside its runs, kept in its folder: the same comparison again does not measure anew. No torch
unless something has to be measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprun import __version__
from mprun.config import Config
from mprun.errors import MprunError
from mprun.training.env import atomic_write_json, from_json, json_ready

FILE = "measured.json"


@dataclass(frozen=True)
class Candidate:
    """A policy to measure: what composes its configuration for the first seed, that one's hash, where its scale has settled."""

    compose: Callable[[], Config]
    hash: str
    scale: float | None


def measured(
    folder: Path, policies: Mapping[str, Candidate], steps: Sequence[int]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Gradients and memory of every policy, from the folder if they are there.

    Args:
        folder: of the comparison.
        policies: by label.
        steps: at which gradients are looked at; none: not at all.

    Returns:
        label -> ``gradients`` and ``memory``, and notes about what could not be measured.
    """
    if not policies:
        return {}, []
    key = json_ready(
        {
            "version": __version__,
            "steps": list(steps),
            "policies": {name: [p.hash, p.scale] for name, p in policies.items()},
        }
    )
    try:
        kept = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if kept["key"] == key:
            return from_json(kept["found"]), list(kept["notes"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    from mprun.lab.compare import gradient_errors, memory

    configs = {name: policy.compose() for name, policy in policies.items()}
    found: dict[str, dict[str, Any]] = {name: {"memory": memory(config)} for name, config in configs.items()}
    notes = [
        f"{name}: memory is not predicted: {one['memory']['error']}"
        for name, one in found.items()
        if "error" in one["memory"]
    ]
    if steps:
        try:
            base = next(iter(configs.values()))
            errors = gradient_errors(base, {name: (configs[name], p.scale) for name, p in policies.items()}, steps)
            for name, states in errors.items():
                found[name]["gradients"] = states
        except MprunError as error:
            notes.append(f"gradients are not compared: {str(error).splitlines()[0]}")
    atomic_write_json(folder / FILE, {"key": key, "found": found, "notes": notes})
    return found, notes
