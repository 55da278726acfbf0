"""The command line: ``mprun [COMMAND] [overrides]``, also ``python -m mprun``.

COMMAND is the first word without ``=`` or a leading ``-``, ``train`` if there is none. Errors that a user can cause are
printed once, as one block, without a traceback; the exit status is 2 where nothing was started, 1 where a run failed,
130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from mprun.commands import VALUED_FLAGS
from mprun.errors import ConfigError, MprunError, nearest, report

COMMANDS = {
    "train": "one run (the default command); with -m a sweep",
    "compare": "the same experiment under several precisions and seeds: parity, speed, memory, verdict",
    "verify": "runs a recipe with its seeds and holds it to what it expects: verify RECIPE | --all",
    "table": "results of a sweep or of any runs: table [FOLDER ...] --by seed --sort -val/top1 --format csv",
    "plot": "a picture of them: plot [FOLDER ...] --kind curves|parallel --metric val/loss --out FILE.png|svg|html",
    "report": "one HTML page of a run, a sweep or a comparison, for the disk: report [FOLDER | latest] --out FILE",
    "eval": "scores a checkpoint on the validation set, raw and EMA: eval RUN | CHECKPOINT [precision=fp32] --json FILE",
    "search": "the smallest set of modules that must stay FP32: search model=... precision=fp16_dynamic",
    "diagnose": "what FP16 and BF16 would do to each module; recommends precision, loss scale, FP32 modules, and tries them",
    "tune": "searches hyperparameters with Optuna: tune KEY=interval(LOW,HIGH) ... tune.trials=20",
    "rerun": "a past run again, after saying what has changed since: rerun RUN | latest; --dry only says it",
    "resume": "goes on with a run or a sweep: resume RUN | SWEEP | latest",
    "cp": "a copy of a recipe to change: cp RECIPE FILE",
    "env": "this machine: device, dtypes, CPU kernels, versions",
    "list": "groups, options and recipes: mprun list [GROUP]",
    "show": "the resolved configuration, without running it",
    "validate": "every check of a configuration, without training",
    "estimate": "memory by category, module and batch, before a run; measured beside predicted after one",
}

# Commands with a help of their own, their module's docstring: mprun table --help.
OWN_HELP = (
    "compare",
    "verify",
    "table",
    "plot",
    "report",
    "eval",
    "diagnose",
    "tune",
    "rerun",
    "resume",
    "validate",
    "estimate",
    "search",
)

# Hydra's own flags: these are handed to Hydra as they are.
HYDRA_FLAGS = {
    "-m", "--multirun", "--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc", "--resolve",
    "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp",
    "--experimental-rerun", "--run", "-r",
}  # fmt: skip

# A disk that is full or may not be written to: nobody's bug, whichever file meets it first.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

HELP = """mprun: config-driven mixed-precision training

usage: mprun [COMMAND] [key=value ...]        also: python -m mprun

commands
{commands}

examples
  mprun precision=fp16_dynamic model=vit      train a small ViT in FP16 with a dynamic loss scale
  mprun precision=bf16 model=resnet seed=1    BF16 has FP32's range: no loss scale
  mprun -m precision=fp32,bf16,fp16_dynamic   one run for each
  mprun resume=latest train.epochs=120        go on where the newest run stopped
  mprun list precision                        what can follow precision=
  mprun show precision=fp16_static            the whole configuration, with every key

More: mprun COMMAND --help, for {own}.

Hydra's flags work as well: -m/--multirun, --cfg job, --info, --shell-completion, --hydra-help.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    # OpenMP's threads wait for each other by spinning, and where another process has the core a step of 25 ms takes 500.
    # Read when torch is loaded; after a thousand turns (microseconds) they sleep instead.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Hydra then raises its errors instead of printing them, so that each is printed once, here.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        if any(word in ("-h", "--help") for word in words):
            if words[0] in OWN_HELP:
                print((import_module(f"mprun.commands.{words[0]}").__doc__ or "").replace("``", "").strip())
                return 0
            print(help_text(shutil.get_terminal_size().columns), end="")
            return 0
        if "--version" in words:
            from mprun import __version__

            print(f"mprun {__version__}")
            return 0
        command, rest = split(words)
        if command == "help":
            return main(["--help"])
        if command == "train" and any(word.split("=")[0] in HYDRA_FLAGS for word in rest):
            from mprun.commands.multirun import run as hydra_run

            return hydra_run(rest)
        return int(import_module(f"mprun.commands.{command}").run(rest))
    except MprunError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing is left to say. Keep Python from complaining while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        report(
            MprunError(f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room and start again")
        )
        return MprunError.exit_code


def help_text(width: int) -> str:
    """What ``mprun --help`` prints, the list of commands wrapped at ``width`` cells."""
    lines = [
        textwrap.fill(
            f"  {name:<10}{text}",
            max(width, 40),
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in COMMANDS.items()
    ]
    return HELP.format(commands="\n".join(lines), own=", ".join(OWN_HELP))


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command and the rest of the line.

    Raises:
        ConfigError: the first plain word is no command.
    """
    for index, word in enumerate(words):
        if "=" in word or word.startswith(("-", "~", "+")) or (index and words[index - 1] in VALUED_FLAGS):
            continue
        if word in COMMANDS:
            return word, [*words[:index], *words[index + 1 :]]
        if word == "help":
            return "help", []
        raise ConfigError(f"unknown command {word!r}: {nearest(word, COMMANDS)}; options are written key=value")
    return "train", list(words)


def entry() -> None:
    """Console script: exits with the status of :func:`main`."""
    # `python -m` looks for modules in the current folder, a console script does not; a user's own model may lie there.
    # At the end, so that nothing there can stand in for an installed package.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    sys.exit(main())
