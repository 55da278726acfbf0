"""Things that go wrong, on purpose: wrong numbers inside a step, and a world that kills, fills and lies."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mprun
import mprun.training.loop as loop
from mprun.cli import main
from mprun.errors import CheckpointError, ConfigError
from mprun.numerics.faults import Fault, inject
from mprun.training import checkpoint
from mprun.training.postmortem import examine
from mprun.training.result import APPLIED, NONFINITE_GRAD, NONFINITE_LOSS, OVERFLOW
from mprun.training.step import train_step
from tests import case_code
from tests.case_code import ROWS, TOY
from tests.conftest import BF16, FP16, REGRESSION, SGD, batch
from tests.test_casting import MASTER, PURE, Net, Pair, net_batch
from tests.test_run import same

MODES = {"fp32": {}, "bf16": BF16, "fp16": FP16, "master": MASTER, "pure": PURE}
INF, NAN = math.inf, math.nan
REPOSITORY = Path(mprun.__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def everything(state) -> dict[str, torch.Tensor]:
    """Copies of all that a window may move only when it is applied."""
    found = {f"model.{name}": value for name, value in state.model.state_dict().items()}
    found |= {f"master.{name}": value for name, value in state.weights}
    for name, entry in checkpoint.optimizer_state(state).items():
        found |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in entry.items()}
    if state.ema is not None:
        found |= {f"ema.{name}": value for name, value in state.ema.shadow.items()} | {"ema": state.ema.updates}
    return {name: value.clone() for name, value in {**found, "applied": state.applied}.items()}


def moved(before: dict[str, torch.Tensor], state) -> list[str]:
    """Names of what is not bit for bit as before, also of what is new; a NaN equals itself here."""
    after = everything(state)

    def same_bits(old: torch.Tensor, new: torch.Tensor) -> bool:
        return old.dtype == new.dtype and torch.equal(_bits(old), _bits(new))

    both = before.keys() & after.keys()
    return [*(before.keys() ^ after.keys()), *(name for name in both if not same_bits(before[name], after[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


# --- the injector itself ------------------------------------------------------------------------------------------------

PLACES = ["forward", "backward", "input"]


def hooks(model: nn.Module) -> int:
    """How many hooks hang on the model's modules; also that no forward was replaced."""
    assert not any("forward" in vars(module) for module in model.modules())
    return sum(
        len(value)
        for module in model.modules()
        for key, value in vars(module).items()
        if key.endswith(("_hooks", "_hooks_with_kwargs"))
    )


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_fault_strikes_when_it_says_in_every_mode_and_leaves_no_hook(make_state, mode, where, value):
    """Attempt 2 of 3, micro-batch 1 of 3: exactly that window is dropped, and told apart from an overflow."""
    state = make_state(Net(), **{**mode, "train.ema.decay": 0.9, "precision.loss_scale.init": 64.0})
    before, outcomes = hooks(state.model), []
    with inject(state.model, Fault("pair", attempt=2, micro_batch=1, where=where, value=value)) as injector:
        for attempt in (1, 2, 3):
            injector.start_attempt()
            copies = everything(state)
            outcomes.append(train_step(state, [net_batch()] * 3).read().outcome)
            assert bool(moved(copies, state)) == (attempt != 2)
    bad_gradient = OVERFLOW if state.loss_scale.active else NONFINITE_GRAD
    assert outcomes == [APPLIED, bad_gradient if where == "backward" else NONFINITE_LOSS, APPLIED]
    assert {strike[1:] for strike in injector.strikes} == {(2, 1)}
    assert hooks(state.model) == before
    assert state.scale.scale.item() == {OVERFLOW: 32.0}.get(outcomes[1], state.loss_scale.start().scale.item())


@pytest.mark.parametrize("where", PLACES)
def test_a_factor_is_a_factor_and_gradients_flow_through_it(where):
    """Module 1 of three; the chain rule says what a factor of 4 does to output and gradients on either side of it."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3)
    plain = twin(x)
    plain.sum().backward()
    with inject(model, Fault("1", attempt=1, where=where, value=4.0)) as injector:
        output = model(x)
        output.sum().backward()
    assert len(injector.strikes) == 1
    assert torch.equal(output, plain if where == "backward" else 4 * plain)
    first, middle, last = (a.weight.grad / b.weight.grad for a, b in zip(model, twin, strict=True))
    assert torch.equal(first, torch.full((3, 3), 4.0))
    assert torch.equal(middle, torch.full((3, 3), 4.0))
    assert torch.equal(last, torch.full((3, 3), 1.0 if where == "backward" else 4.0))


def test_every_float_of_structured_output_is_hit_and_no_integer():
    model = nn.Sequential(Pair())
    for where in PLACES:
        with inject(model, Fault("0", attempt=1, where=where)) as injector:
            out = model(torch.ones(2, 8))
            assert torch.equal(out["more"][1], torch.arange(3))
            out["y"].sum().backward()
        bad = [t.isnan().all().item() for t in (out["y"], out["more"][0])]
        assert bad == ([False, False] if where == "backward" else [True, True])
        # The gradient arrives at one of the two outputs only, as only one was used.
        assert len(injector.strikes) == {"forward": 2, "backward": 1, "input": 1}[where]


def test_keyword_inputs_are_inputs():
    class Named(nn.Module):
        def forward(self, *, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return x + ids

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named = Named()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.named(x=x, ids=torch.arange(2))

    with inject(model := Outer(), Fault("named", attempt=1, where="input", value=INF)) as injector:
        assert torch.equal(model(torch.ones(2)), torch.full((2,), INF))
    assert len(injector.strikes) == 1


def test_a_shared_module_is_hit_at_each_of_its_calls_under_any_of_its_names(make_state):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    for name in ("0", "2"):
        with inject(model, Fault(name, attempt=1, value=2.0)) as injector:
            model(torch.ones(1, 4))
        assert len(injector.strikes) == 2


@pytest.mark.parametrize("mode", [{}, FP16, MASTER, PURE], ids=["fp32", "fp16", "master", "pure"])
@pytest.mark.parametrize("where", PLACES)
def test_a_recomputed_block_meets_the_fault_again(make_state, mode, where):
    """Under activation checkpointing the second pass must equal the first, or the gradients are those of another network."""

    def build(checkpointing: bool):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4))) for _ in range(2))
        keys = {**REGRESSION, **SGD, "model.activation_checkpointing": checkpointing, "precision.loss_scale.init": 8.0}
        return make_state(nn.Sequential(*blocks), **{**mode, **keys})

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    fault = Fault("1.1.0", attempt=1, micro_batch=1, where=where, value=3.0)
    states, strikes = [build(False), build(True)], []
    for state in states:
        with inject(state.model, fault) as injector:
            assert train_step(state, [batch(x, y)] * 3).read().applied
        strikes.append(injector.strikes)
    for name, plain in states[0].model.state_dict().items():
        assert torch.equal(plain, states[1].model.state_dict()[name]), name
    assert len(strikes[0]) == 1
    assert len(strikes[1]) == (1 if where == "backward" else 2)
    assert {strike[1:] for strikes_ in strikes for strike in strikes_} == {(1, 1)}
    clean = build(True)
    train_step(clean, [batch(x, y)] * 3)
    assert not torch.equal(clean.model[0][0].weight, states[1].model[0][0].weight)


def test_attempts_micro_batches_and_times():
    model = nn.Sequential(nn.Identity())
    x = torch.ones(1, requires_grad=True)
    once, always = Fault("0", attempt=2, micro_batch=1, times=2), Fault("0", attempt=4, micro_batch=None, value=2.0)
    with inject(model, once, always) as injector:
        for _ in range(4):
            injector.start_attempt()
            injector.start_attempt()  # an attempt without a forward is none
            for _ in range(3):
                model(x)
            with torch.no_grad():
                assert model(x).item() == 1.0, "evaluation meets no fault, and is no micro-batch"
        injector.rewind()
        model(x)
    times = [(2, 1), (3, 1), (4, 0), (4, 1), (4, 2), (4, 0)]
    assert [strike[1:] for strike in injector.strikes] == times
    assert [strike[0] for strike in injector.strikes] == [once] * 2 + [always] * 4


def test_nothing_happens_after_the_block_however_it_ends():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    before = hooks(model)
    outputs = []

    def fail() -> None:
        with inject(model, Fault("0", attempt=1, where="backward")):
            outputs.append(model(torch.ones(1, 1)).sum())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    outputs[0].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert hooks(model) == before


def test_faults_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"'pair\.iner'.*'pair\.inner'"), inject(Net(), Fault("pair.iner", attempt=1)):
        pass
    for wrong, said in (({"attempt": 0}, "attempt=0"), ({"attempt": 1, "micro_batch": -1}, "micro_batch=-1"),
                        ({"attempt": 1, "times": 0}, "times=0"), ({"attempt": 1, "where": "outptu"}, "output|forward")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            Fault("", **wrong)


# --- what a step makes of them --------------------------------------------------------------------------------------------


def bn_state(make_state, **keys: Any):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return make_state(model, **{**FP16, "precision.loss_scale.init": 1024.0, "train.ema.decay": 0.9, **keys})


def bn_window(k: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        batch(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(k)
    ]


@pytest.mark.parametrize("micro_batch", [0, 1, 3])
def test_an_overflow_inside_a_window_costs_the_whole_window_and_halves_the_scale(make_state, micro_batch):
    """Also the micro-batches before it, whose gradients and BatchNorm statistics were good."""
    state, window = bn_state(make_state), bn_window()
    with inject(state.model, Fault("3", attempt=2, micro_batch=micro_batch, where="backward", value=INF)) as injector:
        assert train_step(state, window).read().applied
        injector.start_attempt()
        before = everything(state)
        result = train_step(state, window)
        row = result.read()
    assert (row.outcome, row.loss_scale, row.consecutive_skips, result.micro_batches) == (
        OVERFLOW,
        1024.0,
        1,
        micro_batch + 1,
    )
    assert moved(before, state) == []
    assert (state.scale.scale.item(), state.scale.growth_tracker.item()) == (512.0, 0)
    row = train_step(state, window).read()
    assert (row.applied, row.loss_scale, row.steps_applied, row.consecutive_skips) == (True, 512.0, 2, 0)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_nan_in_the_forward_is_no_overflow_and_moves_nothing(make_state, value):
    """Micro-batch 2 of 4: the loss is not finite, which no scale can cure, so the scale is left alone."""
    state, window = bn_state(make_state), bn_window()
    with inject(state.model, Fault("0", attempt=2, micro_batch=1, value=value)) as injector:
        train_step(state, window)
        injector.start_attempt()
        before, scale = everything(state), state.scale.state_dict()
        row = train_step(state, window).read()
        assert row.outcome == NONFINITE_LOSS
        assert moved(before, state) == []
        assert state.scale.state_dict() == {**scale, "consecutive_skips": 1}
    # A post-mortem that meets the fault in each of its replays names the module, and leaves no trace either.
    with inject(state.model, Fault("0", attempt=1, micro_batch=None, value=value)):
        verdict = examine(state, window, loss_scale=1024.0)
    assert (verdict.kind, verdict.module, verdict.where) == ("divergence", "0", "forward")
    assert moved(before, state) == []


def test_the_culprit_of_a_backward_fault_is_named(make_state):
    state, window = bn_state(make_state), bn_window()
    with inject(state.model, Fault("2", attempt=1, micro_batch=None, where="backward", value=NAN)):
        train_step(state, window)
        # The gradient of module 2's output is spoiled when the backward of what follows hands it over.
        verdict = examine(state, window, loss_scale=1024.0)
    assert (verdict.kind, verdict.where) == ("divergence", "backward")
    assert verdict.module in ("2", "3")


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_counts_overflows_in_a_row(make_state, hysteresis):
    """Overflows at attempts 2 to 4, a good step, one more overflow: the tolerance is used up and then refilled."""
    state, window = bn_state(make_state, **{"precision.loss_scale.hysteresis": hysteresis}), bn_window(1)
    scales = []
    faults = [
        Fault("3", attempt=2, times=3, where="backward", value=INF),
        Fault("3", attempt=6, where="backward", value=INF),
    ]
    with inject(state.model, *faults) as injector:
        for _ in range(6):
            injector.start_attempt()
            train_step(state, window)
            scales.append(int(state.scale.scale))
    assert (
        scales
        == {
            1: [1024, 512, 256, 128, 128, 64],
            2: [1024, 1024, 512, 256, 256, 256],
            3: [1024, 1024, 1024, 512, 512, 512],
        }[hysteresis]
    )


def test_a_static_scale_stays_and_still_protects(make_state):
    state, window = bn_state(make_state, **{"precision.loss_scale.kind": "static"}), bn_window(2)
    with inject(state.model, Fault("3", attempt=1, micro_batch=1, where="backward", value=INF, times=3)) as injector:
        for count in (1, 2, 3):
            injector.start_attempt()
            before = everything(state)
            row = train_step(state, window).read()
            assert (row.outcome, row.consecutive_skips, state.scale.scale.item()) == (OVERFLOW, count, 1024.0)
            assert moved(before, state) == []
        injector.start_attempt()
        assert train_step(state, window).read().applied


# --- what the loop makes of them -------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(folder, monkeypatch):
    """``faulty(words, *faults)``: a whole run with faults in it. Returns its exit status and the sample ids of each attempt."""

    def run(words: list[str], *faults: Fault) -> tuple[int, list[list[int]]]:
        seen: list[list[int]] = []
        with ExitStack() as stack:
            injectors: list[Any] = []

            def spy(state: Any, window: Any, **options: Any) -> Any:
                if not injectors:
                    injectors.append(stack.enter_context(inject(state.model, *faults)))
                injectors[0].start_attempt()
                seen.append([int(i) for batch in window for i in batch.ids])
                return train_step(state, window, **options)

            monkeypatch.setattr(loop, "train_step", spy)
            code = main(words)
            struck = {strike[0] for strike in injectors[0].strikes}
            assert struck == set(faults), "a fault that never struck proves nothing"
        return code, seen

    return run


WINDOWS = [
    *ROWS,
    "train.epochs=1",
    "train.accumulate=2",
    "dataset.kwargs.n=80",
    "precision=fp16_dynamic",
    "precision.loss_scale.init=1024",
]


def test_retry_runs_the_same_window_until_it_fits(faulty):
    """5 windows, the second of which overflows twice in its second micro-batch: 7 attempts, no sample lost."""
    fault = Fault("4", attempt=2, micro_batch=1, times=2, where="backward", value=INF)
    code, seen = faulty([*WINDOWS, "precision.loss_scale.on_overflow=retry"], fault)
    assert code == 0
    assert seen[1] == seen[2] == seen[3]
    assert sorted(i for ids in (*seen[:2], *seen[4:]) for i in ids) == list(range(80))
    got = case_code.result()
    assert (got["steps_applied"], got["steps_skipped"], got["counters"]["attempts"], got["loss_scale"]) == (
        5,
        2,
        7,
        256.0,
    )
    assert case_code.checkpoint()["model"]["1.num_batches_tracked"].item() == 10, "each batch counted once"


def test_retry_gives_the_window_up_at_the_floor(faulty):
    """Once the scale is at its minimum, trying again would change nothing: the window is dropped, the next one comes."""
    words = [*WINDOWS, "precision.loss_scale.on_overflow=retry", "precision.loss_scale.min=256"]
    code, seen = faulty(words, Fault("4", attempt=1, micro_batch=None, times=4, where="backward", value=INF))
    assert code == 0
    assert seen[0] == seen[1] == seen[2] != seen[3] != seen[4]
    got = case_code.result()
    assert (got["steps_applied"], got["steps_skipped"], got["loss_scale"]) == (3, 4, 256.0)


@pytest.mark.parametrize("times", [3, 4])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_patience_counts_skips_in_a_row(faulty, capsys, kind, times):
    words = [*WINDOWS, f"precision=fp16_{kind}", "precision.loss_scale.init=1024", "precision.loss_scale.patience=4"]
    code, _ = faulty(words, Fault("4", attempt=2, times=times, where="backward", value=INF))
    got = case_code.result()
    if times == 3:
        assert (code, got["status"], got["steps_applied"], got["steps_skipped"]) == (0, "ok", 2, 3)
    else:
        assert (code, got["status"], got["steps_applied"], got["steps_skipped"]) == (1, "diverged", 1, 4)
        err = capsys.readouterr().err
        assert "step 2 (attempt 5): 4 steps in a row were skipped" in err
        assert "precision.loss_scale.patience=4" in err


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_without_a_scale_a_bad_gradient_stops_the_run_and_moves_nothing(faulty, capsys, precision):
    words = [word for word in WINDOWS if "loss_scale" not in word]
    code, _ = faulty(
        [*words, f"precision={precision}", "train.checkpoint_every=1"],
        Fault("0", attempt=3, micro_batch=1, where="backward"),
    )
    assert code == 1
    err = capsys.readouterr().err
    assert f"step 3 (attempt 3): a gradient is NaN or inf at precision={precision}" in err
    # The fault was a passing one (a cosmic ray), and the replay says so instead of blaming a module.
    assert "a second pass over the same batch stays finite" in err
    got = case_code.result()
    assert (got["status"], got["steps_applied"], got["counters"]["nonfinite"]) == ("diverged", 2, 1)
    assert case_code.checkpoint()["step"] == 2


def test_a_loss_that_is_nan_once_can_be_skipped(faulty):
    code, _ = faulty([*WINDOWS, "precision.on_nonfinite_loss=skip"], Fault("0", attempt=2, micro_batch=0))
    got = case_code.result()
    assert (code, got["steps_applied"], got["counters"]["nonfinite"], got["steps_skipped"], got["loss_scale"]) == (
        0,
        4,
        1,
        0,
        1024.0,
    )
    (skipped,) = case_code.records("skip")
    assert (skipped["reason"], skipped["attempt"]) == ("nonfinite_loss", 2)


def test_one_overflow_in_ten_is_reported_once_with_its_rate(faulty):
    """5 % over 100 attempts after the first 100: below it a dynamic scale is only looking for its place.

    It is told at a skip, whose cause can be looked for, not at the applied step that ends the first hundred.
    """
    faults = [
        Fault("", attempt=attempt, where="backward", value=INF) for attempt in (*range(10, 90, 3), *range(105, 215, 10))
    ]
    words = [
        *TOY,
        "precision=fp16_dynamic",
        "precision.loss_scale.init=1",
        "dataset.kwargs.values=[0.1]",
        "dataset.kwargs.repeat=300",
    ]
    code, _ = faulty([*words, "precision.loss_scale.min=1"], *faults)
    assert code == 0
    (told,) = [record for record in case_code.records("event") if record["event"] == "warning"]
    assert told["attempt"] == 205
    assert told["message"].startswith("10% of the last 100 steps overflowed at loss scale 1")


# --- the world outside ------------------------------------------------------------------------------------------------------


def mprun_command(words: list[str], **environment: str) -> subprocess.Popen[str]:
    """``python -m mprun`` in the current folder, with the tests' own code importable."""
    own = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "mprun", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own
    )


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, for whoever may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(folder):  # case C49 (a)
    code = f"import json, pathlib; from tests.case_code import killed_saves; print(json.dumps(killed_saves(pathlib.Path({str(folder)!r}), 200)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["saves"] >= 200
    assert counts["torn"] >= 10, f"too few kills struck inside a save to prove anything: {counts}"
    assert counts["leftovers"] == 0, "what a kill left behind is cleaned at the next start"


# 1 read to look at the data and 8 to observe the first batch come before training; then 8 a step.
def reads_before_step(step: int) -> str:
    return f"dataset.kwargs.at={9 + 8 * (step - 1) + 1}"


@pytest.mark.parametrize(
    "keys", [["precision=fp32"], ["precision=fp16_dynamic", "train.ema.decay=0.9"]], ids=["fp32", "fp16"]
)
@pytest.mark.slow
def test_a_killed_run_resumes_as_if_it_had_not_been(folder, keys):  # cases C49, C66
    """Killed in step 9 with a checkpoint every 5: steps 6 to 8 are done again, and each step counts once."""
    words = [*ROWS, *keys, "train.steps=12", "train.checkpoint_every=5", "dataset.kwargs.n=40"]
    assert main([*words, "hydra.run.dir=whole"]) == 0
    process = mprun_command([*words, "hydra.run.dir=killed", "dataset.kwargs.accident=kill", reads_before_step(9)])
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, out
    run = Path("killed").resolve()
    assert not (run / "result.json").exists()
    assert checkpoint.load(run / "checkpoints" / "last.pt")["step"] == 5
    leftover = run / "checkpoints" / ".last.pt.1.tmp"
    leftover.write_bytes(b"half a checkpoint")

    process = mprun_command(["resume=killed", "trust=[tests]", "dataset.kwargs.at=null"])
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2, "other data would be another run"
    assert "dataset.kwargs.at" in out
    process = mprun_command(["resume=killed", "trust=[tests]"], MPRUN_TEST_NO_ACCIDENT="1")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert not leftover.exists()
    ours, theirs = (checkpoint.load(Path(name, "checkpoints", "last.pt")) for name in ("killed", "whole"))
    for key in ("model", "masters", "optimizer", "scale", "ema", "counters", "position", "rng"):
        assert same(ours[key], theirs[key]) == [], key
    # Steps 6 to 8 stand twice in the file; the segment says which counts, and the last one does.
    every = [(record["step"], record["segment"]) for record in case_code.records("train", run)]
    assert every == [(step, 0) for step in range(1, 9)] + [(step, 1) for step in range(6, 13)]
    counting = [(record["step"], record["segment"]) for record in case_code.records("train", run, effective=True)]
    assert counting == [(step, 0) for step in range(1, 6)] + [(step, 1) for step in range(6, 13)]
    vals = {record["step"] for record in case_code.records("val", run, effective=True)}
    assert vals <= {step for step, _ in counting}, "evaluation and training share the step"


def run_into(accident: str, **environment: str) -> tuple[int, str]:
    """A run of 20 steps that saves at 5, 10, 15 and 20, with an accident in step 8."""
    keys = [
        "precision=fp32",
        "train.steps=20",
        "train.checkpoint_every=5",
        "train.eval_every=5",
        "dataset.kwargs.n=40",
        "model.kwargs.width=4096",
    ]
    words = [
        *ROWS,
        *keys,
        f"dataset.kwargs.accident={accident}",
        reads_before_step(8),
        f"hydra.run.dir={environment.get('FILL', '.')}/run",
    ]
    process = mprun_command(words, **environment)
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


@pytest.mark.parametrize("accident", ["limit", "tight"])
@pytest.mark.slow
def test_a_disk_without_room_for_a_checkpoint_costs_the_new_one_and_the_run_goes_on(
    folder, request, accident
):  # case C49 (b)
    """Once with a file system that is full, once with a limit on the size of a file, which needs no rights."""
    environment = {"FILL": str(request.getfixturevalue("small_disk"))} if accident == "tight" else {}
    code, out = run_into(accident, **environment)
    assert code == 0, out
    run = Path(environment.get("FILL", "."), "run")
    folder_ = run / "checkpoints"
    assert checkpoint.load(folder_ / "last.pt")["step"] == 5
    assert not list(folder_.glob(".*"))
    assert case_code.result(run)["steps_applied"] == 20
    warnings = [record["message"] for record in case_code.records("event", run) if record["event"] == "warning"]
    reason = {"tight": "No space left on device", "limit": "File too large"}[accident]
    for step in (10, 15, 20):
        told = [
            record
            for record in case_code.records("event", run)
            if record["step"] == step and reason in record["message"] and "last.pt" in record["message"]
        ]
        assert told, warnings
        assert "the earlier checkpoint there is untouched" in told[0]["message"]
    assert reason in out
    assert "Traceback" not in out


@pytest.mark.slow
def test_a_disk_without_a_byte_left_stops_the_run_and_says_which_file(folder, small_disk):
    """Metrics that cannot be written would leave the run untold: it stops. The checkpoint of before is whole."""
    code, out = run_into("full", FILL=str(small_disk))
    assert code == 1, out
    assert "metrics.jsonl" in out
    assert "No space left on device" in out
    assert "Traceback" not in out
    (small_disk / "filler").unlink()
    run = small_disk / "run"
    assert checkpoint.load(run / "checkpoints" / "last.pt")["step"] == 5
    process = mprun_command([f"resume={run}", "trust=[tests]"], MPRUN_TEST_NO_ACCIDENT="1")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert [record["step"] for record in case_code.records("train", run, effective=True)] == list(range(1, 21))


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_the_step(folder, first, second):
    """The step hangs in the data: the first signal waits for its end, the second does not. What was saved stays."""
    words = [
        *ROWS,
        "precision=fp32",
        "train.checkpoint_every=5",
        "dataset.kwargs.n=400",
        "dataset.kwargs.accident=sleep",
        reads_before_step(8),
    ]
    process = mprun_command(words)
    wait_for(lambda: Path("sleeping").exists())
    process.send_signal(first)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(second)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == -second, out
    assert "Traceback" not in out
    assert checkpoint.load(case_code.latest() / "checkpoints" / "last.pt")["step"] == 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_of_a_window_waits_for_its_end(folder, monkeypatch, number, code):
    """In this process: the signal arrives while micro-batch 2 of 4 is read."""
    monkeypatch.setitem(case_code.ACCIDENTS, "signal", lambda: os.kill(os.getpid(), number))
    keys = [
        "precision=fp16_dynamic",
        "train.accumulate=4",
        "train.checkpoint_every=100",
        "dataset.kwargs.accident=signal",
        "dataset.kwargs.at=58",
    ]
    before = signal.getsignal(number)
    assert main([*ROWS, *keys, "hydra.run.dir=run"]) == code
    assert signal.getsignal(number) is before
    run = Path("run")
    got, saved = case_code.result(run), case_code.checkpoint(run)
    assert (got["status"], got["steps_applied"], saved["step"], saved["position"]) == (
        "interrupted",
        2,
        2,
        {"epoch": 0, "batch": 8},
    )
    assert signal.Signals(number).name in got["error"]


def wait_for(condition: Any, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


class Evil:
    """Runs a command when it is unpickled by a reader that allows it."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("place", ["checkpoint", "folder", "latest", "path", "init"])
def test_a_checkpoint_cannot_run_code_wherever_it_is_read(folder, capsys, place):
    assert main([*ROWS, "precision=fp32", "train.steps=2"]) == 0
    run = case_code.latest()
    path = run / "checkpoints" / "last.pt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "evil": Evil()}, path)
    pickled = torch.load(path, weights_only=False) if place == "checkpoint" else None
    assert Path("pwned").exists() == (pickled is not None), "the file is a weapon, if it is read without care"
    Path("pwned").unlink(missing_ok=True)
    words = {"checkpoint": [f"resume={path}"], "folder": [f"resume={run}"], "latest": ["resume=latest"], "path": [f"resume={path.parent}"],
             "init": [*ROWS, f"model.init={path}"]}[place]  # fmt: skip
    before = {p: p.stat().st_mtime_ns for p in Path().rglob("*")}
    assert main([*words, "train.steps=4"]) == 2
    err = capsys.readouterr().err
    assert "more than tensors and plain values" in err
    assert str(path) in err
    assert not Path("pwned").exists()
    assert before == {p: p.stat().st_mtime_ns for p in Path().rglob("*")}


def test_no_reader_of_pickles_but_the_careful_one():
    """``checkpoint.load`` is the only way in: no other module reads a pickle, and this one only with ``weights_only``."""
    for path in (REPOSITORY / "mprun").rglob("*.py"):
        for call in re.findall(r"(?:torch|pickle|joblib|numpy|np|dill)\.load\((.*)", path.read_text()):
            assert path.name == "checkpoint.py", path
            assert "weights_only=True" in call


@pytest.mark.parametrize("size", [0, 1, 100, 0.5, 0.99])
def test_torn_checkpoints_are_named_at_any_length(folder, size):
    path = folder / "last.pt"
    checkpoint.save({"format": 1, "step": 3, "weights": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(size * len(whole)) if isinstance(size, float) else size])
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        checkpoint.load(path)
    assert len(str(caught.value).splitlines()) == 1


# --- links, and runs that save nothing -------------------------------------------------------------------------------------


def test_a_numbered_checkpoint_is_a_link_that_outlives_the_next_save(folder):
    """One file under two names costs its room once; replacing ``last.pt`` leaves what the other name says."""
    words = [*ROWS, "precision=fp32", "train.steps=4", "train.checkpoint_every=2", "train.keep=9"]
    assert main(words) == 0
    places = {path.name: path for path in (case_code.latest() / "checkpoints").iterdir()}
    assert places["step_4.pt"].stat().st_ino == places["last.pt"].stat().st_ino
    assert places["step_2.pt"].stat().st_ino != places["last.pt"].stat().st_ino
    assert {name: checkpoint.load(path)["step"] for name, path in places.items() if name != "best.pt"} == {
        "last.pt": 4, "step_2.pt": 2, "step_4.pt": 4}  # fmt: skip


def test_a_link_again_or_where_there_are_none_is_whole(folder, monkeypatch):
    last, step = Path("last.pt"), Path("step_1.pt")
    checkpoint.save({"format": 1, "step": 1}, last)
    for _ in range(2):  # the second time both are one file already, which rename(2) leaves alone
        checkpoint.link(last, step)
        assert sorted(os.listdir()) == ["last.pt", "step_1.pt"]
    checkpoint.save({"format": 1, "step": 2}, last)

    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    checkpoint.link(last, step)
    assert step.stat().st_ino != last.stat().st_ino
    assert checkpoint.load(step)["step"] == 2
    assert sorted(os.listdir()) == ["last.pt", "step_1.pt"]
    with pytest.raises(CheckpointError, match=r"step_1\.pt.*untouched"):
        checkpoint.link(Path("nowhere.pt"), step)
    assert checkpoint.load(step)["step"] == 2


def test_a_run_that_could_save_nothing_has_failed(folder):
    """Files may grow to 64 kB from the first sample on: metrics fit, checkpoints do not."""
    words = [*ROWS, "precision=fp32", "train.steps=6", "train.checkpoint_every=2", "model.kwargs.width=4096", "dataset.kwargs.accident=limit",
             "dataset.kwargs.at=1", "hydra.run.dir=run"]  # fmt: skip
    process = mprun_command(words)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    got = case_code.result(Path("run"))
    assert (got["status"], got["checkpoint"], got["steps_applied"]) == ("failed", None, 6)
    assert "all 6 steps are done, but nothing could be saved" in got["error"]
    assert out.count("all 6 steps are done") == 1
    assert "File too large" in got["error"]
    assert "Traceback" not in out


def test_a_run_that_saved_says_where(folder):
    assert main([*ROWS, "precision=fp32", "train.steps=3"]) == 0
    assert case_code.result()["checkpoint"] == {"file": "checkpoints/last.pt", "step": 3}


# --- ends before the first step, and out of memory ---------------------------------------------------------------------------

GREEDY = """
import os, torch
from torch import nn
from tests.case_code import rows
WHERE = os.environ.get("GREEDY", "")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)
        if WHERE == "build":
            torch.empty(10**15)
    def forward(self, x):
        if WHERE == "observe" or (WHERE == "train" and torch.is_grad_enabled()):
            torch.empty(10**15)
        if WHERE == "bug" and not torch.is_grad_enabled():
            {}["no such key"]
        return self.inner(x)

def net():
    return Net()
"""


@pytest.fixture
def greedy(folder, monkeypatch):
    """``greedy(where, words)``: a run whose model asks for a petabyte (or has a bug) there. Returns its exit status."""
    Path("greedy.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(str(folder))

    def run(where: str, words: list[str]) -> int:
        monkeypatch.setenv("GREEDY", where)
        sys.modules.pop("greedy", None)
        return main([*words, "trust=[greedy,tests]"])

    yield run
    sys.modules.pop("greedy", None)


GREEDY_WORDS = [
    *[word for word in ROWS if not word.startswith(("trust", "model.name"))],
    "model.name=greedy:net",
    "precision=fp32",
    "train.steps=2",
]


@pytest.mark.parametrize("where", ["build", "observe", "train"])
def test_out_of_memory_is_told_as_such_wherever_it_happens(greedy, capsys, where):
    assert greedy(where, GREEDY_WORDS) == 1
    out = capsys.readouterr()
    assert "out of memory on cpu at train.batch_size=8" in out.err
    assert out.err.count("out of memory") + out.out.count("out of memory") == 1
    assert "train.accumulate" in out.err
    assert "Traceback" not in out.err
    if where == "train":
        assert case_code.result()["status"] == "oom"
        assert not (case_code.latest() / "error.txt").exists()
    else:
        assert not Path("outputs").exists()

    assert greedy("", GREEDY_WORDS) == 0
    before = case_code.result()
    assert greedy(where, ["resume=latest", "train.steps=4"]) == 1
    got = case_code.result()
    assert got["status"] == "oom"
    assert "out of memory" in got["error"]
    if where != "train":
        assert got["final"] == before["final"], "what the run had reached stays true"
    assert greedy("", ["resume=latest", "train.steps=4"]) == 0
    assert (case_code.result()["status"], case_code.result()["error"]) == ("ok", None)


def test_a_bug_leaves_its_traceback_until_the_run_goes_on(greedy):
    assert greedy("", GREEDY_WORDS) == 0
    with pytest.raises(KeyError):
        greedy("bug", ["resume=latest", "train.steps=4"])
    run = case_code.latest()
    assert case_code.result()["status"] == "failed"
    text = (run / "error.txt").read_text()
    assert "Traceback" in text
    assert "greedy.py" in text
    assert "no such key" in text
    assert greedy("", ["resume=latest", "train.steps=4"]) == 0
    assert not (run / "error.txt").exists()


def test_a_refused_resume_is_no_end_of_the_run(greedy):
    assert greedy("", GREEDY_WORDS) == 0
    before = {path: path.stat().st_mtime_ns for path in case_code.latest().rglob("*")}
    assert greedy("", ["resume=latest", "train.steps=4", "optimizer.kwargs.nope=1"]) == 2
    assert before == {path: path.stat().st_mtime_ns for path in case_code.latest().rglob("*")}


# --- each error once ---------------------------------------------------------------------------------------------------------


def test_an_error_of_a_run_is_printed_once(folder, capsys):
    assert main([*ROWS, "precision=fp32", "train.steps=4", "optimizer=sgd", "optimizer.lr=1e30"]) == 1
    out = capsys.readouterr()
    said = case_code.result()["error"].partition(": ")[2].splitlines()[0]
    assert out.err.count(said) == 1
    assert said not in out.out


@pytest.mark.slow
def test_every_failing_job_of_a_sweep_is_told_and_leaves_its_reason(folder):
    words = [
        *ROWS,
        "-m",
        "precision=fp32",
        "train.steps=4",
        "optimizer=sgd",
        "optimizer.lr=1e30,0.1,1e35",
        "hydra.sweep.dir=sweep",
    ]
    process = mprun_command(words)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 1, out
    found = {path.parent: json.loads(path.read_text()) for path in Path("sweep").glob("*/result.json")}
    (well,) = [run for run, result in found.items() if result["status"] == "ok"]
    failed = [result["error"] for result in found.values() if result["status"] == "diverged"]
    assert len(failed) == 2
    for error in failed:
        assert error.partition(": ")[2].splitlines()[0] in out
    assert main([*ROWS, "precision=fp32", f"hydra.run.dir={well}"]) == 2


def test_a_sweep_issued_again_in_its_folder_leaves_finished_runs_as_they_are(folder, capsys):
    words = [*ROWS, "-m", "precision=fp32", "train.steps=1", "hydra.sweep.dir=sweep"]
    process = mprun_command(words)
    process.communicate(timeout=100)
    assert process.returncode == 0
    (run,) = [path.parent for path in Path("sweep").glob("*/config.yaml")]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    process = mprun_command(words)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "all jobs of this sweep are finished" in out
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
