"""One trial: a run in a process of its own, what it has measured so far, and how it ended. Imports no torch."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mprun.processes import last_words
from mprun.sweeps.jobs import read_result, reason_of
from mprun.training.env import from_json

LOG_FILE = "run.log"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass
class Curve:
    """The evaluations in a run's ``metrics.jsonl``, read as the file grows.

    ``values`` is by applied step. Where a run was resumed, what it measured after the step it went on from is superseded.
    """

    path: Path
    metric: str
    values: dict[int, float] = field(default_factory=dict)
    _read: int = 0

    def update(self) -> bool:
        """Read what is new. Whether there was an evaluation."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return False
        self._read += len(whole) + len(newline)
        new = False
        for line in whole.splitlines():
            try:
                record = from_json(json.loads(line))
            except ValueError:
                continue
            if record.get("event") == "resume":
                begin = record.get("resumed_from_step") or 0
                self.values = {step: value for step, value in self.values.items() if step <= begin}
            elif record.get("kind") == "val" and isinstance(record.get(self.metric), int | float):
                self.values[int(record["step"])] = float(record[self.metric])
                new = True
        return new

    def ordered(self) -> list[float]:
        """The values in the order of steps."""
        return [self.values[step] for step in sorted(self.values)]


@dataclass(frozen=True)
class End:
    """How a run ended: its status in ``result.json``'s words, or ``killed``, ``refused``; and why, in a line."""

    status: str
    reason: str


@dataclass
class Child:
    """The process of a trial."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: IO[bytes]
    started: float
    asked: str = ""  # why it was asked to stop: "pruned" or "stopped"
    asked_at: float = 0.0
    gpu: str | None = None

    def ask(self, why: str) -> None:
        """Ask the run to save and stop."""
        if not self.asked:
            self.asked, self.asked_at = why, time.monotonic()
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the run at once, with the processes that load its data."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> bool:
        """Whether the process is gone."""
        if self.process.poll() is None:
            return False
        self.log.close()
        return True


def start(words: Sequence[str], folder: Path, environment: Mapping[str, str], gpu: str | None = None) -> Child:
    """Start ``python -m mprun train <words>``; what it prints goes to ``run.log`` in ``folder``, which exists.

    The child leads a session of its own, so that the terminal's Ctrl-C reaches it only through its worker. Where the
    system can, a worker's death stops the child too; it saves first.
    """
    log = (folder / LOG_FILE).open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "mprun", "train", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})},
        start_new_session=True,
        preexec_fn=_stop_with_parent if _prctl is not None else None,
    )
    return Child(process, folder, log, time.monotonic(), gpu=gpu)


def end_of(folder: Path, code: int | None) -> End:
    """How the run in ``folder`` ended.

    Args:
        folder: of the run.
        code: the status of its process as of :class:`subprocess.Popen`; None where nobody knows it.
    """
    if code == 2:
        return End("refused", _said(folder))  # a result that is there is of an earlier life
    result = read_result(folder)
    if result:
        return End(str(result.get("status", "failed")), reason_of(result.get("error")))
    if code is not None and code < 0:
        return End("killed", f"killed by {signal.Signals(-code).name}")
    return End("failed", _said(folder))


def _said(folder: Path) -> str:
    """The error that a run without a result has printed, in a line."""
    log = folder / LOG_FILE
    return reason_of(last_words(log).removeprefix("mprun: error: ")) if log.is_file() else ""


def value_of(curve: Curve, *, maximize: bool) -> tuple[float | None, str]:
    """The value of a finished run, the best of its evaluations; or None, and why it has none.

    A run whose last evaluation is NaN or infinite has none: it did not end well, whatever it was before.
    """
    values = curve.ordered()
    if not values:
        return None, f"{curve.metric} was never measured"
    if not math.isfinite(values[-1]):
        return None, f"{curve.metric} is {values[-1]} at the end"
    finite = [value for value in values if math.isfinite(value)]
    return (max(finite) if maximize else min(finite)), ""


def _load_prctl() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None


_prctl = _load_prctl()


def _stop_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
