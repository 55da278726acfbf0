"""Weights & Biases as a guest: it may watch a run, and never stop, slow or change it.

* **A thread of its own** makes every call. ``log`` only puts a record into a queue, so a stalled disk or service costs
  the training loop nothing. After the first failure W&B is left alone, with one line that says so; ``metrics.jsonl`` has
  everything in any case.
* **Bounded waiting**, at the start and at the end. Where W&B did not answer within that time, later runs of the same
  process (a sweep) do without it.
* **One axis.** All metrics are drawn over ``step`` (applied steps), so evaluations and training share it, and values
  that a resumed run logs again are not dropped as W&B does with its own counter.
* **The newest file is the whole run.** W&B cannot resume offline: uploading a second offline file of one id replaces
  what the first one brought. So the records that still count are logged again into the new file.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mprun.tracking.base import Record, RunInfo, Sink
from mprun.tracking.jsonl import read_metrics, read_probe
from mprun.tracking.wandb_extras import alert, histograms, log_checkpoint, log_modules, log_report
from mprun.tracking.wandb_start import at_exit, begin, finish_timeout_s, reason, run_id, untouched
from mprun.training.env import json_ready

START_TIMEOUT_S = 60.0
OFFLINE_FINISH_TIMEOUT_S = 15.0
QUEUE_SIZE = 10_000

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

# Whether W&B has been waited for in vain in this process.
_stuck = threading.Event()


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
        self._lines: list[str] = []
        self._trouble: BaseException | None = None
        self._failed = False
        self._draws = True
        self._wait_s = OFFLINE_FINISH_TIMEOUT_S
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_SIZE)
        self._ready = threading.Event()
        self._go = threading.Event()
        self._thread: threading.Thread | None = None
        self._result: dict[str, Any] = {}

    def start(self, info: RunInfo) -> None:
        """Start the W&B run, or go on without it."""
        if _stuck.is_set():
            self._give_up("it did not answer earlier in this process")
            return
        thread = threading.Thread(target=self._work, args=(info,), name="mprun-wandb", daemon=True)
        try:
            with untouched(info.run_dir):
                thread.start()
                in_time = self._ready.wait(START_TIMEOUT_S)
        except Exception as error:
            self._give_up(error)
            return
        finally:
            self._go.set()
        for line in self._lines:  # only now is stderr the real one again
            self._say(line)
        if not in_time:
            _stuck.set()
            self._give_up("it does not start")
        elif self._trouble is not None:
            self._give_up(self._trouble)
        else:
            self._thread = thread

    def log(self, record: Record) -> None:
        """Queue a record. Never waits, never raises."""
        if self._thread is None or self._failed:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._give_up("it does not keep up")

    def finish(self, result: dict[str, Any]) -> None:
        """Let W&B finish with the run's exit status, for a bounded time; add the entry ``wandb`` (null if it never started)."""
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
        start = time.monotonic()
        self._thread.join(self._wait_s + (5.0 if self.mode == "online" else 0.0))
        if self._thread.is_alive():
            _stuck.set()
            self._give_up("it does not finish")
        elif self.mode == "online" and time.monotonic() - start > self._wait_s:
            self._say(f"W&B was not done after {self._wait_s:.0f} s; the rest can be uploaded from {self._folder}")
        self._thread = None

    def _work(self, info: RunInfo) -> None:
        """The thread: start, define the metrics, log what comes, finish."""
        try:
            backlog = self._open(info)
        except BaseException as error:
            self._trouble = error
            return
        finally:
            self._ready.set()
        self._go.wait()  # until what is said reaches people again: stderr is held while W&B starts
        self._try(self._define)
        for record in backlog:
            self._try(self._log, record)
        while (item := self._queue.get()) is not None:
            self._try(self._log, item)
        result = self._result
        self._try(log_checkpoint, self._run, info, result, optional="the checkpoint")
        self._try(log_report, self._run, info, optional="the report")
        self._try(alert, self._run, info, result, optional="the alert")
        summary = {key: json_ready(result[key]) for key in SUMMARY if result.get(key) is not None}
        self._try(self._run.summary.update, summary)
        # Even after a failure: what was logged before it may still be saved, and the exit status is true.
        failed = 0 if result.get("status") == "ok" else 1
        self._try(self._run.finish, exit_code=result.get("exit_code") or failed, always=True)

    def _open(self, info: RunInfo) -> list[Record]:
        """Start W&B's run. Returns the records of earlier lives that it has to be told again."""
        resumed = info.resumed_from_step is not None
        backlog = _everything(info.run_dir) if resumed else []
        self._id = run_id(info.run_dir)
        self._run, self.mode, line = begin(info, self.mode, self._id)
        self._lines += [line] if line else []
        self._folder = os.path.relpath(Path(self._run.dir).parent, info.run_dir)
        self._url = str(self._run.url) if self.mode == "online" else None
        if self.mode == "online":
            self._wait_s = finish_timeout_s(info)
        # Here and not later: what it imports may change what is global.
        self._try(log_modules, self._run, info, optional="the table of modules")
        return [] if self._run.resumed else backlog  # resumed: the server has the history

    def _try(
        self, action: Callable[..., Any], *args: Any, optional: str = "", always: bool = False, **kwargs: Any
    ) -> None:
        if self._failed and not always:
            return
        try:
            action(*args, **kwargs)
        except BaseException as error:
            if optional:
                line = f"W&B does without {optional} ({reason(error)})"
                self._say(line) if self._ready.is_set() else self._lines.append(line)
            else:
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
        drawn: dict[str, Any] = {}
        if record.get("kind") == "probe" and self._draws:
            self._draws = False  # where it fails once, it is not tried again
            self._try(self._draw, record, drawn, optional="the histograms")
        self._run.log({key: value for key, value in row.items() if isinstance(value, int | float)} | drawn)

    def _draw(self, record: Record, drawn: dict[str, Any]) -> None:
        drawn.update(histograms(record))
        self._draws = True

    def _give_up(self, cause: BaseException | str) -> None:
        for function in at_exit:
            atexit.unregister(function)
        first, self._failed = not self._failed, True
        if first:
            why = cause if isinstance(cause, str) else reason(cause)
            self._say(f"W&B is left alone from here on ({why}); metrics.jsonl has everything")


def _everything(run_dir: Path) -> list[Record]:
    """The records of earlier lives that count, those of the probe with what they had to say of modules."""
    samples = {sample["attempt"]: sample["modules"] for sample in read_probe(run_dir, effective=True)}
    return [
        {**record, "modules": samples.get(record["attempt"], {})} if record.get("kind") == "probe" else record
        for record in read_metrics(run_dir, effective=True)
    ]
