"""From samples to a batch, with errors that name the samples.

``default_collate`` says "stack expects each tensor to be equal size" and no more; and an error that is raised in a worker
process arrives as the text of a traceback. So a batch that cannot be made is returned as a :class:`Broken` and told where
it arrives. An error inside the user's own ``__getitem__`` is the user's to see: it keeps type and traceback, and gets a
note that says which sample was being read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

# What collating raises: other shapes, other kinds, other keys, numbers beyond int64.
_CANNOT = (RuntimeError, TypeError, KeyError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Broken:
    """A batch that could not be made, and why."""

    message: str


@dataclass(frozen=True)
class Collate:
    """Makes a batch ``(inputs, targets)`` of pairs ``(sample number, sample)``. Picklable, so that workers can have it.

    ``where`` names the dataset and which of its sets.
    """

    where: str

    def __call__(self, found: Sequence[tuple[int, Any]]) -> Any:
        """The batch, or a :class:`Broken`."""
        for number, sample in found:
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
                hint = "; a dict can be the input: return (inputs, target)" if isinstance(sample, Mapping) else ""
                return Broken(
                    f"{self.where}: sample {number} is a {type(sample).__name__}{size}, not a pair (input, target){hint}"
                )
        try:
            inputs, targets = default_collate([tuple(sample) for _, sample in found])
        except _CANNOT as error:
            return Broken(self._why(found, error))
        if not isinstance(targets, Tensor):
            number, sample = found[0]
            return Broken(
                f"{self.where}: the target of sample {number} is a {type(sample[1]).__name__}, not a number or a tensor"
            )
        return inputs, targets

    def _why(self, found: Sequence[tuple[int, Any]], error: Exception) -> str:
        first, kind = found[0][0], form(found[0][1])
        for number, sample in found[1:]:
            if form(sample) != kind:
                return (
                    f"{self.where}: samples {first} and {number} do not fit into one batch: {kind} and {form(sample)}; "
                    "crop or pad them to the same shapes, or use train.batch_size=1"
                )
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{self.where}: sample {first}, {kind}, cannot be made into a batch ({reason}); return tensors, arrays or numbers"


def form(value: Any) -> str:
    """What a sample is made of: types, and the shapes of tensors and arrays.

    >>> form((1.0, {"ids": [2, 3]}))
    "(float, {'ids': [int, int]})"
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {form(item)}" for key, item in list(value.items())[:8]) + "}"
    if isinstance(value, tuple | list):
        inner = ", ".join(form(item) for item in value[:8]) + (", ..." if len(value) > 8 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return type(value).__name__
