"""The installed wheel: configuration and recipes travel in it, and a run from another folder uses it, not the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAIN = [
    "precision=fp16_dynamic",
    "model=mlp",
    "tracking=disabled",
    "device=cpu",
    "train.steps=2",
    "train.batch_size=32",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built without network from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)], check=True
    )
    (built,) = folder.glob("mprun-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The ``bin`` folder of a virtual environment with the wheel, and all else from this environment.

    A path in a ``.pth`` file is put on ``sys.path`` without reading the ``.pth`` files that lie there, so the checkout, which is
    installed editable here, does not come along.
    """
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check",
                    "--no-index", "--no-deps", str(wheel)], check=True)  # fmt: skip
    own = subprocess.run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                         capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    borrowed = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    Path(own, "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return home / "bin"


def call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, free of this environment's Python settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)


def test_the_wheel_holds_configuration_and_recipes(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        expected = {f"mprun/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.yaml")}
        assert expected
        assert expected <= inside
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mprun").rglob("*.py")}
    assert modules <= inside
    assert "hydra_plugins/mprun_sweeps.py" in inside
    assert "hydra_plugins/__init__.py" not in inside, "other packages have plugins there, too"
    assert not [name for name in inside if name.startswith(("tests/", "bench/", "outputs/"))]


@pytest.mark.parametrize("way", ["console script", "python -m"])
def test_an_installed_copy_trains_from_any_folder(installed, tmp_path, way):
    command = [str(installed / "mprun")] if way == "console script" else [str(installed / "python"), "-m", "mprun"]
    done = call([*command, *TRAIN], tmp_path)
    assert done.returncode == 0, done.stderr
    run = (tmp_path / "outputs" / "latest").resolve()
    assert json.loads((run / "result.json").read_text())["steps_applied"] == 2
    # The checkout would be found by its git state; the wheel's copy is in none.
    assert json.loads((run / "env.json").read_text())["git"] is None


def test_the_installed_copy_is_not_the_checkout(installed, tmp_path):
    code = "import mprun, mprun.compose as c; print(mprun.__file__); print(c.tree('conf')); print(c.tree('recipes'))"
    done = call([str(installed / "python"), "-c", code], tmp_path)
    places = [Path(line) for line in done.stdout.split()]
    assert len(places) == 3
    assert all(path.is_relative_to(installed.parent) for path in places)
    assert not any(path.is_relative_to(ROOT) for path in places)


def test_recipes_of_the_wheel_are_found(installed, tmp_path):
    done = call([str(installed / "mprun"), "list", "recipe"], tmp_path)
    assert "digits/vit_fp16" in done.stdout
    done = call([str(installed / "mprun"), "validate", "recipe=digits/resnet_fp16"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model=resnet" in done.stdout


def test_an_installed_copy_sweeps(installed, tmp_path):
    done = call([str(installed / "mprun"), "-m", *TRAIN, "seed=0,1"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs: 2 ok" in done.stdout
