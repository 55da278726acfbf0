import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mprun.cli import main
from mprun.config import Config, DatasetConfig, DatasetSource, Task, TrainConfig
from mprun.config_check import to_plain
from mprun.data import Batch, build_data, check_dataset, subseed
from mprun.data.augment import Address, Pipeline, crop, flip, shift
from mprun.data.mix import Mix
from mprun.data.names import augment_names
from mprun.errors import ConfigError
from mprun.resume import FIXED, changes
from mprun.training.step import summed_loss, valid_targets
from tests.conftest import make_config

CPU = torch.device("cpu")
TINY = {"image_size": 8, "channels": 3, "classes": 5, "examples": 50, "val_examples": 7}
# Every part on its own, joined parts in both orders, and mixing.
COMBINATIONS: list[dict[str, Any]] = [
    {"augment": "shift"},
    {"augment": "crop+flip"},
    {"augment": "flip+randaugment+crop"},
    {"augment": "trivialaugment"},
    {"augment": "none", "mixup": 0.4},
    {"augment": "crop", "cutmix": 1.0},
    {"augment": "randaugment", "mixup": 0.2, "cutmix": 1.0},
]


pytestmark = pytest.mark.usefixtures("one_thread")


def config(*, seed: int = 0, batch_size: int = 16, **dataset: Any) -> Config:
    dataset = {"name": "synthetic", "kwargs": TINY, **dataset}
    return Config(seed=seed, dataset=DatasetConfig(**dataset), train=TrainConfig(batch_size=batch_size))


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.inputs, y.inputs) and torch.equal(x.targets, y.targets) and torch.equal(x.ids, y.ids)
        for x, y in zip(a, b, strict=True)
    )


def global_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[union-attr]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def address(number: int = 0, count: int = 4, *, seed: int = 0) -> Address:
    return Address(seed, 0, number, tuple(range(count)))


# -- single augmentations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_cuts_the_old_size_out_of_the_padded_image_at_every_place(dtype: torch.dtype) -> None:
    image = torch.arange(1, 2 * 5 * 6 + 1).view(1, 2, 5, 6).to(dtype)
    cut = crop(image.repeat(8000, 1, 1, 1), generator(), 99)
    padded = torch.full((2, 13, 14), 99, dtype=dtype)
    padded[:, 4:9, 4:10] = image[0]
    counts = [
        int((cut == padded[:, y : y + 5, x : x + 6]).all(dim=(1, 2, 3)).sum()) for y in range(9) for x in range(9)
    ]
    assert sum(counts) == 8000, "each is one of 81 crops, all channels alike; a corner crop of 5 x 6 keeps pixels"
    assert min(counts) > 50
    assert max(counts) < 150, "drawn evenly: 99 each expected"
    assert cut.dtype == dtype


@settings(deadline=None, max_examples=25)
@given(value=st.integers(0, 255), seed=st.integers(0, 2**62), side=st.integers(1, 9))
def test_an_image_of_background_stays_whatever_is_done_to_it(value: int, seed: int, side: int) -> None:
    images = torch.full((3, 1, side, side), value, dtype=torch.uint8)
    for augmentation in (shift, crop, flip):
        assert torch.equal(augmentation(images, generator(seed), float(value)), images)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**62), count=st.integers(1, 40))
def test_flip_is_an_involution_and_each_image_is_whole(seed: int, count: int) -> None:
    images = torch.rand(count, 2, 3, 4, generator=generator(1))
    once = flip(images, generator(seed), 0.0)
    assert torch.equal(flip(once, generator(seed), 0.0), images)
    for before, after in zip(images, once, strict=True):
        assert torch.equal(after, before) or torch.equal(after, before.flip(-1))


@pytest.mark.parametrize("part", [shift, crop, flip])
def test_images_may_lie_in_memory_in_any_order(part: Any) -> None:
    images = torch.randint(256, (9, 3, 7, 5), generator=generator(), dtype=torch.uint8)
    wanted = part(images, generator(1), 0)
    for other in (
        images.to(memory_format=torch.channels_last),
        images.mT.contiguous().mT,
        images.repeat(2, 1, 1, 1)[9:],
    ):
        assert torch.equal(part(other, generator(1), 0), wanted)


def test_flip_takes_half_of_the_images() -> None:
    images = torch.arange(4.0).repeat(4000, 1, 1, 1)
    moved = (flip(images, generator(), 0.0) != images).any(dim=(1, 2, 3))
    assert float(moved.float().mean()) == pytest.approx(0.5, abs=0.03)


def test_parts_come_in_the_order_of_their_names() -> None:
    images = torch.arange(1, 2 * 36 + 1, dtype=torch.uint8).view(2, 1, 6, 6)
    for names, functions in ((("crop", "flip"), (crop, flip)), (("flip", "crop"), (flip, crop))):
        made, wanted = Pipeline(names, 0.0)(images, address(3, 2)), images
        draws = generator(subseed("augment", 0, 0, 3))
        for function in functions:
            wanted = function(wanted, draws, 0.0)
        assert torch.equal(made, wanted)


def test_samplewise_parts_belong_to_the_sample_and_not_to_its_place_in_a_batch() -> None:
    images = torch.randint(256, (6, 3, 16, 16), generator=generator(), dtype=torch.uint8)
    for name in ("randaugment", "trivialaugment"):
        pipeline = Pipeline((name,), 0.0)
        whole = pipeline(images, address(0, 6))
        alone = [pipeline(images[i : i + 1], Address(0, 0, 9, (i,)))[0] for i in reversed(range(6))]
        assert torch.equal(whole, torch.stack(alone[::-1]))
        assert (whole != images).any(dim=(1, 2, 3)).float().mean() > 0.5
        assert not torch.equal(whole, pipeline(images, Address(0, 1, 0, tuple(range(6))))), "epochs differ"
        assert whole.dtype == torch.uint8


# -- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_", COMBINATIONS, ids=str)
def test_a_batch_made_alone_is_the_batch_of_the_sequence_and_nothing_global_is_drawn(given_: dict[str, Any]) -> None:
    data = build_data(config(**given_), device=CPU)
    before = global_state()
    whole = list(data.train_batches(2))
    for start in (0, 1, 3):
        assert equal(whole[start:], list(build_data(config(**given_), device=CPU).train_batches(2, start)))
    val = list(data.val_batches())
    assert global_state() == before
    assert not equal(whole, list(data.train_batches(3)))
    assert not equal(whole, list(build_data(config(**given_, seed=1), device=CPU).train_batches(2)))
    assert torch.equal(torch.cat([b.inputs for b in val]), torch.cat([b.inputs for b in PLAIN.val_batches()]))
    assert all(not b.targets.is_floating_point() for b in val), "validation is neither augmented nor mixed"


PLAIN = build_data(config(), device=CPU)


def test_any_number_of_workers_makes_the_same_batches() -> None:
    wanted = {"augment": "flip+randaugment", "mixup": 0.3}
    before = global_state()
    here = list(build_data(config(**wanted), device=CPU).train_batches(1, 1))
    there = list(build_data(config(**wanted, workers=2), device=CPU).train_batches(1, 1))
    assert equal(here, there)
    assert global_state() == before


@pytest.mark.gpu
@pytest.mark.parametrize("given_", COMBINATIONS, ids=str)
def test_batches_are_the_same_on_the_gpu(given_: dict[str, Any]) -> None:
    here = list(build_data(config(**given_), device=CPU).train_batches(1))
    there = list(build_data(config(**given_), device=torch.device("cuda")).train_batches(1))
    assert all(b.inputs.device.type == b.targets.device.type == "cuda" and b.ids.device == CPU for b in there)
    assert equal(here, [Batch(b.inputs.cpu(), b.targets.cpu(), b.ids) for b in there])


# -- mixup and CutMix ---------------------------------------------------------------------------------------------


def shares(targets: Tensor, labels: Tensor) -> set[float]:
    """The weights of a batch's own labels, where partner and image differ in label."""
    differ = labels != labels.roll(1)
    return {round(float(t[label]), 6) for t, label, d in zip(targets, labels, differ, strict=True) if d}


@settings(deadline=None, max_examples=50)
@given(
    alphas=st.tuples(st.floats(0, 100), st.floats(0, 100)).filter(lambda a: max(a) > 0),
    seed=st.integers(0, 2**62),
    count=st.integers(1, 9),
)
def test_mixing_is_convex(alphas: tuple[float, float], seed: int, count: int) -> None:
    images = torch.randn(count, 2, 5, 7, generator=generator(seed))
    labels = torch.randint(4, (count,), generator=generator(seed))
    mixed, targets = Mix(*alphas, num_classes=4)(images, labels, address(1, count, seed=seed))
    partner = images.roll(1, 0)
    assert (mixed >= torch.minimum(images, partner) - 1e-6).all()
    assert (mixed <= torch.maximum(images, partner) + 1e-6).all()
    assert targets.shape == (count, 4)
    assert targets.dtype == torch.float32
    assert (targets >= 0).all()
    torch.testing.assert_close(targets.sum(1), torch.ones(count))
    assert len(shares(targets, labels)) <= 1, "one weight for the whole batch"
    others = torch.ones_like(targets).scatter(1, labels[:, None], 0).scatter(1, labels.roll(1)[:, None], 0)
    assert (targets * others == 0).all(), "only the own class and the partner's have a share"


def test_mixup_equals_torchvisions_at_the_same_weight() -> None:
    from torchvision.transforms import v2

    images, labels = torch.randn(6, 3, 4, 4, generator=generator()), torch.tensor([0, 1, 2, 3, 0, 2])
    for number in range(5):
        mixed, targets = Mix(0.8, 0.0, 4)(images, labels, address(number, 6))
        (share,) = shares(targets, labels)
        theirs, params = v2.MixUp(num_classes=4), {"labels": labels, "batch_size": 6, "lam": float(targets[0, 0])}
        torch.testing.assert_close(mixed, theirs.transform(images, params), atol=1e-6, rtol=0)
        torch.testing.assert_close(targets, theirs.transform(labels, params), atol=1e-6, rtol=0)
        assert 0 < share < 1


def test_cutmix_puts_one_box_and_counts_its_pixels() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 9, 12).clone()
    labels = torch.arange(4)
    areas = []
    for number in range(200):
        mixed, targets = Mix(0.0, 1.0, 4)(images, labels, address(number))
        foreign = mixed != images
        assert torch.equal(mixed[foreign], images.roll(1, 0)[foreign])
        assert all(torch.equal(foreign[0, 0], mask) for mask in foreign.flatten(0, 1)), "one box for all"
        rows, columns = foreign[0, 0].any(1), foreign[0, 0].any(0)
        assert torch.equal(foreign[0, 0], rows[:, None] & columns[None]), "a box"
        for axis in (rows, columns):
            assert sum(a != b for a, b in pairwise([False, *axis.tolist(), False])) in (0, 2), "in one piece"
        areas.append(float(foreign[0, 0].float().mean()))
        torch.testing.assert_close(targets.diagonal(), torch.full((4,), 1 - areas[-1]))
    assert torch.equal(images, torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 9, 12)), "the batch is not changed"
    assert 0.2 < sum(areas) / 200 < 0.5, "half of the area on average, less what the border cuts off"


def test_weights_follow_the_beta_distribution_and_both_kinds_take_turns() -> None:
    images, labels = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4).clone(), torch.tensor([0, 1])
    for alpha in (0.2, 2.0):
        drawn = [float(Mix(alpha, 0.0, 2)(images, labels, address(n, 2))[1][0, 0]) for n in range(2000)]
        assert np.mean(drawn) == pytest.approx(0.5, abs=0.03)
        assert np.var(drawn) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    # Only mixup blends: a pixel of one of these two images between 0 and 1 is its work.
    both = [Mix(1.0, 1.0, 2)(images, labels, address(n, 2))[0] for n in range(1000)]
    blended = np.mean([bool(((mixed > 0) & (mixed < 1)).any()) for mixed in both])
    assert blended == pytest.approx(0.5, abs=0.05)


def test_the_loss_of_mixed_targets_is_their_cross_entropy_smoothed_once() -> None:
    logits, smoothing = torch.randn(8, 5, generator=generator()), 0.1
    targets = Mix(0.5, 0.0, 5)(torch.zeros(8, 1, 2, 2), torch.arange(8) % 5, address(0, 8))[1]
    loss, correct = summed_loss(logits, targets, Task.classification, label_smoothing=smoothing)
    smoothed = targets.double() * (1 - smoothing) + smoothing / 5
    expected = -(smoothed * torch.log_softmax(logits.double(), 1)).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert int(correct) == int((logits.argmax(1) == targets.argmax(1)).sum()), "right is the class of the larger share"
    assert int(valid_targets(targets, Task.classification)) == 8


# -- legal and not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"augment": "crop+flop"}, r"dataset\.augment='flop' is unknown: did you mean 'flip'\?"),
        ({"augment": "crop, flip"}, r"dataset\.augment='crop, flip' is unknown: .*join names by \+"),
        ({"augment": "crop+crop"}, r"crop comes twice"),
        ({"augment": "none+crop"}, r"none stands alone"),
        ({"augment": "resizedcrop+flip"}, r"resizedcrop cuts image files to size; the images of synthetic have one size"),
        ({"name": "digits", "kwargs": {}, "augment": "shift+randaugment"}, r"'randaugment' does not fit: the pixels of digits"),
        ({"kwargs": {"image_size": 0}}, r"dataset\.kwargs\.image_size=0 is not a whole number from 1 up"),
        ({"kwargs": {"size": 8}}, r"dataset\.kwargs\.size is not a parameter of synthetic"),
        ({"task": Task.regression}, r"dataset\.task=regression does not fit synthetic"),
        ({"root": "/somewhere"}, r"dataset\.root=/somewhere: synthetic reads no folder"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    wanted = config(**fields)
    with pytest.raises(ConfigError, match=message):
        build_data(wanted, device=CPU)


def test_a_python_dataset_is_not_mixed() -> None:
    given_ = DatasetConfig(name="tests.conftest:toy", source=DatasetSource.python, cutmix=0.1)
    with pytest.raises(ConfigError, match=r"dataset\.cutmix=0\.1: a python dataset is not mixed"):
        check_dataset(given_)


def test_names_are_checked_without_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from mprun.data import check_dataset; from mprun.config import DatasetConfig\n"
        "try: check_dataset(DatasetConfig(augment='flipp'))\n"
        "except Exception as error: assert 'flip' in str(error)\n"
        "else: raise SystemExit('accepted')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(st.permutations(["shift", "crop", "flip", "randaugment", "trivialaugment"]), st.integers(1, 5))
def test_names_come_back_in_their_order(names: list[str], count: int) -> None:
    assert augment_names("+".join(names[:count])) == tuple(names[:count])
    assert augment_names(None) == augment_names("none") == ()


@pytest.mark.parametrize("key", ["dataset.mixup", "dataset.cutmix"])
def test_alphas_are_checked_and_fixed_at_resume(key: str) -> None:
    for bad in (-0.1, float("nan"), float("inf"), 1e6):
        with pytest.raises(ConfigError, match=rf"{key}=.* is not legal: from 0 to 100"):
            make_config(**{key: bad})
    with pytest.raises(ConfigError, match=rf"{key}=0\.5 mixes the targets of a classification"):
        make_config(**{key: 0.5, "dataset.task": Task.regression})
    assert key in FIXED
    assert key in changes(to_plain(make_config()), to_plain(make_config(**{key: 0.5})))


def test_synthetic_images_say_what_they_are_for() -> None:
    spec = PLAIN.spec
    assert spec.note is not None
    assert "random images" in spec.note
    assert (spec.input_shape, spec.num_classes, spec.train_examples, spec.val_examples) == ((3, 8, 8), 5, 50, 7)
    pixels = torch.cat([batch.inputs for batch in PLAIN.train_batches(0)])
    assert float(pixels.mean()) == pytest.approx(0, abs=0.05)
    assert float(pixels.std()) == pytest.approx(1, abs=0.05)
    assert build_data(config(), device=CPU).spec == spec


# -- whole runs ---------------------------------------------------------------------------------------------------

RUN = ["model=mlp", "dataset=synthetic", *(f"dataset.kwargs.{key}={value}" for key, value in TINY.items()), "device=cpu",
       "tracking=disabled", "train.batch_size=16", "train.epochs=2", "precision=fp16_dynamic", "train.log_every=1",
       "dataset.augment=flip+randaugment", "dataset.mixup=0.3", "dataset.cutmix=1", "schedule=constant"]  # fmt: skip


def test_a_run_says_what_its_data_are_and_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "hydra.run.dir=whole"]) == 0
    rows = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    events = [row["message"] for row in rows if row["kind"] == "event"]
    assert any("synthetic is random images" in message for message in events)
    assert json.loads(Path("whole/result.json").read_text())["dataset"] == "synthetic"
    tops = [row["train/top1"] for row in rows if row["kind"] == "train"]
    assert tops
    assert all(0 <= top <= 1 for top in tops)
    assert main([*RUN, "hydra.run.dir=parts", "train.steps=6"]) == 0, "in the middle of the second epoch of 4 batches"
    assert main(["resume=parts", "train.steps=8", "dataset.workers=1"]) == 0
    weights = [torch.load(f"{name}/checkpoints/last.pt", weights_only=True)["model"] for name in ("whole", "parts")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
