"""The check of a GPU, as far as a CPU can show it: its sections run, and say what is wrong when something is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.conftest import CPU

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    """``bench("name")`` imports a script of ``bench/`` afresh."""
    monkeypatch.syspath_prepend(str(BENCH))
    for path in BENCH.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield import_module
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def asked(bench, tmp_path):
    return bench("gpu_section").Asked(CPU, True, time.monotonic() + 300, tmp_path / "section.json")


def shell(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BENCH / "gpu.sh"), *words], capture_output=True, text=True, check=False, env={**os.environ, "PYTHON": sys.executable, **env}
    )  # fmt: skip


# --- sections ---------------------------------------------------------------------------------------------------------


def test_both_contestants_of_a_row_do_the_same_work(bench, asked):
    found = bench("gpu_speed").speed(asked)
    rows = {row["row"]: row for row in found["rows"]}
    assert set(rows) == {"resnet/fp32/eager", "vit/fp16_dynamic/eager", "vit/fp16_master_dynamic/eager"}
    assert rows["resnet/fp32/eager"]["apart"] == 0, "in FP32 to the last bit, channels last"
    assert all(row["apart"] < 1e-3 for row in rows.values())
    assert all(row["images_per_s"] == pytest.approx(4e3 / row["mprun_ms"]) for row in rows.values())
    assert len(found["left_out"]) == 1
    assert "resnet/tf32/eager: precision.fp32_matmul=tf32" in found["left_out"][0]
    assert json.loads(asked.json.read_text())["rows"], "what is there is written after every row"


def test_rows_without_time_are_left_out_and_named(bench, asked):
    from dataclasses import replace

    speed = bench("gpu_speed")
    late = replace(asked, tiny=False, deadline=time.monotonic() + 1)
    found = speed.speed(late)
    assert found["rows"] == []
    assert len(found["left_out"]) == len(speed.ROWS) == len(set(speed.ROWS))
    assert found["left_out"][0] == "vit/bf16/eager: no time was left"


def test_predictions_go_by_the_rows_names(bench, asked):
    speed = bench("gpu_speed")
    found = speed.predict(asked)
    assert {*found["bytes"]} == {speed.title(*row) for row in speed.TINY_ROWS if row[1] != "tf32"}
    assert all(2**20 < size < 2**28 for size in found["bytes"].values())


def test_parity_tells_a_module_that_computes_something_else(bench, asked, monkeypatch):
    """Both sides in FP16 differ by roundings; one side with another normalisation in one block is found, by name."""
    parity = bench("gpu_parity")
    words = ["model=vit", "dataset=digits", "train.batch_size=16", "model.kwargs.depth=2", "precision=fp16_dynamic"]
    good = parity.compared(asked, words, reduced=True)
    assert {*good} == {"output", "gradient", "parameter"}
    assert all(parity.holds(kind, row, "vit", "fp16_dynamic") for kind, row in good.items())
    assert all(row["least_db"] < parity.EXACT_DB for row in good.values()), "two kernels, not one against itself"

    numbers, calls = parity.numbers, []

    def coarse(config, model, batch, device):
        calls.append(device)
        if len(calls) == 2:
            norm = model.blocks[1].norm2
            norm.weight.data += torch.linspace(-0.1, 0.1, len(norm.weight))
        return numbers(config, model, batch, device)

    monkeypatch.setattr(parity, "numbers", coarse)
    bad = parity.compared(asked, words, reduced=True)
    assert not parity.holds("output", bad["output"], "vit", "fp16_dynamic")
    assert any(name.startswith("blocks.1.") for name, _ in bad["output"]["worst"])


def test_waiting_is_not_asked_for_on_a_cpu_and_the_steps_run(bench, asked):
    found = bench("gpu_steps").sync(asked)
    assert found["status"] == "skipped"
    assert {*found["outcomes"]} == {"resnet fp16_dynamic"}
    assert all(1 in outcomes for outcomes in found["outcomes"].values()), "a skip must not wait either"


@pytest.mark.slow
def test_dtypes_follow_the_table_and_a_wrong_one_is_told(bench, asked, monkeypatch):
    checks = bench("gpu_checks")
    found = checks.dtypes(asked)
    assert (found["status"], found["differ"]) == ("ok", [])
    assert found["compared"] > 700

    import tests.test_cuda_operation_list as table

    monkeypatch.setattr(table, "CASES", {"exp": lambda t: t(3) + 1})  # stays in half
    found = checks.dtypes(asked)
    assert found["status"] == "failed"
    assert {row["operation"] for row in found["differ"]} == {"exp"}


@pytest.mark.slow
def test_the_scale_goes_the_same_way(bench, asked):
    found = bench("gpu_steps").trajectory(asked)
    assert found["status"] == "ok"
    assert found["cpu"]["first_skips"] == found["gpu"]["first_skips"] > 3
    assert len(found["cpu"]["scales"]) == found["steps"] == 24


# --- around them ------------------------------------------------------------------------------------------------------

ROW = {"row": "resnet/fp16_master_dynamic/eager", "model": "resnet", "policy": "fp16_master_dynamic", "compiled": False, "batch": 256,
       "mprun_ms": 103.0, "plain_ms": 100.0, "ratio": 1.03, "images_per_s": 2485.4, "peak_bytes": 22 * 2**30,
       "predicted_bytes": 19 * 2**30}  # fmt: skip

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_gpu" name="test_a[fp16]" time="1"/>
<testcase classname="tests.test_gpu" name="test_b" time="1"><failure message="RuntimeError: illegal access">long</failure></testcase>
<testcase classname="tests.test_gpu" name="test_c" time="0"><skipped message="no TF32 units"/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest_is_counted(bench, tmp_path):
    path = tmp_path / "r.xml"
    path.write_text(REPORT)
    counted = bench("gpu_checks").counted
    found = counted(path, on_gpu=True)
    assert (found["status"], found["passed"], found["skipped"]) == ("failed", 1, ["test_gpu::test_c"])
    assert found["failed"] == [{"test": "test_gpu::test_b", "error": "RuntimeError: illegal access"}]
    path.write_text('<testsuites><testcase classname="t" name="n"><skipped/></testcase></testsuites>')
    assert counted(path, on_gpu=True)["status"] == "failed", "on a GPU some test must have run"
    assert counted(path, on_gpu=False)["status"] == "ok"


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("raise SystemExit(3)", "error", ""),
        ("import os; os.abort()", "error", ""),
        ("print('a word'); import time; time.sleep(60)", "timeout", "a word"),
        ('import sys, pathlib; pathlib.Path(sys.argv[5]).write_text(\'{"status": "ok"}\')', "ok", None),
    ],
)
def test_a_section_that_breaks_costs_itself_only(bench, tmp_path, monkeypatch, script, status, said):
    gpu = bench("gpu")
    monkeypatch.setattr(gpu, "BENCH", tmp_path)
    monkeypatch.setattr(gpu, "WRAP_UP_S", -4.0)
    (tmp_path / "section.py").write_text(script)
    job = gpu.Job("cpu", True, tmp_path, 1)
    found = job.run(gpu.Section("suite", "section.py", 9), 5)
    assert found["status"] == status, found
    assert found["seconds"] < 20
    assert said is None or said in found["log"]
    assert gpu.well({"suite": found}) is (status == "ok")
    late = job.run(gpu.Section("suite", "section.py", 9), 1)
    assert (late["status"], late["reason"]) == ("no time", "no time was left")


def main(bench, monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    return int(bench("gpu").main())


def test_correctness_that_never_ran_for_want_of_time_is_not_well(bench, tmp_path, monkeypatch, capsys):
    words = ["--device", "cpu", "--tiny", "--limit", "8", "--out", str(tmp_path)]
    assert main(bench, monkeypatch, *words) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["ok"] is False
    assert {section["status"] for section in found["sections"].values()} == {"no time"}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "NOT WELL: no time was left for suite, dtypes, sync, trajectory, parity"
    assert main(bench, monkeypatch, *words, "--only", "speed") == 0, "speed never decides"
    assert capsys.readouterr().out.splitlines()[-1] == "all well; no time was left for speed"


def test_the_verdict_tells_no_time_from_cannot_run_here(bench):
    gpu = bench("gpu")
    here = {"suite": {"status": "ok"}, "sync": {"status": "skipped"}, "speed": {"status": "failed"}}
    assert (gpu.well(here), gpu.verdict(here)) == (True, "all well; not ok, but never deciding: speed")
    late = {**here, "dtypes": {"status": "no time"}, "parity": {"status": "timeout"}, "speed": {"status": "ok"}}
    assert (gpu.well(late), gpu.verdict(late)) == (False, "NOT WELL: parity; no time was left for dtypes")


@pytest.mark.parametrize("limit", ["0", "-5", "nan", "inf"])
def test_a_limit_that_is_none_is_refused_in_one_line(bench, tmp_path, monkeypatch, capsys, limit):
    words = ["--device", "cpu", "--tiny", f"--limit={limit}", "--out", str(tmp_path / "out")]
    assert main(bench, monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert f"--limit {float(limit):g}: give seconds above 0" in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "measures"), [(["cpu"], False), (["cpu", "--tiny"], False), (["cuda", "--tiny"], False), (["cuda"], True)])  # fmt: skip
def test_what_measures_nothing_meets_no_target(bench, tmp_path, monkeypatch, capsys, words, measures):
    gpu = bench("gpu")
    monkeypatch.setattr(gpu, "BENCH", tmp_path)
    monkeypatch.setattr(gpu, "machine", lambda device: {"gpu": {"name": "some GPU"} if device == "cuda" else None})
    code = f"import json, sys; json.dump(dict(status='ok', rows=[{ROW!r}], left_out=[]), open(sys.argv[5], 'w'))"
    (tmp_path / "gpu_speed.py").write_text(code)
    assert main(bench, monkeypatch, "--only", "speed", "--out", str(tmp_path), "--device", *words) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["measures"], len(found["table"])) == (measures, 2 if measures else 0)
    assert found["sections"]["speed"]["rows"] == [ROW]
    assert ("nothing was measured: gpu.json's table is left empty" in capsys.readouterr().out) is not measures


def test_lines_fit_the_screen_and_the_table_answers_targets(bench):
    table = bench("gpu_table")
    speed = {"status": "ok", "seconds": 100.0, "rows": [ROW], "left_out": ["vit/bf16/compiled: no time was left"]}
    sections = {"speed": speed}
    lines = [*table.speed_lines(sections), *table.lines_of("speed", sections["speed"])]
    assert all(len(line) <= 80 for line in lines)
    assert any("no time was left" in line for line in lines)
    step, memory = table.table_of(sections)
    assert (step["ratio"], step["met"]) == (1.03, True)
    assert (memory["ratio"], memory["met"]) == (pytest.approx(22 / 19), False)
    assert "-13.6%" in table.speed_lines(sections)[1]
    without = {"speed": {"rows": [{**ROW, "peak_bytes": None, "compiled": True}]}}
    only = table.table_of(without)
    assert [entry["what"] for entry in only] == ["resnet fp16_master_dynamic compiled, batch 256: a step"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_reasons_are_wrapped_and_whole(bench, width):
    reason = "torch tells of waiting on CUDA only; the steps were made all the same, and so " + "on and " * 20 + "on"
    long = {"status": "failed", "seconds": 1.0, "passed": 1, "skipped": [], "error": reason,
            "failed": [{"test": f"test_gpu::test_{n}", "error": reason} for n in range(14)]}  # fmt: skip
    short = {"status": "skipped", "seconds": 1.0, "reason": reason}
    for found, times in ((short, 1), (long, 13)):
        lines = bench("gpu_table").lines_of("suite", found, width)
        assert all(len(line) <= width for line in lines)
        assert " ".join(" ".join(lines).split()).count(reason) == times
    assert lines[-1].strip() == "and 2 more, in gpu.json"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fetch-wheels"], "--fetch-wheels needs one folder"),
        (["--wheels", "/nowhere", "--tiny"], "no .whl file there"),
        (["--tiny", "--wheels"], "gpu.sh: --wheels needs a folder"),
        (["--wheels", "--tiny"], "gpu.sh: --wheels needs a folder"),
        (["--fetch-wheels", "--python"], "gpu.sh: --python needs a version such as 3.12"),
        (["--device", "cpu", "--tiny"], "--out is needed"),
    ],
)
def test_wrong_words_are_refused(words, said):
    done = shell(*words)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not said.startswith("gpu.sh") or done.stderr == f"{said}\n"


def wheel(folder: Path, name: str, code: str) -> None:
    info = f"{name}-99.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_wheels_come_last_and_are_there(tmp_path):
    """A package that the machine has is not replaced; one that it lacks is found, by child processes too."""
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "omegaconf", "raise ImportError('the one of the wheels')")
    wheel(tmp_path / "wheels", "sklearn_only_in_wheels", "")
    words = ["--device", "cpu", "--tiny", "--only", "predict", "--out", str(tmp_path / "out")]
    done = shell("--wheels", str(tmp_path / "wheels"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["sections"]["predict"]["status"] == "ok"
    assert (found["gpu"], found["ok"]) == (None, True)
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ncase $1 in */gpu.py) exec {sys.executable} -c 'import sklearn_only_in_wheels, omegaconf' ;; esac\n"
                      f'exec {sys.executable} "$@"\n')  # fmt: skip
    script.chmod(0o755)
    assert shell("--wheels", str(tmp_path / "wheels"), PYTHON=str(script)).returncode == 0
