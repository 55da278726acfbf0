"""Imports without the garbage collector: what they cost must not be paid in memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from mprun.imports import uncollected

# As torch.fx does at its import: a function that keeps its own frame, which is a cycle, and its caller's with it.
CYCLE = "import sys\ndef look():\n    own = sys._getframe()\nlook()\n"
CALLER = """
import gc, weakref
from mprun.imports import uncollected

class Large: pass

def build():
    held = Large()
    with uncollected("looks_at_frames"):
        import looks_at_frames
    return weakref.ref(held)

found = build()
gc.collect()
assert gc.isenabled() and gc.get_freeze_count() > 0
print("kept" if found() is not None else "free")
"""


def said_free(folder: Path, code: str) -> None:
    """Run ``code`` in a process that finds the modules in ``folder``."""
    begin = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "free", done.stderr


def test_what_the_importing_function_held_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "looks_at_frames.py").write_text(CYCLE)
    said_free(tmp_path, CALLER)


HOLDS_ITSELF = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer, self.around = nn.Linear(64, num_classes), [self]
"""
FIRST_RUN = """
import gc, sys, weakref
import torch
from mprun.compose import compose
from mprun.training.build import build, switches

def built():
    words = ["model=python", "model.name=holds_itself:Net", "trust=[holds_itself]", "device=cpu", "tracking=disabled"]
    config = compose(words).config
    with switches(config, torch.device("cpu")):
        return weakref.ref(build(config, torch.device("cpu"))[0].model)

found = built()
gc.collect()
assert gc.isenabled() and "torch._dynamo" in sys.modules and gc.get_freeze_count() > 0
print("kept" if found() is not None else "free")
"""


def test_the_first_model_of_a_process_is_free_again_also_if_it_holds_itself(tmp_path: Path) -> None:
    """torch imports its compiler for the first optimizer, and by then there is a model."""
    (tmp_path / "holds_itself.py").write_text(HOLDS_ITSELF)
    said_free(tmp_path, FIRST_RUN)


def test_what_an_earlier_run_left_behind_is_not_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that holds itself, has grown old and is dropped, before another package is imported for the next run."""

    class Large:
        pass

    held = Large()
    held.around = [held]  # type: ignore[attr-defined]
    found = weakref.ref(held)
    gc.collect()  # it is old now: a look at what is young does not find it
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process goes on
    del held
    with uncollected("a_package_that_is_not_imported"):
        assert found() is None
    assert gc.isenabled()
