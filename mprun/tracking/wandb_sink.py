"""Weights & Biases as a guest: it may watch a run, and never stop, slow or change it.

* **A thread of its own** makes every call after the start. ``log`` only puts a record into a queue, so a stalled disk
  or service costs the training loop nothing. After the first failure W&B is left alone, with one line that says so;
  ``metrics.jsonl`` has everything in any case.
* **Bounded waiting.** Online without a key, or with a server that does not answer within ``INIT_TIMEOUT_S``, becomes
  offline with one line. Nobody is ever asked for a key: a question in a batch job waits forever.
* **Nothing global stays changed.** W&B replaces ``sys.excepthook``, ``sys.exit`` and the ``write`` of both streams,
  exports ``WANDB_SERVICE`` to child processes and adds warning filters; all that is kept away or put back.
* **One axis.** All metrics are drawn over ``step`` (applied steps), so evaluations and training share it, and values
  that a resumed run logs again are not dropped as W&B does with its own counter.
* **The newest file is the whole run.** W&B cannot resume offline: uploading a second offline file of one id replaces
  what the first one brought. So the records that still count are logged again into the new file.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mprun.config import TrackingMode
from mprun.tracking.base import Record, RunInfo, Sink
from mprun.tracking.jsonl import read_metrics
from mprun.training.env import json_ready, undrawn

INIT_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 60.0
OFFLINE_FINISH_TIMEOUT_S = 15.0
QUEUE_SIZE = 10_000
ID_FILE = "mprun-run-id.txt"

# WANDB_MODE's words, old ones included.
MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}

# Everything is drawn over "step"; of these the summary keeps the best value, too.
BEST = {"val/loss": "min,last", "val/top1": "max,last", "ema/loss": "min,last", "ema/top1": "max,last"}
SUMMARY = (
    "status",
    "steps_applied",
    "steps_skipped",
    "loss_scale",
    "wall_s",
    "train_s",
    "examples_per_s",
    "peak_memory",
)

Say = Callable[[str], None]

# What W&B wants to do when the process ends: talk to its service once more. If that has failed, it must not be tried.
_at_exit: list[Callable[..., Any]] = []


def resolve_mode(mode: TrackingMode, environ: Mapping[str, str] = os.environ) -> str:
    """``online``, ``offline`` or ``disabled``: an explicit ``tracking.mode`` wins, ``auto`` obeys WANDB_MODE, else offline."""
    if mode is not TrackingMode.auto:
        return str(mode.value)
    if environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"
    return MODES.get(environ.get("WANDB_MODE", "").lower(), "offline")


class WandbSink(Sink):
    """Hands a run's records to W&B.

    Args:
        mode: ``online`` or ``offline``.
        say: prints one line for people.
    """

    def __init__(self, mode: str, say: Say) -> None:
        self.mode = mode
        self._say = say
        self._run: Any = None
        self._id = ""
        self._folder = ""
        self._url: str | None = None
        self._fallback = ""
        self._failed = False
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._result: dict[str, Any] = {}

    def start(self, info: RunInfo) -> None:
        """Start the W&B run, or go on without it."""
        try:
            self._id = _run_id(info.run_dir)
            backlog = read_metrics(info.run_dir, effective=True) if info.resumed_from_step is not None else []
            try:
                with _untouched():
                    self._run = self._init(info)
            finally:  # only now is stderr the real one again
                if self._fallback:
                    self._say(self._fallback)
            self._folder = os.path.relpath(Path(self._run.dir).parent, info.run_dir)
            self._url = str(self._run.url) if self.mode == "online" else None
            if self._run.resumed:  # the server has the history
                backlog = []
        except (Exception, SystemExit) as error:
            self._give_up(error)
            return
        self._thread = threading.Thread(target=self._work, args=(backlog,), name="mprun-wandb", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        """Queue a record. Never waits, never raises."""
        if self._thread is None or self._failed:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._give_up("it does not keep up")

    def finish(self, result: dict[str, Any]) -> None:
        """Let W&B finish with the run's exit code, for a bounded time; add the entry ``wandb`` (null if it never started)."""
        result["wandb"] = None
        if self._thread is None:
            return
        result["wandb"] = {"mode": self.mode, "id": self._id, "dir": self._folder, "url": self._url}
        self._result = result
        while self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                # Given up already, with a full queue in front of a stalled service: nothing to lose.
                with suppress(queue.Empty):
                    self._queue.get_nowait()
        begin = time.monotonic()
        self._thread.join(FINISH_TIMEOUT_S + 5.0 if self.mode == "online" else OFFLINE_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._give_up("it does not finish")
        elif self.mode == "online" and time.monotonic() - begin > FINISH_TIMEOUT_S:
            self._say(f"W&B was not done after {FINISH_TIMEOUT_S:.0f} s; the rest can be uploaded from {self._folder}")
        self._thread = None

    def _init(self, info: RunInfo) -> Any:
        import wandb

        before = set((info.run_dir / "wandb").glob("run-*"))
        try:
            return _open(wandb, info, self.mode, self._id)
        except (Exception, SystemExit) as error:
            if self.mode == "offline":
                raise
            self._fallback = f"W&B online failed ({_reason(error)}); writing offline files instead"
        wandb.teardown()  # the service goes on holding the run's id
        # What the failed attempt left looks like a run and would be offered for upload.
        for folder in set((info.run_dir / "wandb").glob("run-*")) - before:
            _remove(folder)
        self.mode = "offline"
        return _open(wandb, info, self.mode, self._id)

    def _work(self, backlog: list[Record]) -> None:
        """The thread: define the metrics, log what comes, finish."""
        self._try(self._define)
        for record in backlog:
            self._try(self._log, record)
        while (item := self._queue.get()) is not None:
            self._try(self._log, item)
        summary = {key: json_ready(self._result[key]) for key in SUMMARY if self._result.get(key) is not None}
        self._try(self._run.summary.update, summary)
        # Even after a failure: what was logged before it may still be saved, and the exit code is true.
        self._try(self._run.finish, exit_code=0 if self._result.get("status") == "ok" else 1, always=True)

    def _try(self, action: Callable[..., Any], *args: Any, always: bool = False, **kwargs: Any) -> None:
        if self._failed and not always:
            return
        try:
            action(*args, **kwargs)
        except (Exception, SystemExit) as error:
            self._give_up(error)

    def _define(self) -> None:
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for name, summary in BEST.items():
            self._run.define_metric(name, step_metric="step", summary=summary)

    def _log(self, record: Record) -> None:
        if record.get("kind") == "event":
            return
        # The loss of a skipped step is not a value of the loss curve.
        kept = ("precision/",) if record.get("kind") == "skip" else ("",)
        row = {
            key: value
            for key, value in record.items()
            if key in ("step", "attempt", "epoch") or ("/" in key and key.startswith(kept))
        }
        self._run.log({key: value for key, value in row.items() if isinstance(value, int | float)})

    def _give_up(self, cause: BaseException | str) -> None:
        for function in _at_exit:
            atexit.unregister(function)
        first, self._failed = not self._failed, True
        if first:
            reason = cause if isinstance(cause, str) else _reason(cause)
            self._say(f"W&B is left alone from here on ({reason}); metrics.jsonl has everything")


def _open(wandb: Any, info: RunInfo, mode: str, run_id: str) -> Any:
    """``wandb.init`` with what it must not do switched off. Settings that an older W&B does not know are left out."""
    quiet = {
        "silent": True,
        "console": "off",  # it would wrap stdout and stderr
        "label_disable": True,  # it would read the user's main file
        "init_timeout": INIT_TIMEOUT_S,
        "finish_timeout": FINISH_TIMEOUT_S,
    }
    quiet = {name: value for name, value in quiet.items() if name in wandb.Settings.model_fields}
    # Its global settings, not the run's, decide whether W&B's reports about itself go over the network.
    wandb.setup(settings=wandb.Settings(mode=mode, **quiet))
    tracking = info.tracking
    return wandb.init(
        mode=mode,
        dir=str(info.run_dir.absolute()),
        id=run_id,
        resume="allow" if mode == "online" and info.resumed_from_step is not None else None,
        project=tracking.project,
        entity=tracking.entity,
        group=tracking.group,
        tags=list(tracking.tags) or None,
        name=info.name,
        job_type=info.job_type,
        config=json_ready(info.config),
        reinit="create_new",
        settings=wandb.Settings(**quiet),
    )


def _run_id(run_dir: Path) -> str:
    """The run's W&B id: made once, kept beside W&B's files, so that a resumed run is the same run there."""
    path = run_dir / "wandb" / ID_FILE
    known = path.read_text().strip() if path.exists() else ""
    if re.fullmatch(r"[A-Za-z0-9_-]+", known):
        return known
    made = uuid.uuid4().hex[:8]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made + "\n")
    return made


@contextmanager
def _untouched() -> Iterator[None]:
    """Import and start W&B, and put back everything global that it changes.

    Meanwhile the three streams lead nowhere: W&B patches them for good, writes about itself, and would ask for a key.
    """
    # Its error reports hold up the end of the process by half a minute if its server cannot be reached.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    service = os.environ.get("WANDB_SERVICE")
    exits: Any = atexit
    register, hooks, streams = exits.register, (sys.excepthook, sys.exit), (sys.stdin, sys.stdout, sys.stderr)

    def note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _at_exit.append(function)
        return register(function, *args, **kwargs)

    with undrawn(), warnings.catch_warnings(), open(os.devnull) as source, open(os.devnull, "w") as drain:
        warnings.simplefilter("ignore")
        exits.register, sys.stdin, sys.stdout, sys.stderr = note, source, drain, drain
        try:
            yield
        finally:
            exits.register, (sys.excepthook, sys.exit), (sys.stdin, sys.stdout, sys.stderr) = register, hooks, streams
            if service is None:
                os.environ.pop("WANDB_SERVICE", None)
            else:
                os.environ["WANDB_SERVICE"] = service


def _reason(error: BaseException) -> str:
    first = (str(error).strip() or "no message").splitlines()[0].rstrip(". ")
    first = first if first not in ("no message", "<no message>") else type(error).__name__
    return first if len(first) <= 120 else first[:117] + "..."


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
