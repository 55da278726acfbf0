"""What a run says while it runs, and to whom: records and sinks.

A record is a flat dict with ``kind`` (``train``, ``val``, ``skip``, ``probe`` or ``event``), ``step`` (applied steps so far),
``attempt``, ``epoch``, ``segment`` and fields of the glossary such as ``train/loss``. The loop hands every record to
every sink and knows nothing else about them::

    start(info)  ->  log(record)*  ->  finish(result)

``skip`` records carry a ``reason``, ``probe`` records ``modules`` (statistics by module and tensor),
``event`` records carry ``event`` (its name) and ``message`` (a line for people).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mprun.config import TrackingConfig

Record = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What a sink may know about a run before its first step.

    Attributes:
        config: the resolved config as a plain dict.
        total_steps: applied steps of the whole run, also when resumed; 0 if not known.
        resumed_from_step: applied steps in the checkpoint that this run goes on from; null for a fresh run.
        resumed_from_attempt: attempts in that checkpoint, which also places the skips after the last applied step.
        job_type: the command, such as ``train``.
    """

    run_dir: Path
    config: dict[str, Any]
    name: str
    total_steps: int
    resumed_from_step: int | None
    tracking: TrackingConfig
    job_type: str
    resumed_from_attempt: int | None = None


class Sink(Protocol):
    """Somewhere that records go. Derive from it to inherit what a sink need not care about."""

    def start(self, info: RunInfo) -> None:
        """The run begins, or goes on."""

    def log(self, record: Record) -> None:
        """Take one record. It is shared with other sinks: read it, do not change it."""

    def progress(self, step: int, attempt: int) -> None:
        """Counters known without waiting for the device; may be called after every step."""
        return  # most sinks wait for records

    def finish(self, result: dict[str, Any]) -> None:
        """The run is over, well or badly. ``result`` becomes ``result.json``; a sink may add an entry about itself."""
