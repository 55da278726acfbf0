"""Runs as processes of their own: the same words once for each seed. Imports no torch.

A run that crashes, eats the memory or leaves something behind in torch's globals must not take down or change the next
one, so whoever needs several runs starts ``python -m mprun`` for each, and reads what it left in its run folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mprun.errors import CheckpointError
from mprun.training.env import from_json
from mprun.training.host import driver_version

# What a stopped run exits with: whoever started it stops, too.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class SeedRun:
    """One run of a recipe: how it ended, and its ``result.json`` (empty if it wrote none)."""

    seed: int
    run_dir: Path
    code: int
    seconds: float
    result: dict[str, Any]
    error: str = ""

    @property
    def status(self) -> str:
        """The run's status, ``refused`` where it did not come so far."""
        return str(self.result.get("status", "refused"))


def run_seeds(overrides: Sequence[str], seeds: Sequence[int], folder: Path) -> list[SeedRun]:
    """One run a seed, one after the other, each in a process of its own; stops early if one of them was stopped."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot create the folder {folder}: {error.strerror}") from error
    runs: list[SeedRun] = []
    for seed in seeds:
        runs.append(run_seed(overrides, seed, folder))
        done = runs[-1]
        print(f"  seed {done.seed}  {done.status:<9}{done.seconds:6.1f} s  {done.run_dir}", flush=True)
        if done.code in STOPPED:
            break
    return runs


def run_seed(overrides: Sequence[str], seed: int, folder: Path) -> SeedRun:
    """``mprun <overrides> seed=<seed>`` into ``folder/seed_<seed>``; what it prints goes to ``folder/seed_<seed>.log``."""
    run_dir, log = folder / f"seed_{seed}", folder / f"seed_{seed}.log"
    kept = [word for word in overrides if word.partition("=")[0] not in ("seed", "hydra.run.dir")]
    if not any(word.startswith("tracking.group=") for word in kept):
        kept.append(f"tracking.group={folder.parent.name}-{folder.name}")
    command = [sys.executable, "-m", "mprun", *kept, f"seed={seed}", f"hydra.run.dir={run_dir}"]
    begin = time.perf_counter()
    code = call(command, log)
    seconds = time.perf_counter() - begin
    try:
        result = from_json(json.loads((run_dir / "result.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        result = {}
    error = str(result.get("error") or "") if result else last_words(log)
    return SeedRun(seed, run_dir, code, seconds, result, error)


def call(command: Sequence[str], log: Path) -> int:
    """Run ``command`` with its output in ``log``; SIGTERM is passed on, so that a stopped run saves.

    Returns:
        The exit status; 128 + n where signal n ended the process.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # A terminal has told the run, too: it finishes its step and saves.
            with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                process.wait(timeout=60)
            return 128 + signal.SIGINT
        finally:
            process.kill()
            process.wait()
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def last_words(log: Path) -> str:
    """The error that a run without a result has printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    marked = [number for number, line in enumerate(lines) if line.startswith("mprun: error:")]
    return "\n".join(lines[marked[-1] :] if marked else lines[-1:])


def about_run(run_dir: Path) -> dict[str, Any]:
    """Commit, device, versions of a run's ``env.json``; empty where it has none."""
    try:
        env = json.loads((run_dir / "env.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    git = env.get("git") or {}
    keep = {key: env.get(key) for key in ("device", "versions", "host", "data_sha256", "cpu_fp16")}
    return {"commit": git.get("commit"), "dirty": git.get("dirty"), "driver": driver_version(), **keep}
