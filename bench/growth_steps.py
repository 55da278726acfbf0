"""The axes of ``growth.py`` that are about training steps: size of the model, batch, number of modules."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from growth_fit import Series, timed
from torch import Tensor, nn

from mprun.compose import compose
from mprun.config import Config
from mprun.data.base import Batch
from mprun.models.mlp import mlp
from mprun.models.vit import vit
from mprun.numerics.probe import Probe
from mprun.numerics.sample import record
from mprun.training import checkpoint
from mprun.training.build import switches
from mprun.training.observe import observe
from mprun.training.schedule import build_schedule
from mprun.training.state import TrainState, build_state
from mprun.training.step import WindowSums, eval_step, gradient_norm, judge, optimizer_step, train_step

CPU = torch.device("cpu")
IMAGE, CLASSES, WIDTH = (1, 8, 8), 10, 8
Call = Callable[[], Any]


def config_of(*words: str, rules: Sequence[str] = ()) -> Config:
    """A configuration as the command line would have it, with FP32 rules."""
    config = compose(["tracking=disabled", "device=cpu", "train.ema.decay=0.999", *words]).config
    config.precision.fp32_modules = list(rules)
    return config


def state_of(config: Config, model: nn.Module) -> TrainState:
    """The state before the first step. Must run inside ``switches(config)``."""
    return build_state(config, model, build_schedule(config.schedule, 1000), CPU)


def window_of(batch: int, shape: Sequence[int]) -> list[Batch]:
    """One micro-batch of random inputs, equal at every call."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, *shape, generator=generator)
    return [Batch(inputs, torch.randint(CLASSES, (batch,), generator=generator), torch.arange(batch))]


def step(model: nn.Module, window: list[Batch], config: Config) -> Callable[[], float]:
    """Milliseconds of a training step."""
    with switches(config, CPU):
        state = state_of(config, model)
        train_step(state, window)

    def cost() -> float:
        with switches(config, CPU):
            return timed(lambda: train_step(state, window))

    return cost


# --- parameters and batch ------------------------------------------------------------------------------------------------


def parameters(*, small: bool = False) -> list[Series]:
    """A step, and its part after backward, against the number of parameters."""
    widths = [16, 32, 64] if small else [192, 256, 384, 512, 768, 1024, 1536, 2048]
    dims = [16, 32, 64] if small else [32, 64, 96, 128, 192, 256, 384]
    full, half = config_of("precision=fp32"), config_of("precision=fp16_dynamic")

    def of_mlp(width: int) -> tuple[float, Callable[[], float]]:
        model = mlp(input_shape=IMAGE, num_classes=CLASSES, hidden=(width, width, width))
        return numbers(model), step(model, window_of(64, IMAGE), full)

    def of_vit(dim: int) -> tuple[float, Callable[[], float]]:
        model = vit(input_shape=IMAGE, num_classes=CLASSES, embed_dim=dim, depth=2)
        return numbers(model), step(model, window_of(8, IMAGE), half)

    def after(width: int) -> tuple[float, Callable[[], float]]:
        model = mlp(input_shape=IMAGE, num_classes=CLASSES, hidden=(width, width, width))
        return numbers(model), after_backward(model, half)

    return [
        Series("MLP step, FP32", widths, of_mlp, panel="a step, wider and wider"),
        Series("ViT step, FP16", dims, of_vit, panel="a step, wider and wider"),
        Series("norm, clip, AdamW, EMA, scale", widths, after, panel="what follows backward"),
    ]


def numbers(model: nn.Module) -> float:
    """How many parameters."""
    return float(sum(p.numel() for p in model.parameters()))


def after_backward(model: nn.Module, config: Config) -> Callable[[], float]:
    """Milliseconds of what ``train_step`` does after backward, on gradients that stay."""
    with switches(config, CPU):
        state = state_of(config, model)
    grads: list[Tensor] = []
    for p in state.params:
        p.grad = torch.full_like(p, 1e-3)
        grads.append(p.grad)
    zero, one = torch.zeros(()), torch.ones((), dtype=torch.int64)
    no = torch.zeros((), dtype=torch.bool)
    sums = WindowSums(zero, one, one, no, no, one, 1)

    def phase() -> None:
        norm, bad = gradient_norm(state, grads)
        verdict = judge(state, sums, bad)
        optimizer_step(state, grads, norm=norm, lr=torch.full_like(norm, 1e-3).double(), verdict=verdict)
        assert state.ema is not None, "config_of has one"
        state.ema.update(state.named_truth(), verdict.applied)
        state.scale = state.loss_scale.adjust(
            state.scale, overflow=verdict.overflow, applied=verdict.applied, failed=verdict.failed
        )

    return lambda: timed(phase)


def batch(*, small: bool = False) -> list[Series]:
    """A step against the batch size."""
    sizes = [4, 8, 16] if small else [16, 32, 64, 128, 256, 512]
    dim, width = (16, 32) if small else (64, 256)
    full, half = config_of("precision=fp32"), config_of("precision=fp16_dynamic")
    pure = config_of("precision=fp16_master_dynamic")

    def of_mlp(size: int) -> tuple[float, Callable[[], float]]:
        return size, step(
            mlp(input_shape=IMAGE, num_classes=CLASSES, hidden=(width, width)), window_of(size, IMAGE), full
        )

    def of_vit(config: Config) -> Callable[[int], tuple[float, Callable[[], float]]]:
        def prepare(size: int) -> tuple[float, Callable[[], float]]:
            model = vit(input_shape=IMAGE, num_classes=CLASSES, embed_dim=dim, depth=2)
            return size, step(model, window_of(size, IMAGE), config)

        return prepare

    return [
        Series("MLP, FP32", sizes, of_mlp),
        Series("ViT, FP32", sizes, of_vit(full)),
        Series("ViT, FP16", sizes, of_vit(half)),
        Series("ViT, FP16 with masters", sizes, of_vit(pure)),
    ]


# --- modules -------------------------------------------------------------------------------------------------------------


def chain(blocks: int, *, norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    """Many small modules: ``blocks`` times a linear layer and a normalisation, then a head."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(WIDTH, WIDTH), norm(WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def modules(*, small: bool = False) -> list[Series]:
    """Steps and the start of a run against the number of modules."""
    sizes = [4, 8, 16] if small else [25, 50, 100, 200, 400, 800]
    steps = {
        "FP32": (config_of("precision=fp32"), nn.LayerNorm),
        "FP32, BatchNorm (buffers)": (config_of("precision=fp32"), nn.BatchNorm1d),
        "FP16": (config_of("precision=fp16_dynamic"), nn.LayerNorm),
        "FP16 with masters": (config_of("precision=fp16_master_dynamic"), nn.LayerNorm),
    }
    found = [
        Series(name, sizes, _chain_step(config, norm), panel="a step") for name, (config, norm) in steps.items()
    ] + [Series("FP16, a rule to 8 modules", sizes, _ruled_step, panel="a step")]
    parts = {
        "sampled step (probe)": lambda state, window: sampled(state, window, ()),
        "sampled, class:Linear": lambda state, window: sampled(state, window, ("class:Linear",)),
        "look at dtypes (modules.json)": lambda state, window: observe(state, window[0]),
        "keep and put back buffers": _undo,
        "evaluation of a batch": lambda state, window: eval_step(state, state.policy, window),
        "content of a checkpoint": lambda state, window: checkpoint.snapshot(state),
    }
    found += [Series(name, sizes, _part(act), panel="other things that are done") for name, act in parts.items()]
    rules: dict[str, Callable[[int], list[str]]] = {
        "build, no rule": lambda blocks: [],
        "build, 16 patterns": lambda blocks: [f"{index}*" for index in range(10)] + [f"re:.*{i}{i}" for i in range(6)],
        "build, a rule to 8 modules": _every_eighth,
    }
    return found + [
        Series(name, sizes, _build(made, small=small), panel="start of a run") for name, made in rules.items()
    ]


def _every_eighth(blocks: int) -> list[str]:
    return [str(index) for index in range(0, 2 * blocks, 8)]


def count(model: nn.Module) -> float:
    """How many modules."""
    return float(len(list(model.modules())))


def _chain_step(config: Config, norm: type[nn.Module]) -> Callable[[int], tuple[float, Callable[[], float]]]:
    def prepare(blocks: int) -> tuple[float, Callable[[], float]]:
        model = chain(blocks, norm=norm)
        return count(model), step(model, window_of(4, (WIDTH,)), config)

    return prepare


def _ruled_step(blocks: int) -> tuple[float, Callable[[], float]]:
    model = chain(blocks)
    config = config_of("precision=fp16_dynamic", rules=_every_eighth(blocks))
    return count(model), step(model, window_of(4, (WIDTH,)), config)


def _part(act: Callable[[TrainState, list[Batch]], Any]) -> Callable[[int], tuple[float, Callable[[], float]]]:
    """Milliseconds of something that is done with an FP16 run over a chain with buffers."""
    config = config_of("precision=fp16_dynamic")

    def prepare(blocks: int) -> tuple[float, Callable[[], float]]:
        window = window_of(4, (WIDTH,))
        with switches(config, CPU):
            state = state_of(config, chain(blocks, norm=nn.BatchNorm1d))
            act(state, window)

        def cost() -> float:
            with switches(config, CPU):
                return timed(lambda: act(state, window))

        return count(state.model), cost

    return prepare


def sampled(state: TrainState, window: list[Batch], rules: Sequence[str]) -> dict[str, Any]:
    """A step that the probe looks at, and its record."""
    probe = Probe(rules)
    with probe.watch(state):
        train_step(state, window, probe=probe)
    return record(probe.read())


def _undo(state: TrainState, window: list[Batch]) -> None:
    state.start_window().restore(list(state.model.modules()))


def _build(rules: Callable[[int], list[str]], *, small: bool) -> Callable[[int], tuple[float, Callable[[], float]]]:
    """Milliseconds from a model to a state that is ready to train."""

    def prepare(blocks: int) -> tuple[float, Callable[[], float]]:
        blank = chain(blocks)
        paths = [path for path, _ in blank.named_modules()]
        config = config_of("precision=fp16_master_dynamic")
        # A pattern that matches nothing is refused: those of the largest chain do not all match in the smallest.
        config.precision.fp32_modules = [rule for rule in rules(blocks) if _hits(rule, paths)]

        def cost() -> float:
            model = copy.deepcopy(blank)
            return timed(lambda: state_of(config, model), least_ms=0)

        return count(blank), cost

    return prepare


def _hits(rule: str, paths: Sequence[str]) -> bool:
    import fnmatch
    import re

    if rule.startswith("re:"):
        return any(re.fullmatch(rule[3:], path) for path in paths)
    return any(fnmatch.fnmatchcase(path, rule) for path in paths if path)


def resident_bytes() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * 4096)


def saved_bytes(content: Any) -> float:
    """How long a checkpoint's file is."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "last.pt")
        checkpoint.save(content, place)
        return float(place.stat().st_size)
