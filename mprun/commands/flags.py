"""The words of a command that takes folders and flags: ``table [FOLDER ...] --sort KEY``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mprun.errors import ConfigError, nearest


@dataclass(frozen=True)
class Words:
    """Plain words, and for each flag that was given its values; a flag without a value has an empty one."""

    plain: tuple[str, ...]
    flags: Mapping[str, tuple[str, ...]]

    def one(self, flag: str, default: str = "") -> str:
        """The value of a flag; the last one where it was given several times."""
        return self.flags.get(flag, (default,))[-1]

    def many(self, flag: str) -> list[str]:
        """Every value of a flag, also of ``a,b``."""
        return [part for value in self.flags.get(flag, ()) for part in value.split(",") if part]

    def choice(self, flag: str, legal: Sequence[str]) -> str:
        """The value of a flag with few legal words, the first of which is the default.

        Raises:
            ConfigError: another word.
        """
        value = self.one(flag, legal[0])
        if value not in legal:
            raise ConfigError(f"{flag} {value}: there is no such choice: {nearest(value, legal)}")
        return value

    def count(self, flag: str) -> int | None:
        """The value of a flag as a positive whole number; None if it was not given.

        Raises:
            ConfigError: no positive whole number.
        """
        if flag not in self.flags:
            return None
        value = self.one(flag)
        if not (value.isascii() and value.isdigit() and int(value)):
            raise ConfigError(f"{flag} {value}: must be a positive whole number")
        return int(value)


def parse(words: Sequence[str], command: str, *, valued: Collection[str], switches: Collection[str] = ()) -> Words:
    """Sort the words of ``command``. A value follows its flag, or stands in ``--flag=value``; it may begin with ``-``.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or a ``key=value`` that belongs to none.
    """
    plain: list[str] = []
    flags: dict[str, tuple[str, ...]] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            if equals:
                raise ConfigError(
                    f"{command} reads runs and does not change them: {word} is no folder\n{_hint(word, valued)}"
                )
            plain.append(word)
            continue
        if flag in switches and not equals:
            value = ""
        elif flag in valued:
            value = value if equals else next(rest, "")
            if not value:
                raise ConfigError(f"{command} {flag} needs a value, as in {flag}=VALUE")
        else:
            raise ConfigError(f"{command} does not know {flag}: {nearest(flag, [*valued, *switches])}")
        flags[flag] = (*flags.get(flag, ()), value)
    return Words(tuple(plain), flags)


def _hint(word: str, valued: Collection[str]) -> str:
    return f"to choose among them write --filter {word}" if "--filter" in valued else "see --help"
