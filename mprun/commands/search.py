"""``mprun search``: the smallest set of modules that must stay FP32 so that a low-precision run tracks FP32.

    mprun search model=timm model.name=resnet18 precision=fp16_dynamic

search.budget=200      sets of modules that may be tested
search.tolerance=1.0   scales what may differ: the gradient's error, and the gap between loss curves
search.steps=100       steps of the FP32 run and of every run that verifies a set

Everything else is the experiment, as for train. A set passes if its gradients at three states of an FP32 run differ from FP32's
by no more than the format's rounding and the noise between batches explain, and if a short run with it follows FP32's loss as
closely as FP32's own seeds do. Modules are tried most suspect first, then by delta debugging, which does not take for granted
that more FP32 is better; the result fails without any single one of its modules.

Where no set suffices, search says what else it is: the loss scale, the learning rate, the data.

The folder outputs/search/NAME/<stamp>-<uid>/ has result.json and precision/recommended.yaml, which precision=FILE takes.

Exit status: 0 if a set was found (also if nothing needs FP32), 1 if none suffices, 2 if refused; 130 after Ctrl-C and 143 after
SIGTERM, which keep the best set so far.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.commands.stopping import Stops, stoppable, writing
from mprun.compose import Composed, compose
from mprun.config import Config, DType, Mode, ScaleKind
from mprun.config_check import to_plain
from mprun.errors import CheckpointError, ConfigError
from mprun.runs import OUTPUTS, slug
from mprun.training.env import atomic_write_json, atomic_write_text, describe_environment

if TYPE_CHECKING:
    from mprun.lab.found import Found
    from mprun.lab.search import Tell

FOLDER = "search"


def run(words: Sequence[str]) -> int:
    """Search. Returns the exit status.

    Raises:
        ConfigError: the words do not fit. Nothing was started.
    """
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"search does not know {flags[0]}: it takes key=value words only; see mprun search --help")
    composed = compose(words, command="search")
    config = composed.config
    if config.precision.compute_dtype is DType.float32:
        raise ConfigError(
            f"search precision={config.precision.name}: it computes in float32 already; "
            "name a half policy, such as precision=fp16_dynamic or precision=bf16"
        )
    if config.precision.mode is Mode.pure:
        raise ConfigError(
            f"search precision={config.precision.name}: precision.mode=pure keeps no FP32 weights, so every module that learns "
            "would have to be FP32; search for precision.mode=master or autocast instead, as in precision=bf16_master"
        )
    if config.resume is not None:
        raise ConfigError(
            "search begins at the initialisation: leave resume out, or start from weights with model.init=FILE"
        )
    from mprun.training.build import device_of, switches

    device = device_of(config)
    with switches(config, device) as kernels:  # refused before there is a folder
        folder = _new_folder(config)
        _write_start(folder, composed, device, kernels)
    with stoppable() as stops:
        return _search(config, folder, stops)


def _search(config: Config, folder: Path, stops: Stops) -> int:
    """Search, write, print."""
    from mprun.lab.found import Found
    from mprun.lab.search import search
    from mprun.training.record import how_it_ended

    begin = time.perf_counter()
    line = Line(config.search.budget)
    try:
        found = search(config, line.tell)
    except KeyboardInterrupt:  # before there was anything to find
        found = Found("interrupted", None, seconds=time.perf_counter() - begin)
    except BaseException as error:
        line.end()
        atomic_write_json(folder / "result.json", {"command": FOLDER, **how_it_ended(error)})
        raise
    line.end()
    code = {"found": 0, "empty": 0, "none": 1, "interrupted": stops.code}[found.status]
    with writing():
        file = _write_option(config, found, folder)
        _write_result(found, folder, code, file)
    _print(config, found, folder, file)
    return code


class Line:
    """The progress line on stderr: on a terminal one line that is written over, elsewhere one for every better set."""

    def __init__(self, budget: int) -> None:
        """See the class."""
        self.budget = budget
        self.shown = 0
        self.best: Any = None
        self.live = sys.stderr.isatty()
        if self.live:
            self._write("an FP32 run first")

    @property
    def tell(self) -> Tell:
        """What :func:`mprun.lab.search.search` calls."""
        return self._tell

    def _tell(self, items: tuple[str, ...], passes: bool, tests: int, best: tuple[str, ...] | None) -> None:
        size = "no set passes yet" if best is None else f"the best has {len(best)} module{'s' * (len(best) != 1)}"
        text = f"set {tests} of at most {self.budget}: {len(items)} in FP32 {'pass' if passes else 'fail'}; {size}"
        if self.live:
            self._write(text)
        elif best != self.best:
            print(text, file=sys.stderr)
        self.best = best

    def _write(self, text: str) -> None:
        print(f"\r{text:<{self.shown}}", end="", file=sys.stderr, flush=True)
        self.shown = len(text)

    def end(self) -> None:
        """Clear the line."""
        if self.live and self.shown:
            print(f"\r{'':<{self.shown}}\r", end="", file=sys.stderr, flush=True)
            self.shown = 0


def _new_folder(config: Config) -> Path:
    import os

    folder = Path(
        OUTPUTS, FOLDER, slug(config.name), f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
    ).absolute()
    try:
        (folder / "precision").mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {folder}: {error.strerror}") from error
    return folder


def _write_start(folder: Path, composed: Composed, device: Any, kernels: str) -> None:
    from omegaconf import OmegaConf

    plain = to_plain(composed.config)
    about = describe_environment(
        sys.argv, plain, seed=composed.config.seed, device=device, cpu_fp16=None if kernels == "none" else kernels
    )
    atomic_write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain)))
    atomic_write_json(folder / "env.json", about)


def _write_option(config: Config, found: Found, folder: Path) -> Path | None:
    """``precision/recommended.yaml``, where there is something to recommend."""
    from mprun.lab.recommended import option_text
    from mprun.lab.search_text import certainty, verdict

    if found.fp32_modules is None and found.loss_scale is None:
        return None
    precision: dict[str, Any] = dict(to_plain(config)["precision"])
    own = list(precision["fp32_modules"])
    precision["fp32_modules"] = own + [path for path in found.fp32_modules or () if path not in own]
    precision["name"] = slug(f"{config.precision.name}_searched")
    about = [f"mprun search, {config.name}: {verdict(found, config.precision.name)}"]
    if found.loss_scale is not None:
        scale = precision["loss_scale"]
        kind = ScaleKind.static.name if scale["kind"] == ScaleKind.none.name else scale["kind"]
        bounds = {"min": min(scale["min"], found.loss_scale), "max": max(scale["max"], found.loss_scale)}
        precision["loss_scale"] = {**scale, **bounds, "kind": kind, "init": found.loss_scale}
    if found.cause is not None:
        about.append(found.cause.message)
    if known := certainty(found):
        about.append(f"The set is {known}.")
    about.append("The evidence in numbers is in ../result.json.")
    file = folder / "precision" / "recommended.yaml"
    atomic_write_text(
        file, option_text(precision, about, {one.path: one.alone or one.without for one in found.evidence})
    )
    return file


def _write_result(found: Found, folder: Path, code: int, file: Path | None) -> None:
    from mprun.lab.found import TEST, as_dict

    content = as_dict(found)
    status = {"interrupted": "interrupted"}.get(found.status, "ok")
    head = {"command": FOLDER, "status": status, "exit_code": code, "error": None, "outcome": content.pop("status")}
    tail = {"recommended": str(file.relative_to(folder)) if file else None, "test": TEST}
    atomic_write_json(folder / "result.json", {**head, **content, **tail})


def _print(config: Config, found: Found, folder: Path, file: Path | None) -> None:
    import shlex

    from mprun.lab.search_text import print_found
    from mprun.report.memory import make_console
    from mprun.report.summary import shown_path

    print_found(make_console(), found, config.precision.name)
    if file is not None:
        print(f"{'use it':<15}{shlex.quote(f'precision={shown_path(file)}')}")
    print(f"{'folder':<15}{shlex.quote(str(shown_path(folder)))}")
