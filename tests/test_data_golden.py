"""The batches of every dataset are what they have always been, to the last bit: a run that is made again finds its data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mprun.config import Config, DatasetConfig, DatasetSource, Task, TrainConfig
from mprun.data import Batch, Data, build_data
from mprun.data.torchvision_sets import cache_folder

CPU = torch.device("cpu")
TINY = {"image_size": 12, "channels": 3, "classes": 5, "examples": 90, "val_examples": 20}
LM = {"task": Task.language_model, "name": "text", "kwargs": {"context": 16}}
FOLDER = {"name": "imagefolder", "kwargs": {"image_size": 16}}
USERS = {"name": "tests.test_data_golden:users", "source": DatasetSource.python}
FASHION = Path("/usr/share/datasets/fashion-mnist")

# sha256 of three training batches of epoch 1 from number 1 on, and of two validation batches, computed before anything was
# made faster.
GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    "digits": ({"name": "digits", "augment": "none"}, "d3f1f6a55a5e7a1ffe3015d943900ad1df93da3003fc78936a704f00eefd19ec"),
    "digits shift": ({"name": "digits", "augment": "shift"}, "c5e5271909cdd62ee13580f3fe60a12437020a7b226ad437922bb7bf5f30e99a"),
    "digits crop+flip": ({"name": "digits", "augment": "crop+flip"}, "a7f4901c441c5c273da7817525a4a669439abbfed6e518933fbe8abdf7bbf2b1"),
    "digits in order": ({"name": "digits", "augment": "shift", "shuffle": False}, "071658ceacdcaf391af64df641e9aeae401a64ba1f4f80d816033fb5874459ed"),
    "digits mixup": ({"name": "digits", "augment": "shift", "mixup": 0.4}, "5a5aac67216931df2b3f9c6b11e9d7611a364640bec217d0487112fe8e071183"),
    "digits cutmix": ({"name": "digits", "augment": "none", "cutmix": 1.0}, "2e077f9b66f004d0dc8d30c20568528963fce32bf4ad397b727fb625197a8df1"),
    "fashion_mnist": ({"name": "fashion_mnist", "augment": "shift+flip"}, "a4239fb6e734e55735f7c84356a835a1cf6c64aded1fa5a7249e07846ff5ec2d"),
    "8-bit": ({"name": "synthetic", "kwargs": TINY, "augment": "none"}, "ce294917c7ca6c4a9c5c0edfd18f99309e14fc1adb8f8de6cd2f54c9d040ffa0"),
    "8-bit shift": ({"name": "synthetic", "kwargs": TINY, "augment": "shift"}, "515080b37d7abdca16f747f65eca9ced571a549e7ca5dc100995a05b33e0aed9"),
    "8-bit flip+crop": ({"name": "synthetic", "kwargs": TINY, "augment": "flip+crop"}, "b63c20b8374731d61b8dfba4fb56fb40dd594109ba955df86fd90f1ea4191df7"),
    "8-bit crop mixed": ({"name": "synthetic", "kwargs": TINY, "augment": "crop", "mixup": 0.2, "cutmix": 1.0}, "d8c8943bad52b53c0cd7e53496568d2f051e0c206fb66e9a543a607b38815e25"),
    "8-bit flip+randaugment": ({"name": "synthetic", "kwargs": TINY, "augment": "flip+randaugment"}, "53b7e5f1d7857f826189dce49f82ccc7a0b4799e21a89c0c37039166c0a66c8e"),
    "text": (LM, "e53e283a4e0e105c4dc5b214de87ec73b8577f100ba9cbb9918bc0e8075638c2"),
    "text in order": ({**LM, "shuffle": False}, "8e18229062b3611d013d716bd5603f91b2c1ddb63f8758b268c84cf41bbb14c5"),
    "image files": ({**FOLDER, "augment": "resizedcrop+flip"}, "dd1ff334380f68e9a87c1bb643cb41c44cdf2e4038556b3b1985460211902562"),
    "image files, middle": ({**FOLDER, "augment": "none", "mixup": 0.2}, "41a7ee84bf459b997399312b0af481964a667d4723d181429c5d025fca92b99f"),
    "image files, workers": ({**FOLDER, "augment": "resizedcrop+flip", "workers": 1}, "dd1ff334380f68e9a87c1bb643cb41c44cdf2e4038556b3b1985460211902562"),
    "a user's": (USERS, "ddbe9fbcdfabd3558db5d931e93dc0c06afaad865ca4ce8f3e5df54c8f2fbe85"),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


class Noisy:
    """A user's set that draws from the global generators."""

    num_classes = 3

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randint(1000, (4,)) + index + int(np.random.randint(1000)), index % 3


def users() -> tuple[Noisy, Noisy]:
    return Noisy(), Noisy()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A text and a folder of images, the same ones every time."""
    rng = np.random.default_rng(5)
    (tmp_path / "text.txt").write_text("".join(chr(97 + i) for i in rng.integers(26, size=5000)))
    for split, count in (("train", 30), ("val", 9)):
        for name in "abc":
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(20 + i % 7, 18 + i % 5, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:02}.png")
    return tmp_path


def digest(batches: Iterator[Batch]) -> Any:
    total = hashlib.sha256()
    for batch in batches:
        for part in (batch.inputs, batch.targets, batch.ids):
            total.update(f"{part.dtype} {tuple(part.shape)}".encode())
            total.update(part.contiguous().numpy().tobytes())
    return total


def made(keys: dict[str, Any], place: Path) -> Data:
    keys = dict(keys)
    train = TrainConfig(batch_size=20, shuffle=keys.pop("shuffle", True))
    if keys["name"] in ("text", "imagefolder"):
        keys["root"] = str(place / "text.txt" if keys["name"] == "text" else place)
    return build_data(Config(seed=3, trust=["tests"], dataset=DatasetConfig(**keys), train=train), device=CPU)


@pytest.mark.parametrize("case", GOLDEN)
def test_batches_are_what_they_have_always_been(case: str, place: Path) -> None:
    keys, golden = GOLDEN[case]
    if keys["name"] == "fashion_mnist" and not (FASHION.is_dir() or cache_folder().is_dir()):
        pytest.skip("Fashion-MNIST is not on this machine")
    if "randaugment" in case and not version("torchvision").startswith("0.29."):
        pytest.skip("the draws of torchvision's own augmentations are those of another version")
    data = made(keys, place)
    total = digest(islice(data.train_batches(1, 1), 3))
    total.update(digest(islice(data.val_batches(), 2)).digest())
    assert total.hexdigest() == golden
