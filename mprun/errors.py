"""The exception tree.

    MprunError                   anything a user can cause or fix; printed as one block, no traceback
    ├── ConfigError              a key, value or combination in the config is not legal
    ├── PrecisionError           the precision policy cannot run as named on this device or torch
    │   └── OverrideError        an FP32 rule matches nothing or contradicts the model
    ├── LossScaleError           the loss scale ran out of room (floor, patience)
    ├── NonFiniteError           a loss, input or gradient is NaN or inf where no scale can cure it
    ├── CheckpointError          a checkpoint is missing, torn, foreign or of another model
    └── RecipeError              a recipe file is malformed or names something untrusted

Every message is one or two lines that say what was given, the key or file, what is legal, and what to do.
Anything that is not an ``MprunError`` is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection


class MprunError(Exception):
    """Base of every error that a user can cause or fix. ``exit_code`` is the status of the process."""

    exit_code = 1


class ConfigError(MprunError):
    """The configuration is not legal; nothing has been created yet."""

    exit_code = 2


class PrecisionError(MprunError):
    """The precision policy cannot run as named; it is never replaced by another."""

    exit_code = 2


class OverrideError(PrecisionError):
    """An FP32 rule matches no module, or contradicts the model."""


class LossScaleError(MprunError):
    """Skips in a row reached ``patience``, or the loss scale cannot go lower."""


class NonFiniteError(MprunError):
    """A loss, an input or a gradient is NaN or inf, and the loss scale is not the cause."""


class CheckpointError(MprunError):
    """A checkpoint is missing, torn, foreign, or belongs to another model."""

    exit_code = 2


class RecipeError(MprunError):
    """A recipe file is malformed, or names code outside ``trust``."""

    exit_code = 2


def report(error: MprunError) -> None:
    """Print an error once, on stderr: one block, the first line marked."""
    lines = str(error).splitlines() or [type(error).__name__]
    print("\n".join([f"mprun: error: {lines[0]}", *(f"  {line.strip()}" for line in lines[1:])]), file=sys.stderr)


def nearest(word: str, legal: Collection[str]) -> str:
    """The end of an error message about ``word``: the nearest legal word, if one is near, and all of them, if few.

    >>> nearest("dpeth", ["depth", "width"])
    "did you mean 'depth'? legal: depth, width"
    """
    close = difflib.get_close_matches(word, list(legal), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return hint + (f"legal: {', '.join(legal) or 'none'}" if len(legal) <= 40 else f"{len(legal)} names are legal")
