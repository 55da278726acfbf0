"""``mprun diagnose``: what FP16 and BF16 would do to this model on this data, and the precision that it should be trained in.

    mprun diagnose model=vit dataset=digits
    mprun diagnose model=python model.name=my_pkg.nets:Net 'trust=[my_pkg]' diagnose.steps=500

diagnose.steps=200   FP32 steps that are measured (the run's own length if that is shorter)
diagnose.every=10    one in so many of them in full

One FP32 run is watched; from its numbers follow, for every module, what each format loses, which loss scales are safe, and which
modules have to stay in FP32. The policy that comes out is tried beside FP32 before it is recommended. Everything else on the
command line is the experiment, as for mprun train; of precision= only the mode (master stays master) and the FP32 modules count.

In outputs/diagnose/NAME/<stamp>-<uid>/: result.json with every number, precision/recommended.yaml, which can follow precision=
at once, and for FP16 precision/static.yaml beside it.

Exit status: 0 with a verified recommendation, 1 without one, 2 if refused; 130 after Ctrl-C and 143 after SIGTERM, which keep
what is known.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mprun.commands.stopping import Stops, stoppable, writing
from mprun.compose import Composed, compose
from mprun.config_check import to_plain
from mprun.errors import ConfigError, MprunError
from mprun.runs import OUTPUTS, slug

FOLDER = "diagnose"


def run(words: Sequence[str]) -> int:
    """Diagnose. Returns the exit status.

    Raises:
        MprunError: the words do not fit, or the model or data cannot be built.
    """
    if wrong := [word for word in words if word.startswith("-") or "=" not in word]:
        raise ConfigError(f"diagnose does not know {wrong[0]}: write key=value (see mprun diagnose --help)")
    if resume := [word for word in words if word.startswith("resume=")]:
        raise ConfigError(
            f"diagnose {resume[0]}: a diagnosis starts at the beginning; leave it out, or give model.init="
        )
    composed = compose(words, command=FOLDER)
    folder = Path(
        OUTPUTS, FOLDER, slug(composed.config.name), f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    )
    folder = folder.absolute()
    try:
        folder.parent.mkdir(
            parents=True, exist_ok=True
        )  # minutes of work are not to end at a folder that cannot be written
    except OSError as error:
        raise ConfigError(f"cannot create {folder.parent}: {error.strerror}") from error
    try:
        with stoppable() as stops:
            return _run(composed, folder, stops)
    finally:
        with suppress(OSError):
            folder.parent.rmdir()  # if nothing came of it


def _run(composed: Composed, folder: Path, stops: Stops) -> int:
    from mprun.lab.diagnose import Diagnosis, diagnose
    from mprun.lab.findings import as_plain

    found, config = Diagnosis(), composed.config
    begun, status, code, error = time.perf_counter(), "ok", 0, None

    def say(line: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {line}", file=sys.stderr, flush=True)

    try:
        diagnose(config, found, say)
        code = 0 if found.chosen else 1
        status = "ok" if found.chosen else "failed"
    except KeyboardInterrupt:
        status, code, error = "interrupted", stops.code, f"stopped by {stops.name}; what is known so far is here"
    except MprunError as failure:
        if found.measured is None:
            raise  # refused before anything was measured: nothing is worth a folder
        status, code, error = "failed", 1, str(failure)
    content: dict[str, Any] = {"command": FOLDER, "status": status, "error": error, "exit_code": code, "wall_s": None}
    content |= as_plain(found)
    if found.chosen is None and status == "ok":
        content["error"] = found.reason
    content["wall_s"] = time.perf_counter() - begun
    with writing():
        _write(composed, folder, content, found)
    _print(composed, folder, content)
    return code


def _write(composed: Composed, folder: Path, content: dict[str, Any], found: Any) -> None:
    """The folder, ``result.json`` last."""
    from mprun.lab.findings import recommended
    from mprun.training.build import device_of
    from mprun.training.env import atomic_write_json, atomic_write_text, describe_environment

    plain = to_plain(composed.config)
    try:
        (folder / "precision").mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain)))
        about = describe_environment(sys.argv, plain, seed=composed.config.seed, device=device_of(composed.config))
        atomic_write_json(folder / "env.json", about)
        if found.chosen is not None:
            atomic_write_text(folder / "precision" / "recommended.yaml", recommended(composed.config, found))
            if found.chosen.scaled:
                static = recommended(composed.config, found, static=True)
                atomic_write_text(folder / "precision" / "static.yaml", static)
        atomic_write_json(folder / "result.json", content)
    except OSError as error:
        raise MprunError(f"cannot write {folder}: {error.strerror}") from error


def _print(composed: Composed, folder: Path, content: dict[str, Any]) -> None:
    from mprun.report.diagnose_text import print_diagnosis
    from mprun.report.memory import make_console
    from mprun.report.summary import shown_path

    console = make_console()
    console.print()
    console.rule(f"diagnosis of {composed.config.name}", align="left")
    print_diagnosis(console, content)
    console.print(f"{'numbers':<13}{shown_path(folder / 'result.json')}", soft_wrap=True)
    if content["error"]:
        console.print(f"{'error':<13}{content['error']}", style="red", markup=False)
    if content["recommended"]:
        file = shown_path(folder / "precision" / "recommended.yaml")
        console.print(f"{'use it':<13}{again(composed.overrides, f'precision={file}')}", soft_wrap=True, markup=False)


def again(overrides: Sequence[str], precision: str) -> str:
    """The command that trains the same experiment with another ``precision=``."""
    kept = [
        word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] not in ("precision", FOLDER)
    ]
    return shlex.join(["python", "-m", "mprun", precision, *kept])
