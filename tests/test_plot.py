"""``mprun plot``: the curves are the numbers of the runs, gaps stay gaps, and every picture can be opened."""

import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import failed, made_run, ok
from matplotlib.image import imread

from mprun.cli import main
from mprun.commands.plot import labels_of
from mprun.report.curves import Trace, alone, best_first, merge, trace_of, wants_log
from mprun.report.draw import draw_curves, draw_parallel
from mprun.report.draw_html import curves_figure, parallel_figure
from mprun.report.parallel import NO_VALUE, axis_of, is_log, nice, parallel
from mprun.report.run_folders import find_runs, read_run
from mprun.report.runs_table import grouped

NAN = math.nan


def trace(x, y, skips=(), **more):
    return Trace(np.array(x, float), np.array(y, float), np.array(skips, float), **more)


def val(step, loss, *, attempt=None, epoch=0, **more):
    return {"kind": "val", "step": step, "attempt": attempt or step, "epoch": epoch, "val/loss": loss, **more}


@pytest.fixture
def sweep(tmp_path):
    """Three precisions, three seeds: one run of FP16 fails half-way, one of BF16 has a NaN, FP16 skips steps."""
    number = 0
    for precision in ("fp32", "bf16", "fp16_dynamic"):
        for seed in range(3):
            dead = precision == "fp16_dynamic" and seed == 2
            records = []
            for step in range(10, 60 if dead else 110, 10):
                train = {"train/loss": 2 / step, "perf/step_ms": 5.0, "perf/peak_memory_bytes": 2**30}
                records.append({"kind": "train", "step": step, "attempt": step, "epoch": (step - 1) // 20, **train})
                loss = NAN if (precision, seed, step) == ("bf16", 1, 50) else 1 / step + seed / 100
                records.append(val(step, loss, epoch=(step - 1) // 20))
            if precision == "fp16_dynamic":
                records.append(
                    {"kind": "skip", "step": 30, "attempt": 31, "epoch": 1, "reason": "overflow", "train/loss": 9.0}
                )
            result = failed("NonFiniteError: x") if dead else ok(0.1, 0.9)
            made_run(
                tmp_path / "s" / str(number),
                "model=mlp",
                f"precision={precision}",
                result=result,
                records=records,
                seed=seed,
            )
            number += 1
    return tmp_path / "s"


@pytest.fixture
def grid(tmp_path):
    """Twenty-four runs over learning rate, clipping and precision; one failed, one ended with NaN."""
    number = 0
    for lr in (3e-4, 1e-3, 3e-3, 1e-2):
        for clip in (None, 0.5, 1.0):
            for precision in ("bf16", "fp32"):
                top1 = 0.9 - number / 100
                result = failed("x") if number == 5 else ok(1.0, NAN if number == 7 else top1)
                made_run(tmp_path / "g" / str(number), "model=mlp", f"precision={precision}", result=result,
                         **{"optimizer.lr": lr, "train.clip_norm": clip})  # fmt: skip
                number += 1
    return tmp_path / "g"


def plot(*words):
    return main(["plot", *map(str, words)])


# --- curves as numbers


@given(st.lists(st.lists(st.floats(-100, 100) | st.just(NAN), min_size=4, max_size=4), min_size=1, max_size=4))
def test_a_curve_is_the_mean_of_what_is_there_within_its_band(values):
    curve = merge("x", [trace([1, 2, 3, 4], one) for one in values])
    for index in range(4):
        there = [one[index] for one in values if math.isfinite(one[index])]
        if not there:
            assert math.isnan(curve.mean[index])
            continue
        assert curve.mean[index] == pytest.approx(sum(there) / len(there), abs=1e-9)
        if len(there) > 1:
            assert (curve.low[index], curve.high[index]) == (min(there), max(there))
        else:
            assert math.isnan(curve.low[index])


def test_a_band_of_standard_deviations_is_the_sample_one():
    curve = merge("x", [trace([1], [1.0]), trace([1], [2.0]), trace([1], [6.0])], band="std")
    deviation = np.std([1, 2, 6], ddof=1)
    assert curve.low[0] == pytest.approx(3 - deviation)
    assert curve.high[0] == pytest.approx(3 + deviation)
    assert np.isnan(merge("x", [trace([1], [1.0]), trace([1], [2.0])], band="none").low).all()


def test_runs_that_logged_elsewhere_are_interpolated_but_not_beyond_their_ends_or_gaps():
    curve = merge("x", [trace([0, 2, 4], [0, 2, 4]), trace([1, 3], [11, 13])])
    assert curve.x.tolist() == [0, 1, 2, 3, 4]
    assert curve.mean.tolist() == [0, 6, 7, 8, 4]
    gap = merge("x", [trace([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), trace([0, 2, 4], [0, NAN, 4])])
    assert gap.mean.tolist() == [0, 1, 2, 3, 4]  # where the second has nothing, the first is alone
    assert np.isnan(gap.low).tolist() == [False, True, True, True, False]


def test_a_failed_run_ends_with_a_mark_at_its_last_value():
    curve = merge("x", [trace([1, 2, 3], [1, 2, NAN], failed=True), trace([1, 2, 3], [1, 1, 1])])
    assert curve.deaths == ((2.0, 2.0),)
    assert merge("x", [trace([1], [NAN], failed=True)]).deaths == ()


def test_records_become_values_gaps_and_skips():
    records = [
        val(10, 1.0),
        val(20, NAN),
        val(30, math.inf),
        {"kind": "skip", "step": 12, "val/loss": 5.0},
        val(30, 2.0),
    ]
    found = trace_of(records, "val/loss", "step", status="diverged")
    assert found.x.tolist() == [10, 20, 30]
    assert found.y[[0, 2]].tolist() == [1.0, 2.0]
    assert math.isnan(found.y[1])
    assert found.skips.tolist() == [12]
    assert found.failed
    assert not trace_of(records, "val/loss", "step", status="running?").failed
    assert trace_of(records, "val/top1", "step") is None
    assert trace_of([], "val/loss", "step") is None


@given(st.integers(1, 50), st.integers(2, 5), st.integers(1, 7))
def test_epochs_come_from_attempts_and_are_exact_at_their_ends(length, epochs, every):
    attempts = sorted({*range(1, length * epochs + 1, every), *(length * (epoch + 1) for epoch in range(epochs))})
    records = [val(attempt, 1.0, epoch=(attempt - 1) // length) for attempt in attempts]
    assert trace_of(records, "val/loss", "epoch").x.tolist() == pytest.approx(
        [attempt / length for attempt in attempts]
    )
    assert trace_of([record for record in records if record["epoch"] == 0], "val/loss", "epoch") is None


def test_time_is_that_of_training_steps():
    def train(attempt, pace):
        return {"kind": "train", "step": attempt, "attempt": attempt, "train/loss": 1.0, "perf/step_ms": pace}

    records = [train(10, 100.0), val(15, 1.0), train(20, 200.0), val(20, 1.0)]
    assert trace_of(records, "train/loss", "time").x.tolist() == pytest.approx([1.0, 3.0])
    assert trace_of(records, "val/loss", "time").x.tolist() == pytest.approx([2.0, 3.0])
    assert trace_of([val(1, 1.0)], "val/loss", "time") is None


def test_a_lonely_value_is_found():
    assert alone(np.array([1, NAN, 2, NAN, 3, 4, NAN, 5])).tolist() == [
        True,
        False,
        True,
        False,
        False,
        False,
        False,
        True,
    ]


def test_the_best_curve_is_by_the_direction_of_its_metric():
    curves = [merge("a", [trace([1], [1.0])]), merge("b", [trace([1], [NAN])]), merge("c", [trace([1, 2], [9.0, 0.5])])]
    assert best_first(curves, "val/loss") == [2, 0, 1]
    assert best_first(curves, "val/top1") == [0, 2, 1]


def test_one_label_for_each_configuration_without_its_seed(sweep):
    runs = [read_run(folder) for folder in find_runs([str(sweep)])]
    groups = grouped([run.config for run in runs], ["seed"])
    assert labels_of(runs, groups) == ["precision=fp32", "precision=bf16", "precision=fp16_dynamic"]
    assert labels_of(runs[:3], [[0, 1, 2]]) == ["digits-mlp-fp32"]
    assert labels_of(runs[:1], [[0]]) == ["0"]


def test_an_axis_is_logarithmic_where_that_spreads_its_values():
    assert is_log([1e-4, 1e-3, 1e-2])
    assert is_log([16, 32, 64, 128])
    assert not is_log([0.0, 0.1, 0.2])
    assert not is_log([0.1, 0.5, 0.9])
    assert not is_log([1, 2, 3])
    assert wants_log([1.0, 30.0, NAN])
    assert not wants_log([0.0, 30.0])
    assert not wants_log([])


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.booleans())
def test_ticks_are_few_and_within_their_axis(low, factor, log):
    ticks = nice(low, low * factor, log=log)
    assert 1 <= len(ticks) <= 9
    assert all(low * (1 - 1e-9) <= tick <= low * factor * (1 + 1e-9) for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_words_null_and_flags_have_places_of_their_own():
    axis = axis_of("clip_norm", [None, 1.0, 0.5, None])
    assert {text: place for place, text in axis.ticks} == {"0.5": 0.0, "1": 0.5, "null": 1.0}
    assert axis.places == (1.0, 0.5, 0.0, 1.0)
    numbers = axis_of("lr", [1e-4, 1e-2, 1e-3])
    assert numbers.log
    assert numbers.places == pytest.approx((0, 1, 0.5))
    assert axis_of("same", ["a", "a"]).places == (0.5, 0.5)


def test_runs_without_a_value_lie_below_the_axis_and_the_best_is_drawn_last():
    data = parallel({"lr": [1, 2, 3, 4]}, "val/loss", [0.5, NAN, 0.1, math.inf], "abcd", higher=False)
    assert data.missing == 2
    assert data.order[-2:] == (0, 2)
    assert [place == NO_VALUE for place in data.axes[-1].places] == [False, True, False, True]


# --- pictures


def test_a_legend_has_a_line_for_each_name_that_does_not_fit_beside_another():
    curves = [
        merge("precision=recommended_static", [trace([1, 2], [1.0, 2.0])]),
        merge("precision=fp32", [trace([1, 2], [1.0, 3.0])]),
    ]
    one, two = (
        curves_figure(curves, "val/loss", "step", subtitle="", letters=letters)["layout"]["margin"]["b"]
        for letters in (120, 50)
    )
    assert two - one == 21


@pytest.mark.parametrize("ending", ["png", "svg", "html", "pdf"])
@pytest.mark.parametrize(
    "words",
    [
        (), ("--metric", "train/loss", "--skips", "--x", "epoch"), ("--metric", "perf/peak_memory_bytes", "--x", "time"),
        ("--band", "std", "--filter", "seed=2"), ("--filter", "precision=bf16"), ("--kind", "parallel"),
    ],
)  # fmt: skip
def test_every_picture_can_be_opened(ending, words, sweep, tmp_path, capsys):
    out = tmp_path / f"picture.{ending}"
    assert plot(sweep, *words, "--out", out) == 0
    assert capsys.readouterr().out == f"{out}\n"
    if ending == "png":
        image = imread(out)
        assert image.shape[1] >= 1100
        assert len(np.unique((image * 255).astype(np.uint8).view(np.uint32))) > 30
    elif ending == "svg":
        assert ElementTree.parse(out).getroot().tag.endswith("svg")
        before = out.read_bytes()
        plot(sweep, *words, "--out", out)
        assert out.read_bytes() == before
    elif ending == "pdf":
        assert out.read_bytes().startswith(b"%PDF")
    else:
        page = out.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page)
        assert page.index("<title>") < 100
        assert "Plotly.newPlot" in page


def test_parallel_coordinates_of_a_grid(grid, tmp_path, capsys):
    for ending in ("png", "html"):
        assert plot(grid, "--kind", "parallel", "--metric", "val/top1", "--out", tmp_path / f"p.{ending}") == 0
    assert plot(grid, "--kind", "parallel", "--metric", "best", "--out", tmp_path / "best.svg") == 0


def texts(figure):
    """Every text of a figure with the box it covers."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    found = [text for axis in figure.axes for text in axis.texts] + [*figure.texts]
    ticks, (left, right) = figure.axes[0].get_xticklabels(), figure.axes[0].get_xlim()
    found += [text for text in ticks if left <= text.get_position()[0] <= right and figure.axes[0].axison]
    found += [figure.axes[0].title, figure.axes[0].xaxis.label, figure.axes[0].yaxis.label]
    found += [figure.axes[0]._left_title]
    found += [text for legend in figure.legends for text in legend.get_texts()]
    return [
        (text.get_text(), text.get_window_extent(renderer)) for text in found if text.get_text() and text.get_visible()
    ]


def assert_apart(figure):
    boxes = texts(figure)
    width, height = figure.canvas.get_width_height()
    for number, (text, box) in enumerate(boxes):
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= height + 1, text
        for other, place in boxes[number + 1 :]:
            overlap = min(box.x1, place.x1) - max(box.x0, place.x0), min(box.y1, place.y1) - max(box.y0, place.y0)
            assert min(overlap) <= 2, (text, other)


def test_no_text_of_a_picture_covers_another_or_is_cut():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    curves = [merge(f"lr={lr}, precision=fp16_dynamic (2/3 ok)", [trace([10, 20], [lr, 1.0])]) for lr in range(1, 20)]
    about = "9 runs  ·  mean over seeds, band from min to max  ·  × a run failed  ·  3 without val/loss"
    columns = {
        "lr": [1e-4, 1e-3, 1e-2, 1e-1],
        "weight_decay": [0, 0.1, 0.01, 0.2],
        "precision": ["fp16_dynamic", "b", "c", "d"],
    }
    data = parallel(columns, "best val/top1", [0.9, NAN, 0.5, 0.95], "abcd", higher=True)
    for figure in (
        draw_curves(curves, "val/loss", "step", subtitle=about),
        draw_curves(curves[:3], "perf/peak_memory_bytes", "time", subtitle=about),
        draw_parallel(data, subtitle="4 runs", higher=True),
    ):
        FigureCanvasAgg(figure)
        assert_apart(figure)


def test_a_page_holds_the_numbers_and_takes_no_markup_from_them():
    curve = merge(
        "<b>&x", [trace([1, 2, 3], [1.0, NAN, 3.0], skips=[2], failed=True), trace([1, 2, 3], [3.0, NAN, 3.0])]
    )
    figure = curves_figure([curve], "val/<i>", "step", subtitle="a", skips=True)
    line = next(one for one in figure["data"] if one.get("name"))
    assert line["y"] == [2.0, None, 3.0]
    assert line["name"] == "&lt;b&gt;&amp;x"
    assert [one["x"] for one in figure["data"] if one.get("fill")] == [[1.0, 1.0], [3.0, 3.0]]
    assert "<i>" not in json.dumps(figure)
    data = parallel({"lr": [1e-3, 1e-2, 1e-1]}, "val/top1", [0.5, NAN, 0.7], "abc", higher=True)
    page = parallel_figure(data, subtitle="", higher=True)
    (lines,) = page["data"]
    assert [one["label"] for one in lines["dimensions"]] == ["lr (log)", "val/top1"]
    assert "no value" in lines["dimensions"][1]["ticktext"]
    assert min(lines["line"]["color"]) == -0.25
    assert max(lines["line"]["color"]) == 1.0
    json.dumps(page, allow_nan=False)


def test_runs_without_the_metric_or_with_a_broken_file_are_named_and_the_others_drawn(sweep, tmp_path, capsys):
    made_run(sweep / "20", "model=mlp", result=failed("x"), seed=5)
    broken = made_run(sweep / "21", "model=mlp", result=ok(1.0), records=[], seed=6)
    (broken / "metrics.jsonl").write_text('{"a": 1\n{"kind": "val"}\n')
    (sweep / "0" / "config.yaml").write_text("[")
    assert plot(sweep, "--out", tmp_path / "a.png") == 0
    error = capsys.readouterr().err
    assert "metrics.jsonl:1: not a JSON object" in error
    assert "/20, " in error
    assert "/21" in error
    assert (tmp_path / "a.png").exists()


def test_a_single_run_and_two_hundred_have_pictures(sweep, tmp_path):
    assert plot(sweep / "0", "--out", tmp_path / "one.png") == 0
    runs = [merge(f"lr={number}", [trace([1, 2, 3], [1, 2, number + 1])]) for number in range(200)]
    figure = draw_curves(runs, "val/loss", "step", subtitle="")
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "193 others"
    assert len(curves_figure(runs, "val/loss", "step", subtitle="")["data"]) == 200


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--metric", "val/los"], "no run has logged val/los: did you mean 'val/loss'"),
        (["--kind", "curve"], "did you mean 'curves'"),
        (["--x", "steps"], "did you mean 'step'"),
        (["--out", "a.gif"], ".png, .svg, .pdf, .html"),
        (["--out", "nowhere/a.png"], "there is no folder nowhere"),
        (["--kind", "parallel", "--x", "time"], "--x is for --kind curves"),
        (["--kind", "parallel", "--metric", "val/top"], "no run has the key val/top"),
        (["--kind", "parallel", "--filter", "status=diverged"], "none of 1 runs ended well"),
        (["--kind", "parallel", "--filter", "precision=fp32"], "differ in a hyperparameter"),
        (["--filter", "seed=9"], "none of 9 runs is left"),
        (
            ["--metric", "val/loss", "--x", "epoch", "--filter", "seed=99,2", "--filter", "status=nothing"],
            "none of 9 runs",
        ),
    ],
)
def test_a_wrong_word_is_refused_with_what_is_legal(words, expected, sweep, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert plot(sweep, *words) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_epochs_within_the_first_pass_are_refused_with_the_way_out(tmp_path, capsys):
    made_run(tmp_path / "a", "model=mlp", result=ok(1.0), records=[val(10, 1.0)])
    assert plot(tmp_path, "--x", "epoch", "--out", tmp_path / "a.png") == 2
    assert "use --x step" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "ending"), [("matplotlib", "png"), ("plotly", "html")])
def test_a_missing_extra_is_one_line_with_its_remedy(package, ending, sweep, tmp_path):
    code = f"import sys; sys.modules[{package!r}] = None; from mprun.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "plot", str(sweep), "--out", str(tmp_path / f"a.{ending}")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"mprun: error: mprun plot needs {package}: pip install 'mprun[plot]'\n"


def test_a_picture_needs_no_torch(sweep, tmp_path):
    code = (
        "import sys; from mprun.cli import main; status = main(sys.argv[1:]);"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'wandb', 'plotly'} & set(sys.modules))); sys.exit(status)"
    )
    words = [sys.executable, "-c", code, "plot", str(sweep), "--out", str(tmp_path / "a.png")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"
