"""Sweeps: the jobs that words mean, their folders, what is skipped and resumed, failures, signals, other launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli import main
from mprun.compose import compose, compose_node, prepare
from mprun.config_check import to_plain
from mprun.errors import CheckpointError, ConfigError
from mprun.report.run_folders import find_runs, read_run
from mprun.sweeps.batch import launch
from mprun.sweeps.folder import (
    EARLIER,
    Job,
    Sweep,
    claim,
    newest_with,
    read_sweep,
    release,
    running_pids,
    save_first,
    write_pid,
)  # fmt: skip
from mprun.sweeps.jobs import FRESH, RESUME, Outcome, Running, failed_since, finish, read_result, refused, state_of
from mprun.sweeps.plan import default_name, expand, hash_of, identity, plan, planned
from mprun.sweeps.pool import free_gpu, gpus, lines_of, run_pool, threads
from mprun.training.env import config_hash
from tests.case_code import ROWS

REPOSITORY = Path(__file__).resolve().parent.parent
# 10 steps an epoch, a checkpoint every second one, dropout, BatchNorm, noise from three generators.
SHORT = [*ROWS, "precision=fp32", "train.epochs=1", "train.checkpoint_every=2"]
SINGLE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
PLAIN = ["model=mlp", "tracking=disabled", "device=cpu", "precision=fp32", "train.steps=1", "dataset.limit=64"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a space in its name."""
    place = tmp_path / "my runs"
    place.mkdir()
    monkeypatch.chdir(place)
    before = torch.get_num_threads()
    yield place
    torch.set_num_threads(before)


def spawn(words: list[str], cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    own = {key: value for key, value in os.environ.items() if key != "MPRUN_TEST_NO_ACCIDENT"}
    return subprocess.Popen(
        [sys.executable, "-m", "mprun", *words],
        cwd=cwd,
        env={**own, **SINGLE, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def call(words: list[str], cwd: Path | None = None, **env: str) -> tuple[int, str]:
    process = spawn(words, cwd, **env)
    out, _ = process.communicate(timeout=280)
    return process.returncode, out


def the_sweep(place: str = "outputs") -> Sweep:
    (path,) = Path(place).resolve().glob("sweeps/*/*/sweep.json")
    return read_sweep(path.parent)


def results(sweep: Sweep) -> list[dict[str, Any]]:
    return [read_result(sweep.path(job)) for job in sweep.jobs]


def differing(run: Path, other: Path) -> list[str]:
    """What differs between the last checkpoints of two runs, beside what says where they are."""

    def flat(node: Any, path: str) -> dict[str, Any]:
        if isinstance(node, dict):
            pairs = node.items()
        elif isinstance(node, list | tuple):
            pairs = enumerate(node)
        else:
            return {path: node}
        return {key: value for name, item in pairs for key, value in flat(item, f"{path}/{name}").items()}

    saved = [torch.load(place / "checkpoints/last.pt", weights_only=True) for place in (run, other)]
    for content in saved:
        content.pop("config")
        content.pop("log")  # where in metrics.jsonl it is, which names a resumed run's segments
    one, two = (flat(content, "") for content in saved)
    assert any(isinstance(value, torch.Tensor) for value in one.values())
    return [
        key
        for key in sorted(one.keys() | two.keys())
        if not (
            torch.equal(one[key], two[key])
            if key in one and key in two and isinstance(one[key], torch.Tensor)
            else one.get(key) == two.get(key)
        )
    ]


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


# --- what words mean -------------------------------------------------------------------------------------------------------


def jobs_of(*words: str, params: dict[str, str] | None = None) -> list[Job]:
    return expand(prepare(words), params or {})


def test_a_grid_has_every_combination_in_the_order_of_the_words():
    jobs = jobs_of("precision=fp32,bf16", "model=mlp", "seed=range(3)")
    assert [job.swept for job in jobs] == [
        (f"precision={precision}", f"seed={seed}") for precision in ("fp32", "bf16") for seed in range(3)
    ]
    assert all("model=mlp" in job.words for job in jobs)
    assert [job.number for job in jobs] == [1, 2, 3, 4, 5, 6]


def test_words_about_the_sweep_are_not_words_of_its_jobs():
    (job,) = jobs_of("seed=1", "sweep.jobs=3", "sweep=seeds", "hydra.sweep.dir=x", "hydra/launcher=basic")
    assert job.words == ("seed=1",)
    assert job.swept == ()


def test_the_later_word_wins_and_the_command_line_beats_the_preset():
    assert [job.words for job in jobs_of("seed=1,2", "seed=3")] == [("seed=3",)]
    assert [job.swept for job in jobs_of("seed=7,8", params={"seed": "range(5)"})] == [("seed=7",), ("seed=8",)]
    assert len(jobs_of("model=mlp", params={"seed": "range(5)"})) == 5


def test_quoted_values_lists_and_open_arguments_stay_what_they_are():
    jobs = jobs_of("name='a,b','c d'", "model=mlp", "model.kwargs.hidden=[4],[8,8]")
    plains = [to_plain(compose(job.words).config) for job in jobs]
    assert [(plain["name"], plain["model"]["kwargs"]["hidden"]) for plain in plains] == [
        ("a,b", [4]), ("a,b", [8, 8]), ("c d", [4]), ("c d", [8, 8]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["seed=interval(0,1)"], "a grid needs values"),
        (["trust=[a],[b]"], "trust is the same for all jobs"),
        (["sweep.jobs=1,2"], "sweep.jobs is the same for all jobs"),
        (["hydra/launcher=basic,joblib"], "hydra/launcher is the same for all jobs"),
    ],
)
def test_what_cannot_be_swept_is_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        jobs_of(*words)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision=fp16_dynamic", "model=mlp", "optimizer.lr=3e-3", "seed=2"],
        ["model=mlp", "dataset=fashion_mnist", "dataset.root=here", "tracking.group=g", "sweep.jobs=4"],
        ["recipe=digits/vit_fp16"],
    ],
)
def test_the_folder_is_the_hash_of_the_configuration_however_it_is_composed(words):
    expected = config_hash(to_plain(compose(words).config))
    assert hash_of(compose_node(prepare(words))) == expected  # as a launcher of Hydra resolves it
    job = plan(Job(1, (), tuple(words)), "group")
    assert (job.hash, job.folder) == (expected, expected)


def test_a_word_that_does_nothing_beside_the_others_makes_no_job_of_its_own(folder):
    words = ["precision=fp32,fp16_static", "precision.loss_scale.init=128,1024", "model=mlp"]
    sweep = Sweep(folder / "s", (), jobs_of(*words))
    jobs = list(planned(sweep, ()))
    assert [job.same_as for job in jobs] == [None, 1, None, None]
    assert jobs[0].left_out == ("precision.loss_scale.init=128",)
    assert "precision.loss_scale.init=128" not in jobs[0].words
    assert len({job.folder for job in jobs}) == 3


def test_jobs_have_the_group_of_their_sweep_unless_another_is_given(folder):
    words = plan(Job(1, (), ("seed=1",)), "20260101-abc").words
    assert compose(words).config.tracking.group == "20260101-abc"
    words = plan(Job(1, (), ("tracking.group=mine",)), "20260101-abc").words
    assert compose(words).config.tracking.group == "mine"


def test_a_sweep_is_known_again_by_what_it_consists_of():
    one = identity(prepare(["seed=1,2", "sweep.jobs=4", "trust=[a]", "dataset.root=data"]))
    assert one == identity(prepare(["seed=1,2", "dataset.root=data", "sweep.new=true", "hydra/launcher=basic"]))
    assert one != identity(prepare(["seed=1,2,3", "dataset.root=data"]))
    os.mkdir("deeper")
    os.chdir("deeper")
    assert one == identity(prepare(["seed=1,2", "dataset.root=../data"])), "paths mean where they were typed"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["model=mlp", "seed=1,2"], "digits-mlp"),
        (["model=mlp,vit"], "sweep"),
        (["recipe=digits/vit_fp16,digits/resnet_fp16"], "sweep"),
        (["model=mlp,vit", "sweep.name=mine"], "mine"),
        (["model=timm", "model.name=test_vit,test_resnet"], "sweep"),
    ],
)
def test_the_name_of_a_sweep(words, name):
    base = compose_node([word for word in prepare(words) if "," not in word])
    assert default_name(base, jobs_of(*words)) == name


# --- one job's folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "checkpoint", "expected"),
    [
        ({"status": "ok"}, True, "done"),
        ({"status": "ok"}, False, "done"),
        ({"status": "interrupted"}, True, RESUME),
        ({"status": "interrupted"}, False, FRESH),
        ({"status": "failed"}, True, FRESH),
        ({"status": "failed", "signal": "SIGKILL"}, True, RESUME),
        ({"status": "failed", "signal": "SIGSEGV"}, True, FRESH),
        ({"status": "diverged"}, True, FRESH),
        ({"status": "oom"}, True, FRESH),
        (None, True, RESUME),
        (None, False, FRESH),
    ],
)
def test_what_becomes_of_a_job_follows_from_its_folder(result, checkpoint, expected, folder):
    (folder / ".hydra").mkdir()
    (folder / ".hydra/overrides.yaml").touch()
    (folder / "config.yaml").touch()
    (folder / "checkpoints").mkdir()
    if checkpoint:
        (folder / "checkpoints/last.pt").touch()
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    assert state_of(folder) == expected


def test_a_claim_lasts_as_long_as_the_process_that_inherited_it(folder):
    Sweep(folder, ()).save()
    handle = claim(folder, "abc")
    assert handle is not None
    assert claim(folder, "abc") is None
    assert claim(folder, "abd") is not None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(handle,)) as process:
        write_pid(handle, process.pid)
        release(handle)  # as if the one who started it had been killed
        assert claim(folder, "abc") is None
        assert running_pids(folder) == [process.pid]
    handle = claim(folder, "abc")
    assert handle is not None
    release(handle)


@contextmanager
def ended(folder: Path, script: str) -> Iterator[tuple[Sweep, Running]]:
    """A job whose process was this shell script."""
    sweep = Sweep(folder, ())
    sweep.jobs = [Job(1, ("seed=1",), ("seed=1",), "abc", "abc")]
    sweep.save()
    (folder / "abc").mkdir()
    handle = claim(folder, "abc")
    assert handle is not None
    log = (folder / "abc" / "job.log").open("ab")
    process = subprocess.Popen(["sh", "-c", script], stdout=log, stderr=log)
    process.wait()
    yield sweep, Running(sweep.jobs[0], process, handle, FRESH, time.perf_counter(), log, None)


@pytest.mark.parametrize(
    ("script", "asked", "status", "told"),
    [
        ("kill -KILL $$", 0, "failed", "killed by SIGKILL"),
        ("kill -SEGV $$", 0, "failed", "killed by SIGSEGV"),
        ("kill -TERM $$", signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        ("exit 130", signal.SIGINT, "interrupted", "stopped by SIGINT"),
        ("echo 'mprun: error: no such thing'; exit 2", 0, "failed", "no such thing"),
        ("echo Traceback; echo 'ImportError: no module x'; exit 1", 0, "failed", "no module x"),
        ("exit 3", 0, "failed", "ended with status 3"),
    ],
)
def test_a_process_that_left_no_result_has_one_all_the_same(script, asked, status, told, folder):
    with ended(folder, script) as (sweep, running):
        outcome = finish(sweep, running, asked=asked)
    assert outcome.status == status
    assert outcome.reason.startswith(told)
    assert "\n" not in outcome.reason
    result = read_result(folder / "abc")
    assert (result["status"], result["sweep"], result["overrides"]) == (
        status,
        folder.name.replace(" ", "-"),
        ["seed=1"],
    )
    assert claim(folder, "abc") is not None, "the claim is let go of"
    row = read_run(folder / "abc")
    assert (row.status, told in row.reason) == (status, True)


def test_a_status_of_the_run_s_own_stays(folder):
    with ended(folder, "printf '{\"status\": \"oom\", \"error\": \"MprunError: out of memory\"}' > abc/result.json; exit 1") as (
        sweep, running,
    ):  # fmt: skip
        outcome = finish(sweep, running)
    assert (outcome.status, outcome.reason) == ("oom", "out of memory")


def refused_by_subdir(sweep: Sweep) -> list[Job]:
    return list(planned(sweep, ["hydra.sweep.subdir=x"]))


def test_jobs_that_share_a_folder_but_no_configuration_are_refused_and_not_lost(folder):
    sweep = Sweep(folder, (), jobs_of("model=mlp", "seed=1,2"))
    first, second = refused_by_subdir(sweep)
    assert (first.folder, first.error) == ("x", "")
    assert (second.hash, second.same_as) == ("", None)
    assert "seed=2: hydra.sweep.subdir gives it the folder of job 1, x" in second.error
    assert refused_by_subdir(read_sweep(folder)) == [first, second], "the same when it is issued again"


def test_a_refusal_that_no_longer_holds_is_no_row_of_the_table(folder):
    sweep = Sweep(folder, (), [Job(1, ("model=new",), ("model=new",))])
    (bad,) = planned(sweep, [])
    refused(sweep, bad)
    assert [row.status for row in map(read_run, find_runs([str(folder)]))] == ["failed"]
    # As if somebody had made the option meanwhile.
    sweep = Sweep(folder, (), [Job(1, ("model=new",), ("model=mlp",))])
    (good,) = planned(sweep, [])
    assert good.hash
    with pytest.raises(ConfigError, match="no run lies in this folder"):
        find_runs([str(folder)])
    (kept,) = (folder / EARLIER).glob("refused-*/error.txt")
    assert "new" in kept.read_text()


def test_a_job_that_fails_in_another_process_meanwhile_is_not_run_a_second_time(folder):
    sweep = Sweep(folder, (), [Job(1, ("seed=1",), ("no.such.key=1",), "abc", "abc")])
    sweep.save()
    (folder / "abc").mkdir()
    (folder / "abc/result.json").write_text(json.dumps({"status": "failed", "error": "MprunError: broken"}))
    os.utime(folder / "abc/result.json", (time.time() + 5, time.time() + 5))
    pool = run_pool(sweep, iter(sweep.jobs), width=1, on_error_stop=False)
    assert [(outcome.status, outcome.reason) for outcome in pool.outcomes] == [("failed", "broken")]
    assert pool.failed
    assert not (folder / "abc/job.log").exists(), "no process was started"
    handle = claim(folder, "abc")
    assert handle is not None
    release(handle)


@pytest.mark.parametrize(("status", "seconds"), [("failed", -5), ("interrupted", 5), ("ok", 5)])
def test_a_job_that_failed_earlier_or_was_stopped_elsewhere_has_not_had_its_turn(status, seconds, folder):
    (folder / "result.json").write_text(json.dumps({"status": status}))
    now = time.time()
    os.utime(folder / "result.json", (now + seconds, now + seconds))
    assert not failed_since(folder, now)


def test_two_processes_that_begin_the_same_sweep_at_once_begin_one(folder):
    first, second, changed = (
        Sweep(folder / "outputs/sweeps/x" / name, ("seed=1,2",), [Job(1, ("seed=1",), (), digest, digest)])
        for name, digest in (("a", "abc"), ("b", "abc"), ("c", "abd"))
    )
    assert save_first(first, None) is None
    other = save_first(second, None)
    assert other is not None
    assert other.folder == first.folder
    assert not second.folder.exists()
    assert save_first(changed, None) is None, "the words mean something else by now"
    assert save_first(second, changed.folder) is None


def test_a_batch_may_repeat_a_job_of_an_earlier_batch(folder):
    sweep = Sweep(folder, ())
    words = [*PLAIN, "seed=1"]
    job = plan(Job(1, tuple(words), tuple(words)), sweep.id)
    sweep.jobs = [job]
    sweep.save()
    (folder / job.folder).mkdir()
    (folder / job.folder / "result.json").write_text(json.dumps({"status": "ok", "best": {"value": 0.5}}))
    config = compose_node([f'hydra.sweep.dir="{folder}"'])
    (again,) = launch(config, [words], 1)
    assert again.return_value == 0.5


def test_a_damaged_sweep_file_is_told(folder):
    (folder / "sweep.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sweep(folder)
    assert newest_with(()) is None


# --- cores, GPUs, lines ----------------------------------------------------------------------------------------------------


def test_jobs_at_once_share_the_cores_unless_the_user_has_said_otherwise(monkeypatch):
    monkeypatch.setattr("mprun.sweeps.pool.cores", lambda: 8)
    assert threads(2, {}) == {"OMP_NUM_THREADS": "4"}
    assert threads(3, {}) == {"OMP_NUM_THREADS": "2"}
    assert threads(16, {}) == {"OMP_NUM_THREADS": "1"}
    assert threads(2, {"OMP_NUM_THREADS": "7"}) == {}
    assert threads(1, {}) == {}, "one at a time is like a run alone"


def test_gpus_are_shared_out(folder):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (folder / name).touch()
    assert gpus({}, folder) == ["0", "1", "2"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "4, 6"}, folder) == ["4", "6"]
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, folder) == []
    assert gpus({"CUDA_VISIBLE_DEVICES": "3"}, folder) == [], "nothing to choose"
    used: list[str | None] = []
    for _ in range(4):
        used.append(free_gpu(["4", "6"], used))
    assert used == ["4", "6", "4", "6"]
    del used[1]
    assert free_gpu(["4", "6"], used) == "6"
    assert free_gpu([], used) is None


def test_a_line_says_number_status_seconds_metric_and_words_in_this_order():
    job = Job(3, ("precision=bf16", "optimizer.lr=0.003", "precision.loss_scale.init=4"), ())
    outcome = Outcome(job, "ok", "", 12.3, {"final": {"val/top1": 0.97121}})
    assert lines_of(18, job, "ok", outcome) == [
        "[ 3/18] ok           12.3 s val/top1 0.9712 precision=bf16 lr=0.003 loss_scale.init=4"
    ]
    failed = Outcome(job, "failed", "killed by SIGKILL", 3.0, {"final": {"val/top1": 0.5}})
    assert lines_of(18, job, "failed", failed)[1].strip() == "killed by SIGKILL"
    assert "0.5" not in lines_of(18, job, "failed", failed)[0]


# --- sweeps that start nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optimizer.lrr=1,2"], "unknown key optimizer.lrr"),
        (["optimizer.lrr=1", "seed=1,2"], "unknown key optimizer.lrr"),
        (["resume=latest", "seed=1,2"], "continues one run"),
        (["seed=1,2", "sweep.jobs=0"], "sweep.jobs=0 is not legal"),
        (["seed=1,2", "sweep.on_error=maybe"], "sweep.on_error"),
        (["seed=1,2", "hydra/launcher=basic", "sweep.jobs=2"], "hydra.launcher.n_jobs"),
        (["seed=1,2", "--config-dir", "x"], "--config-dir does not go with -m"),
    ],
)
def test_a_sweep_that_cannot_run_at_all_creates_nothing(words, told, folder, capsys):
    assert main(["-m", *words]) == 2
    assert told in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_words_about_a_sweep_are_refused_in_a_single_run(folder, capsys):
    assert main(["model=mlp", "sweep.jobs=2"]) == 2
    assert "add -m" in capsys.readouterr().err


def test_refused_jobs_have_a_folder_with_the_reason_and_the_first_one_can_stop_the_rest(folder, capsys):
    words = ["-m", *PLAIN, "optimizer.lr=bad,-1", "sweep.on_error=continue"]
    assert main(words) == 1
    out = capsys.readouterr().out
    sweep = the_sweep()
    first, second = results(sweep)
    assert (first["status"], second["status"]) == ("failed", "failed")
    assert "optimizer.lr=bad" in first["error"]
    assert "optimizer.lr=-1" in second["error"]
    assert all((sweep.path(job) / "error.txt").read_text().strip() for job in sweep.jobs)
    assert "2 runs: 2 failed" in out
    assert main(["table", str(sweep.folder)]) == 0
    assert "2 failed" in capsys.readouterr().out
    assert main([*words[:-1], "sweep.on_error=stop", "sweep.new=true", "sweep.name=other"]) == 1
    assert "1 failed, 1 not run" in capsys.readouterr().out


def test_the_parent_needs_no_torch_and_is_quick(folder):
    code = (
        "import sys, time; from mprun.cli import main; status = main(sys.argv[1:]);"
        "print('torch' in sys.modules, time.process_time())"
    )
    words = ["-m", *PLAIN, "optimizer.lr=bad,-1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env={**os.environ, **SINGLE}
    )
    loaded, seconds = done.stdout.split()[-2:]
    assert loaded == "False"
    assert float(seconds) < 3, "everything, the table too"


# --- sweeps ----------------------------------------------------------------------------------------------------------------


def alone(words: tuple[str, ...], place: str, **env: str) -> Path:
    """The run of a job's words, in this process, with this process's history."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in env.items():
            patch.setenv(key, value)
        kept = [word for word in words if not word.startswith("tracking.group=")]
        assert main([*kept, f"hydra.run.dir={place}"]) == 0
    return Path(place)


def test_a_bad_value_and_a_missing_model_leave_the_other_jobs_alone(folder):
    """Two refused out of three; said again, only what is not finished runs, and a run knows its sweep."""
    words = ["-m", *PLAIN, "model=mlp,missing", "optimizer.lr=0.1,bad"]
    code, out = call(words)
    assert code == 1, out
    sweep = the_sweep()
    assert [result["status"] for result in results(sweep)] == ["ok", "failed", "failed", "failed"]
    assert "missing is not an option of model" in results(sweep)[2]["error"]
    assert out.count("missing is not an option of model") >= 2
    assert "Traceback" not in out
    assert all(len(line) <= 100 for line in out.splitlines() if line.startswith("["))
    run = sweep.path(sweep.jobs[0])
    assert run.name == config_hash(to_plain(compose(sweep.jobs[0].words).config))
    env = json.loads((run / "env.json").read_text())
    assert (env["sweep"], env["config_hash"]) == (sweep.id, run.name)
    assert results(sweep)[0]["sweep"] == sweep.id
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, out = call(words)
    assert code == 1
    assert "[1/4] done before" in out
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.slow
def test_killed_and_crashed_jobs_run_again_and_the_whole_equals_an_undisturbed_sweep(folder):
    """SIGKILL and SIGSEGV after 5 of 10 steps: the neighbours do not notice; the killed one goes on, the crashed one begins anew."""
    words = ["-m", *SHORT, "dataset.kwargs.at=45", 'dataset.kwargs.accident=kill,crash,""', "dataset.kwargs.n=80"]
    code, out = call(words)
    assert code == 1, out
    sweep = the_sweep()
    killed, crashed, well = results(sweep)
    assert killed["error"].startswith("killed by SIGKILL")
    assert crashed["error"].startswith("killed by SIGSEGV")
    assert well["status"] == "ok"
    untouched = (sweep.path(sweep.jobs[2]) / "result.json").stat().st_mtime_ns
    code, out = call(words, MPRUN_TEST_NO_ACCIDENT="1")
    assert code == 0, out
    assert "[1/3] resumed" in out
    assert "[2/3] started" in out
    assert "[3/3] done before" in out
    assert (sweep.path(sweep.jobs[2]) / "result.json").stat().st_mtime_ns == untouched
    assert len(list((sweep.folder / EARLIER).iterdir())) == 1
    for job in sweep.jobs:
        single = alone(job.words, f"alone{job.number}", MPRUN_TEST_NO_ACCIDENT="1")
        assert differing(sweep.path(job), single) == []
        final = read_result(single)["final"]
        assert {key: value for key, value in read_result(sweep.path(job))["final"].items() if "perf" not in key} == {
            key: value for key, value in final.items() if "perf" not in key
        }
    code, out = call(["resume", str(sweep.folder)], cwd=Path("/"))
    assert code == 0, out
    assert "all jobs of this sweep are finished" in out
    assert "3 runs: 3 ok" in out


LONG = [*ROWS, "precision=fp32", "train.steps=1000000", "train.checkpoint_every=1000"]


def trains(run: Path) -> bool:
    return (run / "metrics.jsonl").is_file() and len((run / "metrics.jsonl").read_text().splitlines()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_sweep_and_what_was_done_is_kept(number, folder):
    process = spawn(["-m", *LONG, "seed=0,1", "hydra.sweep.dir=s"])
    run = wait_for(lambda: next((path.parent for path in Path("s").glob("*/metrics.jsonl")), None), process)
    wait_for(lambda: trains(run), process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + number, out
    assert "2 runs: 1 interrupted, 1 not run" in out
    result = read_result(run)
    assert result["status"] == "interrupted"
    assert result["checkpoint"]["step"] == result["steps_applied"] > 0
    assert state_of(run) == RESUME
    process = spawn(["resume", "s", "trust=[tests]"])
    wait_for(lambda: not read_result(run) and trains(run), process)
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)  # a second one kills
    process.communicate(timeout=60)
    assert process.returncode in (128 + number, -number), "the second one may find the table being printed"
    assert claim(Path("s"), run.name) is not None, "nothing runs any more"


@pytest.mark.slow
def test_jobs_at_once_in_two_sweeps_at_once_run_once_each(folder):
    """The same words, issued twice at the same time, two jobs at once: every job runs once, and both see all results."""
    words = ["-m", *SHORT, "seed=range(4)", "sweep.jobs=2", "hydra.sweep.dir=a b/s"]
    first = spawn(words)
    wait_for(lambda: Path("a b/s/sweep.json").is_file(), first)
    second = spawn(words)
    outs = [process.communicate(timeout=280)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], "\n".join(outs)
    sweep = read_sweep(Path("a b/s").resolve())
    assert all("4 runs: 4 ok" in out for out in outs)
    assert "2 at once, OMP_NUM_THREADS=1 each (as set)" in outs[0]
    for job in sweep.jobs:
        log = (sweep.path(job) / "job.log").read_text()
        assert log.count("$ mprun") == 1
        assert differing(sweep.path(job), alone(job.words, f"alone{job.number}")) == []


@pytest.mark.slow
def test_sixteen_jobs_at_once(folder):
    code, out = call(["-m", *PLAIN, "seed=range(16)", "sweep.jobs=16", "hydra.sweep.dir=s"])
    assert code == 0, out
    sweep = read_sweep(Path("s").resolve())
    assert len({job.folder for job in sweep.jobs}) == 16
    assert [result["seed"] for result in results(sweep)] == list(range(16))
    assert "16 runs: 16 ok" in out


@pytest.mark.slow
def test_jobs_of_the_basic_launcher_equal_their_single_runs(folder):
    """One process for all: kernels for FP16, determinism, data that changes torch's defaults; then FP32, to the last bit."""
    words = ["-m", *ROWS, "train.epochs=1", "hydra/launcher=basic", "hydra.sweep.dir=s",
             "precision=fp16_dynamic,fp32", "deterministic=true,false"]  # fmt: skip
    code, out = call(words)
    assert code == 0, out
    sweep = read_sweep(Path("s").resolve())
    assert len(sweep.jobs) == 4
    flags = [json.loads((sweep.path(job) / "env.json").read_text())["determinism"]["algorithms"] for job in sweep.jobs]
    assert flags == [True, False, True, False]
    for job in sweep.jobs:
        assert differing(sweep.path(job), alone(job.words, f"alone{job.number}")) == []
    code, out = call(words)
    assert (code, out.count("done before")) == (0, 0), "nothing is handed to the launcher any more"
    assert "all jobs of this sweep are finished" in out


def test_what_a_run_in_this_process_changes_is_put_back(monkeypatch):
    from mprun.commands.sweep_task import contained

    monkeypatch.setenv("WANDB_MODE", "offline")
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision, matmul.fp32_precision
    place = os.getcwd()
    with contained():
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        cudnn.benchmark, cudnn.deterministic = not before[0], not before[1]
        cudnn.conv.fp32_precision = matmul.fp32_precision = "tf32"
        os.environ["WANDB_MODE"] = "online"
        os.environ["LEFT_OVER"] = "1"
        os.chdir("/")
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert (cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision, matmul.fp32_precision) == before
    assert os.environ["WANDB_MODE"] == "offline"
    assert "LEFT_OVER" not in os.environ
    assert os.getcwd() == place


@pytest.mark.slow
def test_a_sweep_over_recipes_of_the_user_s_own_and_of_ours(folder):
    Path("a.yaml").write_text("# one\ntrain:\n  clip_norm: 0.5\n")
    Path("b.yaml").write_text("# two\ntrain:\n  clip_norm: 0.25\n")
    code, out = call(["-m", *PLAIN, "recipe=./a.yaml,./b.yaml"])
    assert code == 0, out
    sweep = the_sweep()
    names = [json.loads((sweep.path(job) / "env.json").read_text())["recipe"]["name"] for job in sweep.jobs]
    assert names == [f"{folder}/a.yaml", f"{folder}/b.yaml"]
    assert [to_plain(compose(job.words).config)["train"]["clip_norm"] for job in sweep.jobs] == [0.5, 0.25]


def test_other_words_do_not_go_into_the_folder_of_a_sweep(folder, capsys):
    assert main(["-m", *PLAIN, "optimizer.lr=bad,-1", "hydra.sweep.dir=s"]) == 1
    assert main(["-m", *PLAIN, "optimizer.lr=bad,-2", "hydra.sweep.dir=s"]) == 2
    assert "holds the sweep of other words" in capsys.readouterr().err
    assert main(["resume", "s", "seed=4"]) == 2
    assert "would make another sweep" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("submitit", ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]),
    ],
)
def test_other_launchers_give_the_same_folders_and_skip_what_is_finished(package, words, folder):
    pytest.importorskip(f"hydra_plugins.hydra_{package}_launcher")
    Path("a.yaml").write_text("# one\ntrain:\n  clip_norm: 0.5\n")
    sweep_words = ["-m", *SHORT, "seed=0,1", "recipe=./a.yaml", "optimizer.lr=0.01,bad", "hydra.sweep.dir=s"]
    code, out = call([*sweep_words, *words])
    assert code == 1, out
    sweep = read_sweep(Path("s").resolve())
    assert [result["status"] for result in results(sweep)] == ["ok", "failed", "ok", "failed"]
    for job in sweep.jobs:
        if job.hash:
            assert job.folder == config_hash(to_plain(compose(job.words).config))
            assert differing(sweep.path(job), alone(job.words, f"alone{job.number}")) == []
    before = [(sweep.path(job) / "job.log").stat().st_mtime_ns for job in sweep.jobs if job.hash]
    code, out = call(sweep_words)  # by the processes of our own
    assert out.count("done before") == 2
    assert "4 runs: 2 ok, 2 failed" in out or "4 runs: 2 failed, 2 ok" in out
    assert before == [(sweep.path(job) / "job.log").stat().st_mtime_ns for job in sweep.jobs if job.hash]
