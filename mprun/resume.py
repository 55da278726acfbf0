"""What ``resume=`` means for a configuration. Imports no torch.

A resumed run goes on in its own folder with its own saved overrides, and with the new ones of the command line on top.
Nothing of the new ones is ignored. Each key of the schema belongs to one kind (:func:`kind_of`):

* *fixed*: another value would make the run another run; refused by name (:data:`FIXED`);
* *conditional*: in force, but only beside certain values of another key (:data:`NEEDS`). Given without that, it would
  be ignored, so it is refused by name; changed by an option such as ``precision=bf16``, which sets all keys of its
  group, it is harmless;
* *in force*: at once, from the first resumed step, and reported.

Words that are not about the configuration (``hydra.*``, another ``recipe=``) act when a run's folder is made, which is
past: they are refused too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mprun.errors import CheckpointError
from mprun.runs import find_checkpoint, run_folder

# What the saved state was made with: another value would not continue the run.
FIXED = (
    "seed", "model.name", "model.source", "model.kwargs", "model.init",
    "dataset.name", "dataset.source", "dataset.task", "dataset.kwargs", "dataset.augment", "dataset.limit",
    "dataset.mixup", "dataset.cutmix",
    "optimizer.name", "train.batch_size", "train.accumulate", "train.shuffle", "train.drop_last",
)  # fmt: skip

# Of the command line itself, not of the run: what they say at this start holds for this start.
OF_THE_START = ("resume", "command", "trust", "sweep", "compare", "diagnose", "search")

# Keys that do something only beside certain values of another key, which is named with what it must be.
NEEDS: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    **{
        f"precision.loss_scale.{key}": ("precision.loss_scale.kind", "static or dynamic", lambda kind: kind != "none")
        for key in ("init", "min", "max")  # the limits hold for a static scale's init, too
    },
    **{
        f"precision.loss_scale.{key}": ("precision.loss_scale.kind", "dynamic", lambda kind: kind == "dynamic")
        for key in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "on_overflow")
    },
    "schedule.warmup_frac": ("schedule.warmup_steps", "null", lambda steps: steps is None),
    "schedule.final": ("schedule.name", "other than constant", lambda name: name != "constant"),
    "schedule.decay_frac": ("schedule.name", "wsd", lambda name: name == "wsd"),
    "schedule.milestones": ("schedule.name", "step", lambda name: name == "step"),
    "schedule.gamma": ("schedule.name", "step", lambda name: name == "step"),
    "train.epochs": ("train.steps", "null (train.steps wins over epochs)", lambda steps: steps is None),
    "train.ema.warmup": ("train.ema.decay", "set", lambda decay: decay is not None),
    "train.keep": ("train.checkpoint_every", "set", lambda every: every is not None),
    "train.early_stop.patience": ("train.early_stop.metric", "set", lambda metric: metric is not None),
    "probe.modules": ("probe.every", "above 0", lambda every: every > 0),
    "numerics.cpu_fp16": ("device", "cpu or auto", lambda device: device != "cuda"),
}

# Under precision.mode=pure the parameters are the only truth, in the very dtypes that these keys give them.
PURE = (
    "precision.mode", "precision.param_dtype", "precision.compute_dtype", "precision.output_dtype", "precision.fp32_modules",
)  # fmt: skip


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from, the overrides that its run was started with, and the new ones."""

    checkpoint: Path
    run_dir: Path | None
    overrides: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The overrides of the resumed run."""
        return merge(self.overrides, self.given)

    def saved_config(self) -> dict[str, Any] | None:
        """The configuration in the run folder, or None for a checkpoint outside of one."""
        if self.run_dir is None:
            return None
        plain = OmegaConf.to_container(OmegaConf.load(self.run_dir / "config.yaml"))
        return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else None

    def check(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What changes between two plain configurations, as far as all of it may.

        Returns:
            Dotted keys with the saved and the present value.

        Raises:
            CheckpointError: names every key that cannot come into force, with both values.
        """
        changed = changes(saved, now)
        refuse_fixed(changed, saved, self.checkpoint)
        given = {_key(word) for word in self.given}
        idle = [idle_reason(key, now) for key in sorted(given & changed.keys())]
        if any(idle):
            raise CheckpointError(
                "; ".join(filter(None, idle))
                + "\nleave it out, or change the other key as well: nothing is ignored at resume"
            )
        return changed


def find(overrides: Sequence[str]) -> Resume | None:
    """What the last ``resume=`` of ``overrides`` asks for; None without one, and for ``auto`` where there is no run yet.

    ``auto`` looks into ``hydra.run.dir`` if that is given, otherwise for the latest run.

    Raises:
        CheckpointError: nothing is there to resume, or a word cannot come into force.
    """
    target = _plain(_last(overrides, "resume"))
    if target.lower() in ("", "null", "no", "off", "none", "false"):
        return None
    try:
        checkpoint = find_checkpoint(
            (_plain(_last(overrides, "hydra.run.dir")) or "latest") if target == "auto" else target
        )
    except CheckpointError:
        if target == "auto":
            return None
        raise
    folder = run_folder(checkpoint)
    saved: tuple[str, ...] = ()
    if folder is not None and (folder / ".hydra" / "overrides.yaml").is_file():
        saved = tuple(str(item) for item in OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
    resume = Resume(checkpoint, folder, saved, tuple(overrides))
    if folder is not None:
        _refuse_words(resume, folder)
    return resume


def wants_auto(overrides: Sequence[str]) -> bool:
    """Whether the command line says ``resume=auto``: go on if there is something to go on from, else start."""
    return _plain(_last(overrides, "resume")) == "auto"


def merge(saved: Sequence[str], new: Sequence[str]) -> list[str]:
    """``saved`` overrides with ``new`` ones on top: a key that is given anew loses its saved value.

    ``trust`` is not taken over: only the command line gives it, and a run folder may come from a stranger.
    """
    given = {_key(word) for word in new} | {"resume", "trust"}
    return [word for word in saved if _key(word) not in given] + list(new)


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with the saved and the present value."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(saved.keys() | now.keys()):
        full, old, new = f"{path}{key}", saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= changes(old, new, f"{full}.")
        elif old != new and kind_of(full) != "start":
            found[full] = (old, new)
    return found


def lines_of(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """One line for people about each change."""
    return [f"resume: {key} {_short(old)} -> {_short(new)}" for key, (old, new) in changed.items()]


def kind_of(key: str) -> str:
    """What becomes of a change of ``key`` at resume: ``fixed``, ``conditional``, ``start`` or ``in force``."""
    if key.partition(".")[0] in OF_THE_START:
        return "start"
    if any(key == item or key.startswith(f"{item}.") for item in FIXED):
        return "fixed"
    return "conditional" if key in NEEDS else "in force"


def idle_reason(key: str, config: Mapping[str, Any]) -> str:
    """Why ``key`` does nothing in the plain ``config``; empty if it does something."""
    if key not in NEEDS:
        return ""
    other, wanted, fits = NEEDS[key]
    value = _at(config, other)
    return "" if fits(value) else f"{key} does nothing while {other} is {_shown(value)}: it needs {other} {wanted}"


def idle_words(words: Sequence[str], now: Mapping[str, Any]) -> list[str]:
    """Why words of a command line would do nothing in the plain configuration ``now``; empty if all of them do something.

    A recipe or an option may set what another option makes idle, so that any ``precision=`` can follow any recipe; a word
    that somebody has typed must not be ignored, unless it switches something off. (``train.epochs`` beside ``train.steps``
    is ignored: steps win.)
    """
    keys = {_key(word) for word in words} - {"train.epochs"}
    return [reason for key in sorted(keys) if (reason := idle_reason(key, now)) and _at(now, key) is not None]


def may_idle(words: Sequence[str]) -> bool:
    """Whether any of ``words`` is about a key that :func:`idle_words` could name, before the configuration is at hand."""
    return any(_key(word) in NEEDS for word in words)


def refuse_fixed(changed: Mapping[str, tuple[Any, Any]], saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse changes under which the saved state would not be this run's state, or which could not come into force.

    Args:
        changed: from :func:`changes`.
        saved: the saved configuration.
        checkpoint: named in the message.

    Raises:
        CheckpointError: names every such key with both values.
    """
    fixed = [key for key in changed if kind_of(key) == "fixed"]
    scale, mode = "precision.loss_scale.kind", "precision.mode"
    if "precision.loss_scale.init" in changed and _at(saved, scale) == "dynamic" and scale not in changed:
        fixed.append("precision.loss_scale.init")  # the saved scale goes on, so another start would be ignored
    if "pure" in changed.get(mode, (_at(saved, mode),)):
        fixed += [key for key in PURE if key in changed]
    if fixed:
        listed = "; ".join(f"{key} was {_shown(changed[key][0])}, now {_shown(changed[key][1])}" for key in fixed)
        why = "; precision.mode=pure keeps no FP32 parameters" if any(key in PURE for key in fixed) else ""
        raise CheckpointError(
            f"{checkpoint} cannot be resumed with other values of: {listed}\nstart a new run for these{why}"
        )
    if "train.ema.decay" in changed and changed["train.ema.decay"][0] is None:
        raise CheckpointError(
            f"{checkpoint} holds no EMA, so train.ema.decay={changed['train.ema.decay'][1]} cannot begin here\n"
            "resume without it, or start a new run"
        )


def _refuse_words(resume: Resume, folder: Path) -> None:
    """Refuse words that act when a run's folder is made: ``hydra.*``, and ``recipe=`` other than the run's own.

    Raises:
        CheckpointError: names the word.
    """
    for word in resume.given:
        key, value = _key(word), word.partition("=")[2]
        if key.startswith(("hydra.", "hydra/")) and word not in resume.overrides:
            if key == "hydra.run.dir" and Path(_plain(value)).expanduser().resolve() == folder:
                continue
            raise CheckpointError(
                f"{word}: a resumed run goes on in its own folder, {folder}, made already; leave it out"
            )
        if key == "recipe":
            before = _plain(_last(resume.overrides, "recipe")) or "none"
            if _recipe(value) != _recipe(before):
                raise CheckpointError(
                    f"{word}: {folder} was started with recipe={before}, and another recipe is another run\n"
                    "leave recipe= out and give single keys, or start a new run"
                )


def _recipe(name: str) -> str:
    name = _plain(name).strip()
    is_file = name.endswith((".yaml", ".yml"))
    return os.path.realpath(os.path.expanduser(name)) if is_file else name


def _last(words: Sequence[str], key: str) -> str:
    """The value that the last of ``words`` gives to ``key``; empty without one."""
    return next((word.partition("=")[2] for word in reversed(words) if _key(word) == key), "")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _plain(value: str) -> str:
    """A value without the quotes and escapes that Hydra's grammar wants."""
    return value.strip("'\"").replace("\\", "")


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
