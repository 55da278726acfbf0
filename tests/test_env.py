"""The surroundings of a run: files, ranks, random numbers, devices, and what env.json says."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mprun.config import Device, Mode
from mprun.errors import ConfigError
from mprun.training import env, host

CPU = torch.device("cpu")


def python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def strict_json(text: str) -> Any:
    """As every other JSON parser reads it: NaN and Infinity are errors."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_import_needs_no_torch() -> None:
    loaded = python("import sys, mprun.training.env; print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    assert loaded.strip() == "[]"


# --- files ---------------------------------------------------------------------------------------------------------


def test_json_holds_no_nan_and_gives_floats_back(tmp_path: Path) -> None:
    value = {"loss": [float("nan"), float("inf"), -np.inf, 0.1], "n": np.int64(3), "t": torch.tensor(2.5), "on": True}
    env.atomic_write_json(tmp_path / "a.json", {**value, "mode": Mode.master, "path": tmp_path, "none": None})
    read = env.from_json(strict_json((tmp_path / "a.json").read_text()))
    assert np.isnan(read["loss"][0])
    assert read["loss"][1:] == [float("inf"), -float("inf"), 0.1]
    assert (read["n"], read["t"], read["on"], read["none"]) == (3, 2.5, True, None)
    assert (read["mode"], read["path"]) == ("master", str(tmp_path))


def test_a_full_disk_costs_the_new_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    env.atomic_write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        env.atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_config_hash_counts_what_changes_numbers_and_nothing_else() -> None:
    config = {"seed": 0, "optimizer": {"lr": 1e-3, "name": "adamw"}, "tracking": {"mode": "auto"}, "name": "a"}
    base = env.config_hash(config)
    assert len(base) == 12
    assert set(base) <= set("0123456789abcdef")
    for other in (
        {"tracking": {"mode": "online"}},
        {"name": "b"},
        {"resume": "x.pt"},
        {"command": "eval"},
        {"optimizer": {"name": "adamw", "lr": 0.001}},
    ):
        assert env.config_hash({**config, **other}) == base, other
    for other in ({"seed": 1}, {"optimizer": {"lr": 1e-2, "name": "adamw"}}, {"precision": {"mode": "pure"}}):
        assert env.config_hash({**config, **other}) != base, other
    # A nested "name" is no run name, and an Enum is the word that stands in the file.
    assert env.config_hash({"optimizer": {"name": "sgd"}}) != env.config_hash({"optimizer": {"name": "adamw"}})
    assert env.config_hash({"mode": Mode.pure}) == env.config_hash({"mode": "pure"})


# --- processes, devices --------------------------------------------------------------------------------------------


def test_rank_and_world_size_come_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (env.rank(), env.world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (env.rank(), env.world_size()) == (3, 8)
    monkeypatch.setenv("RANK", "-1")
    with pytest.raises(ConfigError, match=r"RANK='-1'"):
        env.rank()


def test_a_device_is_never_replaced_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert env.resolve_device(Device.auto) == env.resolve_device(Device.cpu) == CPU
    with pytest.raises(ConfigError, match=r"device=cuda: .*CUDA_VISIBLE_DEVICES=''.*device=cpu or device=auto"):
        env.resolve_device(Device.cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert env.resolve_device(Device.auto) == env.resolve_device(Device.cuda) == torch.device("cuda", 2)
    assert env.resolve_device(Device.cpu) == CPU


PEAK = "from types import SimpleNamespace as N; from mprun.training import env; peak = lambda: env.peak_memory_bytes(N(type='cpu'))"


def test_peak_memory_is_in_bytes_and_stays_after_the_peak() -> None:
    before, after = python(f"{PEAK}\nbefore = peak()\nblock = b'x' * 2**27\ndel block\nprint(before, peak())").split()
    assert 0.9 * 2**27 < int(after) - int(before) < 2 * 2**27


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss inherits the parent's size on Linux only")
def test_peak_memory_is_not_the_parents() -> None:
    # This process holds torch: some hundred MB. A bare child has none of it.
    assert 1e6 < int(python(f"{PEAK}\nprint(peak())")) < 150e6 < env.peak_memory_bytes(CPU)


# --- random numbers ------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    # An odd number of normal values leaves one cached inside python's and numpy's generators.
    return [random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), np.random.rand(), torch.randn(3).tolist()]


def test_rng_survives_a_checkpoint_that_loads_weights_only(tmp_path: Path) -> None:
    env.seed_everything(7)
    draws()
    torch.save({"rng": env.capture_rng()}, tmp_path / "c.pt")
    expected = [draws() for _ in range(3)]
    env.seed_everything(8)
    assert draws() != expected[0]
    env.restore_rng(torch.load(tmp_path / "c.pt", weights_only=True)["rng"])
    assert [draws() for _ in range(3)] == expected


def test_capturing_draws_nothing() -> None:
    env.seed_everything(7)
    expected = draws()
    env.seed_everything(7)
    env.restore_rng(env.capture_rng())
    assert draws() == expected


def test_seed_reaches_every_generator_and_takes_large_numbers() -> None:
    for seed in (0, 2**40 + 1):
        env.seed_everything(seed)
        first = draws()
        env.seed_everything(seed)
        again = draws()
        env.seed_everything(seed + 1)
        other = draws()
        assert first == again
        assert all(a != b for a, b in zip(first, other, strict=True))


# --- the record ----------------------------------------------------------------------------------------------------


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "one")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_names_commit_and_every_change(repo: Path) -> None:
    clean = host.git_state(repo)
    assert clean is not None
    assert (clean["commit"], clean["dirty"], clean["diff"]) == (git(repo, "rev-parse", "HEAD"), False, "")
    (repo / "sub").mkdir()
    (repo / "sub" / "new.py").write_text("y = 2\n")
    (repo / "a.py").write_text("x = 5\n")
    dirty = host.git_state(repo / "sub")
    assert dirty is not None
    assert dirty["dirty"] is True
    assert "+x = 5" in dirty["diff"]
    assert dirty["untracked"] == ["sub/new.py"]
    assert dirty["diff_truncated"] is False


def test_git_diff_is_capped(repo: Path) -> None:
    (repo / "a.py").write_text("x = 'é'\n" * 100_000)
    state = host.git_state(repo)
    assert state is not None
    assert state["diff_truncated"] is True
    assert 0.9 * host.DIFF_LIMIT_BYTES < len(state["diff"].encode()) <= host.DIFF_LIMIT_BYTES


def test_git_runs_no_program_that_the_checkout_names(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = repo / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {repo}/sprung\n")
    trap.chmod(0o755)
    for key in ("diff.external", "core.fsmonitor", "diff.t.textconv"):
        git(repo, "config", key, str(trap))
    (repo / ".gitattributes").write_text("*.py diff=t\n")
    (repo / "a.py").write_text("x = 2\n")
    assert "+x = 2" in (host.git_state(repo) or {})["diff"]
    assert not (repo / "sprung").exists()


def test_git_state_is_null_where_there_is_nothing_to_say(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Installed into an environment inside somebody's checkout: in it, but no part of it.
    (repo / "site-packages").mkdir()
    (repo / "site-packages" / "env.py").write_text("")
    assert host.git_state(repo / "site-packages", tracked="env.py") is None
    assert host.git_state(repo, tracked="a.py") is not None
    # A hook's variables point git elsewhere; they must not count.
    monkeypatch.setenv("GIT_DIR", str(repo / "nowhere"))
    assert host.git_state(repo) is not None
    monkeypatch.delenv("GIT_DIR")
    assert host.git_state(Path("/")) is None
    monkeypatch.setenv("PATH", str(repo / "nowhere"))
    assert host.git_state(repo) is None


def test_a_slow_git_does_not_hold_up_a_run(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "bin").mkdir()
    (repo / "bin" / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    (repo / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{repo}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(host, "GIT_TIMEOUT_S", 0.2)
    begin = time.monotonic()
    assert host.git_state(repo) is None
    assert time.monotonic() - begin < 5


def test_environment_says_what_was_really_set(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    monkeypatch.setenv("MY_API_KEY", "s3cret-value")
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    config = {"seed": 3, "optimizer": {"lr": 1e-3}}

    def describe() -> dict[str, Any]:
        return env.describe_environment(
            ["mprun", "seed=3"], config, seed=3, device=CPU, cpu_fp16="fast", data_sha256="ab", recipe={"name": "r"}
        )

    try:
        matmul.allow_tf32, cudnn.allow_tf32 = True, False
        about = describe()
        assert about["tf32"] == {"matmul": True, "cudnn": False}
        matmul.allow_tf32, cudnn.allow_tf32 = False, True
        assert describe()["tf32"] == {"matmul": False, "cudnn": True}
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
    assert about["argv"] == ["mprun", "seed=3"]
    assert (about["seed"], about["cpu_fp16"], about["data_sha256"], about["recipe"]) == (3, "fast", "ab", {"name": "r"})
    assert about["config_hash"] == env.config_hash(config)
    assert about["versions"]["torch"] == torch.__version__.split("+")[0]
    assert set(about["versions"]) >= {"python", "mprun", "torchvision", "timm", "hydra-core", "wandb", "numpy"}
    assert about["host"]["torch_threads"] == torch.get_num_threads()
    # The caller's own checkout is there, whether or not mprun runs from one.
    assert str(repo) in [(about[key] or {}).get("root") for key in ("git", "git_caller")]
    assert "s3cret-value" not in strict_json_dump(about)


def strict_json_dump(value: Any) -> str:
    text = json.dumps(value)
    strict_json(text)
    return text


def test_versions_of_what_is_not_installed_are_null() -> None:
    assert host.versions(["numpy", "no-such-package-at-all"]) == {
        "numpy": np.__version__,
        "no-such-package-at-all": None,
    }
