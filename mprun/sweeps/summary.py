"""The end of a sweep: a table with every job, how many ended how, and where to look. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from io import TextIOWrapper

from mprun.report.run_folders import CONFIG, RunRow, alive, find_runs, flat_result, read_run
from mprun.report.runs_table import build_table
from mprun.report.summary import shown_path
from mprun.sweeps.folder import Job, Sweep
from mprun.sweeps.jobs import RESULT, read_result, reason_of
from mprun.sweeps.plan import key_of


def print_table(sweep: Sweep) -> None:
    """Print the table of a sweep as its folders are now."""
    from rich.console import Console
    from rich.text import Text

    from mprun.report.table_text import counts, terminal

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    rows = rows_of(sweep)
    for line in ["", *terminal(build_table(rows), console.width), ""]:
        console.print(line, soft_wrap=True)
    for note in [counts(rows), *notes(sweep, rows)]:
        console.print(Text(note), soft_wrap=True)


def rows_of(sweep: Sweep) -> list[RunRow]:
    """One row a job, in order, repeats apart; all runs in the folder where the jobs are not known beforehand."""
    if not sweep.jobs:
        return [read_run(folder) for folder in find_runs([str(sweep.folder)])] if _any_run(sweep) else []
    rows = [_row(sweep, job) for job in sweep.jobs if job.same_as is None]
    template = next((row.config for row in rows if row.config), {})
    return [
        row if row.config else RunRow(row.folder, row.status, row.reason, template | _values(job), row.result)
        for row, job in zip(rows, [job for job in sweep.jobs if job.same_as is None], strict=True)
    ]


def _any_run(sweep: Sweep) -> bool:
    return any(sweep.folder.rglob(CONFIG)) or any(sweep.folder.rglob(RESULT))


def _row(sweep: Sweep, job: Job) -> RunRow:
    """The row of a job; without a configuration where its run never came to write one."""
    folder = sweep.path(job) if job.folder else sweep.folder / f"job-{job.number}"
    if (folder / CONFIG).is_file():
        row = read_run(folder)
        return RunRow(folder, row.status, reason_of(row.reason), row.config, row.result)
    result = read_result(folder)
    if result:
        return RunRow(folder, str(result.get("status")), reason_of(result.get("error")), {}, flat_result(result))
    return RunRow(folder, "running" if alive(folder) == "running" else "not run", "", {}, {})


def _values(job: Job) -> dict[str, object]:
    """The swept words as keys of the configuration; a group's option as its name."""
    values: dict[str, object] = {}
    for word in job.swept:
        key, value = key_of(word), word.partition("=")[2].strip("'\"")
        values[key if "." in key or key == "seed" else f"{key}.name"] = _number(value)
    return values


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def notes(sweep: Sweep, rows: list[RunRow]) -> list[str]:
    """What is to be said below the table."""
    repeats = [f"{job.number}={job.same_as}" for job in sweep.jobs if job.same_as is not None]
    said = [f"jobs with the configuration of an earlier one: {', '.join(repeats)}"] if repeats else []
    left_out = Counter(word for job in sweep.jobs for word in job.left_out)
    said += [f"{word} does nothing in {count} of {len(sweep.jobs)} jobs" for word, count in left_out.items()]
    folder = shlex.quote(str(shown_path(sweep.folder)))
    said.append(f"sweep folder   {folder}")
    if rows:
        said.append(f"table          mprun table {folder}")
    if any(row.status not in ("ok", "running") for row in rows):
        said.append(f"go on          mprun resume {folder}   (or the same words again)")
    return said
