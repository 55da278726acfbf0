"""From the words of a sweep to its jobs: every combination, each composed as if it were started alone. No torch.

Composing takes a tenth of a second a job, which is why it is done one by one (:func:`planned`): the first job starts
while the others are not composed yet. A job that cannot be composed is a job all the same, with its reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mprun.compose import Composed, check, check_words, compose, recorded
from mprun.config_check import to_plain
from mprun.errors import ConfigError, MprunError
from mprun.resume import idle_reason
from mprun.sweeps.folder import Job, Sweep, set_aside
from mprun.training.env import config_hash

# Words that say where or how a sweep runs, not what it consists of.
HOW = ("sweep.new", "sweep.jobs", "sweep.on_error", "trust", "hydra/launcher", "hydra.sweep.dir")
BY_HASH = "${mprun_hash:}"
# ``sweep.json`` is written when more than one in so many of the jobs up to here are new.
SAVE_PART = 8


def key_of(word: str) -> str:
    """The key of an override, without its sign."""
    return word.lstrip("+~").partition("=")[0]


def _of_sweep(key: str) -> bool:
    return key == "sweep" or key.startswith(("hydra.", "hydra/", "sweep."))


def identity(ready: Sequence[str]) -> tuple[str, ...]:
    """The words by which a sweep is known again: prepared, without those that only say how it runs."""
    return recorded(
        [word for word in ready if key_of(word) not in HOW and not key_of(word).startswith("hydra.launcher.")]
    )


def expand(ready: Sequence[str], params: dict[str, str]) -> list[Job]:
    """The jobs of prepared words: every combination of the swept values, the last word changing fastest.

    Args:
        ready: as :func:`mprun.compose.prepare` gives them.
        params: swept keys of ``hydra.sweeper.params``; words of the command line win.

    Raises:
        ConfigError: a word sweeps what cannot be swept.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = {key_of(word) for word in ready}
    words = [f"{key}={value}" for key, value in params.items() if key not in given] + list(ready)
    check_words(words)
    choices: dict[str, list[str]] = {}
    swept: set[str] = set()
    for override in OverridesParser.create(config_loader=_loader()).parse_overrides(words):
        key, line = override.get_key_element(), str(override.input_line)
        choices.pop(key, None)  # its place is that of the word that counts
        if not override.is_sweep_override():
            choices[key] = [line]
            swept.discard(key)
            continue
        if _of_sweep(override.key_or_group) or override.key_or_group in ("resume", "trust"):
            raise ConfigError(f"{line}: {override.key_or_group} is the same for all jobs of a sweep; give it one value")
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{line}: a grid needs values, a,b,c or range(...); an interval needs another hydra/sweeper"
            )
        choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        swept.add(key)
    # What a recipe is called is known from here on by its name alone, anywhere.
    kept = {
        key: [*recorded(values)]
        for key, values in choices.items()
        if not _of_sweep(key.lstrip("+~")) or key == "hydra.searchpath"
    }
    jobs = []
    for number, combination in enumerate(itertools.product(*kept.values()), start=1):
        own = tuple(word for key, word in zip(kept, combination, strict=True) if key in swept)
        jobs.append(Job(number, own, combination))
    return jobs


def _loader() -> Any:
    """Hydra's loader, which ``glob(...)`` of a group needs; None before anything was composed."""
    from hydra.core.global_hydra import GlobalHydra

    hydra = GlobalHydra.instance().hydra
    return hydra.config_loader if hydra else None


def default_name(base: DictConfig, jobs: Sequence[Job]) -> str:
    """``sweep.name``, else dataset and model where all jobs share them, else ``sweep``."""
    name = OmegaConf.select(base, "sweep.name")
    if name:
        return str(name)
    groups = {key_of(word).partition(".")[0] for job in jobs for word in job.swept}
    parts = [OmegaConf.select(base, key, default=None) for key in ("dataset.name", "model.name")]
    if groups & {"dataset", "model", "recipe"} or not all(parts):
        return "sweep"
    return "-".join(map(str, parts))


def new_folder(base: DictConfig, jobs: Sequence[Job]) -> Path:
    """Where a new sweep goes: ``hydra.sweep.dir``, by default ``outputs/sweeps/<name>/<stamp>-<uid>``."""
    base.sweep.name = default_name(base, jobs)
    return Path(str(base.hydra.sweep.dir)).expanduser().resolve()


def planned(sweep: Sweep, hydra_words: Sequence[str], *, first: int = 0) -> Iterator[Job]:
    """The jobs of ``sweep`` one by one, composed; ``sweep.jobs`` and ``sweep.json`` follow.

    Args:
        sweep: its jobs may be composed in part already.
        hydra_words: the words that say which folder a job gets, if any. A job whose folder is that of an earlier job with
            another configuration is refused.
        first: so many jobs at the beginning were gone through before.
    """
    seen: dict[str, Job] = {}
    for job in sweep.jobs[:first]:
        if job.hash:
            seen.setdefault(job.folder, job)
    unsaved = 0
    try:
        for index in range(first, len(sweep.jobs)):
            job = sweep.jobs[index]
            if not job.hash:
                job = plan(job, sweep.id, hydra_words)
            if job.hash:
                _forget_refusal(sweep, job)
                earlier = seen.setdefault(job.folder, job)
                if earlier.hash != job.hash:
                    taken = (
                        f"hydra.sweep.subdir gives it the folder of job {earlier.number}, {job.folder}: leave it out"
                    )
                    job = _refused(job, f"ConfigError: {job.label}: {taken}")
                else:
                    job = replace(job, same_as=earlier.number if earlier.number != job.number else None)
            if job != sweep.jobs[index]:
                sweep.jobs[index] = job
                unsaved += 1
            # The file holds all jobs: written after each of them it would cost the square of their number. What a kill
            # loses is composed again, and gets the same folder, unless words that may look at the clock say which.
            if unsaved and (hydra_words or unsaved * SAVE_PART > index):
                sweep.save()
                unsaved = 0
            yield job
    finally:
        if unsaved:
            sweep.save()


def plan(job: Job, group: str, hydra_words: Sequence[str] = ()) -> Job:
    """Compose one job: its hash, its folder, and the words that it needs. What is wrong with it becomes its ``error``.

    A swept word that does nothing beside the others (a loss scale where the precision is FP32) would be refused in a single
    run. In a grid it cannot be helped, so it is left out, and jobs that differ in nothing else become one.
    """
    try:
        composed = compose([*job.words, *hydra_words])
        plain = to_plain(composed.config)
        idle = {word for word in job.words if idle_reason(key_of(word), plain) and key_of(word) != "train.epochs"}
        if idle and job.swept:
            kept = tuple(word for word in job.words if word not in idle)
            job = replace(job, words=kept, left_out=tuple(sorted(idle)))
            composed = compose([*job.words, *hydra_words])
            plain = to_plain(composed.config)
    except MprunError as error:
        return _refused(job, f"{type(error).__name__}: {error}")
    words = job.words
    if composed.config.tracking.group is None:
        words = (*(word for word in words if key_of(word) != "tracking.group"), f"tracking.group={group}")
    digest = config_hash(plain)
    return replace(job, words=words, hash=digest, folder=_subdir(composed, plain, digest, job.number), error="")


def _refused(job: Job, error: str) -> Job:
    return replace(job, hash="", folder=_refusal(job), error=error)


def _refusal(job: Job) -> str:
    """The name of the folder that says why a job is refused, the same whenever its sweep is issued."""
    return f"refused-{hashlib.sha256(json.dumps(job.swept).encode()).hexdigest()[:12]}"


def _forget_refusal(sweep: Sweep, job: Job) -> None:
    """What was wrong with a job has been mended: its old refusal is no row of a table any more."""
    folder = sweep.folder / _refusal(job)
    with suppress(OSError):  # another process may be faster
        if folder.is_dir():
            set_aside(sweep.folder, folder)
            folder.rmdir()


def _subdir(composed: Composed, plain: dict[str, Any], digest: str, number: int) -> str:
    """``hydra.sweep.subdir`` of a job."""
    node = OmegaConf.to_container(composed.hydra, resolve=False)
    assert isinstance(node, dict), "hydra is a mapping"
    if node["sweep"]["subdir"] == BY_HASH:
        return digest
    whole = OmegaConf.create({**plain, "hydra": node})
    OmegaConf.update(whole, "hydra.job.num", number - 1)
    return str(OmegaConf.select(whole, "hydra.sweep.subdir"))


def hash_of(root: DictConfig) -> str:
    """The hash of the configuration in ``root``, Hydra's whole one of a job: what the resolver ``mprun_hash`` gives."""
    node = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
    folder = OmegaConf.select(root, "hydra.runtime.cwd", default="")
    try:
        return config_hash(to_plain(check(node, command="train", folder=str(folder))))
    except MprunError:
        text = json.dumps(OmegaConf.to_container(node, resolve=False), sort_keys=True, default=str)
        return f"refused-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def refuse(words: Sequence[str], jobs: Sequence[Job]) -> None:
    """Refuse a sweep none of whose jobs could run: an unknown key, or a run to resume.

    Raises:
        ConfigError: names the word.
    """
    for word in words:
        if key_of(word) == "resume" and word.partition("=")[2] not in ("null", ""):
            raise ConfigError(
                f"{word} continues one run: give it without -m; the same sweep again goes on by itself, or mprun resume SWEEP"
            )
    if jobs and (match := re.match(r"ConfigError: unknown key ([\w.]+)", jobs[0].error)):
        given = {key_of(word) for word in words}
        if match[1] in given or any(key.startswith(match[1]) for key in given):
            raise ConfigError(jobs[0].error.removeprefix("ConfigError: "))
