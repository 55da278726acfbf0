"""``deterministic=true``: what a GPU needs for it is set, and what stands in the way is told in a line."""

from __future__ import annotations

import os

import pytest
import torch

from mprun.cli import main
from mprun.errors import ConfigError
from mprun.training.build import CUBLAS, switches
from tests.conftest import CPU, make_config

CUDA = torch.device("cuda", 0)


def test_cublas_gets_its_workspace_for_a_deterministic_run_on_a_gpu(monkeypatch):
    """torch refuses every product of a GPU under deterministic algorithms without it."""
    monkeypatch.delenv(CUBLAS, raising=False)
    for device, on, seen in ((CUDA, True, ":4096:8"), (CUDA, False, None), (CPU, True, None)):
        with switches(make_config(deterministic=on), device):
            assert os.environ.get(CUBLAS) == seen
            assert torch.are_deterministic_algorithms_enabled() is on
        assert CUBLAS not in os.environ
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_reproducible_workspace_of_the_users_stays(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":16:8")
    with switches(make_config(deterministic=True), CUDA):
        assert os.environ[CUBLAS] == ":16:8"
    assert os.environ[CUBLAS] == ":16:8"


def test_another_workspace_is_refused_where_it_matters(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":0:0")
    with (
        pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=':0:0'.*set it to :4096:8 or :16:8"),
        switches(make_config(deterministic=True), CUDA),
    ):
        pass
    assert not torch.are_deterministic_algorithms_enabled()
    with switches(make_config(deterministic=True), CPU), switches(make_config(), CUDA):
        pass


PUTS = """
from torch import nn
import torch

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y.put(torch.zeros(1, dtype=torch.long), y.new_ones(1))
"""


def test_an_operation_without_a_reproducible_kernel_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "puts_numbers.py").write_text(PUTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [
        "model=python",
        "model.name=puts_numbers:Net",
        "trust=[puts_numbers]",
        "precision=fp32",
        "train.steps=1",
        "tracking=disabled",
    ]
    assert main([*words, "deterministic=true"]) == 2
    told = capsys.readouterr().err
    assert "deterministic=true: torch has no reproducible kernel for put_ on this device" in told
    assert "Traceback" not in told
    assert main(words) == 0
