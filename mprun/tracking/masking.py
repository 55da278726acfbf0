"""Secrets kept out of what leaves the machine: W&B gets configuration and command line only after :func:`masked`.

A value is masked for one of three reasons::

    its key says so      password, api_key, hf_token ... (in a mapping, an override, a URL's query, "key: value" in text)
    it looks like one    keys of well-known services, JSON web tokens, private keys, user and password of a URL
    it is one            the value of an environment variable whose name says so

What is masked becomes ``***``. A hyperparameter hidden by mistake is a loss too, so flags and counts are left alone
(``class_token=true``, ``max_tokens=8``), and so is a commit id, which looks like a W&B key. The run folder's own
``config.yaml`` keeps everything: a run without its password cannot be run again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_STRONG = r"pass(?:word|wd|phrase)|pwd|secret|api_?key|access_?key|secret_?key|private_?key|auth_?key|credentials?"
# A token may be a word of a model as well (`pool_token=cls`): only a long value is one.
_WEAK = r"token"
_STRONG_KEY = re.compile(rf"(?:^|[._-])(?:{_STRONG})$")
_WEAK_KEY = re.compile(rf"(?:^|[._-])(?:{_WEAK})$")
WEAK_LENGTH = 8

_COMMIT_KEY = re.compile(r"(?:commit|sha\d*|rev|revision|hash|digest)$")
_FORTY_HEX = re.compile(r"\b[0-9a-f]{40}\b")

_LOOKS = re.compile(
    r"wandb_v\d_\w{20,}"
    r"|\bhf_[A-Za-z0-9]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\bxox[abeoprs]-[\w-]{10,}"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r"|(?<=Bearer )\S{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
# The password may hold an @ or a slash of its own: what is no port counts up to the last @.
_URL_USER = re.compile(r"(?<=://)(?:[^/\s'\":]+:(?!\d+/)[^\s'\"]*|[^/\s'\"]+)@")
_IN_TEXT = re.compile(
    rf"(?P<key>\b(?:[\w.-]*[._-])?(?:(?P<strong>{_STRONG})|{_WEAK})[\"']?\s*[:=]\s*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&}\]\"']+)",
    re.IGNORECASE,
)


def masked(value: Any, environ: Mapping[str, str] = os.environ, *, key: str = "") -> Any:
    """``value``, plain containers of any depth, with every secret in it replaced by ``***``.

    Args:
        value: what is to leave the machine. Not changed itself.
        environ: where secrets may come from.
        key: the name of ``value``, if it has one.
    """
    return _masked(value, key, secrets_of(environ))


def masked_words(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words of a command line (``key=value``) without secrets; everything else in them stays."""
    known = secrets_of(environ)
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        found.append(f"{key}={_masked(value, key, known)}" if equals else _masked(word, "", known))
    return found


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The values of environment variables that are secrets by their name, longest first."""
    named = (value for name, value in environ.items() if name != "PWD" and (_is_strong(name) or _is_weak(name)))
    return sorted({value for value in named if len(value) >= WEAK_LENGTH}, key=len, reverse=True)


def _masked(value: Any, key: str, known: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(item, str(name), known) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, key, known) for item in value]
    if isinstance(value, str):
        return _masked_text(value, key, known)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return MASK if is_number and _is_strong(key) else value


def _masked_text(text: str, key: str, known: Sequence[str]) -> str:
    if text.strip("'\" ").lower() in ("", "null", "none", "true", "false"):
        return text
    if _is_strong(key) or (_is_weak(key) and len(text) >= WEAK_LENGTH):
        return MASK
    for secret in known:
        text = text.replace(secret, MASK)
    text = _LOOKS.sub(MASK, text)
    text = _URL_USER.sub(f"{MASK}@", text)
    text = _IN_TEXT.sub(_keep_the_key, text)
    return text if _COMMIT_KEY.search(_snake(key)) else _FORTY_HEX.sub(MASK, text)


def _keep_the_key(match: re.Match[str]) -> str:
    value = match["value"].strip("'\"")
    secret = bool(value) and (match["strong"] is not None or len(value) >= WEAK_LENGTH)
    return match["key"] + (MASK if secret else match["value"])


def _is_strong(key: str) -> bool:
    return _STRONG_KEY.search(_snake(key)) is not None


def _is_weak(key: str) -> bool:
    return _WEAK_KEY.search(_snake(key)) is not None


def _snake(key: str) -> str:
    """``myApiKey`` as ``my_api_key``, ``API-KEY`` as ``api_key``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", key.strip().lstrip("+~")).lower()
