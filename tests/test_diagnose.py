"""``mprun diagnose``: what it names, what it recommends, and that the recommendation works as it stands."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.cli import main
from mprun.compose import compose
from mprun.lab.advice import (
    SCALES,
    Held,
    Interval,
    interval,
    largest_scale,
    loss_parity,
    lost_norm_frac,
    module_loss,
    scale_rows,
)
from mprun.lab.diagnose import Diagnosis, diagnose
from mprun.lab.findings import as_plain
from mprun.lab.local import local_errors
from mprun.lab.reference import reference, short_run
from mprun.numerics.formats import FORMATS
from mprun.numerics.stats import Stats, stats
from mprun.report.diagnose_text import diagnosis_text

FP16, BF16 = FORMATS["float16"], FORMATS["bfloat16"]
SMALL = [
    "dataset=digits", "dataset.limit=256", "train.batch_size=32", "train.steps=24", "device=cpu", "tracking=disabled",
    "schedule=constant", "optimizer.lr=1e-3", "diagnose.every=4",
]  # fmt: skip


def net(name: str) -> list[str]:
    return ["model=python", f"model.name=diagnose_nets:{name}", "trust=[diagnose_nets]"]


def diagnosed(*words: str) -> Diagnosis:
    found = Diagnosis()
    diagnose(compose([*SMALL, *words], command="diagnose").config, found, lambda line: None)
    return found


# --- pure -------------------------------------------------------------------------------------------------------------


@given(st.floats(1e-12, 1e12))
def test_the_largest_scale_is_the_last_that_does_not_overflow(amax: float) -> None:
    found = largest_scale(amax, FP16)
    legal = [scale for scale in SCALES if not torch.tensor(amax * scale, dtype=torch.float64).half().isinf()]
    assert found == max(legal, default=0.0)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=50), st.integers(-14, 24))
def test_the_lost_norm_is_that_of_the_rounded_tensor_within_a_binade(values: list[float], k: int) -> None:
    x, scale = torch.tensor(values, dtype=torch.float32), 2.0**k
    # A number of exactly 2^-25 after scaling is counted as kept.
    gone = (x * scale) < 2.0**-25
    exact = float(x[gone].norm() / x.norm())
    assert exact / 2.1 <= lost_norm_frac(stats(x), FP16, scale) <= min(exact * 2.1, 1.0) or exact < 1e-6


def made(amax: float, low: float, count: int = 100) -> Stats:
    """Numbers spread over the binades from ``low`` to ``amax``."""
    return stats(torch.logspace(math.log10(low), math.log10(amax), count))


def test_the_interval_lies_between_starvation_and_overflow() -> None:
    held = Held(frozenset({"a", "b"}), frozenset())
    samples = [{"a": {"activation_grad": made(1e-3, 1e-6)}, "b": {"activation_grad": made(1e-6, 1e-9)}}]
    found = interval(scale_rows(samples, held, FP16))
    assert found.high == 2.0**24  # 65520 / 1e-3 = 2^25.9, and no scale is larger than 2^24
    assert 2.0**-2 <= found.low <= 2.0**4  # b: 1e-6 must be well above 2^-25
    wild = [*samples, {"a": {"activation_grad": made(10.0, 1e-6)}}]
    rows = scale_rows(wild, held, FP16)
    assert interval(rows).high == 2.0**12
    assert next(row for row in rows if row.scale == 2.0**13).overflow_frac == 0.5
    assert next(row for row in rows if row.scale == 2.0**13).overflowing == "a"
    assert interval(scale_rows(wild, held, FP16, factor=0.25)).high == 2.0**10
    nothing_half = Held(frozenset(), frozenset())
    assert interval(scale_rows(wild, nothing_half, FP16)).high == 2.0**24


def test_the_static_scale_has_headroom_over_the_end_of_the_run() -> None:
    assert Interval(1.0, 2.0**15, late=2.0**17).static == 2.0**15  # large gradients at the start, which were seen
    assert Interval(1.0, 2.0**15, late=2.0**15).static == 2.0**14
    assert Interval(2.0**14, 2.0**14, late=2.0**14).static == 2.0**14
    assert Interval(1.0, 0.0, late=0.0).static == 0.0


def test_no_scale_is_safe_where_gradients_span_too_much() -> None:
    held = Held(frozenset({"a", "b"}), frozenset())
    samples = [{"a": {"activation_grad": made(1e8, 1e6)}, "b": {"activation_grad": made(1e-9, 1e-11)}}]
    found = interval(scale_rows(samples, held, FP16))
    assert found.empty
    assert found.low > found.high


def test_what_a_format_costs_a_module() -> None:
    held = Held(frozenset({"m"}), frozenset({"m"}))
    samples = [
        {
            "m": {
                "input": made(1.2e5, 1.0),
                "activation": made(10.0, 1e-9),
                "weight": made(1.0, 0.1),
                "weight_grad": made(2.0, 0.1),
            }
        }
    ]
    loss = module_loss("m", "Linear", samples, held, FP16)
    assert (loss.overflow, loss.scale_high) == ("input", 2.0**14)
    assert loss.factor == pytest.approx(1.2e5 / 65504, rel=1e-3)
    assert 0.05 < loss.underflow_frac < 0.3
    assert module_loss("m", "Linear", samples, held, BF16).overflow == ""
    outside = Held(frozenset(), frozenset())
    assert module_loss("m", "Linear", samples, outside, FP16).overflow == ""


def test_parity_of_losses() -> None:
    exact = [2.0 * 0.95**i for i in range(50)]
    assert loss_parity(exact, exact).gap == 0
    assert loss_parity(exact, [loss * 1.01 for loss in exact]).holds
    assert not loss_parity(exact, [2.0] * 50).holds
    assert not loss_parity(exact, [*exact[:-1], math.nan]).holds
    assert loss_parity(exact, [loss / 2 for loss in exact]).holds  # better is not worse


def test_noise_of_the_batches_hides_no_constant_deficit():
    noisy = [1.0 + 0.2 * math.sin(1.7 * step) for step in range(200)]
    assert loss_parity(noisy, [loss + 0.005 for loss in noisy]).holds
    assert not loss_parity(noisy, [loss + 0.08 for loss in noisy]).holds
    apart = [loss + 0.2 * math.sin(2.3 * step) for step, loss in enumerate(noisy)]  # another path, no worse
    assert loss_parity(noisy, apart).holds


# --- local errors -----------------------------------------------------------------------------------------------------


def errors_of(*words: str) -> dict[str, Any]:
    config = compose([*SMALL, *words]).config
    exact = reference(config, steps=4, keep=[0, 4])
    return {error.path: error for error in local_errors(exact, config, exact.states)}


@pytest.mark.parametrize(("precision", "low", "high"), [("fp16_static", 60, 76), ("bf16", 42, 58)])
def test_rounding_alone_leaves_what_the_format_has(precision: str, low: float, high: float) -> None:
    found = errors_of(
        *net("Net"), f"precision={precision}", *(["precision.loss_scale.init=1024"] if "16_s" in precision else [])
    )
    for path in ("stem", "middle", "head"):
        assert low < found[path].forward_sqnr_db < high
        assert low < found[path].grad_sqnr_db < high
    assert not any(error.beyond for error in found.values())


def test_a_silent_zero_is_found_where_it_is_made() -> None:
    found = errors_of(*net("Silent"), "precision=fp16_master_static", "precision.loss_scale.init=16")
    assert [path for path, error in found.items() if error.own] == ["norm"]
    assert found["norm"].forward_sqnr_db < 10
    assert found[""].beyond
    assert not found[""].own
    assert "wrong in FP16" in found["norm"].why
    cured = errors_of(
        *net("Silent"), "precision=fp16_master_static", "precision.loss_scale.init=16", "precision.fp32_modules=[norm]"
    )
    assert not any(error.beyond for error in cured.values())


def test_local_errors_leave_the_states_and_the_random_numbers_as_they_are() -> None:
    config = compose([*SMALL, "model=resnet", "precision=fp16_static"]).config
    exact = reference(config, steps=2, keep=[0, 2])
    before = torch.get_rng_state()
    first = local_errors(exact, config, exact.states)
    assert torch.equal(before, torch.get_rng_state())
    assert local_errors(exact, config, exact.states) == first


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_healthy_model_needs_nothing() -> None:
    found = diagnosed(*net("Net"))
    assert found.chosen is found.fp16
    assert found.chosen is not None
    assert found.chosen.rules == {}
    assert all(trial.ok and trial.skips == 0 for trial in found.chosen.trials)


def test_an_overflowing_linear_is_named() -> None:
    found = diagnosed(*net("Net"), "model.kwargs.gain=1e6")
    assert found.chosen is found.fp16
    assert found.chosen is not None
    assert [*found.chosen.rules] == ["middle"]


def test_a_hand_written_norm_in_half_is_named() -> None:
    found = diagnosed(*net("Silent"), "precision=fp16_master_dynamic")
    assert found.fp16 is not None
    assert "norm" in found.fp16.rules


def test_bf16_where_fp16_would_need_half_of_the_model_in_fp32() -> None:
    found = diagnosed(*net("Tall"))
    assert found.chosen is not None
    assert found.chosen is found.bf16
    assert found.chosen.rules == {}
    assert "not FP16" in found.reason


def test_fp16_that_leaves_nothing_in_half_is_not_recommended() -> None:
    found = diagnosed(*net("Loud"), "optimizer.lr=1e-9")
    assert found.fp16 is not None
    assert {"stem", "head"} == {*found.fp16.rules}
    assert (found.fp16.failed, found.fp16.hollow, found.fp16.small) == ("", True, False)
    assert found.chosen is found.bf16 is not None
    assert found.chosen.rules == {}
    assert "no module with weights is left that computes in half" in found.reason


def test_an_operation_of_the_model_itself_is_named_and_doubts_of_bf16_are_said() -> None:
    found = diagnosed(*net("Scores"))
    assert found.chosen is found.bf16 is not None
    assert "an operation of the model itself overflows" in found.reason
    assert found.chosen.whole is not None
    assert found.chosen.whole.path == ""
    assert f"beyond what rounding explains: {found.chosen.whole.why}" in found.reason
    healthy = diagnosed(*net("Tall"))
    assert healthy.chosen is healthy.bf16 is not None
    assert "beyond what rounding" not in healthy.reason


def test_an_fp32_run_that_diverges_is_no_matter_of_precision() -> None:
    found = diagnosed(*net("Net"), "optimizer=sgd", "optimizer.lr=1e30")
    assert found.chosen is None
    assert "FP32 run itself" in found.reason


@pytest.mark.parametrize(("weight", "least", "most"), [(3e-6, 2.0**22, 2.0**24), (1e4, 1.0, 2.0**8)])
def test_the_scale_follows_the_size_of_the_loss(weight: float, least: float, most: float) -> None:
    found = diagnosed(*net("Net"), f"train.loss_weight={weight}")
    assert found.chosen is found.fp16 is not None
    assert least <= found.fp16.static <= most


@pytest.mark.parametrize(
    "words", [net("Net"), pytest.param(["model=resnet", "optimizer.lr=2e-3"], marks=pytest.mark.slow)]
)
def test_the_static_scale_is_near_where_a_dynamic_one_settles(words: list[str]) -> None:
    found = diagnosed(*words, "train.loss_weight=100")
    config = compose([*SMALL, *words, "train.loss_weight=100", "precision=fp16_dynamic", "precision.loss_scale.growth_interval=4",
                      "train.steps=80"]).config  # fmt: skip
    scales = sorted(short_run(config, steps=80).scales[30:])
    settled = scales[len(scales) // 2]
    assert found.chosen is found.fp16 is not None
    assert 0.25 <= found.fp16.static / settled <= 4


def test_the_command_writes_a_file_that_can_be_used_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, *net("Net"), "model.kwargs.gain=1e6", "precision=fp16_static", "precision.loss_scale.init=3"]
    assert main(["diagnose", *words]) == 0
    shown = capsys.readouterr().out
    folder = next((tmp_path / "outputs" / "diagnose").glob("*/*"))
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["fp32_modules"]) == ("ok", ["middle"])
    assert result["recommended"]["dtype"] == "float16"
    assert result["modules"][0]["module"] == "middle"
    assert "times FP16's largest" in result["modules"][0]["says"]
    assert "middle" in shown
    assert "keep it in FP32" in " ".join(shown.split())
    command = next(line for line in shown.splitlines() if line.startswith("use it"))
    assert "diagnose.every" not in command
    assert "loss_scale" not in command
    for name in ("recommended", "static"):
        file = folder / "precision" / f"{name}.yaml"
        assert "# " in file.read_text()
        run = [word for word in words if not word.startswith(("precision", "diagnose"))]
        assert main([*run, f"precision={file}", f"hydra.run.dir=outputs/{name}"]) == 0
        tried = json.loads((tmp_path / "outputs" / name / "result.json").read_text())
        assert (tried["status"], tried["steps_skipped"]) == ("ok", 0)


def test_without_a_recommendation_the_status_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *SMALL, *net("Net"), "optimizer=sgd", "optimizer.lr=1e30"]) == 1
    assert "FP32 run itself" in " ".join(capsys.readouterr().out.split())
    folder = next((tmp_path / "outputs" / "diagnose").glob("*/*"))
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert not [*(folder / "precision").glob("*")]


def test_ctrl_c_keeps_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mprun.lab.diagnose as module

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_try", stopped)
    assert main(["diagnose", *SMALL, *net("Net")]) == 130
    result = json.loads(next((tmp_path / "outputs" / "diagnose").glob("*/*/result.json")).read_text())
    assert result["status"] == "interrupted"
    assert result["float16"]["interval"]["high"] > 1


def test_a_rule_that_matches_nothing_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *SMALL, *net("Net"), "precision=fp16_dynamic", "precision.fp32_modules=[middel]"]) == 2
    shown = capsys.readouterr().err
    assert "'middel' matches no module" in shown
    assert "FP16:" not in shown
    assert not [*(tmp_path / "outputs" / "diagnose").glob("*")]


def test_a_sample_far_from_all_others_is_said_beside_the_recommendation() -> None:
    rows = [*net("Net"), "dataset=python", "dataset.name=diagnose_nets:rows", "optimizer.lr=1e-6"]
    kept = [word for word in SMALL if not word.startswith("dataset")]

    def plain(*more: str) -> dict[str, Any]:
        found = Diagnosis()
        diagnose(compose([*kept, *rows, *more], command="diagnose").config, found, lambda line: None)
        return as_plain(found)

    found = plain("dataset.kwargs.large=1e5")
    assert "the input of sample 17 reaches 1e+05, more than 1000 times the others" in found["data"]
    assert found["data"] in " ".join(diagnosis_text({**found, "status": "ok"}, 400).split())
    assert plain()["data"] == ""


def test_words_that_do_not_fit_are_refused() -> None:
    assert main(["diagnose", "--fast"]) == 2
    assert main(["diagnose", "resume=latest"]) == 2
    assert main(["diagnose", "diagnose.every=0"]) == 2
