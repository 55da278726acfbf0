"""Fill in what a recipe expects, from runs of it: one for each seed, one at a time, through the command line.

    python bench/measure_recipe.py lessons/underflow_static --write       measure, and rewrite the block of the recipe
    python bench/measure_recipe.py lessons/underflow_static               measure, and only print it
    python bench/measure_recipe.py gpt/x --expect "val/loss <=" "steps_skipped <=" --write      choose the lines
    python bench/measure_recipe.py gpt/x --keep --write                   a published value stays; only ``measured`` is new
    python bench/measure_recipe.py gpt/x --seeds 0 device=cuda --write    one seed, further overrides

The lines (metric and op) are those that the recipe has; with ``--expect``, or where it has none, those given, by default
``val/top1 >=`` and ``steps_skipped <=``. A line gets

* ``value``      the median over the seeds; the largest for ``steps_skipped <=``; the common word for ``status``
* ``tolerance``  the seeds' spread (largest minus smallest), or the least that luck is granted, whichever is more: 0.01 for a
                 share such as ``val/top1``, 1 for a count (0 with ``==``), 2 % of anything else; ``--tolerance X`` sets it
* ``measured``   the values, seed by seed; on the first line also commit, device, versions and seeds

It goes between the markers ``# <measured>`` and ``# </measured>`` of the recipe, or to its end. Seeds: ``--seeds``, else
``meta.seeds``, else those of the last measurement, else 0 1 2. A run that ends badly is an error, unless the recipe has a
line about ``status``. With uncommitted changes in the sources the commit is marked with a plus.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, about, set_block

from mprun.compose import compose, tree
from mprun.config import Config
from mprun.processes import STOPPED, SeedRun, about_run, run_seeds
from mprun.recipes import WORDS, expect_problems, expectations, seeds_of, value_of

DEFAULT_LINES = ("val/top1 >=", "steps_skipped <=")
DEFAULT_SEEDS = (0, 1, 2)
COUNTS = ("steps_applied", "steps_skipped", "best.step", "best.epoch")
VERSIONS = ("python", "torch", "timm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a name below recipes/, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further words for every run")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="default: the recipe's own, else 0 1 2")
    parser.add_argument("--expect", nargs="+", metavar="'METRIC OP'", help="the lines, instead of those of the recipe")
    parser.add_argument("--tolerance", type=float, metavar="X", help="the least tolerance of every line with a number")
    parser.add_argument("--keep", action="store_true", help="keep value and tolerance of lines that the recipe has")
    parser.add_argument("--write", action="store_true", help="rewrite the recipe")
    args = parser.parse_intermixed_args()
    path = Path(args.recipe) if args.recipe.endswith((".yaml", ".yml")) else tree("recipes") / f"{args.recipe}.yaml"
    words = [f"recipe={args.recipe}", *args.overrides]
    config = compose(words).config
    lines = wanted(config, args.expect)
    seeds = args.seeds or seeds_of(config.meta, expectations(config.expect), -1)
    runs = measure(words, list(DEFAULT_SEEDS) if seeds == [-1] else seeds, lines)
    filled = fill(lines, runs, least=args.tolerance, keep=args.keep)
    text = as_yaml(filled, where(runs))
    print(text)
    if args.write:
        write(path, text)
        print(f"written: {path}", file=sys.stderr)
    return 0


def wanted(config: Config, given: Sequence[str] | None) -> list[dict[str, Any]]:
    """The lines to fill in: those ``given`` as ``metric op``, else the recipe's, else ``DEFAULT_LINES``.

    Raises:
        SystemExit: a line that the schema refuses.
    """
    old = {(line["metric"], line["op"]): dict(line) for line in config.expect}
    if given is None and old:
        return list(old.values())
    pairs = [[*text.split(), ""][:2] for text in given or DEFAULT_LINES]
    lines = [old.get((metric, op), {"metric": metric, "op": op}) for metric, op in pairs]
    placeholders = [{**line, "value": "ok" if line["metric"] in WORDS else 0.0} for line in lines]
    if problems := [text for text in expect_problems(placeholders) if "value" not in text]:
        raise SystemExit("measure_recipe: " + "\n".join(problems))
    return lines


def measure(words: Sequence[str], seeds: Sequence[int], lines: Sequence[Mapping[str, Any]]) -> list[SeedRun]:
    """Run every seed.

    Raises:
        SystemExit: a run was stopped, or ended badly without a line that expects it to.
    """
    may_fail = any(line["metric"] == "status" for line in lines)
    folder = ROOT / "outputs" / "measure_recipe" / secrets.token_hex(4)
    quiet = [] if any(word.startswith("tracking=") for word in words) else ["tracking=disabled"]
    runs = run_seeds([*words, *quiet], seeds, folder)
    for done in runs:
        if done.code in STOPPED or not done.result or (done.code and not may_fail):
            raise SystemExit(f"measure_recipe: seed {done.seed} ended with status {done.code}\n{done.error}")
    return runs


def fill(
    lines: Sequence[Mapping[str, Any]], runs: Sequence[SeedRun], *, least: float | None, keep: bool
) -> list[dict[str, Any]]:
    """``lines`` with value, tolerance and measured values.

    Raises:
        SystemExit: a metric that a run does not have, or whose seeds have no common word.
    """
    filled = []
    for line in lines:
        values = [value_of(done.result, line["metric"]) for done in runs]
        if any(value is None for value in values):
            raise SystemExit(f"measure_recipe: {line['metric']} is absent for one seed at least: {values}")
        if line["metric"] in WORDS:
            if len(set(values)) > 1:
                raise SystemExit(f"measure_recipe: {line['metric']} differs between seeds: {values}")
            new: dict[str, Any] = {"value": values[0]}
        else:
            numbers = [float(value) for value in values if value is not None]
            new = of_numbers(line["metric"], line["op"], numbers, least)
        kept = {key: line[key] for key in ("value", "tolerance") if keep and key in line}
        filled.append({**line, **new, **kept, "measured": {"values": [rounded(value) for value in values]}})
    return filled


def of_numbers(metric: str, op: str, values: Sequence[float], least: float | None) -> dict[str, Any]:
    """Value and tolerance of a metric that is a number; see the module's docstring."""
    spread = max(values) - min(values)
    if metric in COUNTS:
        floor = 0.0 if op == "==" else 1.0
        value = max(values) if metric == "steps_skipped" and op == "<=" else statistics.median(values)
        return {"value": int(value), "tolerance": int(max(spread, floor if least is None else least))}
    median = statistics.median(values)
    floor = 0.01 if metric.endswith("/top1") else 0.02 * abs(median)
    return {"value": rounded(median), "tolerance": rounded(max(spread, floor if least is None else least), up=True)}


def rounded(value: Any, *, up: bool = False) -> Any:
    """Four decimals of a number between 0.01 and 100, else four significant digits; whole numbers and words as they are."""
    if not isinstance(value, float) or not math.isfinite(value) or value.is_integer():
        return value
    digits = 4 if 0.01 <= abs(value) < 100 else 3 - math.floor(math.log10(abs(value)))
    step = 10.0**-digits
    near = round(value, digits)
    return round(near + step, digits) if up and near < value - 1e-12 else near


def where(runs: Sequence[SeedRun]) -> dict[str, Any]:
    """Commit, device, versions and seeds of a measurement, as the runs themselves recorded them."""
    env, here = about_run(runs[0].run_dir), about()
    on_gpu, host = env["device"]["type"] == "cuda", env["host"]
    cores = str(host["cpu_count"])
    if host["torch_threads"] != host["cpu_count"]:
        cores = f"{host['torch_threads']} of {cores}"
    versions = {**env["versions"], "timm": env["versions"].get("timm")}
    return {
        "commit": here["commit"] + ("+" if here["dirty"] else ""),
        "device": env["device"]["name"] if on_gpu else f"{host['cpu']}, {cores} cores",
        "versions": {name: versions[name] for name in VERSIONS if versions.get(name)},
        "seeds": [done.seed for done in runs],
    }


def as_yaml(lines: Sequence[Mapping[str, Any]], place: Mapping[str, Any]) -> str:
    """The ``expect`` block as it stands in a recipe."""
    text = ["expect:"]
    for number, line in enumerate(lines):
        text += [f"  - metric: {line['metric']}", f'    op: "{line["op"]}"', f"    value: {line['value']}"]
        if line.get("tolerance"):
            text.append(f"    tolerance: {line['tolerance']}")
        text.append("    measured:")
        if number == 0:
            versions = ", ".join(f"{name}: {version}" for name, version in place["versions"].items())
            text += [
                f"      commit: {place['commit']!r}",
                f"      device: {place['device']!r}",
                f"      versions: {{{versions}}}",
                f"      seeds: {place['seeds']}",
            ]
        text.append(f"      values: [{', '.join(map(str, line['measured']['values']))}]")
    return "\n".join(text)


def write(path: Path, text: str) -> None:
    """Put the block between the recipe's markers, or to its end; an ``expect:`` outside of them must not stay.

    Raises:
        SystemExit: the recipe has an ``expect`` that is not between markers.
    """
    content = path.read_text(encoding="utf-8")
    if "# <measured>" not in content:
        if any(line.startswith("expect:") for line in content.splitlines()):
            raise SystemExit(f"measure_recipe: put # <measured> and # </measured> around the expect: of {path}")
        path.write_text(content.rstrip("\n") + "\n# <measured>\n# </measured>\n", encoding="utf-8")
    set_block(path, "measured", text)


if __name__ == "__main__":
    raise SystemExit(main())
