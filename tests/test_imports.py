"""Imports without the garbage collector: what they cost must not be paid in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_what_the_importing_function_held_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "looks_at_frames.py").write_text(CYCLE)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{CALLER}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "free", done.stderr
