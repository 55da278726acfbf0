import gzip
import hashlib
import io
import pickle
import random
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from mprun.config import Config, DatasetConfig, Task, TrainConfig
from mprun.data import Batch, build_data, torchvision_sets
from mprun.data.formats import read_batches, read_idx
from mprun.data.imagefolder import FolderData
from mprun.data.tensors import TensorData
from mprun.errors import ConfigError, MprunError

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
TRAIN, VAL = RNG.integers(256, size=(12, 28, 28), dtype=np.uint8), RNG.integers(256, size=(5, 28, 28), dtype=np.uint8)
TRAIN_LABELS, VAL_LABELS = np.arange(12, dtype=np.uint8) % 10, np.arange(5, dtype=np.uint8)
COLOUR = RNG.integers(256, size=(18, 3, 32, 32), dtype=np.uint8)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One thread, a cache folder of the test's own, no package on this machine, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    nowhere = replace(torchvision_sets._FASHION_MNIST, package=("dataset-fashion-mnist", str(tmp_path / "package")))
    monkeypatch.setattr(torchvision_sets, "_FASHION_MNIST", nowhere)

    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, root: Path | None = None, *, batch_size: int = 4, seed: int = 0, **dataset: Any) -> Any:
    wanted = DatasetConfig(name=name, root=str(root) if root else None, **dataset)
    return build_data(Config(seed=seed, dataset=wanted, train=TrainConfig(batch_size=batch_size)), device=CPU)


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.inputs, y.inputs) and torch.equal(x.targets, y.targets) and torch.equal(x.ids, y.ids)
        for x, y in zip(a, b, strict=True)
    )


# -- MNIST's format -----------------------------------------------------------------------------------------------


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_idx(folder: Path, *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(torchvision_sets.IDX_FILES, (TRAIN, TRAIN_LABELS, VAL, VAL_LABELS), strict=True):
        data = idx(array)
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(data) if zipped else data)
    return folder


def assert_is_tiny(data: Any) -> None:
    assert isinstance(data, TensorData)
    assert data.train.images.dtype == torch.uint8, "8-bit in memory"
    assert torch.equal(data.train.images[:, 0], torch.from_numpy(TRAIN))
    assert torch.equal(data.val.images[:, 0], torch.from_numpy(VAL))
    assert data.train.labels.tolist() == TRAIN_LABELS.tolist()
    assert data.val.labels.tolist() == VAL_LABELS.tolist()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("layout", ["", "raw folder"])
@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_files_are_found_in_the_root_and_in_torchvisions_folders(
    tmp_path: Path, zipped: bool, layout: str, name: str, kind: str
) -> None:
    write_idx(tmp_path / "data" / (f"{kind}/raw" if layout else ""), zipped=zipped)
    data = build(name, tmp_path / "data")
    assert_is_tiny(data)
    spec = data.spec
    assert (spec.name, spec.input_shape, spec.num_classes, spec.task) == (name, (1, 28, 28), 10, Task.classification)
    assert (spec.train_examples, spec.val_examples) == (12, 5)
    raw = TRAIN.tobytes() + TRAIN_LABELS.tobytes() + VAL.tobytes() + VAL_LABELS.tobytes()
    assert spec.sha256 == hashlib.sha256(raw).hexdigest(), "of the raw pixels and labels, zipped or not"


def test_idx_files_read_as_torchvision_reads_them(tmp_path: Path) -> None:
    from torchvision.datasets import FashionMNIST

    write_idx(tmp_path / "FashionMNIST" / "raw")
    ours = build("fashion_mnist", tmp_path)
    for train, split in ((True, ours.train), (False, ours.val)):
        theirs = FashionMNIST(str(tmp_path), train=train)
        assert torch.equal(split.images[:, 0], theirs.data)
        assert torch.equal(split.labels, theirs.targets)


def test_without_a_root_the_package_comes_before_the_cache(tmp_path: Path) -> None:
    write_idx(tmp_path / "cache" / "mprun" / "datasets" / "FashionMNIST" / "raw")
    assert_is_tiny(build("fashion_mnist"))
    (write_idx(tmp_path / "package", zipped=True) / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"package/t10k-labels-idx1-ubyte\.gz: cannot be read"):
        build("fashion_mnist")


def test_batches_are_normalised_with_the_published_constants(tmp_path: Path) -> None:
    data = build("fashion_mnist", write_idx(tmp_path / "data"))
    for batches, images in ((data.train_batches(0), TRAIN), (data.val_batches(), VAL)):
        for batch in batches:
            wanted = (images[batch.ids.numpy()][:, None] / 255 - 0.2860) / 0.3530
            assert batch.inputs.dtype == torch.float32
            np.testing.assert_allclose(batch.inputs.numpy(), wanted, atol=2e-6)


def test_a_download_goes_to_the_cache_or_into_a_root_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchvision.datasets import FashionMNIST

    # In place of the network only: which folder, which layout and what is read are torchvision's and ours.
    monkeypatch.setattr(FashionMNIST, "download", lambda self: write_idx(Path(self.raw_folder)))
    assert_is_tiny(build("fashion_mnist"))
    cache = tmp_path / "cache" / "mprun" / "datasets"
    assert f"downloading to {cache}" in capfd.readouterr().err
    shutil.rmtree(cache)
    (tmp_path / "mine").mkdir()
    assert_is_tiny(build("fashion_mnist", tmp_path / "mine"))
    assert (tmp_path / "mine" / "FashionMNIST" / "raw").is_dir()
    assert not cache.exists()
    with pytest.raises(ConfigError, match=r"there is no such folder"):
        build("fashion_mnist", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_set_that_is_nowhere_is_explained(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        build(name)
    text = str(told.value)
    assert f"not in {tmp_path}" in text
    assert "cache/mprun/datasets" in text
    assert "cannot be downloaded: " in text
    assert "set dataset.root= to the folder that has them" in text
    for part in {
        "mnist": ["train-images-idx3-ubyte[.gz]"],
        "fashion_mnist": ["t10k-labels-idx1-ubyte[.gz]", "Debian's package dataset-fashion-mnist"],
        "cifar10": ["data_batch_5", "cifar-10-python.tar.gz"],
        "cifar100": ["cifar-100-python.tar.gz"],
    }[name]:
        assert part in text


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("train-images-idx3-ubyte", idx(TRAIN)[:-1], r"header says \[12, 28, 28\] values, it holds 9407"),
        ("train-images-idx3-ubyte", b"PNG" + bytes(30), r"begins with 50 4e 47 00, not with 00 00 08 03"),
        ("train-images-idx3-ubyte", b"", r"is empty"),
        ("train-images-idx3-ubyte", bytes([0, 0, 8, 3, 0]), r"header says \[0\] values, it holds 0"),
        ("train-labels-idx1-ubyte", idx(VAL_LABELS), r"5 labels for 12 images of fashion_mnist"),
        ("t10k-labels-idx1-ubyte", idx(VAL_LABELS + 7), r"labels from 7 to 11; fashion_mnist has 10 classes"),
    ],
)  # fmt: skip
def test_broken_idx_files_are_named(tmp_path: Path, file: str, data: bytes, message: str) -> None:
    (write_idx(tmp_path / "data") / file).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"data/{file}: .*{message}"):
        build("fashion_mnist", tmp_path / "data")


def test_a_torn_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx(TRAIN))[:-30])
    with pytest.raises(ConfigError, match=r"a\.gz: cannot be read \(.*\); fetch it anew"):
        read_idx(path, dims=3)


# -- CIFAR's format -----------------------------------------------------------------------------------------------


def python2_batch(pixels: NDArray[np.uint8], labels: list[int], key: str) -> bytes:
    """A batch as it is published: written by Python 2, its pixels a byte string that Python 3 reads as latin-1."""
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        + b"(K\x01(K"
        + bytes([len(pixels)])
        + b"M\x00\x0ct"
        + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T"
        + len(raw).to_bytes(4, "little")
        + raw
        + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U" + bytes([len(key)]) + key.encode() + listed + b"u."


def cifar_files(name: str) -> dict[str, bytes]:
    if name == "cifar100":
        return {
            "train": python2_batch(COLOUR[:15], list(range(85, 100)), "fine_labels"),
            "test": python2_batch(COLOUR[15:], [0, 99, 50], "fine_labels"),
        }
    batches = {
        f"data_batch_{i + 1}": python2_batch(COLOUR[3 * i : 3 * i + 3], [i, 9 - i, 2 * i], "labels") for i in range(5)
    }
    return {**batches, "test_batch": python2_batch(COLOUR[15:], [7, 8, 9], "labels")}


FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def write_cifar(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in cifar_files(name).items():
        (folder / file).write_bytes(data)
    return folder


def write_archive(path: Path, name: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for file, data in cifar_files(name).items():
            member = tarfile.TarInfo(f"{FOLDERS[name]}/{file}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("layout", ["folder", "root", "archive", "archive itself"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_its_folder_or_its_archive(tmp_path: Path, name: str, layout: str) -> None:
    root = tmp_path
    if layout.startswith("archive"):
        path = write_archive(tmp_path / ARCHIVES[name], name)
        root = path if layout == "archive itself" else tmp_path
    else:
        write_cifar(tmp_path / (FOLDERS[name] if layout == "folder" else ""), name)
    data = build(name, root)
    assert torch.equal(data.train.images, torch.from_numpy(COLOUR[:15]))
    assert torch.equal(data.val.images, torch.from_numpy(COLOUR[15:]))
    labels = list(range(85, 100)) if name == "cifar100" else [x for i in range(5) for x in (i, 9 - i, 2 * i)]
    assert data.train.labels.tolist() == labels
    assert data.val.labels.tolist() == ([0, 99, 50] if name == "cifar100" else [7, 8, 9])
    assert (data.spec.input_shape, data.spec.num_classes) == ((3, 32, 32), 100 if name == "cifar100" else 10)
    assert data.spec.sha256 is not None
    assert torch.equal(torch.cat([b.ids for b in data.val_batches()]), torch.arange(3))


@pytest.mark.filterwarnings("ignore:.*numpy.core.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_reads_as_torchvision_reads_it(tmp_path: Path, name: str) -> None:
    from torchvision import datasets

    files = {**cifar_files(name), "names": pickle.dumps({"names": []})}
    write_cifar(tmp_path / FOLDERS[name], name)
    (tmp_path / FOLDERS[name] / "names").write_bytes(files["names"])
    sums = {file: hashlib.md5(data).hexdigest() for file, data in files.items()}
    published: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    listed = {
        "train_list": [(file, sums[file]) for file in files if file not in ("test", "test_batch", "names")],
        "test_list": [(file, sums[file]) for file in files if file in ("test", "test_batch")],
        "meta": {"filename": "names", "key": "names", "md5": sums["names"]},
    }
    tiny: Any = type("Tiny", (published,), listed)  # torchvision's own reader, at the checksums of these files
    ours = build(name, tmp_path)
    for train, split in ((True, ours.train), (False, ours.val)):
        theirs = tiny(str(tmp_path), train=train)
        assert torch.equal(split.images, torch.from_numpy(theirs.data).permute(0, 3, 1, 2))
        assert split.labels.tolist() == theirs.targets


def test_cifar_batches_of_python_3_are_read_too(tmp_path: Path) -> None:
    for protocol in (2, 4):
        (tmp_path / "b").write_bytes(pickle.dumps({"data": COLOUR.reshape(18, -1), "labels": [1] * 18}, protocol))
        pixels, labels = read_batches(tmp_path, ["b"], label_key="labels")
        assert np.array_equal(pixels, COLOUR)
        assert labels == [1] * 18


class Nasty:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_batch_runs_no_code(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    for bad in (Nasty(proof), {"data": Nasty(proof)}):
        (tmp_path / "b").write_bytes(pickle.dumps(bad))
        with pytest.raises(
            ConfigError, match=r"b is not a batch of arrays \(it asks for .*, which is no part of an array"
        ):
            read_batches(tmp_path, ["b"], label_key="labels")
    assert not proof.exists()
    pickle.loads(pickle.dumps(Nasty(proof)))
    assert proof.exists(), "it would have"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], r"b holds a list, not a dict"),
        ({"labels": [1]}, r"b has no 'data' of 3072 bytes an image"),
        ({"data": np.zeros((2, 3072), np.float32), "labels": [1, 1]}, r"b has no 'data' of 3072 bytes"),
        ({"data": np.zeros((2, 784), np.uint8), "labels": [1, 1]}, r"b has no 'data' of 3072 bytes"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, r"b has no 'labels' for its 2 images"),
        ({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2]}, r"b has no 'labels' for its 2 images"),
    ],
)
def test_broken_batches_are_named(tmp_path: Path, batch: Any, message: str) -> None:
    (tmp_path / "b").write_bytes(pickle.dumps(batch))
    with pytest.raises(ConfigError, match=message):
        read_batches(tmp_path, ["b"], label_key="labels")


def test_broken_archives_are_named(tmp_path: Path) -> None:
    path = tmp_path / ARCHIVES["cifar10"]
    path.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"cifar-10-python\.tar\.gz: cannot be read"):
        build("cifar10", tmp_path)
    write_archive(path, "cifar100")
    with pytest.raises(ConfigError, match=r"cifar-10-python\.tar\.gz: data_batch_1 is not in the archive"):
        build("cifar10", path)


# -- image files --------------------------------------------------------------------------------------------------

SIZES = [(40, 30), (30, 40), (33, 33), (64, 20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes, files of several formats, modes and sizes."""
    rng = np.random.default_rng(1)
    for split, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(("ape", "bee", "cat")):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                width, height = SIZES[(label + i) % 4]
                image = Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8))
                mode, ending = [("RGB", "png"), ("L", "jpg"), ("RGBA", "png"), ("P", "png"), ("CMYK", "jpg")][i]
                image.convert(mode).save(place / f"{i}.{ending}")
            (place / "notes.txt").write_text("no image")
    return tmp_path / "images"


def folder_data(root: Path, *, augment: str | None = "resizedcrop+flip", **given: Any) -> FolderData:
    kwargs = {"image_size": 16, **given.pop("kwargs", {})}
    data = build("imagefolder", root, augment=augment, kwargs=kwargs, **given)
    assert isinstance(data, FolderData)
    return data


def test_image_files_are_listed_decoded_and_cut_to_size(folder: Path) -> None:
    data = folder_data(folder)
    spec = data.spec
    assert (spec.input_shape, spec.num_classes, spec.train_examples, spec.val_examples) == ((3, 16, 16), 3, 15, 6)
    assert data.files.classes == ("ape", "bee", "cat")
    batches = list(data.train_batches(0))
    assert [tuple(b.inputs.shape) for b in batches] == [(4, 3, 16, 16)] * 3 + [(3, 3, 16, 16)]
    assert all(b.inputs.dtype == torch.float32 and b.targets.dtype == torch.int64 for b in batches)
    assert sorted(torch.cat([b.ids for b in batches]).tolist()) == list(range(15))
    for batch in batches:
        assert batch.targets.tolist() == [int(i) // 5 for i in batch.ids], "labels follow the sorted classes"
    assert torch.cat([b.targets for b in data.val_batches()]).tolist() == [0, 0, 1, 1, 2, 2]


def test_validation_resizes_the_shorter_side_and_takes_the_middle(folder: Path) -> None:
    got = torch.cat([b.inputs for b in folder_data(folder).val_batches()])
    for tensor, (path, _) in zip(got, folder_data(folder).files.val, strict=True):
        with Image.open(path) as image:
            short = 16 * 256 // 224
            scale = short / min(image.size)
            size = tuple(short if side == min(image.size) else int(side * scale) for side in image.size)
            resized = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR), dtype=np.float64)
        top, left = round((size[1] - 16) / 2), round((size[0] - 16) / 2)
        middle = resized[top : top + 16, left : left + 16] / 255
        wanted = (middle - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        np.testing.assert_allclose(tensor.permute(1, 2, 0).numpy(), wanted, atol=1e-5)


def test_without_augmentation_training_images_are_cut_like_validation_images(folder: Path) -> None:
    shutil.rmtree(folder / "val")
    shutil.copytree(folder / "train", folder / "val")
    data = folder_data(folder, augment="none", batch_size=15)
    (train,), (val,) = data.train_batches(0), data.val_batches()
    assert torch.equal(train.inputs, val.inputs[train.ids])


@pytest.mark.parametrize("augment", ["resizedcrop+flip", "resizedcrop+flip+randaugment+crop", "trivialaugment"])
def test_workers_and_resume_give_the_same_files_bit_for_bit(folder: Path, augment: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[union-attr]
    whole = list(folder_data(folder, augment=augment, mixup=0.2).train_batches(3))
    workers = list(folder_data(folder, augment=augment, mixup=0.2, workers=2).train_batches(3))
    rest = list(folder_data(folder, augment=augment, mixup=0.2, workers=1).train_batches(3, start=2))
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[union-attr]
    assert equal(whole, workers)
    assert equal(whole[2:], rest)
    assert before == after
    assert not equal(whole, list(folder_data(folder, augment=augment, mixup=0.2).train_batches(4)))
    assert not equal(whole, list(folder_data(folder, augment=augment, mixup=0.2, seed=1).train_batches(3)))


def test_a_limit_is_spread_over_the_classes(folder: Path) -> None:
    data = folder_data(folder, limit=3)
    assert [label for _, label in data.files.train] == [0, 1, 2]
    assert data.spec.train_examples == 3
    assert folder_data(folder, limit=99).spec.train_examples == 15


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named(folder: Path, workers: int) -> None:
    bad = folder / "train" / "bee" / "1.jpg"
    for data in (b"no image", bad.read_bytes()[:200], b""):
        bad.write_bytes(data)
        with pytest.raises(MprunError) as told:
            list(folder_data(folder, workers=workers).train_batches(0))
        assert str(told.value).startswith(f"{bad}: not a whole image (")
        assert "Traceback" not in str(told.value)


def test_hidden_files_are_no_images(folder: Path) -> None:
    before = folder_data(folder).files
    for place in ("train/ape", "train/bee", "val/ape"):
        (folder / place / "._0.jpg").write_bytes(b"what macOS leaves")
    assert folder_data(folder).files == before


@pytest.mark.parametrize("value", [0, 300, 40_000, 65_535])
def test_sixteen_bit_grey_keeps_its_brightness(folder: Path, value: int) -> None:
    for path in (folder / "val").rglob("*.*"):
        path.unlink()
    Image.fromarray(np.full((20, 20), value, dtype=np.uint16)).save(folder / "val" / "ape" / "grey.png")
    (batch,) = folder_data(folder).val_batches()
    pixel = (batch.inputs[0, 0] * 0.229 + 0.485) * 255
    assert pixel.numpy() == pytest.approx(np.full((16, 16), value // 256), abs=1e-3)


def test_an_image_of_floats_is_refused_by_name(folder: Path) -> None:
    path = folder / "val" / "ape" / "floats.tiff"
    Image.fromarray(np.full((20, 20), 0.5, dtype=np.float32)).save(path)
    with pytest.raises(MprunError, match=r"floats\.tiff: .*its pixels are floats"):
        list(folder_data(folder).val_batches())


def empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def test_folders_that_are_not_as_they_should_be_are_explained(folder: Path, tmp_path: Path) -> None:
    def told(root: Path | None = folder, **given: Any) -> str:
        with pytest.raises(ConfigError) as error:
            folder_data(root, **given)  # type: ignore[arg-type]
        return str(error.value)

    assert "needs dataset.root" in told(None)
    assert f"there is no folder {tmp_path / 'nowhere' / 'train'}" in told(tmp_path / "nowhere")
    assert "resizedcrop brings files to their size and must come first" in told(augment="flip+resizedcrop")
    assert "dataset.kwargs.image_size=0 is not" in told(kwargs={"image_size": 0})
    assert "dataset.kwargs.std=[0.5] must be three numbers" in told(kwargs={"std": [0.5]})
    assert "dataset.kwargs.root is filled in by the runner" in told(kwargs={"root": "x"})
    assert "dataset.task=regression does not fit imagefolder" in told(task=Task.regression)
    (folder / "val" / "cat").rename(folder / "val" / "dog")
    assert "differ in 2 classes: cat (only in train), dog (only in val)" in told()
    (folder / "val" / "dog").rename(folder / "val" / "cat")
    empty(folder / "train" / "bee")
    assert f"{folder / 'train' / 'bee'} has no image (1 of 3 classes have none)" in told()
    (folder / "train" / "ape" / "0.png").rename(folder / "train" / "bee" / "0.png")
    for name in ("ape", "bee", "cat"):
        empty(folder / "val" / name)
    assert f"{folder / 'val'} has no image in any of its 3 folders" in told()
    shutil.rmtree(folder / "val")
    assert f"there is no folder {folder / 'val'}" in told()
    (folder / "val").mkdir()
    empty(folder / "train")
    assert f"{folder / 'train'} has no folder" in told()
