"""What surrounds a run: files written whole, ranks, random numbers, the device, and a record of it all in ``env.json``.

A result that cannot be traced to the code, the versions and the switches that made it is an anecdote. So a run writes
down what was *really* in force (TF32 flags as read back, not as asked for), and everything random can be captured and
put back, which is what makes a resumed run equal to the unbroken one bit for bit.

This module stays free of torch at import time: commands that do not train use it too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mprun import __version__
from mprun.config import Device
from mprun.errors import ConfigError
from mprun.training.host import cpu_model, describe_host, driver_version, git_state, read_lines, versions

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "wandb", "numpy")

# Keys that change where and under which name a result is written, or what is said about it, but not the numbers.
UNHASHED = (
    "command",
    "name",
    "resume",
    "trust",
    "tracking",
    "meta",
    "expect",
    "sweep",
    "probe",
    "postmortem",
    "compare",
    "diagnose",
    "search",
)

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


# --- files ---------------------------------------------------------------------------------------------------------


def json_ready(value: Any) -> Any:
    """``value`` as plain JSON: JSON knows no NaN and no infinity, so they become the words ``nan inf -inf``.

    Whether a loss was NaN or inf tells an input error from an overflow, so ``null`` would lose too much. Enums become
    their names, paths text, and scalars of numpy and torch plain numbers (a scalar on a GPU makes the host wait).
    """
    if isinstance(value, bool | int | str | None):
        return value if not isinstance(value, Enum) else value.name
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(json_ready(key)): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return json_ready(value.item()) if hasattr(value, "item") else str(value)


def from_json(value: Any) -> Any:
    """The inverse of :func:`json_ready` for numbers: the words ``nan inf -inf`` become floats again, at any depth."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def atomic_write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the whole new one, even after a crash."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed write does not say of which file
        raise


def atomic_write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; see :func:`json_ready` for what becomes of NaN and infinity."""
    atomic_write_text(path, json.dumps(json_ready(value), indent=2, allow_nan=False) + "\n")


def config_hash(config: Mapping[str, Any]) -> str:
    """12 hex digits that name the experiment: equal for configs that must give equal numbers.

    sha256 over canonical JSON (sorted keys, no spaces) of the plain config without the top-level keys ``UNHASHED``:
    they say where results go and what is said about them, not what is computed. The seed counts; so does ``device``.
    """
    counted = {key: value for key, value in config.items() if key not in UNHASHED}
    text = json.dumps(json_ready(counted), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- processes, devices --------------------------------------------------------------------------------------------


def _torchrun(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number; torchrun sets it, or unset it")
    return int(text)


def rank() -> int:
    """The number of this process among those of one run, as set by ``torchrun``; 0 when there is only one."""
    return _torchrun("RANK", 0)


def world_size() -> int:
    """How many processes share this run, as set by ``torchrun``; 1 by default."""
    return _torchrun("WORLD_SIZE", 1)


def resolve_device(device: Device) -> torch.device:
    """The torch device that ``device`` means on this machine; ``auto`` is the GPU if there is one.

    Raises:
        ConfigError: ``device=cuda`` where torch sees no GPU. It is never replaced by the CPU in silence.
    """
    import torch

    if device is Device.cpu or (device is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", _torchrun("LOCAL_RANK", 0))
    cause = "is a build without CUDA" if torch.version.cuda is None else "finds no GPU"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        cause += f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r})"
    raise ConfigError(f"device=cuda: torch {torch.__version__} {cause}; device=cpu or device=auto works here")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far, in bytes: by CUDA tensors (allocator peak), or by this process on the CPU.

    Linux's ``ru_maxrss`` begins with the size of the process that started this one, so its own high-water mark is read.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    for line in read_lines("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- random numbers ------------------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed python, numpy's global state, torch and every CUDA device."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng() -> dict[str, Any]:
    """The state of every global generator, as plain containers and tensors (loads with ``weights_only=True``).

    CUDA generators are included once CUDA is in use; asking earlier would start a context on a GPU the run may not use.
    """
    import numpy as np
    import torch

    cuda: Any = torch.cuda
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.tensor(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": cuda.get_rng_state_all() if cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what :func:`capture_rng` took.

    CUDA states go to the devices of the same index that exist here; a run that moves to a machine with other devices
    goes on, but its device-side random numbers cannot be the same.
    """
    import numpy as np
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    for index, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator.cpu(), index)


def step_rng(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators alone, from which a step's dropout draws: a microsecond, and nothing waits for the device.

    Python's and numpy's take forty times as long, and the modules that draw from them in their forward are few.
    """
    import torch

    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore_step_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what :func:`step_rng` took."""
    import torch

    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave python's and numpy's global generators as they were: some libraries draw from them while being imported.

    Rich is one. Without this, the second run of a sweep, which finds it imported already, would see other numbers.
    """
    before = random.getstate()
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(legacy)


# --- the record ----------------------------------------------------------------------------------------------------


def describe_environment(
    argv: Sequence[str],
    config: Mapping[str, Any],
    *,
    seed: int,
    device: torch.device,
    cpu_fp16: str | None = None,
    data_sha256: str | None = None,
    recipe: Mapping[str, str] | None = None,
    precision_file: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of ``env.json``. No environment variable is copied, so no secret can get in that way.

    Args:
        argv: the command line as typed.
        config: the resolved config as a plain dict.
        seed: the seed in force.
        device: where the run happens.
        cpu_fp16: which kernels compute FP16 on the CPU (``fast`` or ``native``), null where that plays no part.
        data_sha256: of the training data, where known.
        recipe: ``name`` and ``sha256`` of the recipe, if one was given.
        precision_file: path and ``sha256`` of the file that ``precision=`` named, if it was one.
    """
    import torch

    caller = git_state(Path.cwd())
    source = git_state(Path(__file__).parent, tracked=Path(__file__).name)
    same = source is not None and caller is not None and source["root"] == caller["root"]
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    return {
        "argv": list(argv),
        "cwd": str(Path.cwd()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": source or caller,
        "git_caller": None if same or source is None else caller,
        "versions": {"python": platform.python_version(), "mprun": __version__, **versions(PACKAGES)},
        "device": _describe_device(device),
        "host": {**describe_host(), "torch_threads": torch.get_num_threads()},
        "rank": rank(),
        "world_size": world_size(),
        "seed": seed,
        "determinism": {
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn_deterministic": cudnn.deterministic,
            "cudnn_benchmark": cudnn.benchmark,
        },
        "tf32": {"matmul": matmul.fp32_precision == "tf32", "cudnn": cudnn.conv.fp32_precision == "tf32"},
        "cpu_fp16": cpu_fp16,
        "config_hash": config_hash(config),
        "data_sha256": data_sha256,
        "recipe": dict(recipe) if recipe else None,
        "precision_file": dict(precision_file) if precision_file else None,
    }


def _describe_device(device: torch.device) -> dict[str, Any]:
    import torch

    if device.type != "cuda":
        return {"type": device.type, "name": cpu_model(), "driver": None, "cuda": None}
    backends: Any = torch.backends
    about = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "memory_bytes": about.total_memory,
        "count": torch.cuda.device_count(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
    }
