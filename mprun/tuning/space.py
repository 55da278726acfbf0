"""The search space, in Hydra's own grammar of sweeps, and what each part means for the sampler.

    optimizer.lr=tag(log,interval(1e-4,1e-2))     a float, uniform in its logarithm
    optimizer.weight_decay=interval(0,0.1)        a float, uniform
    model.kwargs.depth=int(interval(2,6))         a whole number, both ends included
    train.batch_size=range(32,129,32)             32, 64, 96 or 128: range excludes its end, as Python's
    precision=choice(fp16_dynamic,bf16)           one of them, without an order; also precision=fp16_dynamic,bf16

The values of a choice are kept as the text that follows ``key=``, so a choice may be an option of a group, a list, or
anything else that can be written there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.errors import ConfigError
from mprun.options import GROUPS, options
from mprun.resume import idle_reason

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = float | int | str

# What no search may vary, with the reason.
FORBIDDEN = {
    "seed": "the best of several seeds is luck, and no better model; compare seeds with mprun -m 'seed=range(3)'",
    "resume": "a trial is a new run",
    "trust": "it is no hyperparameter",
    "command": "it is no hyperparameter",
    "name": "it is no hyperparameter",
    "device": "it is no hyperparameter",
}
ASIDE = ("tracking", "probe", "hydra", "meta", "expect")


@dataclass(frozen=True)
class Parameter:
    """One searched key.

    Attributes:
        key: as typed, with ``+`` if there was one.
        text: what follows ``=``, as typed.
        choices: the texts to choose from; empty for a number.
        low: smallest value of a number, inclusive.
        high: largest value of a number, inclusive.
        step: the distance of neighbours; None for a continuous number.
        log: whether the logarithm is uniform.
    """

    key: str
    text: str
    choices: tuple[str, ...] = ()
    low: float | int = 0
    high: float | int = 0
    step: float | int | None = None
    log: bool = False

    def word(self, value: Value) -> str:
        """The override that gives this key ``value``."""
        return f"{self.key}={value}" if isinstance(value, str) else f"{self.key}={value!r}"

    def distribution(self) -> BaseDistribution:
        """What Optuna draws from."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log, step=int(self.step or 1))
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def probes(self) -> list[Value]:
        """Values that stand for all: every choice; both ends of a number, and one between them."""
        if self.choices:
            return list(self.choices)
        if self.step is not None:
            return list(dict.fromkeys((self.low, min(self.low + self.step, self.high), self.high)))
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [self.low, middle, self.high]


def split_space(words: Sequence[str]) -> tuple[list[Parameter], list[str]]:
    """The searched keys of ``words``, and the other words as they are.

    Raises:
        ConfigError: a sweep that cannot be searched, or a key that is given twice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    space: list[Parameter] = []
    fixed: list[str] = []
    for word in words:
        # choice() of Hydra's refuses null, which the same words without the function take.
        plain = re.sub(r"=choice\((.*,.*)\)$", r"=\1", word)
        for form in dict.fromkeys((word, plain)):
            with suppress(HydraException):
                parsed = parser.parse_override(form)
                break
        else:
            fixed.append(word)  # a path, perhaps: composing quotes it, or says what is wrong with it
            continue
        if parsed.is_sweep_override():
            space.append(parameter(word, parsed))
        else:
            fixed.append(word)
    seen: set[str] = set()
    for key in [key_of(parameter.key) for parameter in space] + [key_of(word) for word in fixed]:
        if key in seen and any(key == key_of(parameter.key) for parameter in space):
            raise ConfigError(f"{key} is given twice: search it or fix it")
        seen.add(key)
    return space, fixed


def words_of(fixed: Sequence[str], space: Sequence[Parameter], params: Mapping[str, Value]) -> list[str]:
    """The overrides of a trial: ``fixed``, and each searched key with its value.

    A key that does nothing beside the others (a loss scale where the precision is FP32) would be refused in a single run.
    In a search it cannot be helped, so it is left out.

    Raises:
        ConfigError: the values are not legal together.
    """
    words = [*fixed, *(part.word(params[part.key]) for part in space)]
    idle = idle_keys(words)
    return [word for word in words if key_of(word) not in idle]


def idle_keys(words: Sequence[str]) -> set[str]:
    """The keys of ``words`` that do nothing beside the others; ``train.epochs`` beside ``train.steps`` may (steps win).

    Raises:
        ConfigError: the words are not legal together.
    """
    plain = to_plain(compose(words).config)
    return {key for key in map(key_of, words) if key != "train.epochs" and idle_reason(key, plain)}


def key_of(word: str) -> str:
    """The key of an override, without the ``+`` of Hydra's grammar."""
    return word.lstrip("+").partition("=")[0]


def parameter(word: str, parsed: Any) -> Parameter:
    """The searched key of ``word``, which Hydra's parser read as the sweep ``parsed``.

    Raises:
        ConfigError: it cannot be searched.
    """
    key, _, text = word.partition("=")
    name = key_of(key)
    if name in FORBIDDEN or name.partition(".")[0] in ASIDE:
        raise ConfigError(f"{word}: {name} cannot be searched: {FORBIDDEN.get(name, 'it changes no number of a run')}")
    if parsed.is_delete():
        raise ConfigError(f"{word}: a key cannot be deleted; search {name}=choice(null, ...) instead")
    value = parsed._value
    log = "log" in getattr(value, "tags", ())
    if strange := sorted(set(getattr(value, "tags", ())) - {"log"}):
        raise ConfigError(f"{word}: unknown tag {strange[0]}; the only tag is log")
    if getattr(value, "shuffle", False):
        raise ConfigError(f"{word}: the order of what is searched plays no part; leave out shuffle()")
    if parsed.is_interval_sweep():
        return _interval(word, key, text, value, log)
    if parsed.is_range_sweep():
        return _range(word, key, text, value, log)
    if log:
        raise ConfigError(f"{word}: a choice has no logarithm; tag(log, ...) is for interval()")
    return Parameter(key, text, choices=_choices(word, name, parsed))


def _interval(word: str, key: str, text: str, sweep: Any, log: bool) -> Parameter:
    low, high = sweep.start, sweep.end
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{word}: an interval goes from a number to a larger one")
    if log and low <= 0:
        raise ConfigError(f"{word}: a logarithm needs numbers above 0, not {low:g}")
    return Parameter(key, text, low=low, high=high, step=1 if isinstance(low, int) else None, log=log)


def _range(word: str, key: str, text: str, sweep: Any, log: bool) -> Parameter:
    start, stop, step = (Decimal(str(part)) for part in (sweep.start, sweep.stop, sweep.step))
    count = math.ceil((stop - start) / step) if step else 0
    if count < 1:
        raise ConfigError(f"{word}: the range is empty")
    if log and (step != 1 or start <= 0):
        raise ConfigError(f"{word}: tag(log, ...) of a range needs a step of 1 and numbers above 0; or use interval()")
    ends = sorted((start, start + (count - 1) * step))
    kind: Any = int if all(isinstance(part, int) for part in (sweep.start, sweep.stop, sweep.step)) else float
    return Parameter(key, text, low=kind(ends[0]), high=kind(ends[1]), step=kind(abs(step)), log=log)


def _choices(word: str, name: str, parsed: Any) -> tuple[str, ...]:
    from hydra.core.override_parser.types import Glob

    if isinstance(parsed._value, Glob):
        if name not in GROUPS:
            raise ConfigError(f"{word}: glob() chooses among the options of a group: {', '.join(GROUPS)}")
        found = tuple(parsed._value.filter(list(options(name))))
    else:
        found = tuple(parsed.sweep_string_iterator())
    if not found:
        raise ConfigError(f"{word}: there is nothing to choose from")
    if len(set(found)) < len(found):
        raise ConfigError(f"{word}: a choice is there twice")
    return found
