"""Run folders with everything that a report can show: long curves, skips, post-mortems, samples of the probe, memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from made_runs import made_run, ok

from mprun.training.env import json_ready

MODULES = (
    "",
    "stem",
    *(f"blocks.{n}.{part}" for n in range(6) for part in ("norm1", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    "head",
)


def stats(values: Any) -> dict[str, Any]:
    """The JSON of ``Stats`` for float32 values, by numpy alone."""
    x = np.asarray(values, dtype=np.float32)
    finite = x[np.isfinite(x)].astype(np.float64)
    full = finite[finite != 0]
    exponents = np.frexp(np.abs(full))[1] - 1
    low = int(exponents.min()) if len(full) else 0
    return {
        "count": int(x.size), "zeros": int((finite == 0).sum()), "nonfinite": int(x.size - finite.size),
        "amax": float(np.abs(finite).max(initial=0.0)), "rms": float(np.sqrt((finite**2).mean())) if finite.size else 0.0, "low": low,
        "bins": np.bincount(exponents - low).tolist() if len(full) else [],
    }  # fmt: skip


def sample(
    attempt: int,
    *,
    form: str = "float16",
    scale: float | None = 1024.0,
    modules: tuple[str, ...] = MODULES,
    size: int = 256,
) -> dict[str, Any]:
    """One line of ``probe.jsonl``: gradients shrink with depth and time, one module's activations grow."""
    rng = np.random.default_rng(attempt)
    found = {}
    for index, name in enumerate(modules):
        forward = rng.normal(size=size) * 2.0 ** rng.normal(size=size)
        backward = rng.normal(size=size) * 2.0 ** (rng.normal(size=size) * 2 - 18 - 0.25 * index - attempt / 400)
        if name == "blocks.3.mlp.fc1":
            forward *= 60 * (1 + attempt / 40)
        if name == "blocks.3.mlp.fc2":
            backward *= 2.0**-12
        weight = rng.normal(size=size) * 0.05
        tensors = {
            "input": forward,
            "activation": forward,
            "activation_grad": np.float16(backward * (scale or 1)).astype(float) / (scale or 1),
            "input_grad": backward,
            "weight": weight,
            "weight_grad": backward,
            "weight_update": weight * 1e-3,
        }
        if name == "":
            tensors = {"activation": forward, "activation_grad": backward}
        found[name] = {key: stats(value) for key, value in tensors.items()}
    return {
        "step": attempt - 1,
        "attempt": attempt,
        "epoch": 0,
        "segment": 0,
        "format": form,
        "loss_scale": scale,
        "modules": found,
    }


def write_probe(folder: Path, samples: list[dict[str, Any]]) -> None:
    """``probe.jsonl``, and the records of it in ``metrics.jsonl``."""
    (folder / "probe.jsonl").write_text(
        "".join(json.dumps(json_ready(one)) + "\n" for one in samples), encoding="utf-8"
    )
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for one in samples:
            file.write(
                json.dumps({"kind": "probe", **{key: one[key] for key in ("step", "attempt", "epoch", "segment")}})
                + "\n"
            )


def records(steps: int, *, skips: int = 8, log_every: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """What a run of ``steps`` applied steps logs: skips at the start, two later ones, a post-mortem, a warning."""
    rng = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    attempt, scale = 0, 2.0 ** (16 + skips)
    for _ in range(skips):
        attempt += 1
        found.append(
            {
                "kind": "skip",
                "step": 0,
                "attempt": attempt,
                "reason": "overflow",
                "train/loss": 2.3,
                "precision/loss_scale": scale,
                "sample_ids": [3, 5],
            }
        )
        scale /= 2
    found.append({"kind": "event", "event": "postmortem", "step": 0, "attempt": 1, "verdict": "scale_search",
                  "message": "scale search: the same step is finite at scale 1; the scale comes down by itself"})  # fmt: skip
    for step in range(1, steps + 1):
        attempt += 1
        if step in (steps // 2, steps // 2 + 20) and skips:
            found.append(
                {
                    "kind": "skip",
                    "step": step,
                    "attempt": attempt,
                    "reason": "overflow",
                    "train/loss": 0.4,
                    "precision/loss_scale": scale,
                }
            )
            scale /= 2
            attempt += 1
            if step == steps // 2:
                found.append({"kind": "event", "event": "postmortem", "step": step, "attempt": attempt - 1, "verdict": "overflow_forward",
                              "message": "overflow in the forward pass: blocks.3.mlp.fc1 (Linear, addmm) reaches 9.2e+04, 1.4 times what FP16 holds (65504)"})  # fmt: skip
        loss = 2.3 * math.exp(-step / (steps / 4)) + 0.1 + 0.05 * rng.random()
        if step % log_every == 0:
            found.append({
                "kind": "train", "step": step, "attempt": attempt, "train/loss": loss, "train/top1": 1 - loss / 2.5, "train/grad_norm": loss * (1 + rng.random()),
                "train/lr": 1e-3 * math.cos(step / steps * math.pi / 2), "precision/loss_scale": scale, "precision/skipped_steps": skips,
                "perf/examples_per_s": 4000.0, "perf/step_ms": 16.0, "perf/peak_memory_bytes": 700 * 2**20,
            })  # fmt: skip
        if step % max(steps // 20, 1) == 0:
            found.append(
                {
                    "kind": "val",
                    "step": step,
                    "attempt": attempt,
                    "val/loss": loss + 0.05,
                    "val/top1": 0.97 - loss / 3,
                    "ema/loss": loss + 0.02,
                    "ema/top1": 0.975 - loss / 3,
                }
            )
    found.append(
        {"kind": "event", "event": "warning", "step": steps, "attempt": attempt, "message": "something worth a look"}
    )
    return found


def modules_json(modules: tuple[str, ...] = MODULES) -> list[dict[str, Any]]:
    """``modules.json``: everything in float16 but the norms."""
    return [
        {"module": name, "class": "LayerNorm" if "norm" in name else "Linear", "rule": "mode:autocast", "param_dtype": "float32",
         "compute_dtype": "float32" if "norm" in name else "float16", "output_dtype": "float32" if "norm" in name else "float16"}
        for name in modules
    ]  # fmt: skip


MEMORY = {
    "predicted": {"peak_bytes": 61 * 2**20, "full_by_category": {"parameters": 5 << 20, "gradients": 5 << 20, "optimizer": 10 << 20, "activations": 40 << 20}},
    "measured": {"peak_bytes": 63 * 2**20, "full_by_category": {"parameters": 5 << 20, "gradients": 5 << 20, "optimizer": 10 << 20, "activations": 42 << 20}},
}  # fmt: skip
ENV = {
    "argv": ["mprun", "precision=fp16_dynamic", "tracking.api_key=abcdefgh12345678"], "started": "2026-01-02T03:04:05+00:00",
    "git": {"commit": "0" * 40, "dirty": True, "diff": "secret diff"}, "versions": {"torch": "2.14.1", "python": "3.11.7"},
    "device": {"type": "cpu", "name": "a processor", "cuda": None}, "seed": 0,
}  # fmt: skip


def full_run(folder: Path, *, steps: int = 2000, every: int = 100, result: dict[str, Any] | None = None) -> Path:
    """A run folder with every part."""
    made_run(
        folder, "precision=fp16_dynamic", result=result or ok(0.123, 0.97, loss_scale=1024.0), records=records(steps)
    )
    write_probe(folder, [sample(attempt) for attempt in range(1, steps, every)])
    for name, content in (("modules.json", modules_json()), ("memory.json", MEMORY), ("env.json", ENV)):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
