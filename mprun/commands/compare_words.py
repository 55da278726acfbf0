"""The words of ``mprun compare``: what belongs to the comparison, and what to the experiment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mprun.compose import compose, prepare, recorded
from mprun.config import Config, Task
from mprun.config_check import METRICS
from mprun.errors import ConfigError, nearest
from mprun.report.summary import shown_path
from mprun.sweeps.plan import key_of

LISTS = ("compare.precisions", "compare.seeds", "compare.gradient_steps")


@dataclass(frozen=True)
class Asked:
    """A comparison as asked for.

    Attributes:
        config: of the experiment; its ``compare`` and ``sweep`` hold.
        policies: label -> the word that chooses it, as a run takes it.
        seeds: in order.
        metric: by which is judged.
        base: words of every run.
        own: words of the comparison itself.
        again: all words that ask for the same, as far as a folder may say them.
    """

    config: Config
    policies: Mapping[str, str]
    seeds: tuple[int, ...]
    metric: str
    base: tuple[str, ...]
    own: tuple[str, ...]
    again: tuple[str, ...]


def read(words: Sequence[str]) -> Asked:
    """What the words ask for.

    Raises:
        ConfigError: names the word.
    """
    listed = [_listed(word) for word in words]
    own = [word for word in listed if key_of(word).startswith("compare.")]
    base = [word for word in listed if word not in own]
    _refuse_words(base)
    # Every policy is composed for itself later. What goes for all of them must not be refused for the default one, which may not
    # be among them: FP32 takes every loss scale.
    config = compose([*base, "precision=fp32", *own]).config
    asked = config.compare
    policies = _policies(asked.precisions)
    if asked.baseline not in policies:
        raise ConfigError(
            f"compare.baseline={asked.baseline} is not among compare.precisions={','.join(policies)}: add it there, or choose "
            "one of them"
        )
    if len(policies) < 2:
        raise ConfigError(f"compare.precisions={','.join(policies)}: a comparison needs two at least, as in fp32,bf16")
    seeds = asked.seeds if isinstance(asked.seeds, list) else [config.seed + index for index in range(asked.seeds)]
    if isinstance(asked.seeds, list) and any(key_of(word) == "seed" for word in base):
        raise ConfigError("seed= and a list of compare.seeds: one of them says which seeds are run")
    runs = [word for word in base if key_of(word) != "seed" and not key_of(word).startswith("sweep")]
    # Without trust, which only the command line of the day gives: a folder may come from a stranger.
    again = (*recorded(prepare([word for word in base if key_of(word) != "trust"])), *own)
    return Asked(config, policies, tuple(seeds), _metric(config), recorded(prepare(runs)), tuple(own), again)


def _listed(word: str) -> str:
    """``compare.seeds=0,1`` as the list that it is, where Hydra reads a sweep."""
    key, equals, value = word.partition("=")
    value = value.strip()
    if key not in LISTS or not equals or value.startswith("[") or (key == "compare.seeds" and "," not in value):
        return word
    quoted = (
        [_quoted(part.strip()) for part in value.split(",") if part.strip()]
        if value not in ("null", "none", "off")
        else []
    )
    return f"{key}=[{','.join(quoted)}]"


def _quoted(text: str) -> str:
    bare = text.strip("'\"")
    return bare if bare.replace("_", "").isalnum() else '"' + bare.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _refuse_words(base: Sequence[str]) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for word in base:
        key = key_of(word)
        if word.startswith("-") or ("=" not in word and not word.startswith("~")):
            raise ConfigError(f"compare does not know {word}: write key=value (see mprun compare --help)")
        if key == "precision":
            raise ConfigError(
                f"{word}: a comparison has several; write compare.precisions=fp32,{word.partition('=')[2]}"
            )
        if key == "resume" or (key.partition("/")[0].partition(".")[0] == "hydra" and key != "hydra.searchpath"):
            raise ConfigError(f"{word}: every run of a comparison is a new one in a folder of its own; leave it out")
        ready = prepare([word])[0]
        if not key.startswith("recipe") and parser.parse_override(ready).is_sweep_override():
            raise ConfigError(
                f"{word}: a comparison is of one experiment; give {key} one value (several seeds: compare.seeds)"
            )


def _policies(names: Sequence[str]) -> dict[str, str]:
    """Label -> word. A file goes by its stem, a second one of that stem by ``stem-2``: a path as a label fills the table.

    Raises:
        ConfigError: one is given twice.
    """
    found: dict[str, str] = {}
    for name in names:
        label = stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
        word = recorded(prepare([f"precision={name}"]))[0]
        if word in found.values():
            raise ConfigError(f"compare.precisions names {name} twice")
        number = 1
        while label in found:
            number += 1
            label = f"{stem}-{number}"
        found[label] = word
    return found


def namesakes(policies: Mapping[str, str]) -> list[str]:
    """A line for each policy file that has its stem in common with another one: which file it is."""
    given = {label: word.partition("=")[2].strip("'\"") for label, word in policies.items()}
    files = {label: Path(name) for label, name in given.items() if name.endswith((".yaml", ".yml"))}
    stems = [file.stem for file in files.values()]
    same = {label: file for label, file in files.items() if stems.count(file.stem) > 1 or label != file.stem}
    return [f"{label} is {shown_path(file)}" for label, file in same.items()]


def _metric(config: Config) -> str:
    """``compare.metric``, by default what a run calls its best."""
    asked, regression = config.compare.metric, config.dataset.task is Task.regression
    if asked is None:
        return "val/top1" if config.dataset.task is Task.classification else "val/loss"
    if asked not in METRICS:
        raise ConfigError(f"compare.metric={asked} is never measured: {nearest(asked, METRICS)}")
    if (asked.startswith("ema/") and config.train.ema.decay is None) or (asked.endswith("top1") and regression):
        raise ConfigError(f"compare.metric={asked} is not measured in these runs; use val/loss")
    return asked
