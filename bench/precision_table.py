"""The README's table: every precision on every model, three seeds each, through the command line.

    python bench/precision_table.py --write                      the whole grid (20 minutes on two cores)
    python bench/precision_table.py --models resnet --seeds 0    a part of it
    python bench/precision_table.py --no-run --write             the README again, from what was measured

One run at a time, each in a process of its own, with the hyperparameters that ``conf/tuned`` gives the pair of model and
dataset. A cell holds medians over its seeds:

* ``top1``   validation accuracy after the last step (not the best one seen: choosing among 90 evaluations adds luck)
* ``gap``    median minus the median of ``fp32`` on the same model and seeds, in points (hundredths)
* ``skips``  skipped steps, all seeds together
* ``examples_per_s`` and ``peak_memory_bytes`` as in ``result.json``; on the CPU the latter is the process's resident memory

Runs are kept in ``outputs/precision_table/`` and are not repeated as long as commit and overrides are the same, so an
interrupted grid goes on where it stopped. ``--fresh`` runs everything again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, about, load, save

MODELS = ["vit", "resnet"]
PRECISIONS = ["fp32", "bf16", "fp16_dynamic", "fp16_static", "fp16_master_dynamic", "bf16_master"]
SEEDS = [0, 1, 2]
NAME = "precision_table"
RUNS = ROOT / "outputs" / NAME
# A run that shows what the loss scale does: it starts at 2**40, far too high, and may grow every 40 steps.
PICTURE = [
    "precision=fp16_dynamic", "model=resnet", "precision.loss_scale.init=1099511627776",
    "precision.loss_scale.max=1099511627776", "precision.loss_scale.growth_interval=40", "train.log_every=1",
    "train.drop_last=true",
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, metavar="NAME", help=f"default: {PRECISIONS}")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="default: 0 1 2")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides, for every run")
    parser.add_argument("--fresh", action="store_true", help="run again what was run already")
    parser.add_argument("--no-run", action="store_true", help="train nothing: use the table as it was measured last")
    parser.add_argument(
        "--write", action="store_true", help="put table and picture into the README, values into recipes"
    )
    args = parser.parse_args()
    if not args.no_run:
        grid(args.models, args.precisions, args.seeds, args.set, fresh=args.fresh)
    table = load(NAME)
    if table is None:
        print("precision_table: nothing was measured yet", file=sys.stderr)
        return 1
    if args.write and not args.no_run:
        draw_picture(args.set, fresh=args.fresh)
    from render import markdown_results, write

    print(markdown_results(table))
    if args.write:
        print(f"written: {', '.join(write()) or 'nothing has changed'}")
    return 0


def grid(models: list[str], precisions: list[str], seeds: list[int], extra: list[str], *, fresh: bool) -> None:
    """Run what is missing, and save the table after every cell."""
    jobs = [(model, precision, seed) for model in models for precision in precisions for seed in seeds]
    begin, trained = time.monotonic(), 0
    for number, (model, precision, seed) in enumerate(jobs, start=1):
        run_dir = RUNS / f"{model}-{precision}-{seed}"
        words = [f"precision={precision}", f"model={model}", f"seed={seed}", *extra]
        result, new = train(run_dir, words, fresh=fresh)
        trained += new
        ago = time.monotonic() - begin
        rest = f", {ago / trained * (len(jobs) - number) / 60:.0f} min to go" if trained else ""
        print(
            f"[{number}/{len(jobs)}] {model} {precision} seed {seed}: top-1 {result['final']['val/top1']:.4f}, "
            f"{result['steps_skipped']} skipped, {result['wall_s']:.0f} s{'' if new else ' (kept)'}{rest}",
            flush=True,
        )
        if seed == seeds[-1]:
            add_cell(model, precision, seeds)


def train(run_dir: Path, words: list[str], *, fresh: bool) -> tuple[dict[str, Any], bool]:
    """One run in a process of its own, or the one that is there; its ``result.json``, and whether it is new.

    Raises:
        SystemExit: the run failed.
    """
    words = [*words, "tracking=disabled", f"hydra.run.dir={run_dir}"]
    commit = about()["commit"]
    note = run_dir / "bench.json"
    if not fresh and note.exists() and json.loads(note.read_text()) == {"words": words, "commit": commit}:
        return read_json(run_dir / "result.json"), False
    subprocess.run(["rm", "-rf", "--", str(run_dir)], check=True)
    command = [sys.executable, "-m", "mprun", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"precision_table: {' '.join(command)} ended with status {done.returncode}\n{done.stderr}")
    note.write_text(json.dumps({"words": words, "commit": commit}))
    return read_json(run_dir / "result.json"), True


def add_cell(model: str, precision: str, seeds: list[int]) -> None:
    """Put one cell's medians into ``bench/results/precision_table.json``; other cells stay as they are."""
    runs = [RUNS / f"{model}-{precision}-{seed}" for seed in seeds]
    results = [read_json(run / "result.json") for run in runs]
    env = read_json(runs[-1] / "env.json")
    device = env["device"]["name"] if env["device"]["type"] == "cuda" else None
    top1 = [result["final"]["val/top1"] for result in results]
    cell = {
        "model": model,
        "precision": precision,
        "seeds": seeds,
        "top1_each": top1,
        "top1": statistics.median(top1),
        "skips_each": [result["steps_skipped"] for result in results],
        "applied": sum(result["steps_applied"] for result in results),
        "examples_per_s": statistics.median(result["examples_per_s"] for result in results),
        "peak_memory_bytes": statistics.median(result["peak_memory"] for result in results),
        "train_s": statistics.median(result["train_s"] for result in results),
        "about": about(threads=env["host"]["torch_threads"] if device is None else None, device=device),
    }
    table = load(NAME) or {"cells": {}}
    table["cells"][f"{model}/{precision}"] = cell
    save(NAME, with_gaps(table))


def with_gaps(table: dict[str, Any]) -> dict[str, Any]:
    """Cells in the grid's order, each with its distance to FP32 on the same model and seeds in points, or null."""
    order = [f"{model}/{precision}" for model in MODELS for precision in PRECISIONS]
    order += sorted(table["cells"].keys() - set(order))
    table["cells"] = {name: table["cells"][name] for name in order if name in table["cells"]}
    for cell in table["cells"].values():
        base = table["cells"].get(f"{cell['model']}/fp32")
        same = base is not None and base["seeds"] == cell["seeds"]
        cell["gap_points"] = 100 * (cell["top1"] - base["top1"]) if same else None
    return table


def draw_picture(extra: list[str], *, fresh: bool) -> None:
    """Train the run of ``PICTURE`` and draw it to ``docs/img/run.png``."""
    run_dir = RUNS / "picture"
    train(run_dir, [*PICTURE, *extra], fresh=fresh)
    target = ROOT / "docs" / "img" / "run.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    script = ROOT / "bench" / "plot_run.py"
    subprocess.run([sys.executable, str(script), str(run_dir), "--out", str(target)], check=True)
    env, result = read_json(run_dir / "env.json"), read_json(run_dir / "result.json")
    numbers = {key: result[key] for key in ("steps_applied", "steps_skipped", "loss_scale")}
    save("picture", {"about": about(threads=env["host"]["torch_threads"]), "words": PICTURE, **numbers})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    raise SystemExit(main())
