"""What a study has found: its trials as a table, the best one as a command line and as a recipe. Imports no torch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.errors import MprunError
from mprun.options import COMMAND_LINE_ONLY
from mprun.precision_files import precision_file_of
from mprun.report.runs_table import Row, RunsTable
from mprun.report.summary import shown_path
from mprun.resume import changes
from mprun.training.env import atomic_write_text
from mprun.tuning.settings import Direction, TuneConfig
from mprun.tuning.space import Parameter, words_of
from mprun.tuning.study import replaced

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

BEST_FILE = "best.yaml"
SHOWN = 20
STATES = ("complete", "pruned", "failed", "running", "waiting")
# Groups whose option a recipe names; the rest of what a trial was is given key by key.
CHOSEN = ("model", "dataset", "precision", "optimizer", "schedule", "train")
# What is about the machine, or about this run, and no part of what was found.
LEFT_OUT = (*COMMAND_LINE_ONLY, "tracking", "probe", "meta", "expect", "device")


def conclude(
    study: Study, settings: TuneConfig, space: Sequence[Parameter], fixed: Sequence[str], folder: Path
) -> bool:
    """Print the table and the best trial, and write it as a recipe. Whether there is one."""
    from rich.console import Console
    from rich.text import Text

    from mprun.report.table_text import terminal

    table, console = table_of(study, settings, space), Console(highlight=False)
    print()
    if table.rows:
        for line in terminal(replace(table, rows=table.rows[:SHOWN]), console.width):
            console.print(line, soft_wrap=True)
    counts = counted(study)
    about = f"{sum(counts.values())} trials: " + (
        ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "none"
    )
    if len(table.rows) > SHOWN:
        about += f"; the best {SHOWN} are shown, all of them by mprun table {shown_path(folder)}"
    console.print(Text(about, style="dim"), soft_wrap=True)
    best = best_of(study)
    if best is None:
        print("no trial was completed")
        return False
    words, path = words_of(fixed, space, best.params), folder / BEST_FILE
    write_recipe(path, best, words, settings)
    where = shown_path(folder / str(best.user_attrs.get("folder", best.number)))
    print(f"\nbest: trial {best.number}, {settings.metric} {best.value:.6g}, in {where}")
    print(f"  {command_line(words)}\n  as a recipe: mprun {shlex.quote(f'recipe={shown_path(path)}')}")
    return True


def counted(study: Study) -> Counter[str]:
    """How many trials are ``complete pruned failed running waiting``; replaced ones are nobody's."""
    words = {"FAIL": "failed"}
    trials = study.get_trials(deepcopy=False)
    return Counter(words.get(trial.state.name, trial.state.name.lower()) for trial in trials if not replaced(trial))


def table_of(study: Study, settings: TuneConfig, space: Sequence[Parameter]) -> RunsTable:
    """The trials, the best first, then those that were stopped early, then the others."""
    rows = [_row(trial, settings, space) for trial in _in_order(study, settings) if not replaced(trial)]
    keys = [part.key for part in space]
    columns = ["trial", "status", str(settings.metric), *keys, "seconds"]
    return RunsTable(rows, columns, {"seconds": "s"}, keys)


def _in_order(study: Study, settings: TuneConfig) -> list[FrozenTrial]:
    rank = {"COMPLETE": 0, "PRUNED": 1, "RUNNING": 2, "WAITING": 3, "FAIL": 4}
    sign = -1 if settings.direction is Direction.maximize else 1

    def place(trial: FrozenTrial) -> tuple[int, float, int]:
        value = trial.value if trial.value is not None else 0.0
        return rank[trial.state.name], sign * value, trial.number

    return sorted(study.get_trials(deepcopy=False), key=place)


def _row(trial: FrozenTrial, settings: TuneConfig, space: Sequence[Parameter]) -> Row:
    state = {"COMPLETE": "ok", "FAIL": trial.user_attrs.get("status", "failed")}.get(
        trial.state.name, trial.state.name.lower()
    )
    params = trial.params or trial.system_attrs.get("fixed_params", {})
    return {
        "trial": trial.number,
        "status": state,
        "error": trial.user_attrs.get("reason", "") if trial.state.name == "FAIL" else "",
        str(settings.metric): trial.value,
        "seconds": trial.user_attrs.get("seconds"),
        **{part.key: params.get(part.key) for part in space},
    }


def best_of(study: Study) -> FrozenTrial | None:
    """The best complete trial; the earliest of equals. None if no trial was completed."""
    return study.best_trial if counted(study)["complete"] else None


def command_line(words: Sequence[str]) -> str:
    """A line for the shell."""
    return shlex.join(["python", "-m", "mprun", *words])


def write_recipe(path: Path, best: FrozenTrial, words: Sequence[str], settings: TuneConfig) -> None:
    """Write the best trial as a recipe: the options of its groups, and every key in which it differs from them.

    The recipe does not depend on the words that led to it, nor on another recipe among them.

    Raises:
        MprunError: the disk refuses.
    """
    composed = compose(words)
    # A precision from a file of the user's own is written out: a recipe names options only.
    choices = {group: option for group in CHOSEN if precision_file_of(option := composed.choices[group]) is None}
    found = to_plain(composed.config)
    usual = to_plain(compose([f"{group}={option}" for group, option in choices.items()]).config)
    node = OmegaConf.create({"defaults": [{f"override /{group}": option} for group, option in choices.items()]})
    for key, (_, value) in changes(usual, found).items():
        if key.partition(".")[0] not in LEFT_OUT:
            OmegaConf.update(node, key, value, force_add=True)
    number, metric = best.number, settings.metric
    meta: dict[str, Any] = {
        "title": f"best of the study {settings.study}: {metric} {best.value:.6g}",
        "source": f"mprun tune, trial {number} of the study {settings.study}",
    }
    node.meta = meta
    trust = [word for word in words if word.startswith("trust=")]
    head = [
        "# @package _global_",
        f"# The best trial of the study {settings.study}: {metric} {best.value!r}.",
        "#",
        f"# Command   mprun {shlex.join([f'recipe={shown_path(path)}', *trust])}",
    ]
    try:
        atomic_write_text(path, "\n".join(head) + "\n" + OmegaConf.to_yaml(node))
    except OSError as error:
        raise MprunError(f"{path} cannot be written: {error.strerror}") from error
