"""What W&B's own file holds after whole runs, read back with W&B's own reader: every kind of record, and nothing secret."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mprun.compose import compose
from mprun.tracking import read_metrics
from tests.test_tracking import ROOT, best, history_of, records_of, summary_of

KEY, TOKEN, PASSWORD = "a1b2c3d4" * 5, "environment-token-0123456789", "hunter2secret"
TOY = [
    "trust=[tests]", "device=cpu", "train.log_every=1", "model=python", "model.name=tests.case_code:toy", "dataset=python",
    "dataset.name=tests.case_code:targets", "dataset.task=regression", "train.batch_size=1", "train.shuffle=false",
    "train.epochs=1", "schedule=constant", "optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.1", "precision=fp32",
]  # fmt: skip
# Five overflows at the first weights, then it trains.
QUICK = [
    "model=mlp", "model.kwargs.hidden=[8]", "precision=fp16_dynamic", "precision.loss_scale.init=1e7", "dataset.limit=256",
    "device=cpu", "train.log_every=1", "train.eval_every=4",
]  # fmt: skip


def environment(cwd: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    home = {"HOME": str(cwd / "home"), "NETRC": str(cwd / "netrc"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**clean, **home, "WANDB_X_DISABLE_STATS": "true", **more}


def mprun(cwd: Path, *lines: list[str], **environ: str) -> str:
    """Run command lines one after the other in one process of their own. Returns what was printed, errors too."""
    code = """
import json, sys
lines = json.loads(sys.argv.pop())
from mprun.cli import main
for words in lines:
    sys.argv[1:] = words  # W&B records them
    print("status", main(words))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)],
        cwd=cwd, env=environment(cwd, **environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def newest(run_dir: Path) -> Path:
    (entry,) = [json.loads((run_dir / "result.json").read_text())["wandb"]]
    return run_dir / entry["dir"]


def logged(run_dir: Path, *, effective: bool = True) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir, effective=effective) if record["kind"] != "event"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run, its second life, and a sweep of two of which one diverges, in one process."""
    cwd = tmp_path_factory.mktemp("records")
    first = [
        *QUICK, "train.steps=10", "train.checkpoint_every=7", "train.keep=3", "tracking.mode=offline", "tracking.log_checkpoint=last",
        "tracking.tags=[a,b c]", "tracking.project=p", "hydra.run.dir=one",
    ]  # fmt: skip
    secret = [
        *QUICK, "train.steps=1", "tracking.mode=offline", "tracking.log_checkpoint=best", "hydra.run.dir=secret",
        f"meta.storage='sqlite://user:{PASSWORD}@host/db'", f"meta.api_key={PASSWORD}", f"meta.note='with {TOKEN}'",
        "meta.max_tokens=8",
    ]  # fmt: skip
    back = ["resume=one/checkpoints/step_7.pt", "train.steps=12"]
    sweep = ["-m", *TOY, "dataset.kwargs.values=[0.1],[nan]", "tracking.mode=offline", "hydra.sweep.dir=many"]
    environ = {"WANDB_API_KEY": KEY, "MY_SERVICE_TOKEN": TOKEN}
    said = mprun(cwd, secret, first, back, sweep, **environ)
    lives = sorted((cwd / "one" / "wandb").glob("offline-run-*"))  # their names begin with the time
    assert len(lives) == 2
    return {"cwd": cwd, "said": said, "one": lives[:1]}


def test_every_row_is_there_once_skips_too(ran: dict[str, Any]) -> None:
    run_dir, (first,) = ran["cwd"] / "one", ran["one"]
    rows = history_of(records_of(first))
    own = [record for record in logged(run_dir, effective=False) if record["segment"] == 0]
    kinds = [record["kind"] for record in own]
    assert min(kinds.count(kind) for kind in ("train", "val", "skip")) >= 3
    assert [(row["step"], row["attempt"]) for row in rows] == [(record["step"], record["attempt"]) for record in own]
    for row, record in zip(rows, own, strict=True):
        keys = [key for key in record if "/" in key and (record["kind"] != "skip" or key.startswith("precision/"))]
        assert {key: row[key] for key in keys} == pytest.approx({key: record[key] for key in keys}, nan_ok=True)
        assert {key for key in row if "/" in key and not key.startswith("probe/")} == set(keys)
        # Histograms of modules come with the samples of the probe, and with nothing else.
        drawn = {key.split(".")[0] for key in row if key.startswith("probe/")}
        assert (
            drawn >= {"probe/0/activation", "probe/model/activation_grad"} if record["kind"] == "probe" else not drawn
        )


def test_one_axis_for_training_and_validation(ran: dict[str, Any]) -> None:
    metrics = {
        entry.get("name") or entry["glob_name"]: entry for entry in records_of(newest(ran["cwd"] / "one"))["metric"]
    }
    assert metrics["*"]["step_metric"] == metrics["val/top1"]["step_metric"] == "step"
    assert metrics["val/loss"]["summary"] == {"last": True, "min": True}
    assert metrics["val/top1"]["summary"] == {"last": True, "max": True}


def test_two_lives_one_run_and_all_steps(ran: dict[str, Any]) -> None:
    """Saved at 7, ended at 10, gone on from 7 to 12: W&B's newest file has every step once, with the numbers that count."""
    run_dir = ran["cwd"] / "one"
    records = records_of(newest(run_dir))
    assert newest(run_dir) != ran["one"][0]
    assert records["run"][0]["run_id"] == records_of(ran["one"][0])["run"][0]["run_id"]
    rows, own = history_of(records), logged(run_dir)
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert list(losses) == list(range(1, 13))
    assert losses == pytest.approx({r["step"]: r["train/loss"] for r in own if r["kind"] == "train"})
    assert len(rows) == len(own)
    assert [row["_step"] for row in (entry["item"] for entry in records["history"])] == list(range(len(rows)))
    assert "less than" not in ran["said"]
    assert not any("less than the current step" in path.read_text() for path in run_dir.rglob("debug*.log"))
    raw = read_metrics(run_dir)
    assert {record["segment"] for record in raw} == {0, 1}


def test_what_is_known_of_the_run(ran: dict[str, Any]) -> None:
    run_dir = ran["cwd"] / "one"
    records = records_of(newest(run_dir))
    (run,) = records["run"]
    assert (run["project"], run["job_type"], run["tags"]) == ("p", "train", ["a", "b c"])
    assert run["display_name"] == "digits-mlp-fp16_dynamic"
    config = run["config"]["update"]
    assert config["precision"]["loss_scale"]["init"] == 1e7
    assert config["precision"]["compute_dtype"] == "float16"
    assert config["model"]["kwargs"] == {"hidden": [8]}
    summary = summary_of(records)
    result = json.loads((run_dir / "result.json").read_text())
    assert (summary["status"], summary["steps_applied"], summary["steps_skipped"]) == (
        "ok",
        12,
        result["steps_skipped"],
    )
    assert best(summary, "val/top1", "max") == pytest.approx(
        max(r["val/top1"] for r in logged(run_dir) if r["kind"] == "val")
    )
    assert records["exit"][0].get("exit_code", 0) == 0
    assert "alert" not in records


def test_the_table_of_modules_is_in_the_summary(ran: dict[str, Any]) -> None:
    run_dir = ran["cwd"] / "one"
    records, modules = records_of(newest(run_dir)), json.loads((run_dir / "modules.json").read_text())
    table = summary_of(records)["modules"]
    assert (table["_type"], table["nrows"], table["ncols"]) == ("table-file", len(modules), len(modules[0]))
    content = json.loads((newest(run_dir) / "files" / table["path"]).read_text())
    assert content["columns"] == list(modules[0])
    assert content["data"] == [list(row.values()) for row in modules]
    assert any(entry["type"] == "run_table" for entry in records["artifact"])


def test_the_checkpoint_is_an_artifact_with_a_file_of_its_own(ran: dict[str, Any]) -> None:
    run_dir = ran["cwd"] / "one"
    (artifact,) = [entry for entry in records_of(newest(run_dir))["artifact"] if entry["type"] == "model"]
    assert {"last", "step-12", "latest"} == set(artifact["aliases"])
    assert json.loads(artifact["metadata"]) == {"step": 12, "status": "ok"}
    (entry,) = artifact["manifest"]["contents"]
    assert entry["path"] == "last.pt"
    kept, last = Path(entry["local_path"]), run_dir / "checkpoints" / "last.pt"
    assert kept.samefile(last)
    assert kept.is_relative_to(run_dir / "wandb")
    assert [path.name for path in kept.parent.iterdir()] == ["last-step-12.pt"]


def test_nothing_secret_leaves(ran: dict[str, Any]) -> None:
    cwd = ran["cwd"]
    records = records_of(newest(cwd / "secret"))
    meta = records["run"][0]["config"]["update"]["meta"]
    assert meta == {"storage": "sqlite://***@host/db", "api_key": "***", "note": "with ***", "max_tokens": 8}
    args = records["environment"][0]["args"]
    assert "meta.max_tokens=8" in args
    assert "meta.api_key=***" in args
    assert "secret" not in [entry.get("name", "") for entry in records["artifact"]]
    for secret in (PASSWORD, TOKEN, KEY):
        places = [
            path for base in (cwd / "secret" / "wandb", cwd / "home") for path in base.rglob("*") if path.is_file()
        ]
        assert places
        assert [path for path in places if secret.encode() in path.read_bytes()] == []
    # A checkpoint holds the configuration, so with a secret in it, it stays at home.
    assert [entry for entry in records["artifact"] if entry["type"] == "model"] == []
    assert "W&B does without the checkpoint (the configuration in it holds a secret)" in ran["said"]
    assert PASSWORD in (cwd / "secret" / "config.yaml").read_text(), "the run can be run again"


def test_jobs_of_a_sweep_are_a_group_and_the_diverged_one_is_closed_as_failed(ran: dict[str, Any]) -> None:
    jobs = sorted(path.parent for path in (ran["cwd"] / "many").rglob("result.json"))
    assert len(jobs) == 2
    good, bad = (
        records_of(newest(job))
        for job in sorted(jobs, key=lambda job: '"diverged"' in (job / "result.json").read_text())
    )
    groups = {records["run"][0]["run_group"] for records in (good, bad)}
    assert len(groups) == 1
    assert groups != {""}
    assert good["run"][0]["run_id"] != bad["run"][0]["run_id"]
    assert good["exit"][0].get("exit_code", 0) == 0
    assert bad["exit"] == [{**bad["exit"][0], "exit_code": 1}]
    assert summary_of(bad)["status"] == "diverged"
    (alert,) = bad["alert"]
    assert (alert["title"], alert["level"]) == ("Run diverged", "ERROR")
    assert "nan" in alert["text"]
    assert "alert" not in good


def test_commands_for_the_upload_are_printed(ran: dict[str, Any]) -> None:
    (line, *_) = [line for line in ran["said"].splitlines() if "wandb sync" in line and "one/" in line]
    path = line.rpartition("wandb sync ")[2]
    assert (ran["cwd"] / path).is_dir()


# --- a killed run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "all_of_it", [pytest.param(False, marks=pytest.mark.slow), True], ids=["the run", "its W&B service too"]
)
def test_the_file_of_a_killed_run_can_be_read(tmp_path: Path, all_of_it: bool) -> None:
    words = [*QUICK, "train.steps=1000000", "tracking.mode=offline", "hydra.run.dir=run"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "mprun", *words], cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL,
            stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 300):
            assert time.monotonic() < deadline, (tmp_path / "said").read_text()
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
    finally:
        if all_of_it:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    time.sleep(0.5)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    rows, own = history_of(records_of(folder)), logged(tmp_path / "run")
    # W&B works on its own time: it has the beginning, without a gap, and most of it.
    assert len(own) // 2 <= len(rows) <= len(own)
    assert [(r["step"], r["attempt"]) for r in rows] == [(r["step"], r["attempt"]) for r in own[: len(rows)]]


# --- W&B's own sweeps ------------------------------------------------------------------------------------------------

SWEEP = ROOT / "examples" / "wandb_sweep.yaml"


def choices(parameter: dict[str, Any]) -> list[Any]:
    if "value" in parameter:
        return [parameter["value"]]
    return list(parameter["values"]) if "values" in parameter else [parameter["min"], parameter["max"]]


def generated(settings: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """The command that W&B's agent makes of the file for these values; done with the agent's own functions."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    known = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    known |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [settings["program"]]}
    command: list[str] = []
    for word in utils.create_sweep_command(list(settings["command"])):
        inside = re.fullmatch(r"\$\{(.*)\}", word)
        command += known[inside[1]] if inside else [word]
    return command


def test_every_command_of_the_example_sweep_is_a_legal_run() -> None:
    settings = yaml.safe_load(SWEEP.read_text())
    parameters = settings["parameters"]
    every = [choices(parameter) for parameter in parameters.values()]
    for row in range(max(map(len, every))):  # every value once
        values = [options[row % len(options)] for options in every]
        command = generated(settings, dict(zip(parameters, values, strict=True)))
        assert command[:4] == ["/usr/bin/env", "python", "-m", "mprun"]
        config = compose(command[4:]).config
        given = dict(zip(parameters, values, strict=True))
        assert config.optimizer.lr == given["optimizer.lr"]
        assert config.optimizer.betas == given["optimizer.betas"]
        assert config.train.clip_norm == given["train.clip_norm"]
        assert (config.precision.name, config.model.name) == (given["precision"], "resnet")


def test_a_run_of_the_example_sweep_is_the_agent_s(tmp_path: Path) -> None:
    settings = yaml.safe_load(SWEEP.read_text())
    values = {key: choices(parameter)[0] for key, parameter in settings["parameters"].items()}
    command = [*generated(settings, values), "train.steps=2", "dataset.limit=64", "train.batch_size=32", "device=cpu"]
    parameters = tmp_path / "config.yaml"
    parameters.write_text(
        yaml.safe_dump({"wandb_version": 1, **{key: {"value": value} for key, value in values.items()}})
    )
    environ = environment(
        tmp_path, WANDB_SWEEP_ID="swp12345", WANDB_RUN_ID="run12345", WANDB_SWEEP_PARAM_PATH=str(parameters),
        WANDB_PROJECT="of-the-sweep", WANDB_MODE="offline", PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "outputs" / "digits-resnet-fp32").iterdir()
    records = records_of(newest(run_dir))
    (run,) = records["run"]
    assert (run["run_id"], run["sweep_id"], run["run_group"]) == ("run12345", "swp12345", "swp12345")
    assert run["project"] == "of-the-sweep"
    assert run["config"]["update"]["optimizer"]["lr"] == 0.0003
    assert settings["metric"]["name"] in {key for row in history_of(records) for key in row}
    assert json.loads((run_dir / "result.json").read_text())["wandb"]["id"] == "run12345"


def test_the_page_shows_what_the_example_does() -> None:
    page, settings = (ROOT / "docs" / "tracking.md").read_text(), yaml.safe_load(SWEEP.read_text())
    (shown,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)]
    assert shown["command"] == settings["command"]
    assert shown["parameters"].items() <= settings["parameters"].items()
    assert "`examples/wandb_sweep.yaml`" in page
