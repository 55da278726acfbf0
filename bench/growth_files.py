"""The axes of ``growth.py`` that are about files: length of a run, number of runs, jobs, trials and recipes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from growth_fit import FLAT, Series, timed
from growth_steps import resident_bytes, saved_bytes

import mprun.options
import mprun.sweeps.plan
from mprun.cli import main as command
from mprun.commands import plot, report, table
from mprun.compose import compose, prepare, recorded
from mprun.config import TrackingConfig
from mprun.runs import point_latest
from mprun.sweeps.folder import Job, Sweep, newest_with
from mprun.tracking import JsonlSink, RunInfo, read_metrics
from mprun.tracking.base import Record, Sink
from mprun.training import checkpoint, loop
from mprun.training.build import build, device_of, switches
from mprun.training.run import Run, best_of, log_state

Prepared = tuple[float, Callable[[], float]]
READ, BOUNDED = "reading a run", "what must not grow"
TINY = ["model=mlp", "model.kwargs.hidden=[8]", "precision=fp16_dynamic", "tracking=disabled", "device=cpu"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def run_quietly(act: Callable[[Sequence[str]], int], words: Sequence[str]) -> None:
    """A command of mprun, whose output nobody sees.

    Raises:
        RuntimeError: it failed.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = act(words)
    if status:
        raise RuntimeError(f"mprun {' '.join(words)} ended with status {status}\n{said.getvalue()[-2000:]}")


def real_run(place: Path) -> Path:
    """A short real run, of which the others are copies."""
    if not place.exists():
        words = [*TINY, "train.steps=40", "train.log_every=2", "dataset.limit=128", f"hydra.run.dir={place}"]
        run_quietly(command, [*words, "train.eval_every=20"])
    return place


# --- length of a run -----------------------------------------------------------------------------------------------------


def length(folder: Path, *, small: bool = False) -> list[Series]:
    """What is done with a run against the number of its records, and a real run against its steps."""
    sizes = [50, 100, 200] if small else [1000, 3000, 10_000, 30_000, 100_000]
    base = real_run(folder / "base")

    def of(act: Callable[[Path], float]) -> Callable[[int], Prepared]:
        return lambda count: (count, lambda: act(long_run(base, folder / f"long{count}", count)))

    def by(name: str, *words: str) -> Callable[[Path], float]:
        act = {"report": report.run, "plot": plot.run, "table": table.run}[name]
        return lambda run: timed(lambda: run_quietly(act, [str(run), *words]), least_ms=0)

    def size_after(name: str, file: str, *words: str) -> Callable[[Path], float]:
        def cost(run: Path) -> float:
            by(name, *words, "--out", str(run / file))(run)
            return (run / file).stat().st_size / 1e3

        return cost

    picture = ("--metric", "train/loss")
    found = [
        Series("read_metrics", sizes, of(lambda run: timed(lambda: read_metrics(run, effective=True))), panel=READ),
        Series("mprun report", sizes, of(by("report", "--out", str(folder / "report.html"))), panel=READ),
        Series("mprun plot", sizes, of(by("plot", *picture, "--out", str(folder / "plot.png"))), panel=READ),
        Series("start of a resumed run's log", sizes, of(lambda run: timed(lambda: resumed(run))), panel=READ),
        Series("mprun table", sizes, of(by("table")), panel=BOUNDED, most=FLAT),
        Series("the n-th record, 1,000 times", sizes, of(nth_record), panel=BOUNDED, most=FLAT),
    ]  # fmt: skip
    files = {
        "metrics.jsonl": (lambda run: (run / "metrics.jsonl").stat().st_size / 1e3, None),
        "report.html": (size_after("report", "page.html"), FLAT),
        "plot.svg": (size_after("plot", "plot.svg", *picture), FLAT),
        "plot.html": (size_after("plot", "plot.html", *picture), FLAT),
    }
    for name, (act, most) in files.items():
        series = Series(name, sizes, of(act), unit="kB", panel="size of a file", exact=True)
        found.append(series if most is None else replace(series, most=most))
    return found + lived(folder, small=small)


def long_run(base: Path, place: Path, count: int) -> Path:
    """A run folder whose metrics are ``count`` records, written by the run's own sink."""
    if place.exists():
        return place
    place.mkdir()
    for name in ("config.yaml", "result.json", "modules.json", "env.json"):
        shutil.copy(base / name, place / name)
    sink = started(place)
    for record in records(0, count):
        sink.log(record)
    sink.finish({})
    return place


def started(place: Path) -> JsonlSink:
    """A sink that writes into ``place``, as of the first life of a run."""
    sink = JsonlSink()
    sink.start(RunInfo(place, {}, "growth", 0, None, TrackingConfig(), "bench"))
    return sink


def records(first: int, count: int) -> Iterator[Record]:
    """Records as a run logs them: mostly of training, an evaluation in 50, a skip in 97."""
    for number in range(first, first + count):
        place: Record = {"step": number, "attempt": number + number // 97, "epoch": number // 500}
        loss = 2.3 / (1 + number / 2000) * (1 + 0.1 * (number * 7919 % 101) / 101)
        if number % 97 == 96:
            more: Record = {"kind": "skip", "reason": "overflow", "train/loss": loss, "precision/loss_scale": 65536.0,
                            "precision/skipped_steps": number // 97, "sample_ids": list(range(8))}  # fmt: skip
        elif number % 50 == 49:
            more = {
                "kind": "val",
                "val/loss": loss * 1.1,
                "val/top1": 1 / (1 + loss),
                "ema/loss": loss,
                "ema/top1": 0.5,
            }
        else:
            more = {"kind": "train", "train/loss": loss, "train/top1": 1 / (1 + loss), "train/grad_norm": loss / 3,
                    "train/lr": 1e-3,
                    "precision/loss_scale": 65536.0, "precision/skipped_steps": number // 97, "perf/examples_per_s": 12345.6,
                    "perf/step_ms": 3.21, "perf/data_wait_frac": 0.01, "perf/peak_memory_bytes": 5.0e8}  # fmt: skip
        yield place | more


def nth_record(run: Path) -> float:
    """Milliseconds of 1,000 records after those that are there; they are taken away again."""
    path = run / "metrics.jsonl"
    before = path.stat().st_size
    sink = JsonlSink()
    sink._file = path.open("ab")
    more = list(records(10**6, 1000))
    try:
        return timed(lambda: [sink.log(record) for record in more], least_ms=0)
    finally:
        sink.finish({})
        os.truncate(path, before)


def resumed(run: Path) -> None:
    """What the log of a run does when it goes on; its mark is taken away again."""
    path = run / "metrics.jsonl"
    before = path.stat().st_size
    sink = JsonlSink()
    sink.start(RunInfo(run, {}, "growth", 0, 10, TrackingConfig(), "bench", resumed_from_attempt=10))
    sink.finish({})
    os.truncate(path, before)


def lived(folder: Path, *, small: bool) -> list[Series]:
    """A real run of tiny steps: pace, memory and checkpoint, looked at on its way."""
    sizes = [20, 40, 80] if small else [320, 640, 1280, 2560, 5120]
    seen: dict[int, dict[str, float]] = {}

    def of(name: str) -> Callable[[int], Prepared]:
        def cost(step: int) -> float:
            if not seen:
                with quiet():
                    seen.update(live(folder, sizes))
            return seen[step][name]

        return lambda step: (step, lambda: cost(step))

    panel = "a real run, at a step of it"
    return [
        Series("a step, logged", sizes, of("pace"), panel=panel, most=FLAT, exact=True),
        Series("resident memory", sizes, of("memory"), panel=panel, most=FLAT, exact=True, unit="MB"),
        Series("checkpoint", sizes, of("checkpoint"), panel=panel, most=FLAT, exact=True, unit="kB"),
    ]


class Marks(Sink):
    """Notes the pace since the last mark, memory and the size of a checkpoint at some steps of a run."""

    def __init__(self, run: Run, steps: Sequence[int]) -> None:
        self.run, self.steps = run, set(steps)
        self.found: dict[int, dict[str, float]] = {}
        self.last = 0, 0.0

    def log(self, record: Record) -> None:
        """At a step that is asked for, look."""
        step = record.get("step")
        if record.get("kind") != "train" or step not in self.steps or step in self.found:
            return
        content = checkpoint.snapshot(self.run.state, log=log_state(self.run))
        self.found[step] = {
            "pace": 1e3 * (self.run.train_s - self.last[1]) / (step - self.last[0]),
            "memory": resident_bytes() / 1e6,
            "checkpoint": saved_bytes(content) / 1e3,
        }
        self.last = step, self.run.train_s


def live(folder: Path, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Train for as many steps as the last of ``steps``, and look at each of them."""
    words = [
        f"train.steps={steps[-1]}",
        "train.log_every=10",
        "train.eval_every=1000000",
        "train.checkpoint_every=1000000",
    ]
    config = compose([*TINY, *words, "train.batch_size=16"]).config
    place = folder / "lived"
    place.mkdir()
    device = device_of(config)
    with switches(config, device):
        state, data, plan = build(config, device)
        run = Run(config, state, data, plan, [], place, best_of(config))
        marks = Marks(run, steps)
        run.sinks = [started(place), marks]
        loop.fit(run)
    return marks.found


# --- number of runs, jobs, trials ----------------------------------------------------------------------------------------


def runs(folder: Path, *, small: bool = False) -> list[Series]:
    """What is done with many run folders, jobs of a sweep, earlier sweeps and trials of a study."""
    sizes = [4, 8, 16] if small else [32, 64, 128, 256, 512, 1024]
    jobs = [2, 3, 4] if small else [4, 8, 16, 32, 64]
    base = real_run(folder / "base")

    def of(act: Callable[[Path], Any]) -> Callable[[int], Prepared]:
        def prepare(count: int) -> Prepared:
            place = many(base, folder / f"runs{count}" / "outputs", count)
            return count, lambda: timed(lambda: act(place), least_ms=0)

        return prepare

    page = folder / "many.html"
    found = [
        Series("mprun table", sizes, of(lambda place: run_quietly(table.run, [str(place)]))),
        Series("mprun table --by seed", sizes, of(lambda place: run_quietly(table.run, [str(place), "--by", "seed"]))),
        Series("mprun report", sizes, of(lambda place: run_quietly(report.run, [str(place), "--out", str(page)]))),
        Series(
            "mprun plot", sizes, of(lambda place: run_quietly(plot.run, [str(place), "--out", str(folder / "p.png")]))
        ),
    ]
    found = [replace(one, panel="reading many runs") for one in found]
    more = [
        Series("resume a finished sweep", sizes, lambda count: _finished(folder, base, count)),
        Series("jobs beside composing", sizes, lambda count: _planned(folder, count)),
        Series("compose jobs", jobs, lambda count: _composed(count)),
        Series("find the sweep among others", sizes, lambda count: _others(folder, count)),
    ]
    found += [replace(one, panel="sweeps") for one in more]
    worker = Study(folder, sizes[:-1])
    return [
        *found,
        Series("outputs/latest", sizes, of(lambda place: point_latest(place / "x" / "7")), panel="a single thing among many",
               most=FLAT),
        Series("tune: one look at the study", worker.sizes, worker.of("look"), panel="a single thing among many"),
        Series("tune: ask and tell a trial", worker.sizes, worker.of("ask"), panel="a single thing among many"),
    ]  # fmt: skip


def many(base: Path, place: Path, count: int) -> Path:
    """``count`` run folders that differ in seed and learning rate."""
    if place.exists():
        return place
    text = (base / "config.yaml").read_text(encoding="utf-8")
    seed = next(line for line in text.splitlines() if line.startswith("seed:"))
    rate = next(line for line in text.splitlines() if line.startswith("  lr:"))
    for index in range(count):
        run = place / "x" / str(index)
        run.mkdir(parents=True)
        for name in ("result.json", "metrics.jsonl", "env.json", "modules.json"):
            shutil.copy(base / name, run / name)
        changed = text.replace(seed, f"seed: {index % 4}").replace(rate, f"  lr: {1e-3 * (1 + index // 4)}")
        (run / "config.yaml").write_text(changed, encoding="utf-8")
    return place


def _finished(folder: Path, base: Path, count: int) -> Prepared:
    """Milliseconds of a sweep that is issued again when all its jobs are done."""
    from mprun.commands.multirun import sweep

    words, place = [*TINY, f"seed=range({count})"], folder / f"finished{count}"
    jobs = sweep_jobs(words)
    jobs[0] = mprun.sweeps.plan.plan(jobs[0], place.name)
    jobs[1:] = [replace(job, hash=f"{job.number:012x}", folder=f"{job.number:012x}") for job in jobs[1:]]
    made = Sweep(
        place, mprun.sweeps.plan.identity(prepare(words)), jobs, {"created": "2026-01-01T00:00:00", "commit": None}
    )
    text = (base / "config.yaml").read_text(encoding="utf-8")
    for job in jobs:
        run = made.path(job)
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(text.replace("\nseed: 0\n", f"\nseed: {job.number}\n"), encoding="utf-8")
        shutil.copy(base / "result.json", run / "result.json")
    made.save()
    return count, lambda: timed(lambda: run_quietly(lambda given: sweep(given, place), words), least_ms=0)


def sweep_jobs(words: Sequence[str]) -> list[Job]:
    """The jobs of a sweep, none of them composed."""
    from mprun.compose import register

    register()
    return mprun.sweeps.plan.expand(prepare(words), {})


def _planned(folder: Path, count: int) -> Prepared:
    """Milliseconds of what a sweep does for its jobs beside composing them: ``sweep.json`` first of all."""

    def quickly(job: Job, group: str, hydra_words: Sequence[str] = ()) -> Job:
        return replace(job, hash=f"{job.number:012x}", folder=f"{job.number:012x}")

    def cost() -> float:
        place, real = folder / f"planned{count}", mprun.sweeps.plan.plan
        shutil.rmtree(place, ignore_errors=True)
        made = Sweep(place, (), list(jobs))
        made.save()
        mprun.sweeps.plan.plan = quickly
        try:
            return timed(lambda: list(mprun.sweeps.plan.planned(made, ())), least_ms=0)
        finally:
            mprun.sweeps.plan.plan = real

    jobs = sweep_jobs([*TINY, "optimizer.lr=0.1,0.2", f"seed=range({count // 2})"])
    return count, cost


def _composed(count: int) -> Prepared:
    """Milliseconds of composing every job of a sweep."""
    jobs = sweep_jobs([*TINY, f"seed=range({count})"])
    return count, lambda: timed(lambda: [mprun.sweeps.plan.plan(job, "x") for job in jobs], least_ms=0)


def _others(folder: Path, count: int) -> Prepared:
    """Milliseconds of finding the sweep that was issued with the same words among ``count`` of ten jobs each."""
    place = folder / f"others{count}"
    for index in range(count):
        jobs = [
            Job(number, (f"seed={number}",), ("model=mlp", f"seed={number}"), "0" * 12, "0" * 12)
            for number in range(10)
        ]
        Sweep(place / "sweeps" / "x" / str(index), (f"name={index}",), jobs, {"created": str(index)}).save()
    words = recorded([f"name={count // 2}"])
    return count, lambda: timed(lambda: newest_with(words, place))


class Study:
    """A study that grows to the sizes asked for, one after the other: what a worker does with it costs so much."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder, self.sizes = folder / "study", sizes
        self.found: dict[int, dict[str, float]] = {}

    def of(self, name: str) -> Callable[[int], Prepared]:
        """What a size costs, looked up or found out."""

        def cost(count: int) -> float:
            if not self.found:
                self._grow()
            return self.found[count][name]

        return lambda count: (count, lambda: cost(count))

    def _grow(self) -> None:
        from mprun.tuning.settings import Direction, TuneConfig
        from mprun.tuning.space import split_space
        from mprun.tuning.study import ended, left_behind, open_study

        self.folder.mkdir()
        space, fixed = split_space(["optimizer.lr=tag(log,interval(1e-4,1e-1))"])
        settings = TuneConfig(study="s", metric="val/top1", direction=Direction.maximize)
        study = open_study(settings, self.folder, space, fixed)

        def one() -> None:
            trial = study.ask({part.key: part.distribution() for part in space})
            study.tell(trial, -abs(trial.params["optimizer.lr"] - 0.01))

        for count in self.sizes:
            while len(ended(study)) < count - 8:
                one()
            asked = timed(lambda: [one() for _ in range(8)], least_ms=0) / 8
            looks = [timed(lambda: (ended(study), left_behind(study, self.folder, "me"))) for _ in range(5)]
            self.found[count] = {"ask": asked, "look": statistics.median(looks)}


# --- recipes -------------------------------------------------------------------------------------------------------------


def recipes(folder: Path, *, small: bool = False) -> list[Series]:
    """Composing with one recipe, or one precision file, among many."""
    sizes = [4, 8, 16] if small else [32, 64, 128, 256, 512, 1024]
    real = mprun.options.tree

    def of(act: Callable[[Path, int], Any], *, least_ms: float = 0) -> Callable[[int], Prepared]:
        def prepare(count: int) -> Prepared:
            place = recipe_files(folder / f"recipes{count}", count)

            def cost() -> float:
                mprun.options.tree = lambda name: place if name == "recipes" else real(name)
                try:
                    return timed(lambda: act(place, count), least_ms=least_ms)
                finally:
                    mprun.options.tree = real

            return count, cost

        return prepare

    def listed(place: Path, count: int) -> None:
        from mprun.commands import list as lists

        run_quietly(lists.run, ["recipe"])

    def named(place: Path, count: int) -> None:
        compose([f"recipe=many/r{count // 2}"])

    def file(place: Path, count: int) -> None:
        compose([f"precision={place / 'precision' / f'p{count // 2}.yaml'}"])

    one = "composing with one of many"
    return [
        Series("recipe=", sizes, of(named), panel=one, most=FLAT),
        Series("precision=FILE", sizes, of(file), panel=one, most=FLAT),
        Series(
            "words of a sweep over all recipes",
            sizes,
            of(lambda place, count: prepare([_all(count)])),
            panel="all of them",
        ),
        Series("mprun list recipe", sizes, of(listed, least_ms=15), panel="all of them"),
    ]


def _all(count: int) -> str:
    return "recipe=" + ",".join(f"many/r{index}" for index in range(count))


def recipe_files(place: Path, count: int) -> Path:
    """A folder of ``count`` recipes, and a folder of as many precision files below it."""
    if place.exists():
        return place
    (place / "many").mkdir(parents=True)
    (place / "precision").mkdir()
    for index in range(count):
        head = f"# @package _global_\n# The recipe with number {index}.\n"
        lines = f"seed: {index}\ntrain:\n  epochs: 3\nmeta:\n  title: number {index}\n"
        (place / "many" / f"r{index}.yaml").write_text(head + lines, encoding="utf-8")
        precision = json.dumps({"defaults": ["fp16_dynamic"], "fp32_modules": ["head"]})
        (place / "precision" / f"p{index}.yaml").write_text(precision, encoding="utf-8")
    return place
