"""``mprun env``: this machine, its devices, which FP16 kernels the CPU would use, and the versions. Imports no torch.

What is printed comes from the system and from package metadata; a run records what was really in force in ``env.json``.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence

from mprun import __version__
from mprun.errors import ConfigError
from mprun.training.host import cpu_model, driver_version, read_lines, versions

PACKAGES = ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "wandb", "numpy", "rich", "scikit-learn")
# Processor flags under which torch multiplies FP16 natively; without them mprun's own kernels are the fast ones.
HALF_FLAGS = {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"}
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def run(words: Sequence[str]) -> int:
    """Print one line a fact.

    Raises:
        ConfigError: a word was given; the command takes none.
    """
    if words:
        raise ConfigError(f"env takes no arguments, not {words[0]!r}")
    flags = {
        flag
        for line in read_lines("/proc/cpuinfo")
        if line.lower().startswith(("flags", "features"))
        for flag in line.split()
    }
    native = sorted(flags & HALF_FLAGS)
    rows = [
        ("mprun", __version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("cpu", f"{cpu_model()}, {os.cpu_count()} cores"),
        (
            "cpu float16",
            f"native arithmetic ({', '.join(native)})"
            if native
            else "no native arithmetic: numerics.cpu_fp16=auto means fast",
        ),
        ("cpu bfloat16", ", ".join(sorted(flags & BF16_FLAGS)) or "no native arithmetic"),
        *_gpus(),
        *((name, version or "not installed") for name, version in versions(PACKAGES).items()),
    ]
    for name, text in rows:
        print(f"{name:<14}{text}")
    return 0


def _gpus() -> list[tuple[str, str]]:
    """One row a GPU, as the driver's own tool lists them; a single row where there is none."""
    if driver_version() is None:
        return [("gpu", "none: device=auto means cpu")]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [("gpu", f"driver {driver_version()}, which lists no device")]
    return [(f"gpu {number}", line.strip()) for number, line in enumerate(listed)] or [("gpu", "none")]
