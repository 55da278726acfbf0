"""``mprun validate [overrides]``: every check that needs no training. Imports no torch.

Checked: keys, types, ranges, rules between keys, names, ``kwargs`` against the builders' signatures, and with ``resume=``
what a resumed run would refuse. Not checked, and said so: what only the model, the data or the device can say.
``--all`` checks every recipe, one line each.
"""

from __future__ import annotations

from collections.abc import Sequence

from mprun.compose import compose_run
from mprun.config_check import to_plain
from mprun.errors import ConfigError, MprunError
from mprun.options import list_recipes
from mprun.resume import lines_of

UNCHECKED = (
    "not checked here: model and data are built at the start of training; FP32 rules, values of kwargs and the device are "
    "checked there"
)


def run(words: Sequence[str]) -> int:
    """Check and say so. An error is raised, and printed by the caller; with ``--all`` it is the line of its recipe.

    Returns:
        0; with ``--all`` 2 if any recipe is not valid.
    """
    flags = [word for word in words if word.startswith("-")]
    overrides = [word for word in words if not word.startswith("-")]
    if unknown := [flag for flag in flags if flag != "--all"]:
        raise ConfigError(f"validate does not know {unknown[0]}: legal: --all, which checks every recipe")
    if not flags:
        for line in _check(overrides):
            print(line)
        print(UNCHECKED)
        return 0
    if given := [word for word in overrides if word.lstrip("+").startswith(("recipe=", "resume="))]:
        raise ConfigError(f"validate --all goes through every recipe: {given[0]} cannot be given with it")
    names = list_recipes()
    bad = 0
    width = max((len(name) for name in names), default=0)
    for name in names:
        try:
            said = _check([f"recipe={name}", *overrides])[0].replace(f"recipe={name} ", "")
        except MprunError as error:
            bad += 1
            said = "error: " + "; ".join(str(error).splitlines())
        print(f"{name:<{width}}  {said}")
    print(f"{len(names)} recipes, {f'{bad} not valid' if bad else 'all valid'}; {UNCHECKED}")
    return 2 if bad else 0


def _check(overrides: Sequence[str]) -> list[str]:
    """What was found valid, and what a resume would change."""
    composed, resume = compose_run(overrides)
    # What stands for no choice is not said: train=default, recipe=none.
    chosen = " ".join(
        f"{group}={option}" for group, option in composed.choices.items() if option not in ("default", "none")
    )
    lines = [f"valid: {chosen}"]
    if resume is not None:
        saved = resume.saved_config()
        changed = resume.check(saved, to_plain(composed.config)) if saved is not None else {}
        lines.append(f"resumes {resume.checkpoint}")
        lines += lines_of(changed)
        if saved is None:
            lines.append(
                "not checked here: the checkpoint is in no run folder; what it was made with is compared at the start"
            )
    return lines
