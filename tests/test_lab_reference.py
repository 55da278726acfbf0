"""Runs in memory equal real runs, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mprun.cli import main
from mprun.compose import compose
from mprun.lab.reference import reference, short_run
from mprun.training.build import build, device_of, switches
from mprun.training.checkpoint import restore
from mprun.training.step import train_step

WORDS = ["model=mlp", "tracking=disabled", "device=cpu", "train.epochs=2", "train.batch_size=64", "dataset.limit=500",
         "train.log_every=1", "train.accumulate=3", "schedule=cosine", "seed=3"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def real_losses(*words: str) -> list[float]:
    assert main([*WORDS, *words]) == 0
    lines = (Path("outputs/latest").resolve() / "metrics.jsonl").read_text().splitlines()
    return [record["train/loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


def test_losses_are_those_of_a_real_run_to_the_last_bit(folder):
    dropout = "+model.kwargs.dropout=0.1"
    config = compose([*WORDS, dropout, "precision=fp16_dynamic"]).config
    assert list(reference(config, steps=1000).losses) == real_losses(dropout, "precision=fp32")


@pytest.mark.parametrize("precision", ["fp16_dynamic", "bf16_master"])
def test_a_short_run_is_the_start_of_the_real_run_under_its_own_policy(folder, precision):
    words = (
        "train.epochs=4",
        f"precision={precision}",
        "precision.loss_scale.init=16777216" if precision == "fp16_dynamic" else "seed=4",
    )
    curve = short_run(compose([*WORDS, *words]).config, steps=4)
    assert list(curve.losses) == real_losses(*words)[:4]
    assert (curve.status, curve.error, len(curve.losses)) == ("ok", None, 4)
    assert len(curve.scales) == 4 + len(curve.skips)


def test_kept_states_are_copies_and_go_on_as_the_run_did():
    config = compose([*WORDS, "train.ema.decay=0.9"]).config
    run = reference(config, steps=5, keep=[0, 2, 5, 9])
    assert [state.step for state in run.states] == [0, 2, 5]
    device = device_of(config)
    with switches(run.config, device):
        state, _, _ = build(run.config, device)
        initial = {name: p.detach().clone() for name, p in state.model.named_parameters()}
        assert all(torch.equal(run.states[0].checkpoint["model"][name], p) for name, p in initial.items())
        for saved in run.states[:2]:  # twice from each: nothing of the kept state is moved by using it
            for _ in range(2):
                restore(state, saved.checkpoint, path=Path("kept"))
                assert train_step(state, saved.window).read().loss == run.losses[saved.step]


def test_the_callers_random_numbers_and_switches_stay_and_nesting_changes_no_bit():
    config = compose(WORDS).config
    alone = reference(config, steps=3)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    half = compose([*WORDS, "precision=fp16_dynamic"]).config
    with switches(half, torch.device("cpu")):
        nested = reference(config, steps=3)
    assert torch.equal(torch.rand(3), expected)
    assert nested.losses == alone.losses


def test_other_seeds_are_other_runs():
    config = compose(WORDS).config
    assert reference(config, steps=2, seed=11).losses != reference(config, steps=2).losses


def test_a_run_that_explodes_says_so_and_keeps_where():
    config = compose([*WORDS, "optimizer=sgd", "optimizer.lr=1e30"]).config
    run = reference(config, steps=10)
    assert run.curve.status == "diverged"
    assert run.broken is not None
    assert run.broken.step == len(run.losses) < 5
    assert f"step {run.broken.step + 1}" in str(run.curve.error)


def test_half_without_a_scale_that_always_overflows_runs_out_of_patience():
    words = ["precision=fp16_static", "precision.loss_scale.init=16777216", "precision.loss_scale.patience=3"]
    curve = short_run(compose([*WORDS, *words, "train.loss_weight=1e6"]).config, steps=10)
    assert (curve.status, curve.skips, curve.losses) == ("skips", (1, 2, 3), ())
