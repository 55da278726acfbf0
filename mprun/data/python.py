"""A user's own dataset: any callable that returns ``(train, val)``, map-style sets of ``(input, target)``.

The hard part is randomness. Users augment in ``__getitem__`` with ``random``, ``numpy.random`` or ``torch``, through
global generators; which numbers a sample gets would then depend on the worker that loads it, on the samples loaded
before it, and on where a run was resumed. So a sample, like a batch, gets its own stream: before each ``__getitem__``
the three global generators are seeded with a hash of (seed, epoch, sample index). Then 0 workers, 2 workers and a
resume in the middle of an epoch give the same samples, bit for bit. With 0 workers, where sample and model share a
process, the generators are put back afterwards, so that loading does not disturb dropout.

What this cannot reach is a generator that the dataset keeps for itself (``numpy.random.default_rng()`` made in
``__init__``): its numbers do depend on history. Draw from the global ones, or make one inside ``__getitem__``.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mprun.config import Config, Task
from mprun.data.base import Batch, DataSpec, subseed
from mprun.data.collate import Broken, Collate
from mprun.data.sampler import Sampler
from mprun.data.targets import check_targets
from mprun.data.workers import alive
from mprun.errors import ConfigError
from mprun.signatures import import_target

# More outputs than this are a label that means something else, such as an id or a hash.
MOST_CLASSES = 10**7

SampleAddress = tuple[str, int, int]  # (stream, epoch, sample index)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Put the CPU generators of ``random``, ``numpy`` and ``torch`` back to where they were on entry."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_cpu(seed: int) -> None:
    """Seed the three global CPU generators; CUDA's, which belong to the model, are left alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class SeededSamples(Dataset[Any]):
    """Samples of a user's set, each loaded under a seed of its own. Picklable, so that workers can have it."""

    def __init__(self, samples: Any, seed: int, where: str) -> None:
        self.samples = samples
        self.seed = seed
        self.where = where

    def __getitems__(self, addresses: Sequence[SampleAddress]) -> list[tuple[int, Any]]:
        """Load a batch; the loader prefers this over ``__getitem__``, and one save and restore serves all of it.

        Returns:
            Pairs of sample number and sample.
        """
        found = []
        with own_randomness():
            for stream, epoch, index in addresses:
                seed_cpu(subseed(stream, self.seed, epoch, index))
                try:
                    found.append((index, self.samples[index]))
                except Exception as error:
                    error.add_note(f"{self.where}: while sample {index} was read (epoch {epoch})")
                    raise
        return found


@dataclass(frozen=True)
class PythonData:
    """The :class:`~mprun.data.base.Data` of a user's own sets."""

    spec: DataSpec
    train: SeededSamples
    val: SeededSamples
    sampler: Sampler
    workers: int
    device: torch.device

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one training epoch."""
        return self.sampler.batches

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on."""
        return self._load(self.train, "sample", epoch, self.sampler.epoch(epoch, start))

    def val_batches(self) -> Iterator[Batch]:
        """The validation set in order; what is random in it is the same every time."""
        ids = torch.split(torch.arange(self.spec.val_examples), self.sampler.batch_size)
        return self._load(self.val, "val sample", 0, list(ids))

    def _load(self, samples: SeededSamples, stream: str, epoch: int, batches: list[Tensor]) -> Iterator[Batch]:
        if not batches:
            return
        loader: DataLoader[Any] = DataLoader(
            samples,
            # One batch after the other: the addresses of a million samples at once would take half a second.
            batch_sampler=([(stream, epoch, index) for index in ids.tolist()] for ids in batches),
            num_workers=self.workers,
            collate_fn=Collate(samples.where),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # without it the loader draws from the global generator
        )
        for ids, made in zip(batches, alive(loader), strict=True):
            inputs, targets = whole(made)
            check_targets(targets, ids, task=self.spec.task, num_classes=self.spec.num_classes, where=samples.where)
            yield Batch(move(inputs, self.device), targets.to(self.device, non_blocking=True), ids)


def whole(made: Any) -> tuple[Any, Tensor]:
    """Inputs and targets of a batch.

    Raises:
        ConfigError: it could not be made.
    """
    if isinstance(made, Broken):
        raise ConfigError(made.message)
    inputs, targets = made
    return inputs, targets


def move(value: Any, device: torch.device) -> Any:
    """Copy every tensor nested in tuples, lists and dicts to ``device``; anything else is passed on."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    return value


def build_python_data(config: Config, *, device: torch.device) -> PythonData:
    """Call the user's function and look at one sample of what it returns.

    Raises:
        ConfigError: the function's package is not trusted, it does not take ``dataset.kwargs``, or what it returns is
            not a pair of map-style sets of ``(input, target)``.
    """
    wanted = config.dataset
    if wanted.augment not in (None, "none"):
        raise ConfigError(f"dataset.augment={wanted.augment!r}: a python dataset augments in its own __getitem__")
    make = import_target(wanted.name, trust=config.trust, key="dataset.name")
    if not callable(make):
        raise ConfigError(
            f"dataset.name={wanted.name} is a {type(make).__name__}, not a function that returns (train, val)"
        )
    try:
        inspect.signature(make).bind(**wanted.kwargs)
    except TypeError as error:  # an error inside the user's function keeps its traceback
        raise ConfigError(f"dataset.kwargs={wanted.kwargs} do not fit {wanted.name}: {error}") from error
    with own_randomness():
        seed_cpu(subseed("dataset"))  # a random split belongs to the dataset: the same under every run's seed
        made = make(**wanted.kwargs)
    train, val = _check_sets(wanted.name, made)
    examples = min(len(train), wanted.limit or len(train))
    sampler = Sampler.of(config.train, examples=examples, seed=config.seed)
    samples = SeededSamples(train, config.seed, f"dataset.name={wanted.name}, training set")
    val_samples = SeededSamples(val, config.seed, f"dataset.name={wanted.name}, validation set")
    inputs, targets = _first_sample(samples, "sample")
    spec = DataSpec(
        name=wanted.name,
        task=wanted.task,
        input_shape=_shape(wanted.name, inputs),
        num_classes=_outputs(wanted.name, wanted.task, train, targets),
        train_examples=examples,
        val_examples=len(val),
        sha256=getattr(train, "sha256", None),
        note=_channels_note(_shape(wanted.name, inputs)),
    )
    # Of both sets one sample is looked at now, so that most mistakes are told before anything has begun.
    val_inputs, val_targets = _first_sample(val_samples, "val sample")
    if (train_kind := _kind(inputs)) != (val_kind := _kind(val_inputs)):
        raise ConfigError(f"{val_samples.where}: an input is {val_kind}, and in the training set {train_kind}")
    for kept, first in ((samples, targets), (val_samples, val_targets)):
        if first.ndim != targets.ndim:
            raise ConfigError(
                f"{kept.where}: a target has shape {tuple(first.shape[1:])}, and in the training set {tuple(targets.shape[1:])}"
            )
        zero = torch.zeros(1, dtype=torch.int64)
        check_targets(first, zero, task=wanted.task, num_classes=spec.num_classes, where=kept.where)
    return PythonData(spec, samples, val_samples, sampler, wanted.workers, device)


def _check_sets(name: str, made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ConfigError(f"dataset.name={name} returned {type(made).__name__}, not a pair (train, val)")
    for which, samples in zip(("training", "validation"), made, strict=True):
        mapped = hasattr(samples, "__getitem__") and not isinstance(samples, IterableDataset)
        if not mapped or not isinstance(samples, Sized):
            raise ConfigError(
                f"dataset.name={name}: the {which} set, a {type(samples).__name__}, has no len() or no [i]"
            )
        try:
            length = len(samples)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"dataset.name={name}: the len() of the {which} set fails: {error}") from error
        if length == 0:
            raise ConfigError(f"dataset.name={name}: the {which} set is empty")
    return made[0], made[1]


def _first_sample(samples: SeededSamples, stream: str) -> tuple[Any, Tensor]:
    """The first sample as a batch of one; its errors are told here and not from a worker process."""
    return whole(Collate(samples.where)(samples.__getitems__([(stream, 0, 0)])))


def _kind(inputs: Any) -> str:
    """What the inputs of two sets must have in common: which tensors, their dtypes and dimensions; sizes may differ."""
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} of {inputs.ndim - 1} dimensions"
    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{key!r}: {_kind(item)}" for key, item in inputs.items()) + "}"
    if isinstance(inputs, list | tuple):
        return f"[{', '.join(map(_kind, inputs))}]"
    return type(inputs).__name__


def _channels_note(shape: tuple[int, ...]) -> str | None:
    """A doubt about images as they come from a file: a convolution would take their rows for channels, without a word."""
    if len(shape) != 3 or shape[2] not in (1, 3, 4) or shape[0] in (1, 3, 4):
        return None
    return (
        f"inputs have shape {shape}: as images they are read channels first, {shape[0]} channels of {shape[1]} x {shape[2]} "
        "pixels; if the channels come last, return image.permute(2, 0, 1)"
    )


def _shape(name: str, inputs: Any) -> tuple[int, ...]:
    """The shape of the first tensor in a nested batch, without the batch dimension."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:])
    items = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    for item in items:
        if not isinstance(item, str):
            return _shape(name, item)
    raise ConfigError(f"dataset.name={name}: the input holds no tensor")


def _outputs(name: str, task: Task, train: Any, targets: Tensor) -> int:
    """How many outputs a model needs: said by the training set, or read off targets that it keeps in memory."""
    if task is Task.regression:
        return max(targets[0].numel(), 1)
    layer: Any = train
    while layer is not None:
        for attribute in ("num_classes", "vocab_size"):
            if getattr(layer, attribute, None) is not None:
                return _count(f"dataset.name={name}: the training set's {attribute}", getattr(layer, attribute))
        if isinstance(getattr(layer, "classes", None), Sized):
            return _count(f"dataset.name={name}: the number of the training set's classes", len(layer.classes))
        if (top := _top_label(layer)) >= 0:
            return _count(f"dataset.name={name}: the highest label of the training set + 1", top + 1)
        layer = getattr(layer, "dataset", None)  # torch.utils.data.Subset and its like
    raise ConfigError(f"dataset.name={name}: how many classes? Give the training set an attribute num_classes")


def _count(what: str, value: Any) -> int:
    """A number of classes, of any integer type."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if not 1 <= count <= MOST_CLASSES:
        raise ConfigError(f"{what} is {value!r}: a number of classes is a whole number from 1 to {MOST_CLASSES}")
    return count


def _top_label(samples: Any) -> int:
    """The highest label of a set that keeps its labels in ``targets`` or as the last of its ``tensors``; -1 otherwise."""
    kept = getattr(samples, "targets", None)
    kept = samples.tensors[-1] if kept is None and hasattr(samples, "tensors") else kept
    try:
        labels = torch.as_tensor(kept)
    except (TypeError, ValueError, RuntimeError):  # absent, or names instead of numbers
        return -1
    if labels.is_floating_point() or labels.is_complex() or not labels.numel():
        return -1
    return int(labels.max())
