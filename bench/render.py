"""Everything in README, docs and recipes that a script writes: measured tables, the command table, the file tree, numeric facts.

    python bench/render.py --write     put it between the markers (<!-- name --> ... <!-- /name -->)
    python bench/render.py             say which blocks are out of date; exit status 1 if any is

Measured numbers come from ``bench/results/*.json``, facts from the code itself. ``tests/test_docs.py`` fails while a block
is out of date, so neither a table nor the tree can drift.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import ROOT, about_text, block, load, set_block
from lab_tables import markdown_lab
from lab_tables import table as markdown_table
from speed_tables import markdown_speed, markdown_targets

NOT_MEASURED = "Not measured yet: `{command}`."
# Point of a percentage that a recipe's expectation grants to luck, where the spread over the seeds is smaller.
LEAST_TOLERANCE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="bring every block up to date")
    args = parser.parse_args()
    found = write() if args.write else stale()
    for name in found:
        print(("written: " if args.write else "out of date: ") + name)
    return 0 if args.write or not found else 1


def blocks() -> dict[tuple[str, str], Callable[[], str]]:
    """Every generated block: (file, name) -> its text."""
    return {
        ("README.md", "results"): lambda: markdown_results(load("precision_table")),
        ("README.md", "picture"): markdown_picture,
        ("README.md", "speed"): markdown_speed,
        ("README.md", "commands"): markdown_commands,
        ("README.md", "tree"): markdown_tree,
        ("docs/performance.md", "targets"): markdown_targets,
        ("docs/numerics.md", "formats"): markdown_formats,
        ("docs/numerics.md", "operations"): markdown_operations,
        ("docs/numerics.md", "kernels"): markdown_kernels,
        ("docs/numerics.md", "parity"): lambda: markdown_parity(load("parity_rates")),
        ("docs/numerics.md", "compare"): lambda: markdown_compare(load("compare_false_alarms")),
        ("docs/numerics.md", "lab"): lambda: markdown_lab(
            *map(load, ("sick_models", "recommended_scale", "search_toy", "probe_cost"))
        ),
        ("docs/semantics.md", "fixed"): markdown_fixed,
        ("docs/lesson.md", "lessons"): markdown_lessons,
        ("recipes/digits/vit_fp16.yaml", "measured"): lambda: yaml_expect("vit/fp16_dynamic"),
        ("recipes/digits/vit_bf16.yaml", "measured"): lambda: yaml_expect("vit/bf16"),
        ("recipes/digits/resnet_fp16.yaml", "measured"): lambda: yaml_expect("resnet/fp16_dynamic"),
    }


def write() -> list[str]:
    """Bring every block up to date; ``file: block`` of those that changed."""
    return [f"{file}: {name}" for (file, name), text in blocks().items() if set_block(ROOT / file, name, text())]


def stale() -> list[str]:
    """``file: block`` of every block whose text is not what a script would write now."""
    return [
        f"{file}: {name}"
        for (file, name), text in blocks().items()
        if block(ROOT / file, name).strip("\n") != text().strip("\n")
    ]


# --- measured ---------------------------------------------------------------------------------------------------------


def markdown_results(table: dict[str, Any] | None) -> str:
    """The table of ``precision_table``, with commit, machine and versions under it."""
    if not table or not table["cells"]:
        return NOT_MEASURED.format(command="python bench/precision_table.py --write")
    rows = [
        (
            cell["model"],
            f"`{cell['precision']}`",
            top1_text(cell["top1_each"]),
            "baseline" if cell["precision"] == "fp32" else points_text(cell["gap_points"]),
            f"{sum(cell['skips_each']):,}",
            f"{cell['examples_per_s']:,.0f}",
            f"{cell['peak_memory_bytes'] / 2**20:,.0f} MiB",
        )
        for cell in table["cells"].values()
    ]
    heads = ("model", "`precision=`", "val top-1 (min to max)", "gap to FP32", "skips", "examples/s", "peak memory")
    places = sorted({about_text(cell["about"]) for cell in table["cells"].values()})
    seeds = sorted({len(cell["seeds"]) for cell in table["cells"].values()})
    counts = " or ".join(str(count) for count in seeds)
    under = (
        f"Dataset `digits`. Medians over {counts} seed{'' if seeds == [1] else 's'}, after the last step; gap in points; "
        "skips of all seeds together. On the CPU peak memory is the resident memory of the process, torch included."
    )
    table_text = markdown_table(heads, rows, right=range(2, 7))
    return "\n\n".join([table_text, under, *(f"Measured: {place}." for place in places)])


def top1_text(values: list[float]) -> str:
    """``0.9711 (0.9678 to 0.9755)``."""
    spread = f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.4f}{spread}"


def points_text(points: float | None) -> str:
    """``+0.11``; a dash where there is no baseline with the same seeds."""
    return "–" if points is None else f"{points + 0.0:+.2f}"


def markdown_picture() -> str:
    """The picture of the run that ``precision_table`` draws, with its command and what happened."""
    picture = load("picture")
    if picture is None:
        return NOT_MEASURED.format(command="python bench/precision_table.py --write")
    words = picture["words"]
    lines = [" ".join(words[at : at + 2]) for at in range(0, len(words), 2)]
    command = "mprun " + " \\\n    ".join(lines)
    return (
        "![Loss, accuracy, and the loss scale with its skipped steps](docs/img/run.png)\n\n"
        "A loss scale that starts far too high, at 2^40, and may grow every 40 steps. "
        f"{picture['steps_skipped']} attempts overflow (crosses) and are skipped, most of them at the start, while the scale "
        f"is searched for; nothing else moves meanwhile. The other {picture['steps_applied']} are applied.\n\n"
        f"```sh\n{command}\n```"
    )


def markdown_lessons() -> str:
    """One row for each recipe below ``recipes/lessons/``: what it shows, and the first thing that was measured of it."""
    import yaml

    rows = [("recipe", "shows", "measured, one value a seed")]
    for path in sorted((ROOT / "recipes" / "lessons").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        title = next(
            line.lstrip("# ") for line in text.splitlines() if line.startswith("# ") and "@package" not in line
        )
        found = [
            f"`{line['metric']}` {', '.join(str(value) for value in line['measured']['values'])}"
            for line in yaml.safe_load(text)["expect"]
            if line.get("measured") and line["metric"] != "steps_applied"
        ]
        rows.append((f"`lessons/{path.stem}`", title.rstrip("."), "<br>".join(found) or "not measured yet"))
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "| --- | --- | --- |", *body])


def yaml_expect(cell_name: str) -> str:
    """A recipe's ``expect`` from a cell of the table; an empty one before it was measured."""
    table = load("precision_table")
    cell = table["cells"].get(cell_name) if table else None
    if cell is None:
        return "expect: []             # not measured yet"
    tolerance = max(round(max(cell["top1_each"]) - min(cell["top1_each"]), 4), LEAST_TOLERANCE)
    about = cell["about"]
    versions = ", ".join(f"{name}: {about['versions'][name]}" for name in ("python", "torch", "timm"))
    device = about["device"] or f"{about['cpu']}, {about['cores']} cores"
    return textwrap.dedent(f"""\
        expect:
          - metric: val/top1
            op: ">="
            value: {cell["top1"]:.4f}
            tolerance: {tolerance:.4f}
            measured:
              commit: {about["commit"]!r}
              device: {device!r}
              versions: {{{versions}}}
              seeds: {cell["seeds"]}
              values: {[round(value, 4) for value in cell["top1_each"]]}
          - metric: steps_skipped
            op: "<="
            value: {max(cell["skips_each"])}
            tolerance: 1""")


# --- facts of the code ------------------------------------------------------------------------------------------------


def markdown_commands() -> str:
    """The commands that exist, as the command line itself lists them."""
    from mprun.cli import COMMANDS

    return markdown_table(
        ("`mprun ...`", "does"), [(f"`{name}`", text.replace("|", "\\|")) for name, text in COMMANDS.items()]
    )


def markdown_tree() -> str:
    """A line per file: for Python the first sentence of its docstring, for a config group its options."""
    lines = [
        ("README.md", "this page"),
        ("CONTRIBUTING.md", "how to set up, test, and add things"),
        ("Makefile", "train, test, lint, types, layers, check"),
        ("pyproject.toml", "dependencies, tools, layers"),
        ("constraints.txt", "the versions that were tested together"),
        (".ci/run", "what a fresh clone must pass"),
        ("docs/", ""),
        *(("  " + path.name, title_of(path)) for path in sorted((ROOT / "docs").glob("*.md"))),
        ("  img/", "pictures"),
        ("conf/", "the configuration, one folder per group"),
        ("  config.yaml", "the root: defaults of every group, the run folder"),
        *(("  " + path.name + "/", options_of(path)) for path in sorted((ROOT / "conf").iterdir()) if path.is_dir()),
        ("recipes/", "whole experiments: `mprun recipe=digits/vit_fp16`"),
        *(
            ("  " + relative(path, "recipes"), first_comment(path))
            for path in sorted((ROOT / "recipes").rglob("*.yaml"))
        ),
        ("mprun/", ""),
        *python_lines(ROOT / "mprun", "  "),
        ("bench/", "what was measured, and how"),
        *python_lines(ROOT / "bench", "  "),
        ("  results/", "measurements as JSON"),
        ("tests/", "pytest; `slow` and `gpu` are markers"),
        ("outputs/", "run folders; empty in git"),
    ]
    width = max(len(name) for name, _ in lines) + 2
    return "```text\n" + "\n".join(f"{name:<{width}}{text.replace('`', '')}".rstrip() for name, text in lines) + "\n```"


def python_lines(folder: Path, indent: str) -> Iterable[tuple[str, str]]:
    """Name and first sentence of the Python files of ``folder``, then of its subfolders."""
    for path in sorted(folder.glob("*.py")):
        if sentence := first_sentence(path):
            yield indent + path.name, sentence
    for sub in sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))):
        yield f"{indent}{sub.name}/", ""
        yield from python_lines(sub, indent + "  ")


def first_sentence(path: Path, most: int = 100) -> str:
    """The first sentence of a module's docstring, without markup; of a long one the part before the last colon."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0].rstrip(".")
    sentence = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", sentence).replace("``", "")
    return sentence if len(sentence) <= most else sentence.rpartition(": ")[0] or sentence


def title_of(path: Path) -> str:
    """The heading of a Markdown file."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def first_comment(path: Path) -> str:
    """The first comment of a YAML file that says something."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line.lstrip("# ") for line in lines if line.startswith("# ") and "@package" not in line).rstrip(".")


def options_of(folder: Path) -> str:
    """The option names of a config group."""
    return " ".join(path.stem for path in sorted(folder.glob("*.yaml")))


def relative(path: Path, folder: str) -> str:
    """``path`` below ``folder`` of the checkout."""
    return path.relative_to(ROOT / folder).as_posix()


def markdown_formats() -> str:
    """Largest and smallest numbers of the three formats, from torch itself."""
    import torch

    rows = []
    for name, dtype, exponent, mantissa in (
        ("FP16", torch.float16, 5, 10), ("BF16", torch.bfloat16, 8, 7), ("FP32", torch.float32, 8, 23),
    ):  # fmt: skip
        facts = torch.finfo(dtype)
        normal, subnormal = 2 - 2 ** (exponent - 1), 2 - 2 ** (exponent - 1) - mantissa
        largest = f"{facts.max:.0f}" if facts.max < 1e6 else f"{facts.max:.4g}"
        rows.append(
            (name, str(exponent), str(mantissa), largest, f"2^{normal} = {2.0**normal:.4g}",
             f"2^{subnormal} = {2.0**subnormal:.4g}", f"2^-{mantissa} = {2.0**-mantissa:.5g}")
        )  # fmt: skip
    heads = ("", "exponent bits", "mantissa bits", "largest", "smallest normal", "smallest subnormal", "gap above 1")
    return markdown_table(heads, rows, right=range(1, 7))


def markdown_operations() -> str:
    """CUDA's autocast list, as ``cpu_autocast`` has it."""
    from mprun.precision.cpu_autocast import POLICY, STAND_INS

    meaning = {
        "lower_precision": "inputs to the compute dtype",
        "fp32": "inputs to FP32",
        "fp32_set_dtype": "FP32 result, accumulated in FP32, unless the caller names a dtype",
        "fp32_append_dtype": "the same, for `norm`",
        "promote": "inputs to the widest dtype among them",
        "banned": "refused: use the `_with_logits` form",
        "cuda_only": "kernels of CUDA libraries; no CPU tensor gets there",
    }
    rows = []
    for policy in dict.fromkeys(POLICY.values()):
        names = " ".join(f"`{name}`" for name, of in POLICY.items() if of == policy)
        rows.append((f"`{policy}`", meaning[policy], names))
    stand_ins = [f"`{name}`" for name in STAND_INS]
    rows.append(("stand-ins", "not on CUDA's list, given the effect that CUDA's library has", " ".join(stand_ins)))
    return markdown_table(("policy", "effect", "operations"), rows)


def markdown_kernels() -> str:
    """The CPU operations whose half kernels ``cpu_half`` replaces."""
    from mprun.precision.cpu_half import ATTENTION, PRODUCTS

    dtypes = {name: ", ".join(str(d).removeprefix("torch.") for d in found) for name, (_, found) in ATTENTION.items()}
    rows = [("products and convolutions", "float16", " ".join(f"`{name}`" for name in PRODUCTS))]
    rows += [("attention", text, f"`{name}`") for name, text in dtypes.items()]
    return markdown_table(("kind", "for inputs of", "operations"), rows)


def markdown_parity(content: dict[str, Any] | None) -> str:
    """Rates of the parity test where the truth is known; see ``bench/parity_rates.py``."""
    if content is None:
        return "Not simulated yet."
    heads = ["the candidate is ...: the verdict", "floor", *(f"{n} seeds" for n in content["seeds"])]
    rows = [
        [row["case"], f"{row['floor']:g} sd", *(f"{100 * rate:.1f} %" for rate in row["rates"])]
        for row in content["rows"]
    ]
    table = markdown_table(heads, rows, range(1, len(heads)))
    return f"{table}\n\n{content['draws']:,} comparisons a cell (`bench/parity_rates.py`)."


def markdown_compare(content: dict[str, Any] | None) -> str:
    """False alarms and misses in real runs; see ``bench/compare_false_alarms.py``."""
    if content is None:
        return "Not measured yet."
    draws = content["draws"]
    rows = [
        [
            "FP32 against FP32, other seeds",
            n,
            f"{found.get('fail', 0)} of {draws}",
            str(found.get("pass", 0)),
            str(found.get("undecided", 0)),
        ]
        for n, found in content["false_alarms"].items()
    ]
    for case, by_seeds in content["caught"].items():
        for n, found in by_seeds.items():
            total = sum(found.values())
            rows.append(
                [
                    case,
                    n,
                    f"{found.get('fail', 0)} of {total}",
                    str(found.get("pass", 0)),
                    str(found.get("undecided", 0)),
                ]
            )
    table = markdown_table(["compared", "seeds", "fail", "pass", "undecided"], rows, range(1, 5))
    return f"{table}\n\n{about_text(content['about'])} (`bench/compare_false_alarms.py`)."


def markdown_fixed() -> str:
    """The keys that a resumed run must keep."""
    from mprun.resume import FIXED

    return textwrap.fill(" ".join(f"`{key}`" for key in FIXED), 110, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    raise SystemExit(main())
