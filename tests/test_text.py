"""Texts as datasets: every window is where it should be, any batch can be made alone, mistakes are named."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.cli import main
from mprun.config import Config, DatasetConfig, Task, TrainConfig
from mprun.data import build_data
from mprun.data.base import IGNORE
from mprun.data.text import TextData, python_docs, text, text_data, text_set
from mprun.errors import ConfigError
from tests.test_data import equal, global_state
from tests.test_host_reads import Count
from tests.test_run import latest, result, same, state_of

CPU = torch.device("cpu")
SAMPLE = "".join(chr(97 + i * i % 23) for i in range(997)) + "é漢🙂\r\n\x00"


def config(
    *, seed: int = 0, batch_size: int = 4, shuffle: bool = True, drop_last: bool = False, **dataset: Any
) -> Config:
    train = TrainConfig(batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    fields = {"name": "python_docs", "task": Task.language_model, **dataset}
    return Config(seed=seed, dataset=DatasetConfig(**fields), train=train)


def data(characters: str = SAMPLE, *, context: int = 8, val_frac: float = 0.1, **keys: Any) -> TextData:
    return text_data(config(**keys), text_set(characters, context=context, val_frac=val_frac), device=CPU)


# -- tokens -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=30, max_size=300), st.floats(0.1, 0.5))
def test_tokens_are_places_in_the_sorted_vocabulary_and_lose_nothing(characters: str, val_frac: float) -> None:
    made = text_set(characters, context=3, val_frac=val_frac)
    assert made.vocabulary == "".join(sorted(set(characters)))
    tokens = torch.cat([made.train, made.val]).tolist()
    assert "".join(made.vocabulary[token] for token in tokens) == characters
    assert len(made.val) == round(len(characters) * val_frac)
    assert made.sha256 == hashlib.sha256(characters.encode()).hexdigest()


def test_a_large_vocabulary_takes_wider_tokens() -> None:
    few, many = "".join(map(chr, range(256))), "".join(map(chr, range(257)))
    assert text_set(few, context=3, val_frac=0.1).train.dtype == torch.uint8
    wide = text_set(many, context=3, val_frac=0.1)
    assert wide.train.dtype == torch.int32
    assert torch.cat([wide.train, wide.val]).tolist() == list(range(257))


def test_python_docs_are_all_topics_in_order() -> None:
    from pydoc_data.topics import topics

    joined = "".join(topics[name] for name in sorted(topics))
    made = python_docs()
    assert made.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    assert len(made.train) + len(made.val) == len(joined) > 300_000
    assert made.vocabulary[made.train[0]] == joined[0]
    assert abs(len(made.val) / len(joined) - 0.1) < 1e-5


def test_a_text_can_be_named_without_importing_torch() -> None:
    code = (
        "import sys; from mprun.data import check_dataset; from mprun.config import DatasetConfig;"
        "check_dataset(DatasetConfig(name='python_docs')); check_dataset(DatasetConfig(name='text', root='x'));"
        "assert not {'torch', 'numpy', 'pydoc_data.topics'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- training windows ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 400), st.integers(1, 40), st.integers(1, 20), st.booleans(), st.integers(0, 3))
def test_windows_lie_where_their_ids_say(length: int, context: int, size: int, shuffle: bool, epoch: int) -> None:
    length = max(length, context + 1)
    made = text_set("".join(chr(300 + i) for i in range(length + 5)), context=context, val_frac=5 / (length + 5))
    assert len(made.train) == length
    found = text_data(config(batch_size=size, shuffle=shuffle), made, device=CPU)
    batches = list(found.train_batches(epoch))
    assert len(batches) == found.batches_per_epoch >= 1
    for batch in batches:
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        wanted = batch.ids[:, None] + torch.arange(context)
        assert torch.equal(batch.inputs, wanted), "the token at place i is i here"
        assert torch.equal(batch.targets, wanted + 1)
        assert int(batch.targets.max()) < length, "no training window reaches into the validation part"
    if shuffle:
        assert all(len(batch.ids) == size for batch in batches), "every batch is full"
        assert len(batches) == max(1, (length - 1) // context // size)
    else:
        starts = torch.cat([batch.ids for batch in batches]).tolist()
        assert starts == list(range(0, (length - 1) // context * context, context))


def test_every_place_is_drawn_the_last_one_too() -> None:
    found = data(val_frac=0.9, context=8, batch_size=500)
    places = len(found.train) - 8
    ids = torch.cat([batch.ids for epoch in range(20) for batch in found.train_batches(epoch)])
    assert sorted(set(ids.tolist())) == list(range(places))


def test_any_batch_of_any_epoch_can_be_made_alone_and_draws_nothing_global() -> None:
    found = data()
    before = global_state()
    whole = list(found.train_batches(3))
    assert equal(whole[7:], list(data().train_batches(3, start=7)))
    assert list(found.train_batches(3, start=found.batches_per_epoch)) == []
    list(found.val_batches())
    assert global_state() == before
    drawn = {tuple(b.ids.tolist()) for seed in (0, 1) for e in (0, 1) for b in data(seed=seed).train_batches(e)}
    assert len(drawn) == 4 * found.batches_per_epoch, "batches, epochs and seeds differ"
    torch.manual_seed(7)
    assert equal(whole, list(found.train_batches(3)))


def test_windows_in_order_honour_drop_last() -> None:
    found = data(shuffle=False, batch_size=5)
    windows = (len(found.train) - 1) // 8
    assert windows % 5
    assert [len(b.ids) for b in found.train_batches(0)] == [5] * (windows // 5) + [windows % 5]
    assert {len(b.ids) for b in data(shuffle=False, batch_size=5, drop_last=True).train_batches(0)} == {5}
    assert data(batch_size=500, drop_last=True).batches_per_epoch == 1, "random windows fill any batch"


def test_limit_keeps_the_first_windows() -> None:
    found = data(limit=6, batch_size=2)
    assert (found.spec.train_examples, found.batches_per_epoch, len(found.train)) == (6, 3, 6 * 8 + 1)
    assert torch.equal(found.train, data().train[: 6 * 8 + 1])
    ids = torch.cat([b.ids for e in range(50) for b in found.train_batches(e)])
    assert int(ids.max()) <= 6 * 8 - 8
    assert data(limit=10**9).spec.train_examples == data().spec.train_examples
    assert data(limit=6).spec.val_examples == data().spec.val_examples
    assert data(limit=6).spec.num_classes == data().spec.num_classes


# -- validation windows -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 20))
def test_every_validation_target_is_used_once(length: int, context: int, size: int) -> None:
    total = length + context + 1
    made = text_set("".join(chr(300 + i) for i in range(total)), context=context, val_frac=length / total)
    assert len(made.val) == length
    found = text_data(config(batch_size=size), made, device=CPU)
    batches = list(found.val_batches())
    targets = torch.cat([b.targets for b in batches]).flatten()
    inputs = torch.cat([b.inputs for b in batches]).flatten()
    assert targets[targets != IGNORE].tolist() == list(range(context + 2, total)), "all but the first, in order, once"
    assert torch.equal(inputs[targets != IGNORE] + 1, targets[targets != IGNORE])
    assert found.spec.val_examples == len(torch.cat([b.ids for b in batches]))
    assert all(bool((b.targets != IGNORE).any(1).all()) for b in batches), "no window is only padding"
    for window, start in zip(
        torch.cat([one.inputs for one in batches]), torch.cat([one.ids for one in batches]), strict=True
    ):
        kept = found.val[start : start + context]
        assert window.tolist() == kept.tolist() + [int(found.val[-1])] * (context - len(kept))
    for one in batches:  # each has memory of its own
        assert one.inputs.untyped_storage().data_ptr() != one.targets.untyped_storage().data_ptr()
    assert equal(batches, list(found.val_batches()))


def test_making_batches_never_waits_for_the_device() -> None:
    found = data()
    with Count() as count:
        list(found.train_batches(0))
        list(found.val_batches())
    assert not count.found


@pytest.mark.gpu
def test_batches_are_the_same_on_the_gpu() -> None:
    there = build_data(config(), device=torch.device("cuda"))
    here = build_data(config(), device=CPU)
    for mine, theirs in zip(here.train_batches(1), there.train_batches(1), strict=True):
        assert theirs.inputs.device.type == theirs.targets.device.type == "cuda"
        assert theirs.ids.device == CPU
        assert torch.equal(mine.inputs, theirs.inputs.cpu())
        assert torch.equal(mine.targets, theirs.targets.cpu())


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(SAMPLE.encode())
    made = text(root=str(path), context=8)
    assert made.vocabulary == "".join(sorted(set(SAMPLE))), "line ends are not translated"
    assert made.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert text(root=str(path), context=8, sha256=made.sha256.upper()).sha256 == made.sha256


def test_file_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"a" * 300 + "é".encode("latin-1") + b"b" * 300)
    (tmp_path / "short.txt").write_text("abc" * 20)
    (tmp_path / "empty.txt").write_text("")

    def refused(name: str | None, message: str, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            text(root=None if name is None else str(tmp_path / name), **keys)

    refused(None, r"dataset=text needs a UTF-8 file: dataset\.root=FILE$")
    refused(None, r"dataset\.root=FILE; it is the file of somebody", origin="the file of somebody")
    refused(
        "none.txt",
        r"dataset\.root=.*none\.txt: no such file; it is the file of somebody",
        origin="the file of somebody",
    )
    refused("", r"is a folder: dataset=text reads a single file")
    refused("latin.txt", r"latin\.txt is not UTF-8: byte 300 is 0xe9 .*convert it")
    refused(
        "short.txt", r"short\.txt is too short: of its 60 characters 54 are for training, and at least 65 are needed"
    )
    refused("short.txt", r"6 are for validation|1 are for validation", context=8, val_frac=0.02)
    refused("empty.txt", r"of its 0 characters 0 are for training")
    refused("short.txt", r"is another file: its sha256 is [0-9a-f]{64}, expected 00", sha256="00", context=8)
    refused("short.txt", r"dataset\.kwargs\.context='long' is not a whole number from 1 up", context="long")
    refused("short.txt", r"dataset\.kwargs\.context=0 is not", context=0)
    for share in (0.0, 1.0, "some", 1):
        refused("short.txt", r"dataset\.kwargs\.val_frac=.* is not a number between 0 and 1", context=8, val_frac=share)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"task": Task.classification},
            r"dataset\.task=classification does not fit python_docs: it is for language_model",
        ),
        ({"augment": "shift"}, r"dataset\.augment=shift: a text has no augmentation"),
        ({"root": "here"}, r"dataset\.root=here: python_docs reads no"),
        (
            {"kwargs": {"contxt": 8}},
            r"dataset\.kwargs\.contxt is not a parameter of python_docs: did you mean 'context'\?",
        ),
        ({"name": "text", "kwargs": {"root": "x"}}, r"dataset\.kwargs\.root is filled in by the runner"),
    ],
)
def test_keys_that_do_not_fit_a_text_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_data(config(**fields), device=CPU)


# -- whole runs ---------------------------------------------------------------------------------------------------

QUICK = ["model=gpt", "model.kwargs.dim=16", "model.kwargs.depth=2", "model.kwargs.dropout=0.1", "dataset=text",
         "dataset.kwargs.context=8", "tracking=disabled", "device=cpu", "train.batch_size=8", "train.log_every=1"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_bytes((SAMPLE * 2).encode())
    return tmp_path


def test_a_run_on_a_text_names_its_file_and_scores_by_loss(folder: Path) -> None:
    assert main([*QUICK, "dataset.root=mine.txt", "train.epochs=2", "precision=fp32"]) == 0
    env, end = json.loads((latest() / "env.json").read_text()), result()
    assert env["data_sha256"] == hashlib.sha256((SAMPLE * 2).encode()).hexdigest()
    assert end["best"]["metric"] == "val/loss"
    assert 0 < end["final"]["val/top1"] < 1
    assert 1 < end["final"]["val/loss"] < 3.5, "nats per character; evenly spread over 28 symbols it is 3.33"


@pytest.mark.parametrize("precision", ["fp16_dynamic", "fp16_master_dynamic"])
def test_a_resumed_run_in_the_middle_of_an_epoch_is_the_unbroken_one(folder: Path, precision: str) -> None:
    words = [
        *QUICK,
        "dataset.root=mine.txt",
        f"precision={precision}",
        "train.ema.decay=0.9",
        "train.checkpoint_every=3",
        "schedule=constant",
    ]
    assert main([*words, "train.steps=11"]) == 0
    whole = state_of()
    assert whole["position"]["batch"] > 0, "an epoch has 28 batches"
    assert main([*words, "train.steps=6"]) == 0
    assert main([f"resume={latest()}", "train.steps=11"]) == 0
    assert same(whole, state_of()) == []


def test_a_missing_file_is_one_line_and_leaves_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "dataset.root=gone.txt"]) == 2
    error = capsys.readouterr().err
    assert "gone.txt: no such file" in error
    assert "Traceback" not in error
    assert not Path("outputs").exists()
