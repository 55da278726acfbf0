"""README and docs say what is: names, keys, files, numbers, commands. What a script writes is up to date."""

from __future__ import annotations

import ast
import doctest
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from mprun.cli import COMMANDS, main
from mprun.compose import compose
from mprun.config import Config
from mprun.config_check import to_plain
from mprun.tracking import read_metrics

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    name: ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/semantics.md",
        "docs/metrics.md",
        "docs/numerics.md",
        "docs/lesson.md",
        "docs/tracking.md",
    )
}
README = PAGES["README.md"].read_text(encoding="utf-8")


@pytest.fixture
def render(monkeypatch):
    """``bench/render.py`` as a module; benches are scripts and import each other by bare name."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name in ("common", "render"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module("render")
    for name in ("common", "render"):
        sys.modules.pop(name, None)


def table_names(text: str, heading: str) -> set[str]:
    """The names in the first column of the tables below ``heading``, up to the next heading of its rank."""
    part = text.partition(f"\n{heading}\n")[2]
    part = re.split(rf"\n{heading.split()[0]} ", part)[0]
    rows = re.findall(r"^\| ([^|]*) \|", part, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_what_a_script_writes_is_up_to_date(render):
    assert render.stale() == [], "run: python bench/render.py --write"


def test_a_block_that_is_out_of_date_is_noticed(render, monkeypatch):
    monkeypatch.setattr(render, "blocks", lambda: {("README.md", "tree"): lambda: "another tree"})
    assert render.stale() == ["README.md: tree"]


# --- metrics and files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory) -> Path:
    """A run with everything that logs something: EMA, skips, a validation set, W&B left out."""
    folder = tmp_path_factory.mktemp("tiny")
    words = [
        "model=mlp", "tracking=disabled", "device=cpu", "train.epochs=2", "train.batch_size=128", "dataset.limit=512", "train.log_every=1",
        "train.ema.decay=0.9", "train.checkpoint_every=2", "precision.loss_scale.init=1e12", "precision.loss_scale.max=1e12",
        "precision.loss_scale.backoff_factor=1e-4", f"hydra.run.dir={folder}/run",
    ]  # fmt: skip
    assert main(words) == 0
    return folder / "run"


def test_every_logged_metric_is_in_the_glossary_and_the_other_way_round(tiny_run):
    records = read_metrics(tiny_run)
    assert {record["kind"] for record in records} == {"train", "val", "skip", "probe", "event"}
    page = PAGES["docs/metrics.md"].read_text(encoding="utf-8")
    listed = table_names(page, "## `metrics.jsonl`")
    logged = {key for record in records for key in record}
    events = {"event", "message", "resumed_from_step", "resumed_from_attempt"}
    assert logged | events == listed
    kinds = {}
    for record in records:
        for key in record:
            kinds.setdefault(key, set()).add(record["kind"])
    for name, where in re.findall(r"^\| `([a-z]+/\w+)` \| ([^|]+) \|", page, flags=re.MULTILINE):
        assert set(where.split(", ")) == kinds[name], name


@pytest.mark.parametrize("file", ["result.json", "env.json", "modules.json"])
def test_every_key_of_a_run_s_json_files_is_explained(tiny_run, file):
    content: Any = json.loads((tiny_run / file).read_text())
    keys = set(content if isinstance(content, dict) else content[0])
    page = PAGES["docs/metrics.md"].read_text(encoding="utf-8")
    rows = re.split(r"\n## ", page.partition(f"\n## `{file}`\n")[2])[0]
    listed = {
        name
        for row in re.findall(r"^\| ([^|]*) \|", rows, flags=re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    assert keys == listed


def test_every_file_of_the_run_folder_is_in_the_glossary(tiny_run):
    page = PAGES["docs/metrics.md"].read_text(encoding="utf-8")
    listed = {name.rstrip("/") for name in table_names(page, "## The run folder")}
    found = {path.name for path in tiny_run.iterdir()}
    assert listed >= found
    assert listed - found == {"wandb", "error.txt", "report.html"}  # off here, and nothing went wrong
    assert {path.name for path in (tiny_run / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    names = {re.sub(r"\d+", "<n>", path.name) for path in (tiny_run / "checkpoints").iterdir()}
    assert all(f"`{name}`" in page for name in names)
    assert names == {"last.pt", "best.pt", "step_<n>.pt"}


# --- keys and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_every_key_that_is_mentioned_exists(name):
    text = PAGES[name].read_text(encoding="utf-8")
    found = set(
        re.findall(
            r"(?<![\w/.])((?:model|dataset|precision|optimizer|schedule|train|tracking|numerics)\.[a-z0-9_.]*[a-z0-9_])",
            text,
        )
    )
    keys = {key for key in found if not key.endswith((".md", ".py"))}
    schema = OmegaConf.structured(Config)
    for key in keys:
        parent, _, leaf = re.sub(r"(\.kwargs)\..*", r"\1", key).rpartition(".")
        group = OmegaConf.select(schema, parent)
        assert group is not None, f"{name} mentions {key}"
        assert leaf in group, f"{name} mentions {key}"
    assert keys or name == "CONTRIBUTING.md"


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    page = PAGES[name]
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_mentioned_exists(name):
    text = PAGES[name].read_text(encoding="utf-8")
    for path in set(re.findall(r"`((?:mprun|bench|tests|conf|docs|recipes)/[\w/.-]+)`", text)):
        assert (ROOT / path).exists(), f"{name}: {path}"


def tree_paths() -> list[str]:
    """The paths of the README's file tree: two spaces a level, a folder ends with a slash."""
    block = README.partition("<!-- tree -->")[2].partition("<!-- /tree -->")[0]
    paths, folders = [], []
    for line in block.strip().splitlines()[1:-1]:
        name = line.split()[0]
        level = (len(line) - len(line.lstrip())) // 2
        folders = folders[:level]
        paths.append("".join([*folders, name]))
        if name.endswith("/"):
            folders.append(name)
    return paths


def test_the_file_tree_is_the_real_one():
    paths = tree_paths()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = {
        path.relative_to(ROOT).as_posix() for folder in ("mprun", "bench") for path in (ROOT / folder).rglob("*.py")
    }
    silent = {
        path
        for path in modules
        if path.endswith("__init__.py") and not ast.get_docstring(ast.parse((ROOT / path).read_text()))
    }
    assert modules - silent - set(paths) == set()


@pytest.mark.parametrize("model", ["vit", "resnet"])
def test_a_digits_recipe_is_the_run_that_its_expectation_was_measured_with(model):
    """``bench/precision_table.py`` measures the defaults of a model; a recipe spells them out and must not drift."""
    recipe = to_plain(compose([f"recipe=digits/{model}_fp16"]).config)
    measured = to_plain(compose([f"model={model}", "precision=fp16_dynamic"]).config)
    assert recipe["meta"].keys() == {"title", "source"}
    assert {key for key in recipe if recipe[key] != measured[key]} <= {"meta", "expect"}
    for line in recipe["expect"]:
        assert {"metric", "op", "value", "tolerance"} <= line.keys()
        assert line["op"] in (">=", "<=")


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_formats_table_is_torch_s():
    page = PAGES["docs/numerics.md"].read_text(encoding="utf-8")
    rows = {
        row.split("|")[1].strip(): row.split("|")[2:-1]
        for row in re.findall(r"^\| (?:FP16|BF16|FP32) \|.*$", page, flags=re.MULTILINE)
    }
    for name, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16), ("FP32", torch.float32)):
        facts = torch.finfo(dtype)
        exponent, mantissa = int(rows[name][0]), int(rows[name][1])
        assert 1 + exponent + mantissa == facts.bits
        largest, *powers = (cell.strip() for cell in rows[name][2:])
        assert float(largest) == pytest.approx(facts.max, rel=1e-3)
        for cell, value in zip(
            powers, (facts.smallest_normal, facts.smallest_normal * facts.eps, facts.eps), strict=True
        ):
            power, _, decimal = cell.partition(" = ")
            assert 2.0 ** int(power.removeprefix("2^")) == value
            assert float(decimal) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(("name", "examples"), [("docs/numerics.md", 8), ("docs/lesson.md", 50)])
def test_the_examples_of_a_page_compute_what_they_say(name, examples):
    page = PAGES[name].read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(page, {}, name, str(PAGES[name]), 0)
    assert len(test.examples) > examples
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0


# --- commands ---------------------------------------------------------------------------------------------------------


def shown_commands() -> list[list[str]]:
    """The words after ``mprun`` of every command line in the README's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("mprun ")]


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_shown_commands_are_legal(words, tmp_path, monkeypatch, capsys):
    """Those that only look are run as they are; of those that train, every check is run, without training."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "recipes" / "digits" / "vit_fp16.yaml", "mine.yaml")
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "nets.py").write_text("class Net:\n    def __init__(self, num_classes=10): ...\n")
    (tmp_path / "my_pkg" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    if words[0] not in COMMANDS:
        # A sweep's first job; a resumed run's other words.
        words = [
            "validate",
            *(re.sub(r"^(\w+=[^,\[]+),.*", r"\1", word) for word in words if not word.startswith(("-m", "resume="))),
        ]
    assert main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
    assert not Path("outputs").exists()


def test_the_readme_shows_enough_commands():
    words = shown_commands()
    assert len(words) >= 10
    assert {"-m"} <= {word for line in words for word in line}


def test_make_targets_that_are_shown_exist():
    rules = (ROOT / "Makefile").read_text()
    shown = {
        target
        for page in PAGES.values()
        for target in re.findall(r"(?:^|`)make (\w+)", page.read_text(), flags=re.MULTILINE)
    }
    assert {"train", "test", "check"} <= shown
    assert all(re.search(rf"^{target}:", rules, flags=re.MULTILINE) for target in shown)


def test_no_command_is_promised_that_does_not_exist():
    named = set(re.findall(r"`mprun ([a-z]+)[ `]", "".join(page.read_text() for page in PAGES.values())))
    assert named <= COMMANDS.keys()


def test_the_examples_of_the_help_are_legal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--help"]) == 0
    examples = re.search(r"\nexamples\n(.*?)\n\n", capsys.readouterr().out, flags=re.DOTALL)
    assert examples is not None
    lines = [shlex.split(re.split(r"\s{2,}", line.strip())[0])[1:] for line in examples[1].splitlines()]
    assert len(lines) >= 5
    for words in lines:
        if words[0] not in COMMANDS:
            kept = [word for word in words if not word.startswith(("-m", "resume="))]
            words = ["validate", *(re.sub(r",.*", "", word) for word in kept)]
        assert main(words) == 0, (words, capsys.readouterr().err)


def test_hydra_s_own_flag_that_the_help_names_works(tmp_path):
    command = [sys.executable, "-m", "mprun", "--cfg", "job", "precision=bf16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compute_dtype: bfloat16" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_has_one_folder(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mprun",
        "-m",
        "precision=fp32,bf16",
        "model=mlp",
        "tracking=disabled",
        "train.steps=1",
        "device=cpu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "sweeps" / "digits-mlp").iterdir()
    runs = {path.parent for path in sweep.glob("*/config.yaml")}
    assert {json.loads((run / "env.json").read_text())["config_hash"] for run in runs} == {run.name for run in runs}
    assert {path.name for path in sweep.iterdir()} == {run.name for run in runs} | {"sweep.json", ".claims"}
    assert len(runs) == 2
