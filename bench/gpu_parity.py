"""FP16 on a GPU against ``mprun``'s FP16 on the CPU, module by module: the same weights, the same batch, in dB.

    python bench/gpu_parity.py parity --json FILE [--device cuda|cpu] [--tiny] [--limit SECONDS]

Compared are the output of every module, the gradient that comes back to it, and the gradient of every parameter, by the
ratio of signal to difference, 10 log10(sum x^2 / sum (x - y)^2): one rounding to FP16 is about 73 dB, to BF16 about 55.
FP32 is compared as well, as a control. On the CPU alone torch's own half kernels stand in for the GPU's.

A ReLU is open or shut: where a rounding changes that, a whole gradient comes or goes. Of a ResNet with ReLUs, forward passes that
agree to 70 dB have gradients that agree to 30, on any two devices. So there is one with smooth activations, which is held to
the same limits as the others, and the one with ReLUs has limits of its own for what comes back.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from common import ROOT
from gpu_section import Asked, config_of, run_section
from torch import Tensor, nn

from mprun.config import Config
from mprun.data import build_data
from mprun.data.base import Batch
from mprun.models.build import build_model
from mprun.numerics.parity import energy_db
from mprun.precision.policy import map_tensors
from mprun.training.build import switches
from mprun.training.env import seed_everything
from mprun.training.schedule import build_schedule
from mprun.training.state import build_state
from mprun.training.step import accumulate

CPU = torch.device("cpu")
MODELS = {
    "vit": ["model=vit", "dataset=digits", "train.batch_size=64"],
    "resnet": ["model=resnet", "dataset=digits", "train.batch_size=64"],
    "resnet_gelu": ["model=timm", "model.name=test_resnet", "model.kwargs.act_layer=gelu", "model.kwargs.replace_stem_pool=true",
                    "dataset=synthetic", "dataset.kwargs.image_size=64", "dataset.kwargs.examples=64", "train.batch_size=64"],
    "gpt": ["model=gpt", "dataset=text", f"dataset.root={ROOT / 'README.md'}", "train.batch_size=12"],
}  # fmt: skip
# The least that the median over the tensors of a kind may have, and that any of them may have.
LEAST = {"fp16_dynamic": (50.0, 35.0), "bf16": (32.0, 17.0), "fp32": (90.0, 60.0)}
LEAST_RELU = {"fp16_dynamic": (20.0, 15.0), "bf16": (8.0, 5.0), "fp32": (60.0, 40.0)}
EXACT_DB = 300.0  # what equal tensors are given
WORST = 3


def parity(asked: Asked) -> dict[str, Any]:
    """Every model under every policy: median and worst of outputs, gradients and parameters' gradients."""
    found: dict[str, Any] = {"status": "ok", "rows": []}
    for name, words in list(MODELS.items())[: 1 if asked.tiny else None]:
        for policy in LEAST:
            for reduced in (True, False) if asked.on_gpu and policy != "fp32" else (True,):
                row = compared(asked, [*words, f"precision={policy}"], reduced=reduced)
                good = all(holds(kind, of_kind, name, policy) for kind, of_kind in row.items())
                found["rows"].append(
                    {"model": name, "policy": policy, "reduced_products": reduced, "ok": good, "kinds": row}
                )
                found["status"] = "ok" if good and found["status"] == "ok" else "failed"
                asked.answer({**found, "status": "timeout"})
    return found


def holds(kind: str, row: Mapping[str, Any], model: str, policy: str) -> bool:
    """Whether the tensors of a kind are as close as they have to be."""
    median, least = (LEAST_RELU if model == "resnet" and kind != "output" else LEAST)[policy]
    return bool(row["median_db"] >= median and row["least_db"] >= least)


def compared(asked: Asked, words: list[str], *, reduced: bool) -> dict[str, dict[str, Any]]:
    """Kind of tensor -> ``median_db``, ``least_db``, ``tensors`` and ``worst`` (name and dB).

    Args:
        asked: which device is held against the CPU.
        words: model, dataset and precision.
        reduced: torch's default: products on a GPU may add up parts of a long sum in half.
    """
    config = config_of(CPU, *words, "precision.loss_scale.init=1024", "numerics.cpu_fp16=fast")
    seed_everything(0)
    data = build_data(config, device=CPU)
    batch = next(iter(data.train_batches(0)))
    model = build_model(config.model, data.spec, trust=config.trust)
    here = numbers(config, copy.deepcopy(model), batch, CPU)
    if not asked.on_gpu:
        config.numerics.cpu_fp16 = type(config.numerics.cpu_fp16)["native"]
    with reduced_products(reduced):
        there = numbers(config, model, batch, asked.device)
    if here.keys() != there.keys():
        raise RuntimeError(f"other tensors on the two devices: {sorted(here.keys() ^ there.keys())[:5]}")
    kinds: dict[str, list[tuple[float, str]]] = {}
    for (kind, name), value in here.items():
        signal, noise = float(value.square().sum()), float((value - there[kind, name]).square().sum())
        if signal or noise:
            kinds.setdefault(kind, []).append((min(energy_db(signal, noise), EXACT_DB), name))
    return {
        kind: {
            "median_db": round(statistics.median(db for db, _ in rows), 1),
            "least_db": round(min(rows)[0], 1),
            "tensors": len(rows),
            "worst": [[name, round(db, 1)] for db, name in sorted(rows)[:WORST]],
        }
        for kind, rows in kinds.items()
    }


def numbers(config: Config, model: nn.Module, batch: Batch, device: torch.device) -> dict[tuple[str, str], Tensor]:
    """One forward and backward pass as a training step makes it: (kind, name) -> float64 on the CPU."""
    found: dict[tuple[str, str], Tensor] = {}

    def keep(kind: str, name: str, value: Tensor) -> None:
        key = (kind, name)
        while key in found:  # a module that is called several times
            key = (kind, key[1] + "'")
        found[key] = value.detach().double().cpu()

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                keep("output", name, output)
                if output.requires_grad:
                    output.register_hook(lambda grad: keep("gradient", name, grad))

        return hook

    with switches(config, device):
        state = build_state(config, model, build_schedule(config.schedule, 100), device)
        handles = [module.register_forward_hook(look(name or "model")) for name, module in state.model.named_modules()]
        moved = Batch(map_tensors(batch.inputs, lambda t: t.to(device)), batch.targets.to(device), batch.ids)
        accumulate(state, [moved])
        for handle in handles:
            handle.remove()
        for name, truth in state.weights:
            if truth.grad is not None:
                keep("parameter", name, truth.grad)
    return found


@contextlib.contextmanager
def reduced_products(on: bool) -> Iterator[None]:
    """Whether a GPU's half products may add up parts of a long sum in half, as torch lets them by default."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = on
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


if __name__ == "__main__":
    raise SystemExit(run_section({"parity": parity}, __doc__))
