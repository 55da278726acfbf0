"""What share of the training time is spent waiting for data: ``perf/data_wait_frac`` of real runs.

    python bench/data_wait.py [--cases NAME ...] [--rounds 3] [--steps 60] [--text FILE] [--threads N] [--json]

Every case is a set with a model, trained in FP32 through the command line's own code; FP32 has the shortest steps on the CPU,
so that its share is the largest. Cases take turns. A round's numbers are the median over the run's records without the
first, and the share of all of them together, which is judged: small batches are made several at a time, so that most steps
wait for nothing. Waiting is what the step cannot begin without: gathering, augmenting, normalising, and for files the
worker processes. Microseconds are per micro-batch.

``--text`` adds a text file of yours. Fashion-MNIST is left out where it is not installed. Image files are made for the purpose:
384 JPEGs of 160 x 120 pixels, decoded by 0, 1 and 2 worker processes; they have no target, since decoding takes longer than
such a small model's step on as many cores.

Target: at most 2 % for digits, Fashion-MNIST and text.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import about, about_text, busy_note, positive, progress, save
from PIL import Image

from mprun.cli import main as mprun
from mprun.config import DatasetConfig
from mprun.data import target_of
from mprun.errors import MprunError
from mprun.processes import STOPPED
from mprun.signatures import import_target
from mprun.tracking import read_metrics

TARGET = 0.02
FILES = 384  # made image files for training
CASES = {
    "digits, vit": ["model=vit", "dataset=digits"],
    "digits, resnet": ["model=resnet", "dataset=digits"],
    "digits not augmented, resnet": ["model=resnet", "dataset=digits", "dataset.augment=none"],
    "digits mixed, resnet": ["model=resnet", "dataset=digits", "dataset.mixup=0.2", "dataset.cutmix=1.0"],
    "Fashion-MNIST, vit": ["model=vit", "dataset=fashion_mnist"],
    "Fashion-MNIST, resnet": ["model=resnet", "dataset=fashion_mnist"],
    "python_docs, gpt": ["model=gpt", "dataset=python_docs"],
    "text file, gpt": ["model=gpt", "dataset=text"],
    "synthetic 64 x 64, resnet": ["model=resnet", "dataset=synthetic", "dataset.kwargs.image_size=64"],
    **{
        f"JPEG files, {workers} workers, resnet": [
            "model=resnet", "dataset=imagefolder", "dataset.kwargs.image_size=64", f"dataset.workers={workers}",
        ]
        for workers in (0, 1, 2)
    },
}  # fmt: skip
JUDGED = ("digits", "Fashion-MNIST", "python_docs", "text file")
OPTIONS = [
    "precision=fp32", "train.log_every=1", "train.eval_every=1000000", "train.checkpoint_every=1000000",
    "probe.every=0", "tracking=disabled",
]  # fmt: skip


def main() -> int:
    args, fail = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    busy_note()
    with stoppable() as check, tempfile.TemporaryDirectory() as folder:
        cases = dict(usable(chosen(args.cases), text=args.text, files=Path(folder)))
        if not cases:
            fail("no case is left to measure: every one that was asked for is left out")
        found = measure(cases, rounds=args.rounds, steps=args.steps, check=check)
    rows = [row(name, found[name]) for name in cases]
    for one in rows:
        print(
            f"{one['case']:<32} waits {100 * one['wait_frac']:6.2f} % of the time, all steps {100 * one['mean_frac']:6.2f} %; "
            f"{one['wait_us']:8.0f} us a batch, step {one['step_ms']:7.2f} ms{verdict(one)}"
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = about(threads=None if gpu else torch.get_num_threads(), device=gpu)
    print(about_text(facts))
    if args.json:
        content = {"about": facts, "rounds": args.rounds, "steps": args.steps, "rows": rows, "table": table(rows)}
        print(save("data_wait", content))
    late = [one["case"] for one in rows if one["target"] is not None and one["mean_frac"] > TARGET]
    judged = any(one["target"] is not None for one in rows)
    result = "missed by " + "; ".join(late) if late else "met" if judged else "asked of none of these cases"
    print(f"target {100 * TARGET:.0f} %: {result}")
    return 0


def parse() -> tuple[argparse.Namespace, Callable[[str], Any]]:
    """The options, and what refuses them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME",
        help=f"those whose name contains one of these (default: all): {'; '.join(CASES)}",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="default 3")
    parser.add_argument("--steps", type=positive, default=60, help="steps of a run (default 60)")
    parser.add_argument("--text", metavar="FILE", help="a text file")
    parser.add_argument("--threads", type=positive, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="write bench/results/data_wait.json")
    args = parser.parse_args()
    if unknown := [word for word in args.cases or [] if not chosen([word])]:
        parser.error(f"--cases {', '.join(map(repr, unknown))}: in no name. There are: {'; '.join(CASES)}")
    if args.text and not (Path(args.text).is_file() and os.access(args.text, os.R_OK)):
        parser.error(f"--text {args.text}: not a file that can be read")
    return args, parser.error


def chosen(words: list[str] | None) -> dict[str, list[str]]:
    """The cases whose name contains one of ``words``."""
    return {name: given for name, given in CASES.items() if not words or any(word in name for word in words)}


def usable(cases: dict[str, list[str]], *, text: str | None, files: Path) -> Iterator[tuple[str, list[str]]]:
    """The cases whose data are there, with their ``dataset.root``; the others are said."""
    made = False
    for name, words in cases.items():
        if "dataset=text" in words:
            if text is None:
                print(f"{name}: left out, no --text")
                continue
            words = [*words, f"dataset.root={Path(text).resolve()}"]
        if "dataset=fashion_mnist" in words and (why := missing("fashion_mnist")):
            print(f"{name}: left out, {why}")
            continue
        if "dataset=imagefolder" in words:
            if not made:
                make_files(files)
                made = True
            words = [*words, f"dataset.root={files}"]
        yield name, words


def missing(name: str) -> str | None:
    """Why a set cannot be read; None if it can."""
    try:
        import_target(target_of(DatasetConfig(name=name)), trust=["mprun"], key="dataset.name")()
    except MprunError as error:
        return str(error).splitlines()[0]
    return None


def make_files(folder: Path, *, count: int = FILES, size: tuple[int, int] = (160, 120)) -> None:
    """Image files of noise over a gradient, in two classes: ``count`` for training, 32 for validation."""
    rng = np.random.default_rng(0)
    slope = np.linspace(0, 200, size[0])[None, :, None]
    for split, number in (("train", count), ("val", 32)):
        for label in ("a", "b"):
            place = folder / split / label
            place.mkdir(parents=True)
            for i in range(number // 2):
                pixels = (slope + rng.integers(56, size=(size[1], size[0], 3))).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i:04}.jpg", quality=90)


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM end the bench, its folders removed; gives a call that ends it if one came meanwhile.

    During a run the signals are the run's own, which finishes its step; in its last step nothing else comes of them. Python
    writes every signal that it handles into a pipe, whoever's handler it is, and there the call finds it.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def stop(number: int, _frame: Any = None) -> None:
        raise SystemExit(128 + number)

    def check() -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(reader, 4096):
                if number in (signal.SIGINT, signal.SIGTERM):
                    stop(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield check
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def measure(
    cases: dict[str, list[str]], *, rounds: int, steps: int, check: Callable[[], None]
) -> dict[str, list[dict[str, float]]]:
    """One :func:`summary` a round for every case; ``check`` is called after each run, and ends the bench if it is to end."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, words in cases.items():
            progress(f"round {number + 1}/{rounds} {name}")
            records = train(words, steps=steps)
            check()
            found[name].append(summary(records))
    progress("")
    return found


def train(words: list[str], *, steps: int) -> list[dict[str, Any]]:
    """The training records of one run.

    Raises:
        SystemExit: the run failed, or a signal stopped it: then with the status of that.
    """
    quiet = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        given = [*words, *OPTIONS, f"train.steps={steps}", f"hydra.run.dir={folder}{os.sep}run"]
        status = mprun(given)
        if status in STOPPED:
            raise SystemExit(status)
        if status:
            raise SystemExit(f"data_wait: mprun {' '.join(given)} ended with status {status}\n{quiet.getvalue()}")
        return [record for record in read_metrics(Path(folder, "run")) if record["kind"] == "train"]


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """Of records of one step each, the first left out: median share and step, mean share, microseconds of a wait."""
    steady = records[1:] or records
    shares = [record["perf/data_wait_frac"] for record in steady]
    steps = [record["perf/step_ms"] for record in steady]
    waits = [step * share / (1 - share) for step, share in zip(steps, shares, strict=True)]
    return {
        "wait_frac": statistics.median(shares),
        "mean_frac": sum(waits) / (sum(waits) + sum(steps)),
        "wait_us": 1e3 * statistics.median(waits),
        "step_ms": statistics.median(steps),
    }


def row(case: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, with the target where there is one."""
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    return {"case": case, **medians, "target": TARGET if case.startswith(JUDGED) else None}


def verdict(one: dict[str, Any]) -> str:
    """What a row says about the target."""
    return "" if one["target"] is None else f"  {'met' if one['mean_frac'] <= one['target'] else 'MISSED'}"


def table(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that answer the target."""
    return [
        {
            "what": f"waiting for data: {one['case']}",
            "measured": f"{one['wait_us']:.0f} µs for each batch, beside steps of {one['step_ms']:.1f} ms "
            f"in the median step ({one['wait_frac']:.4f}); the share is that of all steps, ends of epochs included",
            "ratio": one["mean_frac"],
            "target": one["target"],
            "met": one["mean_frac"] <= one["target"],
        }
        for one in rows
        if one["target"] is not None
    ]


if __name__ == "__main__":
    raise SystemExit(main())
