"""The jobs of a sweep, some at once, each in a process of its own. Imports no torch.

One line a job as it starts and as it ends. SIGINT and SIGTERM are passed on to the jobs: they finish their step, save and
stop, and no further one begins; a second signal kills them.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mprun.report.run_folders import alive
from mprun.report.runs_table import short
from mprun.report.summary import duration_text, number_text
from mprun.runs import SWEEP_FILE
from mprun.sweeps.folder import Job, Sweep, claim, release
from mprun.sweeps.jobs import DONE, Outcome, Running, done, failed_since, finish, refused, start, state_of

POLL_S = 0.03
ELSEWHERE_S = 0.5


@dataclass
class Pool:
    """What is going on in a sweep."""

    sweep: Sweep
    width: int
    on_error_stop: bool
    gpus: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    elsewhere: list[Job] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)
    begun: float = math.inf
    signal: int = 0
    failed: bool = False

    @property
    def stopping(self) -> bool:
        """Whether no further job begins."""
        return bool(self.signal) or (self.failed and self.on_error_stop)


def run_pool(sweep: Sweep, jobs: Iterator[Job], *, width: int, on_error_stop: bool) -> Pool:
    """Run the jobs, ``width`` at once. Returns what became of them."""
    # By the clock of the file system, which other machines have, too.
    begun = (sweep.folder / SWEEP_FILE).stat().st_mtime
    pool = Pool(sweep, width, on_error_stop, gpus=gpus(os.environ), env=threads(width, os.environ), begun=begun)
    ahead: deque[Job] = deque()
    with _signals(pool):
        while True:
            while not pool.stopping and len(pool.running) < width and (job := _next(ahead, jobs)) is not None:
                begin(pool, job)
            if not pool.running and not (pool.elsewhere and not pool.stopping):
                return pool
            # While the processes work, the jobs to come are composed.
            if len(ahead) < width and not pool.stopping and (job := next(jobs, None)) is not None:
                ahead.append(job)
            time.sleep(POLL_S)
            for running in [one for one in pool.running if one.process.poll() is not None]:
                end(pool, running)
            if not pool.running and pool.elsewhere and not pool.stopping:
                time.sleep(ELSEWHERE_S)
                ahead.extend(pool.elsewhere)
                pool.elsewhere.clear()


def _next(ahead: deque[Job], jobs: Iterator[Job]) -> Job | None:
    return ahead.popleft() if ahead else next(jobs, None)


def begin(pool: Pool, job: Job) -> None:
    """Start a job, or say why it is not started."""
    sweep = pool.sweep
    if job.error:
        _ended(pool, refused(sweep, job))
        return
    if job.same_as is not None:
        say(pool.sweep, job, f"same as job {job.same_as}")
        return
    handle = claim(sweep.folder, job.folder)
    if handle is None or alive(sweep.path(job)) == "running":
        if handle is not None:
            release(handle)
        if job.number not in pool.told:
            pool.told.add(job.number)
            say(sweep, job, "elsewhere", note="runs in another process; waiting")
        pool.elsewhere.append(job)
        return
    if state_of(sweep.path(job)) == DONE:
        release(handle)
        outcome = done(sweep, job)
        pool.outcomes.append(outcome)
        say(sweep, job, "done before", outcome)
        return
    if failed_since(sweep.path(job), pool.begun):
        release(handle)
        _ended(pool, done(sweep, job))
        return
    gpu = free_gpu(pool.gpus, [running.gpu for running in pool.running])
    env = {**pool.env, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})}
    running = start(sweep, job, handle, env=env, gpu=gpu)
    pool.running.append(running)
    if pool.signal:  # it came while the process was being started
        _send(running, pool.signal)
    where = f"on GPU {gpu}" if gpu is not None else ""
    say(sweep, job, "resumed" if running.how == "resume" else "started", note=where)


def end(pool: Pool, running: Running) -> None:
    """Record the end of a job."""
    pool.running.remove(running)
    _ended(pool, finish(pool.sweep, running, asked=pool.signal))


def _ended(pool: Pool, outcome: Outcome) -> None:
    pool.outcomes.append(outcome)
    if outcome.status not in ("ok", "interrupted"):
        pool.failed = True
    say(pool.sweep, outcome.job, outcome.status, outcome)


# --- lines ---------------------------------------------------------------------------------------------------------------


def say(sweep: Sweep, job: Job, status: str, outcome: Outcome | None = None, note: str = "") -> None:
    """One line about a job: ``[ 3/18] ok       12.3 s  val/top1 0.9712  precision=bf16 seed=2``, and why it failed."""
    print("\n".join(lines_of(len(sweep.jobs), job, status, outcome, note)), flush=True)


def lines_of(total: int, job: Job, status: str, outcome: Outcome | None = None, note: str = "") -> list[str]:
    """The line of :func:`say`, cut to the width of a terminal, whole elsewhere."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    parts = [f"[{job.number:>{len(str(total))}}/{total}]", f"{status:<11}"]
    if outcome is not None:
        parts.append(f"{duration_text(outcome.seconds):>7}" if outcome.seconds is not None else " " * 7)
        if outcome.metric is not None and outcome.status == "ok":
            name, value = outcome.metric
            parts.append(f"{name} {number_text(value)}")
    parts += [note, label(job)]
    lines = [" ".join(part for part in parts if part)]
    if outcome is not None and outcome.reason:
        lines.append(f"        {outcome.reason}")
    return [line if not width or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def label(job: Job) -> str:
    """The swept words of a job, keys by their last part: ``precision=bf16 lr=0.003 seed=2``."""
    parts = [word.lstrip("+").partition("=") for word in job.swept]
    return " ".join(f"{short(key)}={value}" for key, _, value in parts) or "the only job"


# --- signals -------------------------------------------------------------------------------------------------------------


@contextmanager
def _signals(pool: Pool) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and the end of the terminal on to the jobs; the second one kills them."""

    def handle(number: int, frame: FrameType | None) -> None:
        again = bool(pool.signal)
        if number == getattr(signal, "SIGHUP", None):
            number = signal.SIGTERM  # a run knows no other
        pool.signal = pool.signal or number
        for running in pool.running:
            _send(running, signal.SIGKILL if again else number)
        if not again:
            print(f"{signal.Signals(number).name}: the jobs save and stop; once more to kill them", file=sys.stderr)

    with handlers(handle):
        yield


@contextmanager
def handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handle`` have SIGINT, SIGTERM and SIGHUP, the last one unless it is ignored (``nohup``)."""
    with ExitStack() as stack:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is None or (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
                continue
            with suppress(ValueError):  # not in the main thread: signals are somebody else's business
                before = signal.signal(number, handle)
                stack.callback(signal.signal, number, before)
        yield


def _send(running: Running, number: int) -> None:
    """Send a signal to a job's process; SIGKILL to everything in its session."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(running.process.pid, number)
        else:
            running.process.send_signal(number)


# --- cores and GPUs ------------------------------------------------------------------------------------------------------


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(width: int, environ: Mapping[str, str]) -> dict[str, str]:
    """``OMP_NUM_THREADS`` for each of ``width`` jobs at once: its share of the cores, unless the user has set it.

    A single job at a time has what a run alone has, so that its numbers are the same to the last bit.
    """
    if width == 1 or "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores() // width))}


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs to share out, as ``CUDA_VISIBLE_DEVICES`` names them; none if there are fewer than two."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        found = [name.strip() for name in given.split(",") if name.strip()]
    else:
        count = len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
        found = [str(index) for index in range(count)]
    return found if len(found) > 1 else []


def free_gpu(found: Sequence[str], used: Sequence[str | None]) -> str | None:
    """The GPU of ``found`` that is the fewest times in ``used``; None where there is nothing to choose."""
    return min(found, key=lambda gpu: (used.count(gpu), found.index(gpu)), default=None)
