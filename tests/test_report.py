"""``mprun report``: pages made of run folders alone, whole or in ruins; their numbers are those of the run."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import full_run, modules_json, records, sample, stats, write_probe
from made_runs import failed, made_run, ok

from mprun.cli import main
from mprun.commands.report import read_files
from mprun.numerics.formats import FORMATS
from mprun.numerics.stats import from_json as stats_from_json
from mprun.report import html_page
from mprun.report.diagnose_text import diagnosis_text
from mprun.report.page_run import run_page
from mprun.report.page_words import policy, said_of
from mprun.report.probe_view import (
    FLOW,
    Grid,
    fewer_columns,
    grid,
    histogram,
    relative_peak,
    underflow,
    view_of,
    with_flow,
    worst_first,
)
from mprun.report.thin import thinned


def page_of(folder, *words):
    assert main(["report", str(folder), "--out", str(folder.parent / "page.html"), *words]) == 0
    return (folder.parent / "page.html").read_text(encoding="utf-8")


def figures(page):
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return json.loads(text[1]) if text else {}


def visible(page):
    """The words of a page, without markup, scripts and styles."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return html_text(re.sub(r"<[^>]+>", " ", body))


def html_text(text):
    import html

    return " ".join(html.unescape(text).split())


# --- the page of a run ----------------------------------------------------------------------------------------------------


def test_a_page_is_whole_small_and_asks_for_nothing(tmp_path):
    page = page_of(full_run(tmp_path / "run", steps=2000))
    assert len(page) < 5_000_000
    for key in figures(page):
        assert page.count(f'<div class="plot" id="{key}"') == 1
    outside = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r'(src|href|action)="(?!data:)|url\(|@import|https?://', outside)
    packed = re.search(r'<script type="text/plain" id="plotly">([A-Za-z0-9+/=]+)</script>', page)
    script = gzip.decompress(base64.b64decode(packed[1])).decode("utf-8")
    assert "Plotly" in script
    assert len(script) > 1_000_000


def test_without_torch_and_soon(tmp_path):
    folder = full_run(tmp_path / "run", steps=100)
    code = (
        "import sys; from mprun.cli import main\n"
        f"assert main(['report', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'plotly', 'wandb', 'hydra'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (folder / "report.html").is_file()


def test_curves_are_the_numbers_of_the_run(tmp_path):
    made_run(tmp_path / "run", "precision=fp16_dynamic", result=ok(0.1), records=records(300))
    found = figures(page_of(tmp_path / "run"))
    logged = {record["step"]: record["train/loss"] for record in records(300) if record["kind"] == "train"}
    drawn = next(trace for trace in found["loss"]["data"] if trace["name"] == "train/loss")
    assert drawn["x"] == sorted(logged)
    assert drawn["y"] == pytest.approx([logged[step] for step in sorted(logged)], rel=1e-5)
    scale = next(trace for trace in found["loss-scale"]["data"] if trace["name"] == "loss scale")
    at = dict(zip(scale["x"], scale["y"], strict=True))
    assert [at[attempt] for attempt in range(1, 9)] == [24, 23, 22, 21, 20, 19, 18, 17]  # log2, halved by each skip
    skipped = next(trace for trace in found["loss-scale"]["data"] if trace["name"].startswith("skipped"))
    assert skipped["x"] == [record["attempt"] for record in records(300) if record["kind"] == "skip"]


def test_words_say_what_ran_how_it_ended_and_what_is_worst(tmp_path):
    run = read_files(full_run(tmp_path / "run", steps=400, every=100))
    texts = {text: level for level, text in said_of(run)}
    text = " ".join(texts)
    assert "The run came to its end after 100 applied steps." in text
    assert "Ran vit on digits" in text
    assert "in FP16" in text
    assert "dynamic loss scale from 2^16" in text
    assert "10 of 410 attempts were skipped (2.4%): 10 overflow" in text
    levels = {text[:30]: level for text, level in texts.items()}
    assert levels["Post-mortem, attempt 1: scale "] == "plain"
    assert levels["Post-mortem, attempt 208: over"] == "bad"
    # The module whose gradients were made the smallest, with the fraction by an independent count in half precision.
    lost = max(
        (np.count_nonzero(raw_gradient(attempt)) - np.count_nonzero(np.float16(raw_gradient(attempt) * 1024))) / 256
        for attempt in (1, 101, 201, 301)
    )
    assert re.search(
        rf"blocks\.3\.mlp\.fc2: {round(100 * lost)}% of activation gradients underflow FP16 at scale 2\^10", text
    )


def raw_gradient(attempt):
    """What :func:`made_pages.sample` gives ``blocks.3.mlp.fc2`` as its gradient."""
    from made_pages import MODULES

    rng = np.random.default_rng(attempt)
    for index, name in enumerate(MODULES):
        rng.normal(size=256), rng.normal(size=256)
        backward = rng.normal(size=256) * 2.0 ** (rng.normal(size=256) * 2 - 18 - 0.25 * index - attempt / 400)
        if name == "blocks.3.mlp.fc2":
            return np.float32(backward * 2.0**-12)
        rng.normal(size=256)
    raise AssertionError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fp32", "everything in FP32; no loss scale"),
        ("tf32", "matrix products with TF32 inputs"),
        ("bf16_master", "parameters and arithmetic in BF16, FP32 master parameters"),
        ("fp16_static", "static loss scale"),
        ("bf16_pure", "a negative control"),
    ],
)
def test_the_policy_in_a_sentence(tmp_path, words, said):
    made_run(tmp_path / "run", f"precision={words}")
    assert said in policy(read_files(tmp_path / "run").config)


def test_every_skip_at_the_start_of_a_dynamic_scale_is_benign_but_not_in_a_run_that_never_began(tmp_path):
    found = [
        {"kind": "skip", "step": 0, "attempt": n, "reason": "overflow", "precision/loss_scale": 2.0**-n}
        for n in range(1, 51)
    ]
    made_run(tmp_path / "dead", "precision=fp16_dynamic", result=failed("LossScaleError: x"), records=found)
    went_on = [*found, {"kind": "train", "step": 1, "attempt": 51, "train/loss": 1.0}]
    made_run(tmp_path / "alive", "precision=fp16_dynamic", result=ok(1.0), records=went_on)
    dead, alive = (
        next(said for said in said_of(read_files(tmp_path / name)) if "were skipped" in said[1])
        for name in ("dead", "alive")
    )
    assert (dead[0], alive[0]) == ("warn", "plain")
    assert "benign" in alive[1]
    assert "benign" not in dead[1]


# --- ruins ----------------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_left_out_with_a_line(tmp_path):
    made_run(tmp_path / "run", "precision=fp32")
    page = page_of(tmp_path / "run")
    assert figures(page) == {}
    text = visible(page)
    for line in ("The run has no result", "Nothing was logged", "No loss scale at precision=fp32", "No heatmaps", "The run noted no peak", "No memory by category",
                 "no readable modules.json", "no readable env.json"):  # fmt: skip
        assert line in text


@pytest.mark.parametrize(
    "name", ["result.json", "metrics.jsonl", "probe.jsonl", "modules.json", "env.json", "memory.json", "config.yaml"]
)
def test_a_broken_or_missing_file_costs_its_part_alone(tmp_path, name):
    folder = full_run(tmp_path / "run", steps=60, every=20)
    whole = figures(page_of(folder)).keys()
    (folder / name).write_text("{\n[,\n", encoding="utf-8")
    page = page_of(folder)
    assert "eft out" in visible(page)
    assert len(figures(page)) >= 1
    (folder / name).unlink()
    assert figures(page_of(folder)).keys() <= whole
    assert len(figures(page_of(folder))) >= 1


def test_ends_of_every_kind_have_a_page(tmp_path):
    for status, error, said in (
        (
            "diverged",
            "NonFiniteError: step 3: the loss is nan",
            "The run diverged after 2 applied steps: step 3: the loss is nan",
        ),
        ("oom", "MprunError: out of memory", "The run ran out of memory"),
        ("interrupted", "stopped by SIGINT; go on", "The run was interrupted"),
        ("failed", "RuntimeError: shape", "The run failed after 2 applied steps: shape"),
    ):
        made_run(tmp_path / status, result=failed(error, status), records=records(30))
        (tmp_path / status / "error.txt").write_text("Traceback (most recent call last): <module>")
        text = visible(page_of(tmp_path / status))
        assert said in text
        assert "Traceback (most recent call last): <module>" in text
    made_run(tmp_path / "gone", records=records(30))
    (tmp_path / "gone" / ".lock").touch()
    assert "The run was killed" in visible(page_of(tmp_path / "gone"))
    made_run(
        tmp_path / "nan",
        result=ok(math.nan),
        records=[
            {"kind": "train", "step": 1, "attempt": 1, "train/loss": math.nan},
            {"kind": "val", "step": 1, "val/loss": math.inf},
        ],
    )
    assert "Nothing was logged" in visible(page_of(tmp_path / "nan"))


def test_secrets_are_masked_and_text_is_taken_literally(tmp_path):
    folder = full_run(tmp_path / "run", steps=40)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        text.replace("\nmeta: {}", "\nmeta:\n  api_key: abcdef0123456789\n  note: </script><b>bold</b>")
    )
    with (folder / "metrics.jsonl").open("a") as file:
        message = "<img src=x onerror=alert(1)> password=hunter22"
        file.write(
            json.dumps({"kind": "event", "event": "warning", "step": 1, "attempt": 1, "segment": 0, "message": message})
            + "\n"
        )
    page = page_of(folder)
    assert "abcdef" not in page
    assert "abcdefgh" not in page
    assert "hunter22" not in page
    assert "secret diff" not in page
    assert "<b>bold" not in page
    assert "<img src=x" not in page
    assert "</script><b>bold</b>" in html_text(page)


# --- the probe --------------------------------------------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=40),
    form=st.sampled_from(sorted(FORMATS)),
    power=st.integers(-14, 24),
)
def test_underflow_equals_that_of_the_statistics(values, form, power):
    plain = stats(values)
    found = underflow(plain, FORMATS[form], 2.0**power)
    expected = stats_from_json(plain).underflow_frac(FORMATS[form], 2.0**power)
    assert found == pytest.approx(expected) or (math.isnan(found) and not plain["bins"])


def test_a_gradient_that_is_stored_in_half_is_judged_by_what_was_given_back_before_rounding():
    one = with_flow(sample(900))
    module = one["modules"]["blocks.3.mlp.fc2"]
    assert (
        underflow(module["activation_grad"], FORMATS["float16"], 1024)
        != underflow(module[FLOW], FORMATS["float16"], 1024)
        > 0.5
    )
    assert module[FLOW] == module["input_grad"]
    assert one["modules"][""][FLOW] == one["modules"][""]["activation_grad"]


def test_a_run_in_fp32_is_asked_what_fp16_would_do_and_fp32_modules_are_left_out_of_a_half_run():
    half = [with_flow(sample(1))]
    view = view_of(half, modules_json())
    assert not view.what_if
    assert not any("norm" in name for name in grid(half, view, FLOW, underflow).modules)
    full = [with_flow(sample(1, form="float32", scale=None))]
    view = view_of(full, modules_json())
    assert view.what_if
    assert view.main.name == "float16"
    assert view.scale({"loss_scale": 1024.0}, FLOW) == 1
    assert any("norm" in name for name in grid(full, view, FLOW, underflow).modules)


def test_the_peak_is_relative_to_the_limit():
    form = FORMATS["float16"]
    assert relative_peak({"amax": 65504.0}, form, 1.0) == 0
    assert relative_peak({"amax": 2.0}, form, 32752.0) == 0
    assert math.isnan(relative_peak({"amax": 0.0}, form, 1.0))
    assert relative_peak({"amax": 1.0, "nonfinite": 1}, form, 1.0) == math.inf


def test_what_overflowed_is_the_worst_and_is_not_named_by_its_largest_finite_number(tmp_path):
    folder = full_run(tmp_path / "run", steps=100, every=50)
    over = sample(99)
    over["modules"]["head"]["activation"] |= {"amax": 65504.0, "nonfinite": 7}
    write_probe(folder, [sample(1), over])
    page = page_of(folder)
    assert "At attempt 99 activations of head hold inf or NaN." in visible(page)
    assert "100% of FP16's largest number" not in visible(page)
    assert "of which 1 module had some, count for nothing" in visible(page)
    heat, marks = figures(page)["amax-activation"]["data"]
    rows = len(heat["z"])
    assert heat["customdata"][0][1] == ["head", 99, "inf or NaN among the numbers"]
    assert (marks["x"], marks["y"]) == ([1], [0])
    assert figures(page)["amax-activation"]["layout"]["yaxis"]["range"] == [rows - 0.5, -0.5]
    found = Grid(("a", "b", "c"), (1, 2), np.array([[5.0, 1.0], [math.inf, 2.0], [math.nan, 3.0]]))
    assert worst_first(found, 2).modules == ("b", "a")
    assert found.worst() == ("a", 1, 5.0)
    assert fewer_columns(found, 1).values[:, 0].tolist() == [5.0, math.inf, 3.0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"status": "interrupted", "reason": ""}, "nothing yet: it was stopped"),
        ({"status": "failed", "reason": "NaN", "fp32": {"status": "diverged"}}, "nothing: see first to the FP32 run"),
        ({"status": "failed", "reason": "neither", "fp32": {"status": "ok"}}, "FP32"),
    ],
)
def test_a_diagnosis_recommends_fp32_only_where_it_was_measured_to_be_needed(more, said):
    text = diagnosis_text({"command": "diagnose", "recommended": None, "modules": [], **more})
    assert text.splitlines()[0] == f"recommended  {said}"
    assert "no module would be half" not in text


def test_a_sample_without_a_finite_gradient_is_not_called_free_of_underflow(tmp_path):
    folder = full_run(tmp_path / "run", steps=100, every=50)
    lost = sample(1)
    for tensors in lost["modules"].values():
        for name in tensors.keys() & {"activation_grad", "input_grad"}:
            tensors[name] = {"count": 8, "zeros": 0, "nonfinite": 8, "amax": 0.0, "rms": 0.0, "low": 0, "bins": []}
    write_probe(folder, [lost])
    text = visible(page_of(folder))
    assert "Activation gradients: no sample has a finite number but 0." in text
    assert "1 sample of the probe" in text


def test_a_diagnosis_begins_with_what_the_terminal_showed(tmp_path):
    result = {
        "command": "diagnose", "status": "ok", "reason": "FP16 follows", "modules": [],
        "recommended": {"dtype": "float16", "loss_scale": {"init": 65536.0, "static": 32768.0, "low": 0.5, "high": 65536.0}, "fp32_modules": ["big"]},
        "float16": {"trials": [{"kind": "dynamic", "init": 65536.0, "steps": 40, "skips": 1, "loss_gap": 0.0, "allowed_gap": 0.1, "ok": True}]},
    }  # fmt: skip
    folder = made_run(tmp_path / "run", result=result)
    (folder / "precision").mkdir()
    (folder / "precision" / "recommended.yaml").write_text("# FP16 follows.\nname: x\n")
    text = visible(page_of(folder))
    assert "FP16, dynamic scale from 2^16 (static: 2^15; safe 2^-1 to 2^16); in FP32: big" in " ".join(text.split())
    assert "float16.trials" in text
    assert text.count("FP16 follows") == 3  # once in the words, then as the reason and in the file


@pytest.mark.slow
def test_many_modules_and_samples_are_cut_to_the_worst(tmp_path):
    values = np.arange(60.0).reshape(20, 3) % 7
    values[4] = np.nan
    found = Grid(tuple(map(str, range(20))), (1, 2, 3), values)
    worst = worst_first(found, 5)
    assert len(worst.modules) == 5
    assert (
        np.nanmin(np.nanmax(worst.values, axis=1))
        >= np.nanmax(np.delete(values, [int(name) for name in worst.modules], axis=0)) - 1
    )
    fewer = fewer_columns(found, 2)
    assert fewer.values.shape == (20, 2)
    assert np.array_equal(np.nanmax(fewer.values[:4], axis=1), np.nanmax(values[:4], axis=1))
    names = tuple(f"layer.{n}" for n in range(60))
    made_run(tmp_path / "run", "precision=fp16_dynamic", result=ok(1.0), records=records(30))
    write_probe(tmp_path / "run", [sample(attempt, modules=names, size=16) for attempt in range(1, 161)])
    page = page_of(tmp_path / "run")
    assert len(page) < 5_000_000
    assert "the worst 40 of 60 modules" in visible(page)
    assert "160 samples in 150 columns" in visible(page)
    heat = figures(page)["amax-activation"]["data"][0]
    assert np.array(heat["z"], dtype=float).shape == (40, 150)


def test_an_activation_beyond_the_limit_is_marked_and_said(tmp_path):
    folder = full_run(tmp_path / "run", steps=100, every=50)
    over = sample(99)
    over["modules"]["head"]["activation"] |= {"amax": 1e5}
    write_probe(folder, [sample(1), over])
    page = page_of(folder)
    assert re.search(
        r"head: activations reach 1e\+05 at attempt 99: beyond FP16's largest number, 65504", visible(page)
    )
    marks = [trace for trace in figures(page)["amax-activation"]["data"] if trace["type"] == "scatter"]
    assert [(trace["x"], trace["y"]) for trace in marks] == [([1], [0])]  # last column, worst row


def test_exponents_add_up_to_all_numbers():
    exponents, parts = histogram(sample(1), lambda name: name == "activation")
    assert sum(parts) == pytest.approx(1)
    assert exponents == list(range(exponents[0], exponents[-1] + 1))


# --- thin curves --------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_thin_curves_keep_their_spikes_and_gaps(data):
    count, columns = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 20))
    x = np.cumsum(data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))).astype(float)
    y = np.array(
        data.draw(st.lists(st.floats(-9, 9) | st.just(math.nan) | st.just(math.inf), min_size=count, max_size=count))
    )
    kept_x, kept_y = thinned(x, y, columns)
    assert len(kept_x) <= max(3 * columns + 2, min(count, 3 * columns))
    assert np.all(np.diff(kept_x) > 0)
    points = dict(zip(x.tolist(), y.tolist(), strict=True))
    assert all(
        points[at] == value or math.isnan(value) for at, value in zip(kept_x.tolist(), kept_y.tolist(), strict=True)
    )
    assert (kept_x[0], kept_x[-1]) == (x[0], x[-1])
    finite = y[np.isfinite(y)]
    if len(finite):
        there = kept_y[np.isfinite(kept_y)]
        assert (there.min(), there.max()) == (finite.min(), finite.max())
    assert np.isfinite(y).all() == np.isfinite(kept_y).all()


def test_a_long_run_stays_small(tmp_path):
    made_run(tmp_path / "run", "precision=fp16_dynamic", result=ok(1.0), records=records(20_000, log_every=1))
    page = page_of(tmp_path / "run")
    assert len(page) < 2_600_000
    assert len(figures(page)["loss"]["data"][0]["x"]) <= 2702


# --- several runs, and the lab ------------------------------------------------------------------------------------------------


def test_a_sweep_has_its_table_statuses_and_bands(tmp_path):
    for precision in ("fp32", "bf16"):
        for seed in range(3):
            dead = (precision, seed) == ("bf16", 2)
            made_run(tmp_path / "s" / f"{precision}-{seed}", f"precision={precision}", seed=seed, records=records(50, seed=seed, skips=0),
                     result=failed("NonFiniteError: step 3: the loss is nan") if dead else ok(0.1, 0.9 + seed / 100))  # fmt: skip
    page = page_of(tmp_path / "s")
    text = visible(page)
    assert "5 of 6 ok" in text
    assert "6 runs, 2 configurations apart from the seed: 5 ok, 1 diverged." in text
    assert "Best val/top1: 0.9200, by precision=fp32" in text
    assert "step 3: the loss is nan" in text
    assert "0.9100 ± 0.0100 (3)" in text
    drawn = figures(page)["train-loss"]["data"]
    assert {trace.get("name") for trace in drawn} >= {"precision=fp32", "precision=bf16"}
    assert sum(trace.get("fill") == "toself" for trace in drawn) == 2


def test_what_search_found_has_a_page(tmp_path):
    found = {
        "command": "search", "status": "ok", "error": None, "outcome": "found", "fp32_modules": ["blocks.1.mlp.wo"], "tests": 26,
        "evidence": [{"path": "blocks.1.mlp.wo", "cls": "Linear", "alone": "output reaches 5e+06"}], "curve": {"gap": 7e-5, "why": "lies near"},
    }  # fmt: skip
    folder = made_run(tmp_path / "run", result=found)
    (folder / "precision").mkdir()
    (folder / "precision" / "recommended.yaml").write_text("# 1 module must stay FP32\nname: x\n")
    text = visible(page_of(folder))
    for said in (
        "search: ",
        "blocks.1.mlp.wo",
        "output reaches 5e+06",
        "1 module must stay FP32",
        "Recommended precision file",
        "lies near",
    ):
        assert said in text


def test_without_plotly_the_words_and_tables_stay(tmp_path, monkeypatch):
    folder = full_run(tmp_path / "run", steps=40)
    monkeypatch.setattr(html_page, "find_spec", lambda name: None)
    page = html_page.render(run_page(read_files(folder)))
    assert "pip install 'mprun[plot]'" in visible(page)
    assert "blocks.3.mlp.fc2" in visible(page)
    assert 'class="plot"' not in page
    assert len(page) < 200_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no such folder"),
        (["a", "b"], "one page"),
        (["empty"], "no run lies in this folder"),
        (["run", "--out", "no/such/x.html"], "there is no folder no/such"),
        (["run", "--out", "empty"], "this is a folder"),
        (["run", "--output", "x"], "--out"),
        (["run", "seed=1"], "does not change them"),
        ([], "there is no run yet"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "run", result=ok(1.0))
    (tmp_path / "empty").mkdir()
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mprun: error: ")
    assert said in error
    assert len(error.splitlines()) <= 3


def test_a_run_without_a_group_writes_its_page_and_a_later_life_makes_it_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "model=mlp",
        "tracking=disabled",
        "device=cpu",
        "dataset.limit=256",
        "train.epochs=1",
        "train.log_every=1",
        "hydra.run.dir=run",
    ]
    assert main([*words, "tracking.report=true", "probe.every=2"]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "The run came to its end after 4 applied steps." in visible(page)
    assert "amax-activation" in figures(page)  # the probe's real samples
    assert main(["resume=run", "train.epochs=2", "tracking.report=false"]) == 0
    assert not (tmp_path / "run/report.html").exists()
    words = [word for word in words if word not in ("tracking=disabled", "hydra.run.dir=run")]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main([*words, "hydra.run.dir=alone"]) == 0
    assert main([*words, "hydra.run.dir=member", "tracking.group=many"]) == 0
    assert (tmp_path / "alone/report.html").is_file()
    assert not (tmp_path / "member/report.html").exists()


def test_a_peak_of_a_gradient_for_which_the_step_was_skipped_is_no_alarm_of_its_own(tmp_path):
    made_run(tmp_path / "run", "precision=fp16_dynamic", result=ok(1.0), records=records(60))
    huge = sample(1, scale=2.0**24)
    huge["modules"]["head"]["activation_grad"] |= {"amax": 1.0}
    write_probe(tmp_path / "run", [huge, sample(41)])
    assert not any("reach" in text and "gradients" in text for _, text in said_of(read_files(tmp_path / "run")))
    later = sample(41, scale=2.0**24)
    later["modules"]["head"]["activation_grad"] |= {"amax": 1.0}
    made_run(tmp_path / "other", "precision=fp16_dynamic", result=ok(1.0), records=records(60))
    write_probe(tmp_path / "other", [sample(1), later])
    said = [said for said in said_of(read_files(tmp_path / "other")) if "gradients reach" in said[1]]
    assert said[0][0] == "bad"
    assert "head: activation gradients reach 1.68e+07, times the scale 2^24, at attempt 41" in said[0][1]


def test_a_comparison_is_judged_anew_wherever_its_folder_lies(tmp_path):
    from mprun.lab.compare_markdown import as_json
    from mprun.lab.comparison import build
    from mprun.training.env import json_ready

    places = {
        label: {
            seed: made_run(tmp_path / "c" / f"{label}-{seed}", f"precision={label}", seed=seed, records=records(40, skips=0, seed=seed),
                           result=ok(0.1, (0.9 if label != "bf16_pure" else 0.4) + seed / 500))
            for seed in range(3)
        }
        for label in ("fp32", "bf16_pure")
    }  # fmt: skip
    states = [
        {"step": step, "loss_scale": 1.0, "total_db": 3.0, "modules": {"head": 2.0 + step, "stem": 41.0}}
        for step in (0, 10)
    ]
    found = build(
        tmp_path / "c", places, name="x", baseline="fp32", metric="val/top1", margin=0.01, spread=2.0, confidence=0.95,
        measured={"bf16_pure": {"gradients": states}},
    )  # fmt: skip
    (tmp_path / "c" / "compare.json").write_text(json.dumps(json_ready(as_json(found))))
    (tmp_path / "c").rename(tmp_path / "moved")
    page = page_of(tmp_path / "moved")
    assert "bf16_pure: fail." in visible(page)
    heat = next(figure for key, figure in figures(page).items() if key.startswith("sqnr"))["data"][0]
    assert heat["z"] == [[2.0, 12.0], [41.0, 41.0]]  # dB, the worst module first
    assert "val-top1" in figures(page)
    (tmp_path / "moved" / "compare.json").write_text("[]")
    assert main(["report", str(tmp_path / "moved")]) == 2


def _with(line: str, modules: Any) -> dict[str, Any]:
    return {**json.loads(line), "modules": modules}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("result.json", lambda text: {**json.loads(text), "final": {"val/loss": None}, "best": {"metric": 3}}, ""),
        ("result.json", lambda text: {**json.loads(text), "final": [1], "best": 7}, ""),
        ("env.json", lambda text: {"device": "x", "argv": 3, "started": 5}, ""),
        ("modules.json", lambda text: [1, {"module": 3, "output_dtype": 5}], ""),
        ("probe.jsonl", lambda text: [_with(line, {"a": {"weight": {"bins": None}}, "b": 0.5}) for line in text.splitlines()], "2 of 2 samples"),
        ("probe.jsonl", lambda text: [{**json.loads(text.splitlines()[0]), "step": {}}], "step is {}"),
        ("metrics.jsonl", lambda text: [{"kind": "train", "step": "x"}], "step is &#x27;x&#x27;"),
        ("metrics.jsonl", lambda text: [{"kind": "train", "step": None}], "step is None"),
        ("metrics.jsonl", lambda text: [{"kind": {}, "step": 1}], "kind is {}"),
    ],
)  # fmt: skip
def test_what_somebody_wrote_into_a_file_costs_that_alone(tmp_path, name, change, said):
    run = full_run(tmp_path / "run", steps=20, every=10)
    path = run / name
    content = change(path.read_text())
    lines = content if name.endswith("jsonl") else [content]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert said in page or said.replace("&#x27;", "&#39;") in page or said.replace("&#x27;", "'") in page


def test_round_numbers_up_to_the_end_of_float64():
    from mprun.report.parallel import nice

    for low, high in ((1e-300, 1e308), (1e300, 1.7e308), (1e-307, 1.0)):
        assert all(low <= tick <= high for tick in nice(low, high, log=True))
