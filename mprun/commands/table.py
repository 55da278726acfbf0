"""``mprun table [FOLDER ...]``: the results of a sweep, or of any runs, from their folders alone.

    mprun table                                  every run below outputs/
    mprun table outputs/sweeps/<name>/<stamp>    a sweep: one row a run, a column for each key that differs
    mprun table --by seed                        mean ± standard deviation over the seeds
    mprun table --sort -val/top1 --limit 10      the ten best
    mprun table --filter precision=bf16,fp32 --filter status=ok
    mprun table --columns lr,val/loss,best       these columns only
    mprun table --format csv                     every key at full precision; also json, markdown

FOLDER is a run folder, one above run folders, or ``latest``. A key may be written short where only one ends so: ``lr``
for ``optimizer.lr``. A key that only follows from a group's name (what ``precision=bf16`` sets) has no column of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper

from mprun.commands.flags import Words, parse
from mprun.report.run_folders import RunRow, find_runs, read_run
from mprun.report.runs_query import by_keys, chosen, in_order, keys_of, resolve
from mprun.report.runs_table import RunsTable, all_keys, build_table, headings_of

FORMATS = ("terminal", "markdown", "csv", "json")
VALUED = ("--sort", "--columns", "--by", "--format", "--filter", "--limit")


def run(words: Sequence[str]) -> int:
    """Print the table. Returns 0.

    Raises:
        ConfigError: a folder holds no run, or a word does not fit.
    """
    asked = parse(words, "table", valued=VALUED)
    form, limit = asked.choice("--format", FORMATS), asked.count("--limit")
    runs = [read_run(folder) for folder in find_runs(asked.plain)]
    kept = chosen(runs, asked.flags.get("--filter", ()))
    config_keys = list(dict.fromkeys(key for run in runs for key in run.config))
    headings = headings_of(config_keys, [run.result for run in runs])
    table = build_table(kept, by=by_keys(asked.many("--by"), config_keys, headings))
    keys = list(dict.fromkeys([*all_keys(table), *keys_of(runs)]))
    rows = table.rows
    if sort := asked.one("--sort"):
        key = resolve(sort.removeprefix("-"), keys, headings)
        rows = in_order(rows, key, descending=sort.startswith("-"))
    columns = [resolve(name, keys, headings) for name in asked.many("--columns")]
    table = replace(table, rows=rows[:limit], columns=columns or table.columns)
    _print(table, form, asked, f"{len(kept)} of {len(runs)} runs" if len(kept) < len(runs) else "", kept)
    return 0


def _print(table: RunsTable, form: str, asked: Words, kept: str, runs: Sequence[RunRow]) -> None:
    from mprun.report.table_text import as_csv, as_json, counts, markdown, terminal

    keys = table.columns if "--columns" in asked.flags else None
    if form != "terminal":
        text = {"csv": as_csv, "json": as_json}[form](table, keys) if form != "markdown" else markdown(table)
        sys.stdout.write(text)
        for note in table.notes:
            print(f"mprun table: {note}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no ± shows a question mark
    console = Console(highlight=False)
    lines = terminal(table, console.width, chosen=keys is not None)
    about = counts(runs)
    if len(table.rows) < len(runs):
        about += f"; {len(table.rows)} rows" if "--by" in asked.flags else f"; the first {len(table.rows)} are shown"
    notes = [about + (f" ({kept})" if kept else ""), *table.notes]
    for line in [*lines, Text("")]:
        console.print(line, soft_wrap=True)
    for note in notes:
        console.print(Text(note, style="dim"))
