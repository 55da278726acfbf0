"""What resume does with every key and word; whose a run folder is; what is said before any training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import mprun.options
from mprun.cli import main
from mprun.compose import compose, compose_run
from mprun.config import Config
from mprun.config_check import to_config, to_plain
from mprun.errors import CheckpointError, ConfigError
from mprun.resume import Resume, kind_of
from mprun.runs import locked
from mprun.training import checkpoint
from mprun.training.env import config_hash
from mprun.training.optim_catalog import check_optimizer, optimizers
from mprun.training.step import train_step
from tests.case_code import ROWS, TOY, latest, records, result
from tests.case_code import checkpoint as saved_state
from tests.conftest import FP16, batch, make_config
from tests.test_faults import REPOSITORY

# --- every key of the schema ------------------------------------------------------------------------------------------

KINDS = {
    "fixed": """seed model.name model.source model.kwargs model.init dataset.name dataset.source dataset.task dataset.kwargs
        dataset.augment dataset.mixup dataset.cutmix dataset.limit optimizer.name train.batch_size train.accumulate train.shuffle
        train.drop_last""",
    "start": """command resume trust sweep.name sweep.jobs sweep.on_error sweep.new compare.precisions compare.baseline compare.seeds
        compare.metric compare.margin compare.spread compare.confidence compare.gradient_steps compare.strict diagnose.steps
        diagnose.every search.budget search.tolerance search.steps""",
    "conditional": """precision.loss_scale.init precision.loss_scale.growth_factor precision.loss_scale.backoff_factor
        precision.loss_scale.growth_interval precision.loss_scale.min precision.loss_scale.max precision.loss_scale.hysteresis
        precision.loss_scale.on_overflow schedule.warmup_frac schedule.final schedule.decay_frac schedule.milestones
        schedule.gamma train.epochs train.ema.warmup train.keep train.early_stop.patience numerics.cpu_fp16 probe.modules""",
    "in force": """name device deterministic model.activation_checkpointing model.compile model.channels_last dataset.root
        dataset.workers precision.name precision.mode precision.param_dtype precision.compute_dtype precision.output_dtype
        precision.fp32_matmul precision.eval_dtype precision.fp32_modules precision.on_nonfinite_loss precision.loss_scale.kind
        precision.loss_scale.patience optimizer.lr optimizer.weight_decay optimizer.momentum optimizer.betas optimizer.eps
        optimizer.fused optimizer.kwargs schedule.name schedule.warmup_steps train.steps train.clip_norm train.label_smoothing
        train.loss_weight train.ema.decay train.eval_every train.log_every train.checkpoint_every train.early_stop.metric
        probe.every postmortem.skips postmortem.save_batch tracking.mode tracking.project tracking.entity tracking.group tracking.tags tracking.log_checkpoint
        tracking.report tracking.log_report meta expect""",
}
EXPECTED = {key: kind for kind, keys in KINDS.items() for key in keys.split()}

# Under these values of other keys every conditional key does something; under ALL_OFF none does.
ALL_ON = {"precision.loss_scale.kind": "dynamic", "train.ema.decay": 0.9, "train.checkpoint_every": 5,
          "train.early_stop.metric": "val/loss", "train.steps": None, "schedule.warmup_steps": None}  # fmt: skip
ALL_OFF = {"precision.loss_scale.kind": "none", "schedule.name": "constant", "schedule.warmup_steps": 3, "train.steps": 9,
           "train.ema.decay": None, "train.checkpoint_every": None, "train.early_stop.metric": None, "device": "cuda", "probe.every": 0}  # fmt: skip


def leaves(node: Any = Config, path: str = "") -> list[str]:
    found = []
    for f in dataclasses.fields(node):
        value = getattr(node() if isinstance(node, type) else node, f.name)
        full = f"{path}{f.name}"
        found += leaves(value, f"{full}.") if dataclasses.is_dataclass(value) else [full]
    return found


def plain(**keys: Any) -> dict[str, Any]:
    """The schema's defaults as a plain configuration, with dotted keys set, unchecked."""
    node = OmegaConf.create(to_plain(Config()))
    for key, value in keys.items():
        OmegaConf.update(node, key, value)
    return OmegaConf.to_container(node)  # type: ignore[return-value]


def resume_with(*words: str) -> Resume:
    return Resume(Path("run/checkpoints/last.pt"), Path("run"), (), words)


def test_the_table_names_every_key_of_the_schema_once():
    assert sorted(EXPECTED) == sorted(leaves())
    assert len(EXPECTED) == sum(len(keys.split()) for keys in KINDS.values())


@pytest.mark.parametrize("key", leaves())
def test_a_change_of_any_key_is_in_force_or_refused_by_name(key):
    kind = EXPECTED[key]
    assert kind_of(key) == kind
    shape = {"schedule.decay_frac": "wsd", "schedule.milestones": "step", "schedule.gamma": "step"}.get(key, "cosine")
    start = "static" if key == "precision.loss_scale.init" else "dynamic"
    before = plain(**{**ALL_ON, "schedule.name": shape, "precision.loss_scale.kind": start})
    old = OmegaConf.select(OmegaConf.create(before), key)
    other = {"dict": {"x": 1}, "bool": old is False}.get(type(old).__name__, "another")
    other = {"x": 1} if OmegaConf.is_dict(old) else other
    after = OmegaConf.create(before)
    OmegaConf.update(after, key, other, merge=False)
    resume, now = resume_with(f"{key}=x"), OmegaConf.to_container(after)
    if kind == "fixed":
        with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
            resume.check(before, now)
    elif kind == "start":
        assert resume.check(before, now) == {}
    else:
        (changed,) = resume.check(before, now)
        assert changed.startswith(key)


@pytest.mark.parametrize("key", KINDS["conditional"].split())
def test_a_key_that_would_do_nothing_is_refused_if_it_was_given_and_harmless_in_an_option(key):
    before, now = plain(**ALL_OFF), plain(**{**ALL_OFF, key: 77})
    if key == "precision.loss_scale.hysteresis":
        before, now = plain(**ALL_OFF), plain(**{**ALL_OFF, key: 7})
    with pytest.raises(CheckpointError, match=rf"{key.replace('.', '[.]')} does nothing while"):
        resume_with(f"{key}=77").check(before, now)
    assert resume_with("precision=bf16").check(before, now).keys() == {key}


def test_the_start_of_a_dynamic_scale_that_goes_on_is_refused():
    before, now = plain(**ALL_ON), plain(**{**ALL_ON, "precision.loss_scale.init": 2.0})
    with pytest.raises(CheckpointError, match=r"precision\.loss_scale\.init was 65536\.0, now 2\.0"):
        resume_with("precision.loss_scale.init=2").check(before, now)


@pytest.mark.parametrize("key", ["precision.compute_dtype", "precision.fp32_modules", "precision.output_dtype"])
def test_pure_keeps_its_dtypes(key):
    before = plain(**{"precision.mode": "pure"})
    with pytest.raises(CheckpointError, match=f"{key}.*\n.*pure"):
        resume_with(f"{key}=x").check(before, plain(**{"precision.mode": "pure", key: ["float16"]}))


def test_an_ema_can_end_but_not_begin():
    off, on = plain(), plain(**{"train.ema.decay": 0.9})
    assert resume_with("train.ema=off").check(on, off)
    with pytest.raises(CheckpointError, match=r"train\.ema\.decay=0\.9"):
        resume_with("train.ema.decay=0.9").check(off, on)


# --- in force means in force ------------------------------------------------------------------------------------------

SGD_START = {"optimizer.name": "sgd", "optimizer.momentum": 0.5}
IN_FORCE: dict[str, tuple[dict[str, Any], Any]] = {
    "optimizer.lr": ({}, 0.5),
    "optimizer.weight_decay": ({"optimizer.weight_decay": 0.1}, 0.2),
    "optimizer.betas": ({}, [0.8, 0.9]),
    "optimizer.eps": ({}, 1e-4),
    "optimizer.momentum": (SGD_START, 0.9),
    "optimizer.fused": ({}, False),
    "optimizer.kwargs": ({}, {"amsgrad": True}),
    "schedule.name": ({}, "linear"),
    "schedule.final": ({"schedule.name": "cosine"}, 0.5),
    "schedule.warmup_steps": ({}, 7),
    "train.clip_norm": ({}, 0.5),
    "train.label_smoothing": ({}, 0.1),
    "train.loss_weight": ({}, 3.0),
    "train.ema.decay": ({"train.ema.decay": 0.9}, 0.99),
    "train.ema.warmup": ({"train.ema.decay": 0.9}, False),
    "precision.loss_scale.growth_interval": (FP16, 3),
    "precision.loss_scale.growth_factor": (FP16, 4.0),
    "precision.loss_scale.backoff_factor": (FP16, 0.25),
    "precision.loss_scale.hysteresis": (FP16, 3),
    "precision.loss_scale.max": (FP16, 2.0**20),
    "precision.loss_scale.patience": (FP16, 3),
}


def facts(state: Any) -> dict[str, Any]:
    """What a state does besides what it remembers."""
    hidden = ("params", "names", "lr")  # lr is written before every step
    groups = [{k: v for k, v in group.items() if k not in hidden} for group in state.optimizer.param_groups]
    return {
        "groups": groups, "lr": state.base_lr, "table": state.schedule.table(), "clip": state.clip_norm, "weight": state.loss_weight,
        "smoothing": state.label_smoothing, "scale": state.loss_scale, "policy": str(state.policy),
        "ema": state.ema and (state.ema.decay, state.ema.warmup),
    }  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def window() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [batch(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator))]


@pytest.mark.parametrize("key", IN_FORCE)
def test_a_restored_state_does_what_the_new_configuration_says(make_state, key, tmp_path):
    """It equals a state made by the new configuration in all that is not memory, and steps as that one with this memory."""
    start, value = IN_FORCE[key]
    old, new, twin = (make_state(net(), **keys) for keys in (start, {**start, key: value}, {**start, key: value}))
    if key == "optimizer.kwargs":
        value = dict(value)
    fresh = facts(new)
    assert fresh != facts(old), "the key does not show"
    for _ in range(3):
        train_step(old, window())
        old.counters.applied += 1
    path = tmp_path / "last.pt"
    checkpoint.save(checkpoint.snapshot(old), path)
    checkpoint.restore(new, checkpoint.load(path), path=path)
    assert facts(new) == fresh
    # The same by hand: the memory of the old one in a twin of the new one.
    for (_, there), (_, here) in zip(twin.weights, old.weights, strict=True):
        there.data.copy_(here)
    for name, p in old.weights:
        mine = dict(twin.weights)[name]
        for entry, remembered in old.optimizer.state[p].items():
            moved = torch.as_tensor(remembered).clone()
            twin.optimizer.state[mine][entry] = moved if torch.is_tensor(remembered) else remembered
    twin.applied.fill_(3)
    twin.counters.applied = 3
    twin.scale = twin.loss_scale.load(old.loss_scale.save(old.scale))
    twin.rates.moved()
    assert train_step(new, window()).read() == train_step(twin, window()).read()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(new.weights, twin.weights, strict=True))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


GO_ON = ["resume=latest", "trust=[tests]"]


def test_momentum_loss_weight_and_decay_of_the_average_hold_from_the_first_step(folder):
    """By hand: w 0 -> 0.2 at rate 0.1; then momentum 0.9 and twice the loss: g = -3.2, w = 0.52; g = -1.92, buffer = -4.8, w = 1."""
    assert main([*TOY, "dataset.kwargs.values=[1,1,1]", "train.steps=1", "train.ema.decay=0.5", "train.ema.warmup=false",
                 "precision=fp32"]) == 0  # fmt: skip
    assert saved_state()["ema"]["shadow"]["weight"].item() == pytest.approx(0.1)
    assert main([*GO_ON, "train.steps=3", "optimizer.momentum=0.9", "train.loss_weight=2", "train.ema.decay=0"]) == 0
    saved = saved_state()
    assert saved["model"]["weight"].item() == pytest.approx(1.0, rel=1e-6)
    assert torch.equal(saved["ema"]["shadow"]["weight"], saved["model"]["weight"])


def test_a_new_name_is_told_and_in_force_in_the_old_folder(folder, capsys):
    assert main([*ROWS, "train.steps=1", "precision=fp32"]) == 0
    run = latest()
    assert main([*GO_ON, "train.steps=2", "name=second"]) == 0
    assert latest() == run
    assert (result()["name"], OmegaConf.load(run / "config.yaml").name) == ("second", "second")
    assert "resume: name " in capsys.readouterr().err


# --- words that cannot come into force ----------------------------------------------------------------------------------


def run_with_a_recipe() -> Path:
    """A run of two steps with a recipe file, here; returns its folder."""
    Path("mine.yaml").write_text("# mine\ntrain:\n  steps: 2\n")
    Path("other.yaml").write_text("# other\ntrain:\n  clip_norm: 1\n")
    assert main([*ROWS, "precision=fp32", "recipe=./mine.yaml"]) == 0
    return latest()


@pytest.fixture
def done(folder, capsys):
    """A run of the test's own."""
    run = run_with_a_recipe()
    capsys.readouterr()
    return run


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("kept"))
        return run_with_a_recipe()


@pytest.fixture
def kept(made_once, monkeypatch):
    """A run that several tests share, because each of them makes sure that nothing in it has changed."""
    monkeypatch.chdir(made_once.parents[2])
    before = contents(made_once)
    yield made_once
    assert contents(made_once) == before


def contents(folder: Path) -> dict[Path, Any]:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


@pytest.mark.parametrize(("word", "said"), [
    ("hydra.run.dir=elsewhere", "hydra.run.dir=elsewhere: a resumed run goes on in its own folder"),
    ("hydra.job.chdir=true", "hydra.job.chdir=true"), ("+hydra.sweep.dir=x", "hydra.sweep.dir=x"),
    ("recipe=other.yaml", "another recipe is another run"), ("recipe=none", "another recipe"),
    ("command=eval", "the command is the first word"), ("train.epochs=9", "train.epochs does nothing while train.steps is 4"),
    ("train.keep=3", "train.keep does nothing while train.checkpoint_every is null"),
    ("precision.loss_scale.init=8", "needs precision.loss_scale.kind static or dynamic"),
])  # fmt: skip
@pytest.mark.parametrize("command", [[], ["validate"], ["show"]], ids=["train", "validate", "show"])
def test_words_without_effect_are_refused_and_the_folder_stays(kept, capsys, command, word, said):
    assert main([*command, *GO_ON, "train.steps=4", word]) == 2
    assert said in capsys.readouterr().err


def test_what_names_the_run_as_it_is_is_no_change(done):
    assert main([f"resume={done}", "trust=[tests]", "train.steps=3", f"hydra.run.dir={done}", "recipe=mine.yaml"]) == 0
    assert result(done)["steps_applied"] == 3


def test_a_command_that_is_no_command_is_refused_without_resume_too(folder, capsys):
    assert main([*ROWS, "command=eval"]) == 2
    assert "command=eval does nothing" in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_auto_looks_into_the_folder_that_is_given(folder):
    """As a script does that is started again and again: the same line, whatever there is already."""
    words = [*ROWS, "precision=fp32", "resume=auto", "hydra.run.dir=mine"]
    assert main([*ROWS, "precision=fp32", "train.steps=5"]) == 0  # the latest run, which is not meant
    for steps in (1, 2, 3):
        assert main([*words, f"train.steps={steps}"]) == 0
        assert result(Path("mine"))["steps_applied"] == steps
    assert [record["step"] for record in records("train", Path("mine"))] == [1, 2, 3]


# --- paths ------------------------------------------------------------------------------------------------------------------


def test_saved_overrides_hold_absolute_paths_and_resume_from_another_folder(folder, monkeypatch):
    Path("it is, here").mkdir()
    Path("mine.yaml").write_text("# mine\ntrain:\n  clip_norm: 0.5\n")
    assert main([*ROWS, "precision=fp32", "train.steps=1", "hydra.run.dir=first"]) == 0
    os.rename("first/checkpoints/last.pt", "it is, here/a=1.pt")
    words = ["model.init='it is, here/a=1.pt'", "dataset.root=data", "recipe=mine.yaml", "hydra.run.dir=second"]
    assert main([*ROWS, "precision=fp32", "train.steps=1", *words]) == 0
    kept = list(OmegaConf.load("second/.hydra/overrides.yaml"))
    assert f'model.init="{folder}/it is, here/a=1.pt"' in kept
    assert f"dataset.root={folder}/data" in kept
    assert f"recipe={folder}/mine.yaml" in kept
    deeper = folder / "deeper"
    deeper.mkdir()
    monkeypatch.chdir(deeper)
    assert main(["resume=../second", "trust=[tests]", "train.steps=2"]) == 0
    config = to_config(OmegaConf.load(folder / "second/config.yaml"))
    assert (config.train.clip_norm, config.dataset.root) == (0.5, str(folder / "data"))
    assert config.model.init == str(folder / "it is, here/a=1.pt")


def test_two_recipe_files_of_one_name_are_two_recipes(folder):
    for number in (1, 2):
        Path(str(number)).mkdir()
        Path(f"{number}/same.yaml").write_text(f"# {number}\ntrain:\n  epochs: {number}\n")
    assert [compose([f"recipe={n}/same.yaml"]).config.train.epochs for n in (1, 2, 1)] == [1, 2, 1]


def call(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mprun", *words], cwd=cwd, env=own, capture_output=True, text=True, check=False
    )


def test_a_job_of_a_sweep_is_a_run_like_any_other(folder, monkeypatch):
    """It says which recipe it was made from and which sweep it belongs to, and goes on alone, from another folder."""
    text = "# mine\ntrain:\n  clip_norm: 0.5\n"
    Path("mine.yaml").write_text(text)
    done = call(["-m", *ROWS, "precision=fp32,bf16", "recipe=./mine.yaml", "train.steps=1", "dataset.root=data",
                 "hydra.sweep.dir=many/my_sweep"], folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    jobs = sorted(Path("many/my_sweep").glob("*/result.json"), key=lambda path: path.stat().st_mtime)
    assert [json.loads(path.read_text())["precision"] for path in jobs] == ["fp32", "bf16"]
    for path in jobs:
        env = json.loads((path.parent / "env.json").read_text())
        assert env["recipe"] == {"name": f"{folder}/mine.yaml", "sha256": hashlib.sha256(text.encode()).hexdigest()}
        assert OmegaConf.load(path.parent / "config.yaml").tracking.group == "my_sweep"
    job = jobs[1].parent.resolve()
    before = OmegaConf.load(job / "config.yaml")
    monkeypatch.chdir("/")
    assert main([f"resume={job}", "trust=[tests]", "train.steps=2"]) == 0
    after = OmegaConf.load(job / "config.yaml")
    assert {key for key in before if before[key] != after[key]} == {"train", "resume"}
    assert result(job)["steps_applied"] == 2


def test_a_single_run_says_its_recipe(folder):
    words = ["recipe=digits/resnet_fp16", "train.steps=1", "dataset.limit=64", "tracking=disabled", "device=cpu"]
    assert main(words) == 0
    env = json.loads((latest() / "env.json").read_text())
    text = (mprun.options.tree("recipes") / "digits/resnet_fp16.yaml").read_bytes()
    assert env["recipe"] == {"name": "digits/resnet_fp16", "sha256": hashlib.sha256(text).hexdigest()}
    assert env["config_hash"] == config_hash(OmegaConf.to_container(OmegaConf.load(latest() / "config.yaml")))


# --- whose a folder is ------------------------------------------------------------------------------------------------------


def test_only_one_process_writes_a_folder_and_a_killed_one_lets_go(done, capsys):
    code = f"import time, pathlib; from mprun.runs import locked\nwith locked(pathlib.Path({str(done)!r})): print(1, flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    before = contents(done)
    assert main([*GO_ON, "train.steps=4"]) == 2
    err = capsys.readouterr().err
    assert f"{done} is being written by another run" in err
    assert contents(done) == before
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert main([*GO_ON, "train.steps=4"]) == 0


def test_a_forked_child_does_not_keep_the_lock(folder):
    """Such as a worker that loads data and outlives the process that was killed."""
    reader, writer = os.pipe()
    with locked(folder):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os.write(writer, b"x")  # it lives
            signal.pause()
        os.read(reader, 1)
    try:
        with locked(folder):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_lock_is_given_back_and_is_for_one(folder):
    with locked(folder), pytest.raises(CheckpointError, match="another run"), locked(folder):
        pass
    with locked(folder):
        pass


@pytest.mark.parametrize("left", ["everything", "result.json", "checkpoints/step_2.pt"])
def test_a_new_run_does_not_begin_in_the_folder_of_an_old_one(done, capsys, left):
    for path in list(done.rglob("*")):
        if path.is_file() and left not in ("everything", path.relative_to(done).as_posix()):
            path.unlink()
    if left.endswith(".pt"):
        (done / left).write_bytes(b"")
    before = contents(done)
    assert main([*ROWS, "precision=fp32", "train.steps=1", f"hydra.run.dir={done}"]) == 2
    err = capsys.readouterr().err
    assert str(done) in err
    assert "another folder" in err
    assert ("resume=" in err) == (left != "result.json")
    assert contents(done) == before


def test_going_back_holds_even_if_the_run_dies_before_it_saves_again(folder, monkeypatch):
    words = [*ROWS, "precision=fp32", "train.steps=6", "train.checkpoint_every=2", "train.keep=9"]
    assert main(words) == 0
    run = latest()

    def die(*_: Any, probe: Any) -> None:
        raise ConnectionError("gone")

    import mprun.training.loop as loop

    monkeypatch.setattr(loop, "train_step", die)
    with pytest.raises(ConnectionError):
        main([f"resume={run}/checkpoints/step_2.pt", "trust=[tests]"])
    assert saved_state()["step"] == 2
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == ["step_2.pt"]


# --- show and validate --------------------------------------------------------------------------------------------------------


def test_show_and_validate_compose_what_a_resume_would_run(done, capsys):
    assert main(["show", *GO_ON, "train.steps=9", "optimizer.lr=0.5"]) == 0
    shown = to_config(OmegaConf.create(capsys.readouterr().out))
    assert main(["validate", *GO_ON, "train.steps=9", "optimizer.lr=0.5"]) == 0
    said = capsys.readouterr().out
    assert "resume: optimizer.lr 0.01 -> 0.5" in said
    assert str(done / "checkpoints/last.pt") in said
    assert main([*GO_ON, "train.steps=9", "optimizer.lr=0.5"]) == 0
    assert to_config(OmegaConf.load(done / "config.yaml")) == shown


@pytest.mark.parametrize(
    "words", [["seed=9"], ["model.kwargs.width=8"], ["train.ema.decay=0.9"], ["precision=bf16_pure"]]
)
def test_validate_refuses_what_a_resume_would(kept, capsys, words):
    assert main(["validate", *GO_ON, *words]) == 2
    told = capsys.readouterr().err
    assert main([*GO_ON, *words]) == 2
    assert capsys.readouterr().err == told
    assert words[0].partition("=")[0] in told


def test_validate_needs_no_torch_with_resume_and_with_all(kept):
    code = (
        "import sys, os; from mprun.cli import main; status = main(sys.argv[1:]); user, system, *_ = os.times();"
        "print([status, sorted(m for m in ('torch', 'timm', 'wandb', 'torchvision') if m in sys.modules), user + system])"
    )
    for words in (["validate", *GO_ON, "train.steps=9"], ["validate", "optimizer.name=lamb"], ["validate", "--all"]):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        out = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, check=True
        )
        status, loaded, seconds = json.loads(out.stdout.splitlines()[-1].replace("'", '"'))
        assert (status, loaded) == (0, []), out
        assert seconds < 1.5 or words[-1] == "--all"


@pytest.mark.parametrize(("words", "said"), [
    (["optimizer.name=adamv"], "did you mean 'adam"), (["optimizer.name=lbfgs"], "evaluates the loss several times"),
    (["optimizer.name=SparseAdam"], "sparse gradients"), (["optimizer=adamw", "optimizer.kwargs.amsgrat=true"], "did you mean 'amsgrad'"),
    (["optimizer=adamw", "optimizer.momentum=0.9"], "adamw takes no 'momentum'"), (["optimizer.kwargs.lr=1"], "set optimizer.lr instead"),
    (["optimizer.name=lion", "optimizer.eps=null", "optimizer.kwargs.nope=1"], "no argument of lion"), (["dataset.augment=shfit"], "did you mean 'shift'"),
    (["precision.fp32_modules=['re:(head']"], "re:(head"), (["precision.fp32_modules=['class:']"], "class:"),
    (["precision.fp32_modules=['']"], "fp32_modules"), (["--al"], "--all"), (["--all", "recipe=x"], "recipe=x"),
])  # fmt: skip
def test_validate_refuses_by_name(folder, capsys, words, said):
    assert main(["validate", *words]) == 2
    out = capsys.readouterr()
    assert said in out.err
    assert out.out == ""


@pytest.mark.parametrize("words", [["optimizer.name=lamb"], ["optimizer.name=nadamw", "optimizer.kwargs.caution=true"],
                                   ["optimizer=sgd", "optimizer.kwargs.nesterov=true"], ["precision.fp32_modules=['re:head.*','class:LayerNorm']"]])  # fmt: skip
def test_validate_says_what_it_did_not_check(folder, capsys, words):
    assert main(["validate", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("valid: ")
    assert "not checked here" in out
    assert "FP32 rules" in out


def test_validate_all_goes_through_every_recipe_and_a_bad_one_harms_only_itself(folder, capsys, monkeypatch):
    assert main(["validate", "--all"]) == 0
    out = capsys.readouterr().out
    names = mprun.options.list_recipes()
    assert len(names) >= 2
    assert [line.split()[0] for line in out.splitlines()[:-1]] == names
    assert max(map(len, out.splitlines()[:-1])) <= 130, "what stands for no choice is left out"

    real = mprun.options.tree
    recipes = folder / "recipes"
    (recipes / "a").mkdir(parents=True)
    (recipes / "a/good.yaml").write_text("# @package _global_\n# good\ntrain:\n  epochs: 3\n")
    (recipes / "a/torn.yaml").write_text("train: [1")
    (recipes / "a/typo.yaml").write_text("train:\n  epohcs: 3\n")
    (recipes / "bytes.yaml").write_bytes(b"# \xff\xfe\ntrain: {epochs: 3}\n")
    monkeypatch.setattr(mprun.options, "tree", lambda name: recipes if name == "recipes" else real(name))
    assert main(["validate", "--all", "train.batch_size=8"]) == 2
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "valid: " in lines["a/good"]
    assert {name for name, line in lines.items() if "error: " in line} == {"a/torn", "a/typo", "bytes"}
    assert "epochs" in lines["a/typo"]
    assert main(["list", "recipe"]) == 0


def test_the_catalog_of_optimizers_is_that_of_torch_and_timm():
    import inspect

    from timm.optim import get_optimizer_info, list_optimizers

    from mprun.signatures import legal_kwargs

    torchs = {name.lower(): cls for name, cls in vars(torch.optim).items()
              if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"}  # fmt: skip
    known = optimizers()
    assert known.keys() == torchs.keys() | set(list_optimizers())
    for name, target in known.items():
        cls = torchs.get(name) or get_optimizer_info(name).opt_class
        if isinstance(cls, str):
            assert target == "", f"{name} is a kernel of another package"
        else:
            arguments = {key for key, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}
            assert set(legal_kwargs(target).names) == arguments, name


def test_where_the_sources_cannot_be_read_nothing_is_refused(monkeypatch):
    import mprun.training.optim_catalog as catalog

    monkeypatch.setattr(catalog, "optimizers", dict)
    check_optimizer(make_config(**{"optimizer.name": "anything"}).optimizer)
    with pytest.raises(ConfigError):
        check_optimizer(make_config(**{"optimizer.name": "lbfgs"}).optimizer)


def test_a_checkpoint_outside_of_a_run_folder_is_validated_as_far_as_that_goes(done, capsys):
    Path("loose.pt").write_bytes((done / "checkpoints/last.pt").read_bytes())
    assert main(["validate", *ROWS, "precision=fp32", "resume=loose.pt", "train.steps=3"]) == 0
    assert "in no run folder" in capsys.readouterr().out
    composed, resume = compose_run([*ROWS, "precision=fp32", "resume=loose.pt", "train.steps=3"])
    assert resume is not None
    assert composed.config.resume == str(Path("loose.pt").resolve())
    assert main([*ROWS, "precision=fp32", "resume=loose.pt", "train.steps=3", "hydra.run.dir=fresh"]) == 0
    assert result(Path("fresh"))["steps_applied"] == 3
