"""``mprun resume RUN | SWEEP [overrides]``: go on with a run, or with what is left of a sweep.

mprun resume latest                          the newest run, the same as mprun resume=latest
mprun resume outputs/x/20260101-120000-abc   any run folder, or a checkpoint
mprun resume outputs/sweeps/x/20260101-...   a sweep: its jobs that are not finished
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mprun.errors import ConfigError
from mprun.runs import SWEEP_FILE

# What of a sweep may be given anew: how it runs, and not what it consists of.
OF_A_SWEEP = ("sweep.jobs", "sweep.on_error", "trust", "hydra/launcher")


def run(words: Sequence[str]) -> int:
    """Go on. Returns the exit status of the run, or of the sweep.

    Raises:
        ConfigError: the words do not fit.
        CheckpointError: there is nothing to go on with.
    """
    names = [word for word in words if "=" not in word and not word.startswith(("-", "+", "~"))]
    overrides = [word for word in words if word not in names]
    if len(names) != 1:
        raise ConfigError(f"resume needs one folder, not {', '.join(names) or 'none'}: a run, a sweep, or latest")
    if flags := [word for word in overrides if word.startswith("-")]:
        raise ConfigError(f"resume does not know {flags[0]}: it takes a folder and key=value words")
    folder = Path(names[0]).expanduser().resolve()
    if not (folder / SWEEP_FILE).is_file() or (folder / "config.yaml").is_file():
        from mprun.commands.train import run as train

        return train([f"resume={names[0]}", *overrides])
    from mprun.commands.multirun import sweep
    from mprun.sweeps.folder import read_sweep

    for word in overrides:
        key = word.lstrip("+").partition("=")[0]
        if key not in OF_A_SWEEP and not key.startswith("hydra.launcher."):
            raise ConfigError(f"{word} would make another sweep of it; only {', '.join(OF_A_SWEEP)} can be given anew")
    known = read_sweep(folder)
    if known.about.get("command") == "compare":
        from mprun.commands.compare import run as compare

        return compare([*known.about["again"], *overrides])
    return sweep([*known.words, *overrides], folder)
