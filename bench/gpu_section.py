"""What the sections of ``bench/gpu.py`` share: how they are asked, how they answer, and configurations for a device."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mprun.compose import compose
from mprun.config import Config
from mprun.training.env import atomic_write_json

NEVER = 1_000_000
QUIET = [
    f"train.log_every={NEVER}",
    f"train.eval_every={NEVER}",
    f"train.checkpoint_every={NEVER}",
    "tracking=disabled",
]


@dataclass(frozen=True)
class Asked:
    """What a section is to do.

    Attributes:
        device: the GPU; the CPU only to see that the code runs.
        tiny: small models and few steps.
        deadline: by ``time.monotonic``.
        json: where the answer goes.
    """

    device: torch.device
    tiny: bool
    deadline: float
    json: Path

    @property
    def on_gpu(self) -> bool:
        """Whether this is a measurement."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def answer(self, found: Mapping[str, Any]) -> None:
        """Write what was found so far: a section that is ended keeps it."""
        atomic_write_json(self.json, found)


def run_section(sections: Mapping[str, Callable[[Asked], dict[str, Any]]], about: str | None) -> int:
    """The command line of a section: ``SECTION --device D --json FILE --limit SECONDS [--tiny]``. Returns the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=list(sections))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    asked = Asked(device, args.tiny, time.monotonic() + args.limit, args.json)
    try:
        found = sections[args.section](asked)
    except Exception as error:
        traceback.print_exc()
        found = {"status": "error", "error": f"{type(error).__name__}: {error}"}
    asked.answer(found)
    return 0


def config_of(device: torch.device, *words: str) -> Config:
    """The configuration that the command line would make of ``words`` on ``device``."""
    return compose([*words, f"device={device.type}"]).config
