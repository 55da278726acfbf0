"""Errors of Hydra and OmegaConf in one or two lines: what was given, where, what is legal, what is nearest. No torch.

Their messages are many lines long and speak of nodes and object types. What a user needs of them (the word that was
typed, the key, the legal values) is found again here by what the messages are known to say; what is not recognised is
told by its most telling line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mprun.config import Config
from mprun.errors import ConfigError, nearest
from mprun.options import GROUPS, options

# Groups of keys with a switch of their own: ``train.ema=off`` means ``train.ema.decay=null``.
NODE_SWITCH = {"train.ema": "train.ema.decay", "train.early_stop": "train.early_stop.metric"}


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
    if given and "str is not a ListConfig" in text:
        value = given.partition("=")[2]
        return f"{given} is not legal: {key} is a list; write '{key}=[{value}]'"
    telling = re.compile("could not be converted|Invalid value|Cannot|must be")
    causes = [line.strip() for line in text.splitlines() if telling.search(line)]
    full = re.search(r"full_key: (\S+)", text)
    return f"{given or (full[1] if full else 'the configuration')} is not legal: {(causes or text.splitlines())[0]}"


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


def _chain(error: BaseException | None) -> list[str]:
    """The texts of ``error`` and of what caused it."""
    return [] if error is None else [str(error), *_chain(error.__cause__ or error.__context__)]


def _unknown_key(key: str) -> str:
    if key.partition(".")[0] == "hydra":
        return f"unknown key {key}: mprun --cfg hydra lists Hydra's; one that a launcher takes beside them is added, +{key}=..."
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
