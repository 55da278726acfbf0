"""Tracking: where a run's numbers go. Importing this package imports neither torch nor wandb.

Three sinks, each good at one thing: ``metrics.jsonl`` is the truth, the console is for the person who waits, W&B is for
comparing runs. ``build_sinks`` decides which ones a run has; the loop treats them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mprun.config import Config
from mprun.tracking.base import Record, RunInfo, Sink
from mprun.tracking.jsonl import METRICS_FILE, PROBE_FILE, JsonlSink, read_metrics, read_probe
from mprun.training.env import rank, undrawn

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "METRICS_FILE",
    "PROBE_FILE",
    "JsonlSink",
    "Record",
    "RunInfo",
    "Sink",
    "build_sinks",
    "finish_sinks",
    "read_metrics",
    "read_probe",
]


def build_sinks(config: Config, *, console: Console | None = None) -> list[Sink]:
    """The sinks of one run. Of the processes of a run only the first has any.

    ``metrics.jsonl`` comes first: what the others need of earlier segments is then marked, and what breaks them is
    already on the disk.

    Args:
        config: the run's config; ``tracking.mode=disabled`` leaves W&B out, unimported.
        console: where progress goes; stderr by default.
    """
    if rank() != 0:
        return []
    with undrawn():
        from mprun.tracking.console import ConsoleSink
        from mprun.tracking.wandb_sink import WandbSink
        from mprun.tracking.wandb_start import resolve_mode

    screen = ConsoleSink(console)
    sinks: list[Sink] = [JsonlSink()]
    if (mode := resolve_mode(config.tracking.mode)) != "disabled":
        sinks.append(WandbSink(mode, say=screen.say))
    return [*sinks, screen]


def finish_sinks(sinks: Sequence[Sink], result: dict[str, Any]) -> None:
    """Finish every sink, the others also when one fails; then raise the first failure.

    Call it before ``result.json`` is written: a sink may add an entry about itself, as W&B does.
    """
    failures: list[Exception] = []
    for sink in sinks:
        try:
            sink.finish(result)
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
