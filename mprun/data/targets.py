"""Whether the targets of a batch mean something: labels within range, probabilities that sum to 1, of the kind of the task.

A label out of range is an ``IndexError`` of torch on the CPU and ends the whole process on a GPU, both without the sample
that it belongs to. So targets are looked at where they lie in the CPU's memory, before they are copied anywhere: that
takes some 20 microseconds a batch and never waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mprun.config import Task
from mprun.data.base import IGNORE
from mprun.errors import ConfigError

# How far a row of class probabilities may be from the sum 1: half precision and label smoothing by hand stay within it.
SUM_TOLERANCE = 0.01


def check_targets(targets: Tensor, ids: Tensor, *, task: Task, num_classes: int, where: str) -> None:
    """Refuse targets that the loss of ``task`` cannot mean.

    Args:
        targets: (B, ...), on the CPU.
        ids: (B,), which samples these are.
        task: what the targets mean.
        num_classes: labels are 0 to ``num_classes - 1``, or -100 for "ignored".
        where: the dataset and which of its sets, for the message.

    Raises:
        ConfigError: names a sample, its target and what is legal.
    """
    if targets.is_complex():
        raise ConfigError(
            f"{where}: targets are {_dtype(targets)}; a target is a number, a label or class probabilities"
        )
    if task is Task.regression:
        return
    if targets.is_floating_point():
        _check_probabilities(targets, ids, task=task, num_classes=num_classes, where=where)
    else:
        _check_labels(targets, ids, num_classes=num_classes, where=where)


def _check_labels(labels: Tensor, ids: Tensor, *, num_classes: int, where: str) -> None:
    if labels.dtype == torch.bool or not labels.numel():
        low, high = 0, int(labels.any())
    else:
        low, high = (int(v) for v in labels.aminmax())
    if low >= 0 and high < num_classes:
        return
    bad = (labels != IGNORE) & ((labels < 0) | (labels >= num_classes))
    if not bad.any():
        return
    rows = bad.reshape(len(ids), -1).any(1)
    raise ConfigError(
        f"{where}: label {int(labels[bad][0])} of sample {int(ids[rows][0])} is not legal: labels are 0 to {num_classes - 1} "
        f"({num_classes} classes), or {IGNORE} for a target to leave out"
    )


def _check_probabilities(targets: Tensor, ids: Tensor, *, task: Task, num_classes: int, where: str) -> None:
    first = f"the target of sample {int(ids[0])} is {_dtype(targets)} of shape {tuple(targets.shape[1:])}"
    if task is Task.language_model:
        raise ConfigError(f"{where}: {first}; a language model's targets are whole numbers, the symbols that follow")
    if targets.ndim < 2 or targets.shape[1] != num_classes:
        raise ConfigError(
            f"{where}: {first}; a classification takes labels (whole numbers, int64) or one probability for each of the "
            f"{num_classes} classes; for numbers set dataset.task=regression"
        )
    off = ((targets < 0).any(1) | ((targets.sum(1) - 1).abs() > SUM_TOLERANCE)).reshape(len(ids), -1).any(1)
    if off.any():
        row = int(off.nonzero()[0])
        raise ConfigError(
            f"{where}: the class probabilities of sample {int(ids[row])} are negative or do not sum to 1 "
            f"({_some(targets[row])}); several classes at once are no classification"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(values: Tensor) -> str:
    shown = ", ".join(f"{v:.3g}" for v in values.flatten()[:6].tolist())
    return shown if values.numel() <= 6 else f"{shown}, ..."
