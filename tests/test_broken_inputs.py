"""Models and datasets of a user's own that cannot work as they are: one line with the cure, and exit statuses that mean something."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mprun.cli import main
from tests.case_code import latest, result
from tests.conftest import BF16, FP16, batch

HERE = "tests.test_broken_inputs"
RUN = ["trust=[tests]", "tracking=disabled", "device=cpu", "precision=fp32", "train.batch_size=4", "probe.every=0",
       "train.epochs=1"]  # fmt: skip
SET = [*RUN, "model=mlp", "dataset=python"]
NET = [*RUN, "dataset=digits", "dataset.limit=8", "model=python"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Samples(Dataset[Any]):
    """Eight samples in three classes; ``inputs`` makes one of its number, and ``labels`` its label."""

    num_classes = 3

    def __init__(self, inputs: Any = lambda i: torch.full((4,), float(i)), labels: Any = lambda i: i % 3) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return self.inputs(i), self.labels(i)


class Uncountable(Samples):
    def __len__(self) -> int:
        return -1


def dies(i: int) -> Tensor:
    if i == 7:
        os._exit(3)
    return torch.full((4,), float(i))


def uncountable() -> tuple[Any, Any]:
    return Uncountable(), Samples()


def dying() -> tuple[Any, Any]:
    return Samples(dies), Samples()


def bytes_() -> tuple[Any, Any]:
    images = Samples(lambda i: torch.full((3, 4, 4), i, dtype=torch.uint8))
    return images, images


def late_label() -> tuple[Any, Any]:
    return Samples(), Samples(labels=lambda i: 3 if i == 5 else 0)


def val_of_bytes() -> tuple[Any, Any]:
    return Samples(), Samples(lambda i: torch.zeros(4, dtype=torch.uint8))


def val_of_images() -> tuple[Any, Any]:
    return Samples(), Samples(lambda i: torch.zeros(4, 1))


def channels_last() -> tuple[Any, Any]:
    images = Samples(lambda i: torch.zeros(8, 8, 3))
    return images, images


class Net(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class NoMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, device="meta"))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.LazyLinear(10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class ThroughNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(x.detach().float().numpy().mean())


made = Net()
number = 5


# --- inputs that the model does not take ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [{}, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("inputs", "model", "said"),
    [
        (torch.zeros(2, 4, dtype=torch.uint8), nn.Linear(4, 2), ["uint8 of shape (4,)", "return float32", "/ 255"]),
        (torch.zeros(2, 4, dtype=torch.int64), nn.Linear(4, 2), ["int64 of shape (4,)", "floating-point inputs only"]),
        (torch.zeros(2, 8, 8, 3), nn.Conv2d(3, 2, 3), ["float32 of shape (8, 8, 3)", "image.permute(2, 0, 1) from"]),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), nn.Conv2d(3, 2, 3), ["permute(2, 0, 1), and float32"]),
        (torch.zeros(2), nn.Linear(1, 2), ["float32 of shape ()", "a tensor of shape (1,)"]),
    ],
)  # fmt: skip
def test_the_change_that_makes_the_model_run_is_told(make_state, inputs, model, said, precision):
    from mprun.training.inputs import input_trouble

    state = make_state(model, **precision)
    one = batch(inputs, torch.zeros(2, dtype=torch.int64))
    with pytest.raises((RuntimeError, IndexError)) as raised, state.policy.region("cpu"):
        state.model(state.policy.cast_inputs(one.inputs))
    text = input_trouble(raised.value, state, one)
    assert text is not None
    assert all(words in text for words in said), text
    assert len(text.splitlines()) == 1


def test_an_error_that_no_change_cures_is_the_users_to_see(make_state):
    from mprun.training.inputs import input_trouble

    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("a bug of the user")

    state = make_state(Fails())
    assert (
        input_trouble(ValueError("a bug"), state, batch(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2))) is None
    )


def test_the_trial_moves_nothing(make_state):
    from mprun.training.inputs import input_trouble

    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    state = make_state(norm)
    before, rng = {key: value.clone() for key, value in norm.state_dict().items()}, torch.get_rng_state()
    assert input_trouble(RuntimeError("no"), state, batch(torch.ones(2, 4, dtype=torch.int32), torch.zeros(2)))
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bytes_", "the model does not take inputs uint8 of shape (3, 4, 4)"),
        ("uncountable", "the len() of the training set fails"),
        ("val_of_bytes", "an input is uint8 of 1 dimensions, and in the training set float32 of 1 dimensions"),
        ("val_of_images", "an input is float32 of 2 dimensions"),
    ],
)
def test_a_set_that_cannot_be_trained_on_is_refused_before_anything_exists(folder, capsys, name, said):
    assert main([*SET, f"dataset.name={HERE}:{name}"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not (folder / "outputs").exists()


def test_images_that_may_be_channels_last_are_told(folder, capsys):
    assert main([*RUN, "model=mlp", "dataset=python", f"dataset.name={HERE}:channels_last"]) == 0
    assert "8 channels of 8 x 3 pixels" in capsys.readouterr().err


# --- how a run ends ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_told_in_two_lines(folder, capsys):
    assert main([*SET, f"dataset.name={HERE}:dying", "dataset.workers=1", "train.shuffle=false"]) == 1
    told = capsys.readouterr().err
    assert "a process that loads data (dataset.workers) is gone: it exited unexpectedly" in told
    assert "dataset.workers=0 shows where" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("DataLoader worker (pid 71) is killed by signal: Killed. ", "fewer dataset.workers"),
        ("DataLoader worker (pid(s) 7, 71) exited unexpectedly", "dataset.workers=0 shows where"),
    ],
)
def test_messages_about_workers(text, advice):
    from mprun.data.workers import dead_worker

    assert advice in (dead_worker(RuntimeError(text)) or "")
    assert dead_worker(RuntimeError("something else")) is None


def test_what_ends_a_run_that_has_begun_is_a_failure_and_no_refusal(folder, capsys):
    assert main([*SET, f"dataset.name={HERE}:late_label"]) == 1
    assert "label 3 of sample 5 is not legal" in capsys.readouterr().err
    assert result(latest())["status"] == "failed"
    assert result(latest())["exit_code"] == 1


# --- models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("made", "is a Net, not a class or function that returns a torch.nn.Module"),
        ("number", "is a int, not a class or function"),
        ("NoMemory", "parameter body.1.weight has no values yet (a lazy or meta module)"),
        ("Lazy", "has no values yet (a lazy or meta module)"),
    ],
)
@pytest.mark.parametrize("command", ["train", "estimate"])
def test_a_model_that_is_none_yet_is_refused(folder, capsys, name, said, command):
    assert main([command, *NET, f"model.name={HERE}:{name}"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not (folder / "outputs").exists()


def test_a_model_that_leaves_torch_cannot_be_estimated_and_can_be_measured(folder, capsys):
    words = ["estimate", *NET, f"model.name={HERE}:ThroughNumpy"]
    assert main(words) == 2
    assert "cannot be estimated from shapes alone" in capsys.readouterr().err
    assert main([*words, "--measure"]) == 0


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_outputs_are_refused_by_name(folder, capsys, name):
    words = ["dataset=synthetic", "dataset.kwargs.image_size=80", "model=torchvision", "model.kwargs.aux_logits=true"]
    assert main([*RUN, *words, f"model.name={name}"]) == 2
    assert "model.kwargs.aux_logits=True" in capsys.readouterr().err


# --- arguments of the built-in sets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["mean=0.5", "mean=[a,b,c]", "mean=null", "mean=[1,2]", "std=[1,1,true]", "std=[0,1,1]", "std=['.nan',1,1]", "std=[nan,1,1]"]
)  # fmt: skip
def test_a_normalisation_is_three_numbers(folder, capsys, word):
    words = ["dataset=imagefolder", "dataset.root=images", "model=mlp", f"dataset.kwargs.{word}"]
    assert main([*RUN, *words]) == 2
    told = capsys.readouterr().err
    assert f"dataset.kwargs.{word.partition('=')[0]}=" in told
    assert "must be three numbers" in told


def test_a_hash_of_digits_only_is_a_hash(folder, capsys):
    (folder / "text.txt").write_text("some text " * 50)
    words = [
        "dataset=text",
        "dataset.root=text.txt",
        "dataset.kwargs.context=4",
        "model=gpt",
        "dataset.kwargs.sha256=12",
    ]
    assert main([*RUN, *words]) == 2
    assert "expected 12" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["image_size=100000000", "examples=9007199254740992"])
def test_images_beyond_all_memory_are_told(folder, capsys, word):
    words = ["dataset=synthetic", "dataset.kwargs.image_size=8", "model=mlp", f"dataset.kwargs.{word}"]
    assert main([*RUN, *words]) == 2
    assert "dataset.kwargs" in capsys.readouterr().err


def test_arguments_that_fit_no_size_are_named(folder, capsys):
    words = ["dataset=synthetic", "dataset.kwargs.image_size=16", "model=timm", "model.name=test_resnet"]
    assert main([*RUN, *words, "model.kwargs.drop_rate=2"]) == 2
    assert "with model.kwargs={'drop_rate': 2}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "word", "said"),
    [
        ("mlp", "hidden=x", "model.kwargs.hidden='x' is not a list, each of it a whole number"),
        ("mlp", "hidden=5", "model.kwargs.hidden=5 is not a list"),
        ("mlp", "hidden=[1.5]", "model.kwargs.hidden=[1.5] is not a list"),
        ("mlp", "dropout=x", "model.kwargs.dropout='x' is not a finite number"),
        ("mlp", "norm=3", "model.kwargs.norm=3 is not a word or null"),
        ("vit", "depth=a", "model.kwargs.depth='a' is not a whole number"),
        ("vit", "embed_dim=true", "model.kwargs.embed_dim=True is not a whole number"),
        ("vit", "class_token=maybe", "model.kwargs.class_token='maybe' is not true or false"),
        ("vit", "mlp_ratio=inf", "model.kwargs.mlp_ratio=inf is not a finite number"),
        ("resnet", "widths=null", "model.kwargs.widths=None is not a list"),
    ],
)
def test_an_argument_of_an_own_model_has_the_type_of_its_annotation(folder, capsys, model, word, said):
    assert main([*RUN, "dataset=digits", f"model={model}", f"model.kwargs.{word}"]) == 2
    assert said in capsys.readouterr().err


def test_arguments_of_the_right_types_are_taken():
    from mprun.models.argument_types import check_types
    from mprun.models.mlp import mlp
    from mprun.models.vit import vit

    check_types(mlp, {"hidden": (8,), "dropout": 0, "norm": None, "unknown": "x"}, key="model.kwargs")
    check_types(vit, {"mlp_ratio": 2, "class_token": True, "global_pool": "avg"}, key="model.kwargs")
