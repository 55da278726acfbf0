"""Speed and memory of a training step on a GPU: ``mprun`` beside the same step by hand, eager and compiled.

    python bench/gpu_speed.py speed   --json FILE [--device cuda|cpu] [--tiny] [--limit SECONDS]
    python bench/gpu_speed.py predict --json FILE ...      what ``mprun estimate`` says of the same rows; needs no quiet GPU

A row is a model, a policy, and whether it is compiled. Both contestants (those of ``bench/step_loops.py``: mprun's own loop;
autocast, ``torch.amp.GradScaler``, ``clip_grad_norm_``, fused AdamW and EMA by hand) step through one batch that lies on the
device, in blocks of a few steps that take turns, the clock read when the device is done. A ratio is the median over pairs of
blocks. Memory is that of torch's allocator while mprun's side is alone, from before anything of it was made.

Rows come in the order of their importance. One for which the time is too short is left out, and said to be.
"""

from __future__ import annotations

import gc
import json
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from gpu_section import Asked, config_of, run_section
from step_cases import COMMON, Case, distance
from step_loops import Mprun, Plain

from mprun.data import build_data
from mprun.errors import MprunError
from mprun.models.build import build_model
from mprun.training.build import switches
from mprun.training.env import seed_everything
from mprun.training.footprint import predicting

MIB = 2**20


@dataclass(frozen=True)
class Model:
    """A model of timm with the batch and image size that it is measured at, and at ``--tiny``."""

    name: str
    batch: int
    size: int
    tiny: str
    words: tuple[str, ...] = ()


MODELS = {
    "vit": Model("vit_base_patch16_224", 128, 224, "test_vit"),
    "resnet": Model("resnet50", 256, 224, "test_resnet", ("model.channels_last=true",)),
}
TINY_BATCH, TINY_SIZE = 4, 64
ROWS = [
    *((model, policy, False) for policy in ("bf16", "fp16_dynamic", "fp32") for model in MODELS),
    ("vit", "bf16", True),
    ("resnet", "bf16", True),
    *((model, policy, False) for policy in ("fp16_master_dynamic", "tf32") for model in MODELS),
    ("vit", "fp16_dynamic", True),
    ("resnet", "fp16_dynamic", True),
    ("vit", "tf32", True),
    ("resnet", "tf32", True),
]
TINY_ROWS = [
    ("resnet", "fp32", False),
    ("vit", "fp16_dynamic", False),
    ("vit", "fp16_master_dynamic", False),
    ("resnet", "tf32", False),  # refused on a CPU
]
# What a row takes at least, in seconds: compiling is half a minute for either contestant.
EAGER_S, COMPILED_S = 12.0, 75.0
ROUNDS, BLOCK_S, WARM_UP = 7, 0.5, 3


def words_of(asked: Asked, model: str, policy: str, compiled: bool, batch: int) -> list[str]:
    """The command line of a row."""
    about = MODELS[model]
    size = TINY_SIZE if asked.tiny else about.size
    classes = 10 if asked.tiny else 1000
    return [
        "model=timm", f"model.name={about.tiny if asked.tiny else about.name}", *about.words, "dataset=synthetic",
        f"dataset.kwargs.image_size={size}", f"dataset.kwargs.classes={classes}", f"dataset.kwargs.examples={batch}",
        "dataset.kwargs.val_examples=1", f"train.batch_size={batch}", f"precision={policy}", f"model.compile={compiled}", *COMMON,
        *(["precision.loss_scale.init=1024"] if policy.startswith("fp16") else []),
        # Random labels teach nothing: a rate at which hundreds of steps on one batch stay finite.
        *([] if asked.tiny else ["optimizer.lr=0.0001"]),
    ]  # fmt: skip


def batch_of(asked: Asked, model: str) -> int:
    """Images of a step."""
    return TINY_BATCH if asked.tiny else MODELS[model].batch


def title(model: str, policy: str, compiled: bool) -> str:
    """A row's name."""
    return f"{model}/{policy}/{'compiled' if compiled else 'eager'}"


# --- predicted --------------------------------------------------------------------------------------------------------


def predict(asked: Asked) -> dict[str, Any]:
    """Row -> bytes at the peak, as ``mprun estimate`` predicts them. A compiled row is predicted as an eager one."""
    found: dict[str, Any] = {"status": "ok", "bytes": {}, "left_out": []}
    for model, policy, compiled in rows_of(asked):
        if compiled:
            continue
        batch, name = batch_of(asked, model), title(model, policy, compiled)
        if asked.left_s < 20 and not asked.tiny:
            found["left_out"].append(name)
            continue
        try:
            with predicting(
                config_of(asked.device, *words_of(asked, model, policy, compiled, batch)), asked.device
            ) as of:
                found["bytes"][name] = of(batch).peak_bytes
        except MprunError as error:
            found["left_out"].append(f"{name}: {error}")
        asked.answer(found)
    return found


def rows_of(asked: Asked) -> list[tuple[str, str, bool]]:
    """The rows to be measured, the most important first."""
    return TINY_ROWS if asked.tiny else ROWS


# --- measured ---------------------------------------------------------------------------------------------------------


def speed(asked: Asked) -> dict[str, Any]:
    """Every row for which there is time."""
    found: dict[str, Any] = {"status": "ok", "rows": [], "left_out": []}
    predicted: dict[str, int] = {}
    if (file := asked.json.with_name("predict.json")).exists():
        predicted = json.loads(file.read_text(encoding="utf-8")).get("bytes", {})
    for model, policy, compiled in rows_of(asked):
        name = title(model, policy, compiled)
        if asked.left_s < (COMPILED_S if compiled else EAGER_S) and not asked.tiny:
            found["left_out"].append(f"{name}: no time was left")
            continue
        try:
            row = measured(asked, model, policy, compiled)
        except MprunError as error:  # TF32 on a CPU
            found["left_out"].append(f"{name}: {error}")
            continue
        except Exception as error:
            found["left_out"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            found["status"] = "failed"
            continue
        finally:
            cleared(asked)
        row["predicted_bytes"] = predicted.get(title(model, policy, False))
        found["rows"].append({"row": name, "model": model, "policy": policy, "compiled": compiled, **row})
        asked.answer({**found, "status": "timeout"})
    return found


def measured(asked: Asked, model: str, policy: str, compiled: bool) -> dict[str, Any]:
    """One row, at half the batch wherever the memory is too small for it."""
    batch = batch_of(asked, model)
    while True:
        try:
            return at_batch(asked, words_of(asked, model, policy, compiled, batch), batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
        cleared(asked)


def at_batch(asked: Asked, words: list[str], batch: int) -> dict[str, Any]:
    """Times of both contestants, their ratio, and what either holds at the most."""
    config = config_of(asked.device, *words)
    base = allocated(asked)
    with switches(config, asked.device):
        case, origin_bytes = case_of(asked, config)
        base += origin_bytes
        ours = Mprun(case)
        peak = peak_of(asked, ours)
        alone = allocated(asked)
        by_hand = Plain(case, kernels="mprun")
        if config.model.compile:
            by_hand.model = torch.compile(by_hand.model)  # type: ignore[assignment]
        hand_peak = peak_of(asked, by_hand)
        count = 1 if asked.tiny else max(1, min(int(BLOCK_S / max(by_hand.run(2)[0] / 2, 1e-4)), 50))
        rounds = 2 if asked.tiny else ROUNDS
        # Each pair: by hand and mprun, each with the seconds of the clock and of the processor.
        pairs = [(by_hand.run(count), ours.run(count)) for _ in range(rounds)]
        ours.check_counters()
        apart = distance(by_hand, ours) if asked.tiny else None
    plain_ms, mprun_ms = (1e3 / count * statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
    return {
        "batch": batch,
        "mprun_ms": mprun_ms,
        "plain_ms": plain_ms,
        "ratio": statistics.median(mine[0] / theirs[0] for theirs, mine in pairs),
        "host_ms": [1e3 / count * statistics.median(pair[side][1] for pair in pairs) for side in (1, 0)],
        "images_per_s": batch / mprun_ms * 1e3,
        "rounds": rounds,
        "steps_a_block": count,
        "apart": apart,
        "peak_bytes": peak - base if asked.on_gpu else None,
        # Of the step by hand: all that came on top of what mprun's side holds between steps. The batch is not in it.
        "plain_peak_bytes": hand_peak - alone if asked.on_gpu else None,
    }


def case_of(asked: Asked, config: Any) -> tuple[Case, int]:
    """One batch on the device, and the model that both contestants start from; the bytes that this model takes."""
    seed_everything(config.seed)
    data = build_data(config, device=asked.device)
    window = [next(iter(data.train_batches(0)))]
    model = build_model(config.model, data.spec, trust=config.trust)
    before = allocated(asked)
    model = model.to(asked.device).train()
    if config.model.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    case = Case(config.model.name, config.precision.name, 1, config, asked.device, [window], model)
    return case, allocated(asked) - before


def peak_of(asked: Asked, loop: Mprun | Plain) -> int:
    """The most that torch's allocator held during steps of ``loop``, its first one (which may compile) apart."""
    loop.run(1)
    if asked.on_gpu:
        torch.cuda.reset_peak_memory_stats(asked.device)
    loop.run(1 if asked.tiny else WARM_UP)
    return torch.cuda.max_memory_allocated(asked.device) if asked.on_gpu else 0


def allocated(asked: Asked) -> int:
    """Bytes of the allocator that are in use."""
    return torch.cuda.memory_allocated(asked.device) if asked.on_gpu else 0


def cleared(asked: Asked) -> None:
    """Give back what the last row has left."""
    torch._dynamo.reset()
    gc.collect()
    if asked.on_gpu:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(run_section({"speed": speed, "predict": predict}, __doc__))
