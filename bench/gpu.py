"""Runs the sections of the GPU check, each in a process of its own with a time limit, and writes what they found.

    bench/gpu.sh ...        sets the environment up and calls this script; see docs/gpu.md for what each section does
    python bench/gpu.py [--device cuda|cpu] [--tiny] [--limit SECONDS] [--out FOLDER] [--only SECTION ...]

Correctness first (side by side where the processor has cores for it, since none of it measures time), then speed alone with
the time that is left. A section that fails, crashes or takes too long costs itself only. The file is written after each
of them, so that whatever stops the script, what was found until then is there. Exit status: 0, or 1 if a correctness
section did not come out well or had no time to run, or 2 if it cannot be asked for so, or here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, about, about_text
from gpu_table import lines_of, speed_lines, table_of

from mprun.training.env import atomic_write_json
from mprun.training.host import driver_version, versions

BENCH = Path(__file__).resolve().parent
LIMIT_S, WRAP_UP_S = 330.0, 8.0
# Of the time, what correctness may take.
SHARE = 0.6
# "skipped" cannot run here. What had no time to run might have failed: it is not well.
WELL, NO_TIME = ("ok", "skipped"), "no time"


@dataclass(frozen=True)
class Section:
    """A script with the name of a check, what it may take, and whether its outcome decides the exit status."""

    name: str
    script: str
    limit_s: float
    decides: bool = True


SECTIONS = {
    section.name: section
    for section in (
        Section("suite", "gpu_checks.py", 190),
        Section("dtypes", "gpu_checks.py", 90),
        Section("sync", "gpu_steps.py", 90),
        Section("trajectory", "gpu_steps.py", 120),
        Section("parity", "gpu_parity.py", 150),
        Section("predict", "gpu_speed.py", 150, decides=False),
        Section("speed", "gpu_speed.py", 600, decides=False),
    )
}


@dataclass(frozen=True)
class Job:
    """What every section is told."""

    device: str
    tiny: bool
    folder: Path
    threads: int

    def run(self, section: Section, limit_s: float) -> dict[str, Any]:
        """Run one section; what it wrote, with ``status`` (``ok failed error timeout skipped``, ``no time``) and ``seconds``."""
        if limit_s < 5:
            return {"status": NO_TIME, "reason": "no time was left", "seconds": 0.0}
        target = self.folder / f"{section.name}.json"
        words = [
            sys.executable,
            str(BENCH / section.script),
            section.name,
            "--device",
            self.device,
            "--json",
            str(target),
        ]
        words += ["--limit", f"{limit_s:.0f}", *(["--tiny"] if self.tiny else [])]
        begin = time.monotonic()
        # The section keeps to its limit by itself; whoever hangs is ended.
        status, log = run_limited(words, limit_s + WRAP_UP_S, {"OMP_NUM_THREADS": str(self.threads)})
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        if status is None:
            found["status"] = "timeout"
        elif status or "status" not in found:
            found["status"] = "error"
        if found["status"] not in WELL:
            found["log"] = log[-4000:]
        return {**found, "seconds": round(time.monotonic() - begin, 1)}


def run_limited(words: list[str], limit_s: float, env: dict[str, str]) -> tuple[int | None, str]:
    """Exit status (None: it took longer than ``limit_s``, and was ended with its children) and all that it printed."""
    process = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, errors="replace",
    )  # fmt: skip
    try:
        log = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, log


def parsed() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps: whether everything runs")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=f"for all of it ({LIMIT_S:g})")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/gpu.json (default: bench/results)")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    args = parser.parse_args()
    real = args.device == "cuda" and not args.tiny and not args.only
    if not real and args.out is None:
        parser.error("--out is needed with --tiny, --only and --device cpu: they are no measurement")
    return args


def main() -> int:
    args = parsed()
    if not 0 < args.limit < math.inf:
        print(f"gpu: --limit {args.limit:g}: give seconds above 0 ({LIMIT_S:g} by default)", file=sys.stderr)
        return 2
    began, width = time.monotonic(), shutil.get_terminal_size().columns
    measures = args.device == "cuda" and not args.tiny
    content: dict[str, Any] = {
        "about": about(device=None),
        "command": sys.argv[1:],
        "measures": measures,
        "sections": {},
    }
    content |= machine(args.device)
    content["about"]["device"] = content["gpu"]["name"] if content["gpu"] else None
    print(about_text(content["about"]))
    if args.device == "cuda" and not content["gpu"]:
        print("gpu: torch sees no CUDA device here; --device cpu --tiny shows that everything runs", file=sys.stderr)
        return 2
    target = (args.out or RESULTS) / "gpu.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    wanted = [SECTIONS[name] for name in args.only or SECTIONS]
    with tempfile.TemporaryDirectory() as scratch:
        for name, found in all_sections(args, wanted, Path(scratch), began):
            content["sections"][name] = found
            content["seconds"] = round(time.monotonic() - began, 1)
            content["ok"] = well(content["sections"])
            content["table"] = table_of(content["sections"]) if measures else []
            atomic_write_json(target, content)
            print("\n".join(lines_of(name, found, width)), flush=True)
    for line in speed_lines(content["sections"]):
        print(line)
    if not measures:
        print("nothing was measured: gpu.json's table is left empty")
    print(f"{content['seconds']:.0f} s; {target}")
    print(verdict(content["sections"]))
    return 0 if content["ok"] else 1


def all_sections(
    args: argparse.Namespace, wanted: Sequence[Section], scratch: Path, began: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every section with what it found, as they end: ``speed`` alone at the end, the others before."""
    real = args.device == "cuda"
    cores = os.cpu_count() or 1 if real else 1
    before = [section for section in wanted if section.name != "speed"]
    beside = min(max(cores // 3, 1), max(len(before), 1))
    share = SHARE if real and len(before) < len(wanted) else 1.0
    job = Job(args.device, args.tiny, scratch, max(cores // beside, 1))

    def own_limit(section: Section) -> float:
        # On a CPU, which only shows that everything runs, the whole time is for whoever needs it.
        return section.limit_s if real else args.limit

    def left(part: float = 1.0) -> float:
        return args.limit * part - (time.monotonic() - began) - WRAP_UP_S

    with ThreadPoolExecutor(beside) as pool:
        ends = {
            pool.submit(lambda s=section: job.run(s, min(own_limit(s), left(share)))): section.name
            for section in before
        }
        for end in as_completed(ends):
            yield ends[end], end.result()
    if len(before) < len(wanted):
        speed = SECTIONS["speed"]
        yield speed.name, replace(job, threads=cores).run(speed, min(own_limit(speed), left()))


def well(sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every correctness section came out well, or had a reason not to run."""
    return all(found["status"] in WELL for name, found in sections.items() if SECTIONS[name].decides)


def verdict(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The last line: whether all is well, and what is not or had no time, by name."""
    names = [name for name in SECTIONS if name in sections]
    wrong = [name for name in names if sections[name]["status"] not in (*WELL, NO_TIME)]
    late = [name for name in names if sections[name]["status"] == NO_TIME]
    good = well(sections)
    if not good:  # what decides alone is told
        wrong, late = ([name for name in of if SECTIONS[name].decides] for of in (wrong, late))
    parts = [", ".join(wrong) if not good else f"not ok, but never deciding: {', '.join(wrong)}"] if wrong else []
    parts += [f"no time was left for {', '.join(late)}"] if late else []
    return "; ".join(["all well", *parts]) if good else f"NOT WELL: {'; '.join(parts)}"


def machine(device: str) -> dict[str, Any]:
    """The GPU and what drives it."""
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return {"gpu": None}
    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": {
            "name": facts.name,
            "capability": f"{facts.major}.{facts.minor}",
            "memory_bytes": facts.total_memory,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **versions(("triton", "omegaconf", "wandb", "pytest")),
        }
    }


if __name__ == "__main__":
    raise SystemExit(main())
