"""Checkpoints: written atomically, read strictly.

``save`` writes to a temporary file in the same folder, flushes it to the disk and renames it, so that ``last.pt`` is a
whole checkpoint at every moment; a full disk costs the new file, never the old one. A checkpoint holds plain containers
and tensors only and is read with ``weights_only=True``: a checkpoint cannot run code.

Optimizer state is kept by parameter name in its own dtype. (``Optimizer.load_state_dict`` would cast float32 moments to
the parameter's dtype.) Learning rate, betas and decay are not in it: they follow the configuration in force.

No second copy of the state is made in memory: writing goes from the tensors themselves to the file, and reading maps the file,
so that the values come to memory page by page as they are copied to their places, and the system may drop them again.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import CheckpointError
from mprun.precision.policy import map_tensors
from mprun.training.buffers import adopt_buffers, writable
from mprun.training.env import capture_rng, restore_rng
from mprun.training.state import HostCounters, Position, TrainState

FORMAT = 1
TMP_SUFFIX = ".tmp"
# What a whole checkpoint holds beside what the loop adds.
PARTS = {
    "mode",
    "policy",
    "model",
    "masters",
    "optimizer",
    "optimizer_groups",
    "scale",
    "ema",
    "counters",
    "position",
    "rng",
}


def snapshot(state: TrainState, **extra: Any) -> dict[str, Any]:
    """Everything that ``state`` needs to go on, as plain containers and tensors. ``extra`` is stored beside it."""
    return {
        "format": FORMAT,
        "step": state.counters.applied,
        "mode": state.policy.mode,
        "policy": str(state.policy),
        "model": dict(state.model.state_dict()),
        "masters": dict(state.weights.by_name),
        "buffers": _unsaved_buffers(state.model),
        "late_buffers": state.late_buffers(),
        "optimizer": optimizer_state(state),
        "optimizer_groups": [group_state(state.optimizer, group) for group in state.optimizer.param_groups],
        "scale": state.loss_scale.save(state.scale),
        "ema": None if state.ema is None else state.ema.state_dict(),
        "counters": asdict(state.counters),
        "position": asdict(state.position),
        "rng": capture_rng(),
        **extra,
    }


def restore(state: TrainState, saved: Mapping[str, Any], *, path: Path) -> None:
    """Put ``saved`` into ``state``, in place. Strict: the model's names and shapes must be the same.

    Raises:
        CheckpointError: names or shapes differ, or the checkpoint has no EMA where the run wants one (or other way round).
    """
    if not saved.keys() >= PARTS:
        raise CheckpointError(f"{path} is not a whole checkpoint: {', '.join(sorted(PARTS - saved.keys()))} missing")
    late = saved.get("late_buffers", ())
    if homeless := adopt_buffers(state.model, saved["model"], saved["buffers"], late=late, device=state.device):
        raise CheckpointError(f"{path} is of another model: there is no place for its buffer {homeless}")
    _same_tensors(saved["model"], dict(state.model.state_dict()), what="model", path=path)
    load_weights(state, saved, path=path)
    load_optimizer_state(state, saved["optimizer"], path=path)
    for group, entry in zip(state.optimizer.param_groups, saved["optimizer_groups"], strict=True):
        group.update(copy.deepcopy(entry))
    state.scale = state.loss_scale.load(saved["scale"], state.device)
    if state.ema is not None:
        if saved["ema"] is None:
            raise CheckpointError(f"{path} holds no EMA, and train.ema.decay is set: resume with train.ema=off")
        state.ema.load_state_dict(saved["ema"])
    state.counters = HostCounters(**saved["counters"])
    state.position = Position(**saved["position"])
    state.applied.fill_(state.counters.applied)
    state.rates.moved()
    restore_rng(saved["rng"])


def load_weights(state: TrainState, saved: Mapping[str, Any], *, path: Path) -> None:
    """Put parameters, masters and buffers in place. The FP32 truth carries over between precisions.

    Raises:
        CheckpointError: one of the two runs is in ``pure`` mode and the other is not: it has no FP32 truth.
    """
    before, now = (saved["mode"], saved["policy"]), (state.policy.mode, str(state.policy))
    if before != now and "pure" in (before[0], now[0]):
        raise CheckpointError(
            f"{path} was written with precision.mode={before[0]} ({before[1]}) and cannot go on with {now[0]} ({now[1]}): "
            "pure keeps no FP32 parameters; resume with the same precision"
        )
    # Names and shapes were compared; what cannot be written in place is in place already.
    fixed = {name for name, buffer in state.model.named_buffers() if not writable(buffer)}
    state.model.load_state_dict({k: v for k, v in _kept(saved["model"]).items() if k not in fixed}, strict=False)
    with torch.no_grad():
        for name, buffer in _unsaved_buffers(state.model).items():
            if name in saved["buffers"] and name not in fixed:
                buffer.copy_(saved["buffers"][name])
    for name, parameter in state.weights:
        if name in state.weights.by_name or name in saved["masters"]:
            with torch.no_grad():
                source = saved["masters"] if name in saved["masters"] else saved["model"]
                parameter.copy_(source[name])
    state.weights.write_back()


def _kept(saved: Mapping[str, Any]) -> dict[str, Any]:
    """``saved`` with copies of what ``set_extra_state`` gets and may keep: a mapped tensor is gone when its file is cut short."""
    return {name: copy.deepcopy(value) if name.endswith("_extra_state") else value for name, value in saved.items()}


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that the state dict leaves out (``persistent=False``): a run that moves them needs them to go on."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def optimizer_state(state: TrainState) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name; entries of parameters that have none yet are left out."""
    found = {}
    for group in state.optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if p in state.optimizer.state:
                found[name] = dict(state.optimizer.state[p])
    return found


def group_state(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps in a parameter group that is no argument of its: some count their steps there.

    What was made of arguments (timm's ``max_lr_snapshot``) is in ``defaults``, and follows the configuration in force as they do.
    """
    known = {*inspect.signature(type(optimizer)).parameters, *optimizer.defaults, "params", "names"}
    return {key: value for key, value in group.items() if key not in known}


def load_optimizer_state(state: TrainState, saved: Mapping[str, Mapping[str, Any]], *, path: Path) -> None:
    """Put saved optimizer state in place, on each parameter's device, in the dtype in which it was saved."""
    for group in state.optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if name not in saved:
                continue
            entry = saved[name]
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.ndim and value.numel() == p.numel() and value.shape != p.shape:
                    raise CheckpointError(f"{path}: optimizer state {key} of {name} has shape {tuple(value.shape)}")
            # Beside what is there already: an argument that is new at this resume may have brought state of its own.
            own, place = state.optimizer.state[p], partial(_placed, device=p.device, fused=state.fused)
            for key, value in entry.items():
                if _same_place(own.get(key), value, p.device):
                    own[key].copy_(value)
                else:
                    own[key] = map_tensors(value, place)


def _same_place(old: Any, value: Any, device: torch.device) -> bool:
    """Whether ``value`` can be written into ``old``, so that it needs no memory of its own."""
    if not isinstance(old, Tensor) or not isinstance(value, Tensor) or not value.ndim:
        return False
    return (old.shape, old.dtype, old.device) == (value.shape, value.dtype, device) and writable(old)


def _placed(value: Tensor, *, device: torch.device, fused: bool) -> Tensor:
    """A copy on the parameter's device; step counts (0-D) of unfused optimizers stay on the CPU, where torch keeps them."""
    return value.to(device if value.ndim or fused else "cpu", copy=True)


def save(content: Mapping[str, Any], path: Path) -> None:
    """Write ``content`` to ``path`` atomically.

    Raises:
        CheckpointError: the disk refused; the file that was there before is untouched.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}{TMP_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tmp.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        # torch's zip writer tells of a full disk as of an "unexpected pos"; what the disk said is the error's context.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or cause
        raise CheckpointError(f"could not write {path}: {reason}; the earlier checkpoint there is untouched") from error


def link(source: Path, path: Path) -> None:
    """Let ``path`` be what ``source`` is now, atomically, and stay so whatever becomes of ``source``.

    A hard link, so that it takes no room and no time: a checkpoint is never written in place, only replaced, so the file
    behind the link does not change. A copy where there are no links.

    Raises:
        CheckpointError: the disk refused; the file that was at ``path`` is untouched.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}{TMP_SUFFIX}")
    try:
        tmp.unlink(missing_ok=True)
        try:
            tmp.hardlink_to(source)
        except OSError:
            with source.open("rb") as old, tmp.open("wb") as new:
                shutil.copyfileobj(old, new)
                new.flush()
                os.fsync(new.fileno())
        tmp.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error.strerror}; the earlier checkpoint there is untouched"
        ) from error
    finally:
        # Also after success: where both are the same file already, replacing does nothing and leaves this one.
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


def load(path: Path, *, own: bool = True) -> dict[str, Any]:
    """Read a checkpoint, on the CPU; with ``own=False`` any file of tensors and plain values.

    Raises:
        CheckpointError: missing, empty, torn, changed since it was written, not a checkpoint of mprun, or of another format.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes): the write was cut off; resume from another checkpoint")
    try:
        # Archives only: what older torch wrote is a stream, which cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        if own and mapped and (broken := _broken_part(path)):
            raise CheckpointError(f"{path} is damaged: the checksum of its part {broken} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # torch's message begins with the advice to load it all the same, which no checkpoint of a run needs.
        why = next(
            (line.strip() for line in str(error).partition("WeightsUnpickler error:")[2].splitlines() if line.strip()),
            "",
        )
        raise CheckpointError(
            f"{path} is no checkpoint, damaged, or holds more than tensors and plain values; it was not loaded"
            + (f": {why}" if why else "")
        ) from error
    except Exception as error:  # some other file can break the reader anywhere, in any way
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} is damaged or no checkpoint: {why}") from error
    if not own and isinstance(content, dict):
        return content
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of mprun (it has no 'format')")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}; this version reads format {FORMAT}")
    return content


def _broken_part(path: Path) -> str | None:
    """The first part of an archive that is not as it was written, which torch does not look at.

    Asked of own checkpoints only: torch can be told to write no true checksums, so a stranger's file need not have them.
    """
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def load_init(model: nn.Module, path: Path) -> None:
    """Start from given weights (``model.init``): a checkpoint of mprun, a file with a state dict, or safetensors.

    Of a checkpoint of mprun the FP32 masters are taken where there are any. Strict: every name and shape must fit.

    Raises:
        CheckpointError: missing, damaged, holding code, or of another model.
    """
    masters: Any = {}
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights: dict[str, Any] = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"model.init={path}: not readable as safetensors: {error}") from error
    else:
        weights = load(path, own=False)
        masters = weights.get("masters", {}) if "format" in weights else {}
        weights = next((weights[key] for key in ("state_dict", "model") if isinstance(weights.get(key), dict)), weights)
    if not all(isinstance(value, Tensor) or name.endswith("_extra_state") for name, value in weights.items()):
        raise CheckpointError(f"model.init={path} holds no state dict (names with tensors)")
    if not isinstance(masters, dict):
        raise CheckpointError(f"model.init={path} is a damaged checkpoint: its masters are a {type(masters).__name__}")
    _same_tensors(weights, dict(model.state_dict()), what="model", path=path)
    model.load_state_dict(_kept(weights))
    with torch.no_grad():  # by parameter: a tied one has several names in the state dict, and one master
        for name, parameter in model.named_parameters():
            if name in masters:
                parameter.copy_(masters[name])


def clean(folder: Path) -> None:
    """Remove what interrupted saves left behind."""
    for leftover in folder.glob(f".*{TMP_SUFFIX}"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def drop_later(folder: Path, step: int) -> None:
    """Remove ``step_<n>.pt`` beyond ``step``: the run goes on from there, and what came after is no longer its past."""
    for path in folder.glob("step_*.pt"):
        if (number := path.stem.removeprefix("step_")).isdigit() and int(number) > step:
            path.unlink(missing_ok=True)


def prune(folder: Path, keep: int) -> None:
    """Keep the ``keep`` highest ``step_<n>.pt`` of ``folder``, by number."""
    numbered = sorted(folder.glob("step_*.pt"), key=lambda path: int(path.stem.removeprefix("step_")))
    for path in numbered[: max(len(numbered) - keep, 0)]:
        path.unlink(missing_ok=True)


def _same_tensors(saved: Mapping[str, Tensor], own: Mapping[str, Tensor], *, what: str, path: Path) -> None:
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or extra:
        parts = [
            f"{len(names)} {word} (first: {names[0]})"
            for word, names in (("missing", missing), ("extra", extra))
            if names
        ]
        raise CheckpointError(f"{path} is of another {what}: {' and '.join(parts)}")
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor) or not isinstance(saved[name], Tensor):
            continue  # what get_extra_state gave
        if tuple(saved[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path} is of another {what}: {name} has shape {tuple(saved[name].shape)}, here {tuple(tensor.shape)}"
            )


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
