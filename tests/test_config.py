"""Configuration: what is refused, with which words, and that nothing is created then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mprun import cli
from mprun.compose import compose, options, tree
from mprun.config import Config, Mode, ScaleKind
from mprun.config_check import RANGES, to_config, to_plain, value_at
from mprun.errors import ConfigError, RecipeError

REFUSED = [
    (["precision=fp16_dynamc"], ["precision=fp16_dynamc", "fp16_dynamic"]),
    (["model=vitt"], ["model=vitt", "vit"]),
    (["optimizer.lrr=1"], ["optimizer.lrr", "'lr'"]),
    (["+train.acumulate=4"], ["train.acumulate", "'accumulate'"]),
    (["++train.acumulate=4"], ["train.acumulate", "'accumulate'"]),
    (["+acumulate=4"], ["acumulate"]),
    (["~train.accumulate"], ["train.accumulate", "deleted"]),
    (["precision.fp32_module=[a]"], ["precision.fp32_module", "fp32_modules"]),
    (["+precision.loss_scale.inti=3"], ["precision.loss_scale.inti", "'init'"]),
    (["+tracking.projekt=x"], ["tracking.projekt", "'project'"]),
    (["train.batch_size=-1"], ["train.batch_size=-1", "1 up"]),
    (["train.accumulate=0"], ["train.accumulate=0", "1 up"]),
    (["train.batch_size=many"], ["train.batch_size", "many"]),
    (["train.ema.decay=1.5"], ["train.ema.decay=1.5"]),
    (["train.clip_norm=-1"], ["train.clip_norm=-1"]),
    (["train.clip_norm=nan"], ["train.clip_norm=nan"]),
    (["optimizer.lr=inf"], ["optimizer.lr=inf"]),
    (["optimizer.lr=-0.1"], ["optimizer.lr=-0.1"]),
    (["precision.loss_scale.init=0"], ["precision.loss_scale.init=0"]),
    (["precision.loss_scale.init=-1"], ["precision.loss_scale.init=-1"]),
    (["precision.loss_scale.init=inf"], ["precision.loss_scale.init=inf"]),
    (["precision.loss_scale.init=nan"], ["precision.loss_scale.init=nan"]),
    (["precision.loss_scale.init=1e12"], ["outside [min, max]", "precision.loss_scale.max"]),
    (["precision.loss_scale.growth_interval=0"], ["growth_interval=0"]),
    (["precision.loss_scale.growth_factor=1"], ["growth_factor=1"]),
    (["precision.loss_scale.backoff_factor=1"], ["backoff_factor=1"]),
    (["precision.loss_scale.min=9", "precision.loss_scale.max=8"], ["min=9", "max=8"]),
    (["precision.loss_scale.kind=dynamc"], ["dynamc"]),
    (["precision=bf16", "precision.loss_scale.kind=dynamic"], ["only float16"]),
    (["precision=fp32", "precision.compute_dtype=float16"], ["mode=full"]),
    (["precision=fp16_dynamic", "precision.compute_dtype=float32"], ["mode=autocast"]),
    (["precision.compute_dtype=fp17"], ["fp17", "float16"]),
    (["precision=bf16_master", "precision.eval_dtype=float32"], ["eval_dtype=float32", "mode=master"]),
    (["meta.x=${nope}"], ["nope"]),
    (["optimizer.lr=${optimizer.weight_decay}", "optimizer.weight_decay=${optimizer.lr}"], ["not legal"]),
    (["schedule.name=foo"], ["schedule.name=foo", "cosine"]),
    (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9]"]),
    (["train.early_stop.metric=val/acc"], ["val/acc", "val/top1"]),
    (["train.early_stop.metric=ema/loss"], ["train.early_stop.metric=ema/loss", "train.ema.decay", "val/loss"]),
    (["train.early_stop.metric=val/top1", "dataset.task=regression"], ["metric=val/top1", "regression", "val/loss"]),
    (["train.loss_weight=1e-320"], ["train.loss_weight=1e-320", "2**-126"]),
    (["train.clip_norm=1e-45"], ["train.clip_norm=1e-45", "2**-126"]),
    (["optimizer.eps=1e-46", "optimizer=adamw"], ["optimizer.eps=1e-46"]),
    (["optimizer.lr=1e39"], ["optimizer.lr=1e+39"]),
    (["optimizer.weight_decay=1e300"], ["optimizer.weight_decay=1e+300"]),
    (["train.steps=100000000000000000000"], ["train.steps=100000000000000000000", "2**53"]),
    (["train.batch_size=99999999999999999999"], ["train.batch_size", "2**53"]),
    (["precision.loss_scale.growth_interval=99999999999999999999"], ["growth_interval", "2**53"]),
    (["precision.loss_scale.hysteresis=99999999999999999999"], ["hysteresis", "2**53"]),
    (["seed=99999999999999999999"], ["seed=99999999999999999999", "2**63"]),
    (["dataset.workers=100000"], ["dataset.workers=100000", "512"]),
    (["precision=fp32", "precision.loss_scale.init=1024"], ["loss_scale.init does nothing", "kind is 'none'"]),
    (["precision=fp16_static", "precision.loss_scale.growth_interval=5"], ["growth_interval does nothing", "dynamic"]),
    (["train.early_stop.patience=3"], ["early_stop.patience does nothing", "early_stop.metric"]),
    (["train.ema.warmup=false"], ["train.ema.warmup does nothing", "train.ema.decay"]),
    (["schedule=constant", "schedule.final=0.1"], ["schedule.final does nothing", "constant"]),
    (["precision.loss_scale.min=1e-60"], ["min=1e-60"]),
    (["precision.loss_scale.init=1e39", "precision.loss_scale.max=1e40"], ["max=1e+40"]),
    (["precision=fp16_static", "precision.loss_scale.on_overflow=retry"], ["on_overflow=retry"]),
    (["schedule.decay_frac=3"], ["schedule.decay_frac=3"]),
    (["dataset=python"], ["dataset.name"]),
    (["dataset.kwargs.foo=1"], ["dataset.kwargs.foo"]),
    (["dataset.name=digit"], ["dataset.name", "digits"]),
    (["model.name=vitt"], ["model.name", "vit"]),
    (["model=timm", "model.name=resnet5O"], ["resnet5O", "resnet50"]),
    (["model.kwargs.dpeth=6"], ["model.kwargs.dpeth", "depth"]),
    (["model=timm"], ["model.name has no value"]),
    (["name=a,b"], ["comma", "-m"]),
    (["resume=runs/epoch=3.ckpt"], ["runs/epoch=3.ckpt", "no such file"]),
    (["name=epoch=3"], ["quote"]),
    (["name=it's"], ["quote"]),
    (["=3"], ["key=value"]),
    (["+model=vit"], ["write model=vit"]),
    (["~model"], ["always has an option"]),
    (["model=[vit,resnet]"], ["not an option"]),
    (["precision=null"], ["fp16_dynamic"]),
    (["recipe=nope"], ["recipe=nope"]),
    (["train=5"], ["train=5"]),
    (["seed=-1"], ["seed=-1"]),
    (["trian"], ["unknown command", "train"]),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_refused_in_one_block_with_exit_2_and_nothing_created(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("mprun: error: ")
    assert out.err.count("error:") == 1
    assert len(out.err.splitlines()) <= 3, out.err
    for part in said:
        assert part in out.err
    assert "Traceback" not in out.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["no", "off", "false", "none", "null", "No"])
def test_off_words_switch_optional_keys_off(word):
    config = compose([f"train.ema.decay={word}", f"train.clip_norm={word}", f"train.early_stop.metric={word}"]).config
    assert (config.train.ema.decay, config.train.clip_norm, config.train.early_stop.metric) == (None, None, None)
    assert compose([f"train.ema={word}"]).config.train.ema.decay is None


@pytest.mark.parametrize(
    ("word", "value"), [("no", False), ("off", False), ("false", False), ("yes", True), ("on", True)]
)
def test_words_for_booleans_are_booleans(word, value):
    config = compose([f"train.ema.warmup={word}", f"train.shuffle={word}"]).config
    assert config.train.ema.warmup is value
    assert config.train.shuffle is value


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_kwargs_are_open_with_and_without_plus(plus):
    assert compose([f"{plus}model.kwargs.depth=6"]).config.model.kwargs == {"depth": 6}


def test_every_precision_option_composes_with_its_own_name():
    for name in options("precision"):
        config = compose([f"precision={name}"]).config
        assert config.precision.name == name
        assert to_config(OmegaConf.create(to_plain(config))) == config


def test_named_options_are_what_they_are_called():
    assert compose(["precision=fp32"]).config.precision.mode is Mode.full
    assert compose(["precision=fp16_static"]).config.precision.loss_scale.kind is ScaleKind.static
    assert compose(["precision=fp16_unscaled"]).config.precision.loss_scale.kind is ScaleKind.none


def test_saved_config_loads_back_to_itself():
    config = compose(["precision=fp16_static", "train.ema.decay=0.9"]).config
    again = to_config(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))))
    assert again == config


def test_tuned_values_follow_the_pair_and_the_command_line_wins():
    assert compose(["model=vit"]).config.train.epochs != compose(["model=resnet"]).config.train.epochs
    assert compose(["model=vit", "train.epochs=3"]).config.train.epochs == 3
    assert compose(["model=vit", "optimizer.lr=1e-9"]).config.optimizer.lr == 1e-9


def test_every_yaml_key_is_in_the_schema_and_every_range_names_a_key():
    for path in tree("conf").rglob("*.yaml"):
        assert path.read_text().startswith("#"), f"{path}: `list` shows the first comment line"
    for key in RANGES:
        value_at(Config(), key)


def test_recipe_beats_defaults_and_the_command_line_beats_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "# mine\ndefaults:\n  - override /precision: bf16\ntrain:\n  epochs: 7\n  batch_size: 5\n"
    )
    config = compose(["recipe=./mine.yaml", "train.batch_size=6"]).config
    assert (config.precision.name, config.train.epochs, config.train.batch_size) == ("bf16", 7, 6)


@pytest.mark.parametrize("word", ["trust=my_pkg", "precision.fp32_modules=head"])
def test_one_value_for_a_list_is_refused_with_the_list_to_write(word):
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError, match=rf"{word} is not legal: {key} is a list; write '{key}=\[{value}\]'"):
        compose([word])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: [1", "YAML"),
        ("- 1\n- 2\n", "not a mapping"),
        ("trust: [os]\n", "trust"),
        ("resume: latest\n", "resume"),
        ("hydra: {run: {dir: x}}\n", "hydra"),
    ],
)
def test_bad_recipe_files_are_named(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=said) as caught:
        compose([f"recipe={path}"])
    assert str(path) in str(caught.value)


def test_misspelt_key_in_a_recipe_is_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("optimizer:\n  weigth_decay: 1\n")
    with pytest.raises(ConfigError, match="weigth_decay"):
        compose([f"recipe={path}"])


@pytest.mark.parametrize("command", [["list"], ["show"], ["validate"], ["env"], ["--help"], ["list", "precision"]])
def test_commands_that_do_not_train_import_no_torch_and_are_quick(command, tmp_path):
    code = (
        "import sys, json; from mprun.cli import main; status = main(sys.argv[1:]);"
        "print(json.dumps([status, sorted(m for m in ('torch', 'timm', 'wandb', 'torchvision', 'sklearn') if m in sys.modules)]))"
    )
    # Processor time, so that a busy machine does not count.
    best = 99.0
    for _ in range(3):
        begin = os.times()
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        spent = os.times()
        best = min(best, spent.children_user + spent.children_system - begin.children_user - begin.children_system)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []], done.stderr
    assert best < 1.5
    assert list(tmp_path.iterdir()) == []
