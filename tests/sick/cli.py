"""Ask what is to be asked through the command line: what ``mprun train`` says when it begins, and ``mprun compare``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mprun.cli import main
from tests.sick.cases import rule
from tests.sick.lab import Answer

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = 3


def ask_startup(words: Sequence[str]) -> Answer:
    """What a run says until its end: an error that refuses it, or a warning."""
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        code = main(list(words))
    text = " ".join(said.getvalue().split())
    proposed = re.search(r"precision\.fp32_modules=\[([^\]]+)\]", text)
    modules = tuple(proposed.group(1).split(",")) if proposed else ()
    samples = tuple(int(i) for i in re.findall(r"sample (\d+)", text))
    kind = "refused" if code else "warned" if "negative control" in text else "nothing"
    error = text[text.find("mprun: ") :] if code else text
    return Answer(kind, error, modules, samples, rule(*modules) if modules else None)


def ask_compare(words: Sequence[str]) -> Answer:
    """Whether the run's policy is on a par with FP32's over three seeds: kind ``fail``, ``undecided`` or ``nothing`` (a pass).

    Every run is a process of its own: some 4 s each.
    """
    pairs = [word for word in words if word.startswith("precision=")]
    policy = pairs[-1].partition("=")[2]
    own = [word for word in words if not word.startswith(("precision=", "train.log_every"))]
    asked = [*own, f"compare.precisions=[fp32,{policy}]", f"compare.seeds={SEEDS}", "compare.gradient_steps=[]"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "mprun", "compare", *asked],
            cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        results = sorted(Path(folder, "outputs", "compare").glob("*/*/result.json"))
        if not results:
            raise RuntimeError(f"compare ended with {done.returncode}: {done.stderr[-500:]}")
        found = json.loads(results[-1].read_text())
        table = json.loads(results[-1].with_name("compare.json").read_text())
    verdict = found["verdicts"][policy]
    why = next((str(one.get("why", "")) for one in table.get("policies", []) if one.get("label") == policy), "")
    return Answer("nothing" if verdict == "pass" else verdict, f"{verdict}: {why}")
