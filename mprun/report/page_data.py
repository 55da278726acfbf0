"""What a page is made of, as values: the files of one run folder. They are read by ``mprun/commands/report.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mprun.report.probe_view import View, view_of


@dataclass(frozen=True)
class RunFiles:
    """One run, as far as its folder tells. Nothing is required: what is missing is empty, with a line in ``problems``.

    Attributes:
        folder: where it is, as it is to be shown.
        name: of the run.
        status: of ``result.json``; without it ``running``, ``killed``, ``running?`` or ``broken``.
        config: the resolved configuration with dotted keys, secrets masked.
        config_text: the same as YAML.
        result: ``result.json`` as it is; empty for a run that has not ended.
        records: of ``metrics.jsonl``, those that count.
        probe: samples of ``probe.jsonl``, those that count.
        modules: rows of ``modules.json``.
        env: ``env.json``, secrets masked.
        memory: what ``mprun estimate --json memory.json`` wrote into the folder.
        traceback: ``error.txt``.
        problems: what could not be read, a line each.
    """

    folder: Path
    name: str
    status: str
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    probe: Sequence[Mapping[str, Any]] = ()
    modules: Sequence[Mapping[str, Any]] = ()
    env: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""
    problems: Sequence[str] = ()

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """The records of one kind."""
        return [record for record in self.records if record.get("kind") == kind]

    @cached_property
    def view(self) -> View | None:
        """Against which formats the probe's numbers are held; None without samples."""
        return view_of(self.probe, self.modules)
