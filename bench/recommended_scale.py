"""Where ``mprun diagnose`` puts the loss scale, beside where a dynamic scale settles in a real run of the same experiment.

    python bench/recommended_scale.py [--json] [--only NAME]

For each pair of model and dataset: one diagnosis, then two FP16 runs of as many steps. The first starts from 65536 and grows
after 20 good steps instead of 2000, so that it has settled long before the end: its scale is the median of the second half.
The second starts from the recommended ``init`` with the usual growth: its skips are counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import about, about_text, save

from mprun.compose import compose
from mprun.lab.diagnose import Diagnosis, diagnose
from mprun.lab.reference import short_run
from mprun.numerics.formats import power

COMMON = ["device=cpu", "tracking=disabled", "diagnose.steps=200"]
PAIRS = {
    "mlp / digits": ["model=mlp"],
    "vit / digits": ["model=vit"],
    "resnet / digits": ["model=resnet"],
    "resnet / digits, loss x 1e-3": ["model=resnet", "train.loss_weight=1e-3"],
    "gpt / python_docs": ["model=gpt", "dataset=python_docs", "train.batch_size=8", "train.steps=400"],
    "timm test_vit / digits": ["model=timm", "model.name=test_vit", "model.kwargs.in_chans=1", "model.kwargs.img_size=8",
                               "model.kwargs.patch_size=2", "train.batch_size=32"],
}  # fmt: skip


def measure(name: str, words: list[str]) -> dict[str, Any]:
    begun = time.perf_counter()
    words = [*COMMON, *words]
    found = Diagnosis()
    diagnose(compose(words, command="diagnose").config, found, lambda line: None)
    seconds = time.perf_counter() - begun
    chosen = found.chosen
    if chosen is None or not chosen.scaled:
        return {"pair": name, "reason": found.reason, "seconds": seconds}
    steps = len(found.measured.reference.losses) if found.measured else 0
    settling = ["precision=fp16_dynamic", "precision.loss_scale.growth_interval=20"]
    scales = short_run(compose([*words, *settling]).config, steps=steps).scales
    settled = statistics.median(scales[len(scales) // 2 :])
    started = ["precision=fp16_dynamic", f"precision.loss_scale.init={chosen.init}"]
    run = short_run(compose([*words, *started]).config, steps=steps)
    return {
        "pair": name,
        "steps": steps,
        "static": chosen.static,
        "init": chosen.init,
        "low": chosen.interval.low,
        "high": chosen.interval.high,
        "settled": settled,
        "ratio": chosen.static / settled,
        "skips": len(run.skips),
        "fp32_modules": [*chosen.rules],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write bench/results/recommended_scale.json")
    parser.add_argument("--only", help="part of a pair's name")
    asked = parser.parse_args()
    rows = []
    print(f"{'pair':<30}{'safe':>14}{'static':>8}{'settled':>9}{'ratio':>8}{'init':>7}{'skips':>7}{'seconds':>9}")
    for name, words in PAIRS.items():
        if asked.only and asked.only not in name:
            continue
        row = measure(name, words)
        rows.append(row)
        if "static" not in row:
            print(f"{name:<30}{row['reason']}")
            continue
        low, high, static, settled, init = (power(row[key]) for key in ("low", "high", "static", "settled", "init"))
        print(
            f"{name:<30}{f'{low} to {high}':>14}{static:>8}{settled:>9}{row['ratio']:>8.3g}{init:>7}{row['skips']:>7}"
            f"{row['seconds']:>9.1f}",
            flush=True,
        )
    here = about(threads=None)
    print(about_text(here))
    if asked.json:
        print(save("recommended_scale", {"about": here, "rows": rows}))


if __name__ == "__main__":
    main()
