"""Datasets of the sick models: a few dozen samples, each learnable in some dozen steps, each made ill by one argument.

A run names one as ``dataset.name=tests.sick.data:vectors`` with ``trust=[tests]``. All are the same on every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.case_code import Table

Sets = tuple[Table, Table]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(
    n: int = 64,
    dim: int = 8,
    classes: int = 4,
    factor: float = 1.0,
    offset: float = 0.0,
    spread: float = 0.5,
    nan_row: int | None = None,
    huge_row: int | None = None,
    huge: float = 1e30,
    constant: int | None = None,
    zero_row: int | None = None,
    wrong_label: int | None = None,
) -> Sets:
    """Points around ``classes`` corners in ``dim`` numbers: ``offset + factor * (corner + spread * noise)``.

    Args:
        nan_row: a sample with one NaN; ``huge_row`` one with a number of ``huge``; ``zero_row`` one of zeros.
        constant: a feature that is the same in every sample.
        wrong_label: a sample whose label is no class.
    """
    generator = _generator(n + dim)
    corners = torch.randn(classes, dim, generator=generator)
    labels = torch.arange(n) % classes
    x = offset + factor * (corners[labels] + spread * torch.randn(n, dim, generator=generator))
    clean = x.clone(), labels.clone()
    if constant is not None:
        x[:, constant] = clean[0][:, constant] = 3.0
    if nan_row is not None:
        x[nan_row, 2] = float("nan")
    if huge_row is not None:
        x[huge_row, 2] = huge
    if zero_row is not None:
        x[zero_row] = 0.0
    if wrong_label is not None:
        labels[wrong_label] = classes
    return Table(x, labels, num_classes=classes), Table(clean[0][:32], clean[1][:32])


def images(n: int = 48, side: int = 8, classes: int = 4, factor: float = 1.0) -> Sets:
    """Grey images (1, side, side): one pattern a class, and noise."""
    generator = _generator(n)
    patterns = torch.randn(classes, 1, side, side, generator=generator)
    labels = torch.arange(n) % classes
    x = factor * (patterns[labels] + 0.5 * torch.randn(n, 1, side, side, generator=generator))
    return Table(x, labels, num_classes=classes), Table(x[:32], labels[:32])


def tokens(n: int = 64, length: int = 16, vocab: int = 16, empty_row: int | None = None) -> Sets:
    """Sequences that count upwards by a step of their own, modulo ``vocab``: input tokens 0 to T-1, target tokens 1 to T.

    ``empty_row``: a sample of padding alone, which is token ``vocab - 1`` and never counted to.
    """
    generator = _generator(n)
    start = torch.randint(vocab - 1, (n, 1), generator=generator)
    stride = torch.randint(1, 4, (n, 1), generator=generator)
    text = (start + stride * torch.arange(length + 1)) % (vocab - 1)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    clean = inputs.clone()
    if empty_row is not None:
        inputs[empty_row] = vocab - 1
    return Table(inputs, targets, num_classes=vocab), Table(clean[:32], targets[:32])


def sentences(n: int = 64, length: int = 12, vocab: int = 16, classes: int = 4, empty_row: int | None = None) -> Sets:
    """Sequences of tokens whose class is the most frequent of the first ``classes`` tokens; the last few are padding (0).

    ``empty_row``: a sample of padding alone.
    """
    generator = _generator(n + vocab)
    labels = torch.arange(n) % classes
    x = torch.randint(classes + 1, vocab, (n, length), generator=generator)
    loud = torch.rand(n, length, generator=generator) < 0.6
    x = torch.where(loud, 1 + labels[:, None], x)
    padding = torch.randint(0, length // 3, (n, 1), generator=generator)
    x[torch.arange(length) >= length - padding] = 0
    clean = x.clone()
    if empty_row is not None:
        x[empty_row] = 0
    return Table(x, labels, num_classes=classes), Table(clean[:32], labels[:32])


def long_sequences(n: int = 32, length: int = 1024, dim: int = 4, classes: int = 4, level: float = 1.0) -> Sets:
    """Sequences (length, dim) around ``level``, in which one feature, the class, is higher than the others."""
    generator = _generator(length)
    labels = torch.arange(n) % classes
    means = level * (1.0 + torch.eye(classes, dim)[labels])
    x = means[:, None, :] + 0.2 * level * torch.randn(n, length, dim, generator=generator)
    return Table(x, labels, num_classes=classes), Table(x[:16], labels[:16])


def places(n: int = 32, length: int = 512) -> Sets:
    """Where in a long sequence the marker stands: the class is whether its position is even or odd, past position 256."""
    generator = _generator(length)
    position = 256 + torch.randperm(length - 256, generator=generator)[:n]
    x = torch.zeros(n, length)
    x[torch.arange(n), position] = 1.0
    return Table(x, position % 2, num_classes=2), Table(x, position % 2)


def numbers(
    n: int = 64,
    dim: int = 8,
    outputs: int = 1,
    level: float = 0.0,
    factor: float = 1.0,
    nan_target: int | None = None,
    huge_target: int | None = None,
) -> Sets:
    """A regression: ``level + factor * (linear in the inputs)``; ``*_target``: a sample whose target is NaN or 1e25."""
    generator = _generator(n + outputs)
    x = torch.randn(n, dim, generator=generator)
    y = level + factor * (x @ torch.randn(dim, outputs, generator=generator)) / dim**0.5
    clean = y.clone()
    if nan_target is not None:
        y[nan_target] = float("nan")
    if huge_target is not None:
        y[huge_target] = 1e25
    return Table(x, y), Table(x[:32], clean[:32])


def two_scales(n: int = 64, dim: int = 8, large: float = 1e3, small: float = 1e-9) -> Sets:
    """A regression with two targets of sizes that lie decades apart."""
    generator = _generator(n)
    x = torch.randn(n, dim, generator=generator)
    y = (x @ torch.randn(dim, 2, generator=generator)) * torch.tensor([large, small])
    return Table(x, y), Table(x[:32], y[:32])


def reconstruction(n: int = 64, dim: int = 16) -> Sets:
    """Points near a plane of 4 dimensions; the target is the input."""
    generator = _generator(n)
    x: Tensor = torch.randn(n, 4, generator=generator) @ torch.randn(4, dim, generator=generator) / 2
    return Table(x, x.clone()), Table(x[:32], x[:32].clone())
