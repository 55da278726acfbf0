"""A precision option as a file: every key of ``precision``, and comments that say why. ``precision=FILE`` uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

WIDTH = 110


def option_text(precision: Mapping[str, Any], about: Sequence[str], why: Mapping[str, str] | None = None) -> str:
    """The YAML of ``precision``.

    Args:
        precision: the node as plain values, every key.
        about: comment lines at the head.
        why: by FP32 rule, what is said beside it.
    """
    lines = [f"# {line}" for text in about for line in (text.splitlines() or [""])]
    rules = list(precision.get("fp32_modules") or [])
    for line in OmegaConf.to_yaml(OmegaConf.create({**precision, "fp32_modules": rules})).splitlines():
        rule = next((rule for rule in rules if line.lstrip() in (f"- {rule}", f"- '{rule}'", f'- "{rule}"')), None)
        said = " ".join((why or {}).get(rule, "").split()) if rule is not None else ""
        lines.append(f"{line}  # {said[:WIDTH]}" if said else line)
    return "\n".join(lines) + "\n"
