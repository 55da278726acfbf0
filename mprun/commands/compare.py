"""``mprun compare``: the same experiment under several precisions and seeds, and a verdict on each of them.

    mprun compare model=resnet compare.precisions=fp32,bf16,fp16_dynamic compare.seeds=3

compare.precisions=fp32,bf16     the policies; files too: fp32,./mine.yaml
compare.baseline=fp32            which of them the others are held against
compare.seeds=3                  how many, from seed= on; or which: 0,1,5
compare.metric=val/loss          by which final metric (top-1, or the loss)
compare.margin=0.01              what deficit is material (one point of top-1, or 1 % of the loss)
compare.spread=2                 ... but never less than so many standard deviations of the baseline's seeds
compare.confidence=0.95          of the test
compare.gradient_steps=0,10,100  where gradients are held against FP32's; none: []
compare.strict=true              undecided counts as failed
sweep.jobs=1                     runs at once (their times then say little)
sweep.new=true                   begin anew where the same experiment has a comparison to go on with

Everything else is the experiment, the same for all runs. The runs lie in outputs/compare/NAME/<stamp>-<uid>/, each in a folder
of its own; the same experiment again, with more seeds or other policies, runs what is missing. Beside them: compare.md,
compare.json, compare.html and result.json.

Exit status: 0 if no policy fails, 1 if one does (or the baseline itself), 2 if refused, 130 after Ctrl-C, which keeps what is
finished. The test is stated in docs/numerics.md.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from mprun.commands.compare_words import Asked, namesakes, read
from mprun.compose import compose, prepare
from mprun.config import Config
from mprun.errors import ConfigError
from mprun.lab.compare_markdown import as_json, markdown
from mprun.lab.compare_text import last_lines, terminal
from mprun.lab.comparison import Comparison, build
from mprun.lab.measured import Candidate, measured
from mprun.numerics.parity import FAIL, UNDECIDED
from mprun.report.summary import shown_path
from mprun.runs import OUTPUTS, slug, turn
from mprun.sweeps.folder import Job, Sweep, newest_with
from mprun.sweeps.jobs import read_result
from mprun.sweeps.plan import identity, key_of, plan, planned
from mprun.sweeps.pool import cores, run_pool
from mprun.training.env import atomic_write_json, atomic_write_text

FOLDER = "compare"
REPORT, RESULT = "compare", "result.json"


def run(words: Sequence[str]) -> int:
    """Compare. Returns the exit status.

    Raises:
        ConfigError: the words do not fit. No run was started.
    """
    begun = time.perf_counter()
    asked = read(words)
    jobs = _jobs(asked)
    _refuse_policies(asked, jobs)
    return _compare(asked, _folder(asked, jobs), begun)


def _jobs(asked: Asked) -> list[Job]:
    """Seed by seed, so that what has run when one stops can be compared."""
    jobs: list[Job] = []
    for seed in asked.seeds:
        for word in asked.policies.values():
            own = (word, f"seed={seed}")
            jobs.append(Job(len(jobs) + 1, own, (*asked.base, *own)))
    return jobs


def _refuse_policies(asked: Asked, jobs: list[Job]) -> None:
    """Compose the first seed of every policy, so that what is not legal stops nothing halfway."""
    for index, label in enumerate(asked.policies):
        job = plan(jobs[index], FOLDER)
        if job.error:
            raise ConfigError(
                f"{label}: {job.error.partition(': ')[2]}" if label not in job.error else job.error.partition(": ")[2]
            )


def _folder(asked: Asked, jobs: list[Job]) -> Sweep:
    """The newest comparison of this experiment, with these jobs; else a new one."""
    words = identity(prepare([word for word in asked.base if key_of(word) != "trust"]))
    place = Path(OUTPUTS, FOLDER)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {place}: {error.strerror}") from error
    about = {"command": FOLDER, "again": list(asked.again), "cwd": os.getcwd()}
    with turn(place):
        old = None if asked.config.sweep.new else newest_with(words, kind=FOLDER)
        if old is not None:
            old.jobs, old.about = jobs, {**old.about, **about}
            return old
        config = asked.config
        given = any(key_of(word) == "name" for word in asked.base)
        name = slug(config.sweep.name or (config.name if given else f"{config.dataset.name}-{config.model.name}"))
        folder = place / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
        fresh = Sweep(
            folder.resolve(), words, jobs, {"created": datetime.now(UTC).isoformat(timespec="seconds"), **about}
        )
        fresh.save()
        return fresh


def _compare(asked: Asked, sweep: Sweep, begun: float) -> int:
    """Run what is missing, measure, judge, write and print. Returns the exit status."""
    width = asked.config.sweep.jobs
    count = len(sweep.jobs)
    print(f"comparison of {len(asked.policies)} policies, {count} runs, in {shown_path(sweep.folder)}", flush=True)
    if width > 1:
        print(
            f"{width} at once, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS') or max(1, cores() // width)} each",
            flush=True,
        )
    sweep.save()
    stop = asked.config.sweep.on_error.name == "stop"
    pool = run_pool(sweep, planned(sweep, ()), width=width, on_error_stop=stop)
    signal, beside, notes = pool.signal, dict[str, dict[str, Any]](), list[str]()
    trouble: Exception | None = None
    if not signal:
        try:
            beside, notes = _measured(asked, sweep)
        except KeyboardInterrupt:
            signal = 2
        except Exception as error:  # a bug of ours, which is to be seen, but not to cost the result of the runs
            trouble, notes = error, [f"nothing was measured beside the runs: {type(error).__name__}"]
    found = build(
        sweep.folder, _runs(asked, sweep), name=sweep.folder.parent.name, baseline=asked.config.compare.baseline,
        metric=asked.metric, margin=asked.config.compare.margin, spread=asked.config.compare.spread,
        confidence=asked.config.compare.confidence, measured=beside, at_once=width, words=asked.again,
    )  # fmt: skip
    found = replace(found, notes=(*namesakes(asked.policies), *found.notes, *notes))
    code = 128 + signal if signal else exit_code(found, strict=asked.config.compare.strict)
    _write(found, code, time.perf_counter() - begun)
    _print(found)
    if trouble is not None:
        raise trouble
    return code


def _measured(asked: Asked, sweep: Sweep) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Gradients and memory of every policy that can be composed, at the first seed."""
    policies = {}
    for label in asked.policies:
        job = _first(asked, sweep, label)
        if job.hash:
            scale = read_result(sweep.path(job)).get("loss_scale")
            policies[label] = Candidate(partial(_config, job.words), job.hash, float(scale) if scale else None)
    return measured(sweep.folder, policies, asked.config.compare.gradient_steps)


def _config(words: Sequence[str]) -> Config:
    return compose(words).config


def _first(asked: Asked, sweep: Sweep, label: str) -> Job:
    """The job of the first seed under a policy."""
    return sweep.jobs[list(asked.policies).index(label)]


def _runs(asked: Asked, sweep: Sweep) -> dict[str, dict[int, Path]]:
    """Label -> seed -> run folder. One that was never composed has none yet."""
    found: dict[str, dict[int, Path]] = {label: {} for label in asked.policies}
    jobs = iter(sweep.jobs)
    for seed in asked.seeds:
        for label in asked.policies:
            job = next(jobs)
            found[label][seed] = sweep.path(job) if job.folder else sweep.folder / f"job-{job.number}"
    return found


def exit_code(found: Comparison, *, strict: bool = False) -> int:
    """1 if a policy fails, if no run of the baseline ended well, or (``strict``) if one is undecided; else 0."""
    verdicts = [policy.verdict for policy in found.candidates]
    base = next(policy for policy in found.policies if policy.label == found.baseline)
    dead = all(math.isnan(value) for run in base.runs if (value := run.value(found.metric)) is not None)
    return 1 if FAIL in verdicts or dead or (strict and UNDECIDED in verdicts) else 0


def _write(found: Comparison, code: int, seconds: float) -> None:
    """``compare.md``, ``.json``, ``.html``, and last of all ``result.json``."""
    from mprun.lab.compare_html import write_html

    atomic_write_text(found.folder / f"{REPORT}.md", markdown(found))
    atomic_write_json(found.folder / f"{REPORT}.json", as_json(found))
    write_html(found, found.folder / f"{REPORT}.html")
    result = {
        "command": FOLDER,
        "status": "interrupted" if code > 2 else "ok",
        "exit_code": code,
        "error": None,
        "baseline": found.baseline,
        "metric": found.metric,
        "seeds": list(found.seeds),
        "verdicts": {policy.label: policy.verdict for policy in found.candidates},
        "whole": found.whole,
        "wall_s": seconds,
    }
    atomic_write_json(found.folder / RESULT, result)


def _print(found: Comparison) -> None:
    from rich.console import Console

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    for line in ["", *terminal(found, console.width), ""]:
        console.print(line, soft_wrap=True)
    for text in last_lines(found):
        console.print(text, soft_wrap=True, markup=False)
