"""Mistakes in a user's data and model end as one block that names the sample, the key and the cure; what is none works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun.cli import main
from mprun.config import Config, DatasetConfig, DatasetSource, Task, TrainConfig
from mprun.data import Data, build_data
from mprun.data.targets import check_targets
from mprun.errors import ConfigError
from mprun.training.step import eval_step, summed_loss, train_step
from mprun.training.targets import check_output
from tests.case_code import TRUST, Table, latest, records, result
from tests.conftest import CPU, REGRESSION, batch


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


pytestmark = pytest.mark.usefixtures("one_thread")


# --- a user's sets and models, named by the runs below -----------------------------------------------------------------------


class Labelled(Table):
    """Five features a sample, and the labels that are given."""

    def __init__(self, labels: Any, classes: int | None = 4) -> None:
        super().__init__(torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(0)), labels)
        if classes is not None:
            self.num_classes = classes


class Ragged(Labelled):
    def __getitem__(self, i: int) -> Any:
        return torch.zeros(5 if i != 2 else 6), self.labels[i]


class Buggy(Labelled):
    def __getitem__(self, i: int) -> Any:
        if i == 2:
            raise KeyError("no such row")
        return super().__getitem__(i)


class Keyed(Labelled):
    def __getitem__(self, i: int) -> Any:
        return {"input_ids": torch.zeros(5), "labels": 0}


class Picture:
    """Neither a tensor nor an array, as an image of PIL's is."""


GOOD = [0, 1, 2, 3, 0, 1]
SETS: dict[str, Any] = {
    "good": lambda: (Labelled(GOOD), Labelled(GOOD)),
    "high": lambda: (Labelled([0, 1, 2, 7, 0, 1]), Labelled(GOOD)),
    "negative": lambda: (Labelled([0, 1, 2, -1, 0, 1]), Labelled(GOOD)),
    "high_val": lambda: (Labelled(GOOD), Labelled([0, 4])),
    "ignored": lambda: (Labelled([-100] * 6), Labelled(GOOD)),
    "bool": lambda: (Labelled([True, False, True, False, True, False], 2), Labelled([True, False], 2)),
    "numpy": lambda: (Labelled(np.array(GOOD, dtype=np.int32)), Labelled(np.array(GOOD, dtype=np.uint8))),
    "floats": lambda: (Labelled([0.0, 1.0, 2.0, 3.0]), Labelled(GOOD)),
    "huge": lambda: (Labelled([10**30]), Labelled(GOOD)),
    "ids": lambda: (Labelled([0, 1, 10**12]), Labelled(GOOD)),
    "complex": lambda: (Labelled(torch.tensor([1j, 2j])), Labelled(GOOD)),
    "onehot": lambda: (Labelled(F.one_hot(torch.tensor(GOOD), 4)), Labelled(F.one_hot(torch.tensor(GOOD), 4))),
    "probabilities": lambda: (Labelled(F.one_hot(torch.tensor(GOOD), 4).float()), Labelled(F.one_hot(torch.tensor(GOOD), 4).float())),
    "multi": lambda: (Labelled(torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 6)), Labelled(GOOD)),
    "ragged": lambda: (Ragged(GOOD), Labelled(GOOD)),
    "buggy": lambda: (Buggy(GOOD), Labelled(GOOD)),
    "keyed": lambda: (Keyed(GOOD), Labelled(GOOD)),
    "picture": lambda: ([(Picture(), 0)], [(Picture(), 0)]),
    "bytes": lambda: ([(b"abc", 0)], [(b"abc", 0)]),
    "words": lambda: ([(torch.zeros(5), "cat")], [(torch.zeros(5), "cat")]),
    "lists": lambda: ([([0.0] * 5, 1)] * 6, [([0.0] * 5, 1)]),
    "arrays": lambda: (np.zeros((6, 5)), np.zeros((6, 5))),
    "generators": lambda: ((i for i in ()), (i for i in ())),
    "no_val": lambda: (Labelled(GOOD), []),
    "none_val": lambda: (Labelled(GOOD), None),
    "not_classes": lambda: (Labelled(GOOD, -3), Labelled(GOOD)),
    "many_targets": lambda: (Labelled(torch.zeros(6, 3, 2)), Labelled(torch.zeros(6, 3))),
    "ints": lambda: (Labelled([1, 2, 3, 4, 5, 6]), Labelled([1, 2])),
}  # fmt: skip
NO_FUNCTION = 5


def sets(kind: str) -> Any:
    """The pair of sets of this name, above."""
    if kind in ("lists", "ids"):
        pair = SETS[kind]()
        return (Sized(pair[0]), pair[1]) if kind == "lists" else (WithTargets(pair[0]), pair[1])
    return SETS[kind]()


class Sized(list[Any]):
    num_classes = 4


class WithTargets(list[Any]):
    """A list that keeps its labels, and says nothing of classes."""

    def __init__(self, samples: Any) -> None:
        super().__init__((samples[i][0], samples.labels[i]) for i in range(len(samples)))
        self.targets = samples.labels


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def narrow(outputs: int = 1) -> nn.Module:
    return nn.Linear(5, outputs)


class Pixels(nn.Module):
    """Logits (B, 3, 4, 4) of images (B, 1, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class First(nn.Module):
    """Drops a sample of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[1:]


def data(
    kind: str, *, task: Task = Task.classification, batch_size: int = 4, workers: int = 0, name: str = "sets"
) -> Data:
    wanted = DatasetConfig(
        name=f"tests.test_user_mistakes:{name}",
        source=DatasetSource.python,
        task=task,
        workers=workers,
        kwargs={"kind": kind} if name == "sets" else {},
    )
    train = TrainConfig(batch_size=batch_size, shuffle=False)
    return build_data(Config(trust=["tests"], dataset=wanted, train=train), device=CPU)


# --- samples and targets --------------------------------------------------------------------------------------------------------

IN = r"dataset\.name=tests\.test_user_mistakes:sets, "
REFUSED: list[tuple[str, Task, str]] = [
    ("high", Task.classification, IN + r"training set: label 7 of sample 3 is not legal: labels are 0 to 3 .*-100"),
    ("negative", Task.classification, r"label -1 of sample 3 is not legal"),
    ("high_val", Task.classification, r"validation set: label 4 of sample 1 is not legal"),
    ("floats", Task.classification, r"sample 0 is float\d\d of shape \(\); a classification takes labels .*task=regression"),
    ("huge", Task.classification, r"training set: sample 0, .*int\), cannot be made into a batch \(Overflow"),
    ("ids", Task.classification, r"highest label of the training set \+ 1 is 1000000000001: .*10000000"),
    ("complex", Task.classification, r"training set: targets are complex"),
    ("complex", Task.regression, r"training set: targets are complex"),
    ("multi", Task.classification, r"sample 0 are negative or do not sum to 1 \(1, 1, 0, 0\)"),
    ("probabilities", Task.language_model, r"sample 0 is float32 of shape \(4,\); a language model's targets"),
    ("ragged", Task.classification, r"samples 0 and 2 do not fit into one batch: \(float32 of shape \(5,\), int\) and \(float32 of shape \(6,\), int\)"),
    ("keyed", Task.classification, r"sample 0 is a dict, not a pair \(input, target\); a dict can be the input"),
    ("picture", Task.classification, r"sample 0, \(Picture, int\), cannot be made into a batch"),
    ("bytes", Task.classification, r"the input holds no tensor"),
    ("words", Task.classification, r"the target of sample 0 is a str"),
    ("arrays", Task.classification, r"sample 0 is a ndarray, not a pair"),
    ("generators", Task.classification, r"the training set, a generator, has no len\(\)"),
    ("no_val", Task.classification, r"the validation set is empty"),
    ("none_val", Task.classification, r"the validation set, a NoneType, has no len\(\)"),
    ("not_classes", Task.classification, r"num_classes is -3: a number of classes is a whole number from 1"),
    ("many_targets", Task.regression, r"validation set: a target has shape \(3,\), and in the training set \(3, 2\)"),
]  # fmt: skip


def loaded(kind: str, task: Task) -> None:
    made = data(kind, task=task)
    list(made.train_batches(0))
    list(made.val_batches())


@pytest.mark.parametrize(("kind", "task", "said"), REFUSED, ids=[f"{kind}-{task.value}" for kind, task, _ in REFUSED])
def test_data_that_means_nothing_is_refused_in_a_line_that_names_the_sample(kind, task, said):
    with pytest.raises(ConfigError, match=said) as caught:
        loaded(kind, task)
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_that_is_no_function_is_refused():
    with pytest.raises(ConfigError, match=r"dataset\.name=.*:NO_FUNCTION is a int, not a function"):
        data("", name="NO_FUNCTION")


@pytest.mark.parametrize("kind", ["high", "ragged"])
def test_from_a_worker_comes_the_same_line(kind):
    texts = []
    for workers in (0, 1):
        with pytest.raises(ConfigError) as caught:
            list(data(kind, workers=workers).train_batches(0))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "Traceback" not in texts[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bug_in_the_users_set_keeps_its_traceback_and_says_which_sample(workers):
    with pytest.raises(KeyError) as caught:
        list(data("buggy", workers=workers).train_batches(0))
    told = "\n".join([*getattr(caught.value, "__notes__", []), str(caught.value)])
    assert "tests.test_user_mistakes:sets, training set: while sample 2 was read (epoch 0)" in told
    assert "no such row" in told
    if workers:
        assert 'raise KeyError("no such row")' in told


@pytest.mark.parametrize(
    ("kind", "task", "dtype", "outputs"),
    [
        ("bool", Task.classification, torch.bool, 2), ("numpy", Task.classification, torch.int32, 4), ("lists", Task.classification, torch.int64, 4),
        ("probabilities", Task.classification, torch.float32, 4), ("ints", Task.regression, torch.int64, 1),
    ],
)  # fmt: skip
def test_what_is_no_mistake_is_taken(kind, task, dtype, outputs):
    made = data(kind, task=task)
    assert made.spec.num_classes == outputs
    assert next(made.train_batches(0)).targets.dtype == dtype


def test_looking_at_the_labels_costs_less_than_a_hundredth_of_a_small_step():
    labels, ids = torch.randint(10, (64,)), torch.arange(64)
    best = 1.0
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(10):
            check_targets(labels, ids, task=Task.classification, num_classes=10, where="")
        best = min(best, (time.perf_counter() - begin) / 10)
    assert best < 100e-6, "a step of the smallest models takes 10 ms"


# --- outputs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "target", "task", "said"),
    [
        ((4, 10), (3,), Task.classification, r"output has shape \(4, 10\), the targets \(3,\): .*\(B, C\)"),
        ((4,), (4,), Task.classification, r"output has shape \(4,\)"),
        ((4, 10), (4, 1), Task.classification, r"the targets \(4, 1\)"),
        ((4, 5, 10), (4, 5), Task.classification, r"\(4, 5, 10\), the targets \(4, 5\)"),
        ((4, 10, 5), (4, 5), Task.language_model, r"\(4, 10, 5\), the targets \(4, 5\): a language model needs"),
        ((4, 3), (4, 2), Task.regression, r"\(4, 3\), the targets \(4, 2\): a regression needs the same shape"),
        ((4, 1), (4,), Task.classification, r"has 1 outputs, and the dataset 10 classes: .*single logit"),
        ((4, 9), (4,), Task.classification, r"has 9 outputs, and the dataset 10 classes"),
        ((4, 5, 9), (4, 5), Task.language_model, r"has 9 outputs"),
    ],
)
def test_an_output_that_does_not_fit_its_targets_is_refused(output, target, task, said):
    targets = torch.zeros(target, dtype=torch.float32 if task is Task.regression else torch.int64)
    with pytest.raises(ConfigError, match=said):
        check_output(torch.zeros(output), targets, task, 10)


@pytest.mark.parametrize("soft", [False, True])
def test_a_classification_of_pixels_is_computed_over_the_class_axis(soft):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    labels[0, 0, 0] = -100 if not soft else 0
    targets = F.one_hot(labels, 3).movedim(-1, 1).float() if soft else labels
    total, correct = summed_loss(logits, targets, Task.classification)
    rows, flat = logits.movedim(1, -1).reshape(-1, 3).double(), labels.flatten()
    picked = rows.log_softmax(-1)[torch.arange(32), flat.clamp(min=0)]
    assert total.item() == pytest.approx(-(picked * (flat >= 0)).sum().item(), rel=1e-6)
    assert correct.item() == (rows.argmax(-1) == flat).sum().item()


def test_segmentation_trains_and_scores(make_state):
    images, labels = torch.randn(4, 1, 4, 4), torch.randint(3, (4, 4, 4))
    state = make_state(Pixels(), **{"optimizer.lr": 0.01})
    row = train_step(state, [batch(images, labels)]).read()
    assert row.applied
    assert row.valid_targets == 64
    scores = eval_step(state, state.policy, [batch(images, labels)])
    with torch.no_grad():
        logits = state.model(images)
    assert scores["top1"] == (logits.argmax(1) == labels).double().mean().item()
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    soft = F.one_hot(labels, 3).movedim(-1, 1).float()
    again = eval_step(state, state.policy, [batch(images, soft)])
    assert again["top1"] == scores["top1"]
    assert again["loss"] == pytest.approx(scores["loss"], rel=1e-6)


def test_a_regression_takes_whole_numbers(make_state):
    state = make_state(nn.Linear(5, 1), **{**REGRESSION, "optimizer.lr": 0.01})
    assert train_step(state, [batch(torch.randn(4, 5), torch.tensor([1, 2, 3, 4]))]).read().applied


# --- whole runs -------------------------------------------------------------------------------------------------------------------

HERE = [*TRUST, "model=python", "dataset=python", "dataset.name=tests.test_user_mistakes:sets", "precision=fp32",
        "train.shuffle=false", "train.epochs=2", "dataset.kwargs.kind=good", "model.name=tests.test_user_mistakes:normed"]  # fmt: skip


def refused(capsys: Any, *words: str) -> tuple[int, str]:
    """Exit status and error of a run that must fail with one block."""
    code = main([*HERE, *words])
    said = capsys.readouterr().err
    assert code in (1, 2), said
    block = said[said.index("mprun: error:") :]
    assert "Traceback" not in said
    assert len(block.splitlines()) <= 3
    return code, block


@pytest.mark.parametrize("words", [["train.batch_size=5"], ["train.batch_size=1"]])
def test_batch_norm_over_one_sample_names_the_sample_and_the_cure(folder, capsys, words):
    _, said = refused(capsys, *words)
    sample = "sample 5" if words == ["train.batch_size=5"] else "sample 0"
    assert sample in said
    assert "train.drop_last=true" in said
    assert "train.batch_size" in said
    assert main([*HERE, "train.batch_size=5", "train.drop_last=true"]) == 0


def test_a_run_whose_labels_are_all_ignored_is_no_result(folder, capsys):
    _, said = refused(capsys, "dataset.kwargs.kind=ignored", "train.batch_size=3")
    assert "every label" in said
    assert "-100" in said
    assert result()["status"] == "failed"
    assert {record["reason"] for record in records("skip")} == {"empty"}


def test_a_run_that_only_overflows_is_no_result_but_can_go_on(folder, capsys):
    toy = [*TRUST, "model=python", "model.name=tests.case_code:toy", "dataset=python", "dataset.name=tests.case_code:targets",
           "dataset.task=regression", "train.batch_size=1", "train.epochs=1", "optimizer=sgd", "precision=fp16_dynamic",
           "dataset.kwargs.values=[1000,1000]", "schedule=constant"]  # fmt: skip
    assert main(toy) == 1
    assert "no step was applied in 2 attempts (2 overflowed" in capsys.readouterr().err
    assert result()["status"] == "failed"
    assert main(["resume=latest", "train.epochs=9", "trust=[tests]"]) == 0
    assert result()["steps_applied"] > 0
    assert result()["status"] == "ok"


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_model_with_too_few_outputs_is_refused(folder, capsys, outputs):
    _, said = refused(
        capsys, "model.name=tests.test_user_mistakes:narrow", f"model.kwargs.outputs={outputs}", "train.batch_size=3"
    )
    assert f"{outputs} outputs" in said
    assert "4 classes" in said


def test_a_model_that_drops_samples_is_refused(folder, capsys):
    _, said = refused(capsys, "model.name=tests.test_user_mistakes:First", "train.batch_size=3")
    assert "output has shape (2, 4), the targets (3,)" in said


def test_whole_numbers_one_hot_are_refused_with_both_shapes(folder, capsys):
    _, said = refused(capsys, "dataset.kwargs.kind=onehot", "train.batch_size=3")
    assert "the targets (3, 4)" in said


@pytest.mark.parametrize(
    "words",
    [
        ["train.epochs=1", "train.batch_size=1000000000000"],
        ["train.steps=2", "train.epochs=1000000000"],
        ["train.epochs=1", "train.accumulate=1000000000", "train.batch_size=3"],
        ["train.epochs=1", "train.log_every=1000000000000", "train.batch_size=3"],
        ["train.epochs=1", "train.eval_every=1000000000000", "train.checkpoint_every=1000000000000", "train.keep=1000000000000"],
        ["train.epochs=1", "dataset.limit=1000000000000", "seed=9223372036854775807"],
        ["train.epochs=1", "train.early_stop.metric=val/loss", "train.early_stop.patience=1000000000000"],
        ["train.steps=2", "precision=fp16_dynamic", "precision.loss_scale.growth_interval=9007199254740992",
         "precision.loss_scale.hysteresis=9007199254740992", "precision.loss_scale.patience=9007199254740992"],
    ],
)  # fmt: skip
def test_huge_whole_numbers_are_only_large(folder, words):
    assert main([*HERE, *words]) == 0
    assert result()["status"] == "ok"
    assert result()["steps_applied"] >= 1


@pytest.mark.parametrize(
    "word", ["train.steps=1000000000000", "train.epochs=1000000000", "schedule.warmup_steps=9007199254740992"]
)
def test_a_run_of_a_trillion_steps_starts_at_once(folder, capsys, word):
    """It is stopped by the second sample's label, which no class has, so that the test ends."""
    begin = time.perf_counter()
    code = main([*HERE, "dataset.kwargs.kind=high", "train.batch_size=2", "schedule=cosine", word])
    said = capsys.readouterr().err
    assert time.perf_counter() - begin < 20
    assert code == (2 if word.startswith("schedule") else 1)
    if word.startswith("schedule"):
        assert "schedule.warmup_steps" in said
    else:
        assert "label 7 of sample 3" in said
        assert records("train", latest())[0]["train/lr"] > 0
