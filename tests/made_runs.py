"""Run folders made by hand, as a run leaves them: what the commands that read them are tested on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.training.env import json_ready

_configs: dict[tuple[str, ...], dict[str, Any]] = {}


def made_run(
    folder: Path,
    *words: str,
    result: dict[str, Any] | str | None = None,
    records: list[dict[str, Any]] | None = None,
    **keys: Any,
) -> Path:
    """A run folder: the configuration of ``words`` with dotted keys set, a result, records of ``metrics.jsonl``."""
    if words not in _configs:
        _configs[words] = to_plain(compose(list(words)).config)
    config = OmegaConf.create(_configs[words])
    for key, value in keys.items():
        OmegaConf.update(config, key, value)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config), encoding="utf-8")
    if result is not None:
        text = result if isinstance(result, str) else json.dumps(json_ready(result))
        (folder / "result.json").write_text(text, encoding="utf-8")
    if records is not None:
        lines = [json.dumps(json_ready({"segment": 0, "epoch": 0, **record})) + "\n" for record in records]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def ok(loss: float, top1: float | None = None, **more: Any) -> dict[str, Any]:
    """The result of a run that ended well."""
    final = {"train/loss": loss, "val/loss": loss} | ({} if top1 is None else {"val/top1": top1})
    metric, value = ("val/loss", loss) if top1 is None else ("val/top1", top1)
    return {
        "status": "ok", "error": None, "run_dir": "/elsewhere", "name": "x", "precision": "fp32", "seed": 0,
        "steps_applied": 100, "steps_skipped": 0, "counters": {"attempts": 100}, "final": final,
        "best": {"metric": metric, "value": value, "step": 90, "epoch": 3},
        "loss_scale": None, "wall_s": 4.0, "train_s": 2.5, "examples_per_s": 12345.6, "peak_memory": 700 * 2**20,
        "wandb": None, **more,
    }  # fmt: skip


def failed(error: str, status: str = "diverged") -> dict[str, Any]:
    """The result of a run that failed early."""
    return {"status": status, "error": error, "steps_applied": 2, "steps_skipped": 9, "final": {}, "best": None}


def many(folder: Path, count: int) -> Path:
    """A sweep of ``count`` runs, quickly: one composed configuration, its text changed for each."""
    first = made_run(folder / "0", "model=mlp", result=ok(0.5, 0.9), seed=0, **{"optimizer.lr": 1e-3})
    text = (first / "config.yaml").read_text()
    assert text.count("\nseed: 0\n") == text.count("\n  lr: 0.001\n") == 1
    for index in range(1, count):
        path = folder / str(index)
        path.mkdir()
        changed = text.replace("\nseed: 0\n", f"\nseed: {index % 4}\n")
        changed = changed.replace("\n  lr: 0.001\n", f"\n  lr: {1e-3 * (1 + index // 4)}\n")
        (path / "config.yaml").write_text(changed, encoding="utf-8")
        (path / "result.json").write_text(json.dumps(ok(0.5 + index / 1000, 0.9 - index / 1000)), encoding="utf-8")
    return folder
