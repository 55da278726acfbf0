"""Freed memory stays with the process, so that a step which allocates what the last one freed meets no new page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from mprun.training.heap import decided, freed_memory_kept

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")

# 90 MB in blocks of 3 MB, as activations are: allocated and freed again and again, by faults a round.
ROUNDS = """
import resource, sys
import numpy as np
from mprun.training.heap import freed_memory_kept

def step():
    blocks = [np.ones(3 * 2**20, np.uint8) for _ in range(30)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

for _ in range(3):
    step()
outside = faults()
with freed_memory_kept() as kept:
    step()
    with freed_memory_kept():
        step()
    inside, held = faults(), resident()
print(kept, outside, inside, held, resident())
"""


def run(**environment: str) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], env=clean | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@glibc
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_round_that_repeats_meets_no_new_page() -> None:
    kept, outside, inside, held, after = run()
    assert kept == "True"
    assert int(outside) > 1000  # what it cures: 90 MB are 22 500 pages
    assert int(inside) < 100
    assert int(held) - int(after) > 60e6  # and it goes back at the end


@glibc
def test_whoever_set_the_thresholds_has_decided() -> None:
    assert run(MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


def test_which_variables_decide() -> None:
    assert decided({"MALLOC_MMAP_THRESHOLD_": "1"})
    assert decided({"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.trim_threshold=128"})
    assert not decided({"GLIBC_TUNABLES": "glibc.malloc.check=1", "MALLOC_ARENA_MAX": "2", "PATH": "/bin"})


def test_an_error_inside_leaves_nobody_behind() -> None:
    from mprun.training import heap

    with pytest.raises(ZeroDivisionError), freed_memory_kept():
        _ = 1 / 0
    assert heap._users == 0


@pytest.mark.parametrize("why", ["another library", "no such function", "the interpreter is gone"])
def test_other_libraries_are_left_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    if why == "another library":
        monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    elif (
        why == "the interpreter is gone"
    ):  # or may not be read: where the system does not name its library, it is looked into
        monkeypatch.delattr("os.confstr")
        monkeypatch.setattr("sys.executable", "/no/such/python")
    else:
        monkeypatch.setattr("ctypes.CDLL", lambda name: Other())
    with freed_memory_kept() as kept:
        assert not kept


@glibc
def test_a_run_on_the_cpu_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from mprun.compose import compose
    from mprun.training import heap
    from mprun.training.build import switches

    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    for precision in ("fp32", "fp16_dynamic"):
        with switches(compose([f"precision={precision}"]).config, torch.device("cpu")):
            assert heap._users == 1
        assert heap._users == 0
