"""Correctness on a GPU: the test suite, and operation dtypes under autocast.

    python bench/gpu_checks.py suite|dtypes --json FILE [--device cuda|cpu] [--tiny] [--limit SECONDS]

``bench/gpu.py`` calls this; docs/gpu.md says what each section checks and what it writes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from gpu_section import Asked, run_section
from torch import Tensor

from mprun.precision.cpu_autocast import POLICY, cuda_operation_list

# --- the test suite ---------------------------------------------------------------------------------------------------


def suite(asked: Asked) -> dict[str, Any]:
    """``pytest -m gpu``: counts, and the tests that failed, each with the last line of its error."""
    files = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if re.search(r"mark\.gpu\b", p.read_text("utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        limit = max(asked.left_s - 10, 5)
        # A warning that a newer driver or library brings is told, and does not fail a test: there is one try.
        words = ["-m", "pytest", "-m", "gpu", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "default", "--tb=short",
                 f"--timeout={limit:.0f}", f"--session-timeout={limit:.0f}", f"--junitxml={report}"]  # fmt: skip
        if asked.on_gpu and find_spec("xdist") is not None:
            words += ["-p", "xdist.plugin", "-n", str(max(min((os.cpu_count() or 1) // 4, 4), 1))]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *words, *map(str, files)], cwd=ROOT, env=env, timeout=limit + 8, check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": "timeout"}
        if not report.exists():
            return {"status": "error", "pytest": done.returncode}
        found = counted(report, on_gpu=asked.on_gpu)
        # Ended by the limit, say: what was not run is no success.
        found["status"] = "failed" if done.returncode else found["status"]
        return {**found, "pytest": done.returncode}


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


if __name__ == "__main__":
    raise SystemExit(run_section({"suite": suite, "dtypes": dtypes}, __doc__))
