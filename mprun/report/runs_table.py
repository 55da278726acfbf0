"""A table of runs as values: its rows, its columns, filters, order, and the mean over seeds. Imports no torch.

A row is a flat dict: ``run_dir``, ``run``, ``status``, ``error``, the keys of the configuration (``optimizer.lr``) and those
of ``result.json`` (``val/loss``, ``best.value``). What the files say is never rounded here.

A key of the configuration is worth a column where it differs among the runs, unless it only follows from another: what
``precision=bf16`` sets in its group differs whenever ``precision.name`` does, and says nothing more.

Over seeds, runs that are equal in everything else make one row. Only runs that ended well, with a finite value, go into a
mean; how many of how many did is part of the value (:class:`Spread`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mprun.report.run_folders import OK, RunRow, short_names

Row = dict[str, Any]

# Headings of what result.json holds; everything else goes by its key.
HEADINGS = {
    "best.value": "best", "best.step": "at step", "steps_applied": "steps", "steps_skipped": "skipped",
    "examples_per_s": "ex/s", "peak_memory": "peak mem", "error": "reason",
}  # fmt: skip
RESULTS = (
    "val/top1", "val/loss", "ema/top1", "ema/loss", "best.value", "best.step", "steps_applied", "steps_skipped",
    "train_s", "examples_per_s", "peak_memory",
)  # fmt: skip
OWN = ("run", "run_dir", "status", "error")

# Of the command line, or about the run: they change no number of it.
ASIDE = ("command", "resume", "trust", "tracking", "probe", "meta", "expect", "compare", "diagnose", "search")
GROUPS = ("model", "dataset", "precision", "optimizer", "schedule")
# Which keys of a group are of interest even where they follow from the group's name.
ALWAYS = ("optimizer.lr", "optimizer.weight_decay")


@dataclass(frozen=True)
class Spread:
    """A value over several runs: mean and sample standard deviation of the ``n`` finite ones of ``of`` runs."""

    mean: float
    std: float
    n: int
    of: int

    @classmethod
    def over(cls, values: Iterable[Any], of: int) -> Spread:
        """The spread of the finite numbers in ``values``; NaN where there are too few for it."""
        finite = [float(value) for value in values if is_number(value) and math.isfinite(value)]
        n = len(finite)
        mean = math.fsum(finite) / n if n else math.nan
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / (n - 1)) if n > 1 else math.nan
        return cls(mean, std, n, of)


@dataclass(frozen=True)
class RunsTable:
    """Rows with what is needed to show them.

    Attributes:
        columns: the keys to show, in order.
        headings: the short name of each key.
        config_keys: which keys are of the configuration.
        notes: remarks for people, one a line.
    """

    rows: list[Row]
    columns: list[str]
    headings: dict[str, str]
    config_keys: list[str]
    notes: tuple[str, ...] = ()


def build_table(runs: Sequence[RunRow], *, by: Sequence[str] = ()) -> RunsTable:
    """The table of ``runs``: a row a run, or with ``by`` a row for runs that are equal in all keys but those."""
    config_keys = list(dict.fromkeys(key for run in runs for key in run.config))
    names = short_names([run.folder for run in runs])
    rows: list[Row] = [
        run.result | run.config | {"run": name, "run_dir": str(run.folder), "status": run.status, "error": run.reason}
        for run, name in zip(runs, names, strict=True)
    ]
    headings = headings_of(config_keys, rows)
    shown = differing([run.config for run in runs])
    notes: list[str] = []
    if by:
        groups = grouped([run.config for run in runs], by)
        notes = _repeats(groups, runs, by)
        rows = merged([[rows[index] for index in group] for group in groups], config_keys, by)
        columns = [*(key for key in shown if key not in by), "status", *_results(rows)]
        return RunsTable(rows, columns, headings, [key for key in config_keys if key not in by], tuple(notes))
    return RunsTable(rows, ["run", "status", *shown, *_results(rows)], headings, config_keys)


def _results(rows: Sequence[Row]) -> list[str]:
    return [key for key in RESULTS if any(row.get(key) is not None for row in rows)]


def token(value: Any) -> Any:
    """Something hashable that is equal for equal values of a configuration: 1 is 1.0, but not true."""
    if is_number(value):
        return "nan" if value != value else value
    if isinstance(value, bool | str | None):
        return type(value), value
    return json.dumps(value, sort_keys=True, default=str)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that differ among the configurations and do not follow from another, in their order.

    A folder without a readable configuration has no say in it.
    """
    configs = [config for config in configs if config]
    keys = dict.fromkeys(key for config in configs for key in config)
    columns = {key: [token(config[key]) if key in config else ... for config in configs] for key in keys}
    varying = [key for key in keys if key.partition(".")[0] not in ASIDE and len(set(columns[key])) > 1]
    groups = [f"{group}.name" for group in GROUPS if f"{group}.name" in varying]

    def follows(key: str) -> bool:
        if key in ALWAYS:
            return False
        # A run's name is made from those of its groups, unless somebody chose another.
        causes = (
            groups if key == "name" else [name for name in groups if name.partition(".")[0] == key.partition(".")[0]]
        )
        if not causes or key in causes:
            return False
        pairs = set(zip(zip(*(columns[cause] for cause in causes), strict=True), columns[key], strict=True))
        return len(pairs) == len({cause for cause, _ in pairs})

    return [key for key in varying if not follows(key)]


def grouped(configs: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[list[int]]:
    """Indices of configurations that are equal in everything but ``by`` (and what changes no number), in order."""
    found: dict[Any, list[int]] = {}
    for index, config in enumerate(configs):
        same = frozenset(
            (key, token(value))
            for key, value in config.items()
            if key not in by and key != "name" and key.partition(".")[0] not in ASIDE
        )
        # Nothing is known of an unreadable configuration: it stays alone.
        found.setdefault(same if config else index, []).append(index)
    return list(found.values())


def merged(groups: Sequence[Sequence[Row]], config_keys: Sequence[str], by: Sequence[str]) -> list[Row]:
    """Each group of rows as one: what they share, a :class:`Spread` for each number, a count for each status."""
    aside = {*config_keys, *OWN}
    known = dict.fromkeys(key for rows in groups for row in rows for key in row if key not in aside)
    numbers = [key for key in known if any(is_number(row.get(key)) for rows in groups for row in rows)]
    others = [*config_keys, *(key for key in known if key not in numbers)]
    return [_merged(rows, others, numbers, by) for rows in groups]


def _merged(rows: Sequence[Row], others: Sequence[str], numbers: Sequence[str], by: Sequence[str]) -> Row:
    good = [row for row in rows if row["status"] == OK]
    shared = {key: [row[key] for row in rows if key in row] for key in others}
    merged_row: Row = {key: values[0] for key, values in shared.items() if len(set(map(token, values))) == 1}
    statuses = Counter(str(row["status"]) for row in rows)
    reasons = list(dict.fromkeys(str(row["error"]) for row in rows if row["error"]))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return {
        **merged_row,
        **{key: [row.get(key) for row in rows] for key in by},
        **{key: Spread.over((row.get(key) for row in good), len(rows)) for key in numbers},
        "run": " ".join(str(row["run"]) for row in rows),
        "run_dir": [row["run_dir"] for row in rows],
        "runs": len(rows),
        "ok": len(good),
        "status": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "error": reasons[0] + more if reasons else "",
    }


def _repeats(groups: Sequence[Sequence[int]], runs: Sequence[RunRow], by: Sequence[str]) -> list[str]:
    """A note where a group holds the same run twice: its spread is too small, its count too large."""
    twice = 0
    for group in groups:
        values = Counter(tuple(token(runs[index].config.get(key)) for key in by) for index in group)
        twice += sum(count - 1 for count in values.values())
    what = ", ".join(by)
    few = "1 run repeats" if twice == 1 else f"{twice} runs repeat"
    return [f"{few} another of the same row and {what}; each is counted"] if twice else []


def headings_of(config_keys: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    """The shortest name of each key that means no other: ``lr``, ``precision``, ``loss_scale.init``.

    A group goes by its name's key. Of a nested key two parts are kept, of a builder's argument its own name.
    """
    ends = Counter(key[start:] for key in config_keys for start in _starts(key))
    names = {key: short(key) for key in config_keys}
    same = Counter(names.values())
    own = set(config_keys)
    others = {*HEADINGS.values(), *HEADINGS, *OWN, *RESULTS, *(key for row in rows for key in row if key not in own)}
    return HEADINGS | {
        key: name if ends[name] <= 1 and same[name] == 1 and name not in others else key for key, name in names.items()
    }


def _starts(key: str) -> list[int]:
    """Where the dotted parts of a key begin."""
    return [0, *(index + 1 for index, char in enumerate(key) if char == ".")]


def short(key: str) -> str:
    """The short name of a key, whether or not another key has the same.

    >>> [short(k) for k in ("optimizer.lr", "precision.name", "precision.loss_scale.init", "model.kwargs.depth", "name")]
    ['lr', 'precision', 'loss_scale.init', 'depth', 'name']
    """
    parts = key.split(".")
    if len(parts) == 2 and parts[1] == "name":
        return parts[0]
    if len(parts) > 2 and parts[1] != "kwargs":
        return ".".join(parts[-2:])
    return parts[-1]


def all_keys(table: RunsTable) -> list[str]:
    """Every key of any row: the table's own first, then the configuration's, then the result's."""
    own = [key for key in ("run_dir", "run", "status", "error", "runs", "ok") if any(key in row for row in table.rows)]
    found = dict.fromkeys(key for row in table.rows for key in row)
    return list(dict.fromkeys([*own, *(key for key in table.config_keys if key in found), *found]))
