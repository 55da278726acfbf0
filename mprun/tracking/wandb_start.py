"""How a W&B run begins: which mode, which id, with which switches, and what it must leave as it was.

* **One run, one id.** The id is made once and kept beside W&B's files, so a resumed run is the same run there. Started by
  ``wandb agent``, the run takes the agent's id: that is how the sweep knows it.
* **Online becomes offline**, with one line, where there is no key or no answer within ``INIT_TIMEOUT_S``. Nobody is ever
  asked for a key: a question in a batch job waits forever.
* **No secrets.** Configuration, names and the command line are masked first (:mod:`mprun.tracking.masking`).
* **Nothing global stays changed.** W&B replaces ``sys.excepthook``, ``sys.exit`` and the ``write`` of both streams,
  exports ``WANDB_SERVICE`` to child processes and adds warning filters; all that is kept away or put back.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mprun.config import CheckpointArtifact, TrackingMode
from mprun.tracking.base import RunInfo
from mprun.tracking.masking import masked, masked_words
from mprun.training.env import json_ready, undrawn

INIT_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 600.0  # where a checkpoint is to be uploaded as well
ID_FILE = "mprun-run-id.txt"

# WANDB_MODE's words, old ones included.
MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}

# What W&B wants to do when the process ends: talk to its service once more. If that has failed, it must not be tried.
at_exit: list[Callable[..., Any]] = []


def resolve_mode(mode: TrackingMode, environ: Mapping[str, str] = os.environ) -> str:
    """``online``, ``offline`` or ``disabled``.

    An explicit ``tracking.mode`` wins. ``auto`` obeys WANDB_MODE; without it, it is online for a run that ``wandb agent``
    has started, whose sweep would wait for it otherwise, and offline for every other one.
    """
    if mode is not TrackingMode.auto:
        return str(mode.value)
    if environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    default = "online" if environ.get("WANDB_SWEEP_ID") else "offline"
    return MODES.get(environ.get("WANDB_MODE", "").lower(), default)


def finish_timeout_s(info: RunInfo) -> float:
    """How long an online run may take to upload the rest, in seconds."""
    files = info.tracking.log_checkpoint is not CheckpointArtifact.none or info.tracking.log_report
    return UPLOAD_TIMEOUT_S if files else FINISH_TIMEOUT_S


def run_id(run_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The run's W&B id: known from an earlier life, or the agent's, or a new one. Written down for the next life."""
    path = run_dir / "wandb" / ID_FILE
    known = path.read_text().strip() if path.exists() else ""
    if re.fullmatch(r"[A-Za-z0-9_-]+", known):
        return known
    given = environ.get("WANDB_RUN_ID", "") if environ.get("WANDB_SWEEP_ID") else ""
    made = given if re.fullmatch(r"[A-Za-z0-9_-]+", given) else uuid.uuid4().hex[:8]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made + "\n")
    return made


def begin(info: RunInfo, mode: str, run: str) -> tuple[Any, str, str]:
    """Start the W&B run ``run``.

    Returns:
        W&B's run, the mode it is in, and the line to tell if that is not ``mode``.
    """
    import wandb

    before = set((info.run_dir / "wandb").glob("run-*"))
    try:
        return _open(wandb, info, mode, run), mode, ""
    except (Exception, SystemExit) as error:
        if mode == "offline":
            raise
        line = f"W&B online failed ({reason(error)}); writing offline files instead"
    wandb.teardown()  # the service goes on holding the run's id
    # What the failed attempt left looks like a run and would be offered for upload.
    for folder in set((info.run_dir / "wandb").glob("run-*")) - before:
        shutil.rmtree(folder, ignore_errors=True)
    return _open(wandb, info, "offline", run), "offline", line


def _open(wandb: Any, info: RunInfo, mode: str, run: str) -> Any:
    """``wandb.init`` with what it must not do switched off. Settings that an older W&B does not know are left out."""
    quiet = {
        "silent": True,
        "console": "off",  # it would wrap stdout and stderr
        "label_disable": True,  # it would read the user's main file
        "init_timeout": INIT_TIMEOUT_S,
        "finish_timeout": finish_timeout_s(info),
    }
    quiet = {name: value for name, value in quiet.items() if name in wandb.Settings.model_fields}
    # Its global settings, not the run's, decide whether W&B's reports about itself go over the network.
    wandb.setup(settings=wandb.Settings(mode=mode, **quiet))
    tracking = info.tracking
    return wandb.init(
        mode=mode,
        dir=str(info.run_dir.absolute()),
        id=run,
        resume="allow" if mode == "online" and info.resumed_from_step is not None else None,
        project=tracking.project,
        entity=tracking.entity,
        group=masked(tracking.group or os.environ.get("WANDB_SWEEP_ID") or None),
        tags=masked(list(tracking.tags)) or None,
        name=masked(info.name),
        job_type=info.job_type,
        config=masked(json_ready(info.config)),
        reinit="create_new",
        settings=wandb.Settings(**quiet),
    )


@contextmanager
def untouched(run_dir: Path) -> Iterator[None]:
    """Let W&B be imported and started meanwhile, and put back everything global that it changes.

    The three streams lead nowhere for that time: W&B patches them for good, writes about itself, and would ask for a key.
    Copies of what it will upload go below the run folder, not to the user's home.
    """
    # Its error reports hold up the end of the process by half a minute if its server cannot be reached.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    kept = {name: os.environ.get(name) for name in ("WANDB_SERVICE", "WANDB_DATA_DIR")}
    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.absolute() / "wandb" / "data"))
    exits: Any = atexit
    register, hooks, argv = exits.register, (sys.excepthook, sys.exit), sys.argv
    streams = (sys.stdin, sys.stdout, sys.stderr)

    def note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        at_exit.append(function)
        return register(function, *args, **kwargs)

    with undrawn(), warnings.catch_warnings(), open(os.devnull) as source, open(os.devnull, "w") as drain:
        warnings.simplefilter("ignore")
        exits.register, sys.stdin, sys.stdout, sys.stderr = note, source, drain, drain
        sys.argv = masked_words(argv)  # it is recorded
        try:
            yield
        finally:
            exits.register, (sys.excepthook, sys.exit), sys.argv = register, hooks, argv
            sys.stdin, sys.stdout, sys.stderr = streams
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def reason(error: BaseException) -> str:
    """The first line of an error, short enough for a line of ours."""
    first = (str(error).strip() or "no message").splitlines()[0].rstrip(". ")
    first = first if first not in ("no message", "<no message>") else type(error).__name__
    return first if len(first) <= 120 else first[:117] + "..."
