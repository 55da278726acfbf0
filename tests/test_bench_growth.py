"""What may not grow: the bench's arithmetic, and for each repair a count that was the square of a size before."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mprun.options
import mprun.precision.overrides
import mprun.sweeps.plan
from mprun.config import TrackingConfig
from mprun.errors import ConfigError, OverrideError
from mprun.numerics.watchable import select, visible
from mprun.precision.overrides import hits, make_plan, matches
from mprun.report.curves import GREY_COLUMNS, Curve, drawn
from mprun.report.thin import COLUMNS
from mprun.sweeps.folder import Job, Sweep, read_sweep
from mprun.tracking import JsonlSink, RunInfo
from mprun.tracking.jsonl import _mend_end
from mprun.training import arrival
from mprun.training.arrival import check_arrival

BENCH = Path(__file__).resolve().parent.parent / "bench"
NAMES = ("growth", "growth_fit", "growth_steps", "growth_files", "speed_tables", "common")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """``bench("name")`` imports a script of ``bench/`` afresh, with results kept in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    common = import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    yield import_module
    for name in NAMES:
        sys.modules.pop(name, None)


# --- the bench -----------------------------------------------------------------------------------------------------------

SIZES = [100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0]


@pytest.mark.parametrize(
    ("cost", "power", "bent"),
    [
        (lambda n: 3 * n, 1.0, False),
        (lambda n: n**2 / 1e3, 2.0, True),
        (lambda n: 7.0, 0.0, False),
        (lambda n: n * np.log(n), 1.13, False),
    ],
)
def test_an_exponent_is_that_of_the_upper_half_and_a_bend_is_seen(bench, cost, power, bent):
    fit = bench("growth_fit")
    costs = [float(cost(n)) for n in SIZES]
    assert fit.exponent(SIZES, costs) == pytest.approx(power, abs=0.03)
    assert (fit.over_linear(SIZES, costs) > fit.OVER) is bent


def test_a_large_constant_hides_no_growth(bench):
    fit = bench("growth_fit")
    row = fit.Row("modules", "x", "ms", "", fit.LINEAR, SIZES, [1000 + (n / 80) ** 2 for n in SIZES])
    assert row.exponent < fit.LINEAR  # the exponent alone is deceived
    assert row.over_linear > fit.OVER
    assert not row.met
    a, b = fit.linear(SIZES, [50 + 0.25 * n for n in SIZES])
    assert (a, b) == (pytest.approx(50), pytest.approx(0.25))


def test_every_axis_runs_and_is_drawn_and_told(bench, tmp_path, monkeypatch):
    """The smallest sizes of the axes without processes; costs are positive and sizes as asked."""
    growth, fit = bench("growth"), bench("growth_fit")
    rows = [row for axis in ("batch", "recipes") for row in growth.run_axis(axis, rounds=1, small=True)]
    assert {row.axis for row in rows} == {"batch", "recipes"}
    assert all(value > 0 for row in rows for value in row.cost)
    assert rows[0].size == [4, 8, 16]
    place = tmp_path / "plot.png"
    fit.save_plot(fit.draw([row for row in rows if row.axis == "batch"], "Batch size", "examples"), place)
    assert 5_000 < place.stat().st_size < 60_000
    content = growth.merged({"rows": [row.plain() for row in rows]})
    assert [entry["target"] for entry in content["table"]] in (
        [batch, recipes, fit.FLAT] for batch in (fit.LINEAR, fit.OVER) for recipes in (fit.LINEAR, fit.OVER)
    )
    for entry in content["table"]:
        assert entry.keys() == {"what", "measured", "ratio", "target", "met"}
    # What was measured before and not now is kept.
    import_module("common").save("growth", content)
    again = growth.merged({"rows": [row.plain() for row in rows if row.axis == "batch"]})
    assert len(again["rows"]) == len(rows)


def test_small_sizes_are_not_judged(bench, monkeypatch, capsys):
    growth, fit = bench("growth"), bench("growth_fit")
    steep = fit.Row("batch", "steep", "ms", "", fit.LINEAR, SIZES, [n**2 for n in SIZES])
    monkeypatch.setattr(growth, "run_axis", lambda *_args, **_more: [steep])
    monkeypatch.setattr(growth.torch, "set_num_threads", lambda count: None)
    said = {}
    for words in ([], ["--small"]):
        monkeypatch.setattr(sys, "argv", ["growth", "--axes", "batch", *words])
        assert growth.main() == 0
        said[bool(words)] = capsys.readouterr().out
    assert "(at most 1.10)" in said[False]
    assert "MISSED" in said[False]
    assert "missed by batch: steep" in said[False]
    assert "nothing is judged" in said[True]
    assert not any(word in said[True] for word in ("MISSED", "target", "at most"))
    for words, why in (["--small", "--json"], "not kept"), (["--rounds", "0"], "'0' is not a count"):
        monkeypatch.setattr(sys, "argv", ["growth", *words])
        with pytest.raises(SystemExit):
            growth.main()
        assert why in capsys.readouterr().err


def test_a_row_has_its_own_unit_and_a_panel_all_of_its(bench):
    growth, fit, files = bench("growth"), bench("growth_fit"), bench("growth_files")
    series = files.lived(Path("unused"), small=True)
    assert [one.unit for one in series] == ["ms", "MB", "kB"]
    rows = [
        fit.Row("length", one.name, one.unit, one.panel, one.most, SIZES, [9.0 + n for n in SIZES]) for one in series
    ]
    assert growth.line(rows[1], judged=True).endswith(" MB  MISSED")
    (axis,) = fit.draw(rows, "Length", "steps").axes
    assert axis.get_ylabel() == "ms, MB, kB"
    assert "(MB)" in axis.get_legend().get_texts()[1].get_text()


def test_one_cost_is_not_the_steepest_of_one(bench):
    growth, fit = bench("growth"), bench("growth_fit")
    flat = [fit.Row("runs", name, "ms", "", fit.FLAT, SIZES, [5.0 for _ in SIZES]).plain() for name in "ab"]
    assert growth.table(flat[:1])[0]["what"] == "Number of runs: what must not grow"
    assert growth.table(flat)[0]["what"] == "Number of runs: what must not grow, the steepest of 2"
    line = fit.Row("runs", "a", "ms", "", fit.LINEAR, SIZES, SIZES).plain()
    assert growth.table([line])[0]["what"] == "Number of runs: exponent of the one cost"


def test_the_table_shows_the_number_that_misses_its_target(bench):
    growth, fit = bench("growth"), bench("growth_fit")
    bent = fit.Row("runs", "bent", "ms", "", fit.LINEAR, SIZES, [1000 + (n / 80) ** 2 for n in SIZES])
    steep = fit.Row("runs", "steep", "ms", "", fit.LINEAR, SIZES, [n**2 for n in SIZES])
    straight = fit.Row("runs", "straight", "ms", "", fit.LINEAR, SIZES, SIZES)
    for rows, told in (([bent, straight], bent), ([steep, bent], steep), ([straight], straight)):
        (entry,) = growth.table([row.plain() for row in rows])
        assert entry["measured"].startswith(told.name)
        assert entry["met"] is (told is straight)
        assert (entry["ratio"] <= entry["target"]) is entry["met"]


def test_the_readme_shows_a_missed_row_before_one_that_is_only_near(bench, monkeypatch):
    tables = bench("speed_tables")
    near = {"what": "near", "measured": "", "ratio": 1.09, "target": 1.1, "met": True}
    missed = {"what": "missed", "measured": "", "ratio": 1.3, "target": 1.25, "met": False}
    more = {"what": "more", "measured": "", "ratio": 12.0, "target": 9.0, "met": True, "at_least": True}
    assert sorted([missed, more, near], key=tables.closeness) == [more, near, missed]
    assert tables.line(more)[2:] == ("12.00", "≥ 9", "met")


def test_a_long_run_of_the_bench_is_what_a_run_writes(bench, tmp_path):
    files = bench("growth_files")
    from mprun.tracking import read_metrics

    base = files.real_run(tmp_path / "base")
    run = files.long_run(base, tmp_path / "long", 300)
    logged = read_metrics(run, effective=True)
    assert len(logged) == 300
    real = read_metrics(base)
    for kind in ("train", "val"):
        made, own = (next(record for record in found if record["kind"] == kind) for found in (logged, real))
        assert own.keys() <= made.keys()
    before = (run / "metrics.jsonl").read_bytes()
    assert files.nth_record(run) > 0
    files.resumed(run)
    assert (run / "metrics.jsonl").read_bytes() == before


# --- modules -------------------------------------------------------------------------------------------------------------


def chain(blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(blocks)))


def comparisons(monkeypatch, act: Any) -> int:
    """How often ``act`` holds a rule against a module."""
    count = 0

    def counted(*given: Any) -> bool:
        nonlocal count
        count += 1
        return matches(*given)

    with monkeypatch.context() as patch:
        patch.setattr(mprun.precision.overrides, "matches", counted)
        act()
    return count


def test_as_many_names_as_modules_are_looked_up_and_not_compared(monkeypatch):
    model = chain(50)
    names = [f"{index}.0" for index in range(50)]
    assert comparisons(monkeypatch, lambda: make_plan(model, names, mode="autocast")) == 0
    assert comparisons(monkeypatch, lambda: select(model, names)) == 0
    modules = len(list(model.modules()))
    # A pattern is held against each module once, not once to see that it matches and once more to see where.
    assert comparisons(monkeypatch, lambda: make_plan(model, ["*.0", "re:.*1"], mode="autocast")) == 2 * modules


@pytest.mark.parametrize(
    "rule", ["", "0", "0.0", "3", "0.*", "**", "**.1", "class:Linear", "re:[01]\\.0", "[01]", "?.0", "0.0.0", "a:b"]
)
def test_what_a_rule_hits_is_what_it_matches(rule):
    modules = dict(chain(3).named_modules(remove_duplicate=False))
    assert hits(rule, modules) == [path for path, module in modules.items() if matches(rule, path, module)]


def test_what_is_inside_a_match_is_selected():
    model = nn.ModuleDict({"a": chain(2), "ab": chain(1), "c": nn.Linear(1, 1)})
    assert select(model, ["a"]) == {"a", "a.0", "a.0.0", "a.0.1", "a.1", "a.1.0", "a.1.1"}
    assert select(model, ["class:ReLU", "c"]) == {"a.0.1", "a.1.1", "ab.0.1", "c"}
    assert select(model, ["**"]) == select(model, []) == set(dict(model.named_modules()))
    with pytest.raises(ConfigError, match="matches no module"):
        select(model, ["a", "b"])
    with pytest.raises(OverrideError, match="matches no module"):
        make_plan(model, ["a", "b"], mode="autocast")


class Text(str):
    """A path that counts how often it is looked at from its start."""

    looked = 0

    def startswith(self, *given: Any) -> bool:
        Text.looked += 1
        return str.startswith(self, *given)


def test_a_selection_is_not_the_product_of_matches_and_modules():
    """By counting, as seconds depend on the machine: before, each path was held against each match."""
    for blocks in (10, 40):
        model = chain(blocks)
        model.named_modules = lambda real=model.named_modules, **more: ((Text(p), m) for p, m in real(**more))  # type: ignore[assignment]
        Text.looked = 0
        assert len(select(model, ["class:Linear", "class:ReLU"])) == 2 * blocks
        assert len(visible(model, select(model, ["class:Linear"]))) == blocks
        assert Text.looked <= 3 * blocks


def test_nothing_inside_a_layer_that_is_another_when_watched_is_visible():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    assert visible(layer, select(layer, [])) == {}
    outer = nn.Sequential(nn.Linear(8, 8), layer)
    assert set(visible(outer, select(outer, []))) == {"", "0"}


def test_parameters_that_share_spread_a_rule_along_a_chain_in_one_pass_each():
    """Tied from the last to the first: the worst order, in which each pass over all of them found one more."""
    layers = [nn.Linear(2, 2) for _ in range(200)]
    for one, two in pairwise(layers):
        one.bias = two.weight = nn.Parameter(torch.zeros(2))  # type: ignore[assignment]
    model = nn.ModuleList(layers)
    reads = 0

    class Won(dict[nn.Module, str]):
        def __contains__(self, key: object) -> bool:
            nonlocal reads
            reads += 1
            return super().__contains__(key)

    paths = list(model.named_modules(remove_duplicate=False))
    won = Won({layers[-1]: "199"})
    mprun.precision.overrides._spread_over_tied(paths, won)
    assert len(won) == 200
    assert reads < 20 * 200


def test_slices_of_one_vector_are_seen_to_be_apart_without_comparing_pairs(monkeypatch):
    model = chain(30)
    vector = torch.randn(sum(p.numel() for p in model.parameters()))
    nn.utils.vector_to_parameters(vector, model.parameters())
    monkeypatch.setattr(arrival, "_overlap", lambda *_: pytest.fail("a pair was compared"))
    check_arrival(model)


def test_slices_that_overlap_are_still_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    vector = torch.randn(7)
    model[0].weight.data, model[1].weight.data = vector[:4].view(2, 2), vector[3:].view(2, 2)
    with pytest.raises(ConfigError, match=r"parameter 0.weight and 1.weight are two tensors in the same memory"):
        check_arrival(model)
    buffered = nn.BatchNorm1d(3)
    buffered.running_mean = buffered.weight.detach()[:]
    with pytest.raises(ConfigError, match="parameter weight and running_mean"):
        check_arrival(buffered)


# --- jobs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saves(monkeypatch):
    """How many jobs each write of ``sweep.json`` had, composing left out."""
    written: list[int] = []
    real = Sweep.save

    def save(self: Sweep) -> None:
        written.append(len(self.jobs))
        real(self)

    def quickly(job: Job, group: str, hydra_words: Sequence[str] = ()) -> Job:
        from dataclasses import replace

        return replace(job, hash=f"{job.number:012x}", folder=f"{job.number:012x}")

    monkeypatch.setattr(Sweep, "save", save)
    monkeypatch.setattr(mprun.sweeps.plan, "plan", quickly)
    return written


def test_the_file_of_a_sweep_is_not_written_for_each_of_its_jobs(tmp_path, saves):
    counts = []
    for jobs in (100, 400):
        sweep = Sweep(tmp_path / str(jobs), (), [Job(number, (f"seed={number}",), ()) for number in range(1, jobs + 1)])
        saves.clear()
        assert len(list(mprun.sweeps.plan.planned(sweep, ()))) == jobs
        counts.append(sum(saves) / jobs)
        assert read_sweep(sweep.folder).jobs == sweep.jobs
    assert counts[1] < 1.5 * counts[0] < 100


def test_a_sweep_that_is_left_early_knows_the_jobs_that_were_begun(tmp_path, saves):
    sweep = Sweep(tmp_path / "s", (), [Job(number, (f"seed={number}",), ()) for number in range(1, 101)])
    jobs = mprun.sweeps.plan.planned(sweep, ())
    begun = [next(jobs) for _ in range(61)]
    jobs.close()
    assert [job for job in read_sweep(sweep.folder).jobs if job.hash] == begun


def test_a_kill_loses_no_job_whose_folder_could_be_another_the_next_time(tmp_path, saves):
    """Words may give a job a folder by the clock: composed again it would run a second time, so it is written down before it runs."""
    sweep = Sweep(tmp_path / "s", (), [Job(number, (f"seed={number}",), ()) for number in range(1, 101)])
    for number, _ in enumerate(mprun.sweeps.plan.planned(sweep, ["hydra.sweep.subdir=${now:%H-%M-%S}"]), start=1):
        assert sum(bool(job.hash) for job in read_sweep(sweep.folder).jobs) == number


def test_jobs_of_earlier_batches_are_not_gone_through_again(tmp_path, saves, monkeypatch):
    sweep = Sweep(tmp_path / "s", (), [Job(number, (), (), "a", f"f{number % 7}") for number in range(1, 51)])
    looked = []
    monkeypatch.setattr(mprun.sweeps.plan, "_forget_refusal", lambda sweep, job: looked.append(job.number))
    sweep.jobs.append(Job(51, (), ()))
    sweep.jobs.append(Job(52, (), (), "a", "f3"))
    assert [(job.number, job.same_as) for job in mprun.sweeps.plan.planned(sweep, (), first=50)] == [
        (51, None),
        (52, 3),
    ]
    assert looked == [51, 52]


# --- recipes -------------------------------------------------------------------------------------------------------------


def test_naming_one_recipe_reads_no_other(tmp_path, monkeypatch):
    real = mprun.options.tree
    for index in range(20):
        (tmp_path / f"r{index}.yaml").write_text("# @package _global_\nseed: 1\n")
    monkeypatch.setattr(mprun.options, "tree", lambda name: tmp_path if name == "recipes" else real(name))
    monkeypatch.setattr(mprun.options, "options", lambda group: pytest.fail("every option was read"))
    assert mprun.options.read_recipe("r7") == "r7"


@pytest.mark.parametrize(
    "name", ["../conf/x", "./digits/vit_fp16", "digits", "digits/", "Digits/vit_fp16", "", "digits/../digits/vit_fp16"]
)
def test_only_a_recipe_as_its_file_is_spelled_is_an_option(name):
    assert not mprun.options.is_option("recipe", name)
    assert all(mprun.options.is_option("recipe", known) for known in mprun.options.options("recipe"))
    assert all(mprun.options.is_option("precision", known) for known in mprun.options.options("precision"))


# --- pages and files -----------------------------------------------------------------------------------------------------


def curve(points: int, seed: int, gap: slice = slice(0, 0)) -> Curve:
    noise = np.random.default_rng(seed)
    mean = 1 / (1 + np.arange(points) / 1000) + noise.normal(0, 0.01, points)
    mean[gap] = np.nan
    return Curve(
        str(seed), np.arange(points, dtype=np.float64), mean, mean - 0.1, mean + 0.1, 2, skips=np.arange(0.0, points, 2)
    )


def test_a_picture_has_as_many_points_as_can_be_seen_and_loses_no_spike():
    found = curve(100_000, 0, slice(40_000, 41_000))
    found.mean[5_000], found.mean[99_999], found.low[77_777] = 9.0, np.nan, -5.0
    (thin,) = drawn([found], "val/loss", 7)
    assert len(thin.x) <= 12 * COLUMNS
    assert len(thin.skips) <= COLUMNS + 1
    assert thin.mean[thin.x == 5_000].tolist() == [9.0]
    assert thin.low[thin.x == 77_777].tolist() == [-5.0]
    assert np.isnan(thin.mean[(thin.x >= 40_000) & (thin.x < 41_000)]).any()
    assert thin.end == found.end
    assert (thin.x[0], thin.x[-1]) == (0, 99_999)
    few = curve(500, 1)
    assert np.array_equal(drawn([few], "val/loss", 7)[0].mean, few.mean)


def test_a_picture_of_many_runs_is_not_as_large_as_they_are():
    counts = [
        sum(len(one.x) for one in drawn([curve(2000, seed) for seed in range(runs)], "val/loss", 7))
        for runs in (30, 120)
    ]
    assert counts[1] < counts[0] + 12 * GREY_COLUMNS


@pytest.mark.parametrize(
    ("content", "mended"),
    [
        (b'{"a": 1}\n{"b": 2}\n', b'{"a": 1}\n{"b": 2}\n'),
        (b'{"a": 1}\n{"b": ', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n'),
        (b'{"a": 1}', b'{"a": 1}\n'),
        (b'{"a"', b""),
        (b"", b""),
        (b'{"a": "' + b"x" * 200_000 + b'"}\n{"b": "' + b"y" * 200_000, b'{"a": "' + b"x" * 200_000 + b'"}\n'),
    ],
)
def test_the_end_of_the_samples_is_mended(content, mended, tmp_path):
    place = tmp_path / "probe.jsonl"
    place.write_bytes(content)
    _mend_end(place)
    assert place.read_bytes() == mended


def test_a_resumed_run_reads_the_end_of_its_samples_alone(tmp_path, monkeypatch):
    line = json.dumps({"step": 1, "attempt": 1, "modules": {"a": "x" * 1000}}) + "\n"
    (tmp_path / "probe.jsonl").write_text(line * 500 + line[:99])
    parsed = []
    real = json.loads
    monkeypatch.setattr("mprun.tracking.jsonl.json.loads", lambda text: (parsed.append(len(text)), real(text))[1])
    sink = JsonlSink()
    sink.start(RunInfo(tmp_path, {}, "x", 0, None, TrackingConfig(), "train"))
    sink.finish({})
    assert sum(parsed) < 2 * len(line)
    assert (tmp_path / "probe.jsonl").read_text() == line * 500
