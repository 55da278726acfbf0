"""Whether a model's output and the targets of its batch belong together, told from shapes alone: no value is read.

``cross_entropy`` takes more than it seems: with the wrong axis in front it computes the loss of another problem, and fewer
outputs than classes are an error only in the batch where the missing class turns up (on a GPU the end of the process).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from mprun.config import Task
from mprun.data.base import Batch
from mprun.errors import ConfigError

_ADVICE = {
    Task.classification: "a classification needs outputs (B, C) for labels (B), or (B, C, ...) for labels (B, ...)",
    Task.language_model: "a language model needs outputs (B, T, V) for targets (B, T)",
    Task.regression: "a regression needs the same shape (or one more axis of size 1)",
}


def check_output(output: Tensor, targets: Tensor, task: Task, num_classes: int | None) -> None:
    """Refuse an output that does not fit the targets.

    Args:
        output: what the model returned.
        targets: of the batch, labels or class probabilities or numbers.
        task: what they mean.
        num_classes: classes of the dataset; None where nobody said.

    Raises:
        ConfigError: names both shapes and what the task needs.
    """
    out, wanted = tuple(output.shape), tuple(targets.shape)
    if task is Task.regression:
        fits = out in (wanted, (*wanted, 1)) or wanted == (*out, 1)
    elif task is Task.language_model:
        fits = len(out) >= 2 and out[:-1] == wanted
    elif targets.is_floating_point():
        fits = len(out) >= 2 and out == wanted
    else:
        fits = len(out) >= 2 and (out[0], *out[2:]) == wanted
    if not fits:
        raise ConfigError(f"the model's output has shape {out}, the targets {wanted}: {_ADVICE[task]}")
    if task is Task.regression or num_classes is None:
        return
    outputs = out[-1] if task is Task.language_model else out[1]
    if outputs < num_classes:
        raise ConfigError(
            f"the model has {outputs} outputs, and the dataset {num_classes} classes: every class needs an output of its own"
            + (" (a single logit is a regression)" if outputs == 1 else "")
        )


@contextmanager
def batch_norm_explained(window: Sequence[Batch]) -> Iterator[None]:
    """Inside, torch's error about a batch of one becomes one that names the sample and the cure.

    Raises:
        ConfigError: batch normalisation met a single value per channel.
    """
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        small = min(window, key=lambda batch: len(batch.ids))
        raise ConfigError(
            f"a batch of {len(small.ids)} (sample {int(small.ids[0])}) is too small for batch normalisation, which needs more "
            "than one value per channel in training: train.drop_last=true leaves a short last batch out, or use another "
            "train.batch_size"
        ) from error
