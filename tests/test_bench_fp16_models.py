"""The bench of FP16 and BF16 steps: its contestants train the same thing, and its table judges what it says."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"
TINY = ["model=vit", "dataset=digits", "model.kwargs.depth=1", "model.kwargs.embed_dim=16", "train.batch_size=8"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("fp16_models", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module("fp16_models")
    for name in ("fp16_models", "common"):
        sys.modules.pop(name, None)


def test_contestants_do_the_same_work(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.CASES, "vit", TINY)
    row = bench.measure("vit", list(bench.CONTESTANTS), rounds=1, steps=1)
    assert row["to_fp32"].keys() == {"fp32", "bf16", "fp16"}
    assert row["to_fp32"]["fp32"] == 1.0
    assert row["native_to_fp16"] == row["step_ms"]["native"] / row["step_ms"]["fp16"]
    first = {name: losses[0] for name, losses in row["losses"].items()}
    assert first["fp16"] == pytest.approx(first["fp32"], rel=2e-3)
    assert first["native"] == pytest.approx(first["fp16"], rel=1e-3)
    assert first["bf16"] == pytest.approx(first["fp32"], rel=2e-2)
    assert len(set(first.values())) == 4  # four kinds of arithmetic


def test_parameters_after_steps_agree(bench: Any) -> None:
    trained = {}
    for name in ("fp32", "fp16", "native"):
        each = bench.contestant(
            [*TINY, *bench.CONTESTANTS[name], "schedule=constant", "optimizer=sgd", "optimizer.lr=1e-2"]
        )
        start = torch.cat([p.detach().flatten() for p in each.state.model.parameters()])
        each.steps(3)
        assert int(each.state.applied) == 3
        trained[name] = torch.cat([p.detach().flatten() for p in each.state.model.parameters()]) - start
    moved = trained["fp32"].norm()
    assert moved > 1e-3
    assert (trained["fp16"] - trained["fp32"]).norm() < 0.02 * moved
    assert (trained["native"] - trained["fp16"]).norm() < 0.01 * moved


def test_large_cases_are_large(bench: Any) -> None:
    for case in ("vit large", "gpt large", "resnet large"):
        assert bench.contestant([*bench.CASES[case], "precision=fp32"]).parameters >= bench.LARGE


def test_the_table_judges_each_target(bench: Any) -> None:
    def row(case: str, parameters: int, **ratios: float) -> dict[str, Any]:
        return {
            "case": case, "parameters": parameters, "step_ms": {"fp32": 10.0, "bf16": 9.0, "fp16": 12.0, "native": 100.0},
            "to_fp32": {"fp32": 1.0, "bf16": ratios["bf16"], "fp16": ratios["fp16"]}, "native_to_fp16": ratios["native"],
        }  # fmt: skip

    lines = bench.table([
        row("vit", 10**5, bf16=0.91, fp16=9.0, native=9.0),
        row("resnet large", 5 * 10**6, bf16=2.0, fp16=1.25, native=8.9),
    ])  # fmt: skip
    found = [(line["ratio"], line["target"], line["met"]) for line in lines]
    assert found == [(9.0, 9.0, True), (0.91, 0.9, False), (8.9, 9.0, False), (1.25, 1.25, True)]
    assert [line["at_least"] for line in lines] == [True, False, True, False]  # the sign in the tables of the docs
    assert all("ms" in line["measured"] for line in lines)


@pytest.mark.parametrize("option", ["--rounds", "--steps", "--threads"])
def test_counts_below_one_are_refused(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["fp16_models", option, "0"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "'0' is not a count" in capsys.readouterr().err
