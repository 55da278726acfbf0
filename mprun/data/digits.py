"""Handwritten digits: 1797 images of 8 x 8 pixels in 10 classes, shipped inside scikit-learn's wheel.

The split is the one of scikit-learn's own example, in file order: the first 898 images for training, the last 899 for
testing. Other people wrote the second half than the first, so this is harder than a random split (a ViT loses about one
point), and it has a published figure to compare with: an SVC reaches 0.969.

Pixels are counts from 0 to 16. They are normalised with the mean and standard deviation of the training half, so that
models may assume inputs of unit variance.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mprun.data.tensors import ImageSet, Split

TRAIN_EXAMPLES = 898
_MEAN, _STD = 4.9185, 6.0349  # of the training half; constants, so that a later change of the file cannot hide here


def digits() -> ImageSet:
    """Load the set.

    Returns:
        Images (898, 1, 8, 8) and (899, 1, 8, 8), float32, normalised; labels int64 in 0..9.
    """
    table = _read_table()
    pixels = torch.from_numpy(table[:, :64].astype(np.float32)).view(-1, 1, 8, 8)
    images = (pixels - _MEAN) / _STD
    labels = torch.from_numpy(table[:, 64].astype(np.int64))
    return ImageSet(
        train=Split(images[:TRAIN_EXAMPLES], labels[:TRAIN_EXAMPLES]),
        val=Split(images[TRAIN_EXAMPLES:], labels[TRAIN_EXAMPLES:]),
        num_classes=10,
        background=-_MEAN / _STD,
        sha256=hashlib.sha256(table.tobytes()).hexdigest(),
    )


def _read_table() -> NDArray[np.uint8]:
    """All rows as (1797, 65) uint8: 64 pixels and the label.

    Importing ``sklearn.datasets`` takes most of a second, for a text file of 57 kB; so the file is read where it lies,
    and scikit-learn is asked only if it is not there.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            rows = gzip.decompress(path.read_bytes()).decode().splitlines()
            return np.array([row.split(",") for row in rows], dtype=np.float64).astype(np.uint8)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.uint8)
