"""``model.init``: where a run starts from."""

from __future__ import annotations

import pytest
import torch

from mprun.errors import CheckpointError
from mprun.models.gpt import gpt
from mprun.training import checkpoint
from mprun.training.step import train_step
from tests.conftest import batch
from tests.test_casting import MASTER


def tied_gpt(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return gpt(input_shape=(8,), num_classes=11, depth=1, dim=16, heads=2)


def test_tied_weights_start_from_the_fp32_master_and_not_from_its_rounded_view(make_state, tmp_path):
    state = make_state(tied_gpt(), **MASTER, **{"dataset.task": "language_model", "optimizer.lr": 1e-3})
    ids = torch.arange(9)[None]
    train_step(state, [batch(ids[:, :-1], ids[:, 1:])])
    checkpoint.save(checkpoint.snapshot(state), tmp_path / "a.pt")
    fresh = tied_gpt(1)
    checkpoint.load_init(fresh, tmp_path / "a.pt")
    truth = dict(state.weights)
    assert truth["wte.weight"].dtype == torch.float32
    for name, p in fresh.named_parameters():
        assert torch.equal(p, truth[name]), name
    assert fresh.head.weight is fresh.wte.weight


@pytest.mark.parametrize(
    "content", [{"format": 1}, {"format": 1, "model": 3}, {"format": 1, "model": {}, "masters": 3}], ids=str
)
def test_a_file_that_only_looks_like_a_checkpoint_is_refused_by_name(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        checkpoint.load_init(tied_gpt(), tmp_path / "a.pt")
