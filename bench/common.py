"""What the benches share: where things are, what machine this is, legal options, medians, and text between markers."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mprun.training.env import atomic_write_json, atomic_write_text
from mprun.training.host import cpu_model, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "torchvision", "timm", "hydra-core", "numpy")
# What decides the numbers: a change elsewhere (a README, another bench) does not make a measurement stale.
SOURCES = ("mprun", "conf", "recipes", "pyproject.toml", "constraints.txt")
BUSY = 1.5  # load from which on others take processor time that a ratio may show


def positive(text: str) -> int:
    """A count for argparse: of rounds, steps, threads.

    Raises:
        argparse.ArgumentTypeError: not a whole number from 1 on.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: a whole number from 1 on, such as 3")
    return value


def unwritable(file: Path) -> str | None:
    """Why a result cannot be written to ``file``, to be asked before anything is measured; None if it can."""
    if file.is_dir():
        return f"{file} is a folder: give a file"
    if not file.parent.is_dir():
        return f"the folder {file.parent} is not there: make it first"
    if not os.access(file if file.exists() else file.parent, os.W_OK) or not os.access(file.parent, os.W_OK):
        return f"{file} cannot be written: its folder, or the file, is read-only"
    return None


def busy_note() -> None:
    """Say on stderr that the machine has other work, where it has: what is judged after this may be off."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"the machine is busy (load {load:.1f}): ratios may be off", file=sys.stderr, flush=True)


def about(*, threads: int | None = None, device: str | None = None) -> dict[str, Any]:
    """Commit, machine, versions and date of a measurement. Holds no path and no host name.

    Args:
        threads: torch threads in force, where the bench knows them.
        device: the GPU's name, where one was used.
    """
    import platform

    return {
        "commit": git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": bool(git("status", "--porcelain", "--", *SOURCES)),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
    }


def about_text(about: dict[str, Any]) -> str:
    """One line for people: ``commit abc1234, AMD EPYC, 2 cores; Python 3.11.7, torch 2.14.1``."""
    commit = f"commit {about['commit']}" + (" with uncommitted changes" if about["dirty"] else "")
    place = about.get("device") or f"{about['cpu']}, {about['cores']} cores"
    count = about.get("threads")
    threads = f", {count} thread{'s' if count != 1 else ''}" if count else ""
    found = about["versions"]
    named = [f"{name} {found[name]}" for name in ("torch", "torchvision", "timm") if found.get(name)]
    tools = ", ".join([f"Python {found['python']}", *named])
    return f"{commit}, {about['date']}, {place}{threads}; {tools}"


def git(*words: str) -> str:
    """What git prints about this checkout, stripped; empty outside of one."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def ratio_of_pairs(candidate: Sequence[float], baseline: Sequence[float]) -> float:
    """Median of the ratios of runs that were made one after the other, so that a slow minute hits both."""
    return statistics.median(a / b for a, b in zip(candidate, baseline, strict=True))


def progress(text: str) -> None:
    """Show where a bench is on one line of stderr, replaced by the next call; nothing where stderr is a file."""
    if sys.stderr.isatty():
        print(f"\r{text:<70}" if text else f"\r{'':70}\r", end="", file=sys.stderr, flush=True)


def save(name: str, content: dict[str, Any]) -> Path:
    """Write ``bench/results/<name>.json``; the path, relative to the checkout."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    atomic_write_json(path, content)
    return path.relative_to(ROOT)


def load(name: str) -> dict[str, Any] | None:
    """``bench/results/<name>.json``, or None before the first measurement."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def block(path: Path, name: str) -> str:
    """The text between the markers ``name`` of a Markdown or YAML file.

    Raises:
        ValueError: the markers are not there exactly once.
    """
    return _split(path.read_text(encoding="utf-8"), name, path)[1]


def set_block(path: Path, name: str, text: str) -> bool:
    """Put ``text`` between the markers ``name`` of a file; whether that changed anything."""
    before, old, after = _split(path.read_text(encoding="utf-8"), name, path)
    new = f"\n{text.strip(chr(10))}\n"
    if new != old:
        atomic_write_text(path, before + new + after)
    return new != old


def _split(text: str, name: str, path: Path) -> tuple[str, str, str]:
    """The text up to and with the first marker, between both, and from the second marker on."""
    form = {".md": "<!-- {} -->", ".yaml": "# <{}>"}[path.suffix]
    start, end = form.format(name), form.format(f"/{name}")
    if text.count(start) != 1 or text.count(end) != 1 or text.index(end) < text.index(start):
        raise ValueError(f"{path.name}: {start} and {end} must be there once each, in this order")
    before, _, rest = text.partition(start)
    inside, _, after = rest.partition(end)
    return before + start, inside, end + after
