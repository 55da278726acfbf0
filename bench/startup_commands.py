"""Commands that do not train, from the start of the process to its exit: the second part of ``bench/startup.py``."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import progress, ratio_of_pairs

TARGET_S = 0.8
RUNS = 8  # below the folder that `table` reads
HEAVY = ("torch", "torchvision", "timm", "wandb", "sklearn", "numpy", "sympy", "rich", "hydra")
# By name: the words after `mprun`; {runs} is a folder with RUNS runs.
COMMANDS: dict[str, list[str]] = {
    "--version": ["--version"],
    "--help": ["--help"],
    "env": ["env"],
    "list": ["list"],
    "show": ["show"],
    "show recipe=...": ["show", "recipe=digits/vit_fp16"],
    "validate": ["validate"],
    "validate recipe=...": ["validate", "recipe=digits/vit_fp16"],
    "table FOLDER": ["table", "{runs}"],
    "an error (modle=vit)": ["modle=vit"],
    "validate --all": ["validate", "--all"],
}
BASELINES = {"python": ["-c", "pass"], "hydra": ["-c", "import hydra, omegaconf"]}


def measure_commands(
    rounds: int, make_run: Callable[[Path], object]
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Seconds of every command and baseline, in turns; and which of ``HEAVY`` each command imports.

    Args:
        rounds: that count; one more warms the disk.
        make_run: leaves the folder of a run at a path.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        progress("a run for table to read")
        make_run(runs / "0")
        for number in range(1, RUNS):
            shutil.copytree(runs / "0", runs / str(number))
        asked = {name: words_in(words, runs) for name, words in COMMANDS.items()}
        every = BASELINES | {name: ["-m", "mprun", *words] for name, words in asked.items()}
        found: dict[str, list[float]] = {name: [] for name in every}
        for number in range(rounds + 1):
            for name, words in every.items():
                progress(f"round {number}/{rounds} {name}")
                seconds = command_s(words, folder)
                if number:
                    found[name].append(seconds)
        progress("")
        return found, {name: imported(words, folder) for name, words in asked.items()}


def words_in(words: Sequence[str], runs: Path) -> list[str]:
    """A command's words with the folder of runs filled in."""
    return [word.format(runs=runs) for word in words]


def command_s(words: Sequence[str], folder: str | Path) -> float:
    """Seconds from the start of ``python WORDS`` to its exit."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    return time.perf_counter() - begin


def imported(words: Sequence[str], folder: str | Path) -> list[str]:
    """Which of ``HEAVY`` the command ``mprun WORDS`` imports, as ``-X importtime`` sees it; also what is only tried counts."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mprun", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return [package for package in HEAVY if package in {module for module, _ in import_lines(done.stderr)}]


def add_commands(result: dict[str, Any], found: dict[str, list[float]], heavy: dict[str, list[str]]) -> None:
    """Print the commands, and put medians, ratios and the judged rows into ``result``."""
    median = {name: statistics.median(each) for name, each in found.items()}
    result["baselines_s"] = {name: median[name] for name in BASELINES}
    result["commands"] = [
        {
            "name": name,
            "s": median[name],
            **{f"to_{base}": ratio_of_pairs(found[name], found[base]) for base in BASELINES},
            "imports": heavy[name],
        }
        for name in COMMANDS
    ]
    print("  ".join(f"{name} alone {median[name]:.2f} s" for name in BASELINES))
    for row in result["commands"]:
        print(
            f"{row['name']:<22}{row['s']:6.2f} s, {row['to_hydra']:5.2f} times `import hydra, omegaconf`; imports "
            f"{', '.join(row['imports']) or 'none of ' + ', '.join(HEAVY)}"
        )
    single = {name: median[name] for name in COMMANDS if name != "validate --all"}
    slowest = max(single, key=lambda name: single[name])
    torch_free = all("torch" not in each for each in heavy.values())
    free = "none imports torch" if torch_free else "NOT all without torch"
    for what, measured, seconds in (
        (
            f"the slowest of {len(single)} commands that do not train, seconds",
            f"`{slowest}` {single[slowest]:.2f} s, `list` {single['list']:.2f} s, `table` {single['table FOLDER']:.2f} s; "
            f"{free}; `import hydra, omegaconf` alone {median['hydra']:.2f} s",
            single[slowest],
        ),
        ("validate --all, every recipe, seconds", f"{median['validate --all']:.2f} s", median["validate --all"]),
    ):
        met = seconds <= TARGET_S and torch_free
        result["table"].append({"what": what, "measured": measured, "ratio": seconds, "target": TARGET_S, "met": met})


def import_lines(text: str) -> list[tuple[str, float]]:
    """Module and its own milliseconds, of every line that ``-X importtime`` has written into ``text``."""
    found = []
    for line in text.splitlines():
        if line.startswith("import time:") and "self [us]" not in line:
            own, _, module = (part.strip() for part in line.removeprefix("import time:").split("|"))
            found.append((module, int(own) / 1000))
    return found
