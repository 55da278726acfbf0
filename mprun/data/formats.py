"""Readers of two formats in which small image sets are published: MNIST's IDX files and CIFAR's Python batches.

They check the format and not a checksum, so that a subset or a set of one's own in the same format can be read too; a
download is checked by its checksum before it gets here. Every error names the file and what is wrong with it.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mprun.errors import ConfigError

Bytes = NDArray[np.uint8]


def read_idx(path: Path, *, dims: int) -> Bytes:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, each size as a big-endian 32-bit
    number, and the values.

    Args:
        path: the file.
        dims: how many dimensions it must have.

    Raises:
        ConfigError: it is not such a file, or is not whole.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch it anew") from error
    if not data:
        raise ConfigError(f"{path}: is empty; fetch it anew")
    if data[:4] != bytes([0, 0, 8, dims]):
        raise ConfigError(
            f"{path}: begins with {data[:4].hex(' ')}, not with 00 00 08 {dims:02x}: no IDX file of {dims} dimensions"
        )
    header = data[4 : 4 + 4 * dims]
    sizes = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
    values = np.frombuffer(data[4 + 4 * dims :], dtype=np.uint8)
    if len(header) < 4 * dims or values.size != math.prod(sizes):
        raise ConfigError(f"{path}: its header says {sizes} values, it holds {values.size}; fetch it anew")
    return values.reshape(sizes).copy()


def read_batches(place: Path, names: list[str], *, label_key: str) -> tuple[Bytes, list[int]]:
    """Read CIFAR's Python batches from a folder or from the archive as it is published.

    Args:
        place: the folder with the batches, or a ``.tar.gz`` that holds it.
        names: the batches, in order.
        label_key: ``labels`` or ``fine_labels``.

    Returns:
        Pixels (N, 3, 32, 32), uint8, and labels.

    Raises:
        ConfigError: a batch is missing or is none.
    """
    try:
        files = _members(place, names) if place.is_file() else {name: (place / name).read_bytes() for name in names}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        reason = str(error).splitlines()[0].rstrip(":")  # tarfile lists every kind of archive that it is not
        raise ConfigError(f"{place}: cannot be read ({reason}); fetch it anew") from error
    pixels: list[Bytes] = []
    labels: list[int] = []
    for name in names:
        where = f"{place}: {name}"
        if name not in files:
            raise ConfigError(f"{where} is not in the archive")
        batch = _unpickle(files[name], where)
        data, found = batch.get("data"), batch.get(label_key)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
            raise ConfigError(f"{where} has no 'data' of 3072 bytes an image")
        if not isinstance(found, list) or len(found) != len(data):
            raise ConfigError(f"{where} has no {label_key!r} for its {len(data)} images")
        pixels.append(data)
        labels.extend(int(label) for label in found)
    return np.concatenate(pixels).reshape(-1, 3, 32, 32), labels


def _members(archive: Path, names: list[str]) -> dict[str, bytes]:
    """The files of these names in a tar archive, whatever folder they are in."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() and Path(member.name).name in names else None
            if stream is not None:
                found[Path(member.name).name] = stream.read()
    return found


class _ArraysOnly(pickle.Unpickler):
    """An unpickler for arrays and plain containers: a file that was not checked by its sum must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The three names that a pickled array is made of, and no others."""
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an array")


def _unpickle(data: bytes, where: str) -> Mapping[str, Any]:
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigError(f"{where} is not a batch of arrays ({error})") from error
    if not isinstance(batch, dict):
        raise ConfigError(f"{where} holds a {type(batch).__name__}, not a dict")
    return batch
