"""``precision=./mine.yaml``: a file is an option like those of ``conf/precision``, checked when it is read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mprun import precision_files
from mprun.cli import main
from mprun.commands.search import _write_option
from mprun.compose import compose
from mprun.config import DType, Mode, ScaleKind
from mprun.errors import ConfigError, MprunError
from mprun.lab.findings import _yaml
from mprun.lab.found import Found
from mprun.lab.recommended import option_text
from mprun.options import options, tree

TINY = ["model=mlp", "dataset=digits", "dataset.limit=64", "train.batch_size=32", "tracking=disabled", "device=cpu"]
WHOLE = """# kept for a reason
name: mine
mode: autocast
compute_dtype: float16
fp32_modules: ['**']
loss_scale:
  kind: static
  init: 512.0
"""


def write(path: Path, text: str = WHOLE) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def told(path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose([f"precision={write(path, text)}"])
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_file_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    found = compose(["precision=./mine.yaml", "precision.loss_scale.init=1024"])
    p = found.config.precision
    assert (p.name, p.mode, p.compute_dtype, p.fp32_modules) == ("mine", Mode.autocast, DType.float16, ["**"])
    assert (p.loss_scale.kind, p.loss_scale.init, p.param_dtype) == (ScaleKind.static, 1024.0, DType.float32)
    assert found.overrides[0] == f"precision={tmp_path / 'mine.yaml'}"
    assert found.choices["precision"] == "mine"


@pytest.mark.parametrize("option", sorted(options("precision")))
def test_a_copy_of_every_option_means_the_same(tmp_path: Path, option: str) -> None:
    shutil.copy(tree("conf") / "precision" / f"{option}.yaml", copy := tmp_path / f"{option}.yaml")
    assert compose([f"precision={copy}"]).config.precision == compose([f"precision={option}"]).config.precision


def test_a_file_named_like_an_option_is_not_that_option(tmp_path: Path) -> None:
    write(tmp_path / "fp32.yaml")
    assert compose([f"precision={tmp_path}/fp32.yaml"]).config.precision.loss_scale.init == 512
    assert compose(["precision=fp32"]).config.precision.mode is Mode.full
    (tmp_path / "two").mkdir()
    for folder, init in ((tmp_path, 2.0), (tmp_path / "two", 4.0)):
        path = write(folder / "same.yaml", WHOLE.replace("512.0", str(init)))
        assert compose([f"precision={path}"]).config.precision.loss_scale.init == init


def test_a_file_can_start_from_an_option(tmp_path: Path) -> None:
    path = write(tmp_path / "short.yaml", "defaults: [fp16_dynamic]\nloss_scale:\n  init: 8.0\n")
    p = compose([f"precision={path}"]).config.precision
    assert (p.name, p.mode, p.loss_scale.kind, p.loss_scale.init) == ("short", Mode.autocast, ScaleKind.dynamic, 8.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WHOLE + "compute_dtyp: float16\n", "unknown key compute_dtyp: did you mean "),
        (WHOLE + "  initial: 3\n", "unknown key loss_scale.initial"),
        ("precision:\n  mode: full\n", "unknown key precision: write its keys at the top level"),
        ("fp32_modules: [head]\n", "mode and compute_dtype missing"),
        (WHOLE.replace("float16", "float12"), "compute_dtype='float12' is not legal"),
        (WHOLE.replace("512.0", "-1"), "precision.loss_scale.init=-1.0 is not legal"),
        (WHOLE.replace("512.0", "much"), "loss_scale.init='much' is not legal"),
        (WHOLE.replace("float16", "bfloat16"), "only float16 needs a loss scale"),
        ("defaults: [fp17]\n", "defaults: fp17 is not an option of precision"),
        ("defaults: fp16_dynamic\n", "is not a list of options"),
        ("mode: autocast\ncompute_dtype: bfloat16\nloss_scale: none\n", "loss_scale='none' is not a group of keys"),
        ("- 1\n", "is not a mapping"),
        ("a: [\n", "is not readable YAML"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    assert says in told(tmp_path / "bad.yaml", text)


def test_a_missing_file_lists_the_options() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist .*fp16_dynamic"):
        compose(["precision=./nowhere.yaml"])


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    rows = [f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    path = write(tmp_path / "bomb.yaml", "\n".join(["a: &a [x, x, x, x, x, x, x, x, x, x]", *rows]))
    with pytest.raises(MprunError, match="aliases counted; the most is 5,000"):
        compose([f"precision={path}"])


def test_show_and_validate_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.yaml")
    assert main(["show", f"precision={path}"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).precision.loss_scale.init == 512
    assert main(["validate", f"precision={path}"]) == 0
    assert "precision=mine" in capsys.readouterr().out
    assert main(["validate", f"precision={write(tmp_path / 'bad.yaml', 'mod: full')}"]) == 2
    assert "bad.yaml: unknown key mod" in capsys.readouterr().err


def test_a_run_is_recorded_resumed_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine.yaml")
    assert main([*TINY, "precision=./mine.yaml", "train.steps=2", "hydra.run.dir=one"]) == 0
    env = json.loads((tmp_path / "one" / "env.json").read_text())
    assert env["precision_file"]["name"] == str(path)
    assert len(env["precision_file"]["sha256"]) == 64
    words = OmegaConf.load(tmp_path / "one" / ".hydra" / "overrides.yaml")
    assert f"precision={path}" in words
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["resume=../one", "train.steps=3"]) == 0
    assert main(["rerun", "../one", "hydra.run.dir=two"]) == 0
    for folder in (tmp_path / "one", tmp_path / "elsewhere" / "two"):
        saved = OmegaConf.load(folder / "config.yaml").precision
        assert (saved.name, saved.loss_scale.init) == ("mine", 512.0)


def test_a_run_goes_on_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine.yaml")
    words = [*TINY, "precision=./mine.yaml", "precision.loss_scale.patience=7", "train.steps=2"]
    assert main([*words, "hydra.run.dir=one"]) == 0
    # As if what goes on were another process, which has never seen the file.
    precision_files._read.clear()
    del ConfigStore.instance().repo["precision"]["mine.yaml"]
    before = json.loads((tmp_path / "one" / "env.json").read_text())["precision_file"]
    was = OmegaConf.load(tmp_path / "one" / "config.yaml").precision
    path.unlink()
    assert main(["resume=one", "train.steps=3"]) == 0
    assert main(["rerun", "one", "hydra.run.dir=two"]) == 0
    for name in ("one", "two"):
        folder = tmp_path / name
        assert OmegaConf.load(folder / "config.yaml").precision == was
        assert f"precision={path}" in OmegaConf.load(folder / ".hydra" / "overrides.yaml")
        assert json.loads((folder / "env.json").read_text())["precision_file"] == before
    assert (was.name, was.loss_scale.init, was.loss_scale.patience) == ("mine", 512, 7)
    assert main(["resume=one", "precision.loss_scale.patience=8", "train.steps=4"]) == 0
    assert OmegaConf.load(tmp_path / "one" / "config.yaml").precision.loss_scale.patience == 8


def test_a_file_that_nothing_stands_in_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s3cret")
    path = write(tmp_path / "mine.yaml")
    assert main([*TINY, f"precision={path}", "train.steps=2", "hydra.run.dir=one"]) == 0
    path.unlink()
    assert main(["resume=one", f"precision={path}", "train.steps=3"]) == 2  # typed: it has to be there
    assert f"precision={path} does not exist" in capsys.readouterr().err
    saved = tmp_path / "one" / "config.yaml"
    text = saved.read_text()
    saved.write_text(text.replace("name: mine", "name: ${oc.env:SECRET}"))
    assert main(["resume=one", "train.steps=3"]) == 2
    said = capsys.readouterr().err
    assert f"precision={path}, with which {tmp_path / 'one'} was started, does not exist any more" in said
    assert "put the file back, or give precision=... anew" in said
    assert "s3cret" not in said
    saved.write_text(text)
    assert main(["resume=one", "precision=fp32", "train.steps=3"]) == 0


def test_a_recipe_that_is_gone_is_told_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "own.yaml", "train:\n  steps: 2\n")
    assert main([*TINY, "recipe=./own.yaml", "hydra.run.dir=one"]) == 0
    path.unlink()
    for words in (["resume=one", "train.steps=3"], ["rerun", "one"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert (
            f"recipe={path}, with which {tmp_path / 'one'} was started, does not exist any more: put the file back"
            in said
        )


@pytest.mark.slow
def test_a_sweep_over_files_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.yaml", WHOLE.replace("mine", "a"))
    write(tmp_path / "b.yaml", WHOLE.replace("mine", "b").replace("512", "256"))
    assert main(["-m", *TINY, "train.steps=2", "precision=./a.yaml,./b.yaml,fp32", "sweep.name=files"]) == 0
    found = {
        OmegaConf.load(path).precision.name: OmegaConf.load(path).precision.loss_scale.init
        for path in (tmp_path / "outputs" / "sweeps" / "files").glob("*/*/config.yaml")
    }
    assert found == {"a": 512.0, "b": 256.0, "fp32": 65536.0}


def test_reading_a_file_imports_no_torch(tmp_path: Path) -> None:

    code = f"import sys; from mprun.cli import main; main(['show', 'precision={write(tmp_path / 'm.yaml')}']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- files that the lab writes ----------------------------------------------------------------------------------------


@given(st.from_regex(r"[A-Za-z0-9_]{1,4}(\.[A-Za-z0-9_]{1,4}){0,2}", fullmatch=True))
@example("1.10")  # YAML's number 1.1, which is another module
@example("1_0")
@example("1e5")
@example("on")
@example("No")
def test_the_name_of_a_module_survives_a_file(name: str) -> None:
    assert OmegaConf.create(f"fp32_modules:\n  - {_yaml(name)}\n").fp32_modules[0] == name
    text = option_text({"fp32_modules": [name]}, ["about"], {name: "why"})
    assert OmegaConf.create(text).fp32_modules[0] == name
    assert text.endswith("# why\n")


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**24])
def test_a_scale_beyond_the_bounds_of_the_policy_widens_them(tmp_path: Path, scale: float) -> None:
    bounds = ["precision.loss_scale.min=1", "precision.loss_scale.max=65536"]
    config = compose(["precision=fp16_dynamic", *bounds]).config
    (tmp_path / "precision").mkdir()
    file = _write_option(config, Found("none", None, loss_scale=scale), tmp_path)
    assert compose([f"precision={file}"]).config.precision.loss_scale.init == scale
