"""``mprun tune``: the search space, studies that are killed and gone on with, trials that fail or are stopped early."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

from mprun.cli import main  # noqa: E402
from mprun.commands import tune as command  # noqa: E402
from mprun.compose import compose  # noqa: E402
from mprun.config_check import to_plain  # noqa: E402
from mprun.errors import ConfigError  # noqa: E402
from mprun.runs import locked  # noqa: E402
from mprun.training.run import best_of  # noqa: E402
from mprun.tuning.settings import Direction, TuneConfig, completed, metric_of, read_settings  # noqa: E402
from mprun.tuning.space import Parameter, split_space, words_of  # noqa: E402
from mprun.tuning.study import addressed, build_pruner, ended, left_behind, open_study, replace, replaced  # noqa: E402
from mprun.tuning.trial import Child, Curve, end_of, value_of  # noqa: E402
from mprun.tuning.worker import Worker, begin_trial, recover  # noqa: E402

# A run of three seconds, most of which is starting.
TINY = ["model=mlp", "precision=fp32", "dataset.limit=64", "train.epochs=1", "tracking=disabled", "device=cpu"]
LR = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


def one(word: str) -> Parameter:
    space, fixed = split_space([word])
    assert not fixed
    return space[0]


def tune(*words: str, folder: Path, **how: Any) -> subprocess.Popen[str]:
    """A worker in ``folder``; ends with the test's patience."""
    return subprocess.Popen(
        [sys.executable, "-m", "mprun", "tune", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **how,
    )


def told(process: subprocess.Popen[str], seconds: float = 120) -> str:
    out, _ = process.communicate(timeout=seconds)
    return out


def load(folder: Path, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/outputs/tune/{name}/study.db")


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


def wait_for(condition: Any, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


# --- the search space -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "optimizer.lr=tag(log, interval(1e-4, 1e-2))",
            "FloatDistribution(high=0.01, log=True, low=0.0001, step=None)",
        ),
        ("optimizer.weight_decay=interval(0,0.1)", "FloatDistribution(high=0.1, log=False, low=0.0, step=None)"),
        ("model.kwargs.depth=int(interval(2,6))", "IntDistribution(high=6, log=False, low=2, step=1)"),
        ("model.kwargs.dim=tag(log,int(interval(8,512)))", "IntDistribution(high=512, log=True, low=8, step=1)"),
        ("train.batch_size=range(32,129,32)", "IntDistribution(high=128, log=False, low=32, step=32)"),
        ("train.batch_size=range(32,128,32)", "IntDistribution(high=96, log=False, low=32, step=32)"),
        ("train.batch_size=range(5,0,-2)", "IntDistribution(high=5, log=False, low=1, step=2)"),
        ("train.label_smoothing=range(0.1,0.4,0.1)", "FloatDistribution(high=0.3, log=False, low=0.1, step=0.1)"),
        ("precision=choice(fp16_dynamic,bf16)", "CategoricalDistribution(choices=('fp16_dynamic', 'bf16'))"),
        ("precision=fp16_dynamic,bf16", "CategoricalDistribution(choices=('fp16_dynamic', 'bf16'))"),
        ("train.clip_norm=choice(null,1.0)", "CategoricalDistribution(choices=('null', '1.0'))"),
        ("optimizer.betas=choice([0.9,0.95])", "CategoricalDistribution(choices=('[0.9,0.95]',))"),
        ("optimizer.betas=[0.9,0.95],[0.9,0.999]", "CategoricalDistribution(choices=('[0.9,0.95]', '[0.9,0.999]'))"),
        ("dataset=glob(*mnist)", "CategoricalDistribution(choices=('fashion_mnist', 'mnist'))"),
    ],
)
def test_hydras_sweeps_become_distributions(word: str, expected: str) -> None:
    assert str(one(word).distribution()) == expected


@given(start=st.integers(-50, 50), stop=st.integers(-50, 50), step=st.integers(-9, 9))
def test_a_range_has_the_values_of_pythons(start: int, stop: int, step: int) -> None:
    values = list(range(start, stop, step)) if step else []
    word = f"train.batch_size=range({start},{stop},{step})"
    if not values:
        with pytest.raises(ConfigError, match="range is empty"):
            one(word)
        return
    part = one(word)
    assert part.step is not None
    assert list(range(int(part.low), int(part.high) + 1, int(part.step))) == sorted(values)


@given(st.floats(1e-30, 1e30))
def test_a_number_survives_the_command_line(value: float) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    word = Parameter("optimizer.lr", "interval(0,1)").word(value)
    assert OverridesParser.create().parse_override(word).value() == value


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("seed=range(3)", "the best of several seeds is luck"),
        ("tracking.project=a,b", "changes no number of a run"),
        ("optimizer.lr=interval(1,1)", "from a number to a larger one"),
        ("optimizer.lr=tag(log,interval(0,1))", "needs numbers above 0"),
        ("precision=tag(log,choice(a,b))", "a choice has no logarithm"),
        ("train.batch_size=shuffle(range(4))", "order of what is searched plays no part"),
        ("optimizer.lr=tag(lag,interval(1,2))", "the only tag is log"),
        ("model.name=glob(*)", "among the options of a group"),
        ("precision=bf16,bf16", "there twice"),
    ],
)
def test_what_cannot_be_searched_is_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        split_space([word])


def test_a_key_is_searched_or_fixed() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr is given twice"):
        split_space([LR, "optimizer.lr=1e-3"])


def test_a_key_that_does_nothing_beside_the_others_is_left_out() -> None:
    space, fixed = split_space(
        ["precision=fp32,fp16_static", "precision.loss_scale.init=choice(128,1024)", "model=mlp"]
    )
    scale = "precision.loss_scale.init"
    assert words_of(fixed, space, {"precision": "fp32", scale: "128"}) == ["model=mlp", "precision=fp32"]
    assert f"{scale}=128" in words_of(fixed, space, {"precision": "fp16_static", scale: "128"})


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("tune.trails=3", "did you mean 'trials'"),
        ("tune.trials=0", "tune.trials=0 is not legal"),
        ("tune.trials=many", "tune.trials"),
        ("tune.sampler=grid", "tune.sampler"),
        ("tune.metric=val/los", "did you mean 'val/loss'"),
        ("tune.timeout_s=-1", "seconds above 0"),
    ],
)
def test_settings_are_checked(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_settings([word])


@pytest.mark.parametrize(
    "words",
    [[], ["train.early_stop.metric=val/loss"], ["model=gpt", "dataset=python_docs"]],
)
def test_the_metric_is_what_a_run_calls_its_best(words: list[str]) -> None:
    config = compose(words).config
    assert metric_of(config) == best_of(config).metric
    settings = completed(TuneConfig(), config)
    assert (settings.direction is Direction.minimize) == (best_of(config).mode == "min")


def test_a_metric_that_is_never_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="without an EMA"):
        completed(read_settings(["tune.metric=ema/top1"]), compose([]).config)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["model=mlp"], "tune needs a key to search"),
        ([LR, "--jobs"], "tune does not know --jobs"),
        ([LR, "resume=latest"], "every trial is a new run"),
        ([LR, "hydra.run.dir=x"], "every trial is a new run"),
        (["optimizer.lrr=interval(0,1)"], "unknown key optimizer.lrr|lrr"),
        (["precision=bf16,bf61"], "bf61"),
        (["train.batch_size=interval(16,64)"], r"write train.batch_size=int\(interval\(16,64\)\)"),
        (["optimizer.weight_decay=interval(-1,1)"], "optimizer.weight_decay=-1.0 is not legal"),
        ([LR, "precision=fp32", "precision.loss_scale.init=8"], "does nothing in any of these trials"),
        ([LR, "tune.storage=nodb://x"], "cannot be used"),
        ([LR, "tune.storage=postgresql://me:secret@nowhere/x"], "me:\\*\\*\\*@nowhere"),
    ],
)
def test_a_search_that_cannot_be_is_refused_at_once(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(reason, error)
    assert error.startswith("mprun: error:")
    assert "secret" not in error
    assert "Traceback" not in error


def test_the_worker_imports_no_torch() -> None:
    code = "import sys, mprun.commands.tune, mprun.tuning.worker, mprun.tuning.outcome, optuna; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the study --------------------------------------------------------------------------------------------------------


def new_study(folder: Path, *words: str, **settings: Any) -> tuple[optuna.Study, list[Parameter]]:
    folder.mkdir(exist_ok=True)
    space, fixed = split_space(words or [LR])
    given = TuneConfig(study="s", metric="val/top1", direction=Direction.maximize, **settings)
    return open_study(given, folder, space, fixed), space


def ask(study: optuna.Study, space: Sequence[Parameter]) -> optuna.Trial:
    return study.ask({part.key: part.distribution() for part in space})


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_values_belong_to_seed_and_trial(sampler: str, tmp_path: Path) -> None:
    """A study that is gone on with proposes what the unbroken one does, and no two trials the same."""
    kind = {"sampler": type(TuneConfig().sampler)[sampler], "seed": 3}

    def values(folder: Path, *, every: int) -> list[float]:
        found = []
        for number in range(14):
            if number % every == 0:
                study, space = new_study(folder, **kind)  # a new process knows no more than this
            trial = ask(study, space)
            study.tell(trial, -abs(math.log10(trial.params["optimizer.lr"]) + 2.5))
            found.append(trial.params["optimizer.lr"])
        return found

    unbroken = values(tmp_path / "a", every=99)
    assert values(tmp_path / "b", every=4) == unbroken
    assert len(set(unbroken)) == 14
    assert all(1e-4 <= value <= 1e-1 for value in unbroken)


def test_another_search_under_the_same_name_is_refused(tmp_path: Path) -> None:
    new_study(tmp_path / "s", LR, "model=mlp", "tracking=offline")
    new_study(tmp_path / "s", LR.replace(",", ", "), "model=mlp", "tracking=disabled")  # the same
    with pytest.raises(ConfigError, match=r"searched .*1e-1.* then, .*1e-2.* now") as caught:
        new_study(tmp_path / "s", LR.replace("1e-1", "1e-2"), "model=vit")
    assert "model: fixed mlp then, vit now" in str(caught.value)


def test_the_folder_of_a_study_that_is_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds the trials of a study that is not in sqlite"):
            new_study(tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("not a database, but long enough to be taken for one" * 50)
    with pytest.raises(ConfigError, match="cannot be used"):
        new_study(tmp_path)


def test_the_trial_of_a_dead_worker_is_tried_once_more(tmp_path: Path) -> None:
    study, space = new_study(tmp_path)
    trial = ask(study, space)
    for key, value in (("worker", "w1"), ("beat", time.time())):
        trial.set_user_attr(key, value)
    place = tmp_path / "workers" / "w1"
    place.mkdir(parents=True)
    with locked(place):
        assert left_behind(study, tmp_path, "me") == []
    assert [found.number for found in left_behind(study, tmp_path, "me")] == [0]
    assert left_behind(study, tmp_path, "w1") == []

    assert replace(study, left_behind(study, tmp_path, "me")[0], "its worker died", retry=True)
    again = ask(study, space)
    assert again.params == trial.params
    assert ended(study) == []
    assert not replace(study, study.trials[1], "its worker died", retry=True)
    assert states(study) == ["FAIL", "FAIL"]
    assert [replaced(found) for found in study.trials] == [True, False]
    assert not replace(study, study.trials[1], "another worker was faster", retry=False)


@pytest.mark.parametrize(
    ("result", "status", "again"),
    [
        ({"status": "diverged", "error": "MprunError: loss is nan"}, "diverged", False),
        ({"status": "oom", "error": "MprunError: out of memory"}, "oom", False),
        ({"status": "ok"}, "failed", False),
        ({"status": "interrupted"}, None, True),
        (None, None, True),
    ],
)
def test_a_run_that_ended_by_itself_after_its_worker_is_not_tried_again(
    result: dict[str, Any] | None, status: str | None, again: bool, tmp_path: Path
) -> None:
    study, space = new_study(tmp_path)
    trial = ask(study, space)
    trial.set_user_attr("beat", 0.0)
    (tmp_path / "0").mkdir()
    if result is not None:
        (tmp_path / "0/result.json").write_text(json.dumps(result))
    settings = TuneConfig(study="s", metric="val/top1", direction=Direction.maximize)
    assert recover(Worker(study, settings, space, [], tmp_path, lambda line: None)) == 0
    found = study.trials[0]
    assert (found.state.name, found.user_attrs.get("status"), replaced(found)) == ("FAIL", status, again)
    assert len(study.trials) == 1 + again


def test_a_worker_elsewhere_is_dead_when_it_gives_no_sign(tmp_path: Path) -> None:
    study, space = new_study(tmp_path)
    trial = ask(study, space)
    trial.set_user_attr("worker", "elsewhere")
    trial.set_user_attr("beat", time.time() - 100)
    assert left_behind(study, tmp_path, "me") == []
    trial.set_user_attr("beat", time.time() - 1000)
    assert len(left_behind(study, tmp_path, "me")) == 1


def test_the_median_pruner_waits_for_warmup_and_startup(tmp_path: Path) -> None:
    study, space = new_study(tmp_path, warmup=2, startup=3)
    assert build_pruner(TuneConfig()) is not None

    def play(level: float) -> int | None:
        """A trial of five evaluations at ``level``; at which one it was stopped."""
        trial = ask(study, space)
        for number in range(1, 6):
            trial.report(level, number)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                return number
        study.tell(trial, level)
        return None

    assert [play(level) for level in (0.5, 0.1, 0.9)] == [None, None, None]  # too few to judge by
    assert play(0.2) == 3  # after two evaluations of warm-up
    assert play(0.8) is None


# --- one trial --------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_curve_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curve = Curve(path, "val/loss")
    assert not curve.update()
    write_lines(path, {"kind": "train", "step": 1}, {"kind": "val", "step": 10, "val/loss": 2.0})
    assert curve.update()
    with path.open("a") as file:
        file.write('{"kind": "val", "step": 20, "val/lo')
    assert not curve.update()
    with path.open("a") as file:
        file.write('ss": 1.5}\n')
    assert curve.update()
    write_lines(path, {"kind": "val", "step": 30, "val/loss": "nan"})
    curve.update()
    assert curve.ordered()[:2] == [2.0, 1.5]
    assert math.isnan(curve.ordered()[2])
    # Resumed from step 15: what came after is superseded.
    write_lines(path, {"kind": "event", "event": "resume", "step": 15, "resumed_from_step": 15})
    write_lines(path, {"kind": "val", "step": 20, "val/loss": 1.4})
    curve.update()
    assert curve.ordered() == [2.0, 1.4]


@pytest.mark.parametrize(
    ("values", "maximize", "expected", "reason"),
    [
        ([0.5, 0.9, 0.7], True, 0.9, ""),
        ([0.5, 0.9, 0.7], False, 0.5, ""),
        ([0.5, math.nan, 0.7], True, 0.7, ""),
        ([0.5, math.nan], True, None, "val/loss is nan at the end"),
        ([math.inf], False, None, "val/loss is inf at the end"),
        ([], True, None, "val/loss was never measured"),
    ],
)
def test_nan_is_a_failure_and_no_value(
    values: list[float], maximize: bool, expected: float | None, reason: str
) -> None:
    curve = Curve(Path("nowhere"), "val/loss", dict(enumerate(values)))
    assert value_of(curve, maximize=maximize) == (expected, reason)


def test_how_a_run_ended(tmp_path: Path) -> None:
    assert end_of(tmp_path, -signal.SIGKILL).reason == "killed by SIGKILL"
    (tmp_path / "run.log").write_text("step 1\nmprun: error: no room\n  make some\n")
    assert (end_of(tmp_path, 1).status, end_of(tmp_path, 1).reason) == ("failed", "no room")
    (tmp_path / "result.json").write_text('{"status": "diverged", "error": "NonFiniteError: x\\nsecond line"}')
    assert (end_of(tmp_path, 1).status, end_of(tmp_path, 1).reason) == ("diverged", "x")
    assert end_of(tmp_path, 2).status == "refused"  # the result is of an earlier life


# --- whole studies ----------------------------------------------------------------------------------------------------


def test_a_study_ends_with_a_recipe_of_its_best_trial(tmp_path: Path) -> None:
    words = [*TINY, LR, "train.batch_size=range(16,33,16)", "tune.study=my study", "tune.trials=2"]
    worker = tune(*words, folder=tmp_path)
    out = told(worker)
    assert worker.returncode == 0, out
    folder = tmp_path / "outputs/tune/my-study"
    study = optuna.load_study(study_name="my study", storage=f"sqlite:///{folder}/study.db")
    assert states(study) == ["COMPLETE", "COMPLETE"]
    for trial in study.trials:
        result = json.loads((folder / str(trial.number) / "result.json").read_text())
        assert trial.value == result["best"]["value"]
        assert result["best"]["metric"] == "val/top1"
    best = study.best_trial
    assert f"best: trial {best.number}" in out
    assert f"optimizer.lr={best.params['optimizer.lr']!r}" in out
    assert "2 trials: 2 complete" in out
    assert list((folder / "workers").iterdir()) == []

    # The recipe is the best trial's configuration, whatever else is said there.
    assert "# Command   mprun recipe=outputs/tune/my-study/best.yaml\n" in (folder / "best.yaml").read_text()
    again = to_plain(compose([f"recipe={folder / 'best.yaml'}"]).config)
    was = to_plain(compose([*TINY, *(f"{key}={value}" for key, value in best.params.items())]).config)
    for key in ("model", "dataset", "precision", "optimizer", "schedule", "train"):
        assert again[key] == was[key]

    # The same words again: nothing is left to do, and that is told without a run.
    worker = tune(*words, folder=tmp_path)
    assert "2 of 2 trials" in told(worker)
    assert worker.returncode == 0
    assert states(load_again(folder)) == ["COMPLETE", "COMPLETE"]


def load_again(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name="my study", storage=f"sqlite:///{folder}/study.db")


@pytest.mark.slow
def test_a_diverged_trial_fails_and_the_study_goes_on(tmp_path: Path) -> None:
    """At a learning rate of 1e30 the loss is no number any more."""
    words = [*TINY, "optimizer=sgd", "optimizer.lr=choice(1e-2,1e30)", "train.epochs=8", "optimizer.weight_decay=0"]
    worker = tune(*words, "tune.study=d", "tune.trials=3", "tune.sampler=random", "tune.seed=2", folder=tmp_path)
    out = told(worker)
    study = load(tmp_path, "d")
    assert {(trial.params["optimizer.lr"], trial.state.name) for trial in study.trials} == {
        ("0.01", "COMPLETE"),
        ("1e+30", "FAIL"),
    }, out
    bad = [trial for trial in study.trials if trial.state is TrialState.FAIL]
    assert {trial.user_attrs["status"] for trial in bad} == {"diverged"}
    assert all(trial.user_attrs["reason"] for trial in bad)
    assert f"3 trials: {3 - len(bad)} complete, {len(bad)} failed" in out
    assert worker.returncode == 0


def test_no_complete_trial_is_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Values that are legal alone and not together: told before, and the trial costs no run."""
    monkeypatch.chdir(tmp_path)
    scale = "precision.loss_scale"
    words = ["model=mlp", "precision=fp16_dynamic", f"{scale}.init=choice(64,4)", f"{scale}.min=choice(1,8)"]
    assert main(["tune", *words, "tune.study=n", "tune.trials=1", "tune.sampler=random", "tune.seed=2"]) == 1
    told = capsys.readouterr()
    study = load(tmp_path, "n")
    assert [trial.user_attrs["status"] for trial in study.trials] == ["refused"]
    assert "loss_scale.init=4 is outside" in study.trials[0].user_attrs["reason"]
    assert "no trial was completed" in told.out


@pytest.mark.slow
def test_bad_trials_are_stopped_early(tmp_path: Path) -> None:
    """A trial that learns nothing is stopped once there is one to compare it with."""
    words = [*TINY, "optimizer.lr=choice(0.0,3e-2)", "train.epochs=150", "dataset.limit=256", "tune.sampler=random"]
    few = ["tune.study=p", "tune.trials=2", "tune.seed=5", "tune.startup=1", "tune.warmup=2"]
    worker = tune(*words, *few, folder=tmp_path)
    out = told(worker, 280)
    study = load(tmp_path, "p")
    pruned = [trial for trial in study.trials if trial.state is TrialState.PRUNED]
    assert pruned, out
    for trial in pruned:
        result = json.loads((tmp_path / "outputs/tune/p" / str(trial.number) / "result.json").read_text())
        assert result["status"] == "interrupted"
        assert result["steps_applied"] < 600
        assert len(trial.intermediate_values) >= 3
    assert f"{len(pruned)} pruned" in out
    assert len(study.trials) == 2
    assert worker.returncode == 0


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_trial_goes_on(tmp_path: Path) -> None:
    words = [
        *TINY,
        LR,
        "train.epochs=1000",
        "train.checkpoint_every=100",
        "tune.study=k",
        "tune.trials=1",
    ]
    worker = tune(*words, folder=tmp_path)
    run = tmp_path / "outputs/tune/k/0"
    wait_for((run / "checkpoints/last.pt").exists)
    worker.kill()
    told(worker)
    worker = tune(*words, folder=tmp_path)
    out = told(worker)
    assert worker.returncode == 0, out
    study = load(tmp_path, "k")
    assert states(study) == ["FAIL", "COMPLETE"]
    assert study.trials[0].user_attrs["replaced"]
    assert study.trials[1].params == study.trials[0].params
    assert study.trials[1].user_attrs["folder"] == "0"  # the same run went on
    assert "its worker died; its values are tried again" in out
    assert "1 trials: 1 complete" in out
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(event.get("event") == "resume" and event["resumed_from_step"] > 0 for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_runs_and_keeps_the_study(number: int, code: int, tmp_path: Path) -> None:
    words = [*TINY, LR, "train.epochs=100000", "tune.study=i", "tune.trials=1"]
    worker = tune(*words, folder=tmp_path)
    run = tmp_path / "outputs/tune/i/0"
    wait_for(lambda: (run / "metrics.jsonl").exists() and '"val"' in (run / "metrics.jsonl").read_text())
    worker.send_signal(number)
    out = told(worker)
    assert worker.returncode == code, out
    assert json.loads((run / "result.json").read_text())["status"] == "interrupted"
    study = load(tmp_path, "i")
    assert states(study) == ["FAIL", "WAITING"]
    assert "1 trials: 1 waiting" in out
    assert "no trial was completed" in out


@pytest.mark.slow
def test_two_workers_share_a_study(tmp_path: Path) -> None:
    words = [*TINY, LR, "tune.study=w", "tune.trials=4"]
    workers = [tune(*words, folder=tmp_path) for _ in range(2)]
    outs = [told(worker, 200) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outs
    study = load(tmp_path, "w")
    assert states(study) == ["COMPLETE"] * 4
    assert len({trial.params["optimizer.lr"] for trial in study.trials}) == 4
    assert sorted(path.name for path in (tmp_path / "outputs/tune/w").iterdir() if path.name.isdigit()) == list("0123")
    assert all("ok" in out for out in outs)
    assert len({trial.user_attrs["worker"] for trial in study.trials}) == 2


@pytest.mark.slow
def test_several_trials_at_once(tmp_path: Path) -> None:
    worker = tune(*TINY, LR, "tune.study=j", "tune.trials=3", "tune.jobs=2", "tune.pruner=hyperband", folder=tmp_path)
    out = told(worker, 200)
    assert worker.returncode == 0, out
    assert states(load(tmp_path, "j")) == ["COMPLETE"] * 3


def test_addressed_sampler_is_used(tmp_path: Path) -> None:
    study, _ = new_study(tmp_path)
    assert type(study.sampler).__name__ == type(addressed(TuneConfig())).__name__


def test_each_trial_gets_the_gpu_with_the_fewest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, space = new_study(tmp_path)
    worker = Worker(study, TuneConfig(metric="val/top1"), space, [], tmp_path, print)

    def idle(words: Sequence[str], folder: Path, environment: Any, gpu: str | None) -> Child:
        return Child(subprocess.Popen(["true"]), folder, (folder / "log").open("wb"), 0.0, gpu=gpu)

    monkeypatch.setattr("mprun.tuning.worker.start", idle)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    worker.running.append(begin_trial(worker, ask(study, space)))
    assert worker.running[0].child.gpu is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    for gpu in ("4", "7", "4"):
        worker.running.append(begin_trial(worker, ask(study, space)))
        assert worker.running[-1].child.gpu == gpu
    for running in worker.running:
        running.child.process.wait()
        assert running.child.ended()


def test_the_page_names_every_key() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs/tuning.md").read_text(encoding="utf-8")
    for field in fields(TuneConfig):
        assert f"| `tune.{field.name}` |" in page
        assert f"tune.{field.name}=" in str(command.__doc__)
