"""``mprun tune``: a search for good hyperparameters, with Optuna.

    mprun tune 'optimizer.lr=tag(log,interval(1e-4,1e-2))' precision=fp16_dynamic,bf16 tune.trials=20

Keys with a range are searched, everything else is fixed for all trials. Ranges are in Hydra's grammar:
    optimizer.lr='tag(log,interval(1e-4,1e-2))'   uniform in the logarithm
    optimizer.weight_decay='interval(0,0.1)'      uniform
    model.kwargs.depth='int(interval(2,6))'       a whole number from 2 to 6
    train.batch_size='range(32,129,32)'           32, 64, 96, 128
    precision=fp16_dynamic,bf16                   one of them; also choice(fp16_dynamic,bf16)

tune.trials=20         how many finished trials the study is to have in all
tune.study=NAME        its name (dataset and model); its folder is outputs/tune/NAME
tune.storage=URL       a file or a database URL (study.db in that folder)
tune.metric=val/loss   what is optimized (what a run calls its best)
tune.direction=...     minimize or maximize (as the metric says)
tune.sampler=tpe       or random
tune.pruner=median     or hyperband, none: who stops bad trials early
tune.warmup=3          evaluations of a trial before it may be stopped early
tune.startup=5         finished trials before one may be stopped early
tune.jobs=1            trials at once; or start the same command several times
tune.timeout_s=3600    after that no further trial is started
tune.seed=0            of the sampler
tune.verbose=true      show Optuna's own log

Each trial is a run in outputs/tune/NAME/<number>. The same command again goes on with the study.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mprun.compose import compose
from mprun.errors import ConfigError
from mprun.runs import OUTPUTS, slug
from mprun.tuning.settings import PREFIX, TuneConfig, completed, read_settings
from mprun.tuning.space import Parameter, idle_keys, key_of, split_space

FOLDER = "tune"


def run(words: Sequence[str]) -> int:
    """Work on a study. Returns 0, 1 if no trial was completed, 130 or 143 after a signal.

    Raises:
        ConfigError: the words do not fit, or the study cannot be used. No trial was started.
    """
    if flags := [word for word in words if word.startswith("-") or "=" not in word]:
        raise ConfigError(f"tune does not know {flags[0]}: write key=value (see mprun tune --help)")
    settings = read_settings([word for word in words if word.startswith(PREFIX)])
    space, fixed = split_space([word for word in words if not word.startswith(PREFIX)])
    check_words(space, fixed)
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError("tune needs Optuna: pip install 'mprun[optuna]'") from error
    try:
        first = compose([*fixed, *(part.word(part.probes()[0]) for part in space)])
    except ConfigError:
        check_space(space, fixed)  # says it better
        raise
    settings = completed(settings, first.config)
    folder = Path(OUTPUTS, FOLDER, slug(str(settings.study))).absolute()
    if not folder.exists():  # an earlier worker has checked them
        for warning in check_space(space, fixed):
            print(f"mprun: warning: {warning}", file=sys.stderr)
    return _work(settings, space, fixed, folder)


def _work(settings: TuneConfig, space: Sequence[Parameter], fixed: Sequence[str], folder: Path) -> int:
    from mprun.sweeps.pool import threads
    from mprun.tuning.outcome import conclude
    from mprun.tuning.study import ended, open_study
    from mprun.tuning.worker import Worker, work

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the study's folder {folder}: {error.strerror}") from error
    study = open_study(settings, folder, space, fixed)
    grouped = [*fixed]
    if not any(word.startswith("tracking.group=") for word in fixed):
        grouped.append(f"tracking.group={slug(str(settings.study))}")
    worker = Worker(study, settings, space, grouped, folder, lambda line: print(line, flush=True))
    done = len(ended(study))
    keys = ", ".join(part.key for part in space)
    print(f"study {settings.study}: {done} of {settings.trials} trials; {settings.metric} over {keys}; in {folder}")
    if share := threads(settings.jobs, os.environ).get("OMP_NUM_THREADS"):
        print(f"{settings.jobs} trials at once, each with OMP_NUM_THREADS={share}")
    stop = None
    try:
        stop = work(worker)
    finally:
        found = conclude(study, settings, space, fixed, folder)
    return 128 + stop if stop is not None else 0 if found else 1


def check_words(space: Sequence[Parameter], fixed: Sequence[str]) -> None:
    """Refuse what a search has no use for.

    Raises:
        ConfigError: names the word.
    """
    if not space:
        raise ConfigError(
            "tune needs a key to search, in Hydra's grammar: 'optimizer.lr=tag(log,interval(1e-4,1e-2))'\n"
            "see mprun tune --help; for a single run write mprun train"
        )
    for word in fixed:
        key = key_of(word)
        if key == "resume" or key.startswith("hydra"):
            raise ConfigError(f"{word}: every trial is a new run in a folder of its own; leave it out")


def check_space(space: Sequence[Parameter], fixed: Sequence[str]) -> list[str]:
    """Compose every choice and the ends of every range, so that a value that is never legal costs no trial.

    Returns:
        A warning for each value that is legal alone, but not beside the first values of the other keys.

    Raises:
        ConfigError: a value is not legal by itself, or a fixed word never does anything.
    """
    warnings = []
    idle = {key_of(word) for word in fixed}
    for part in space:
        others = [other.word(other.probes()[0]) for other in space if other is not part]
        for value in part.probes():
            word = part.word(value)
            try:
                idle &= idle_keys([*fixed, *others, word])
                continue
            except ConfigError as error:
                reason = error
            try:
                idle &= idle_keys([*fixed, word])
            except ConfigError as error:
                raise ConfigError(f"{word} is among what is searched: {error}{_hint(part)}") from error
            warnings.append(f"{word} fails beside {' '.join(others)}: {str(reason).splitlines()[0]}")
    if idle:
        raise ConfigError(f"{', '.join(sorted(idle))} does nothing in any of these trials; leave it out")
    return warnings


def _hint(part: Parameter) -> str:
    continuous = not part.choices and part.step is None
    return f"\nfor whole numbers write {part.key}=int({part.text})" if continuous else ""
