"""What a user waits for before anything is trained: start to first step against a plain script, and commands without torch.

    python bench/startup.py [--rounds 7] [--only steps|commands] [--json]      medians of interleaved rounds
    python bench/startup.py --imports         which imports take the time that the plain script does not

*First step.* ``mprun`` is ``python -m mprun precision=... model=vit tracking=disabled``, in FP16 and in FP32; the clock stops
when the step's line is in ``metrics.jsonl``. The plain script imports torch and timm's VisionTransformer, reads the same data
file, builds the same model and optimizer, and makes one FP32 step on as many examples. (An FP16 step with torch's own CPU
kernels would cost it a quarter of a second more.) Its imports are those of the run: timm imports wandb wherever that is
installed, which the run prevents, so the script that is judged against prevents it too; ``plain_wandb`` is the script as
anybody would write it. What ``mprun`` does besides, and is counted: composing and checking the configuration, one watched
forward pass for ``modules.json``, git and versions for ``env.json``, the run folder. Target: at most 1.10 times.

``cpu_s`` is processor time up to the same moment: on a busy machine it tells more than the clock. ``end_s`` is the whole
job of one step: with evaluation, checkpoints, report and closing table, of which the plain script has none.

*Commands that do not train.* Seconds from start to exit, target 0.8 each, beside an empty Python and ``import hydra, omegaconf``
alone; and which heavy packages each imports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import about, about_text, busy_note, positive, progress, ratio_of_pairs, save
from startup_commands import TARGET_S, add_commands, import_lines, measure_commands

TARGET = 1.10
POLL_S = 0.002
COMMAND = "-m mprun precision={} model=vit tracking=disabled train.steps=1 train.log_every=1"
PLAIN = """
import gzip, importlib.util, os, sys
import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

torch.manual_seed(0)
package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
rows = gzip.decompress(open(os.path.join(package, "datasets/data/digits.csv.gz"), "rb").read()).decode().splitlines()
table = np.array([row.split(",") for row in rows], dtype=np.float64)
images = (torch.from_numpy(table[:898, :64]).float().view(-1, 1, 8, 8) - 4.9185) / 6.0349
labels = torch.from_numpy(table[:898, 64]).long()
model = VisionTransformer(
    img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.0,
    class_token=False, global_pool="avg",
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
order = torch.randperm(898)[:64]
loss = torch.nn.functional.cross_entropy(model(images[order]), labels[order], label_smoothing=0.1)
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
with open(sys.argv[1], "w") as file:
    file.write(f'{{"kind": "train", "loss": {loss.item()}}}\\n')
"""


NO_WANDB = """
import sys
sys.modules["wandb"] = None  # timm then takes it for absent
"""
CONTESTANTS = ("fp16_dynamic", "plain", "fp32", "plain_wandb")


@dataclass(frozen=True)
class Times:
    """Of one process, in seconds from its start: the first step, processor time until then, its end."""

    first_s: float
    cpu_s: float
    end_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=positive, default=7, help="rounds that count (default 7); one more warms the disk"
    )
    parser.add_argument("--only", choices=("steps", "commands"), help="one part alone; nothing is written then")
    parser.add_argument("--json", action="store_true", help="write bench/results/startup.json")
    parser.add_argument("--imports", action="store_true", help="compare the imports of both instead")
    args = parser.parse_args()
    if args.imports:
        compare_imports()
        return 0
    busy_note()
    result: dict[str, Any] = {
        "about": about(threads=int(os.environ.get("OMP_NUM_THREADS", "0")) or None),
        "target": TARGET,
        "target_s": TARGET_S,
        "rounds": args.rounds,
        "table": [],
    }
    if args.only != "commands":
        add_steps(result, measure_steps(args.rounds))
    if args.only != "steps":
        add_commands(result, *measure_commands(args.rounds, lambda folder: job("fp32", keep=folder)))
    for row in result["table"]:
        print(f"{row['what']}: {row['ratio']:.2f}, target {row['target']}: {'met' if row['met'] else 'missed'}")
    print(about_text(result["about"]))
    if args.json and args.only is None:
        print(save("startup", result))
    return 0


# --- to the first step ---------------------------------------------------------------------------------------------


def measure_steps(rounds: int) -> dict[str, list[Times]]:
    """Every contestant ``rounds`` times, in turns."""
    found: dict[str, list[Times]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds + 1):
        for name in CONTESTANTS:
            progress(f"round {number}/{rounds} {name}")
            times = job(name)
            if number:
                found[name].append(times)
    progress("")
    return found


def add_steps(result: dict[str, Any], found: dict[str, list[Times]]) -> None:
    """Print the first steps, and put medians, ratios and judged rows into ``result``."""
    median = {
        name: Times(*(statistics.median(getattr(one, key) for one in each) for key in ("first_s", "cpu_s", "end_s")))
        for name, each in found.items()
    }
    for name, one in median.items():
        print(f"{name:<13} first step {one.first_s:6.2f} s, processor time {one.cpu_s:5.2f} s, end {one.end_s:6.2f} s")

    def ratio(name: str, baseline: str, key: str = "first_s") -> float:
        return ratio_of_pairs(*([getattr(one, key) for one in found[which]] for which in (name, baseline)))

    result["wall_s"] = {"mprun": median["fp16_dynamic"].first_s, "plain": median["plain"].first_s}
    result["cpu_s"] = {"mprun": median["fp16_dynamic"].cpu_s, "plain": median["plain"].cpu_s}
    result["ratio"], result["cpu_ratio"] = ratio("fp16_dynamic", "plain"), ratio("fp16_dynamic", "plain", "cpu_s")
    result["steps"] = [
        {
            "name": name,
            "first_s": one.first_s,
            "cpu_s": one.cpu_s,
            "end_s": one.end_s,
            **{
                f"{key}_to_{base}": ratio(name, base, f"{key}_s")
                for key in ("first", "cpu")
                for base in CONTESTANTS[1::2]
            },
        }
        for name, one in median.items()
    ]
    for name in ("fp16_dynamic", "fp32"):
        row = {
            "what": f"process start to first step, ViT, {name}",
            "measured": f"{median[name].first_s:.2f} s against {median['plain'].first_s:.2f} s of a plain script with the same "
            f"imports (one job of a step, with evaluation, checkpoints and report: {median[name].end_s:.2f} s)",
            "ratio": ratio(name, "plain"),
            "target": TARGET,
        }
        result["table"].append({**row, "met": row["ratio"] <= TARGET})


def job(name: str, keep: Path | None = None) -> Times:
    """Run one contestant from start to end.

    Args:
        name: a precision option, for ``mprun``; ``plain`` or ``plain_wandb``.
        keep: where the run folder is copied to, if anywhere.

    Raises:
        SystemExit: the process ended without a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        metrics.parent.mkdir()
        with Path(folder, "stderr").open("w+") as errors:
            begin = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, *words_of(name, metrics)], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors
            )
            ended = False
            while not stepped(metrics):
                if ended:
                    errors.seek(0)
                    raise SystemExit(f"startup: {name} ended with status {process.returncode}\n{errors.read()}")
                ended = process.poll() is not None
                time.sleep(POLL_S)
            seconds, processor = time.perf_counter() - begin, processor_s(process.pid)
            process.wait()
            end = time.perf_counter() - begin
        if keep is not None:
            shutil.copytree(metrics.parent, keep, ignore=shutil.ignore_patterns("checkpoints"))
    return Times(seconds, processor, end)


def words_of(name: str, metrics: Path) -> list[str]:
    """The arguments of Python for a contestant that writes ``metrics``."""
    if name == "plain_wandb":
        return ["-c", PLAIN, str(metrics)]
    if name == "plain":
        return ["-c", NO_WANDB + PLAIN, str(metrics)]
    return [*COMMAND.format(name).split(), f"hydra.run.dir={metrics.parent}"]


def stepped(metrics: Path) -> bool:
    """Whether the line of a training step has been written."""
    return metrics.exists() and b'"kind": "train"' in metrics.read_bytes()


def processor_s(pid: int) -> float:
    """User and system time of a process and its ended children so far; NaN where ``/proc`` does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


# --- imports ---------------------------------------------------------------------------------------------------------


def compare_imports() -> None:
    """Print the top-level packages by import time, for both, and mprun's own modules."""
    mprun, plain = import_times("fp16_dynamic"), import_times("plain")
    print(f"{'package':<28}{'mprun ms':>10}{'plain ms':>10}")
    for package in sorted(mprun.keys() | plain.keys(), key=lambda name: -mprun.get(name, 0))[:25]:
        print(f"{package:<28}{mprun.get(package, 0):>10.0f}{plain.get(package, 0):>10.0f}")
    print(f"{'all':<28}{sum(mprun.values()):>10.0f}{sum(plain.values()):>10.0f}")


def import_times(name: str) -> dict[str, float]:
    """Milliseconds of import time by top-level package (torch's large parts apart), as ``-X importtime`` sees it."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        metrics.parent.mkdir()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *words_of(name, metrics)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    found: dict[str, float] = {}
    for module, own_ms in import_lines(done.stderr):
        parts = module.split(".")
        package = ".".join(parts[:2]) if parts[0] in ("torch", "mprun", "timm") else parts[0]
        found[package] = found.get(package, 0) + own_ms
    return found


if __name__ == "__main__":
    raise SystemExit(main())
