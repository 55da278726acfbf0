"""``metrics.jsonl``: the truth about a run, one JSON object a line; ``probe.jsonl``: the probe's samples.

Each record is one line, handed to the operating system before the step goes on, so a killed process loses nothing that
was logged; at most the line that was being written is torn, and the reader and the next segment leave that one out.

A run that is resumed logs some steps twice: those between its checkpoint and the moment it died. Nothing is erased.
Each life of the run is a *segment* with a number of its own, and every later one begins with a ``resume`` event that
says from which step (and attempt) it goes on. From that it is plain which value counts::

    a record of segment s is superseded  <=>  some later segment went on from before it, or logged it again

NaN and infinity are no JSON. They are written as the strings ``"nan"``, ``"inf"``, ``"-inf"``, which every JSON parser
reads, and :func:`read_metrics` gives floats back.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mprun.errors import MprunError
from mprun.tracking.base import Record, RunInfo, Sink
from mprun.training.env import from_json, json_ready

METRICS_FILE = "metrics.jsonl"
# Of a record of kind "probe" the statistics of modules go here, so that whoever reads the metrics need not read them.
PROBE_FILE = "probe.jsonl"


class JsonlSink(Sink):
    """Appends records to ``metrics.jsonl``; gives every record its ``segment``, counted in the file itself."""

    def __init__(self) -> None:
        self.segment = 0
        self._file: BinaryIO | None = None
        self._path = Path(METRICS_FILE)
        self._probe: BinaryIO | None = None
        self._probe_failed = False

    def start(self, info: RunInfo) -> None:
        """Open the file; if it exists, mend its end and mark the new segment."""
        self._path = info.run_dir / METRICS_FILE
        earlier = _mend(self._path) if self._path.exists() else []
        self.segment = 1 + max((record.get("segment", 0) for record in earlier), default=-1)
        self._file = self._path.open("ab")
        if (probe := info.run_dir / PROBE_FILE).exists():
            with suppress(OSError):  # an appendix: whoever reads it is told what is wrong with it
                _mend_end(probe)
        if not earlier and info.resumed_from_step is None:
            return
        step, attempt = info.resumed_from_step, info.resumed_from_attempt
        self.log(
            {
                "kind": "event",
                "event": "resume",
                "step": step or 0,
                "attempt": attempt if attempt is not None else step or 0,
                "resumed_from_step": step,
                "resumed_from_attempt": attempt,
                "message": "started again from step 0" if step is None else f"resumed from step {step}",
            }
        )

    def log(self, record: Record) -> None:
        """Append one line.

        Raises:
            MprunError: the disk refuses. What happened to the run would be unknown from here on, so it must stop.
        """
        if self._file is None:
            return
        if record.get("kind") == "probe":
            record = self._log_modules(record)
        line = json.dumps(json_ready({**record, "segment": self.segment}), allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            self._abandon()
            raise MprunError(
                f"{self._path}: cannot be written ({error.strerror or error}); make room and resume"
            ) from error

    def finish(self, result: dict[str, Any]) -> None:
        """Close the file."""
        for file in (self._file, self._probe):
            if file is not None:
                file.close()
        self._file = self._probe = None

    def _log_modules(self, record: Record) -> Record:
        """Append the statistics of modules to ``probe.jsonl``; the record without them."""
        short = {key: value for key, value in record.items() if key != "modules"}
        sample = {key: record.get(key) for key in ("step", "attempt", "epoch", "format")}
        sample |= {
            "segment": self.segment,
            "loss_scale": record.get("precision/loss_scale"),
            "modules": record["modules"],
        }
        path = self._path.with_name(PROBE_FILE)
        try:
            if self._probe is None and not self._probe_failed:
                self._probe = path.open("ab")
            if self._probe is not None:
                self._probe.write((_quick(sample) + "\n").encode())
                self._probe.flush()
        except OSError as error:
            self._drop_probe()
            line = f"{path}: cannot be written ({error.strerror or error}); the run goes on without the modules' statistics"
            place: Record = {key: record[key] for key in ("step", "attempt", "epoch") if key in record}
            self.log({"kind": "event", "event": "warning", **place, "message": line})
            print(f"mprun: warning: {line}", file=sys.stderr)
        return short

    def _drop_probe(self) -> None:
        """Write no more samples: they explain a run and must not cost it."""
        file, self._probe, self._probe_failed = self._probe, None, True
        with suppress(OSError):
            if file is not None:
                file.close()

    def _abandon(self) -> None:
        """Close without flushing again: the buffered rest of a failed write must not fail a second time."""
        files, self._file, self._probe = (self._file, self._probe), None, None
        for file in files:
            with suppress(OSError):
                if file is not None:
                    file.close()


def read_metrics(path: Path | str, *, effective: bool = False) -> list[Record]:
    """The records of a run, in the order they were logged.

    Args:
        path: a ``metrics.jsonl``, or the run folder that holds it.
        effective: leave out what a later segment superseded, so that every step counts once.

    Returns:
        Records with NaN and infinities as floats. A torn last line is left out.

    Raises:
        MprunError: there is no such file, or a line before the last is not JSON.
    """
    place = Path(path)
    records, _ = _parse(place / METRICS_FILE if place.is_dir() else place)
    return _effective(records) if effective else records


def _quick(sample: Record) -> str:
    """JSON of many numbers, almost always finite ones: to look at each of them first takes longer than to write them."""
    try:
        return json.dumps(sample, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(json_ready(sample), allow_nan=False)


def read_probe(
    run_dir: Path | str, *, effective: bool = False, records: Sequence[Mapping[str, Any]] | None = None
) -> list[Record]:
    """The probe's samples of a run: ``step attempt epoch segment format loss_scale`` and ``modules`` (path: tensor: statistics).

    Args:
        run_dir: the run folder.
        effective: leave out what a later segment superseded, as :func:`read_metrics` does.
        records: the effective metrics, where the caller has read them already.

    Returns:
        In the order they were taken; none where the probe was off. A torn last line is left out.

    Raises:
        MprunError: a line before the last is not JSON.
    """
    path = Path(run_dir) / PROBE_FILE
    if not path.exists():
        return []
    samples, _ = _parse(path)
    if not effective:
        return samples
    if records is None:
        records = read_metrics(run_dir, effective=True)
    told = {_place(record) for record in records if record.get("kind") == "probe"}
    return [sample for sample in samples if _place(sample) in told]


def _place(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record.get("segment"), record.get("attempt")


def _parse(path: Path) -> tuple[list[Record], int]:
    """The whole records of a file, and the length in bytes of the part that holds them."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MprunError(f"{path}: cannot be read ({error.strerror}); a run folder holds {METRICS_FILE}") from error
    records, good = [], 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else None
            if (
                b'"nan"' in line or b'inf"' in line
            ):  # a sample of the probe holds thousands of numbers: looking costs more
                record = from_json(record)
        except ValueError as error:
            if number == len(lines):
                break
            raise MprunError(f"{path}:{number}: not a JSON object ({error})") from error
        if isinstance(record, dict):
            if wrong := _misplaced(record):
                raise MprunError(f"{path}:{number}: not a record of a run ({wrong})")
            records.append(record)
        good += len(line)
    return records, good


def _misplaced(record: Record) -> str | None:
    """What is wrong with the fields that say which record it is: somebody wrote into the file."""
    for key in ("step", "attempt", "segment"):
        if not isinstance(record.get(key, 0), int):
            return f"{key} is {record[key]!r}"
    return next(
        (f"{key} is {record[key]!r}" for key in ("kind", "event") if not isinstance(record.get(key), str | None)), None
    )


def _mend(path: Path) -> list[Record]:
    """Let the file end with a whole line, so that the next one starts on its own; returns its records."""
    records, good = _parse(path)
    with path.open("r+b") as file:
        file.truncate(good)
        if good:
            file.seek(good - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return records


def _mend_end(path: Path) -> None:
    """Let the file end with a whole line. Reads the end alone: a file of samples may be gigabytes long."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        last, begin = b"", size
        while begin and b"\n" not in last.rstrip(b"\n"):
            step = min(1 << 16, begin)
            begin -= step
            file.seek(begin)
            last = file.read(step) + last
        whole = last.rstrip(b"\n")
        start = whole.rfind(b"\n") + 1
        try:
            json.loads(whole[start:] or b"{}")
        except ValueError:
            file.truncate(begin + start)
            return
        file.truncate(begin + len(whole))
        file.seek(begin + len(whole))
        file.write(b"\n" if whole else b"")


def _effective(records: list[Record]) -> list[Record]:
    """Records that count; see the rule at the top of this module."""
    # Backwards: by the time a record is met, every later segment has said where it began and what it logged.
    kept: list[Record] = []
    seen: dict[tuple[Any, ...], int] = {}
    step_limit, attempt_limit = math.inf, math.inf
    pending: list[Record] = []
    for record in reversed(records):
        segment = record.get("segment", 0)
        if pending and segment != pending[-1].get("segment", 0):
            step_limit, attempt_limit = _limits(pending, step_limit, attempt_limit)
            pending = []
        pending.append(record)
        identity = (record.get("kind"), record.get("event"), record.get("attempt", record.get("step")))
        if record.get("step", 0) > step_limit or record.get("attempt", 0) > attempt_limit:
            continue
        if seen.setdefault(identity, segment) == segment:
            kept.append(record)
    return kept[::-1]


def _limits(segment: list[Record], step: float, attempt: float) -> tuple[float, float]:
    """Where records of earlier segments end to count, once the records of a whole later segment are known."""
    for record in segment:
        if record.get("event") == "resume":
            begin = record.get("resumed_from_step")
            began = record.get("resumed_from_attempt")
            step = min(step, -1 if begin is None else begin)
            attempt = min(attempt, (math.inf if begin is not None else -1) if began is None else began)
    return step, attempt
