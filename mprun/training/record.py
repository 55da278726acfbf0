"""What a run leaves in its folder: how it came about, and how it ended.

``result.json`` is written last and in every case, whole. Where the process dies before that, there is none, which is how
such a run is told from one that ended. A bug of ours leaves its traceback in ``error.txt`` beside it: in a sweep nobody
sees the terminal.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from mprun.config import Config
from mprun.errors import LossScaleError, MprunError, NonFiniteError
from mprun.runs import point_latest, sweep_of
from mprun.training import checkpoint
from mprun.training.env import atomic_write_json, atomic_write_text, describe_environment, peak_memory_bytes
from mprun.training.run import Run

RESULT, ERROR, REPORT = "result.json", "error.txt", "report.html"
# What torch says when the processor's memory is not enough; it has no exception of its own for that.
_CPU_MEMORY = "can't allocate memory"


def write_folder(
    run: Run,
    plain: Mapping[str, Any],
    modules: Sequence[Mapping[str, Any]],
    *,
    kernels: str,
    recipe: Mapping[str, str] | None,
    precision_file: Mapping[str, str] | None = None,
) -> None:
    """``config.yaml env.json modules.json`` and ``outputs/latest``; what an earlier life of the run said of its end goes.

    Args:
        run: about to start.
        plain: its configuration.
        modules: the precision table, as observed.
        kernels: which kernels compute FP16 on the CPU; ``none`` where that plays no part.
        recipe: ``name`` and ``sha256``, if one was given.
        precision_file: path and ``sha256``, likewise.

    Raises:
        MprunError: the disk refuses.
    """
    folder = run.run_dir
    about = {"sweep": sweep_of(folder)} | describe_environment(
        sys.argv,
        plain,
        seed=run.config.seed,
        device=run.state.device,
        cpu_fp16=None if kernels == "none" else kernels,
        data_sha256=run.data.spec.sha256,
        recipe=recipe,
        precision_file=precision_file,
    )
    about["start"] = _start(run)
    with _disk(folder):
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        checkpoint.clean(folder / "checkpoints")
        atomic_write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(plain))))
        atomic_write_json(folder / "modules.json", modules)
        atomic_write_json(folder / "env.json", about)
        (folder / RESULT).unlink(missing_ok=True)
        (folder / ERROR).unlink(missing_ok=True)
        (folder / REPORT).unlink(missing_ok=True)
    point_latest(folder)


def _start(run: Run) -> dict[str, Any]:
    """What two runs have in common that differ in nothing but their numerics: hashes of initialisation and first batch.

    A run that goes on does not know them all any more: what its earlier life has written counts.
    """
    spec = run.data.spec
    now = {"parameters": run.state.fingerprint, "first_batch": run.first_batch, "num_classes": spec.num_classes}
    try:
        before = json.loads((run.run_dir / "env.json").read_text(encoding="utf-8"))["start"]
    except (OSError, ValueError, KeyError, TypeError):
        before = {}
    return {key: before.get(key) if value is None else value for key, value in now.items()}


def write_hydra(folder: Path, plain: Mapping[str, Any], hydra: Any, overrides: Sequence[str]) -> None:
    """``.hydra/``, the three files that Hydra writes for a job: what was composed, how, and the overrides.

    Raises:
        MprunError: the disk refuses.
    """
    texts: dict[str, Any] = {
        "config.yaml": dict(plain),
        "hydra.yaml": {"hydra": OmegaConf.to_container(hydra, resolve=False)},
        "overrides.yaml": list(overrides),
    }
    with _disk(folder):
        (folder / ".hydra").mkdir(exist_ok=True)
        for name, content in texts.items():
            atomic_write_text(folder / ".hydra" / name, OmegaConf.to_yaml(OmegaConf.create(content)))


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise MprunError(
            f"cannot write the run folder {folder}: {error.strerror}; make room and start again"
        ) from error


def ended_well(folder: Path) -> bool:
    """Whether ``result.json`` says that the run came to its end; a run that was stopped on its last step still has to."""
    return _earlier(folder).get("status") == "ok"


def status_of(error: BaseException) -> str:
    """The status of a run that ends with ``error``."""
    if isinstance(error, LossScaleError | NonFiniteError):
        return "diverged"
    if is_memory(error) or (error.__cause__ is not None and is_memory(error.__cause__)):
        return "oom"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def how_it_ended(error: BaseException) -> dict[str, Any]:
    """``status``, ``exit_code`` and ``error`` of a run that ends with ``error``."""
    return {
        "status": status_of(error),
        "exit_code": exit_code_of(error),
        "error": f"{type(error).__name__}: {error}",
    }


def exit_code_of(error: BaseException) -> int:
    """The exit status of a process that ends with ``error``."""
    if isinstance(error, MprunError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory is not enough: the device's, or the processor's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_MEMORY in str(error)


def memory_trouble(error: BaseException, config: Config, device: torch.device) -> MprunError:
    """What to tell instead of an error that :func:`is_memory` knows."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return MprunError(
        f"out of memory on {device} at train.batch_size={config.train.batch_size}: {said}\n"
        "use a smaller batch with train.accumulate, or model.activation_checkpointing=true"
    )


def numbers(run: Run, started: float) -> dict[str, Any]:
    """The numbers of ``result.json``, as far as the run got. ``started`` is by ``time.perf_counter``."""
    counters, last = run.state.counters, run.run_dir / "checkpoints" / "last.pt"
    saved = {"file": "checkpoints/last.pt", "step": run.saved_step} if run.saved_step >= 0 and last.is_file() else None
    return {
        "run_dir": str(run.run_dir),
        "name": run.config.name,
        "dataset": run.data.spec.name,
        "precision": run.config.precision.name,
        "seed": run.config.seed,
        "sweep": sweep_of(run.run_dir),
        "steps_applied": counters.applied,
        "steps_skipped": counters.skipped,
        "counters": asdict(counters),
        "final": dict(run.final),
        "best": run.best.summary(),
        "checkpoint": saved,
        **_of_the_device(run),
        "wall_s": time.perf_counter() - started,
        "train_s": run.train_s,
        "examples_per_s": run.examples / run.train_s if run.train_s else None,
        "wandb": None,
    }


def _of_the_device(run: Run) -> dict[str, Any]:
    """What has to be read from the device; null where an error has left it unusable."""
    try:
        scale = float(run.state.scale.scale) if run.state.loss_scale.active else None
        return {"loss_scale": scale, "peak_memory": peak_memory_bytes(run.state.device)}
    except RuntimeError:
        return {"loss_scale": None, "peak_memory": None}


def write_result(folder: Path, result: Mapping[str, Any], error: BaseException | None) -> BaseException | None:
    """Write ``result.json``, and ``error.txt`` if ``error`` is a bug.

    Returns:
        The error to tell: ``error``, else that of a disk that refuses. (A full disk has stopped the run already as a
        rule, and then that error is the one to tell.)
    """
    try:
        if error is not None and not isinstance(error, MprunError | KeyboardInterrupt):
            atomic_write_text(folder / ERROR, "".join(traceback.format_exception(error)))
        atomic_write_json(folder / RESULT, result)
    except OSError as refused:
        told = f"{folder / RESULT}: cannot be written ({refused.strerror}); make room and resume"
        return error or MprunError(told)
    return error


def failed_before_the_start(folder: Path, error: BaseException) -> None:
    """Say in the folder of a run that was to go on why it did not; what its earlier life had reached stays.

    A refusal (exit status 2) is no end of a run: it leaves the folder as it was.
    """
    if isinstance(error, MprunError) and error.exit_code == 2:
        return
    write_result(folder, {**_earlier(folder), **how_it_ended(error)}, error)


def _earlier(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
