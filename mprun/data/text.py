"""Characters as tokens: the standard library's own documentation, or a text file of the user's.

The whole text is one row of small integers on the device. A training batch is B windows of ``context`` characters at
random places, and the targets are the same windows one character on; the places are drawn on the CPU from a stream that
is seeded with the batch's address (see :mod:`mprun.data.base`), so any batch of any epoch can be made alone. An epoch is
as many batches as it takes to see as many characters as there are; some are seen twice, some not at all.

Validation cuts its part of the text into windows that touch but do not overlap: every character but the first is a target
exactly once. What the last window lacks is filled up with targets that the loss ignores.

An *example* is a window. So ``dataset.limit=n`` keeps the first n * context + 1 characters of the training part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mprun.config import Config, Task
from mprun.data.base import IGNORE, Batch, DataSpec, subseed
from mprun.data.sampler import Sampler
from mprun.errors import ConfigError


@dataclass(frozen=True)
class TextSet:
    """What the builder of a text returns.

    Attributes:
        train: (N,), tokens of the training part, in the smallest integer type that holds them, on the CPU.
        val: (M,), tokens of the validation part.
        vocabulary: the characters, sorted; a token is a place in it.
        context: characters of a window.
        sha256: of the text in UTF-8, in hexadecimal.
    """

    train: Tensor
    val: Tensor
    vocabulary: str
    context: int
    sha256: str


def python_docs(*, context: int = 64, val_frac: float = 0.1) -> TextSet:
    """The Python language reference as the interpreter carries it for ``help()``: some 465 thousand characters.

    All topics of ``pydoc_data.topics``, joined in the order of their names. The text differs between versions of Python.

    Args:
        context: characters of a window.
        val_frac: share of the text, at its end, that is kept for validation.

    Raises:
        ConfigError: this Python was installed without the module, or an argument makes no sense.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            f"dataset=python_docs: this Python has no pydoc_data.topics ({error}); use dataset=text with a file of your own"
        ) from error
    return text_set("".join(topics[name] for name in sorted(topics)), context=context, val_frac=val_frac)


def text(
    *,
    root: str | None,
    context: int = 64,
    val_frac: float = 0.1,
    sha256: str | None = None,
    origin: str | None = None,
) -> TextSet:
    """A file of the user's, in UTF-8, as it is: line ends are not translated.

    Args:
        root: the file.
        context: characters of a window.
        val_frac: share of the text, at its end, that is kept for validation.
        sha256: what the file must hash to, in hexadecimal; any file without it.
        origin: where the file comes from, for the message that it is missing.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8, too short or another one than ``sha256`` says.
    """
    source = f"; it is {origin}" if origin else ""
    if root is None:
        raise ConfigError(f"dataset=text needs a UTF-8 file: dataset.root=FILE{source}")
    try:
        raw = Path(root).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"dataset.root={root}: no such file{source}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"dataset.root={root} is a folder: dataset=text reads a single file{source}") from error
    except OSError as error:
        raise ConfigError(f"dataset.root={root} cannot be read: {error.strerror}") from error
    found = hashlib.sha256(raw).hexdigest()
    if sha256 is not None and found != str(sha256).lower():
        raise ConfigError(f"dataset.root={root} is another file: its sha256 is {found}, expected {sha256}{source}")
    try:
        characters = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"dataset.root={root} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x} ({error.reason}); "
            "convert it, as with iconv -t utf-8"
        ) from error
    return text_set(characters, context=context, val_frac=val_frac, name=f"dataset.root={root}")


def text_set(characters: str, *, context: int, val_frac: float, name: str = "the text") -> TextSet:
    """Turn a text into tokens and split it. The vocabulary is that of both parts.

    Raises:
        ConfigError: ``context`` or ``val_frac`` make no sense, or a part is too short for them.
    """
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"dataset.kwargs.context={context!r} is not a whole number from 1 up")
    if not isinstance(val_frac, float) or not 0 < val_frac < 1:
        raise ConfigError(f"dataset.kwargs.val_frac={val_frac!r} is not a number between 0 and 1")
    codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
    count = len(codes) - round(len(codes) * val_frac)
    for part, length, least in (("training", count, context + 1), ("validation", len(codes) - count, 2)):
        if length < least:
            raise ConfigError(
                f"{name} is too short: of its {len(codes)} characters {length} are for {part}, and at least {least} are "
                f"needed (dataset.kwargs.context={context}, dataset.kwargs.val_frac={val_frac})"
            )
    # Sorting millions of characters to find a hundred different ones would take seconds.
    present = np.zeros(0x110000, dtype=bool)
    present[codes] = True
    used = np.flatnonzero(present)
    place = np.zeros(len(present), dtype=np.uint8 if len(used) <= 256 else np.int32)
    place[used] = np.arange(len(used))
    tokens = torch.from_numpy(place[codes])
    return TextSet(
        train=tokens[:count],
        val=tokens[count:],
        vocabulary="".join(map(chr, used)),
        context=context,
        sha256=hashlib.sha256(characters.encode("utf-8")).hexdigest(),
    )


def text_data(config: Config, made: TextSet, *, device: torch.device) -> TextData:
    """The batches that ``config`` wants of a text.

    Raises:
        ConfigError: ``dataset.task`` or ``dataset.augment`` do not fit a text.
    """
    wanted = config.dataset
    if wanted.task is not Task.language_model:
        raise ConfigError(f"dataset.task={wanted.task.value} does not fit {wanted.name}: it is for language_model")
    if wanted.augment not in (None, "none"):
        raise ConfigError(f"dataset.augment={wanted.augment}: a text has no augmentation; leave it null")
    examples = min((len(made.train) - 1) // made.context, wanted.limit or len(made.train))
    spec = DataSpec(
        name=wanted.name,
        task=wanted.task,
        input_shape=(made.context,),
        num_classes=len(made.vocabulary),
        train_examples=examples,
        val_examples=-(-(len(made.val) - 1) // made.context),
        sha256=made.sha256,
    )
    # Windows at random places fill every batch. Windows in order are split into batches as images are.
    drop_last = config.train.drop_last and not config.train.shuffle
    sampler = Sampler(examples, config.train.batch_size, seed=config.seed, shuffle=False, drop_last=drop_last)
    kept = made.train if wanted.limit is None else made.train[: examples * made.context + 1]
    return TextData(spec, kept.to(device), made.val.to(device), sampler, random=config.train.shuffle)


@dataclass(frozen=True)
class TextData:
    """The :class:`~mprun.data.base.Data` of a text that lies on the device.

    Attributes:
        spec: facts.
        train: (N,), tokens.
        val: (M,), tokens.
        sampler: splits windows in order into batches.
        random: windows at random places instead.
    """

    spec: DataSpec
    train: Tensor
    val: Tensor
    sampler: Sampler
    random: bool

    @property
    def context(self) -> int:
        """Characters of a window."""
        return self.spec.input_shape[0]

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of one training epoch."""
        if self.random:
            return max(1, self.spec.train_examples // self.sampler.batch_size)
        return self.sampler.batches

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number ``start`` on."""
        if not self.random:
            for ids in self.sampler.epoch(epoch, start):
                yield self._gather(self.train, ids * self.context)
            return
        places = len(self.train) - self.context  # the last window's last target is the last character
        for number in range(start, self.batches_per_epoch):
            generator = torch.Generator().manual_seed(subseed("text", self.sampler.seed, epoch, number))
            yield self._gather(self.train, torch.randint(places, (self.sampler.batch_size,), generator=generator))

    def val_batches(self) -> Iterator[Batch]:
        """The validation part in windows that follow each other, in batches of the training batch size."""
        filled = torch.cat((self.val, self.val[-1:].expand(self.context)))
        missing = self.spec.val_examples * self.context + 1 - len(self.val)  # what the last window lacks
        parts = torch.split(torch.arange(self.spec.val_examples), self.sampler.batch_size)
        for number, ids in enumerate(parts, start=1):
            batch = self._gather(filled, ids * self.context)
            if missing and number == len(parts):
                batch.targets[-1, -missing:] = IGNORE
            yield batch

    def _gather(self, tokens: Tensor, offsets: Tensor) -> Batch:
        """Windows that begin at ``offsets``, (B,) int64 on the CPU, which become the ids. Does not wait for the device."""
        windows = tokens.unfold(0, self.context + 1, 1)  # one for every place that a window can begin at, a view
        found = windows.index_select(0, offsets.to(tokens.device, non_blocking=True)).long()
        # Not contiguous(): of a single window that is a view of the inputs, and whoever writes to one would write to both.
        return Batch(found[:, :-1], found[:, 1:].clone(memory_format=torch.contiguous_format), offsets)
