"""``mprun [train]``: one run, from the command line to ``result.json``.

Order matters: everything that can be refused is refused before the run folder exists; ``result.json`` is written last and
in every case; an error that a user can cause ends as one printed block, one of ours as a traceback.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mprun.compose import Composed, compose
from mprun.config import Config
from mprun.config_check import to_plain
from mprun.errors import CheckpointError, LossScaleError, MprunError, NonFiniteError, PrecisionError
from mprun.resume import Resume, changes, find, merge, refuse_fixed
from mprun.runs import point_latest


def run(overrides: Sequence[str]) -> int:
    """Train once. Returns the exit status: 0 ok, 1 failed or diverged, 130/143 interrupted."""
    resume = find(overrides)
    words = merge(resume.overrides, overrides) if resume else list(overrides)
    composed = compose(words)
    run_dir = resume.run_dir if resume and resume.run_dir else composed.run_dir
    return execute(composed.config, run_dir, resume=resume, composed=composed)


def execute(config: Config, run_dir: Path, *, resume: Resume | None = None, composed: Composed | None = None) -> int:
    """Run a checked configuration in ``run_dir``. ``composed`` is what ``.hydra/`` records, where Hydra does not itself."""
    started = time.perf_counter()
    from mprun.training import checkpoint
    from mprun.training.build import build, device_of, switches
    from mprun.training.env import config_hash

    if resume is not None:
        config.resume = str(resume.checkpoint)
    plain = to_plain(config)
    device = device_of(config)
    with switches(config, device) as kernels:
        saved = checkpoint.load(resume.checkpoint) if resume else None
        if saved is not None and resume is not None:
            _check_resume(saved, plain, resume)
        state, data, plan = build(config, device, resuming=saved is not None)
        if saved is not None and resume is not None:
            checkpoint.restore(state, saved, path=resume.checkpoint)
        from mprun.training.metrics import Best
        from mprun.training.run import Run, best_of, resume_log

        best = Best(**saved["best"]) if saved and saved["best"]["metric"] == best_of(config).metric else best_of(config)
        run = Run(
            config, state, data, plan, [], run_dir, best, metadata={"config": plain, "config_hash": config_hash(plain)}
        )
        if saved is not None:
            resume_log(run, saved["log"])
            checkpoint.drop_later(run_dir / "checkpoints", state.counters.applied)
        return _recorded(run, plain, kernels, started=started, resumed=saved is not None, composed=composed)


def _ended_well(run_dir: Path) -> bool:
    """Whether ``result.json`` says that the run came to its end; a run that was stopped on its last step still has to."""
    try:
        return bool(json.loads((run_dir / "result.json").read_text(encoding="utf-8"))["status"] == "ok")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_resume(saved: Mapping[str, Any], plain: Mapping[str, Any], resume: Resume) -> None:
    """Refuse what cannot change, say what does."""
    changed = changes(saved["config"], plain)
    kinds = {config["precision"]["loss_scale"]["kind"] for config in (saved["config"], plain)}
    refuse_fixed(changed, resume.checkpoint, dynamic=kinds == {"dynamic"})
    for key, (old, new) in changed.items():
        print(f"resume: {key} {old} -> {new}", file=sys.stderr)


def _recorded(
    run: Any, plain: dict[str, Any], kernels: str, *, started: float, resumed: bool, composed: Composed | None
) -> int:
    """Create the folder, run the loop between ``start`` and ``finish`` of the sinks, and write ``result.json``."""
    from mprun.tracking import build_sinks, finish_sinks
    from mprun.tracking.base import RunInfo
    from mprun.training.env import atomic_write_json
    from mprun.training.loop import finished, stop_early

    config, run_dir = run.config, run.run_dir
    if resumed and (finished(run) or stop_early(run)) and _ended_well(run_dir):
        print(
            f"{run_dir} is finished ({run.state.counters.applied} steps): nothing to do; raise train.epochs or train.steps"
        )
        return 0
    _write_folder(run, plain, kernels, composed)
    result: dict[str, Any] = {"status": "failed", "error": None}
    info = RunInfo(
        run_dir=run_dir,
        config=plain,
        name=config.name,
        total_steps=run.plan.steps,
        resumed_from_step=run.state.counters.applied if resumed else None,
        resumed_from_attempt=run.state.counters.attempts if resumed else None,
        tracking=config.tracking,
        job_type=config.command,
    )
    error: BaseException | None = None
    code = 1
    sinks = build_sinks(config)
    try:
        for sink in sinks:
            sink.start(info)
            run.sinks = [*run.sinks, sink]
        code = _guarded(run, result)
    except BaseException as caught:
        error = caught
        result["error"] = f"{type(caught).__name__}: {caught}"
    finally:
        _fill(result, run, started)
        finish_sinks(run.sinks, result)
        try:
            atomic_write_json(run_dir / "result.json", result)
        except OSError as refused:
            # A full disk has stopped the run already, and that error is the one to tell.
            error = error or MprunError(
                f"{run_dir / 'result.json'}: cannot be written ({refused.strerror}); make room and resume"
            )
    # Not before training: rich draws from python's generator while it is imported.
    from mprun.report.summary import print_summary

    print_summary(result, run_dir)
    if error is not None:
        raise error
    return code


def _guarded(run: Any, result: dict[str, Any]) -> int:
    """The loop, with every way to end turned into a status. Returns the exit status."""
    import torch

    from mprun.training.blame import dtype_trouble
    from mprun.training.loop import fit

    try:
        end = fit(run)
    except (LossScaleError, NonFiniteError):
        result["status"] = "diverged"
        raise
    except torch.OutOfMemoryError as error:
        result["status"] = "oom"
        raise MprunError(
            f"out of memory on {run.state.device} at train.batch_size={run.config.train.batch_size}: "
            f"{str(error).splitlines()[0]}\n"
            "use a smaller batch with train.accumulate, or model.activation_checkpointing=true"
        ) from error
    except KeyboardInterrupt:
        result["status"] = "interrupted"
        raise
    except RuntimeError as error:
        if text := dtype_trouble(error, run.state):
            raise MprunError(text) from error
        raise
    result["status"] = end.status
    result["stopped"] = end.reason
    if end.signal is not None:
        result["error"] = f"stopped by {signal.Signals(end.signal).name}; go on with resume={run.run_dir}"
        return 128 + end.signal
    return 0


def _fill(result: dict[str, Any], run: Any, started: float) -> None:
    """The numbers of ``result.json``, as far as the run got."""
    from mprun.training.env import peak_memory_bytes

    counters = run.state.counters
    result |= {
        "run_dir": str(run.run_dir),
        "name": run.config.name,
        "dataset": run.data.spec.name,
        "precision": run.config.precision.name,
        "seed": run.config.seed,
        "steps_applied": counters.applied,
        "steps_skipped": counters.skipped,
        "counters": asdict(counters),
        "final": dict(run.final),
        "best": run.best.summary(),
        "loss_scale": float(run.state.scale.scale) if run.state.loss_scale.active else None,
        "wall_s": time.perf_counter() - started,
        "train_s": run.train_s,
        "examples_per_s": run.examples / run.train_s if run.train_s else None,
        "peak_memory": peak_memory_bytes(run.state.device),
    }
    result.setdefault("wandb", None)


def _write_folder(run: Any, plain: dict[str, Any], kernels: str, composed: Composed | None) -> None:
    """``config.yaml env.json modules.json .hydra/`` and ``outputs/latest``."""
    from mprun.training import checkpoint
    from mprun.training.blame import dtype_trouble
    from mprun.training.env import atomic_write_json, atomic_write_text, describe_environment
    from mprun.training.observe import check_plan, observe

    folder = run.run_dir
    first = next(iter(run.data.train_batches(run.state.position.epoch, 0)))
    try:
        modules = observe(run.state, first)
    except RuntimeError as error:
        if text := dtype_trouble(error, run.state):
            raise PrecisionError(text) from error
        raise
    check_plan(run.state, modules)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create the run folder {folder}: {error}") from error
    checkpoint.clean(folder / "checkpoints")
    atomic_write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain)))
    atomic_write_json(folder / "modules.json", modules)
    recipe = composed.choices.get("recipe") if composed else None
    about = describe_environment(
        sys.argv,
        plain,
        seed=run.config.seed,
        device=run.state.device,
        cpu_fp16=None if kernels == "none" else kernels,
        data_sha256=run.data.spec.sha256,
        recipe={"name": recipe} if recipe and recipe != "none" else None,
    )
    atomic_write_json(folder / "env.json", about)
    if composed is not None:
        _write_hydra(folder / ".hydra", plain, composed)
    (folder / "result.json").unlink(missing_ok=True)
    point_latest(folder)


def _write_hydra(folder: Path, plain: dict[str, Any], composed: Composed) -> None:
    """The three files that Hydra writes for a job: what was composed, how, and the task's overrides."""
    folder.mkdir(exist_ok=True)
    hydra = OmegaConf.to_container(composed.hydra, resolve=False)
    texts: dict[str, DictConfig | Any] = {
        "config.yaml": OmegaConf.create(plain),
        "hydra.yaml": OmegaConf.create({"hydra": hydra}),
        "overrides.yaml": OmegaConf.create(list(composed.overrides)),
    }
    for name, node in texts.items():
        (folder / name).write_text(OmegaConf.to_yaml(node), encoding="utf-8")
