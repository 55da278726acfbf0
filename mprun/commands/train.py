"""``mprun [train]``: one run, from the command line to ``result.json``.

Order matters: everything that can be refused is refused before the run folder is touched; nobody else writes it from then
on; ``result.json`` is written last and in every case; an error that a user can cause ends as one printed block, one of
ours as a traceback.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mprun.compose import Composed, compose_run
from mprun.config import Config
from mprun.config_check import to_plain
from mprun.errors import CheckpointError, ConfigError, MprunError, PrecisionError
from mprun.imports import uncollected
from mprun.options import recipe_of
from mprun.precision_files import precision_file_of
from mprun.resume import Resume, lines_of, wants_auto
from mprun.runs import locked, refuse_used

# What the loop adds to a checkpoint, without which a run cannot go on.
OWN_PARTS = {"best", "log", "config"}


def run(overrides: Sequence[str]) -> int:
    """Train once. Returns the exit status: 0 ok, 1 failed or diverged, 130/143 interrupted."""
    if of_sweep := [word for word in overrides if word.lstrip("+").startswith(("sweep=", "sweep."))]:
        raise ConfigError(f"{of_sweep[0]} is about a sweep, and this is one run: add -m, or leave it out")
    if of_compare := [word for word in overrides if word.lstrip("+").startswith("compare.")]:
        raise ConfigError(f"{of_compare[0]} is about a comparison, and this is one run: mprun compare, or leave it out")
    if of_diagnose := [word for word in overrides if word.lstrip("+").startswith("diagnose.")]:
        raise ConfigError(
            f"{of_diagnose[0]} is about a diagnosis, and this is one run: mprun diagnose, or leave it out"
        )
    if of_search := [word for word in overrides if word.lstrip("+").startswith("search.")]:
        raise ConfigError(f"{of_search[0]} is about a search, and this is one run: mprun search, or leave it out")
    composed, resume = compose_run(overrides)
    run_dir = resume.run_dir if resume and resume.run_dir else composed.run_dir
    return execute(composed.config, run_dir, resume=resume, composed=composed, again=wants_auto(overrides))


def execute(
    config: Config,
    run_dir: Path,
    *,
    resume: Resume | None = None,
    composed: Composed | None = None,
    again: bool = False,
) -> int:
    """Run a checked configuration in ``run_dir``. Returns the exit status.

    Args:
        config: what to run.
        run_dir: where; a folder of an earlier run only with ``resume``.
        resume: what to go on from.
        composed: what ``.hydra/`` records.
        again: the folder may hold the result of an earlier attempt that saved nothing.

    Raises:
        MprunError: what a user can cause. ``result.json`` is written if the folder was there to write it to.
    """
    started = time.perf_counter()
    goes_on = resume is not None and resume.run_dir is not None
    with ExitStack() as stack:
        if goes_on:
            stack.enter_context(locked(run_dir))
        else:
            refuse_used(run_dir, but_result=again)
        with uncollected("torch"):
            from mprun.training.build import device_of, switches

        device = device_of(config)
        kernels = stack.enter_context(switches(config, device))
        from mprun.training.record import failed_before_the_start

        try:
            run, modules = _ready(config, device, run_dir, resume)
        except BaseException as error:
            if goes_on:
                failed_before_the_start(run_dir, error)
            raise
        if modules is None:
            print(
                f"{run_dir} is finished ({run.state.counters.applied} steps): nothing to do; raise train.epochs or train.steps"
            )
            return 0
        if not goes_on:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"cannot create the run folder {run_dir}: {error.strerror}") from error
            stack.enter_context(locked(run_dir))
            refuse_used(run_dir, but_result=again)  # another run may have been faster
        return _recorded(run, modules, kernels, started=started, resume=resume, composed=composed)


def _ready(
    config: Config, device: Any, run_dir: Path, resume: Resume | None
) -> tuple[Any, list[dict[str, Any]] | None]:
    """Build the run, with the state that it goes on from, and look at its precision. Touches nothing on the disk.

    Returns:
        The run and its precision table; no table for a run that is finished.

    Raises:
        MprunError: refused, or out of memory.
    """
    from mprun.training.record import ended_well, is_memory, memory_trouble

    try:
        run = _built(config, device, run_dir, resume)
        from mprun.training.loop import finished, stop_early

        if resume is not None and (finished(run) or stop_early(run)) and ended_well(run_dir):
            return run, None
        return run, _observed(run)
    except Exception as error:
        if is_memory(error):
            raise memory_trouble(error, config, device) from error
        raise


def _built(config: Config, device: Any, run_dir: Path, resume: Resume | None) -> Any:
    """The :class:`~mprun.training.run.Run`, at the step that it starts or goes on from."""
    from mprun.training import checkpoint
    from mprun.training.build import build
    from mprun.training.env import config_hash
    from mprun.training.metrics import Best
    from mprun.training.run import Run, best_of, resume_log

    if resume is not None:
        config.resume = str(resume.checkpoint)
    plain = to_plain(config)
    saved = checkpoint.load(resume.checkpoint) if resume else None
    if saved is not None and resume is not None:
        _check_resume(saved, plain, resume)
    state, data, plan = build(config, device, resuming=saved is not None)
    if saved is not None and resume is not None:
        checkpoint.restore(state, saved, path=resume.checkpoint)
    best = Best(**saved["best"]) if saved and saved["best"]["metric"] == best_of(config).metric else best_of(config)
    metadata = {"config": plain, "config_hash": config_hash(plain)}
    run = Run(config, state, data, plan, [], run_dir, best, metadata=metadata)
    if saved is not None:
        resume_log(run, saved["log"])
    return run


def _check_resume(saved: Mapping[str, Any], plain: Mapping[str, Any], resume: Resume) -> None:
    """Refuse what cannot change, say what does."""
    if not saved.keys() >= OWN_PARTS:
        missing = ", ".join(sorted(OWN_PARTS - saved.keys()))
        raise CheckpointError(f"{resume.checkpoint} is not the checkpoint of a run: {missing} missing")
    for line in lines_of(resume.check(saved["config"], plain)):
        print(line, file=sys.stderr)


def _observed(run: Any) -> list[dict[str, Any]]:
    """The precision table of the first batch, held against the plan."""
    from mprun.training.blame import dtype_trouble, kernel_trouble
    from mprun.training.inputs import input_trouble
    from mprun.training.observe import check_plan, observe

    first = next(iter(run.data.train_batches(run.state.position.epoch, 0)))
    if run.state.position.epoch == 0:
        run.first_batch = hashlib.sha256(first.ids.numpy().tobytes()).hexdigest()[:12]
    try:
        modules = observe(run.state, first)
    except Exception as error:
        if text := kernel_trouble(error) or input_trouble(error, run.state, first):
            raise ConfigError(text) from error
        if text := dtype_trouble(error, run.state):
            raise PrecisionError(text) from error
        raise
    check_plan(run.state, modules)
    return modules


def _recorded(
    run: Any,
    modules: list[dict[str, Any]],
    kernels: str,
    *,
    started: float,
    resume: Resume | None,
    composed: Composed | None,
) -> int:
    """Write the folder, run the loop between ``start`` and ``finish`` of the sinks, and write ``result.json``."""
    from mprun.tracking import build_sinks, finish_sinks
    from mprun.training.record import how_it_ended, numbers, write_result

    result: dict[str, Any] = {"status": "failed", "exit_code": 1, "error": None}
    error: BaseException | None = None
    code = 1
    try:
        _write(run, modules, kernels, resume=resume, composed=composed)
        for sink in build_sinks(run.config):
            run.sinks = [*run.sinks, sink]
            sink.start(_info(run, resumed=resume is not None))
        result["exit_code"] = code = _looped(run, result)
    except BaseException as caught:
        error = caught
    result |= numbers(run, started)
    error = error or _unsaved(run, result)
    if error is not None:
        if isinstance(error, MprunError):
            error.exit_code = 1  # 2 says that nothing was started, and here is the folder of a run
        result |= how_it_ended(error)
    tracking = run.config.tracking
    # A run of a group (a sweep, a comparison) has its place on the group's page.
    if tracking.log_report or (tracking.report and tracking.group is None):
        _report(run, result)
    try:
        finish_sinks(run.sinks, result)
    except Exception as caught:
        error = error or caught
    error = write_result(run.run_dir, result, error)
    # Not before training: rich draws from python's generator while it is imported.
    from mprun.report.summary import print_summary

    # An error that is raised is printed by the caller, once.
    print_summary({**result, "error": None} if error is not None else result, run.run_dir)
    if error is not None:
        raise error
    return code


def _report(run: Any, result: Mapping[str, Any]) -> None:
    """``report.html`` of a run that is about to end as ``result`` says. It can cost itself, but not the run."""
    from mprun.commands.report import REPORT, read_files
    from mprun.report.html_page import save
    from mprun.report.page_run import run_page

    try:
        save(run_page(read_files(run.run_dir, dict(result))), run.run_dir / REPORT)
    except Exception as error:
        print(f"mprun: warning: no {REPORT}: {type(error).__name__}: {error}", file=sys.stderr)


def _write(
    run: Any, modules: list[dict[str, Any]], kernels: str, *, resume: Resume | None, composed: Composed | None
) -> None:
    """Everything in the folder that is there from the start, and what of an earlier life is no longer true."""
    from mprun.training import checkpoint
    from mprun.training.record import write_folder, write_hydra

    plain, checkpoints = run.metadata["config"], run.run_dir / "checkpoints"
    recipe = recipe_of(composed.choices.get("recipe")) if composed else None
    file = precision_file_of(composed.choices.get("precision")) if composed else None
    about, from_file = ({"name": read.name, "sha256": read.sha256} if read else None for read in (recipe, file))
    write_folder(run, plain, modules, kernels=kernels, recipe=about, precision_file=from_file)
    if composed is not None:
        write_hydra(run.run_dir, plain, composed.hydra, composed.overrides)
    if resume is not None and resume.checkpoint.parent == checkpoints:
        # The run goes on from there: what came after is no longer its past, also if it ends before it saves again.
        checkpoint.drop_later(checkpoints, run.state.counters.applied)
        if resume.checkpoint.name != "last.pt":
            checkpoint.link(resume.checkpoint, checkpoints / "last.pt")


def _info(run: Any, *, resumed: bool) -> Any:
    from mprun.tracking.base import RunInfo

    config, counters = run.config, run.state.counters
    return RunInfo(
        run_dir=run.run_dir,
        config=run.metadata["config"],
        name=config.name,
        total_steps=run.plan.steps,
        resumed_from_step=counters.applied if resumed else None,
        resumed_from_attempt=counters.attempts if resumed else None,
        tracking=config.tracking,
        job_type=config.command,
    )


def _looped(run: Any, result: dict[str, Any]) -> int:
    """The loop; how it ended goes into ``result``. Returns the exit status."""
    from mprun.data.workers import dead_worker
    from mprun.training.blame import dtype_trouble, kernel_trouble
    from mprun.training.loop import fit
    from mprun.training.record import is_memory, memory_trouble

    try:
        end = fit(run)
    except Exception as error:
        if is_memory(error):
            raise memory_trouble(error, run.config, run.state.device) from error
        if text := dead_worker(error) or kernel_trouble(error) or dtype_trouble(error, run.state):
            raise MprunError(text) from error
        raise
    result |= {"status": end.status, "stopped": end.reason}
    if end.signal is None:
        return 0
    advice = f"go on with resume={run.run_dir}" if run.saved_step >= 0 else f"nothing could be saved: {run.save_error}"
    result["error"] = f"stopped by {signal.Signals(end.signal).name}; {advice}"
    return 128 + end.signal


def _unsaved(run: Any, result: Mapping[str, Any]) -> MprunError | None:
    """The error of a run that did all its steps and saved none of them; a warning if only the last ones are not saved."""
    if result["status"] != "ok" or run.save_error is None or run.saved_step == run.state.counters.applied:
        return None
    if result["checkpoint"] is None:
        return MprunError(
            f"all {run.state.counters.applied} steps are done, but nothing could be saved: {run.save_error}\n"
            "the numbers are in metrics.jsonl; make room and start again"
        )
    print(
        f"mprun: warning: the newest checkpoint is of step {run.saved_step}, the run ended at {run.state.counters.applied}",
        file=sys.stderr,
    )
    return None
