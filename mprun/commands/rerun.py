"""``mprun rerun RUN [overrides]``: a past run once more, from its saved words, after saying what has changed since.

    mprun rerun latest                           the newest run again, in a new folder
    mprun rerun outputs/x/20260101-120000-abc    any run folder
    mprun rerun latest seed=1                    with other words on top
    mprun rerun latest --dry                     only the drift report

The words that a run was started with are composed anew, so defaults, recipes and code are those of today. What that
changes is the *drift*: keys of the configuration, commit and uncommitted changes, versions, device, data. After the run
its final metrics stand beside those of then. ``trust`` is not taken over: a run folder may come from a stranger.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mprun.compose import Composed, compose
from mprun.config_check import to_plain
from mprun.errors import CheckpointError, ConfigError
from mprun.precision_files import restored
from mprun.resume import changes, merge
from mprun.runs import LATEST, OUTPUTS, SWEEP_FILE
from mprun.training.env import atomic_write_json, from_json, json_ready

# Where the new run goes is its own business.
DROPPED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")


@dataclass(frozen=True)
class Past:
    """What a run folder says of its run; ``result`` is empty where the run never ended."""

    folder: Path
    words: tuple[str, ...]
    config: dict[str, Any]
    env: dict[str, Any]
    result: dict[str, Any]


def run(words: Sequence[str]) -> int:
    """Report the drift of a run and run it again. Returns the exit status of the new run.

    Raises:
        ConfigError: the words do not fit, or the saved ones are no longer legal.
        CheckpointError: there is no such run.
    """
    target, overrides, dry = parse(words)
    past = read(target)
    composed = compose(restored(again(past.words, overrides), overrides, past.folder), command="rerun")
    drift = drift_of(past, composed)
    print(f"rerun of {past.folder}")
    print(
        "\n".join(f"  {line}" for line in shown(drift))
        or "  no drift: configuration, code, versions, data and device as then"
    )
    if dry:
        return 0
    from mprun.commands.train import execute

    try:
        return execute(composed.config, composed.run_dir, composed=composed)
    finally:
        if composed.run_dir.is_dir():
            atomic_write_json(composed.run_dir / "rerun.json", {"of": str(past.folder), "drift": drift})
            print("\n".join(beside(past, composed.run_dir)))


def parse(words: Sequence[str]) -> tuple[str, list[str], bool]:
    """The run, the overrides, and whether only the report is wanted.

    Raises:
        ConfigError: names the word that does not fit.
    """
    flags = [word for word in words if word.startswith("-")]
    names = [word for word in words if "=" not in word and not word.startswith(("-", "+", "~"))]
    overrides = [word for word in words if word not in names and word not in flags]
    if unknown := [word for word in flags if word != "--dry"]:
        raise ConfigError(f"rerun does not know {unknown[0]}: its only flag is --dry")
    if len(names) != 1:
        raise ConfigError(f"rerun needs one run, not {', '.join(names) or 'none'}: a run folder, or latest")
    if any(word.lstrip("+").startswith("resume=") for word in overrides):
        raise ConfigError("rerun starts a run from its beginning; to go on with one, write mprun resume=RUN")
    return names[0], overrides, bool(flags)


def read(target: str) -> Past:
    """The run in the folder ``target`` (or ``latest``, or a file below the folder).

    Raises:
        CheckpointError: there is no run, or its folder lacks what tells how it was started.
    """
    path = Path(OUTPUTS) / LATEST if target == LATEST else Path(target).expanduser()
    if not path.exists():
        what = "there is no run yet" if target == LATEST else "no such folder"
        raise CheckpointError(f"rerun {target}: {what} ({path}); give a run folder, or latest")
    path = path.resolve()
    if (path / SWEEP_FILE).is_file():
        raise CheckpointError(f"rerun {target}: {path} is a sweep; give the folder of one of its runs, which lie in it")
    folder = next((place for place in (path, *path.parents[:2]) if (place / "config.yaml").is_file()), path)
    try:
        words = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"rerun {target}: {folder} is no run folder: it has no {Path(error.filename).name}"
        ) from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise CheckpointError(f"rerun {target}: {folder} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(words, list) or not isinstance(config, dict) or not isinstance(env, dict):
        raise CheckpointError(f"rerun {target}: {folder} holds something else than the record of a run")
    try:
        result = from_json(json.loads((folder / "result.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        result = {}
    return Past(folder, tuple(map(str, words)), {str(key): value for key, value in config.items()}, env, result)


def again(saved: Sequence[str], new: Sequence[str]) -> list[str]:
    """The words of the new run: the saved ones without ``trust``, ``resume`` and folders, the new ones on top."""
    return [word for word in merge(saved, new) if word in new or word.lstrip("+").partition("=")[0] not in DROPPED]


def drift_of(past: Past, composed: Composed) -> dict[str, dict[str, list[Any]]]:
    """What differs between then and now: ``{"config": {key: [then, now]}, "code": ..., ...}``, without empty parts."""
    now = environment(composed)
    keys = changes(past.config, to_plain(composed.config))
    parts = {
        # What is said about a run changes no number of it.
        "config": {key: list(pair) for key, pair in keys.items() if key.partition(".")[0] not in ("meta", "expect")},
        "code": _differ(_code(past.env), _code(now)),
        "versions": _differ(past.env.get("versions") or {}, now["versions"]),
        "data": _differ({"sha256": past.env.get("data_sha256")}, {"sha256": now["data_sha256"]}),
        "device": _differ(_device(past.env), _device(now)),
    }
    return {name: part for name, part in parts.items() if part}


def environment(composed: Composed) -> dict[str, Any]:
    """What ``env.json`` of a run of ``composed`` would hold. Builds its data, because only they have the hash."""
    from mprun.data import build_data
    from mprun.training.build import device_of, switches
    from mprun.training.env import describe_environment

    config = composed.config
    device = device_of(config)
    with switches(config, device) as kernels:
        return describe_environment(
            [],
            to_plain(config),
            seed=config.seed,
            device=device,
            cpu_fp16=None if kernels == "none" else kernels,
            data_sha256=build_data(config, device=device).spec.sha256,
        )


def shown(drift: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[str]:
    """One line a difference: ``config    optimizer.lr  0.001 -> 0.002``."""
    return [
        f"{part:<9} {key}  {_short(then)} -> {_short(now)}"
        for part, keys in drift.items()
        for key, (then, now) in keys.items()
    ]


def beside(past: Past, run_dir: Path) -> list[str]:
    """The final metrics of then and now, line by line, and whether they are the same to the last bit."""
    try:
        now = from_json(json.loads((run_dir / "result.json").read_text(encoding="utf-8"))).get("final") or {}
    except (OSError, ValueError):
        return []
    then = past.result.get("final") or {}
    names = [name for name in now if name in then and name.endswith(("/loss", "/top1"))]
    return [
        f"{name:<11} then {then[name]:.6g}  now {now[name]:.6g}" + ("  identical" if then[name] == now[name] else "")
        for name in names
    ]


def _differ(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    pairs = {key: [then.get(key), json_ready(now.get(key))] for key in sorted(then.keys() | now.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _code(env: Mapping[str, Any]) -> dict[str, Any]:
    """Commit and uncommitted changes; two dirty checkouts of a commit are the same where their differences are."""
    git = env.get("git") or {}
    if git.get("dirty"):
        digest = hashlib.sha256(str(git.get("diff")).encode()).hexdigest()[:8]
        return {"commit": git.get("commit"), "tree": f"uncommitted changes ({digest})"}
    return {"commit": git.get("commit"), "tree": "unknown" if git.get("dirty") is None else "clean"}


def _device(env: Mapping[str, Any]) -> dict[str, Any]:
    device, host = env.get("device") or {}, env.get("host") or {}
    return {
        **{key: device.get(key) for key in ("type", "name", "driver", "cuda")},
        "cpu_fp16": env.get("cpu_fp16"),
        "threads": host.get("torch_threads"),
    }


def _short(value: Any, most: int = 60) -> str:
    text = "none" if value is None else " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]}…"
