import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from mprun.config import Config, DatasetConfig, DatasetSource, Task, TrainConfig
from mprun.data import DATASETS, Batch, Data, build_data, check_dataset, subseed
from mprun.data.augment import shift
from mprun.data.digits import digits
from mprun.data.sampler import Sampler
from mprun.errors import ConfigError

CPU = torch.device("cpu")
Make = Callable[..., Data]


pytestmark = pytest.mark.usefixtures("one_thread")


def config(*, seed: int = 0, trust: tuple[str, ...] = (), batch_size: int = 64, **dataset: Any) -> Config:
    train = TrainConfig(batch_size=batch_size)
    return Config(seed=seed, trust=list(trust), dataset=DatasetConfig(**dataset), train=train)


def global_state() -> tuple[Any, ...]:
    """The positions of all global CPU generators, comparable."""
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[union-attr]


def equal(a: list[Batch], b: list[Batch]) -> bool:
    """Whether two runs of batches are the same, bit for bit."""
    return len(a) == len(b) and all(
        torch.equal(x.inputs, y.inputs) and torch.equal(x.targets, y.targets) and torch.equal(x.ids, y.ids)
        for x, y in zip(a, b, strict=True)
    )


# -- seeds and order ----------------------------------------------------------------------------------------------


def test_subseed_depends_on_the_whole_address_and_stays_put() -> None:
    addresses = [("order", s, e) for s in range(20) for e in range(20)] + [
        ("augment", 0, 0),
        ("order", 0),
        ("order", "0", 0),
    ]
    seeds = {subseed(*address) for address in addresses}
    assert len(seeds) == len(addresses), "seed + epoch would collide"
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert subseed("order", 0, 0) == 4876581156571347824, "changing the hash changes everyone's data order"


def test_an_epoch_holds_every_sample_once_and_epochs_and_seeds_differ() -> None:
    sampler = Sampler(examples=100, batch_size=32, seed=0)
    orders = [torch.cat(s.epoch(e)).tolist() for s in (sampler, replace(sampler, seed=1)) for e in (0, 1)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4, "seed 0 epoch 1 is not seed 1 epoch 0"
    assert orders[0] == torch.cat(sampler.epoch(0)).tolist(), "and asking again changes nothing"
    assert [len(ids) for ids in sampler.epoch(0)] == [32, 32, 32, 4]
    assert sampler.epoch(0)[0].dtype == torch.int64


def test_start_is_the_rest_of_the_epoch() -> None:
    sampler = Sampler(examples=100, batch_size=32, seed=0)
    whole = sampler.epoch(3)
    for start in range(5):
        assert [ids.tolist() for ids in sampler.epoch(3, start)] == [ids.tolist() for ids in whole[start:]]
    with pytest.raises(ValueError, match=r"0\.\.4, got 5"):
        sampler.epoch(3, 5)


def test_drop_last_and_no_shuffle() -> None:
    sampler = Sampler(examples=10, batch_size=4, seed=0, shuffle=False, drop_last=True)
    assert sampler.batches == 2
    assert [ids.tolist() for ids in sampler.epoch(7)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Sampler(examples=8, batch_size=4, seed=0).batches == 2
    with pytest.raises(ConfigError, match=r"train\.drop_last=true leaves no batch: 3 examples .* train\.batch_size=4"):
        Sampler(examples=3, batch_size=4, seed=0, drop_last=True)
    with pytest.raises(ConfigError, match=r"train\.batch_size=0"):
        Sampler(examples=3, batch_size=0, seed=0)


# -- digits -------------------------------------------------------------------------------------------------------


def test_digits_equal_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    bunch, ours = load_digits(), digits()
    pixels = torch.cat([ours.train.images, ours.val.images])
    assert pixels.shape == (1797, 1, 8, 8)
    assert pixels.dtype == torch.float32
    # Undo the normalisation from its ends: 0 is the background, and some pixel is 16.
    restored = (pixels - ours.background) / (pixels.max() - ours.background) * 16
    np.testing.assert_allclose(restored[:, 0].numpy(), bunch.images, atol=1e-5)
    assert torch.cat([ours.train.labels, ours.val.labels]).tolist() == bunch.target.tolist()
    assert (len(ours.train), len(ours.val)) == (898, 899)
    assert abs(float(ours.train.images.mean())) < 1e-3
    assert abs(float(ours.train.images.std()) - 1) < 1e-3


def test_digits_come_from_scikit_learn_where_the_file_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    read = digits()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = digits()
    assert asked.sha256 == read.sha256
    assert torch.equal(asked.train.images, read.train.images)


def test_digits_need_neither_sklearn_nor_the_import_of_torch_to_be_listed() -> None:
    code = (
        "import sys; from mprun.data import DATASETS, check_dataset; from mprun.config import DatasetConfig;"
        "check_dataset(DatasetConfig()); assert 'torch' not in sys.modules;"
        "from mprun.data.digits import digits; digits(); assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spec_and_val_batches() -> None:
    data = build_data(config(augment="shift"), device=CPU)
    spec = data.spec
    assert (spec.input_shape, spec.num_classes, spec.task) == ((1, 8, 8), 10, Task.classification)
    assert (spec.train_examples, spec.val_examples, data.batches_per_epoch) == (898, 899, 15)
    assert spec.sha256 == "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
    val = list(data.val_batches())
    assert torch.equal(torch.cat([b.inputs for b in val]), digits().val.images), "never augmented"
    assert torch.cat([b.ids for b in val]).tolist() == list(range(899))


def test_limit_keeps_the_first_examples() -> None:
    data = build_data(config(limit=100, augment=None), device=CPU)
    assert (data.spec.train_examples, data.spec.val_examples, data.batches_per_epoch) == (100, 899, 2)
    batches = list(data.train_batches(0))
    assert sorted(torch.cat([b.ids for b in batches]).tolist()) == list(range(100))
    for batch in batches:
        assert torch.equal(batch.inputs, digits().train.images[batch.ids])
        assert torch.equal(batch.targets, digits().train.labels[batch.ids])


def test_digits_resume_mid_epoch_and_draw_nothing_global() -> None:
    data = build_data(config(augment="shift"), device=CPU)
    before = global_state()
    whole = list(data.train_batches(2))
    rest = list(build_data(config(augment="shift"), device=CPU).train_batches(2, start=7))
    list(data.val_batches())
    assert global_state() == before
    assert equal(whole[7:], rest)
    assert not equal(whole, list(data.train_batches(3)))


# -- augmentation -------------------------------------------------------------------------------------------------


def test_shift_moves_about_half_by_one_pixel_and_fills_with_background() -> None:
    images = torch.arange(1.0, 33.0).view(1, 2, 4, 4).repeat(4000, 1, 1, 1)
    moved = shift(images, torch.Generator().manual_seed(0), -1.0)
    expected = {}
    padded = torch.nn.functional.pad(images[0], (1, 1, 1, 1), value=-1.0)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            expected[(dy, dx)] = padded[:, 1 - dy : 5 - dy, 1 - dx : 5 - dx]
    counts = {offset: int((moved == wanted).all(dim=(1, 2, 3)).sum()) for offset, wanted in expected.items()}
    assert sum(counts.values()) == 4000, "every image is one of the nine shifts, both channels alike"
    still = counts.pop((0, 0))
    assert still / 4000 == pytest.approx(1 / 2 + 1 / 18, abs=0.03)
    assert all(count / 4000 == pytest.approx(1 / 18, abs=0.015) for count in counts.values())
    assert torch.equal(images[0, 0, 0], torch.tensor([1.0, 2.0, 3.0, 4.0])), "the input is not changed"


def test_augmented_batches_differ_from_plain_ones_and_between_batches() -> None:
    plain = list(build_data(config(augment="none"), device=CPU).train_batches(0))
    moved = list(build_data(config(augment="shift"), device=CPU).train_batches(0))
    changed = [(a.inputs != b.inputs).any(dim=(1, 2, 3)) for a, b in zip(plain, moved, strict=True)]
    assert all(0.2 < float(c.float().mean()) < 0.7 for c in changed[:-1])
    assert len({tuple(c.tolist()) for c in changed[:-1]}) == 14, "each batch has its own draws"
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(plain, moved, strict=True))


def test_augmentation_differs_between_epochs_and_seeds() -> None:
    seen = set()
    for seed in (0, 1):
        wanted = config(augment="shift", seed=seed)
        wanted.train.shuffle = False
        data = build_data(wanted, device=CPU)
        for epoch in (0, 1):
            seen.add(next(data.train_batches(epoch)).inputs.numpy().tobytes())
    assert len(seen) == 4, "the same images in the same order, moved differently"


@pytest.mark.gpu
def test_batches_are_the_same_on_the_gpu() -> None:
    device = torch.device("cuda")
    here = list(build_data(config(augment="shift"), device=CPU).train_batches(1))
    there = list(build_data(config(augment="shift"), device=device).train_batches(1))
    assert all(b.inputs.device.type == b.targets.device.type == "cuda" and b.ids.device == CPU for b in there)
    assert equal(here, [Batch(b.inputs.cpu(), b.targets.cpu(), b.ids) for b in there])


def test_options_in_conf_are_the_datasets() -> None:
    files = {path.stem: path for path in (Path(__file__).parents[1] / "conf" / "dataset").glob("*.yaml")}
    assert set(files) == {*DATASETS, "python"}
    for name, path in files.items():
        assert path.read_text().startswith("# "), "`mprun list` shows the first comment"
        option = OmegaConf.load(path)
        merged = OmegaConf.merge(OmegaConf.structured(DatasetConfig), option)
        assert OmegaConf.is_missing(option, "name") == (name == "python")
        if name in DATASETS:
            check_dataset(OmegaConf.to_object(merged))  # type: ignore[arg-type]


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "digit"}, r"dataset\.name='digit' is unknown: did you mean 'digits'\?"),
        ({"augment": "shfit"}, r"dataset\.augment='shfit' is unknown: did you mean 'shift'\?"),
        ({"kwargs": {"split": 3}}, r"dataset\.kwargs\.split is not a parameter of digits: legal: none"),
        ({"task": Task.regression}, r"dataset\.task=regression does not fit digits"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_data(config(**fields), device=CPU)


# -- a user's own dataset -----------------------------------------------------------------------------------------

USER_CODE = '''
import random
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset


class Noisy(Dataset):
    """Draws from all three global generators, as augmentations do."""

    num_classes = 3

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return np.array([i, random.random(), np.random.rand(), torch.rand(()).item()], dtype=np.float32), i % 3


def noisy(n=10):
    return Noisy(n), Noisy(4)


class Nested(Noisy):
    def __getitem__(self, i):
        return {"ids": torch.tensor([50256, 2049]), "more": (np.float64(i), [True])}, -100


def nested():
    return Nested(3), Nested(3)


def tensors():
    full = TensorDataset(torch.zeros(6, 5), torch.tensor([0, 4, 1, 6, -100, 2]))
    return Subset(full, [0, 1]), Subset(full, [2])


def split():
    order = torch.randperm(1000)
    train = TensorDataset(order[:900, None].float(), torch.zeros(900, dtype=torch.long))
    return train, TensorDataset(order[900:, None].float(), torch.zeros(100, dtype=torch.long))


def line():
    x = torch.linspace(-1, 1, 8)[:, None]
    return TensorDataset(x, torch.cat([x, -x], 1)), TensorDataset(x, torch.cat([x, -x], 1))


def no_classes():
    return [(torch.zeros(2), 0)], [(torch.zeros(2), 0)]


def objects():
    return [(object(), 0)], [(object(), 0)]


def triples():
    return [(1.0, 2, 3)], [(1.0, 2, 3)]


def one():
    return Noisy(3)


def empty():
    return Noisy(3), Noisy(0)


def stream():
    class S(IterableDataset):
        def __iter__(self):
            return iter([])
    return S(), S()


def fails():
    raise TypeError("a bug of the user")
'''


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``user("noisy", batch_size=3, ...)`` builds a dataset from the code above."""
    (tmp_path / "user_sets.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(attr: str, *, trust: tuple[str, ...] = ("user_sets",), **fields: Any) -> Data:
        wanted = config(name=f"user_sets:{attr}", source=DatasetSource.python, trust=trust, **fields)
        return build_data(wanted, device=CPU)

    yield make
    sys.modules.pop("user_sets", None)


def test_user_set_is_the_same_for_any_number_of_workers_and_any_start(user: Make) -> None:
    plain = user("noisy", batch_size=3)
    before = global_state()
    whole = [list(plain.train_batches(epoch)) for epoch in (0, 1)]
    assert global_state() == before, "loading in the training process leaves its generators alone"
    parallel = user("noisy", batch_size=3, workers=2)
    assert equal(whole[1], list(parallel.train_batches(1)))
    assert equal(whole[1][2:], list(parallel.train_batches(1, start=2)))
    assert equal(whole[1][2:], list(plain.train_batches(1, start=2)))
    assert global_state() == before, "nor does starting workers draw from them"
    assert list(plain.train_batches(1, start=4)) == []


def test_user_samples_get_streams_of_their_own(user: Make) -> None:
    data = user("noisy", batch_size=3)
    rows = torch.cat([b.inputs for epoch in (0, 1) for b in data.train_batches(epoch)])
    assert rows[:, 1:].unique().numel() == 20 * 3, "every sample of every epoch draws its own numbers"
    other = torch.cat([b.inputs for b in user("noisy", batch_size=3, seed=1).train_batches(0)])
    assert not set(rows[:, 1].tolist()) & set(other[:, 1].tolist())
    for batch in data.train_batches(0):
        assert torch.equal(batch.inputs[:, 0].long(), batch.ids)
        assert torch.equal(batch.targets, batch.ids % 3)


def test_user_val_batches_repeat(user: Make) -> None:
    data = user("noisy", batch_size=3)
    first = list(data.val_batches())
    assert [b.ids.tolist() for b in first] == [[0, 1, 2], [3]]
    assert equal(first, list(data.val_batches()))


def test_user_generators_are_restored_when_a_sample_fails(user: Make) -> None:
    data: Any = user("noisy", batch_size=3)
    data.train.samples.n = 2  # too short now: default_collate meets None
    data.train.samples.__class__.__getitem__ = lambda self, i: 1 / 0
    before = global_state()
    with pytest.raises(ZeroDivisionError):
        list(data.train_batches(0))
    assert global_state() == before


def test_user_spec_is_read_off_the_set(user: Make) -> None:
    spec = user("noisy", kwargs={"n": 7}, limit=5).spec
    assert (spec.input_shape, spec.num_classes, spec.train_examples, spec.val_examples) == ((4,), 3, 5, 4)
    assert spec.sha256 is None
    spec = user("tensors").spec
    assert (spec.input_shape, spec.num_classes, spec.train_examples) == ((5,), 7, 2), "through a Subset"
    assert user("line", task=Task.regression).spec.num_classes == 2


def test_user_split_is_the_same_under_every_seed(user: Make) -> None:
    splits = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = global_state()
        splits.append(user("split", seed=seed))
        assert global_state() == before
    vals: list[Tensor] = [torch.cat([b.inputs for b in data.val_batches()]) for data in splits]
    assert torch.equal(*vals), "otherwise a checkpoint would be scored on its own training samples"


def test_user_nested_inputs_keep_structure_and_integer_types(user: Make) -> None:
    batch = next(user("nested", batch_size=2).train_batches(0))
    ids, more = batch.inputs["ids"], batch.inputs["more"]
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[50256, 2049]] * 2
    assert more[0].dtype == torch.float64
    assert more[1][0].dtype == torch.bool
    assert batch.targets.tolist() == [-100, -100]


@pytest.mark.parametrize(
    ("attr", "message"),
    [
        ("no_classes", r"how many classes\? Give the training set an attribute num_classes"),
        ("objects", r"sample 0, \(object, int\), cannot be made into a batch"),
        ("triples", r"sample 0 is a tuple of 3, not a pair"),
        ("one", r"returned Noisy, not a pair \(train, val\)"),
        ("empty", r"the validation set is empty"),
        ("stream", r"the training set, a S, has no len\(\) or no \[i\]"),
        ("nosy", r"no 'nosy': did you mean 'noisy'\?"),
    ],
)
def test_user_mistakes_are_explained(user: Make, attr: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        user(attr)


def test_user_kwargs_augment_and_trust_are_checked(user: Make) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.kwargs\.m is not a parameter of noisy: .*legal: n"):
        user("noisy", kwargs={"m": 1})
    with pytest.raises(ConfigError, match=r"augments in its own __getitem__"):
        user("noisy", augment="shift")
    sys.modules.pop("user_sets", None)
    with pytest.raises(ConfigError, match=r"'trust=\[user_sets\]'"):
        user("noisy", trust=())
    assert "user_sets" not in sys.modules
    with pytest.raises(TypeError, match="a bug of the user"):
        user("fails")
