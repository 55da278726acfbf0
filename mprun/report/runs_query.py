"""Keys as people write them, filters and order, for a table of runs. Imports no torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mprun.errors import ConfigError, nearest
from mprun.report.run_folders import LOADER, RunRow
from mprun.report.runs_table import HEADINGS, OWN, Row, Spread, headings_of, is_number, token

ALIASES = {
    **{heading: key for key, heading in HEADINGS.items()},
    "at": "best.step", "best": "best.value", "folder": "run_dir", "dir": "run_dir",
}  # fmt: skip

FROM_ROW = {"status": "status", "error": "reason"}


def resolve(name: str, keys: Sequence[str], headings: Mapping[str, str]) -> str:
    """The key that ``name`` means: a key, a heading, or the end of exactly one key.

    Raises:
        ConfigError: it means none, or several.
    """
    name = name.removeprefix("final.")
    known = [*keys, *OWN]
    if name in known:
        return name
    by_heading = {headings.get(key, key): key for key in keys}
    if name in by_heading:
        return by_heading[name]
    if ALIASES.get(name) in known:
        return ALIASES[name]
    ends = [key for key in known if key.endswith(f".{name}") or key == f"{name}.name"]
    if len(ends) > 1:
        raise ConfigError(f"{name} may mean {', '.join(ends)}: write one of them")
    if not ends:
        aliases = (alias for alias, key in ALIASES.items() if key in known)
        raise ConfigError(f"no run has the key {name}: {nearest(name, sorted({*known, *by_heading, *aliases}))}")
    return ends[0]


def by_keys(names: Sequence[str], keys: Sequence[str], headings: Mapping[str, str]) -> list[str]:
    """The keys of the configuration that rows are to be merged over.

    Raises:
        ConfigError: one is no key of the configuration.
    """
    found = [resolve(name, keys, headings) for name in names]
    if foreign := [key for key in found if key not in keys]:
        raise ConfigError(f"--by {foreign[0]}: rows are merged over keys of the configuration, such as seed")
    return found


def keys_of(runs: Sequence[RunRow]) -> list[str]:
    """Every key of any run: those of the configurations first."""
    return list(
        dict.fromkeys([*(key for run in runs for key in run.config), *(key for run in runs for key in run.result)])
    )


def chosen(runs: Sequence[RunRow], filters: Sequence[str]) -> list[RunRow]:
    """The runs that every ``key=value`` of ``filters`` is true of.

    Raises:
        ConfigError: not of that form, or a key that no run has.
    """
    keys = keys_of(runs)
    headings = headings_of([key for run in runs for key in run.config], [run.result for run in runs])
    kept = list(runs)
    for text in filters:
        name, equals, wanted = text.partition("=")
        if not equals:
            raise ConfigError(f"--filter {text}: write key=value, as in --filter precision=bf16")
        key = resolve(name, keys, headings)
        kept = [run for run in kept if matches(_of(run, key), wanted)]
    return kept


def _of(run: RunRow, key: str) -> Any:
    return getattr(run, FROM_ROW[key]) if key in FROM_ROW else run.config.get(key, run.result.get(key))


def matches(value: Any, wanted: str) -> bool:
    """Whether a value is what ``--filter`` asks for: a number by value, a word also with ``*``, or one of ``a,b``."""
    if "," in wanted and not wanted.startswith("["):
        return any(matches(value, part) for part in wanted.split(","))
    meant = _value(wanted)
    if isinstance(value, str):
        return value == wanted or fnmatch.fnmatchcase(value, wanted)
    return bool(token(value) == token(meant))


def _value(text: str) -> Any:
    try:
        return float(text) if not text.lstrip("-").isdigit() else int(text)  # YAML takes 1e-3 for a word
    except ValueError:
        pass
    try:
        return yaml.load(text, Loader=LOADER)
    except yaml.YAMLError:
        return text


def in_order(rows: Sequence[Row], key: str, *, descending: bool) -> list[Row]:
    """Rows sorted by a key: numbers before words; NaN and what is missing comes last in either direction."""

    def rank(row: Row) -> tuple[int, Any]:
        value = row.get(key)
        value = value.mean if isinstance(value, Spread) else value
        if value is None or value != value:
            return 2, ""
        return (0, value) if is_number(value) else (1, str(value))

    ranked = [(rank(row), row) for row in rows]
    parts = [[pair for pair in ranked if pair[0][0] == kind] for kind in (0, 1, 2)]
    for part in parts[:2]:
        part.sort(key=lambda pair: pair[0][1], reverse=descending)
    return [row for part in parts for _, row in part]
