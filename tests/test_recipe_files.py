"""Recipe files that are hostile or written by a beginner: refused in one block, before anything is composed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mprun.compose import compose
from mprun.errors import RecipeError


def told(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    began = time.perf_counter()
    with pytest.raises(RecipeError) as error:
        compose([f"recipe={path}"])
    assert time.perf_counter() - began < 5
    return str(error.value)


def test_aliases_that_multiply_or_never_end_are_refused(tmp_path: Path) -> None:
    rows = [f"  {b}: &{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    bomb = "\n".join(["meta:", "  a: &a [x, x, x, x, x, x, x, x, x, x]", *rows])
    assert "aliases counted; the most is 5,000" in told(tmp_path / "bomb.yaml", bomb)
    assert "holds itself" in told(tmp_path / "cycle.yaml", "meta: &a\n  x: *a\n")


def test_an_alias_that_stands_for_little_is_legal(tmp_path: Path) -> None:
    path = tmp_path / "alias.yaml"
    path.write_text("meta:\n  a: &a [x, y]\n  b: *a\n", encoding="utf-8")
    assert compose([f"recipe={path}"]).config.meta["b"] == ["x", "y"]


def test_an_option_beside_defaults_says_where_it_belongs(tmp_path: Path) -> None:
    text = told(tmp_path / "option.yaml", "precision: bf16\n")
    assert "'- override /precision: bf16'" in text
    assert "defaults" in text


def test_keyword_arguments_can_be_given_as_one_mapping() -> None:
    whole = compose(["model=mlp", "model.kwargs={hidden: [32], dropout: 0.1}"]).config
    parts = compose(["model=mlp", "model.kwargs.hidden=[32]", "model.kwargs.dropout=0.1"]).config
    assert whole == parts


def test_nesting_without_end_is_not_readable(tmp_path: Path) -> None:
    assert "is not readable YAML" in told(tmp_path / "deep.yaml", "meta: {x: " + "[" * 5000 + "]" * 5000 + "}\n")


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:WANDB_API_KEY}",
        "${oc.env:HOME,none}",
        "x${oc.env: HOME}",
        "${oc.${meta.a}:HOME}",
        "${oc.env:${meta.a}}",
        "${oc.env:MPRUN_X,${oc.env:HOME}}",
        "${oc.decode:meta.a}",
        "${hydra:runtime.cwd}",
    ],
)
def test_a_file_cannot_look_up_the_environment(tmp_path: Path, value: str) -> None:
    text = told(tmp_path / "curious.yaml", f"meta:\n  a: env\n  title: '{value}'\n")
    assert "line 3" in text
    assert value in text
    assert "MPRUN_DATA" in text
    precision = tmp_path / "precision.yaml"
    precision.write_text(f"defaults: [fp16_dynamic]\nfp32_modules: ['{value}']\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="line 2"):
        compose([f"precision={precision}"])


def test_a_file_may_look_up_keys_and_variables_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPRUN_TITLE", "mine")
    path = tmp_path / "modest.yaml"
    path.write_text(
        "meta:\n  title: ${oc.env:MPRUN_TITLE}\n  other: ${oc.env:MPRUN_NONE,null}\n  seed: ${seed}\n", encoding="utf-8"
    )
    assert compose([f"recipe={path}"]).config.meta == {"title": "mine", "other": None, "seed": 0}
