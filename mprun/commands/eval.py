"""``mprun eval RUN | CHECKPOINT [overrides]``: scores a checkpoint on the validation set of its own run, raw and EMA.

    mprun eval latest                            last.pt of the newest run
    mprun eval outputs/x/20260101-120000-abc --checkpoint best
    mprun eval some/where/step_500.pt            a checkpoint file, also one that was moved
    mprun eval latest precision=fp32             the same weights in another precision
    --checkpoint last|best|step_<n>    which one of a run folder (last)
    --json FILE                        the scores as JSON; - for stdout, instead of the table

Model, data and precision are those of the run, as its checkpoint holds them; without overrides the scores equal those that the
run logged at that step, to the last bit on the same machine. Overrides may change how it is scored: precision, device,
train.batch_size, dataset.root, dataset.workers, numerics, deterministic, model.compile, model.channels_last, trust. Nothing in
the run folder is changed. The exit status is 1 where a score is not finite.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.compose import check, compose
from mprun.config import Config
from mprun.config_check import to_plain
from mprun.errors import CheckpointError, ConfigError, MprunError, nearest
from mprun.runs import LATEST, OUTPUTS, newest_checkpoint
from mprun.training.env import atomic_write_json, json_ready

# What of a run may be given anew: how it is computed, and where its data lie, but not what was trained on what.
LEGAL = ("precision", "device", "numerics", "deterministic", "trust", "train.batch_size", "dataset.root", "dataset.workers",
         "model.compile", "model.channels_last")  # fmt: skip
VALUED = ("--checkpoint", "--json")


@dataclass(frozen=True)
class Asked:
    """A command line: the checkpoint file, overrides, and where the JSON goes (``-`` is stdout, empty nowhere)."""

    checkpoint: Path
    overrides: tuple[str, ...]
    json: str = ""


def run(words: Sequence[str]) -> int:
    """Score, and print the table or the JSON. Returns 0, or 1 where a score is not finite.

    Raises:
        ConfigError: a word does not fit.
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    asked = parse(words)
    report = evaluate(asked)
    if asked.json == "-":
        print(json.dumps(json_ready(report), indent=2))
    else:
        show(report)
    if asked.json not in ("", "-"):
        try:
            atomic_write_json(Path(asked.json).expanduser(), report)
        except OSError as error:
            raise ConfigError(f"eval --json {asked.json}: cannot be written ({error.strerror})") from error
    return 0 if all(math.isfinite(value) for value in report["metrics"].values()) else 1


def parse(words: Sequence[str]) -> Asked:
    """The command line as a value.

    Raises:
        ConfigError: an unknown flag, no or several runs, or an override that would be another experiment.
        CheckpointError: there is no such checkpoint.
    """
    names: list[str] = []
    overrides: list[str] = []
    flags: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in VALUED:
            flags[flag] = value if equals else next(rest, "")
            if not flags[flag]:
                raise ConfigError(
                    f"eval {flag} needs a value: {'last, best or step_<n>' if flag == VALUED[0] else 'a file, or -'}"
                )
        elif word.startswith("--"):
            raise ConfigError(f"eval does not know {flag}: {nearest(flag, VALUED)}")
        elif equals or word.startswith(("+", "~", "-")):
            _refuse_other(word)
            overrides.append(word)
        else:
            names.append(word)
    if len(names) != 1:
        raise ConfigError(
            f"eval needs one run or checkpoint, not {', '.join(names) or 'none'}: a folder, a .pt file, or latest"
        )
    target = flags.get("--json", "")
    if target not in ("", "-") and not Path(target).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"eval --json {target}: there is no folder {Path(target).parent}")
    return Asked(find(names[0], flags.get("--checkpoint", "")), tuple(overrides), target)


def _refuse_other(word: str) -> None:
    key = word.lstrip("+~").partition("=")[0]
    if not any(key == legal or key.startswith(f"{legal}.") for legal in LEGAL):
        raise ConfigError(
            f"eval {word}: a checkpoint is scored as it was trained; what may be given is {', '.join(LEGAL)}"
        )


def find(target: str, which: str) -> Path:
    """The checkpoint file.

    Args:
        target: a file, a run folder, its ``checkpoints`` folder, or ``latest``.
        which: ``last``, ``best`` or ``step_<n>``; empty for the newest.

    Raises:
        CheckpointError: it is not there; says which are.
    """
    path = Path(OUTPUTS) / LATEST if target == LATEST else Path(target).expanduser()
    if not path.exists():
        what = "there is no run yet" if target == LATEST else "no such file or folder"
        raise CheckpointError(f"eval {target}: {what} ({path}); give a run folder, a checkpoint, or latest")
    path = path.resolve()
    if path.is_file():
        if which:
            raise ConfigError(
                f"eval {target} is one checkpoint: leave --checkpoint {which} out, or give its run folder"
            )
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = newest_checkpoint(folder) if not which else folder / f"{which.removesuffix('.pt')}.pt"
    if found is None or not found.is_file():
        there = ", ".join(sorted(item.stem for item in folder.glob("*.pt")))
        also = f"there are: {there}" if there else "give the folder of one run, or a checkpoint"
        raise CheckpointError(f"eval {target}: {folder} holds no {which or 'checkpoint'}; {also}")
    return found


# --- the configuration --------------------------------------------------------------------------------------------------


def config_of(saved: Mapping[str, Any], asked: Asked) -> Config:
    """The run's own configuration, with what the command line gives anew.

    Raises:
        CheckpointError: the checkpoint is not one of a run.
        ConfigError: an override is not legal.
    """
    if not isinstance(saved.get("config"), Mapping):
        raise CheckpointError(f"{asked.checkpoint} is not the checkpoint of a run: it holds no configuration")
    composed = compose(asked.overrides, command="eval").config
    given = to_plain(composed)
    try:
        node = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(saved["config"])))
    except OmegaConfBaseException as error:
        raise CheckpointError(
            f"{asked.checkpoint} was written by another version of mprun: {str(error).splitlines()[0]}"
        ) from error
    assert isinstance(node, DictConfig), "a mapping"
    keys = [word.lstrip("+~").partition("=")[0] for word in asked.overrides]
    for key in sorted(keys, key=lambda name: name.count(".")):  # a group first, then what is said of it
        value: Any = given
        for part in key.split("."):
            value = value[part]
        OmegaConf.update(node, key, value, merge=True)  # a group comes whole, so nothing of the old one is left
    # A checkpoint may come from a stranger: what code it may import is said on this command line only.
    node.trust, node.command, node.resume = composed.trust, "eval", None
    return check(node, command="eval")


# --- the scores ---------------------------------------------------------------------------------------------------------


def evaluate(asked: Asked) -> dict[str, Any]:
    """Scores of a checkpoint and what they belong to; ``metrics`` as the run logs them (``val/loss``, ``ema/top1``).

    Raises:
        MprunError: the checkpoint, the configuration or the data are not usable.
    """
    from mprun.training import checkpoint
    from mprun.training.build import build, device_of, switches
    from mprun.training.record import is_memory, memory_trouble
    from mprun.training.step import eval_step

    started = time.perf_counter()
    saved = checkpoint.load(asked.checkpoint)
    config = config_of(saved, asked)
    device = device_of(config)
    with switches(config, device) as kernels:
        try:
            state, data, _ = build(config, device, resuming=True)
            # Weights that were trained in half are all there is of them: they are scored as they are, in any precision.
            as_now = {"mode": state.policy.mode, "policy": str(state.policy)}
            checkpoint.restore(state, {**saved, **as_now}, path=asked.checkpoint)
            _note_written(state, data)
            policy = state.policy.for_eval(config.precision.eval_dtype)
            metrics = {f"val/{key}": value for key, value in eval_step(state, policy, data.val_batches()).items()}
            if state.ema is not None:
                with state.ema.swapped_in(state.model):
                    scores = eval_step(state, policy, data.val_batches())
                metrics |= {f"ema/{key}": value for key, value in scores.items()}
        except Exception as error:
            if is_memory(error):
                raise memory_trouble(error, config, device) from error
            raise
    return {
        "checkpoint": str(asked.checkpoint),
        "step": state.counters.applied,
        "epoch": state.position.epoch,
        "name": config.name,
        "dataset": data.spec.name,
        "examples": data.spec.val_examples,
        "precision": config.precision.name,
        "policy": str(policy),
        "trained_with": saved["policy"],
        "device": device.type,
        "cpu_fp16": kernels,
        "metrics": metrics,
        "logged": logged(asked.checkpoint, state.counters.applied),
        "seconds": time.perf_counter() - started,
    }


def _note_written(state: Any, data: Any) -> None:
    """Let the state know which parameters a forward pass writes to, as a run does before its first step."""
    from mprun.training.observe import check_plan, observe

    batch = next(iter(data.train_batches(state.position.epoch, 0)), None)
    if batch is not None:
        check_plan(state, observe(state, batch))


def logged(path: Path, step: int) -> dict[str, float]:
    """What the run itself logged of an evaluation at ``step``; empty where that is not known."""
    from mprun.tracking.jsonl import read_metrics

    try:
        records = read_metrics(path.parent.parent, effective=True)
    except MprunError:
        return {}
    found = [record for record in records if record.get("kind") == "val" and record.get("step") == step]
    return {key: value for key, value in found[-1].items() if key.startswith(("val/", "ema/"))} if found else {}


def show(report: Mapping[str, Any]) -> None:
    """The table on stdout: raw and EMA weights, beside what the run logged at that step."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mprun.report.summary import count_text, duration_text, number_text, shown_path

    console = Console(highlight=False)
    console.print(
        Text(
            f"{report['name']}: {shown_path(Path(report['checkpoint']))}, step {count_text(report['step'])}",
            style="bold",
        ),
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("metric", no_wrap=True)
    for heading in ("score", "logged at that step", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, value in report["metrics"].items():
        then = report["logged"].get(name)
        same = "" if then is None else "identical" if then == value else f"{value - then:+.2e}"
        table.add_row(name, number_text(value), "" if then is None else number_text(then), same)
    console.print(table)
    console.print(
        Text(
            f"{count_text(report['examples'])} examples of {report['dataset']}, precision={report['precision']} "
            f"({report['policy']}) on {report['device']}, {duration_text(report['seconds'])}",
            style="dim",
        ),
        soft_wrap=True,
    )
