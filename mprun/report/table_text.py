"""A table of runs as text: for the terminal, Markdown, CSV and JSON.

In a terminal a table never wraps: columns are left out until the rest fits, the least informative first, which are those
that say the same in every row, then those at the end of :data:`EXPENDABLE`. Which ones were left out is printed. CSV and
JSON hold every key at full precision.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from mprun.report.run_folders import OK, RunRow
from mprun.report.runs_table import Row, RunsTable, Spread, all_keys, is_number, token
from mprun.report.summary import STATUS_STYLE, bytes_text, count_text, number_text
from mprun.training.env import json_ready

# From the first to go to the last; what is not here is of the configuration, and goes after these, the last one first.
EXPENDABLE = (
    "peak_memory", "best.step", "examples_per_s", "train_s", "ema/loss", "steps_applied", "ema/top1", "steps_skipped",
    "best.value", "val/loss", "run",
)  # fmt: skip
KEPT = ("status", "val/top1")
GAP = "  "
CELL_MAX, REASON_MAX = 24, 100
RUNNING = ("running", "running?")


def terminal(table: RunsTable, width: int, *, chosen: bool = False) -> list[Text]:
    """The table as lines of at most ``width`` cells; below the row of a failed run, why it failed.

    Args:
        table: what to show.
        width: cells of a line.
        chosen: the columns were asked for by name: they are cut at the right rather than left out.
    """
    cells = {key: [cell(table, row, key, most=CELL_MAX) for row in table.rows] for key in table.columns}
    headings = {key: heading(table, key) for key in table.columns}
    widths = {key: max(cell_len(text) for text in [headings[key], *cells[key]]) for key in table.columns}
    hidden: list[str] = [] if chosen else too_many(table, widths, width)
    columns = [key for key in table.columns if key not in hidden]
    right = {
        key for key in columns if any(is_number(row.get(key)) or isinstance(row.get(key), Spread) for row in table.rows)
    }

    def line(texts: Mapping[str, str], style: str, status: str = "") -> Text:
        text = Text(style=style, no_wrap=True, end="")
        for number, key in enumerate(columns):
            pad = " " * (widths[key] - cell_len(texts[key]))
            text.append(GAP if number else "")
            text.append(pad + texts[key] if key in right else texts[key] + pad, style=status if key == "status" else "")
        text.rstrip()
        text.truncate(width, overflow="ellipsis")
        return text

    lines = [line(headings, "bold")] if columns else []
    for index, row in enumerate(table.rows):
        lines.append(line({key: cells[key][index] for key in columns}, "", status_style(str(row["status"]))))
        if row["error"] and "error" not in columns:
            why = Text(f"{GAP}{shown(row['error'])}", style="dim", no_wrap=True, end="")
            why.truncate(width, overflow="ellipsis")
            lines.append(why)
    if hidden:
        names = f"hidden to fit {width} columns: {', '.join(headings[key] for key in table.columns if key in hidden)}"
        lines += ["", *_wrapped(names, width)]  # type: ignore[list-item]
    return [text if isinstance(text, Text) else Text(text, style="dim", end="") for text in lines]


def too_many(table: RunsTable, widths: Mapping[str, int], width: int) -> list[str]:
    """The columns to leave out so that a line has at most ``width`` cells, as long as there are any to spare."""
    same = {key for key in table.columns if len({token(plain(row.get(key))) for row in table.rows}) == 1}
    config = [key for key in table.columns if key in table.config_keys]
    # The first column of the configuration stays, or rows could not be told apart.
    order = [*EXPENDABLE[:-1], *config[:0:-1], "run"] if config else [*EXPENDABLE[:-1]]
    rank = {key: index for index, key in enumerate(order)}
    spare = sorted(
        (key for key in table.columns if key in rank), key=lambda key: (key not in same or key in config, rank[key])
    )
    if "val/top1" not in table.columns and "val/loss" in spare:
        spare.remove("val/loss")
    hidden: list[str] = []
    total = sum(widths[key] for key in table.columns) + len(GAP) * (len(table.columns) - 1)
    for key in spare:
        if total <= width:
            break
        hidden.append(key)
        total -= widths[key] + len(GAP)
    return hidden


def heading(table: RunsTable, key: str) -> str:
    """The heading of a column; that of ``best`` names its metric where it is one for all."""
    name = table.headings.get(key, key)
    if key == "best.value":
        metrics = {row.get("best.metric") for row in table.rows} - {None}
        return f"best {str(metrics.pop()).removeprefix('val/')}" if len(metrics) == 1 else name
    return name


def cell(table: RunsTable, row: Row, key: str, *, most: int) -> str:
    """The text of one cell. A null of the configuration is a value, other than what a run has not."""
    if key in table.config_keys and key in row and row[key] is None:
        return "null"
    text = shown(row.get(key), key)
    if key == "run" and cell_len(text) > most:
        # The end of a run's path is what tells it from others.
        return "…" + text[-(most - 1) :]
    return shown(row.get(key), key, most=most)


def shown(value: Any, key: str = "", *, most: int | None = None) -> str:
    """A value as people read it: numbers with a few digits, sizes with a unit, a long text cut after ``most`` cells."""
    if value is None:
        return "-"
    if isinstance(value, Spread):
        if value.n == 0:
            return f"- ({value.n}/{value.of})"
        spread = f" ± {_number(value.std, key)}" if value.n > 1 else ""
        return f"{_number(value.mean, key)}{spread} ({value.n if value.n == value.of else f'{value.n}/{value.of}'})"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _number(value, key)
    text = value if isinstance(value, str) else json.dumps(json_ready(value), separators=(",", ":"))
    # A folder may come from a stranger: no control character of its texts reaches the terminal.
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if most is None or cell_len(text) <= most else set_cell_size(text, most - 1).rstrip() + "…"


def config_text(value: Any, *, most: int = CELL_MAX) -> str:
    """A value of the configuration, on the axes and in the legend of a picture: null is a value of its own there."""
    return "null" if value is None else f"{value:.4g}" if isinstance(value, float) else shown(value, most=most)


def _number(value: float, key: str) -> str:
    if not math.isfinite(value):
        return str(float(value))
    if key.endswith(("peak_memory", "_bytes")):
        return bytes_text(value)
    if "/" in key or key == "best.value":
        return number_text(value)
    if key == "examples_per_s":
        return count_text(value)
    if key.endswith("_s"):
        return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if key.startswith("steps_") else str(value)
    return f"{value:.4g}" if key in ("best.step", "steps_applied", "steps_skipped") else f"{value:.6g}"


def plain(value: Any) -> Any:
    """A value without its spread."""
    return (value.mean, value.n, value.of) if isinstance(value, Spread) else value


def status_style(status: str) -> str:
    """The colour of a status; of a row over several runs, that of its worst."""
    words = {part.split()[-1] for part in status.split(", ") if part}
    if bad := words - {OK, *STATUS_STYLE, *RUNNING}:
        return "red" if bad else ""
    return "yellow" if words - {OK} else STATUS_STYLE[OK]


def counts(runs: Sequence[RunRow]) -> str:
    """``9 runs: 6 ok, 3 diverged``."""
    found = Counter(run.status for run in runs)
    parts = ", ".join(f"{count} {status}" for status, count in found.most_common())
    return f"{len(runs)} run{'s' * (len(runs) != 1)}" + (f": {parts}" if parts else "")


def markdown(table: RunsTable) -> str:
    """A Markdown table of the same columns as in a terminal that is wide enough, with the reason of failures."""
    columns = [*table.columns]
    if any(row["error"] for row in table.rows) and "error" not in columns:
        columns.append("error")
    rows = [[heading(table, key) for key in columns]]
    rows += [[cell(table, row, key, most=REASON_MAX) for key in columns] for row in table.rows]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *(cell_len(row[column]) for row in rows)) for column in range(len(columns))]
    right = [any(is_number(plain_mean(row.get(key))) for row in table.rows) for key in columns]
    lines = [_padded(row, widths, right) for row in rows]
    rule = ["-" * (width - 1) + (":" if end else "-") for width, end in zip(widths, right, strict=True)]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]]) + "\n"


def plain_mean(value: Any) -> Any:
    """The mean of a spread, any other value as it is."""
    return value.mean if isinstance(value, Spread) else value


def _padded(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    texts = []
    for cell, width, end in zip(cells, widths, right, strict=True):
        pad = " " * (width - cell_len(cell))
        texts.append(pad + cell if end else cell + pad)
    return f"| {' | '.join(texts)} |"


def records(table: RunsTable, keys: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows with all keys (or ``keys``); a spread becomes ``key.mean``, ``key.std``, ``key.n``. Nothing is rounded."""
    found = []
    for row in table.rows:
        record: dict[str, Any] = {}
        for key in keys or all_keys(table):
            value = row.get(key)
            if isinstance(value, Spread):
                record |= {f"{key}.mean": value.mean, f"{key}.std": value.std, f"{key}.n": value.n}
            else:
                record[key] = value
        found.append(record)
    # A key that is a spread in one row and missing in another.
    spreads = {name.removesuffix(".mean") for record in found for name in record if name.endswith(".mean")}
    return [{key: value for key, value in record.items() if key not in spreads} for record in found]


def as_json(table: RunsTable, keys: Sequence[str] | None = None) -> str:
    """A JSON list of flat objects. NaN and infinities are the strings ``"nan"``, ``"inf"``, as in ``result.json``."""
    return json.dumps(json_ready(records(table, keys)), indent=1, allow_nan=False) + "\n"


def as_csv(table: RunsTable, keys: Sequence[str] | None = None) -> str:
    """CSV with a header; lists as JSON, nothing for what is missing or null."""
    rows = records(table, keys)
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(keys or all_keys(table))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(json_ready(value)) if isinstance(value, list | dict | tuple) else "" if value is None else value


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(width, 20), break_long_words=False, subsequent_indent=GAP)
