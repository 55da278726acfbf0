"""``mprun table``: every folder is a row, whatever is in it; what differs is a column; nothing wraps."""

import csv
import io
import json
import math
import os
import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import failed, made_run, many, ok

from mprun.cli import main
from mprun.commands.plot import VALUED as plot_flags
from mprun.commands.table import VALUED as table_flags
from mprun.report.run_folders import find_runs, flatten, natural, read_run, short_names
from mprun.report.runs_query import in_order, matches
from mprun.report.runs_table import RunsTable, Spread, build_table, differing, short, token
from mprun.report.table_text import cell, shown, terminal
from mprun.runs import locked

REASON = "NonFiniteError: step 3 (attempt 13): the loss is nan at precision=fp32, loss scale 1\nsecond line"


@pytest.fixture
def sweep(tmp_path):
    """Three learning rates, three seeds; the largest rate diverges, one run of the middle one fails."""
    folder = tmp_path / "outputs" / "sweeps" / "20260101-120000-abc123"
    number = 0
    for lr, base in ((1e-3, 0.5), (0.01, 0.25), (3.0, None)):
        for seed in range(3):
            bad = base is None or (lr == 0.01 and seed == 1)
            result = failed(REASON) if bad else ok(base + seed / 100, 1 - base - seed / 100, steps_skipped=seed)
            made_run(folder / str(number), "model=mlp", result=result, seed=seed, **{"optimizer.lr": lr})
            number += 1
    return folder


def printed(capsys, *words, columns="80"):
    """What a command line prints on stdout; it must end well."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = columns
    try:
        assert main(["table", *map(str, words)]) == 0
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return capsys.readouterr().out


def rows_of(capsys, *words):
    """The rows of ``--format json``."""
    return json.loads(printed(capsys, *words, "--format", "json"))


# --- finding and reading


def test_runs_are_found_below_a_folder_once_and_in_natural_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [made_run(tmp_path / "outputs" / "a" / str(number), "model=mlp") for number in (10, 9, 1)]
    (runs[0] / ".hydra").mkdir()
    (runs[0] / ".hydra" / "config.yaml").write_text("{}")  # a run's own files are not runs
    (runs[0] / "wandb" / "files").mkdir(parents=True)
    (runs[0] / "wandb" / "files" / "config.yaml").write_text("{}")
    (tmp_path / "outputs" / "latest").symlink_to("a/10")
    found = find_runs([])
    assert [run.name for run in found] == ["1", "9", "10"]
    assert find_runs(["outputs", "outputs/a/9", "outputs/a"]) == found
    assert find_runs(["latest"])[0].name == "10"
    assert find_runs(["outputs/a/9/config.yaml"])[0].name == "9"


@pytest.mark.parametrize(
    ("words", "expected"), [(["nope"], "no such folder"), ([], "there is no run yet"), (["empty"], "no run lies in")]
)
def test_a_folder_without_runs_is_refused_by_name(words, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["table", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("result.json", '{"status": "ok", "fin', "result.json: not JSON"),
        ("result.json", "[1, 2]", "result.json: not a mapping of keys"),
        ("result.json", "{}", "result.json: says no status"),
        ("result.json", "\xff", "result.json: not JSON"),
        ("config.yaml", "a: [1\nb: {", "config.yaml: not YAML (line"),
        ("config.yaml", "- 1\n- 2\n", "config.yaml: not a mapping of keys"),
        ("config.yaml", "", "config.yaml: not a mapping of keys"),
        ("config.yaml", "a: !!python/object/apply:os.system ['true']", "config.yaml: not YAML"),
        ("config.yaml", None, "config.yaml: no such file"),
    ],
)
def test_a_broken_folder_is_a_row_that_says_so(file, text, reason, tmp_path, capsys):
    made_run(tmp_path / "good", "model=mlp", result=ok(0.5, 0.9))
    bad = made_run(tmp_path / "bad", "model=mlp", result=ok(0.5, 0.9))
    if text is None:
        (bad / file).unlink()
    else:
        (bad / file).write_bytes(text.encode("latin-1"))
    row = read_run(bad)
    assert row.status == "broken"
    assert reason in row.reason
    out = printed(capsys, tmp_path)
    assert reason in out
    assert "2 runs: 1 broken, 1 ok" in out
    for form in ("markdown", "csv", "json"):
        assert reason in printed(capsys, tmp_path, "--format", form)
    assert "broken" in printed(capsys, tmp_path, "--by", "seed")


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers(-(2**53), 2**53) | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)))  # fmt: skip
def test_no_result_of_any_shape_breaks_the_table(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("any")
    made_run(folder / "a", "model=mlp", result=ok(0.5, 0.9))
    odd = {"status": value, "error": value, "final": value, "best": value, "peak_memory": value, "train_s": value}
    made_run(folder / "b", "model=mlp", result=odd, seed=1)
    runs = [read_run(path) for path in find_runs([str(folder)])]
    for table in (build_table(runs), build_table(runs, by=["seed"])):
        assert all(line.cell_len <= 60 for line in terminal(table, 60))


def test_a_run_without_result_is_told_from_its_lock(tmp_path):
    run = made_run(tmp_path / "a", "model=mlp")
    assert read_run(run).status == "running?"
    with locked(run):
        assert read_run(run).status == "running"
        assert read_run(run).status == "running"  # asking does not take it away
    assert read_run(run).status == "killed"


def test_folders_are_named_by_what_tells_them_apart(tmp_path):
    stamps = [tmp_path / "x" / "20260101-120000-abc123", tmp_path / "y" / "20260101-120000-def456"]
    assert short_names(stamps) == ["abc123", "def456"]
    assert short_names([*stamps, tmp_path / "z" / "20260102-120000-abc123"])[0] == "x/20260101-120000-abc123"
    assert short_names([tmp_path / "s" / "0", tmp_path / "s" / "1"]) == ["0", "1"]
    assert short_names(stamps[:1]) == ["20260101-120000-abc123"]


@given(st.lists(st.integers(0, 10**20)), st.lists(st.text()))
def test_natural_order_is_that_of_numbers_and_compares_whatever_there_is(numbers, texts):
    assert sorted(map(str, numbers), key=natural) == list(map(str, sorted(numbers)))
    sorted(texts, key=natural)


# --- columns


def test_columns_are_the_keys_that_differ_by_short_names(sweep, capsys):
    head = printed(capsys, sweep).splitlines()[0].split()
    assert head[:4] == ["run", "status", "seed", "lr"]
    assert "batch_size" not in head
    assert [short(key) for key in ("train.steps", "train.ema.decay", "dataset.name")] == [
        "steps",
        "ema.decay",
        "dataset",
    ]
    # train.steps would read like the steps that were applied.
    made_run(sweep / "9", "model=mlp", result=ok(1.0), **{"train.steps": 7})
    assert "train.steps" in printed(capsys, sweep, columns="200").splitlines()[0].split()


def test_a_key_that_follows_from_its_groups_name_is_no_column():
    base = {"model.name": "mlp", "name": "mlp-fp32", "precision.name": "fp32", "precision.compute_dtype": "float32"}
    bf16 = base | {"name": "mlp-bf16", "precision.name": "bf16", "precision.compute_dtype": "bfloat16"}
    assert differing([base, bf16]) == ["precision.name"]
    changed = bf16 | {"precision.compute_dtype": "float16"}
    assert differing([base, bf16, changed]) == ["precision.name", "precision.compute_dtype"]
    assert differing([base, base | {"name": "mine"}]) == ["name"]
    assert differing([base, {}, base | {"model.kwargs.depth": 6, "tracking.mode": "x"}]) == ["model.kwargs.depth"]


def test_values_are_equal_as_the_configuration_means_it():
    assert token(1) == token(1.0)
    assert token(True) != token(1)
    assert token(None) != token("None")
    assert token(math.nan) == token(math.nan)
    assert token([1, 2]) == token([1, 2]) != token([2, 1])


# --- one row over seeds


def test_over_seeds_only_runs_that_ended_well_are_averaged_and_all_are_counted(sweep, capsys):
    rows = rows_of(capsys, sweep, "--by", "seed")
    assert [(row["optimizer.lr"], row["runs"], row["ok"]) for row in rows] == [(1e-3, 3, 3), (0.01, 3, 2), (3.0, 3, 0)]
    values = [0.5, 0.49, 0.48]
    assert rows[0]["val/top1.mean"] == pytest.approx(statistics.mean(values), rel=1e-15)
    assert rows[0]["val/top1.std"] == pytest.approx(statistics.stdev(values), rel=1e-12)
    assert rows[0]["seed"] == [0, 1, 2]
    assert rows[1]["val/loss.mean"] == pytest.approx((0.25 + 0.27) / 2)
    assert (rows[1]["val/loss.n"], rows[1]["status"]) == (2, "2 ok, 1 diverged")
    assert (rows[2]["val/loss.mean"], rows[2]["val/loss.n"]) == ("nan", 0)
    out = printed(capsys, sweep, "--by", "seed")
    assert "0.5100 ± 0.0100 (3)" in out
    assert "0.2600 ± 0.0141 (2/3)" in out
    assert "- (0/3)" in out
    assert "NonFiniteError: step 3" in out
    assert "second line" not in out


def test_a_nan_of_a_run_that_ended_well_is_counted_out(tmp_path, capsys):
    for seed, loss in enumerate((1.0, math.nan, 3.0)):
        made_run(tmp_path / str(seed), "model=mlp", result=ok(loss), seed=seed)
    assert "2.0000 ± 1.4142 (2/3)" in printed(capsys, tmp_path, "--by", "seed")
    assert "nan" in printed(capsys, tmp_path)


def test_a_repeated_seed_is_said(tmp_path, capsys):
    for number, seed in enumerate((0, 0, 1)):
        made_run(tmp_path / str(number), "model=mlp", result=ok(1.0), seed=seed)
    assert "1 run repeats another" in printed(capsys, tmp_path, "--by", "seed")
    assert "repeat" not in printed(capsys, tmp_path)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.none(), max_size=6))
def test_spread_is_that_of_the_finite_values(values):
    finite = [value for value in values if value is not None and math.isfinite(value)]
    spread = Spread.over(values, len(values))
    assert spread.n == len(finite)
    assert math.isnan(spread.mean) if not finite else spread.mean == pytest.approx(statistics.fmean(finite), abs=1e-6)
    if len(finite) > 1:
        assert spread.std == pytest.approx(statistics.stdev(finite), rel=1e-6, abs=1e-6)
    assert math.isnan(spread.std) or spread.n > 1


# --- filters, order, choice


def test_filters_compare_values_and_not_texts(sweep, capsys):
    def count(*filters):
        return len(rows_of(capsys, sweep, *(word for text in filters for word in ("--filter", text))))

    assert count("lr=1e-3") == count("optimizer.lr=0.001") == count("lr=1.0e-03") == 3
    assert count("lr=3", "seed=1,2") == 2
    assert count("status=ok") == 5
    assert count("status=div*") == 4
    assert count("model=mlp") == 9
    assert count("precision=nothing") == 0
    assert count("train.steps=null", "deterministic=false") == 9
    assert matches([0.9, 0.99], "[0.9, 0.99]")
    assert not matches(True, "1")
    assert "0 runs" in printed(capsys, sweep, "--filter", "lr=7")


def test_order_is_by_number_and_what_is_missing_comes_last(sweep, capsys):
    up = [row.get("val/top1") for row in rows_of(capsys, sweep, "--sort", "val/top1")]
    down = [row.get("val/top1") for row in rows_of(capsys, sweep, "--sort", "-val/top1")]
    assert up[:5] == sorted(up[:5])
    assert down[:5] == up[:5][::-1]
    assert up[5:] == down[5:] == [None] * 4
    assert [row["optimizer.lr"] for row in rows_of(capsys, sweep, "--sort=-lr", "--limit", "4")] == [3, 3, 3, 0.01]
    assert "4 are shown" in printed(capsys, sweep, "--limit", "4")


@given(st.lists(st.floats() | st.none() | st.text(max_size=2) | st.integers(-5, 5)), st.booleans())
def test_every_mixture_of_values_has_an_order_that_loses_none(values, descending):
    rows = [{"x": value, "index": index} for index, value in enumerate(values)]
    ordered = in_order(rows, "x", descending=descending)
    assert sorted(row["index"] for row in ordered) == list(range(len(values)))
    numbers = [row["x"] for row in ordered if isinstance(row["x"], int | float) and row["x"] == row["x"]]
    assert numbers == sorted(numbers, reverse=descending)
    assert [row["x"] for row in ordered[: len(numbers)]] == numbers


def test_chosen_columns_hold_everywhere(sweep, capsys):
    words = ("--columns", "lr,best,status")
    assert printed(capsys, sweep, *words).splitlines()[0].split() == ["lr", "best", "top1", "status"]
    assert printed(capsys, sweep, *words, "--format", "csv").splitlines()[:2] == [
        "optimizer.lr,best.value,status",
        "0.001,0.5,ok",
    ]
    assert rows_of(capsys, sweep, *words)[0] == {"optimizer.lr": 0.001, "best.value": 0.5, "status": "ok"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sort", "valloss"], "did you mean 'val/loss'"),
        (["--columns", "kwargs,lrr"], "no run has the key kwargs"),
        (["--by", "val/loss"], "no run has the key val/loss"),
        (["--by", "status"], "keys of the configuration"),
        (["--filter", "lr"], "write key=value"),
        (["--format", "html"], "--format html"),
        (["--limit", "0"], "positive whole number"),
        (["--sort"], "needs a value"),
        (["--sorted", "x"], "did you mean '--sort'"),
        (["lr=3"], "--filter lr=3"),
        (["--columns", "name,init"], "init may mean"),
    ],
)
def test_a_wrong_word_is_refused_with_what_is_legal(words, expected, sweep, capsys):
    assert main(["table", str(sweep), *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 3


@pytest.mark.parametrize(("command", "flags"), [("table", table_flags), ("plot", (*plot_flags, "--skips"))])
def test_the_help_of_a_command_names_its_flags(command, flags, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"mprun {command} [FOLDER ...]")
    assert [flag for flag in flags if flag not in out] == []
    assert max(map(len, out.splitlines())) <= 130


# --- formats


def test_csv_and_json_hold_every_key_at_full_precision(tmp_path, capsys):
    third = 1 / 3
    made_run(tmp_path / "a", "model=mlp", result=ok(third, math.nan, odd={"deep": [1, 2]}), **{"optimizer.lr": third})
    (row,) = csv.DictReader(io.StringIO(printed(capsys, tmp_path, "--format", "csv")))
    (same,) = rows_of(capsys, tmp_path)
    config = flatten(read_run(tmp_path / "a").config)
    assert len(config) > 70
    assert row.keys() == same.keys() >= {*config, "run_dir", "status", "val/loss", "best.step", "odd.deep", "wall_s"}
    assert float(row["val/loss"]) == float(row["optimizer.lr"]) == same["val/loss"] == third
    assert (row["val/top1"], same["val/top1"]) == ("nan", "nan")
    assert (row["odd.deep"], same["odd.deep"]) == ("[1, 2]", [1, 2])
    assert (row["deterministic"], same["deterministic"]) == ("false", False)
    assert (row["train.steps"], same["train.steps"]) == ("", None)
    assert row["run_dir"] == str(tmp_path / "a")  # where it lies, not where it was made


def test_markdown_is_a_table_whatever_the_texts(sweep, capsys):
    made_run(sweep / "9", "model=mlp", result=failed("a | b\nc"), seed=7)
    lines = printed(capsys, sweep, "--format", "markdown").splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1
    assert "a \\| b" in lines[-1]
    assert len(lines) == 12


@pytest.mark.parametrize("width", [30, 80, 160])
@pytest.mark.parametrize("by", [(), ("--by", "seed")])
def test_a_terminal_table_is_aligned_and_never_wider_than_asked(width, by, sweep, capsys):
    out = printed(capsys, sweep, *by, columns=str(width)).splitlines()
    assert max(map(len, out)) <= width
    if width == 30:
        return
    rows = [line for line in out[: out.index("")] if not line.startswith("  Non")]
    end = rows[0].index("val/top1") + len("val/top1")
    for row in rows[1:]:  # right-aligned: the cell ends where its heading ends
        assert not row[end - 1 : end].isspace()
        assert row[end : end + 1] in ("", " ")


def test_a_wider_terminal_shows_more_and_what_is_hidden_is_said(sweep, capsys):
    small, large = printed(capsys, sweep, columns="80"), printed(capsys, sweep, columns="160")
    shown_small, shown_large = small.splitlines()[0].split(), large.splitlines()[0].split()
    assert set(shown_small) < set(shown_large)
    hidden = small[small.index("hidden to fit 80 columns: ") :].splitlines()[0]
    assert all(name in hidden for name in ("peak mem", "ex/s"))
    assert "hidden" not in large
    assert {"seed", "lr", "val/top1", "val/loss", "status"} <= set(shown_small)


def test_a_column_that_says_the_same_in_every_row_goes_first(tmp_path, capsys):
    for number in range(2):
        made_run(tmp_path / str(number), "model=mlp", result=ok(1.0 + number, peak_memory=number << 30), seed=number)
    out = printed(capsys, tmp_path, columns="60")
    assert out.splitlines()[0].endswith("peak mem")
    assert {"steps", "at", "train_s", "ex/s"} <= set(out[out.index("hidden") :].replace(",", " ").split())


def test_numbers_have_the_digits_that_say_something():
    assert shown(0.91234567, "val/top1") == "0.9123"
    assert shown(1e-3, "optimizer.lr") == "0.001"
    assert shown(0.1 + 0.2, "optimizer.lr") == "0.3"
    assert shown(735178752, "peak_memory") == "701 MiB"
    assert shown(14955.37, "examples_per_s") == "14,955"
    assert shown(1234.5, "train_s") == "1,234"
    assert shown(None) == "-"
    assert shown([0.9, 0.999]) == "[0.9,0.999]"
    assert shown("x" * 50, most=24) == "x" * 23 + "…"
    assert shown("red\x1b[31m\ntext") == "red [31m text"


# --- the process


def process(*words, **environment):
    """``mprun`` as a process of its own, its stdout and stderr piped."""
    code = (
        "import resource, sys; from mprun.cli import main; status = main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print(used.ru_utime + used.ru_stime, sorted({'torch', 'omegaconf', 'hydra', 'numpy', 'wandb'} & set(sys.modules)), "
        "file=sys.stderr); sys.exit(status)"
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        env=kept | environment,
        check=True,
    )


def test_two_hundred_runs_take_less_than_two_seconds_and_no_torch(tmp_path):
    folder = many(tmp_path / "sweep", 200)
    for words in ((), ("--by", "seed", "--sort", "-val/top1"), ("--format", "csv")):
        done = process("table", folder, *words)
        seconds, modules = done.stderr.split(maxsplit=1)
        assert float(seconds) < 3  # 2 s are promised; this machine may be busy
        assert modules.strip() == "[]"
    assert len(done.stdout.splitlines()) == 201


def test_colours_are_for_terminals_that_want_them(sweep):
    assert "\x1b[" not in process("table", sweep).stdout
    assert "\x1b[" in process("table", sweep, FORCE_COLOR="1").stdout
    assert "\x1b[3" not in process("table", sweep, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert max(map(len, process("table", sweep).stdout.splitlines())) <= 80
    assert max(map(len, process("table", sweep, COLUMNS="160").stdout.splitlines())) > 100


def test_an_output_without_unicode_is_no_error(sweep):
    assert "0.5100 ? 0.0100" in process("table", sweep, "--by", "seed", PYTHONIOENCODING="ascii").stdout


def test_a_long_run_keeps_the_end_of_its_path() -> None:
    """The jobs of a sweep share the beginning of their paths: cut at the right they would all read the same."""
    table = RunsTable([], ["run"], {}, [])
    names = [f"sweeps/digits-mlp/20261130-153945-ed38e7/{job}" for job in ("3b4622af9444", "8b4f4645e24e")]
    cells = [cell(table, {"run": name}, "run", most=24) for name in names]
    assert cells == ["…" + name[-23:] for name in names]
    assert cell(table, {"run": "short"}, "run", most=24) == "short"
