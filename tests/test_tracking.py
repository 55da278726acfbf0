"""Where a run's numbers go: metrics.jsonl, the console, W&B, the closing table, the picture."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from mprun.config import Config, TrackingConfig, TrackingMode
from mprun.errors import MprunError
from mprun.report.summary import newest_offline, number_text, print_summary, scale_text
from mprun.tracking import JsonlSink, RunInfo, Sink, build_sinks, finish_sinks, read_metrics, wandb_sink
from mprun.tracking.console import ConsoleSink
from mprun.tracking.wandb_sink import WandbSink
from mprun.tracking.wandb_start import resolve_mode

ROOT = Path(__file__).parents[1]


def info(run_dir: Path, resumed: int | None = None, *, attempt: int | None = None, total: int = 1120) -> RunInfo:
    return RunInfo(
        run_dir=run_dir,
        config={"seed": 0, "optimizer": {"lr": 0.001, "betas": [0.9, 0.99]}},
        name="digits-vit-fp16_dynamic",
        total_steps=total,
        resumed_from_step=resumed,
        tracking=TrackingConfig(group="g", tags=["a", "b"]),
        job_type="train",
        resumed_from_attempt=attempt,
    )


def train(step: int, *, attempt: int | None = None, loss: float = 0.5, skipped: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train", "step": step, "attempt": attempt or step + skipped, "epoch": step // 56,
        "train/loss": loss, "train/top1": 0.9, "train/grad_norm": 0.53, "train/lr": 1e-3,
        "precision/loss_scale": 65536.0, "precision/skipped_steps": skipped, "perf/examples_per_s": 1234.5, **more,
    }  # fmt: skip


def val(step: int, *, loss: float = 0.1, top1: float = 0.97, **more: Any) -> dict[str, Any]:
    return {"kind": "val", "step": step, "attempt": step, "epoch": 0, "val/loss": loss, "val/top1": top1, **more}


def skip(step: int, attempt: int, scale: float, reason: str = "overflow") -> dict[str, Any]:
    return {
        "kind": "skip", "step": step, "attempt": attempt, "epoch": 0, "reason": reason, "train/loss": 7.0,
        "precision/loss_scale": scale, "precision/skipped_steps": attempt - step,
    }  # fmt: skip


# --- metrics.jsonl -------------------------------------------------------------------------------------------------


def write(run_dir: Path, start: RunInfo, records: list[dict[str, Any]]) -> None:
    """One life of a run."""
    sink = JsonlSink()
    sink.start(start)
    for record in records:
        sink.log(record)
    sink.finish({})


def test_every_line_is_json_for_everybody_and_on_the_disk_at_once(tmp_path: Path) -> None:
    numbers = {"train/loss": math.nan, "train/grad_norm": math.inf, "x": [-math.inf, 1.5]}
    sink = JsonlSink()
    sink.start(info(tmp_path))
    sink.log({**train(1), **numbers})
    sink.log(val(1))
    text = (tmp_path / "metrics.jsonl").read_text()  # before finish: a killed run never gets there
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["train/loss"])
    assert (first["train/grad_norm"], first["x"]) == (math.inf, [-math.inf, 1.5])
    assert (first["segment"], second["val/top1"], second["kind"]) == (0, 0.97, "val")
    sink.finish({})


def test_resumed_steps_count_once_and_the_newest_counts(tmp_path: Path) -> None:
    # Case C66: every step logged, checkpoint every 5, killed at 8, resumed from 5, finished at 12.
    write(tmp_path, info(tmp_path), [train(step, loss=100.0 + step) for step in range(1, 9)])
    write(tmp_path, info(tmp_path, 5, attempt=5), [train(step, loss=200.0 + step) for step in range(6, 13)])
    raw, effective = read_metrics(tmp_path), read_metrics(tmp_path / "metrics.jsonl", effective=True)
    assert [r["step"] for r in raw if r["kind"] == "train"] == [*range(1, 9), *range(6, 13)]
    assert [r["train/loss"] for r in effective if r["kind"] == "train"] == [101, 102, 103, 104, 105, *range(206, 213)]
    marker = raw[8]
    assert (marker["kind"], marker["event"], marker["segment"]) == ("event", "resume", 1)
    assert (marker["resumed_from_step"], marker["step"]) == (5, 5)


def test_what_an_earlier_checkpoint_undid_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, info(tmp_path), [train(step, loss=0.0) for step in range(1, 9)])
    write(tmp_path, info(tmp_path, 6, attempt=6), [train(7, loss=1.0), train(8, loss=1.0), train(9, loss=1.0)])
    # Resumed again from an older checkpoint, and dead before it caught up.
    write(tmp_path, info(tmp_path, 3, attempt=3), [train(4, loss=2.0)])
    counted = [(r["step"], r["train/loss"]) for r in read_metrics(tmp_path, effective=True) if r["kind"] == "train"]
    assert counted == [(1, 0), (2, 0), (3, 0), (4, 2)]


def test_a_skip_after_the_checkpoint_is_placed_by_its_attempt(tmp_path: Path) -> None:
    # The checkpoint was written at step 2, attempt 3; the skip at attempt 4 has step 2 as well.
    write(tmp_path, info(tmp_path), [train(1), skip(1, 2, 8.0), train(2, attempt=3), skip(2, 4, 4.0)])
    write(tmp_path, info(tmp_path, 2, attempt=3), [train(3, attempt=4)])
    counted = [(r["kind"], r["attempt"]) for r in read_metrics(tmp_path, effective=True) if r["kind"] != "event"]
    assert counted == [("train", 1), ("skip", 2), ("train", 3), ("train", 4)]


def test_evaluations_logged_again_count_once_without_known_attempts(tmp_path: Path) -> None:
    write(tmp_path, info(tmp_path), [train(4), val(4, top1=0.1)])
    write(tmp_path, info(tmp_path, 4), [val(4, top1=0.2), train(5)])
    counted = [r.get("val/top1") for r in read_metrics(tmp_path, effective=True) if r["kind"] == "val"]
    assert counted == [0.2]


def test_a_run_started_again_without_a_checkpoint_supersedes_everything(tmp_path: Path) -> None:
    write(tmp_path, info(tmp_path), [train(1, loss=1.0), train(2, loss=1.0)])
    write(tmp_path, info(tmp_path), [train(1, loss=2.0)])
    assert [r["train/loss"] for r in read_metrics(tmp_path, effective=True) if r["kind"] == "train"] == [2.0]


@pytest.mark.parametrize("tail", ['{"kind": "train", "st', "\0\0\0\0", '{"kind": "train", "step": 3, "attempt": 3}'])
def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path, tail: str) -> None:
    write(tmp_path, info(tmp_path), [train(1), train(2)])
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write(tail)
    whole = 3 if tail.endswith("}") else 2
    assert len(read_metrics(path)) == whole
    write(tmp_path, info(tmp_path, 2, attempt=2), [train(3)])
    assert [r.get("segment") for r in read_metrics(path)][-2:] == [1, 1]
    assert len(read_metrics(path)) == whole + 2


def test_a_broken_line_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train"}\nnonsense\n{"kind": "train"}\n')
    with pytest.raises(MprunError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)
    with pytest.raises(MprunError, match="cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_the_run_once_and_says_which_file(tmp_path: Path) -> None:
    sink = JsonlSink()
    sink.start(info(tmp_path))
    assert sink._file is not None
    sink._file.close()
    sink._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(MprunError, match=r"metrics\.jsonl: cannot be written \(No space left"):
        sink.log(train(2))
    sink.log(train(3))
    sink.finish({})


# --- the console ---------------------------------------------------------------------------------------------------

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def screen(width: int = 80, **options: Any) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False, **options)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def show(console: Console, records: list[dict[str, Any]], run_dir: Path = Path("outputs/a/b")) -> ConsoleSink:
    sink = ConsoleSink(console)
    sink.start(info(run_dir))
    for record in records:
        sink.log(record)
        if sink._live is not None:
            sink._live.refresh()
    return sink


SEARCH = [skip(0, attempt, 2.0 ** (40 - attempt)) for attempt in range(1, 24)]


def test_without_a_terminal_there_is_one_line_per_evaluation(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sink = ConsoleSink()
    sink.start(info(tmp_path / "run"))
    for record in [*SEARCH, train(100, skipped=23), val(100), train(200, skipped=23), val(200, **{"ema/top1": 0.98})]:
        sink.log(record)
    sink.log({"kind": "event", "event": "warning", "message": "9% of the last 100 steps overflowed", "step": 200})
    sink.finish({"status": "ok", "steps_applied": 1120, "steps_skipped": 23, "wall_s": 187.0})
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"digits-vit-fp16_dynamic: 1,120 steps, in {tmp_path}/run",
        "step 100/1120  val loss 0.1000 top1 0.9700  skipped 23",
        "step 200/1120  val loss 0.1000 top1 0.9700  ema top1 0.9800  skipped 23",
        "warning: 9% of the last 100 steps overflowed",
        "ok: 1,120 steps applied, 23 skipped, 3:07",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_the_bar_never_wraps(width: int) -> None:
    console = screen(width, force_terminal=True, legacy_windows=False)
    records = [train(450, skipped=3), train(451, skipped=3, loss=1e-7), val(451), train(1119, skipped=123456)]
    sink = show(console, records)
    sink.finish({"status": "ok"})
    moving = [line for line in re.split(r"[\r\n]", ESCAPE.sub("", text_of(console))) if "/1120 " in line + " "]
    bars = [line for line in moving if "loss" in line and "val loss" not in line]
    assert len(bars) >= 3
    assert max(map(len, bars)) < width


def bar_at(width: int, **more: Any) -> str:
    sink = ConsoleSink(screen(width))
    sink.start(info(Path("run")))
    sink.line.begin -= 60.0
    sink.log(val(448))
    sink.log({**train(450, skipped=3), **more})
    console = screen(width)
    console.print(sink.line)
    return text_of(console)


def test_the_bar_says_the_important_things_at_80_columns_and_more_at_160() -> None:
    narrow, wide = bar_at(80), bar_at(160)
    for field in ("450/1120", "loss 0.5000", "top1 0.9000", "scale 2^16", "skip 3", "1,234 ex/s", "eta 1:29"):
        assert field in narrow
        assert field in wide
    for field in ("epoch 8", "val 0.9700", "grad 0.5300", "lr 0.0010"):
        assert field not in narrow
        assert field in wide
    assert wide.count("━") / (wide.count("━") + wide.count("─")) == pytest.approx(450 / 1120, abs=0.02)


def test_no_scale_nothing_to_say_about_it() -> None:
    assert "scale" not in bar_at(160, **{"precision/loss_scale": 1.0, "precision/skipped_steps": 0})


def test_a_search_for_the_scale_is_summarised_and_warnings_stay() -> None:
    console = screen(force_terminal=True, legacy_windows=False)
    warning = {"kind": "event", "event": "warning", "message": "too high", "step": 1}
    sink = show(console, [*SEARCH, train(1, skipped=23), warning])
    sink.finish({"status": "ok"})
    text = ESCAPE.sub("", text_of(console))
    assert text.count("overflow at loss scale") == 3
    assert "step 0: overflow at loss scale 2^39, nothing moved (attempt 1)" in text
    assert "and 20 more skipped steps, the last at loss scale 2^17" in text
    assert "warning: too high" in text


def test_routine_skips_of_a_long_run_stop_being_printed() -> None:
    console = screen(force_terminal=True, legacy_windows=False)
    records = [r for step in range(1, 60) for r in (skip(step, 2 * step, 65536.0), train(step, skipped=step))]
    show(console, records).finish({"status": "ok"})
    assert 3 < text_of(console).count("overflow at loss scale") <= 12
    assert "further ones are only counted" in text_of(console)


def test_a_lost_batch_is_told_without_a_terminal_too() -> None:
    console = screen()
    show(console, [skip(3, 4, 8.0, "nonfinite_loss"), skip(3, 5, 8.0)])
    assert "step 3: nonfinite loss at loss scale 8, nothing moved (attempt 4)" in text_of(console)
    assert "overflow" not in text_of(console)


def test_colours_and_bars_only_where_they_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    dumb = screen(force_terminal=True)
    show(dumb, [train(1), val(1)]).finish({"status": "ok"})
    assert "━" not in text_of(dumb)
    assert "ok: 0 steps applied" in text_of(dumb)
    assert "\x1b" not in text_of(dumb)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = screen(force_terminal=True, legacy_windows=False)
    show(plain, [train(1)]).finish({"status": "ok"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text_of(plain))


# --- W&B -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "environ", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_MODE": "online"}, "online"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "nonsense"}, "offline"),
        ("auto", {"WANDB_DISABLED": "true"}, "disabled"),
        ("online", {"WANDB_MODE": "disabled"}, "online"),
        ("offline", {"WANDB_MODE": "online"}, "offline"),
        ("disabled", {"WANDB_MODE": "online"}, "disabled"),
        ("auto", {"WANDB_SWEEP_ID": "s1"}, "online"),
        ("auto", {"WANDB_SWEEP_ID": "s1", "WANDB_MODE": "offline"}, "offline"),
        ("offline", {"WANDB_SWEEP_ID": "s1"}, "offline"),
    ],
)
def test_an_explicit_mode_wins_over_the_environment(mode: str, environ: dict[str, str], expected: str) -> None:
    assert resolve_mode(TrackingMode[mode], environ) == expected


RUN = """
import json, os, random, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
from mprun.config import Config, TrackingConfig, TrackingMode
from mprun.tracking import JsonlSink, RunInfo, build_sinks, finish_sinks
from mprun.tracking import wandb_start

def run(folder, records, status="ok", mode="offline", resumed=None, between=None, **tracking):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    tracking = TrackingConfig(mode=TrackingMode[mode], group="g", tags=["a", "b"], **tracking)
    sinks = build_sinks(Config(tracking=tracking))
    config = {"seed": 0, "optimizer": {"lr": 0.001, "betas": [0.9, 0.99]}}
    for sink in sinks:
        sink.start(RunInfo(folder, config, "my run", 12, resumed, tracking, "compare", resumed))
    for record in records:
        for sink in sinks:
            sink.log(record)
        if between is not None:
            between()
    result = {"status": status, "steps_applied": 12, "loss_scale": 65536.0}
    finish_sinks(sinks, result)
    return result["wandb"]

def train(step, loss, **more):
    return {"kind": "train", "step": step, "attempt": step, "epoch": 0, "segment": 0, "train/loss": loss, **more}

def val(step, loss, top1):
    return {"kind": "val", "step": step, "attempt": step, "epoch": 0, "val/loss": loss, "val/top1": top1}

def globals_now():
    return {
        "python": random.getstate(), "numpy": np.random.get_state()[1].tolist(), "hook": sys.excepthook, "exit": sys.exit,
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.stdout.write, sys.stderr.write), "cwd": os.getcwd(),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "environ": {k: v for k, v in os.environ.items() if k != "WANDB_ERROR_REPORTING"},
    }
"""


def script(
    code: str,
    cwd: Path,
    *,
    warnings: str = "error",
    stdin: Any = subprocess.DEVNULL,
    stderr: Any = subprocess.PIPE,
    **environ: str,
) -> Any:
    """Run ``code`` after ``RUN`` in a process of its own: W&B's service and threads stay out of this one."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    home = {"HOME": str(cwd), "NETRC": str(cwd / "netrc"), "PYTHONPATH": str(ROOT), "WANDB_X_DISABLE_STATS": "true"}
    return subprocess.run(
        [sys.executable, "-W", warnings, "-c", RUN + code],
        cwd=cwd, env={**clean, **home, **environ}, stdin=stdin, stdout=subprocess.PIPE,
        stderr=stderr, text=True, timeout=40,
    )  # fmt: skip


def records_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of an offline file, by type, as W&B's own reader gives them."""
    (path,) = folder.glob("*.wandb")
    return inspected(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def inspected(path: Path, *_: int) -> dict[str, list[dict[str, Any]]]:
    """W&B's reader is a process of two seconds, and many tests look at one file: a file that is still the same is read once."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def history_of(records: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    own = ("step", "attempt", "epoch")
    return [{k: v for k, v in row["item"].items() if k in own or "/" in k} for row in records["history"]]


def summary_of(records: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for record in records["summary"]:
        summary |= record["update"]
    return summary


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run, its resumed second life, and a failed run, with warnings as errors."""
    cwd = tmp_path_factory.mktemp("wandb")
    code = """
before = globals_now()
skip = {"kind": "skip", "step": 3, "attempt": 4, "epoch": 0, "reason": "overflow", "train/loss": float("nan"),
        "precision/loss_scale": 32768.0, "precision/skipped_steps": 1}
warning = {"kind": "event", "event": "warning", "message": "m", "step": 3, "attempt": 3}
first = run("run", [train(1, 1.0), train(2, float("nan")), val(2, 0.5, 0.7), train(3, 3.0), skip, warning,
                    val(3, 0.2, 0.9), train(6, 6.0), val(6, 0.4, 0.8)], status="interrupted")
during = {}
second = run("run", [train(6, 60.0), train(12, 12.0)], resumed=5, between=lambda: during.update(globals_now()))
failed = run("failed", [train(1, 1.0)], status="failed")
after = globals_now()
assert during == after == before, [key for key in before if not before[key] == during[key] == after[key]]
print(json.dumps({"first": first, "second": second, "failed": failed}))
"""
    done = script(code, cwd)
    assert done.returncode == 0, done.stderr
    assert "W&B" not in done.stderr
    assert "wandb" not in done.stderr.replace(str(cwd), "")
    return cwd, json.loads(done.stdout)


def test_offline_files_hold_the_run(offline: tuple[Path, dict[str, Any]]) -> None:
    cwd, results = offline
    first = results["first"]
    assert first == {"mode": "offline", "id": first["id"], "dir": first["dir"], "url": None}
    records = records_of(cwd / "run" / first["dir"])
    (started,) = records["run"]
    assert {key: started[key] for key in ("run_id", "project", "run_group", "job_type", "display_name", "tags")} == {
        "run_id": first["id"], "project": "mprun", "run_group": "g", "job_type": "compare", "display_name": "my run",
        "tags": ["a", "b"],
    }  # fmt: skip
    assert started["config"]["update"]["optimizer"] == {"lr": 0.001, "betas": [0.9, 0.99]}
    rows = history_of(records)
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 3, 3, 6, 6]
    assert rows[0] == {"step": 1, "attempt": 1, "epoch": 0, "train/loss": 1.0}
    assert rows[4] == {
        "step": 3, "attempt": 4, "epoch": 0, "precision/loss_scale": 32768.0, "precision/skipped_steps": 1,
    }  # fmt: skip
    assert records["exit"] == [{"exit_code": 1}]


def test_metrics_are_drawn_over_applied_steps_and_the_summary_keeps_the_best(offline: tuple[Path, Any]) -> None:
    cwd, results = offline
    records = records_of(cwd / "run" / results["first"]["dir"])
    axes = {metric.get("name") or metric.get("glob_name"): metric.get("step_metric") for metric in records["metric"]}
    assert axes["*"] == axes["val/top1"] == axes["val/loss"] == "step"
    summary = summary_of(records)
    flat = json.dumps(summary)
    assert summary["status"] == "interrupted", flat
    assert summary["steps_applied"] == 12
    assert best(summary, "val/loss", "min") == pytest.approx(0.2), flat
    assert best(summary, "val/top1", "max") == pytest.approx(0.9), flat


def best(summary: dict[str, Any], name: str, kind: str) -> Any:
    """W&B writes a nested summary as a dict or as one dotted key."""
    value = summary.get(name)
    return value[kind] if isinstance(value, dict) else summary[f"{name}.{kind}"]


def test_a_resumed_run_keeps_its_id_and_its_newest_file_is_whole(offline: tuple[Path, dict[str, Any]]) -> None:
    cwd, results = offline
    assert results["second"]["id"] == results["first"]["id"] != results["failed"]["id"]
    assert results["second"]["dir"] != results["first"]["dir"]
    records = records_of(cwd / "run" / results["second"]["dir"])
    rows = [(row["step"], row["train/loss"]) for row in history_of(records) if "train/loss" in row]
    assert [step for step, _ in rows] == [1, 2, 3, 6, 12]
    assert rows[-2:] == [(6, 60.0), (12, 12.0)]  # and not the 6.0 of the first life
    assert records["exit"] == [{"exit_code": 0}]
    found = newest_offline(cwd / "run")
    assert found is not None
    assert found.name == Path(results["second"]["dir"]).name


def test_a_failed_run_is_closed_as_failed(offline: tuple[Path, dict[str, Any]]) -> None:
    cwd, results = offline
    assert records_of(cwd / "failed" / results["failed"]["dir"])["exit"] == [{"exit_code": 1}]


def test_disabled_imports_neither_wandb_nor_torch(tmp_path: Path) -> None:
    code = """
sinks = build_sinks(Config(tracking=TrackingConfig(mode=TrackingMode.auto)))
sinks[0].start(RunInfo(Path("."), {}, "n", 1, None, TrackingConfig(), "train"))
finish_sinks(sinks, {"status": "ok"})
print(len(sinks), sorted({"wandb", "torch"} & set(sys.modules)))
"""
    done = script(code, tmp_path, WANDB_MODE="disabled")
    assert done.stdout.split("\n")[0] == "2 []", done.stderr
    assert (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "wandb").exists()


def test_online_without_a_key_never_asks_and_goes_on_offline(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()  # stdin and stderr are a terminal: exactly where W&B would ask
    try:
        done = script(
            'print(run("run", [train(1, 1.0)], mode="online")["mode"])', tmp_path, stdin=terminal, stderr=terminal
        )
        os.close(terminal)
        screen = ESCAPE.sub("", os.read(controller, 1 << 16).decode())
    finally:
        os.close(controller)
    assert done.stdout.strip() == "offline", screen
    told = [line for line in screen.splitlines() if "wandb" in line.lower() or "W&B" in line]
    assert len(told) == 1
    assert re.match(r"W&B online failed \(No API key.*\); writing offline files instead", told[0])


def test_a_silent_server_costs_a_bounded_time_and_the_id_stays(tmp_path: Path) -> None:
    code = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
kept = []
threading.Thread(target=lambda: [kept.append(server.accept()) for _ in range(999)], daemon=True).start()
os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:%d" % server.getsockname()[1]
wandb_start.INIT_TIMEOUT_S = 1.0
Path("run/wandb").mkdir(parents=True)
Path("run/wandb/mprun-run-id.txt").write_text("abc123")
begin = time.monotonic()
print(json.dumps(run("run", [train(1, 1.0)], mode="online")), time.monotonic() - begin)
"""
    begin = time.monotonic()
    done = script(code, tmp_path, warnings="default", WANDB_API_KEY="a" * 40)
    assert time.monotonic() - begin < 15, done.stderr  # the end of the process included
    wandb = json.loads(done.stdout.rpartition(" ")[0])
    assert (wandb["mode"], wandb["id"]) == ("offline", "abc123"), done.stderr
    assert done.stderr.count("W&B") == 1
    # What the attempt to go online left is no run, and must not be offered for upload.
    folders = [path for path in (tmp_path / "run" / "wandb").iterdir() if path.is_dir() and not path.is_symlink()]
    assert [folder.name for folder in folders] == [Path(wandb["dir"]).name]
    assert len(history_of(records_of(tmp_path / "run" / wandb["dir"]))) == 1


def test_a_killed_service_costs_one_line(tmp_path: Path) -> None:
    code = """
def kill():
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True).stdout
    for pid in children.split():
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.1)
print(run("run", [train(step, 1.0) for step in range(1, 6)], between=kill)["mode"])
print(len(Path("run/metrics.jsonl").read_text().splitlines()))
"""
    if not Path("/usr/bin/pgrep").exists():
        pytest.skip("needs pgrep")
    done = script(code, tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["offline", "5"]), done.stderr
    assert done.stderr.count("W&B is left alone") == 1
    assert "Traceback" not in done.stderr


class FakeRun:
    """A W&B run that never answers."""

    def __init__(self, run_dir: Path, gate: threading.Event) -> None:
        self.dir, self.url, self.resumed, self.summary = str(run_dir / "wandb" / "r" / "files"), None, False, {}
        self.log = self.finish = self.define_metric = lambda *_, **__: gate.wait(30)


def test_a_stalled_wandb_never_holds_up_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, said = threading.Event(), []
    monkeypatch.setattr(wandb_sink, "OFFLINE_FINISH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(wandb_sink, "_stuck", threading.Event())
    monkeypatch.setattr(wandb_sink, "begin", lambda info, mode, run: (FakeRun(tmp_path, gate), mode, ""))
    sink = WandbSink("offline", said.append)
    begin = time.monotonic()
    sink.start(info(tmp_path))
    for step in range(wandb_sink.QUEUE_SIZE + 10):
        sink.log(train(step))
    result: dict[str, Any] = {"status": "ok"}
    sink.finish(result)
    assert time.monotonic() - begin < 5
    gate.set()
    assert said == ["W&B is left alone from here on (it does not keep up); metrics.jsonl has everything"]
    assert result["wandb"]["mode"] == "offline"


def test_a_broken_wandb_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises ImportError
    said: list[str] = []
    sink = WandbSink("offline", said.append)
    sink.start(info(tmp_path))
    sink.log(train(1))
    result: dict[str, Any] = {"status": "ok"}
    sink.finish(result)
    assert result["wandb"] is None
    assert len(said) == 1


# --- all of them ---------------------------------------------------------------------------------------------------


def test_only_the_first_process_tracks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(tracking=TrackingConfig(mode=TrackingMode.offline))
    names = [type(sink).__name__ for sink in build_sinks(config)]
    assert names == ["JsonlSink", "WandbSink", "ConsoleSink"]
    monkeypatch.setenv("RANK", "1")
    assert build_sinks(config) == []


def test_every_sink_is_finished_also_when_one_fails() -> None:
    done: list[str] = []

    def sink(name: str, error: Exception | None = None) -> Sink:
        def finish(_: dict[str, Any]) -> None:
            done.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(finish=finish)  # type: ignore[return-value]

    with pytest.raises(OSError, match="full"):
        finish_sinks([sink("a"), sink("b", OSError("full")), sink("c")], {})
    assert done == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["default", "offline", "online", "disabled"])
def test_options_of_the_group_fit_the_schema(name: str) -> None:
    text = (ROOT / "conf" / "tracking" / f"{name}.yaml").read_text()
    assert re.match(r"# \S.*\.\n", text)
    merged = OmegaConf.merge(OmegaConf.structured(TrackingConfig), OmegaConf.create(text))
    assert merged.mode is TrackingMode["auto" if name == "default" else name]


# --- the closing table ---------------------------------------------------------------------------------------------

RESULT: dict[str, Any] = {
    "status": "ok", "error": None, "steps_applied": 1120, "steps_skipped": 23,
    "final": {"train/loss": 0.0123, "train/grad_norm": 0.3, "val/loss": 0.1, "val/top1": 0.9711},
    "best": {"metric": "val/top1", "value": 0.9733, "step": 1050, "epoch": 70},
    "loss_scale": 65536.0, "wall_s": 33.24, "train_s": 30.1, "examples_per_s": 2789.3, "peak_memory": 650 * 2**20,
    "wandb": {"mode": "offline", "id": "x", "dir": "d", "url": None},
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 160])
def test_the_closing_table_has_the_numbers_and_commands_that_can_be_copied(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "outputs" / "a-long-experiment-name-that-goes-on" / "20261130-110225-ab12cd"
    for stamp in ("20261130_110300-x", "20261130_110225-x"):
        (run_dir / "wandb" / f"offline-run-{stamp}").mkdir(parents=True)
    console = screen(width)
    print_summary(RESULT, run_dir, console=console)
    lines = [line.rstrip() for line in text_of(console).splitlines()]
    shown = "outputs/a-long-experiment-name-that-goes-on/20261130-110225-ab12cd"
    assert f"run folder     {shown}" in lines
    assert f"curves         wandb leet {shown}/wandb" in lines
    assert f"upload         wandb sync {shown}/wandb/offline-run-20261130_110300-x" in lines
    assert "\x1b" not in text_of(console)
    assert lines[1].startswith("run ok ")
    table = "\n".join(lines)
    for pattern in (r"val/top1 +0\.9711 +0\.9733 +1,050", r"train/loss +0\.0123$", r"1,120 applied, 23 skipped \(2\.0%",
                    r"loss scale +2\^16", r"2,789 examples/s", r"33\.2 s \(training 30\.1 s\)", r"650 MiB"):  # fmt: skip
        assert re.search(pattern, table, re.MULTILINE), pattern


def test_the_closing_table_of_a_failure_shows_the_error_whole(tmp_path: Path) -> None:
    console = screen(80)
    error = "step 1: the loss is nan: first in " + "/".join(["deep"] * 40)
    folder = tmp_path / "it's here"
    folder.mkdir()
    print_summary({"status": "diverged", "error": error, "final": {}, "best": None}, folder, console=console)
    assert error in text_of(console).splitlines()
    assert "run diverged" in text_of(console)
    assert "wandb" not in text_of(console)
    assert f"""'{tmp_path}/it'"'"'s here'""" in text_of(console)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: scale_text(65536.0), "2^16"),
        (lambda: scale_text(2.0**-14), "2^-14"),
        (lambda: scale_text(1000.0), "1000"),
        (lambda: scale_text(1.0), "1"),
        (lambda: scale_text(0.0), "0"),
        (lambda: number_text(float("nan")), "nan"),
        (lambda: number_text(1.23456e-5), "1.23e-05"),
        (lambda: number_text(0.97113), "0.9711"),
        (lambda: number_text(0.0), "0.0000"),
    ],
)
def test_numbers_as_short_text(call: Callable[[], str], expected: str) -> None:
    assert call() == expected


# --- the picture ---------------------------------------------------------------------------------------------------


def test_the_picture_shows_scale_and_skips(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("plot_run", ROOT / "bench" / "plot_run.py")
    assert spec is not None
    assert spec.loader is not None
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    records = [
        *SEARCH,
        *(train(s, loss=2.0 / s, skipped=23) for s in range(1, 90)),
        val(40, top1=0.8),
        val(80, top1=0.7),
    ]
    write(tmp_path, info(tmp_path), records)
    figure = plot.draw(read_metrics(tmp_path, effective=True), RESULT, "run")
    loss, top1, scale = figure.axes
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "top-1", "loss scale"]
    assert (loss.get_yscale(), scale.get_yscale()) == ("log", "log")
    assert scale.yaxis.get_transform().base == 2
    marks = next(line for line in scale.lines if line.get_marker() == "x")
    assert list(marks.get_ydata()) == [2.0 ** (40 - attempt) for attempt in range(1, 24)]
    assert "0.8000" in [text.get_text() for text in top1.texts]
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    # Without a loss scale the gradient norm takes its place.
    plain = [{**train(s), "precision/loss_scale": 1.0} for s in range(1, 9)]
    assert [axis.get_ylabel() for axis in plot.draw(plain, {}, "run").axes] == ["loss", "gradient norm"]
