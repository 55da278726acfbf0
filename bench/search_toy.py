"""What ``mprun search`` finds on models whose trouble is known, and what it takes: sets of modules, evaluations, seconds.

    python bench/search_toy.py [--steps 100] [--threads N] [--json]

T5-like encoders (``bench/search_toys.py``) under FP16 with a dynamic scale: nothing wrong, one Linear that overflows, two that
cure only together, a module that is right in half and in FP32 but not with one half of it in FP32, and some hundred modules
with one and with two culprits. Search runs in this process; seconds include the FP32 runs.
"""

from __future__ import annotations

import argparse

import torch
from common import about, about_text, progress, save

from mprun.compose import compose
from mprun.lab.search import search

WORDS = ["model=python", "model.name=search_toys:t5", "dataset=python", "dataset.name=search_toys:tokens", "trust=[search_toys]",
         "device=cpu", "train.batch_size=32", "optimizer.lr=3e-3", "precision=fp16_dynamic"]  # fmt: skip
LARGE = ["model.kwargs.depth=8"]
WO, DOWN = "blocks.{}.mlp.wo", "blocks.{}.mlp.down"
CASES: dict[str, tuple[list[str], set[str]]] = {
    "none": ([], set()),
    "one": (["model.kwargs.loud=1"], {WO.format(1)}),
    "two": (["model.kwargs.loud=1", "model.kwargs.chain=true"], {WO.format(1), DOWN.format(1)}),
    "not monotone": (["model.kwargs.loud=1", "model.kwargs.tricky=true"], {WO.format(1)}),
    "one, 8 blocks": ([*LARGE, "model.kwargs.loud=5"], {WO.format(5)}),
    "two, 8 blocks": ([*LARGE, "model.kwargs.loud=5", "model.kwargs.chain=true"], {WO.format(5), DOWN.format(5)}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="search.steps (default 100)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="write bench/results/search_toy.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    for name, (words, expected) in CASES.items():
        progress(name)
        found = search(compose([*WORDS, *words, f"search.steps={args.steps}"], command="search").config)
        modules = sorted(found.fp32_modules or ())
        rows.append(
            {
                "case": name,
                "fp32_modules": modules,
                "exact": set(modules) == expected,
                "smallest": found.minimum is not None and found.minimum.smallest,
                "candidates": found.candidates,
                "sets": found.tests,
                "evaluations": found.evaluations,
                "runs": found.runs,
                "seconds": round(found.seconds, 1),
            }
        )
        row = rows[-1]
        progress("")
        print(
            f"{name:<14}{'exact' if row['exact'] else 'WRONG':<7}{', '.join(modules) or '-'}: {row['sets']} sets of "
            f"{row['candidates']} candidates, {row['evaluations']} evaluations, {row['runs']} runs, {row['seconds']} s"
        )
    machine = about(threads=torch.get_num_threads())
    print(about_text(machine))
    if args.json:
        save("search_toy", {"about": machine, "steps": args.steps, "rows": rows})
    return 0 if all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
