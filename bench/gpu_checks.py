"""Correctness on a GPU: the test suite, operation dtypes under autocast, no waiting for the device, the scale's way.

    python bench/gpu_checks.py suite|dtypes|sync|trajectory --json FILE [--device cuda|cpu] [--tiny] [--limit SECONDS]

``bench/gpu.py`` calls this; docs/gpu.md says what each section checks and what it writes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from gpu_section import NEVER, QUIET, Asked, config_of, run_section
from torch import Tensor

from mprun.config import Config
from mprun.data.base import Batch
from mprun.precision.cpu_autocast import POLICY, cuda_operation_list
from mprun.training.build import build, switches
from mprun.training.loop import step, windows
from mprun.training.outcomes import drain
from mprun.training.result import OVERFLOW, StepResult
from mprun.training.run import Run, best_of
from mprun.training.step import eval_step, train_step

# --- the test suite ---------------------------------------------------------------------------------------------------


def suite(asked: Asked) -> dict[str, Any]:
    """``pytest -m gpu``: counts, and the tests that failed, each with the last line of its error."""
    files = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if re.search(r"mark\.gpu\b", p.read_text("utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # A warning that a newer driver or library brings is told, and does not fail a test: there is one try.
        words = ["-m", "pytest", "-m", "gpu", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "default", "--tb=short",
                 f"--timeout={max(asked.left_s - 5, 5):.0f}", f"--junitxml={report}", *map(str, files)]  # fmt: skip
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=env, timeout=max(asked.left_s, 5), check=False
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        if not report.exists():
            return {"status": "timeout" if status is None else "error", "pytest": status}
        return counted(report, on_gpu=asked.on_gpu)


def counted(report: Path, *, on_gpu: bool) -> dict[str, Any]:
    """What a JUnit report of pytest says. Without a GPU every test is skipped; on one, none may be."""
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        broken = next((child for child in case if child.tag in ("failure", "error")), None)
        if broken is not None:
            found["failed"].append({"test": name, "error": (broken.get("message") or "").strip()[:500]})
        elif case.find("skipped") is not None:
            found["skipped"].append(name)
        else:
            found["passed"] += 1
    good = not found["failed"] and (found["passed"] > 0 or not on_gpu)
    return {"status": "ok" if good else "failed", **found}


# --- dtypes of operations ---------------------------------------------------------------------------------------------

LOW = (torch.float16, torch.bfloat16)
RAISES = {"output": ["raises"], "grads": []}


def dtypes(asked: Asked) -> dict[str, Any]:
    """Every operation of the autocast list, and others, on the GPU and on the CPU with mprun's list: the same dtypes?

    On the CPU alone: its dtypes against the table of policies. Where one device raises and the other does not, a kernel is
    missing, which is told and no failure.
    """
    from tests.test_cuda_operation_list import CASES, EXPECTED, LISTED, OTHERS

    warnings.simplefilter("ignore")
    cases = {name: case for name, case in {**CASES, **OTHERS}.items() if name in OTHERS or name in LISTED}
    found: dict[str, Any] = {"compared": 0, "operations": len(cases), "differ": [], "one_raises": []}
    with cuda_operation_list():
        for low in LOW:
            given = {
                "half": (low,),
                "float32": (torch.float32,),
                "mixed": (low, torch.float32),
                "float64": (torch.float64,),
            }
            if asked.on_gpu:
                given |= {"mixed the other way": (torch.float32, low), "the other half": (LOW[1 - LOW.index(low)],)}
            for name, case in cases.items():
                for kind, takes in given.items():
                    cpu = seen(case, "cpu", low, takes)
                    if asked.on_gpu:
                        other = seen(case, "cuda", low, takes)
                    elif name in POLICY and name != "linalg_matrix_norm":  # which refuses half, on CUDA too
                        wanted = str(EXPECTED[POLICY[name]](low)[kind])
                        other = {"output": [wanted] * len(cpu["output"]), "grads": cpu["grads"]}
                    else:
                        continue
                    found["compared"] += 1
                    if cpu != other:
                        one = "raises" in {*cpu["output"], *cpu["grads"]} ^ {*other["output"], *other["grads"]}
                        row = {"operation": name, "region": str(low), "inputs": kind, "cpu": cpu, "gpu": other}
                        found["one_raises" if one and asked.on_gpu else "differ"].append(row)
    return {"status": "failed" if found["differ"] or not found["compared"] else "ok", **found}


def seen(
    case: Callable[..., Any], device: str, low: torch.dtype, takes: tuple[torch.dtype, ...]
) -> dict[str, list[str]]:
    """Dtypes of what comes out of an operation, and of the gradients of what goes in; ``raises`` where it does."""
    from tests.test_cuda_operation_list import Tensors

    leaves: list[Tensor] = []

    class Leaves(Tensors):
        def __call__(self, *shape: int) -> Tensor:
            leaves.append(super().__call__(*shape).requires_grad_())
            return leaves[-1]

    outputs: list[Tensor] | None = None
    for make in (Leaves, Tensors):  # without gradients: what works in place, or has a target
        try:
            with torch.autocast(device, dtype=low):
                outputs = flat(case(make(device, takes)))
            break
        except (RuntimeError, TypeError, ValueError):
            leaves.clear()
    if outputs is None:
        return RAISES
    grads: list[str] = []
    sums = [t.sum().float() for t in outputs if t.requires_grad]
    if sums and leaves:
        try:
            torch.stack(sums).sum().backward()
            grads = ["none" if leaf.grad is None else str(leaf.grad.dtype) for leaf in leaves]
        except RuntimeError:
            grads = ["raises"]
    return {"output": [str(t.dtype) for t in outputs], "grads": grads}


def flat(result: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]


# --- no waiting -------------------------------------------------------------------------------------------------------

POLICIES = ("fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic")
BUSY = ["model=resnet", "dataset=digits", "dataset.augment=shift", "train.batch_size=32", "train.accumulate=2",
        "train.clip_norm=1.0", "train.ema.decay=0.99", "schedule=cosine", f"train.steps={NEVER}", *QUIET]  # fmt: skip


def sync(asked: Asked) -> dict[str, Any]:
    """Steps in torch's mode in which an operation that waits for the device raises, between two looks of the host.

    With gradient accumulation, clipping, EMA, augmentation, BatchNorm, and skips in FP16. As ``train_step`` on batches
    that are there, and as the loop makes them, fetching included.
    """
    found: dict[str, Any] = {"status": "ok", "waits": []}
    if not asked.on_gpu:
        found = {
            "status": "skipped",
            "reason": "torch reports waiting on CUDA only; the steps were made all the same",
            "waits": [],
        }
    for policy in POLICIES:
        scale = ["precision.loss_scale.init=16777216"] if policy.startswith("fp16") else []
        run = run_of(config_of(asked.device, *BUSY, f"precision={policy}", *scale), asked)
        with run as made:
            taken = windows(made)
            ready = [next(taken) for _ in range(2)]
            for window in ready:
                train_step(made.state, window)
            results: list[StepResult] = []
            waits = waiting(asked, partial(steps, made, ready * 3, results))
            step(made, next(taken))  # what the loop does for the first time
            looped = waiting(asked, partial(loop_steps, made, taken, 5))
            if made.pending:
                drain(made)
            found["waits"] += [{"policy": policy, "where": where, "error": error}
                               for where, error in (("train_step", waits), ("loop.step", looped)) if error]  # fmt: skip
            found.setdefault("outcomes", {})[policy] = [result.read().outcome for result in results]
    if found["waits"]:
        found["status"] = "failed"
    return found


def steps(run: Run, ready: Sequence[list[Batch]], results: list[StepResult]) -> None:
    """A training step on each window."""
    results += [train_step(run.state, window) for window in ready]


def loop_steps(run: Run, taken: Iterator[list[Batch]], count: int) -> None:
    """So many steps of the loop, each of which fetches its window first."""
    for _ in range(count):
        step(run, next(taken))


def waiting(asked: Asked, make: Callable[[], Any]) -> str | None:
    """The error of the first operation in ``make`` that waits for the GPU, with the line that asked for it."""
    if not asked.on_gpu:
        make()
        return None
    torch.cuda.synchronize()
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    torch.cuda.set_sync_debug_mode("error")
    try:
        make()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        trace = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        return f"{str(error).splitlines()[0]} at {' '.join(trace[-4:])}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


@contextmanager
def run_of(config: Config, asked: Asked) -> Iterator[Run]:
    """A run of ``config`` that is ready to go and has no sinks, inside its switches."""
    with switches(config, asked.device):
        state, data, plan = build(config, asked.device)
        yield Run(config, state, data, plan, [], Path("none"), best_of(config))


# --- the scale's way --------------------------------------------------------------------------------------------------

LATE = 50
TRAJECTORY = ["model=resnet", "dataset=digits", "precision=fp16_dynamic", "precision.loss_scale.init=16777216",
              "precision.loss_scale.growth_interval=25", "train.clip_norm=1.0", "train.ema.decay=0.99", *QUIET]  # fmt: skip


def trajectory(asked: Asked) -> dict[str, Any]:
    """The same FP16 run on the CPU and on the GPU: how the scale moved, and where both arrived.

    Both must find the scale after the same number of skips; later a borderline batch may go either way, so from there on scale
    and loss are held against each other with room, and the accuracies within three points. On the CPU alone torch's own half
    kernels stand in for the GPU.
    """
    steps = 40 if asked.tiny else 200
    sides: dict[str, dict[str, Any]] = {}
    for name, device in (("cpu", torch.device("cpu")), ("gpu", asked.device)):
        kernels = "auto" if device.type == "cuda" else "fast" if name == "cpu" else "native"
        config = config_of(device, *TRAJECTORY, f"train.steps={steps}", f"numerics.cpu_fp16={kernels}")
        with run_of(config, replace(asked, device=device)) as run:
            results = []
            for epoch in range(steps):
                batches = run.data.train_batches(epoch)
                results += [train_step(run.state, [batch]) for batch in islice(batches, steps - len(results))]
                if len(results) == steps:
                    break
            rows = [result.read() for result in results]
            score = eval_step(run.state, run.state.policy, run.data.val_batches())
        late = [row.loss for row in rows[-min(LATE, steps // 2) :] if row.applied]
        sides[name] = {
            "first_skips": next(i for i, row in enumerate(rows) if row.applied),
            "skips": sum(row.outcome == OVERFLOW for row in rows),
            "scales": [row.loss_scale for row in rows],
            "last_loss": sum(late) / max(len(late), 1),
            "top1": score["top1"],
        }
    cpu, gpu = sides["cpu"], sides["gpu"]
    ratio = gpu["scales"][-1] / cpu["scales"][-1]
    close = abs(gpu["last_loss"] - cpu["last_loss"]) <= max(0.2 * cpu["last_loss"], 0.03)
    same = cpu["first_skips"] == gpu["first_skips"] and 0.25 <= ratio <= 4
    good = same and close and abs(gpu["top1"] - cpu["top1"]) <= 0.03
    apart = [i for i, (a, b) in enumerate(zip(cpu["scales"], gpu["scales"], strict=True)) if a != b]
    return {"status": "ok" if good else "failed", "steps": steps, "first_apart": apart[0] if apart else None, **sides}


if __name__ == "__main__":
    sections = {"suite": suite, "dtypes": dtypes, "sync": sync, "trajectory": trajectory}
    raise SystemExit(run_section(sections, __doc__))
