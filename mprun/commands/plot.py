"""``mprun plot [FOLDER ...]``: a picture of a sweep, or of any runs, from their folders alone.

    mprun plot outputs/sweeps/<stamp>                         val/loss of every configuration, a band over its seeds
    mprun plot latest --metric train/loss --skips             one run, with the steps it skipped
    mprun plot --x time --metric val/top1 --out top1.svg      against the seconds of training; also epoch
    mprun plot --kind parallel --metric val/top1              hyperparameters against what came of them
    mprun plot --out sweep.html                               a page with values under the pointer, zoom, ranges

    --band minmax|std|none    what the band over the seeds is: all of them (default), or mean ± standard deviation
    --filter key=value        only these runs, as in mprun table
    --out FILE                .png (default), .svg, .pdf or .html; without it <kind>_<metric>.png in the current folder

Runs that differ only in their seed make one curve. NaN is a gap, × the end of a run that failed. Pictures need the extra:
``pip install 'mprun[plot]'``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.commands.flags import Words, parse
from mprun.errors import ConfigError, MprunError, nearest
from mprun.report.palette import COLOURS
from mprun.report.run_folders import OK, RunRow, find_runs, read_run, short_names
from mprun.report.runs_query import chosen, keys_of, resolve
from mprun.report.runs_table import differing, grouped, headings_of, is_number
from mprun.report.summary import shown_path
from mprun.report.table_text import config_text
from mprun.runs import slug
from mprun.tracking.jsonl import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from mprun.report.curves import Curve

KINDS = ("curves", "parallel")
PROGRESS = ("step", "epoch", "time")
BANDS = ("minmax", "std", "none")
ENDINGS = (".png", ".svg", ".pdf", ".html")
VALUED = ("--kind", "--metric", "--x", "--out", "--band", "--filter")
SEED = ("seed",)
MISSING = "mprun plot needs {}: pip install 'mprun[plot]'"


@dataclass(frozen=True)
class Asked:
    """A command line, checked."""

    kind: str
    metric: str
    progress: str
    band: str
    skips: bool
    out: Path


def run(words: Sequence[str]) -> int:
    """Draw, and print the file's name. Returns 0.

    Raises:
        ConfigError: a word does not fit, no run holds what is to be drawn, or the extra ``plot`` is not installed.
    """
    line = parse(words, "plot", valued=VALUED, switches=("--skips",))
    asked = checked(line)
    runs = [read_run(folder) for folder in find_runs(line.plain)]
    kept = chosen(runs, line.flags.get("--filter", ()))
    if not kept:
        raise ConfigError(f"none of {len(runs)} runs is left by --filter {' '.join(line.flags['--filter'])}")
    try:
        draw = curves if asked.kind == "curves" else parallel_axes
        draw(kept, asked)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("matplotlib", "plotly", "numpy"):
            raise
        raise ConfigError(MISSING.format(name)) from error
    except OSError as error:
        raise ConfigError(f"--out {asked.out} cannot be written: {error.strerror or error}") from error
    print(asked.out)
    return 0


def checked(line: Words) -> Asked:
    """The command line.

    Raises:
        ConfigError: names the word that does not fit.
    """
    kind, metric = line.choice("--kind", KINDS), line.one("--metric", "val/loss")
    out = Path(line.one("--out", f"{kind}_{slug(metric)}.png")).expanduser()
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out {out}: the name must end with {', '.join(ENDINGS)}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if kind == "parallel" and (given := [flag for flag in ("--x", "--band", "--skips") if flag in line.flags]):
        raise ConfigError(f"{given[0]} is for --kind curves: parallel coordinates show the end of a run")
    return Asked(kind, metric, line.choice("--x", PROGRESS), line.choice("--band", BANDS), "--skips" in line.flags, out)


def curves(runs: Sequence[RunRow], asked: Asked) -> None:
    """One curve for each configuration.

    Raises:
        ConfigError: no run logged the metric.
    """
    from mprun.report.curves import merge, trace_of

    traces, logged = [], set[str]()
    for row in runs:  # one after the other: the records of a thousand runs do not fit into the memory
        records = _records(row)
        traces.append(trace_of(records, asked.metric, asked.progress, status=row.status))
        logged.update(key for record in records for key in record if "/" in key)
    if not any(traces):
        names = sorted(logged)
        if asked.metric in names:
            raise ConfigError(f"--x {asked.progress}: the runs do not say enough for it; use --x step")
        raise ConfigError(f"no run has logged {asked.metric}: {nearest(asked.metric, names)}")
    groups = grouped([row.config for row in runs], SEED)
    labels = labels_of(runs, groups)
    found = []
    for group, label in zip(groups, labels, strict=True):
        there = [trace for index in group if (trace := traces[index])]
        if there:
            found.append(merge(label + _ended([runs[index] for index in group]), there, band=asked.band))
    gone = [row for row, trace in zip(runs, traces, strict=True) if trace is None]
    if gone:
        print(f"mprun plot: not drawn, for want of {asked.metric} by {asked.progress}: {_few(gone)}", file=sys.stderr)
    subtitle = _about(found, asked, drawn=len(runs) - len(gone), gone=len(gone))
    if asked.out.suffix == ".html":
        from mprun.report import draw_html as page

        page.save(
            page.curves_figure(found, asked.metric, asked.progress, subtitle=subtitle, skips=asked.skips),
            asked.out,
            asked.metric,
        )
        return
    from mprun.report import draw as picture

    picture.save(
        picture.draw_curves(found, asked.metric, asked.progress, subtitle=subtitle, skips=asked.skips), asked.out
    )


def _about(found: Sequence[Curve], asked: Asked, *, drawn: int, gone: int) -> str:
    """The line below the title: what is drawn, and what its marks mean."""
    about = [f"{drawn} run{'s' * (drawn != 1)}"]
    if any(curve.runs > 1 for curve in found):
        about.append(
            "mean over seeds" + {"minmax": ", band from min to max", "std": ", band ± std", "none": ""}[asked.band]
        )
    if len(found) > len(COLOURS):
        about.append(f"the best {len(COLOURS)} in colour")
    if any(curve.deaths for curve in found):
        about.append("× a run failed")
    if asked.skips and any(len(curve.skips) for curve in found):
        about.append("| a step was skipped")
    if gone:
        about.append(f"{gone} without {asked.metric}")
    return "  ·  ".join(about)


def _records(row: RunRow) -> list[dict[str, Any]]:
    """What a run logged and counts; nothing where the file is missing or broken, which is then said."""
    try:
        return read_metrics(row.folder, effective=True)
    except MprunError as error:
        if (row.folder / METRICS_FILE).exists():
            print(f"mprun plot: {error}", file=sys.stderr)
        return []


def _few(rows: Sequence[RunRow]) -> str:
    names = [str(shown_path(row.folder)) for row in rows[:3]]
    return ", ".join(names) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _ended(rows: Sequence[RunRow]) -> str:
    """How many of a curve's runs ended well, if not all did."""
    good = sum(row.status == OK for row in rows)
    return "" if good == len(rows) else f" ({good}/{len(rows)} ok)" if len(rows) > 1 else f" ({rows[0].status})"


def labels_of(runs: Sequence[RunRow], groups: Sequence[Sequence[int]]) -> list[str]:
    """What tells each group from the others: ``lr=0.003, precision=bf16``; a run's name where nothing does."""
    firsts = [runs[group[0]] for group in groups]
    keys = [key for key in differing([row.config for row in firsts]) if key not in SEED]
    headings = headings_of(list(dict.fromkeys(key for row in runs for key in row.config)), [])
    names = short_names([row.folder for row in firsts])
    return [
        ", ".join(f"{headings[key]}={config_text(row.config[key])}" for key in keys if key in row.config)
        or (name if len(group) == 1 else str(row.config.get("name", name)))
        for row, name, group in zip(firsts, names, groups, strict=True)
    ]


def parallel_axes(runs: Sequence[RunRow], asked: Asked) -> None:
    """One line for each run.

    Raises:
        ConfigError: no run has the metric, or no hyperparameter differs.
    """
    from mprun.report.curves import HIGHER_IS_BETTER
    from mprun.report.parallel import parallel

    # A run that failed has the value of some earlier evaluation, which is not what came of its hyperparameters.
    good = [row for row in runs if row.status == OK]
    results = [key for key in keys_of(good) if any(is_number(row.result.get(key)) for row in good)]
    if not results:
        raise ConfigError(f"none of {len(runs)} runs ended well: there is no {asked.metric} to show")
    metric = resolve(asked.metric, results, headings_of([], []))
    values = [row.result.get(metric) if row.status == OK else None for row in runs]
    numbers = [float(value) if value is not None and is_number(value) else math.nan for value in values]
    if not any(map(math.isfinite, numbers)):
        raise ConfigError(f"none of {len(runs)} runs ended well with a finite number as {asked.metric}")
    keys = [key for key in differing([row.config for row in runs]) if key not in SEED]
    if not keys:
        raise ConfigError("--kind parallel needs runs that differ in a hyperparameter other than the seed")
    headings = headings_of(list(dict.fromkeys(key for row in runs for key in row.config)), [])
    columns = {headings[key]: [row.config.get(key) for row in runs] for key in keys}
    # Which metric the best value is of, the run says.
    about = str(good[0].result.get("best.metric", "")) if metric == "best.value" else metric
    name = f"best {about}" if metric == "best.value" else metric
    higher = about.endswith(HIGHER_IS_BETTER)
    data = parallel(columns, name, numbers, short_names([row.folder for row in runs]), higher=higher)
    missing = f"  ·  {data.missing} failed or without a value" if data.missing else ""
    subtitle = f"{name} of {len(runs)} runs  ·  dark is better{missing}"
    if asked.out.suffix == ".html":
        from mprun.report import draw_html as page

        page.save(page.parallel_figure(data, subtitle=subtitle, higher=higher), asked.out, name)
        return
    from mprun.report import draw as picture

    picture.save(picture.draw_parallel(data, subtitle=subtitle, higher=higher), asked.out)
