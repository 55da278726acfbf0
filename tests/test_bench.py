"""The benches' arithmetic and files: medians, gaps, markers; the contestants of the optimizer phase do the same thing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from mprun.processes import SeedRun
from mprun.recipes import Expectation, expect_problems, judge

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``bench("name")`` imports a script of ``bench/`` afresh, with results kept in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(BENCH))
    for path in BENCH.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    common = import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    yield import_module
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


def cell(model: str, precision: str, top1: list[float], **given: Any) -> dict[str, Any]:
    about = {"commit": "abc1234", "dirty": False, "date": "2026-01-01", "cpu": "CPU", "cores": 2, "threads": 2, "device": None,
             "versions": {"python": "3.11.7", "torch": "2.14.1", "timm": "1.0.31"}}  # fmt: skip
    return {"model": model, "precision": precision, "seeds": list(range(len(top1))), "top1_each": top1, "top1": sorted(top1)[len(top1) // 2],
            "skips_each": [0] * len(top1), "examples_per_s": 1234.4, "peak_memory_bytes": 800 * 2**20, "train_s": 4.0, "about": about} | given  # fmt: skip


SCRIPTS = sorted(path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_bench_says_how_it_is_used(script):
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{script}.py"), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_a_ratio_is_taken_within_pairs(bench):
    ratio = bench("common").ratio_of_pairs
    assert ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0  # a slow minute hits both
    with pytest.raises(ValueError, match="argument"):
        ratio([1.0], [1.0, 2.0])


def test_a_block_is_replaced_and_the_rest_stays(bench, tmp_path):
    common = bench("common")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold <!-- y -->\n<!-- /x -->\nb\n")
    assert common.set_block(page, "x", "new\n")
    assert page.read_text() == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    assert not common.set_block(page, "x", "new")
    assert common.block(page, "x") == "\nnew\n"
    recipe = tmp_path / "r.yaml"
    recipe.write_text("k: 1\n# <measured>\nexpect: []\n# </measured>\n")
    assert common.set_block(recipe, "measured", "expect:\n  - a")
    assert recipe.read_text() == "k: 1\n# <measured>\nexpect:\n  - a\n# </measured>\n"


@pytest.mark.parametrize(
    "text", ["no markers", "<!-- x --> never closed", "<!-- /x --> <!-- x -->", 2 * "<!-- x --><!-- /x -->"]
)
def test_missing_or_doubled_markers_are_an_error(bench, tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must be there once each"):
        bench("common").set_block(page, "x", "new")
    assert page.read_text() == text


def test_gaps_are_points_against_fp32_on_the_same_seeds(bench):
    table = bench("precision_table").with_gaps({"cells": {
        "vit/fp32": cell("vit", "fp32", [0.96, 0.97, 0.98]),
        "vit/bf16": cell("vit", "bf16", [0.95, 0.96, 0.99]),
        "vit/fp16_static": cell("vit", "fp16_static", [0.97]),
        "resnet/bf16": cell("resnet", "bf16", [0.97, 0.97, 0.97]),
    }})  # fmt: skip
    gaps = {name: found["gap_points"] for name, found in table["cells"].items()}
    assert gaps["vit/bf16"] == pytest.approx(-1.0)
    assert gaps["vit/fp32"] == 0
    assert gaps["vit/fp16_static"] is gaps["resnet/bf16"] is None


def test_the_results_table_shows_medians_gap_skips_and_where(bench):
    table = bench("precision_table").with_gaps({"cells": {
        "vit/fp32": cell("vit", "fp32", [0.96, 0.97, 0.98]),
        "vit/fp16_dynamic": cell("vit", "fp16_dynamic", [0.961, 0.972, 0.975], skips_each=[1, 0, 2]),
    }})  # fmt: skip
    text = bench("render").markdown_results(table)
    row = next(line for line in text.splitlines() if "fp16_dynamic" in line)
    assert row == "| vit | `fp16_dynamic` | 0.9720 (0.9610 to 0.9750) | +0.20 | 3 | 1,234 | 800 MiB |"
    assert "3 seeds" in text
    assert text.count("commit abc1234") == 1
    assert bench("render").markdown_results(None).startswith("Not measured yet")


def test_a_recipe_s_expectation_is_yaml_with_the_measured_values(bench, tmp_path):
    from omegaconf import OmegaConf

    common, render = bench("common"), bench("render")
    assert OmegaConf.create(render.yaml_expect("vit/fp16_dynamic")) == {"expect": []}
    common.save(
        "precision_table",
        {"cells": {"vit/fp16_dynamic": cell("vit", "fp16_dynamic", [0.9611, 0.9722, 0.9755], skips_each=[1, 0, 2])}},
    )
    found = OmegaConf.to_container(OmegaConf.create(render.yaml_expect("vit/fp16_dynamic")))
    assert isinstance(found, dict)
    first, second = found["expect"]
    assert (first["metric"], first["op"], first["value"], first["tolerance"]) == ("val/top1", ">=", 0.9722, 0.0144)
    assert first["measured"]["seeds"] == [0, 1, 2]
    assert first["measured"]["commit"] == "abc1234"
    assert (second["metric"], second["op"], second["value"]) == ("steps_skipped", "<=", 2)


def test_results_hold_no_path_and_no_host_name(bench):
    about = bench("common").about()
    text = json.dumps(about)
    assert str(Path.home()) not in text
    assert str(BENCH.parent) not in text
    assert set(about) == {"commit", "dirty", "date", "cpu", "cores", "threads", "device", "load", "versions"}


def test_the_contestants_of_the_optimizer_phase_agree(bench):
    """``check`` compares parameters and shadows, and that a skipped step leaves them alone, bit for bit."""
    phase = bench("optimizer_phase")
    device = torch.device("cpu")
    makers = {"plain": phase.Plain, "mprun": phase.Ours}
    contestants = {name: make(phase.make_model("mlp"), device) for name, make in makers.items()}
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(p.shape, generator=generator) * 65536 for p in contestants["plain"].params]
    clock = phase.Clock(cuda=False)
    assert phase.check(contestants, grads, clock) < 1e-6
    assert contestants["mprun"].state.scale.scale.item() == 32768.0  # one overflow
    rows = phase.measure(contestants, grads, clock, rounds=2)
    assert rows["plain"]["to_plain"] == 1.0
    assert rows["mprun"]["total_ms"] > 0


@pytest.mark.slow
def test_startup_finds_the_first_step(bench):
    startup = bench("startup")
    for name in ("fp16_dynamic", "plain"):
        times = startup.job(name)
        assert 0.5 < times.first_s < 200
        assert 0 < times.cpu_s < 2 * times.first_s + 1
        assert times.end_s > times.first_s


# --- measure_recipe ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "op", "values", "value", "tolerance"),
    [
        ("val/top1", ">=", [0.98, 0.97, 0.99], 0.98, 0.02),  # the median, and the spread
        ("val/top1", ">=", [0.98, 0.98, 0.981], 0.98, 0.01),  # luck is granted a point
        ("val/loss", "<=", [2.0, 2.0, 2.01], 2.0, 0.04),  # or two percent
        ("steps_skipped", "<=", [0, 3, 1], 3, 3),
        ("steps_skipped", "<=", [0, 0, 0], 0, 1),
        ("steps_skipped", "==", [50, 50, 50], 50, 0),
        ("train/grad_norm", "==", [0.0, 0.0, 0.0], 0.0, 0.0),
    ],
)
def test_value_and_tolerance_of_a_recipe_s_line(bench, metric, op, values, value, tolerance):
    made = bench("measure_recipe").of_numbers(metric, op, values, None)
    assert (made["value"], made["tolerance"]) == (value, pytest.approx(tolerance))
    line = Expectation(metric, op, made["value"], made["tolerance"])
    assert judge(line, {seed: {"final": {metric: v}, metric: v} for seed, v in enumerate(values)}).passed


def test_measured_lines_are_a_recipe_s_expect_block(bench, tmp_path):
    measure = bench("measure_recipe")
    path = tmp_path / "r.yaml"
    path.write_text("# @package _global_\ntrain:\n  steps: 1\n")
    lines = [{"metric": "status", "op": "=="}, {"metric": "val/top1", "op": ">=", "value": 0.5, "tolerance": 0.3}]
    runs = [
        SeedRun(seed, tmp_path, 0, 1.0, {"status": "ok", "final": {"val/top1": top1}})
        for seed, top1 in enumerate([0.91234, 0.9])
    ]
    place = {"commit": "abc+", "device": "CPU, 1 of 2 cores", "versions": {"python": "3.11.7"}, "seeds": [0, 1]}
    for keep, value in ((False, 0.9062), (True, 0.5)):
        filled = measure.fill(lines, runs, least=None, keep=keep)
        measure.write(path, measure.as_yaml(filled, place))
        made = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(made, dict)
        assert made["train"] == {"steps": 1}
        assert list(expect_problems(made["expect"])) == []
        assert [line["value"] for line in made["expect"]] == ["ok", value]
        assert made["expect"][0]["measured"] == {**place, "values": ["ok", "ok"]}
        assert made["expect"][1]["measured"] == {"values": [0.9123, 0.9]}


def test_a_measurement_without_the_metric_is_refused(bench, tmp_path):
    with pytest.raises(SystemExit, match="ema/top1 is absent"):
        bench("measure_recipe").fill(
            [{"metric": "ema/top1", "op": ">="}], [SeedRun(0, tmp_path, 0, 1.0, {"final": {}})], least=None, keep=False
        )


def test_the_lab_says_what_it_missed(bench):
    lab = bench("lab_tables")
    about = cell("mlp", "fp32", [0.5])["about"]
    totals = {"questions": 2, "hits": 1, "hit_rate": 0.5, "by_instrument": {"search": {"hits": 1, "questions": 2}}, "cases": 2,
              "cures_tried": 1, "cures_that_work": 1, "controls": 3, "control_questions": 9, "false_alarms": 1}  # fmt: skip
    sick = {"about": about, "totals": totals, "sick": [{"fault": "a", "instrument": "search", "hit": True},
                                                     {"fault": "b", "instrument": "search", "hit": False}]}  # fmt: skip
    text = lab.markdown_lab(sick, None, None, None)
    assert "Missed: b (search)." in text
    assert "1 of 2 (50.0%)" in text
    assert "| false alarms on 3 healthy controls | 1 of 9 |" in text
    row = {"case": "vit", "parameters": 5e5, "plain_ms": 10.0, "sampled_ms": 25.0, "ratio": 2.5, "share": 0.015}
    probe = {
        "about": about,
        "targets": {"ratio": 2.0, "share": 0.05},
        "every": 100,
        "rows": [row, {**row, "ratio": 1.5}],
    }
    text = lab.markdown_lab(None, None, None, probe)
    assert text.count("**missed**") == 1
    assert "2.50 **missed** | 1.5% |" in text
    assert lab.markdown_lab(None, None, None, None) == "Not measured yet."
