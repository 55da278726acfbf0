"""Error rates and power of the parity test of ``mprun compare``, by simulation: what the test does where the truth is known.

    python bench/parity_rates.py [--json] [--draws 4000]

The baseline's final metrics are normal with standard deviation 1, the candidate's too, moved by a deficit that is known. In
each cell so many comparisons are drawn, from a generator that is seeded. Nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from common import progress, save

from mprun.numerics.parity import FAIL, PASS, SPREAD_FACTOR, judge

SEEDS = (2, 3, 4, 5)
FLOORS = (0.0, 2.0, 3.0)  # of the margin, in standard deviations of the baseline
# Name, deficit as a multiple of the margin and in standard deviations beyond it, correlation of pairs, what is counted.
CASES = (
    ("no worse: fails", 0.0, 0.0, FAIL),
    ("worse by the margin: passes", 1.0, 0.0, PASS),
    ("no worse: passes", 0.0, 0.0, PASS),
    ("no worse, pairs correlated 0.95: passes", 0.0, 0.95, PASS),
    ("worse by two margins: fails", 2.0, 0.0, FAIL),
    ("worse by ten standard deviations: fails", math.inf, 0.0, FAIL),
)


def main() -> int:
    """Draw, print, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write bench/results/parity_rates.json")
    parser.add_argument("--draws", type=int, default=4000, help="comparisons of a cell; default: 4000")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, multiple, correlation, word in CASES:
        for floor in FLOORS:
            progress(f"{name}, floor {floor:g}")
            margin = max(floor, SPREAD_FACTOR)
            deficit = 10.0 if math.isinf(multiple) else multiple * margin
            rates = [rate(n, deficit, floor=floor, correlation=correlation, word=word, draws=args.draws) for n in SEEDS]
            rows.append({"case": name, "floor": floor, "rates": rates})
            print(f"{name:<42} floor {floor:g}   " + "  ".join(f"{100 * value:5.1f} %" for value in rates))
    progress("")
    if args.json:
        print(save("parity_rates", {"draws": args.draws, "seeds": list(SEEDS), "rows": rows}))
    return 0


def rate(n: int, deficit: float, *, floor: float, correlation: float, word: str, draws: int) -> float:
    """How often the verdict is ``word`` with ``n`` seeds."""
    random = np.random.default_rng(n)
    common, b, c = random.normal(size=(3, draws, n))
    own, shared = math.sqrt(1 - correlation), math.sqrt(correlation)
    baseline, candidate = shared * common + own * b, shared * common + own * c - deficit
    found = [
        judge(dict(enumerate(one)), dict(enumerate(other)), higher=True, floor=floor).outcome
        for one, other in zip(baseline.tolist(), candidate.tolist(), strict=True)
    ]
    return found.count(word) / draws


if __name__ == "__main__":
    raise SystemExit(main())
