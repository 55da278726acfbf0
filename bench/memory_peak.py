"""The real memory of a training step beside the sum of the categories of ``mprun estimate``. No hidden copies.

    python bench/memory_peak.py [--rows resnet50 gpt] [--policies fp32 bf16] [--no-phases] [--json]      six minutes

Each row is a process of its own: a model under a policy, with EMA or without, in one micro-batch or two. Three numbers meet:

* ``estimate``   the peak that is predicted from shapes: parameters, masters, gradients, optimizer state, EMA, buffers, data,
                 activations, weight copies, working tensors, and what kernels take for themselves (``kernel workspace``)
* ``resident``   on the CPU: by how much the resident memory of the process grows beyond what it was before data and model were
                 built (``VmHWM``, which is reset before the step, minus ``VmRSS``). On a GPU: ``max_memory_allocated``
* ``allocator``  what torch's CPU allocator gave out, every event of a step added up. It knows neither pages nor libraries, is
                 the same in every run, and so tells a copy of ours from noise

Target: ``resident`` at most 1.05 of ``estimate``, in every mode. In ``master`` mode the formula is 2 bytes a parameter, 4 of
the master, 4 of its gradient, optimizer state and EMA by kind, and what the step's activations take.

Made meaningful: glibc maps each block from 64 KiB on alone and unmaps it when it is freed (``MALLOC_MMAP_THRESHOLD_``; its
default threshold grows with use, and what is freed then stays in a heap), one arena, trimmed at once. The whole step is
rehearsed and forgotten before the level is taken, so that compiled kernels, thread pools, packing buffers and modules of Python
are no part of the growth; ``left`` is what tensors of the rehearsal are still there when it is forgotten, so that no leak can
hide in it, and ``held`` by how much the tensors at rest exceed what the estimate says stands between steps.

``phases`` then asks of the same process whether anything else in a run needs more than a step: building, an evaluation of the
EMA, saving, and resuming: by how much the memory that belongs to the process alone (``RssAnon``, looked at every millisecond)
grows at most beyond the state at rest, as a share of that state (parameters, masters, optimizer, EMA). Pages of a
mapped checkpoint are the system's, which takes them back when it needs them. Targets: saving 2 %, reading and restoring 10 % (a
second copy of the state would be 100 %); building and evaluating must stay below the peak of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import ROOT, about, about_text, progress, save

from mprun.compose import compose
from mprun.config import Config
from mprun.training import checkpoint
from mprun.training.build import build, switches
from mprun.training.footprint import predicting
from mprun.training.state import TrainState
from mprun.training.step import eval_step, train_step

TARGET, LEAST, MIB = 1.05, 0.95, 2**20
STATE = ("parameters", "masters", "optimizer", "ema")
STANDING = (*STATE, "data", "counters")
PHASE_TARGETS = {"save": 0.02, "load and restore": 0.10}
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_MMAP_MAX_": "1000000",
}
IMAGES = ("dataset=synthetic", "dataset.kwargs.examples=64", "dataset.kwargs.val_examples=16", "train.batch_size=16")
MODELS: dict[str, tuple[str, ...]] = {
    "resnet50": ("model=timm", "model.name=resnet50", "dataset.kwargs.image_size=64", *IMAGES),
    "vit_small": ("model=timm", "model.name=vit_small_patch16_224", "model.kwargs.img_size=64", "dataset.kwargs.image_size=64",
                  *IMAGES),
    "gpt": ("model=gpt", "model.kwargs.depth=8", "model.kwargs.dim=512", "model.kwargs.heads=8", "dataset=python_docs",
            "dataset.limit=64", "train.batch_size=16"),
    "mlp": ("model=mlp", "dataset=synthetic", "dataset.kwargs.examples=32", "dataset.kwargs.val_examples=8",
            "train.batch_size=8"),
}  # fmt: skip
EMA, WINDOW = "train.ema.decay=0.999", "train.accumulate=2"
CHECKPOINTING = "model.activation_checkpointing=true"
# Model, policy, what else.
ROWS: list[tuple[str, str, tuple[str, ...]]] = [
    ("resnet50", "fp32", (EMA,)),
    ("resnet50", "bf16", ()),
    ("resnet50", "fp16_dynamic", (EMA,)),
    ("resnet50", "fp16_master_dynamic", (EMA, WINDOW)),
    ("vit_small", "fp32", ()),
    ("vit_small", "bf16", (EMA, CHECKPOINTING)),
    ("vit_small", "fp16_dynamic", (WINDOW,)),
    ("vit_small", "fp16_master_dynamic", (EMA,)),
    ("vit_small", "bf16_master", ()),
    ("gpt", "fp32", (EMA, WINDOW)),
    ("gpt", "bf16", ()),
    ("gpt", "fp16_dynamic", (EMA,)),
    ("gpt", "fp16_master_dynamic", ()),
    ("gpt", "bf16_master", (EMA, WINDOW)),
]


def main() -> int:
    models, policies = (list(dict.fromkeys(row[index] for row in ROWS)) for index in (0, 1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=models, choices=models, help="models (default: all)")
    parser.add_argument("--policies", nargs="+", choices=policies, help="of these rows only (default: all)")
    parser.add_argument("--no-phases", action="store_true", help="leave out building, evaluation, saving, resuming")
    parser.add_argument("--json", action="store_true", help="write bench/results/memory_peak.json")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.worker:
        print(json.dumps(measure(compose(args.worker).config, device, phases=not args.no_phases)))
        return 0
    chosen = [row for row in ROWS if row[0] in args.rows and (not args.policies or row[1] in args.policies)]
    if not chosen:
        there = "; ".join(f"{model}: {', '.join(p for m, p, _ in ROWS if m == model)}" for model in args.rows)
        parser.error(f"no row has one of --policies {' '.join(args.policies)} (there are {there})")
    rows = []
    print(f"{'model':<10} {'policy':<20} {'with':<26} {'estimate':>9} {'resident':>9} {'ratio':>6} {'allocator':>9} "
          f"{'ratio':>6} {'left':>5} {'held':>5}   MiB")  # fmt: skip
    for number, (model, policy, more) in enumerate(chosen, start=1):
        progress(f"{number}/{len(chosen)} {model} {policy}")
        phases = [] if not args.no_phases and EMA in more else ["--no-phases"]
        row = {"model": model, "policy": policy, "with": list(more),
               **run_worker([*MODELS[model], f"precision={policy}", *more], phases)}  # fmt: skip
        progress("")
        rows.append(row)
        print_row(row)
    table = judged(rows)
    for line in table:
        print(f"{line['what']}: {line['ratio']:.3f}, target {line['target']}: {'met' if line['met'] else 'missed'}")
    facts = about(
        threads=torch.get_num_threads(), device=torch.cuda.get_device_name() if device.type == "cuda" else None
    )
    print(about_text(facts))
    if args.json:
        print(save("memory_peak", {"about": facts, "rows": rows, "table": table}))
    return 0


def run_worker(words: list[str], flags: list[str]) -> dict[str, Any]:
    """:func:`measure` in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *flags, "--worker", *words],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_row(row: dict[str, Any]) -> None:
    """One line of the step, and one of the phases."""
    short = {EMA: "EMA", WINDOW: "2 micro-batches", CHECKPOINTING: "checkpointing"}
    words = ", ".join(short.get(word, word) for word in row["with"]) or "-"
    estimate, resident, allocator, left, held = (
        row[key] / MIB for key in ("estimate", "resident", "allocator", "left", "held")
    )
    print(f"{row['model']:<10} {row['policy']:<20} {words:<26} {estimate:9.1f} {resident:9.1f} {resident / estimate:6.3f} "
          f"{allocator:9.1f} {allocator / estimate:6.3f} {left:5.1f} {held:5.1f}", flush=True)  # fmt: skip
    if "phases" in row:
        state = row["state"]
        told = (f"{name} {size / state:+.3f} of the state" for name, size in row["phases"].items())
        print(f"{'':<10} {'; '.join(told)}", flush=True)


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that answer a target: the worst row by kind of policy, and the worst phase."""
    lines = []
    masters = [row for row in rows if "master" in row["policy"]]
    others = [row for row in rows if "master" not in row["policy"]]
    for kind, members in (("full precision and autocast", others), ("master mode", masters)):
        if members:
            worst = max(members, key=lambda row: row["resident"] / row["estimate"])
            lowest = min(row["resident"] / row["estimate"] for row in members)
            measured = (f"{worst['model']} {worst['policy']}: {worst['resident'] / MIB:.0f} MiB resident, estimated "
                        f"{worst['estimate'] / MIB:.0f}; lowest of {len(members)} rows {lowest:.3f}")  # fmt: skip
            line = _line(f"peak of a step, {kind}", measured, worst["resident"] / worst["estimate"], TARGET)
            # An estimate that is far too large would meet any upper bound.
            lines.append({**line, "met": line["met"] and lowest >= LEAST})
    if whole := [
        (max(row["built"], row["at_rest"] + row["phases"]["evaluate the EMA"]), row) for row in rows if "phases" in row
    ]:
        size, worst = max(whole, key=lambda pair: pair[0] / pair[1]["estimate"])
        measured = f"{worst['model']} {worst['policy']}: {size / MIB:.0f} MiB, a step {worst['estimate'] / MIB:.0f}"
        lines.append(_line("peak of building and evaluating, to a step", measured, size / worst["estimate"], TARGET))
    for phase, target in PHASE_TARGETS.items():
        if found := [row for row in rows if phase in row.get("phases", {})]:
            worst = max(found, key=lambda row: row["phases"][phase] / row["state"])
            size = worst["phases"][phase]
            measured = (
                f"{worst['model']} {worst['policy']}: {size / MIB:.1f} MiB beside a state of {worst['state'] / MIB:.0f}"
            )
            lines.append(_line(f"copies made by: {phase}", measured, size / worst["state"], target))
    return lines


def _line(what: str, measured: str, ratio: float, target: float) -> dict[str, Any]:
    return {"what": what, "measured": measured, "ratio": ratio, "target": target, "met": ratio <= target}


# --- one process ------------------------------------------------------------------------------------------------------


def measure(config: Config, device: torch.device, *, phases: bool) -> dict[str, Any]:
    """Predicted and real bytes of one configuration."""
    with switches(config, device):
        _stepped(config, device)
        left = sum(distinct(device).values())
        start = level(device)
        state, window = _stepped(config, device)
        built = peak(device) - start
        resident = _peak_of(lambda: train_step(state, window), device) - start
        at_rest = level(device) - start
        standing = sum(distinct(device).values())
        allocator = standing + allocated(lambda: train_step(state, window)) if device.type == "cpu" else resident
        found: dict[str, Any] = {"resident": resident, "allocator": allocator, "left": left, "at_rest": at_rest,
                                 "standing": standing, "built": built}  # fmt: skip
        if phases:
            found["phases"] = _phases(config, state, device)
    with predicting(config, device) as predict:
        footprint = predict(config.train.batch_size)
    counted = footprint.counted
    found["estimate"], found["categories"] = footprint.peak_bytes, {k: v for k, v in counted.peak.items() if v}
    found["state"] = sum(counted.highest[kind] for kind in STATE)
    found["held"] = standing - sum(counted.highest[kind] for kind in STANDING) - counted.highest["buffers"] // 2
    return found


def _stepped(config: Config, device: torch.device) -> tuple[TrainState, list[Any]]:
    """A state after one step, and its window; the memory's peak is that of building it."""
    reset(device)
    state, data, _ = build(config, device)
    built_with = list(islice(data.train_batches(0), config.train.accumulate))
    state.data = data  # type: ignore[attr-defined]  # what of the set lies on the device is counted, so it stays
    train_step(state, built_with)
    return state, built_with


def _phases(config: Config, state: TrainState, device: torch.device) -> dict[str, int]:
    """What else a run does, each once to warm up, then for the bytes by which it makes memory grow."""
    batches = list(islice(state.data.val_batches(), 1))  # type: ignore[attr-defined]

    def evaluate() -> None:
        assert state.ema is not None
        with state.ema.swapped_in(state.model):
            eval_step(state, state.policy.for_eval(config.precision.eval_dtype), batches)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.pt")
        doings: dict[str, Callable[[], Any]] = {
            "evaluate the EMA": evaluate,
            "save": lambda: checkpoint.save(checkpoint.snapshot(state, best={}), path),
            "load and restore": lambda: checkpoint.restore(state, checkpoint.load(path), path=path),
        }
        found = {}
        for name, do in doings.items():
            do()
            found[name] = grown(do, device)
    return found


def grown(do: Callable[[], Any], device: torch.device) -> int:
    """The most by which ``do`` makes the process's own memory grow; on a GPU that of the device."""
    before = level(device)
    if device.type == "cuda":
        return _peak_of(do, device) - before
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, _status("RssAnon"))

    before, watcher = _status("RssAnon"), threading.Thread(target=watch)
    watcher.start()
    try:
        do()
    finally:
        done.set()
        watcher.join()
    return max(most - before, 0)


def distinct(device: torch.device) -> dict[int, int]:
    """Address -> bytes of every tensor storage that the process holds: all tensors that Python's collector knows, once each."""
    gc.unfreeze()  # what imports set aside is not listed otherwise, a rehearsal's model among it
    gc.collect()
    every = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    storages = (tensor.untyped_storage() for tensor in every if tensor.device.type == device.type)
    return {storage._cdata: storage.nbytes() for storage in storages}


def allocated(do: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator gives out during ``do``, beyond what stood before. The same in every run."""
    with torch.profiler.profile(profile_memory=True) as profile:
        do()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def level(device: torch.device) -> int:
    """Bytes in use now, after everything that can be given back was."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def reset(device: torch.device) -> None:
    """Forget the peak so far."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: torch.device) -> int:
    """The most in use since :func:`reset`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _peak_of(do: Callable[[], Any], device: torch.device) -> int:
    reset(device)
    do()
    return peak(device)


def _status(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, f"/proc/self/status has no {key}"
    return int(match[1]) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
