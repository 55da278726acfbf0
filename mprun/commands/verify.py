"""``mprun verify RECIPE [overrides]``: run a recipe as often as it says and hold it to what it promises.

    mprun verify digits/vit_fp16                 its seeds, one run each; a table; exit status 0 or 1
    mprun verify recipe=./mine.yaml seed=3       with other words on top; a given seed is the only one
    mprun verify digits/vit_fp16 --seeds 0,1     other seeds
    mprun verify --all [--dry]                   every recipe that this machine can run; --dry only says which

Each run is a process of its own (``python -m mprun``), so that one which crashes is a FAIL line and no end of the others, and
none inherits what another has left in torch. The runs lie in ``outputs/verify/<recipe>/<stamp>-<uid>/``, next to
``verify.json``. What a line means is said in ``mprun/recipes.py``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mprun.compose import compose, options
from mprun.config import Config, Device, ModelSource
from mprun.errors import CheckpointError, ConfigError, MprunError, nearest
from mprun.processes import STOPPED, SeedRun, about_run, run_seeds
from mprun.recipes import Verdict, expectations, judge, needs, seeds_of
from mprun.runs import OUTPUTS, slug
from mprun.signatures import import_target
from mprun.training.env import atomic_write_json
from mprun.training.host import versions

STATISTIC = "median over the seeds; words must be equal on every seed"
FLAGS = ("--all", "--dry", "--seeds")


@dataclass(frozen=True)
class Asked:
    """A command line: recipes are named with ``all`` or by one name, everything else is for the runs."""

    recipe: str | None
    overrides: tuple[str, ...]
    seeds: tuple[int, ...] = ()
    all: bool = False
    dry: bool = False


@dataclass
class Report:
    """What became of one recipe."""

    recipe: str
    folder: Path
    verdicts: list[Verdict] = field(default_factory=list)
    runs: list[SeedRun] = field(default_factory=list)
    seconds: float = 0.0
    stopped: int = 0

    @property
    def passed(self) -> bool:
        """Whether every line holds."""
        return bool(self.verdicts) and not self.stopped and all(verdict.passed for verdict in self.verdicts)


def run(words: Sequence[str]) -> int:
    """Verify one recipe or all. Returns 0 if every line passed, 1 if not, 130 or 143 if stopped.

    Raises:
        ConfigError: the recipe or the words cannot be run as given.
    """
    asked = parse(words)
    if asked.all:
        return verify_all(asked)
    assert asked.recipe is not None, "parse() asks for a recipe or --all"
    config, overrides = composed(asked.recipe, asked)
    if not config.expect:
        raise ConfigError(
            f"recipe={asked.recipe} expects nothing: write lines into expect:, or fill it in by measuring"
        )
    if reason := cannot_run(config, asked.overrides):
        raise ConfigError(f"recipe={asked.recipe} cannot be verified here: {reason}")
    if asked.dry:
        print(f"would run {asked.recipe} with seed {', '.join(map(str, chosen_seeds(config, asked)))}")
        return 0
    report = verify(asked.recipe, config, overrides, chosen_seeds(config, asked))
    return report.stopped or (0 if report.passed else 1)


def parse(words: Sequence[str]) -> Asked:
    """The command line of ``verify``.

    Raises:
        ConfigError: names the word that does not fit.
    """
    recipe: str | None = None
    overrides: list[str] = []
    seeds: tuple[int, ...] = ()
    given: set[str] = set()
    rest = iter(words)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag in FLAGS:
            if flag in given:
                raise ConfigError(f"verify: {flag} is given twice")
            given.add(flag)
            if flag == "--seeds":
                seeds = _seeds(value or next(rest, ""))
        elif word.startswith("-"):
            raise ConfigError(f"verify does not know {word}: {nearest(flag, FLAGS)}")
        elif flag == "recipe" or "=" not in word:
            if recipe is not None:
                raise ConfigError(f"verify takes one recipe, not {recipe} and {value or word}; --all takes all of them")
            recipe = value or word
        else:
            overrides.append(word)
    if (recipe is None) != ("--all" in given):
        raise ConfigError("verify needs a recipe, such as verify digits/vit_fp16, or --all; one of them")
    return Asked(recipe, tuple(overrides), seeds, "--all" in given, "--dry" in given)


def _seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) != len(parts):
        raise ConfigError(f"--seeds {text!r}: give different whole numbers with commas, as in --seeds 0,1,2")
    return tuple(int(part) for part in parts)


def composed(recipe: str, asked: Asked) -> tuple[Config, list[str]]:
    """The checked configuration of a recipe with the words on top, and the words that its runs get."""
    words = [f"recipe={recipe}", *asked.overrides]
    return compose(words).config, words


def chosen_seeds(config: Config, asked: Asked) -> list[int]:
    """``--seeds``, else ``seed=`` on the command line, else the recipe's own."""
    if asked.seeds:
        return list(asked.seeds)
    if any(word.partition("=")[0] == "seed" for word in asked.overrides):
        return [config.seed]
    return seeds_of(config.meta, expectations(config.expect), config.seed)


def cannot_run(config: Config, overrides: Sequence[str]) -> str:
    """Why this machine cannot run ``config``; empty if it can, as far as data, packages and devices say."""
    from mprun.training.env import resolve_device

    package = {ModelSource.timm: "timm", ModelSource.torchvision: "torchvision"}.get(config.model.source)
    if package and versions([package])[package] is None:
        return f"needs {package}, which is not installed"
    try:
        device = resolve_device(config.device)
        asks_for_cpu = any(word.partition("=")[0] == "device" for word in overrides)
        if "gpu" in needs(config.meta) and device.type == "cpu" and not asks_for_cpu:
            return "needs a GPU (meta.requires: gpu); device=cpu runs it all the same"
        if config.model.source is ModelSource.python:
            import_target(config.model.name, trust=config.trust, key="model.name")
        from mprun.data import build_data

        build_data(config, device=resolve_device(Device.cpu))
    except MprunError as error:
        return " ".join(str(error).split())
    return ""


def verify_all(asked: Asked) -> int:
    """Every recipe of ``recipes/``: run what can be run, say what is left out and why."""
    folder = new_folder("all")
    reports: list[Report] = []
    left_out: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in options("recipe"):
        try:
            config, overrides = composed(name, asked)
        except MprunError as error:
            refused[name] = " ".join(str(error).split())
            print(f"FAIL  {name}: refused: {refused[name]}")
            continue
        reason = cannot_run(config, asked.overrides) if config.expect else "expects nothing yet (expect: [])"
        if reason:
            left_out[name] = reason
        elif asked.dry:
            print(f"would run {name} with seed {', '.join(map(str, chosen_seeds(config, asked)))}")
        else:
            reports.append(verify(name, config, overrides, chosen_seeds(config, asked)))
            if reports[-1].stopped:
                break
    for name, reason in left_out.items():
        print(f"left out  {name}: {reason}")
    if asked.dry:
        return 1 if refused else 0
    passed = [report.recipe for report in reports if report.passed]
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot create the folder {folder}: {error.strerror}") from error
    summary = {
        "passed": passed,
        "failed": [report.recipe for report in reports if not report.passed],
        "refused": refused,
        "left_out": left_out,
        "reports": {report.recipe: str(report.folder) for report in reports},
        "seconds": sum(report.seconds for report in reports),
    }
    atomic_write_json(folder / "verify.json", summary)
    failed = len(reports) - len(passed) + len(refused)
    print(f"{len(passed)} recipes passed, {failed} failed, {len(left_out)} left out   {folder / 'verify.json'}")
    return next((report.stopped for report in reports if report.stopped), 1 if failed else 0)


def verify(recipe: str, config: Config, overrides: Sequence[str], seeds: Sequence[int]) -> Report:
    """Run a recipe with each seed, judge it, print the table and write ``verify.json``."""
    report = Report(recipe, new_folder(recipe))
    lines = expectations(config.expect)
    print(f"{recipe}: {config.meta.get('title', config.name)}")
    begin = time.perf_counter()
    report.runs = run_seeds(overrides, seeds, report.folder)
    report.seconds = time.perf_counter() - begin
    if len(report.runs) < len(seeds) or report.runs[-1].code in STOPPED:
        report.stopped = report.runs[-1].code
    report.verdicts = [judge(line, {done.seed: done.result for done in report.runs}) for line in lines]
    print("\n".join(table(report.verdicts)))
    good = sum(verdict.passed for verdict in report.verdicts)
    end = "STOPPED" if report.stopped else "PASS" if report.passed else "FAIL"
    path = report.folder / "verify.json"
    print(f"{end}  {recipe}: {good} of {len(lines)} lines, {report.seconds:.0f} s   {path}")
    atomic_write_json(path, as_json(report, overrides))
    return report


def new_folder(recipe: str) -> Path:
    """``outputs/verify/<recipe>/<stamp>-<uid>``, not created yet; a recipe file goes by its stem."""
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    return Path(OUTPUTS) / "verify" / slug(name) / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """One line a verdict: metric, expected, tolerance, what the seeds gave, PASS or FAIL."""
    seeds = list(verdicts[0].each)
    rows = [["metric", "expected", "tolerance", "got", *(f"seed {seed}" for seed in seeds), ""]]
    for verdict in verdicts:
        line = verdict.line
        end = "PASS" if verdict.passed else "FAIL" + (f" ({verdict.why})" if verdict.why else "")
        each = [shown(value) for value in verdict.each.values()]
        rows.append(
            [line.metric, line.text(), f"{line.tolerance:g}" if line.tolerance else "", shown(verdict.got), *each, end]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def shown(value: float | str | None) -> str:
    """A value of a metric: six digits at most, a dash where there is none."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def as_json(report: Report, overrides: Sequence[str]) -> dict[str, Any]:
    """The content of ``verify.json``."""
    about = about_run(report.runs[0].run_dir) if report.runs else {}
    return {
        "recipe": report.recipe,
        "passed": report.passed,
        "stopped": report.stopped or None,
        "statistic": STATISTIC,
        "overrides": list(overrides),
        "seeds": [done.seed for done in report.runs],
        "seconds": report.seconds,
        "lines": [line_json(verdict) for verdict in report.verdicts],
        "runs": [
            {"seed": done.seed, "status": done.status, "exit_status": done.code, "error": done.error or None,
             "seconds": done.seconds, "run_dir": str(done.run_dir)}
            for done in report.runs
        ],
        "env": about,
    }  # fmt: skip


def line_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON."""
    expected: Mapping[str, Any] = asdict(verdict.line)
    return {
        **expected,
        "got": verdict.got,
        "each": dict(verdict.each),
        "passed": verdict.passed,
        "why": verdict.why or None,
    }
