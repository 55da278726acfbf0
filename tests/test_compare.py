"""``mprun compare``: its words, verdicts over run folders, what is shown, and the command on tiny runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mprun.cli import main
from mprun.commands.compare import _folder, _jobs, exit_code
from mprun.commands.compare_words import namesakes, read
from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.errors import ConfigError
from mprun.lab.compare import gradient_errors, memory
from mprun.lab.compare_markdown import as_json, markdown
from mprun.lab.compare_text import decibels, terminal
from mprun.lab.comparison import Comparison, build
from mprun.lab.measured import Candidate, measured
from mprun.lab.seed_run import whole_windows
from mprun.lab.words import points
from mprun.report.run_folders import find_runs
from mprun.sweeps.plan import planned
from mprun.training.env import config_hash
from tests.made_runs import failed, made_run, ok

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = ["model=mlp", "tracking=disabled", "device=cpu", "dataset.limit=256", "train.steps=8", "train.log_every=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- words --------------------------------------------------------------------------------------------------------------


def test_words_become_policies_seeds_and_an_experiment() -> None:
    asked = read([*TINY, "compare.precisions=fp32,bf16", "compare.seeds=3", "seed=5", "sweep.jobs=2"])
    assert list(asked.policies) == ["fp32", "bf16"]
    assert asked.seeds == (5, 6, 7)
    assert asked.metric == "val/top1"
    assert asked.config.sweep.jobs == 2
    assert asked.base == tuple(TINY)
    assert read([*TINY, "compare.seeds=4,1"]).seeds == (4, 1)
    assert read([*TINY, "compare.gradient_steps=0,5"]).config.compare.gradient_steps == [0, 5]
    assert read([*TINY, "compare.gradient_steps=[]"]).config.compare.gradient_steps == []


def test_a_precision_file_goes_by_its_stem(folder) -> None:
    (folder / "mine.yaml").write_text("defaults: [fp16_dynamic]\nfp32_modules: [head]\n")
    asked = read([*TINY, "compare.precisions=fp32,./mine.yaml", "precision.loss_scale.init=1024"])
    assert asked.policies == {"fp32": "precision=fp32", "mine": f"precision={folder / 'mine.yaml'}"}
    _, job = [*planned(_folder(asked, _jobs(asked)), ())][:2]
    config = compose(job.words).config
    assert config.precision.fp32_modules == ["head"]
    assert config.precision.loss_scale.init == 1024


def test_precision_files_of_one_name_have_short_labels_and_a_line_that_says_which_is_which(folder) -> None:
    for place in ("a", "b"):
        (folder / place).mkdir()
        (folder / place / "recommended.yaml").write_text("defaults: [bf16]\n")
    files = ["a/recommended.yaml", "./b/recommended.yaml"]
    policies = read([*TINY, f"compare.precisions=fp32,{','.join(files)}"]).policies
    assert policies == {
        "fp32": "precision=fp32",
        "recommended": f"precision={folder / 'a' / 'recommended.yaml'}",
        "recommended-2": f"precision={folder / 'b' / 'recommended.yaml'}",
    }
    assert namesakes(policies) == ["recommended is a/recommended.yaml", "recommended-2 is b/recommended.yaml"]
    assert namesakes({label: policies[label] for label in ("fp32", "recommended")}) == []
    with pytest.raises(ConfigError, match=r"names \./a/recommended\.yaml twice"):
        read([*TINY, "compare.precisions=fp32,a/recommended.yaml,./a/recommended.yaml"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare.precisions=fp32,bf61"], "bf61 is not an option of precision: did you mean 'bf16'"),
        (["compare.precisions=bf16,fp16_dynamic"], "compare.baseline=fp32 is not among"),
        (["compare.precisions=fp32"], "needs two"),
        (["compare.precisions=fp32,fp32"], "twice"),
        (["compare.precisions=fp32,./no.yaml"], "does not exist"),
        (["compare.seeds=0"], "compare.seeds=0 is not legal"),
        (["compare.seeds=1,1"], "different ones"),
        (["compare.seeds=0,1", "seed=3"], "one of them"),
        (["compare.sedes=2"], "did you mean 'seeds'"),
        (["compare.metric=val/f1"], "never measured"),
        (["compare.metric=ema/top1"], "not measured"),
        (["compare.confidence=1"], "above 0.5 and below 1"),
        (["precision=bf16"], "compare.precisions=fp32,bf16"),
        (["optimizer.lr=1e-3,1e-2"], "one experiment"),
        (["resume=latest"], "leave it out"),
        (["-m"], "does not know -m"),
        (["train.stpes=3"], "did you mean 'steps'"),
    ],
)
def test_bad_words_are_refused_before_anything_is_made(folder, capsys, words, said) -> None:
    assert main(["compare", *TINY, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not any((folder / "outputs").glob("compare/*"))


def test_a_gap_of_nothing_has_no_sign() -> None:
    assert points(-1e-6, "val/top1", sign=True) == points(1e-6, "val/top1", sign=True) == "0.00"
    assert points(-0.0011, "val/top1", sign=True) == "-0.11"
    assert points(0.4271, "val/top1") == "42.71"


def test_a_run_has_no_use_for_words_of_a_comparison(capsys) -> None:
    assert main(["train", *TINY, "compare.seeds=2"]) == 2
    assert "mprun compare" in capsys.readouterr().err


def test_a_comparison_s_keys_change_no_run() -> None:
    plain = to_plain(compose(TINY).config)
    assert config_hash(plain) == config_hash(to_plain(compose([*TINY, "compare.seeds=7"]).config))


# --- verdicts -----------------------------------------------------------------------------------------------------------


def records(losses: list[float], step_ms: float = 10.0) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": 10 * (n + 1), "attempt": 10 * (n + 1), "train/loss": loss, "perf/step_ms": step_ms}
        for n, loss in enumerate(losses)
    ]


def put(
    place: Path,
    top1: float | None,
    *,
    parameters: str = "aa",
    step_ms: float = 10.0,
    result: dict[str, Any] | None = None,
) -> Path:
    """A run folder with a final top-1, or with another result; loss curves fall with ``top1``."""
    level = 0.5 if top1 is None else 1 - top1
    run = made_run(
        place, "model=mlp",
        result=result or ok(level, top1), records=records([level + 2, level + 1, level + 0.5, level], step_ms),
    )  # fmt: skip
    env = {"start": {"parameters": parameters, "first_batch": "bb", "num_classes": 10}, "data_sha256": "dd"}
    (run / "env.json").write_text(json.dumps(env))
    return run


def compared(place: Path, values: dict[str, list[Any]], **more: Any) -> Comparison:
    """A comparison of made runs: top-1 by seed, or a result, or None for a run that has not been started."""
    runs: dict[str, dict[int, Path]] = {}
    for label, own in values.items():
        runs[label] = {seed: place / f"{label}-{seed}" for seed in range(len(own))}
        for seed, value in enumerate(own):
            if isinstance(value, dict):
                put(runs[label][seed], None, result=value)
            elif value is not None:
                put(runs[label][seed], value, step_ms=10.0 if label == "fp32" else 5.0)
    how = {"margin": None, "spread": 2.0, "confidence": 0.95, "measured": {}, **more}
    return build(place, runs, name="x", baseline="fp32", metric="val/top1", **how)


def verdicts(found: Comparison) -> dict[str, str]:
    return {policy.label: policy.verdict for policy in found.candidates}


def test_verdicts_of_good_bad_and_unclear_policies(folder) -> None:
    found = compared(
        folder,
        {
            "fp32": [0.975, 0.977, 0.979],
            "bf16": [0.976, 0.978, 0.975],
            "bf16_pure": [0.880, 0.905, 0.893],
            "fp16_static": [0.975, 0.940, 0.985],
            "fp16_unscaled": [0.10, 0.11, 0.09],
        },
    )
    assert verdicts(found) == {"bf16": "pass", "bf16_pure": "fail", "fp16_static": "undecided", "fp16_unscaled": "fail"}
    why = {policy.label: policy.why for policy in found.candidates}
    assert "hardly better than chance" in why["fp16_unscaled"]
    assert "8.43 points worse, at least" in why["bf16_pure"]
    assert "seeds would decide" in why["fp16_static"]
    assert exit_code(found) == 1
    bf16 = found.policies[1]
    assert bf16.step_ratio == pytest.approx(0.5)
    assert bf16.curve is not None
    assert bf16.metrics["val/top1"].mean == pytest.approx(0.97633, abs=1e-5)
    assert found.whole
    assert not found.notes


def test_undecided_is_no_failure_unless_strict(folder) -> None:
    found = compared(folder, {"fp32": [0.975, 0.977], "bf16": [0.975, 0.940]})
    assert verdicts(found) == {"bf16": "undecided"}
    assert (exit_code(found), exit_code(found, strict=True)) == (0, 1)


@pytest.mark.parametrize("status", ["diverged", "failed", "oom"])
def test_a_policy_that_breaks_down_fails_and_says_why(folder, status) -> None:
    broke = failed("NonFiniteError: step 2: the loss is NaN", status)
    found = compared(folder, {"fp32": [0.97, 0.98], "fp16": [0.97, broke]})
    assert verdicts(found) == {"fp16": "fail"}
    assert (
        found.policies[1].why
        == f"seed 1 broke down where the baseline did not; seed 1 {status}: step 2: the loss is NaN"
    )
    assert "1 ok, 1 " + status in markdown(found)


def test_a_metric_that_is_not_finite_is_a_breakdown(folder) -> None:
    found = compared(folder, {"fp32": [0.97, 0.98], "fp16": [0.97, ok(math.nan, 0.98)]})
    assert verdicts(found) == {"fp16": "fail"}


def test_runs_that_have_not_ended_are_left_out_and_said(folder) -> None:
    stopped = {**ok(0.1, 0.2), "status": "interrupted"}
    found = compared(folder, {"fp32": [0.975, 0.976, None], "bf16": [0.976, 0.975, stopped]})
    assert verdicts(found) == {"bf16": "pass"}
    assert not found.whole
    assert "2 of 6 runs have not ended" in found.notes[0]


def test_a_baseline_that_breaks_down_or_learns_nothing(folder) -> None:
    dead = compared(folder / "a", {"fp32": [failed("x: y"), failed("x: y")], "bf16": [0.97, 0.97]})
    assert verdicts(dead) == {"bf16": "undecided"}
    assert exit_code(dead) == 1
    dull = compared(folder / "b", {"fp32": [0.10, 0.09], "bf16": [0.10, 0.09]})
    assert verdicts(dull) == {"bf16": "undecided"}
    assert "the baseline has not learned" in dull.notes[0]


def test_another_initialisation_is_noticed(folder) -> None:
    found = compared(folder, {"fp32": [0.97, 0.98], "bf16": [0.97, 0.98]})
    assert not found.notes
    for path in (folder / "bf16-1").iterdir():
        path.unlink()
    (folder / "bf16-1").rmdir()
    put(folder / "bf16-1", 0.98, parameters="zz")
    runs = {label: {seed: folder / f"{label}-{seed}" for seed in (0, 1)} for label in ("fp32", "bf16")}
    how: dict[str, Any] = {"margin": None, "spread": 2.0, "confidence": 0.95, "measured": {}}
    found = build(folder, runs, name="x", baseline="fp32", metric="val/top1", **how)
    assert "bf16, seed 1, began with another initialisation than fp32" in found.notes[0]


def test_what_is_shown(folder) -> None:
    states = [
        {"step": 0, "loss_scale": 1.0, "total_db": 20.4, "loss_error": 0.0, "modules": {"head": 12.0, "stem": math.inf}}
    ]
    found = compared(
        folder,
        {"fp32": [0.975, 0.977], "bf16": [0.975, 0.940]},
        measured={"bf16": {"gradients": states, "memory": {"peak_bytes": 2**20, "categories": {"activations": 2**20}}}},
    )
    for width in (80, 160):
        lines = [line.plain for line in terminal(found, width)]
        assert max(map(len, lines)) <= width
        assert any("undecided" in line for line in lines)
    wide = "\n".join(line.plain for line in terminal(found, 200))
    assert "97.60 ± 0.14" in wide
    assert "head: 12 dB (step 0)" in wide
    assert "1.0 MiB" in wide
    text = markdown(found)
    assert "| bf16   | 0    | 1     | 20 dB | head: 12 dB" in text
    content = json.loads(json.dumps(as_json(found), default=str))
    assert content["policies"][1]["worst_modules"][0] == {"module": "head", "sqnr_db": 12.0, "step": 0}
    assert content["policies"][1]["parity"]["outcome"] == "undecided"
    assert [decibels(value) for value in (math.inf, -math.inf, math.nan, 3.4)] == ["exact", "not finite", "", "3 dB"]


def test_a_run_says_how_it_began_and_a_resumed_one_keeps_it(folder, capsys) -> None:
    def began(*words: str) -> dict[str, Any]:
        assert main(["train", *words]) == 0
        return dict(json.loads((folder / "outputs/latest/env.json").read_text())["start"])

    words = [*TINY, "precision=bf16_pure", "train.checkpoint_every=4"]
    first = began(*words)
    assert len(first["parameters"]) == len(first["first_batch"]) == 12
    assert first["num_classes"] == 10
    assert began(*TINY, "precision=fp32") == first
    other = began(*words, "seed=1")
    assert other["parameters"] != first["parameters"]
    assert other["first_batch"] != first["first_batch"]
    assert began("resume=latest", "train.steps=12") == other


def test_trust_is_not_kept_in_the_folder() -> None:
    asked = read([*TINY, "trust=[tests]", "compare.precisions=fp32,bf16"])
    assert "trust=[tests]" in asked.base
    assert not any("trust" in word for word in asked.again)


# --- what is measured ---------------------------------------------------------------------------------------------------


def test_gradients_lose_what_the_format_loses() -> None:
    words = [*TINY, "train.loss_weight=1e-6"]
    configs = {name: (compose([*words, f"precision={name}"]).config, None) for name in
               ("fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic", "fp16_unscaled", "bf16_pure")}  # fmt: skip
    found = gradient_errors(configs["fp32"][0], configs, [0, 4, 1000])
    assert {name: [state["step"] for state in states] for name, states in found.items()} == {
        key: [0, 4] for key in configs
    }
    low = {name: min(state["total_db"] for state in states) for name, states in found.items()}
    assert low["fp32"] == math.inf
    assert low["fp16_dynamic"] > low["bf16"] + 6 > 20  # three bits more
    assert low["fp16_master_dynamic"] > low["bf16"] + 3
    assert low["bf16_pure"] > 10
    assert low["fp16_unscaled"] < 6  # most of it is below 2^-24
    assert all(value <= 0.1 for value in (s["modules"].get("layers.0", 0.0) for s in found["fp16_unscaled"]))


def test_a_dynamic_scale_backs_off_until_gradients_are_finite() -> None:
    words = [*TINY, "precision.loss_scale.init=16777216"]
    config = compose([*words, "precision=fp16_dynamic"]).config
    found = gradient_errors(config, {"a": (config, None), "b": (config, 1024.0)}, [0])
    assert found["a"][0]["loss_scale"] < 2**24
    assert math.isfinite(found["a"][0]["total_db"])
    assert found["b"][0]["loss_scale"] == 1024


def test_memory_is_smaller_in_half() -> None:
    full, half = (memory(compose([*TINY, f"precision={name}"]).config) for name in ("fp32", "bf16_pure"))
    assert half["peak_bytes"] < full["peak_bytes"]
    assert half["categories"]["parameters"] * 2 == full["categories"]["parameters"]


def test_what_was_measured_is_kept(folder) -> None:
    config = compose([*TINY, "precision=bf16"]).config
    policies = {"bf16": Candidate(lambda: config, "abc", None)}
    first, notes = measured(folder, policies, [0])
    assert not notes
    assert first["bf16"]["gradients"][0]["step"] == 0
    (folder / "measured.json").write_text((folder / "measured.json").read_text().replace('"peak_bytes"', '"kept"'))
    assert "kept" in measured(folder, policies, [0])[0]["bf16"]["memory"]
    assert "kept" not in measured(folder, policies, [])[0]["bf16"]["memory"]


# --- the command --------------------------------------------------------------------------------------------------------

FAST = ["compare.gradient_steps=[]"]


def prepared(words: list[str], values: dict[str, list[float]]) -> Path:
    """A comparison whose runs are finished already, with these top-1."""
    asked = read(words)
    sweep = _folder(asked, _jobs(asked))
    for index, job in enumerate(planned(sweep, ())):
        seed, label = divmod(index, len(asked.policies))
        put(sweep.path(job), values[list(asked.policies)[label]][seed])
    return sweep.folder


@pytest.mark.slow
def test_finished_runs_are_judged_and_not_run_again(folder, capsys) -> None:
    words = [*TINY, "compare.precisions=fp32,bf16,bf16_pure", "compare.seeds=2", *FAST]
    place = prepared(words, {"fp32": [0.972, 0.973], "bf16": [0.972, 0.974], "bf16_pure": [0.87, 0.88]})
    assert main(["compare", *words]) == 1
    out = capsys.readouterr().out
    assert "started" not in out
    assert out.count("done before") == 6
    assert "1 passed, 1 failed" in out
    result = json.loads((place / "result.json").read_text())
    assert result["verdicts"] == {"bf16": "pass", "bf16_pure": "fail"}
    assert (result["status"], result["exit_code"], result["whole"]) == ("ok", 1, True)
    assert {path.name for path in place.iterdir()} >= {"compare.md", "compare.json", "compare.html", "measured.json"}
    page = (place / "compare.html").read_text()
    assert "bf16_pure: fail" in page
    # Its runs are found by the commands that read runs, and it is no run itself.
    assert len(find_runs([str(folder / "outputs")])) == 6


@pytest.mark.slow
def test_other_policies_and_more_seeds_go_on_with_the_same_runs(folder, capsys) -> None:
    words = [*TINY, "compare.precisions=fp32,bf16,bf16_pure", "compare.seeds=2", *FAST]
    place = prepared(words, {"fp32": [0.972, 0.973], "bf16": [0.972] * 2, "bf16_pure": [0.87] * 2})
    fewer = [*TINY, "compare.precisions=fp32,bf16", "compare.seeds=1", *FAST]
    assert main(["compare", *fewer, "compare.strict=true"]) == 1  # one seed says nothing
    assert "started" not in capsys.readouterr().out
    assert main(["compare", *fewer[:-2], "compare.seeds=2", *FAST]) == 0
    assert json.loads((place / "result.json").read_text())["verdicts"] == {"bf16": "pass"}
    assert main(["resume", str(place)]) == 0
    assert "started" not in capsys.readouterr().out
    assert [path.parent for path in (folder / "outputs").rglob("compare.md")] == [place]


def call(words: list[str], cwd: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"}
    return subprocess.Popen(
        [sys.executable, "-m", "mprun", "compare", *words],
        cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_are_made_judged_and_gone_on_with(folder) -> None:
    words = ["model=mlp", "tracking=disabled", "device=cpu", "train.steps=60", "train.loss_weight=3e-6", "sweep.jobs=2"]
    words += [
        "compare.precisions=fp32,fp16_unscaled,fp16_static",
        "precision.loss_scale.init=1e30",
        "compare.gradient_steps=0",
    ]
    process = call([*words, "compare.seeds=1"], folder)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    (place,) = (folder / "outputs/compare/digits-mlp").iterdir()
    content = json.loads((place / "compare.json").read_text())
    found = {policy["label"]: policy for policy in content["policies"]}
    assert found["fp16_unscaled"]["verdict"] == "fail"  # all gradients are 0
    assert found["fp16_static"]["verdict"] == "fail"  # every step overflows
    assert found["fp16_static"]["runs"][0]["status"] == "diverged"
    assert found["fp16_unscaled"]["gradients"][0]["total_db"] < 3
    starts = {json.dumps(policy["runs"][0]["start"]) for policy in content["policies"]}
    assert len(starts) == 1
    assert '"parameters": null' not in starts.pop()
    again = call([*words, "compare.precisions=fp32,fp16_unscaled", "compare.seeds=2"], folder)
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 1
    assert out.count("done before") == 2
    assert out.count(" started ") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupt_keeps_what_is_finished(folder) -> None:
    words = [
        "model=mlp",
        "tracking=disabled",
        "device=cpu",
        "train.steps=3000",
        "compare.precisions=fp32,bf16",
        "compare.seeds=1",
    ]
    process = call([*words, *FAST], folder)
    end = time.monotonic() + 120
    while not any(folder.glob("outputs/compare/*/*/*/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    (place,) = (folder / "outputs/compare/digits-mlp").iterdir()
    result = json.loads((place / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["whole"]) == ("interrupted", 130, False)
    assert "have not ended" in out


@pytest.mark.slow
def test_every_key_of_a_comparison_acts(folder, capsys) -> None:
    base = [*TINY, "compare.precisions=fp32,bf16", "compare.seeds=3", *FAST]
    place = prepared(base, {"fp32": [0.972, 0.974, 0.976], "bf16": [0.969, 0.971, 0.976]})

    def parity(*words: str, label: str = "bf16") -> dict[str, Any]:
        main(["compare", *base, *words])
        content = json.loads((place / "compare.json").read_text())
        return {**content, **next(policy for policy in content["policies"] if policy["label"] == label)}

    plain = parity()
    assert plain["parity"]["margin"] == pytest.approx(0.01)
    assert plain["settings"]["metric"] == "val/top1"
    assert parity("compare.margin=0.001")["parity"]["margin"] == pytest.approx(2 * 0.002)
    assert parity("compare.spread=10")["parity"]["margin"] == pytest.approx(10 * 0.002)
    assert parity("compare.confidence=0.6")["parity"]["high"] < plain["parity"]["high"]
    assert parity("compare.metric=val/loss")["parity"]["deficit"] == pytest.approx(0.002)
    assert parity("compare.baseline=bf16", label="fp32")["parity"]["deficit"] == pytest.approx(-0.002)
    capsys.readouterr()


def test_a_mean_over_fewer_steps_at_the_end_is_no_part_of_the_curve():
    assert whole_windows([(5.0, 2.0), (10.0, 1.0), (14.0, 9.0)], 5) == [(5.0, 2.0), (10.0, 1.0)]
    assert whole_windows([(5.0, 2.0), (10.0, 1.0)], 5) == [(5.0, 2.0), (10.0, 1.0)]
    assert whole_windows([(4.0, 2.0)], 5) == [(4.0, 2.0)]
    assert whole_windows([(4.0, 2.0), (7.0, 1.0)], None) == [(4.0, 2.0), (7.0, 1.0)]
