"""``mprun estimate [overrides]``: the memory of a training step before a run, from shapes alone; or of a past run.

    mprun estimate model=timm model.name=resnet50 dataset=synthetic train.batch_size=256 precision=fp16_dynamic
    mprun estimate device=cuda --memory 24GiB ...     the largest batch that fits as well
    mprun estimate --measure ...                      one real step beside the prediction, or alone where none can be made
    mprun estimate outputs/latest                     what a run was predicted to need, beside what it did
    --json FILE  --top N

``device=cuda`` may be estimated without a GPU. Nothing is written but FILE. How the count is made, and what is not in it,
is said in ``mprun/training/footprint.py`` and ``mprun/numerics/memory.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from mprun.compose import check, compose
from mprun.config import Config, Device
from mprun.config_check import to_plain
from mprun.errors import ConfigError, nearest
from mprun.runs import LATEST, OUTPUTS
from mprun.training.env import atomic_write_json, peak_memory_bytes, resolve_device

if TYPE_CHECKING:
    import torch

    from mprun.numerics.memory import Footprint

VALUED = ("--memory", "--json", "--top")
FLAGS = (*VALUED, "--measure")
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Asked:
    """A command line. ``folder`` is a run's, otherwise ``overrides`` say what is estimated."""

    overrides: tuple[str, ...]
    folder: Path | None = None
    memory: int | None = None
    json: Path | None = None
    top: int = 10
    measure: bool = False


def run(words: Sequence[str]) -> int:
    """Print the estimate.

    Raises:
        ConfigError: the words, the configuration or the run folder are not usable.
    """
    asked = parse(words)
    past = read_run(asked.folder) if asked.folder else None
    config = _config_of(asked)
    device = _device_of(config, past)
    report = estimate(config, device, asked)
    if past is not None:
        report["run"] = past
    show(report, config, asked)
    if asked.json is not None:
        atomic_write_json(asked.json, plain(report, config))
    return 0


def estimate(config: Config, device: torch.device, asked: Asked) -> dict[str, Any]:
    """Predict, and measure and search where that was asked for. Footprints by name, and what else is known.

    A model that reads the values of tensors has no prediction; with ``--measure`` its real step is reported alone.
    """
    import torch

    from mprun.training.fakes import UnpredictableError
    from mprun.training.footprint import largest_batch, measure, predicting

    here = device.type != "cuda" or torch.cuda.is_available()
    if asked.measure and not here:
        raise ConfigError(
            f"estimate --measure: device={device.type} is not here; leave --measure out, or use device=cpu"
        )
    report: dict[str, Any] = {"device": device.type, "device_is_here": here}
    try:
        with predicting(config, device) as predict:
            report["predicted"] = predict(config.train.batch_size)
            if asked.memory is not None:
                report["memory"] = asked.memory
                report["largest"] = largest_batch(predict, asked.memory, start=config.train.batch_size)
    except UnpredictableError as error:
        if asked.measure and asked.memory is not None:
            raise ConfigError(
                f"{str(error).partition(';')[0]}; the batch for --memory cannot be found, leave it out"
            ) from error
        if not asked.measure:
            raise
        report = {key: report[key] for key in ("device", "device_is_here")} | {
            "unpredicted": str(error).partition(";")[0]
        }
    report["process_bytes"] = peak_memory_bytes(torch.device("cpu"))
    if asked.measure:
        report["measured"] = measure(config, device)
    return report


# --- words ------------------------------------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> Asked:
    """The command line as a value.

    Raises:
        ConfigError: an unknown flag, a size without a unit, or a run folder together with overrides.
    """
    given: dict[str, Any] = {}
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in VALUED:
            found = value if equals else next(rest, None)
            if not found:
                raise ConfigError(f"estimate {flag} needs a value, such as {flag} {_EXAMPLE[flag]}")
            given[flag.removeprefix("--")] = _READ[flag](found)
        elif word == "--measure":
            given["measure"] = True
        elif word.startswith("--"):
            raise ConfigError(f"estimate {word} is unknown: {nearest(flag, FLAGS)}")
        elif "=" in word or word.startswith(("+", "~")):
            overrides.append(word)
        elif "folder" in given:
            raise ConfigError(f"estimate takes one run folder, not {given['folder']} and {word}")
        else:
            given["folder"] = _folder(word)
    others = [word for word in overrides if word.partition("=")[0] != "trust"]
    if "folder" in given and others:
        raise ConfigError(
            f"estimate {given['folder']} {others[0]}: a run is estimated as it ran; for another configuration leave the "
            "folder out and write all of its overrides"
        )
    return Asked(tuple(overrides), **given)


def size_of(text: str) -> int:
    """``24GiB`` or ``24e9`` bytes with a unit, as a number of bytes.

    Raises:
        ConfigError: no number, or no unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]i?B)", text.strip())
    if match is None or match[2] not in UNITS or not 0 < float(match[1]) < 1e9:
        raise ConfigError(f"estimate --memory {text}: write a number and a unit ({', '.join(UNITS)}), such as 24GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"estimate --top {text}: write a whole number from 1 up")
    return int(text)


def _target(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise ConfigError(f"estimate --json {text}: there is no folder {path.absolute().parent} to write this file to")
    return path


_READ = {"--memory": size_of, "--json": _target, "--top": _count}
_EXAMPLE = {"--memory": "24GiB", "--json": "memory.json", "--top": "20"}


def _folder(word: str) -> Path:
    path = Path(OUTPUTS) / LATEST if word == LATEST else Path(word).expanduser()
    if not (path / "config.yaml").is_file():
        raise ConfigError(
            f"estimate {word}: {path} is no run folder (it holds no config.yaml); options are written key=value"
        )
    return path.resolve()


# --- a past run -------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> dict[str, Any]:
    """What a run folder says about memory: ``status``, ``peak_memory`` and the device.

    Raises:
        ConfigError: the folder holds no readable ``result.json`` (the run has not ended).
    """
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        return {
            "folder": str(folder),
            "status": result["status"],
            "peak_memory_bytes": result.get("peak_memory"),
            "device": env["device"]["type"],
            "device_name": env["device"].get("name"),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"estimate {folder}: no whole result.json and env.json there ({type(error).__name__}: {error}); "
            "the run must have ended"
        ) from error


def _config_of(asked: Asked) -> Config:
    if asked.folder is None:
        return compose(asked.overrides, command="estimate").config
    node = OmegaConf.load(asked.folder / "config.yaml")
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{asked.folder / 'config.yaml'} is not a mapping of keys")
    # A run folder may come from a stranger: what code it may import is said on this command line only.
    node.trust = compose(asked.overrides, command="estimate").config.trust
    return check(node, command="estimate")


def _device_of(config: Config, past: dict[str, Any] | None) -> torch.device:
    """The run's device. ``cuda`` may be meant without being here."""
    import torch

    if past is not None:
        return torch.device(past["device"])
    if config.device is Device.cuda and not torch.cuda.is_available():
        return torch.device("cuda")
    return resolve_device(config.device)


# --- output -----------------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], config: Config, asked: Asked) -> None:
    """Print tables and facts to stdout."""
    from mprun.report import memory as view

    console = view.make_console()
    found: Footprint = report.get("predicted") or report["measured"]
    measured = report.get("measured") if "predicted" in report else None
    console.print()
    what = "memory of a step" if "predicted" in report else "memory of a step, measured"
    micro = f"{found.accumulate} micro-batches of " if found.accumulate > 1 else "batch "
    console.rule(
        f"{what}: {config.name}, {micro}{found.batch_size}, {report['device']}",
        align="left",
    )
    view.print_categories(console, found, measured)
    console.print()
    view.print_facts(console, [("by formula", view.formula_line(found))])
    console.print()
    view.print_modules(console, found, top=asked.top)
    console.print()
    if config.precision.compute_dtype.value != "float32":
        view.print_misfits(console, found.misfits, top=asked.top)
        console.print()
    view.print_facts(console, view.facts(report, compiled=config.model.compile))


def plain(report: dict[str, Any], config: Config) -> dict[str, Any]:
    """The report for ``--json``."""
    from mprun.numerics.memory import Footprint
    from mprun.report.memory import as_dict

    content = {key: as_dict(value) if isinstance(value, Footprint) else value for key, value in report.items()}
    return {"config": to_plain(config), **content}
