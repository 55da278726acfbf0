"""From the start of the process to the end of the first training step: ``mprun`` against a plain script.

    python bench/startup.py [--rounds 7] [--json]      medians of interleaved pairs
    python bench/startup.py --imports                  which imports take the time that the plain script does not

``mprun`` is ``python -m mprun precision=fp16_dynamic model=vit tracking=disabled``; the clock stops when the step's line is in
``metrics.jsonl``. The plain script imports torch and timm's VisionTransformer, reads the same data file, builds the same
model and optimizer, and makes one FP32 step on as many examples. (An FP16 step with torch's own CPU kernels would cost it
a quarter of a second more.) What ``mprun`` does besides, and is counted: composing and checking the configuration, one
watched forward pass for ``modules.json``, git and versions for ``env.json``, the run folder. Target: at most 1.25 times.

``cpu_s`` is processor time up to the same moment: on a busy machine it tells more than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import about, about_text, progress, ratio_of_pairs, save

TARGET = 1.25
POLL_S = 0.002
COMMAND = "-m mprun precision=fp16_dynamic model=vit tracking=disabled train.steps=1 train.log_every=1"
MPRUN = COMMAND.split()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="pairs that count (default 7); one more warms the disk")
    parser.add_argument("--json", action="store_true", help="write bench/results/startup.json")
    parser.add_argument("--imports", action="store_true", help="compare the imports of both instead")
    args = parser.parse_args()
    if args.imports:
        compare_imports()
        return 0
    wall: dict[str, list[float]] = {"mprun": [], "plain": []}
    cpu: dict[str, list[float]] = {"mprun": [], "plain": []}
    for number in range(args.rounds + 1):
        for name in wall:
            progress(f"round {number}/{args.rounds} {name}")
            seconds, processor = first_step(name)
            if number:
                wall[name].append(seconds)
                cpu[name].append(processor)
    progress("")
    result: dict[str, Any] = {
        "about": about(threads=int(os.environ.get("OMP_NUM_THREADS", "0")) or None),
        "target": TARGET,
        "rounds": args.rounds,
        "wall_s": {name: statistics.median(values) for name, values in wall.items()},
        "cpu_s": {name: statistics.median(values) for name, values in cpu.items()},
    }
    for name in wall:
        seconds, processor = statistics.median(wall[name]), statistics.median(cpu[name])
        print(f"{name:<6} first step after {seconds:.2f} s, processor time {processor:.2f} s")
    ratio, cpu_ratio = ratio_of_pairs(wall["mprun"], wall["plain"]), ratio_of_pairs(cpu["mprun"], cpu["plain"])
    print(
        f"ratio {ratio:.2f} (processor time {cpu_ratio:.2f}), target {TARGET}: {'met' if ratio <= TARGET else 'missed'}"
    )
    result |= {"ratio": ratio, "cpu_ratio": cpu_ratio}
    print(about_text(result["about"]))
    if args.json:
        print(save("startup", result))
    return 0


def first_step(name: str) -> tuple[float, float]:
    """Seconds on the clock, and of processor time, until the first step of ``mprun`` or ``plain`` is on the disk.

    Raises:
        SystemExit: the process ended without one.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "run", "metrics.jsonl")
        metrics.parent.mkdir()
        words = [*MPRUN, f"hydra.run.dir={metrics.parent}"] if name == "mprun" else ["-c", PLAIN, str(metrics)]
        with Path(folder, "stderr").open("w+") as errors:
            begin = time.perf_counter()
            process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
            ended = False
            while not stepped(metrics):
                if ended:
                    errors.seek(0)
                    raise SystemExit(f"startup: {name} ended with status {process.returncode}\n{errors.read()}")
                ended = process.poll() is not None
                time.sleep(POLL_S)
            seconds, processor = time.perf_counter() - begin, processor_s(process.pid)
            process.wait()
    return seconds, processor


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


def compare_imports() -> None:
    """Print the top-level packages by import time, for both, and mprun's own modules."""
    tables = {name: import_times(name) for name in ("mprun", "plain")}
    print(f"{'package':<28}{'mprun ms':>10}{'plain ms':>10}")
    names = sorted(tables["mprun"].keys() | tables["plain"].keys(), key=lambda n: -tables["mprun"].get(n, 0))
    for package in names[:25]:
        print(f"{package:<28}{tables['mprun'].get(package, 0):>10.0f}{tables['plain'].get(package, 0):>10.0f}")
    total = {name: sum(table.values()) for name, table in tables.items()}
    print(f"{'all':<28}{total['mprun']:>10.0f}{total['plain']:>10.0f}")


def import_times(name: str) -> dict[str, float]:
    """Milliseconds of import time by top-level package (torch's large parts apart), as ``-X importtime`` sees it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*MPRUN, f"hydra.run.dir={folder}/run"] if name == "mprun" else ["-c", PLAIN, f"{folder}/out"]
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *words], cwd=folder, capture_output=True, text=True, check=False
        )
    found: dict[str, float] = {}
    for line in done.stderr.splitlines():
        if line.startswith("import time:") and "self" not in line:
            own, _, module = (part.strip() for part in line.removeprefix("import time:").split("|"))
            parts = module.split(".")
            package = ".".join(parts[:2]) if parts[0] in ("torch", "mprun", "timm") else parts[0]
            found[package] = found.get(package, 0) + int(own) / 1000
    return found


if __name__ == "__main__":
    raise SystemExit(main())
