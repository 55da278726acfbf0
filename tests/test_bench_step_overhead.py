"""The bench of the whole step: mprun and the loop by hand do the same work, and the file says what was measured."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"
SCRIPTS = ("common", "step_cases", "step_loops", "peer_loops", "peer_trainer", "step_overhead")


@pytest.fixture
def bench(monkeypatch):
    """``bench("name")`` imports a script of ``bench/`` afresh."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def moved(loops, case):
    mprun = loops.Mprun(case)
    plain = loops.Plain(case, kernels="mprun")
    for loop in (mprun, plain):
        loop.advance(3)
    mprun.check_counters()
    return mprun, plain


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_dynamic", "fp16_master_dynamic"])
def test_mprun_and_the_loop_by_hand_do_the_same(bench, precision, accumulate):
    cases, loops = bench("step_cases"), bench("step_loops")
    case = cases.make_case("tiny", precision, accumulate, torch.device("cpu"))
    kernels = cases.Kernels(case)
    kernels.use("mprun")
    try:
        mprun, plain = moved(loops, case)
    finally:
        kernels.use("torch")
    apart = cases.distance(mprun, plain)
    assert apart == 0.0 if precision in ("fp32", "bf16") else apart < 1e-4
    for name, start in case.start.items():
        assert not torch.equal(mprun.weights()[name], start), f"{name} did not move"
        assert not torch.equal(plain.average()[name], start), f"the EMA of {name} did not move"


def test_bf16_on_torch_s_own_kernels_comes_close(bench):
    """The operation list differs there, so this is looser: the same recipe, computed by other kernels."""
    cases, loops = bench("step_cases"), bench("step_loops")
    case = cases.make_case("tiny", "bf16", 1, torch.device("cpu"))
    kernels, found = cases.Kernels(case), []
    for name, make in (("mprun", loops.Mprun), ("torch", loops.Plain)):
        kernels.use(name)
        found.append(make(case))
        found[-1].advance(3)
    kernels.use("torch")
    assert 0.0 < cases.distance(*found) < 0.15


def test_work_that_differs_is_noticed(bench):
    cases, loops, overhead = bench("step_cases"), bench("step_loops"), bench("step_overhead")
    case = cases.make_case("tiny", "fp32", 1, torch.device("cpu"))
    mprun, plain = loops.Mprun(case), loops.Plain(case)
    plain.optimizer.param_groups[0]["weight_decay"] = 0.04
    with pytest.raises(SystemExit, match="tiny fp32: mprun and the plain loop"):
        overhead.check(mprun, plain)


def test_the_rate_by_hand_is_the_schedule_s(bench):
    from mprun.config import ScheduleConfig
    from mprun.training.schedule import build_schedule

    cases = bench("step_cases")
    schedule = build_schedule(ScheduleConfig(name="cosine", warmup_steps=cases.WARM_UP), cases.NEVER)
    for done in (0, 1, 9, 10, 11, 500, cases.NEVER - 1):
        assert cases.multiplier(done) == schedule(done)


def test_a_quick_measurement_writes_its_rows(bench, tmp_path, capsys):
    overhead = bench("step_overhead")
    file = tmp_path / "found.json"
    words = [
        "--quick",
        "--models",
        "tiny",
        "--precisions",
        "fp32",
        "fp16_dynamic",
        "--accumulate",
        "1",
        "--rounds",
        "1",
    ]
    assert overhead.main([*words, "--device", "cpu", "--json", str(file)]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert {"about", "rows", "table"} <= written.keys()
    rows = {row["precision"]: row for row in written["rows"]}
    assert list(rows) == ["fp32", "fp16_dynamic"]
    for row in rows.values():
        assert (row["model"], row["accumulate"], row["parameters"], row["peers"]) == ("tiny", 1, 136_010, {})
        assert row["step_ms"] > 0
        assert row["plain_ms"] > 0
        assert row["ratio_to_plain"] == pytest.approx(row["step_ms"] / row["plain_ms"])  # one round has one ratio
    assert rows["fp32"]["plain_kernels"] == "torch"
    assert rows["fp16_dynamic"]["plain_kernels"] == "mprun"
    (judged,) = written["table"]
    assert judged["ratio"] == max(row["ratio_to_plain"] for row in rows.values())
    assert judged["met"] == (judged["ratio"] <= judged["target"] == 1.03)
    assert "target 1.03" in capsys.readouterr().out


def test_quick_covers_all_models_and_precisions_once_and_tiny_with_accumulation(bench):
    overhead = bench("step_overhead")
    found = overhead.cases(overhead.parse(["--quick"]))
    assert len(found) == len(set(found)) == 16
    assert {k for _, _, k in found} == {1, 4}
    assert {model for model, _, k in found if k == 4} == {"tiny"}


@pytest.mark.parametrize("name", ["timm", "fabric", "trainer", "accelerate"])
@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_a_peer_comes_to_the_same_weights(bench, name, precision):
    """Those that are installed: a peer that left a part of the step out would look fast."""
    cases, loops, peers = bench("step_cases"), bench("step_loops"), bench("peer_loops")
    if name not in peers.importable():
        pytest.skip(f"{name} is not installed (bench/setup_peers.sh)")
    case = cases.make_case("tiny", precision, 2, torch.device("cpu"))
    kernels = cases.Kernels(case)
    kernels.use("mprun")
    try:
        mprun, peer = loops.Mprun(case), peers.PEERS[name][1](case)
        mprun.advance(3)
        peer.advance(3)
    finally:
        kernels.use("torch")
    apart = cases.distance(mprun, peer)
    assert apart == 0.0 if precision == "fp32" else apart < 0.1


def test_a_row_with_peers_names_them_and_leaves_other_precisions_out_of_the_judgement(bench):
    overhead = bench("step_overhead")
    peer = {"ms": 4.0, "ratio_mprun_to_peer": 0.5, "cpu_ratio_mprun_to_peer": 0.5, "note": "", "comparable": True}
    other = peer | {"ratio_mprun_to_peer": 2.0, "note": "computes in FP32", "comparable": False}
    row = {"model": "25m", "precision": "fp16_dynamic", "accumulate": 4, "step_ms": 2.0, "plain_ms": 1.0, "ratio_to_plain": 2.0,
           "cpu_ratio_to_plain": 2.0, "peers": {"timm": peer, "accelerate": other}}  # fmt: skip
    plain, timm = overhead.judged([row])
    assert (plain["ratio"], plain["target"], plain["met"]) == (2.0, 1.0, False)
    assert (timm["what"], timm["ratio"], timm["met"]) == ("training step beside timm", 0.5, True)
    assert "accelerate*" in overhead.line(row)
    assert "ratio of pairs 2.000" in overhead.line(row)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "'0' is not a count"),
        (["--threads", "-1"], "'-1' is not a count"),
        (["--accumulate", "1", "0"], "'0' is not a count"),
        (["--accumulate", "1.5"], "'1.5' is not a count: a whole number from 1 on"),
        (["--models", "huge"], "'tiny'"),
        (["--peers", "nosuch"], "'accelerate'"),
        (["--peers", "timm", "--quick"], "--peers with --quick"),
        (["--json", "nowhere/found.json"], "the folder nowhere is not there"),
        (["--json", "."], ". is a folder"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before(bench, capsys, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        bench("step_overhead").main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_gpu_that_is_not_there_and_a_peer_that_is_not_installed_are_refused(bench, capsys, monkeypatch):
    overhead = bench("step_overhead")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(overhead, "importable", lambda: ["timm"])
    for words, said in (
        (["--device", "cuda"], "no GPU here"),
        (["--peers", "timm", "fabric"], "--peers fabric: not inst"),
    ):
        with pytest.raises(SystemExit):
            overhead.parse(words)
        assert said in capsys.readouterr().err
    assert overhead.parse(["--peers", "timm"]).peers == ["timm"]


def test_the_rows_of_a_quick_measurement_share_its_time(bench):
    """Whoever takes less leaves it to the rest, and nobody is promised time after the deadline."""
    overhead = bench("step_overhead")
    rows = overhead.cases(overhead.parse(["--quick"]))
    now, ends = 0.0, []
    for number in range(len(rows)):
        now = overhead.share(rows[number:], now=now, deadline=48.0)
        ends.append(now)
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(48.0)
    assert overhead.share(rows[3:], now=50.0, deadline=48.0) == 50.0


def test_a_row_whose_time_is_over_makes_two_rounds(bench):
    cases, loops, overhead = bench("step_cases"), bench("step_loops"), bench("step_overhead")
    case = cases.make_case("tiny", "fp32", 1, torch.device("cpu"))
    pair = [loops.Mprun(case), loops.Plain(case)]
    args = overhead.parse(["--quick"])
    times = overhead.take_turns(pair, cases.Kernels(case), args, until=0.0)
    assert [len(each.wall) for each in times.values()] == [2, 2]


@pytest.mark.parametrize(("load", "said"), [(0.4, ""), (3.25, "the machine is busy (load 3.2): ratios may be off\n")])
def test_a_busy_machine_is_said(bench, monkeypatch, capsys, load, said):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    bench("common").busy_note()
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("word", ["0", "-2", "1.5", "", "many"])
def test_only_a_whole_number_from_one_on_is_a_count(bench, word):
    common = bench("common")
    with pytest.raises(argparse.ArgumentTypeError, match="whole number from 1 on"):
        common.positive(word)
    assert common.positive("12") == 12


def test_the_script_for_peers_tells_its_usage_and_refuses_other_words():
    script = str(BENCH / "setup_peers.sh")
    for words, status in ((["--help"], 0), (["--nosuch"], 2), (["one", "two"], 2)):
        done = subprocess.run(["bash", script, *words], capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert "usage: bench/setup_peers.sh [FOLDER]" in done.stdout + done.stderr
