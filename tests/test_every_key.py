"""No key of the schema is without effect: for each one a small run in which setting it changes what is to be seen.

A key that is added to ``mprun/config.py`` and not here fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.cli import main
from mprun.config import Config, DatasetSource, ModelSource, Task
from mprun.config_check import OPEN
from mprun.errors import MprunError
from mprun.training.build import build, device_of, switches
from mprun.training.loop import fit
from mprun.training.observe import observe
from mprun.training.run import Run, best_of
from mprun.training.state import TrainState
from tests.case_code import latest
from tests.conftest import FP16, make_config

pytestmark = pytest.mark.usefixtures("one_thread")


def leaves(node: Any, path: str = "") -> list[str]:
    """Every dotted key of the schema that holds a value."""
    found = []
    for field in fields(node):
        key, value = f"{path}{field.name}", getattr(node, field.name)
        found += leaves(value, f"{key}.") if is_dataclass(value) and key not in OPEN else [key]
    return found


# --- what there is to see --------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A run that ended, or the words in which it was refused."""

    error: str = ""
    state: TrainState | None = None
    records: list[dict[str, Any]] | None = None
    modules: Any = None
    kernels: str = ""
    flags: Any = None
    files: list[str] | None = None

    def weights(self) -> Any:
        assert self.state is not None, self.error
        return {name: value.double().sum().item() for name, value in self.state.model.state_dict().items()}

    def layout(self) -> Any:
        assert self.state is not None, self.error
        state, rate = self.state, self.state.optimizer.param_groups[0]["lr"]
        return (
            [
                (type(module).__mro__, [p.stride() for p in module.parameters(recurse=False)])
                for module in state.model.modules()
            ],
            state.forward is state.model,
            isinstance(rate, Tensor),
        )

    def of(self, kind: str, *names: str) -> Any:
        assert self.records is not None, self.error
        return [[record.get(name) for name in ("step", *names)] for record in self.records if record["kind"] == kind]


class Listing:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def progress(self, applied: int, attempts: int) -> None:
        pass


RUN = {
    "device": "cpu", "name": "x", "trust": ["tests"], "model.name": "mlp", "model.kwargs": {"hidden": [8, 8]}, "dataset.name": "digits",
    "dataset.limit": 90, "train.batch_size": 20, "train.epochs": 2, "train.log_every": 1, "optimizer.lr": 0.01, "optimizer.name": "adamw",
}  # fmt: skip
IMAGES = {"model.name": "resnet", "model.kwargs": {"widths": [4, 4]}, "train.steps": 1}
HALF = {**FP16, "precision.loss_scale.init": 1024.0}
# One weight, and targets that overflow until the scale has come down (see tests/case_code.py).
SPIKES = {
    **HALF, "model.name": "tests.case_code:toy", "model.source": ModelSource.python, "model.kwargs": {}, "dataset.source": DatasetSource.python,
    "dataset.name": "tests.case_code:targets", "dataset.kwargs": {"values": [0.1, 1000.0, 0.1, 0.1, 1000.0, 0.1]}, "dataset.limit": None,
    "dataset.task": Task.regression, "train.batch_size": 1, "train.shuffle": False, "train.epochs": 1, "optimizer.name": "sgd",
    "optimizer.lr": 0.0,
}  # fmt: skip
STREAM = {
    **SPIKES, "precision.mode": "full", "precision.compute_dtype": "float32", "precision.loss_scale.kind": "none",
    "precision.loss_scale.init": 65536.0, "dataset.name": "tests.test_every_key:by_worker", "dataset.kwargs": {}, "optimizer.lr": 0.1,
}  # fmt: skip


def by_worker() -> Any:
    """One example, whose input says whether a worker process has read it."""

    class Samples(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            return torch.ones(1) * (2 if torch.utils.data.get_worker_info() else 1), torch.ones(1)

    return Samples([0]), Samples([0])


def see(folder: Path, keys: dict[str, Any]) -> Seen:
    """Run the configuration in this process; what is refused is an observation too."""
    seen = Seen()
    sink = Listing()
    try:
        config = make_config(**{**RUN, **keys})
        device = device_of(config)
        with switches(config, device) as seen.kernels:
            seen.flags = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
            seen.state, data, plan = build(config, device)
            seen.modules = observe(seen.state, next(iter(data.train_batches(0))))
            run = Run(config, seen.state, data, plan, [sink], folder, best_of(config))  # type: ignore[list-item]
            fit(run)
    except MprunError as error:
        seen.error = str(error)
    seen.records = sink.records
    seen.files = sorted(path.name for path in folder.rglob("*.pt"))
    return seen


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Callable[[dict[str, Any]], Seen]:
    """The run without the key. Half of the keys start from the same one, which is made once."""
    made: dict[str, Seen] = {}

    def run(keys: dict[str, Any]) -> Seen:
        if (name := repr(keys)) not in made:
            made[name] = see(tmp_path_factory.mktemp("without"), keys)
        return made[name]

    return run


def refusal(seen: Seen) -> str:
    """In which words a run was refused."""
    return seen.error


LR = ("train", "train/lr")
SCALE = ("train", "precision/loss_scale")
# key: (keys of both runs, the value in the second run, what must differ between them).
Effect = tuple[dict[str, Any], Any, Callable[[Seen], Any]]
EFFECTS: dict[str, Effect] = {
    "seed": ({}, 1, Seen.weights),
    "device": ({}, "cuda", lambda seen: seen.error or str(seen.state and seen.state.device)),
    "trust": ({**SPIKES}, [], refusal),
    "deterministic": ({}, True, lambda seen: seen.flags),
    "numerics.cpu_fp16": (HALF, "native", lambda seen: seen.kernels),
    "model.name": ({"model.kwargs": {}}, "resnet", Seen.layout),
    "model.source": ({}, "timm", refusal),
    "model.kwargs": ({}, {"hidden": [9]}, Seen.layout),
    "model.activation_checkpointing": (IMAGES, True, Seen.layout),
    "model.compile": ({"train.steps": 1, "train.epochs": 1}, True, Seen.layout),
    "model.channels_last": (IMAGES, True, Seen.layout),
    "model.init": ({}, "/nowhere.pt", refusal),
    "dataset.name": ({}, "digit", refusal),
    "dataset.source": ({}, "python", refusal),
    "dataset.root": ({}, "/nowhere", refusal),
    "dataset.task": ({}, "regression", refusal),
    "dataset.kwargs": (SPIKES, {"values": [0.2]}, lambda seen: seen.of("train", "train/loss")),
    "dataset.workers": (STREAM, 1, Seen.weights),
    "dataset.augment": ({}, "shift", Seen.weights),
    "dataset.mixup": ({}, 0.5, Seen.weights),
    "dataset.cutmix": ({}, 0.5, Seen.weights),
    "dataset.limit": ({}, 40, Seen.weights),
    "precision.name": ({}, "mine", lambda seen: seen.state and seen.state.policy.name),
    "precision.mode": ({**HALF, "precision.param_dtype": "float16"}, "master", refusal),
    "precision.param_dtype": (HALF, "float16", refusal),
    "precision.compute_dtype": ({"precision.mode": "autocast", "precision.compute_dtype": "float16"}, "bfloat16", lambda seen: seen.modules),
    "precision.output_dtype": ({}, "float16", Seen.weights),
    "precision.fp32_matmul": ({}, "tf32", refusal),
    "precision.eval_dtype": ({}, "bfloat16", lambda seen: seen.of("val", "val/loss")),
    "precision.fp32_modules": (HALF, ["class:Linear"], lambda seen: seen.modules),
    "precision.on_nonfinite_loss": (
        {**STREAM, "dataset.name": "tests.case_code:targets", "dataset.kwargs": {"values": [0.1, 0.2], "nan_at": 0}}, "skip",
        refusal,
    ),
    "precision.loss_scale.kind": (SPIKES, "static", lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.init": (SPIKES, 2048.0, lambda seen: seen.of("skip", "precision/loss_scale")),
    "precision.loss_scale.growth_factor": ({**SPIKES, "precision.loss_scale.growth_interval": 1}, 3.0, lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.backoff_factor": (SPIKES, 0.25, lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.growth_interval": (SPIKES, 1, lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.min": (SPIKES, 1024.0, lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.max": ({**SPIKES, "precision.loss_scale.growth_interval": 1}, 1024.0, lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.hysteresis": (SPIKES, 2, lambda seen: seen.of(*SCALE)),
    "precision.loss_scale.on_overflow": (SPIKES, "retry", lambda seen: seen.of("skip", "precision/loss_scale")),
    "precision.loss_scale.patience": (SPIKES, 1, refusal),
    "optimizer.name": ({}, "sgd", Seen.weights),
    "optimizer.lr": ({}, 0.02, Seen.weights),
    "optimizer.weight_decay": ({}, 0.5, Seen.weights),
    "optimizer.momentum": ({"optimizer.name": "sgd"}, 0.9, Seen.weights),
    "optimizer.betas": ({}, [0.5, 0.9], Seen.weights),
    "optimizer.eps": ({}, 1e-2, Seen.weights),
    "optimizer.fused": ({}, False, Seen.layout),
    "optimizer.kwargs": ({}, {"amsgrad": True}, Seen.weights),
    "schedule.name": ({}, "cosine", lambda seen: seen.of(*LR)),
    "schedule.warmup_steps": ({}, 4, lambda seen: seen.of(*LR)),
    "schedule.warmup_frac": ({}, 0.5, lambda seen: seen.of(*LR)),
    "schedule.final": ({"schedule.name": "linear"}, 0.5, lambda seen: seen.of(*LR)),
    "schedule.decay_frac": ({"schedule.name": "wsd"}, 0.6, lambda seen: seen.of(*LR)),
    "schedule.milestones": ({"schedule.name": "step"}, [0.1], lambda seen: seen.of(*LR)),
    "schedule.gamma": ({"schedule.name": "step"}, 0.5, lambda seen: seen.of(*LR)),
    "train.epochs": ({}, 1, lambda seen: seen.of("train")),
    "train.steps": ({}, 3, lambda seen: seen.of("train")),
    "train.batch_size": ({}, 30, lambda seen: seen.of("train")),
    "train.accumulate": ({}, 2, lambda seen: seen.of("train")),
    "train.clip_norm": ({"optimizer.name": "sgd"}, 1e-3, Seen.weights),
    "train.label_smoothing": ({}, 0.1, Seen.weights),
    "train.loss_weight": ({"optimizer.name": "sgd"}, 0.5, Seen.weights),
    "train.shuffle": ({}, False, Seen.weights),
    "train.drop_last": ({}, True, lambda seen: seen.of("train")),
    "train.ema.decay": ({}, 0.9, lambda seen: seen.of("val", "ema/loss")),
    "train.ema.warmup": ({"train.ema.decay": 0.9}, False, lambda seen: seen.of("val", "ema/loss")),
    "train.eval_every": ({}, 2, lambda seen: seen.of("val")),
    "train.log_every": ({}, 3, lambda seen: seen.of("train")),
    "train.checkpoint_every": ({}, 2, lambda seen: seen.files),
    "train.keep": ({"train.checkpoint_every": 2}, 3, lambda seen: seen.files),
    "train.early_stop.metric": ({"train.epochs": 3, "train.early_stop.patience": 1, "optimizer.lr": 0.0}, "val/loss", lambda seen: seen.of("val")),
    "train.early_stop.patience": (
        {"train.epochs": 5, "train.early_stop.metric": "val/loss", "train.early_stop.patience": 1, "optimizer.lr": 0.0}, 2,
        lambda seen: seen.of("val"),
    ),
    "probe.every": ({}, 2, lambda seen: seen.of("probe")),
    "probe.modules": ({}, ["1"], lambda seen: [sorted(r["modules"]) for r in seen.records or [] if r["kind"] == "probe"]),
    "postmortem.skips": (SPIKES, 0, lambda seen: seen.of("event", "event")),
    "postmortem.save_batch": (SPIKES, True, lambda seen: seen.files),
    "expect": ({}, [{"metric": "val/top2"}], refusal),
    "meta": ({}, {"seeds": "many"}, refusal),
}  # fmt: skip

# Keys that act outside of a configuration's run: the words of a command line, and what must be found where it has run.
QUICK = ["model=mlp", "model.kwargs.hidden=[4]", "precision=fp32", "train.steps=1", "device=cpu"]
# One run for all that is found in W&B's file: none of these words brings another's mark into it.
TRACKED = [
    "tracking.mode=offline", "tracking.project=p-r-o", "tracking.entity=e-n-t", "tracking.group=g-r-o", "tracking.tags=[t-a-g]",
    "tracking.log_checkpoint=last", "tracking.log_report=true",
]  # fmt: skip
OUTSIDE: dict[str, tuple[list[str], Callable[[int, str], bool]]] = {
    "command": (["command=compare"], lambda code, said: code == 2 and "the command is the first word" in said),
    "resume": (["resume=nowhere.pt"], lambda code, said: code == 2 and "nowhere.pt" in said),
    "name": (["name=my name", "tracking=disabled"], lambda code, _: code == 0 and "my-name" in str(latest())),
    # In a single run, where they can do nothing, they are refused; what they do is a matter of the tests of sweeps.
    **{
        f"sweep.{key}": (
            [f"sweep.{key}={value}"],
            lambda code, said, key=key, value=value: code == 2 and f"sweep.{key}={value} is about a sweep" in said,
        )
        for key, value in {"name": "x", "jobs": "2", "on_error": "stop", "new": "true"}.items()
    },
    # What they do is a matter of tests/test_compare.py.
    **{
        f"compare.{key}": (
            [f"compare.{key}={value}"],
            lambda code, said, key=key: code == 2 and f"compare.{key}=" in said and "is about a comparison" in said,
        )
        for key, value in {
            "precisions": "[fp32]",
            "baseline": "bf16",
            "seeds": "2",
            "metric": "val/loss",
            "margin": "0.1",
            "spread": "1",
            "confidence": "0.9",
            "gradient_steps": "[0]",
            "strict": "true",
        }.items()
    },
    # What they do is a matter of tests/test_search.py.
    **{
        f"search.{key}": (
            [f"search.{key}=7"],
            lambda code, said, key=key: code == 2 and f"search.{key}=7 is about a search" in said,
        )
        for key in ("budget", "tolerance", "steps")
    },
    # What they do is a matter of tests/test_diagnose.py.
    **{
        f"diagnose.{key}": (
            [f"diagnose.{key}=3"],
            lambda code, said, key=key: code == 2 and f"diagnose.{key}=3 is about a diagnosis" in said,
        )
        for key in ("steps", "every")
    },
    "tracking.mode": (["tracking.mode=disabled"], lambda code, _: code == 0 and wandb_record() == b""),
    "tracking.project": (TRACKED, lambda code, _: b"p-r-o" in wandb_record()),
    "tracking.entity": (TRACKED, lambda code, _: b"e-n-t" in wandb_record()),
    "tracking.group": (TRACKED, lambda code, _: b"g-r-o" in wandb_record()),
    **{
        f"sweep.{key}": (
            [f"sweep.{key}={value}"],
            lambda code, said: code == 2 and "add -m" in said,
        )  # tests/test_sweeps.py
        for key, value in (("name", "x"), ("jobs", 2), ("on_error", "stop"), ("new", "true"))
    },
    "tracking.tags": (TRACKED, lambda code, _: b"t-a-g" in wandb_record()),
    "tracking.log_checkpoint": (TRACKED, lambda code, _: b"last-step-1.pt" in wandb_record()),
    "tracking.report": (["tracking.report=true"], lambda code, _: (latest() / "report.html").is_file()),
    "tracking.log_report": (TRACKED, lambda code, _: b"report.html" in wandb_record()),
}


def wandb_record() -> bytes:
    """The first kilobytes of W&B's own file in the newest run: the record of the run, before the configuration."""
    return b"".join(path.read_bytes() for path in latest().rglob("run-*.wandb"))


def test_the_tables_hold_every_key_of_the_schema_and_no_other():
    assert sorted([*EFFECTS, *OUTSIDE]) == sorted(leaves(Config()))


# Compiling takes half a minute.
@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.slow] if key == "model.compile" else []) for key in EFFECTS]
)
def test_a_key_changes_what_a_run_does_or_is_refused(key, tmp_path, before):
    both, value, look = EFFECTS[key]
    without = before(both)
    given = see(tmp_path / "given", {**both, key: value})
    assert without.error == "" or key in ("precision.mode", "precision.on_nonfinite_loss"), without.error
    assert look(without) != look(given), given.error


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Callable[[list[str]], tuple[Path, int, str]]:
    """Where these words have run, their exit status and what was said; the same words run once."""
    made: dict[tuple[str, ...], tuple[Path, int, str]] = {}

    def run(words: list[str]) -> tuple[Path, int, str]:
        if tuple(words) not in made:
            folder = tmp_path_factory.mktemp("outside")
            with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as said:
                patch.chdir(folder)
                made[tuple(words)] = folder, main([*QUICK, *words]), said.getvalue()
        return made[tuple(words)]

    return run


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_key_of_the_command_line_acts(key, monkeypatch, ran):
    words, found = OUTSIDE[key]
    folder, code, said = ran(words)
    monkeypatch.chdir(folder)
    assert found(code, said)


def test_a_refusal_names_the_key(tmp_path):
    """Where the effect of a key in the table is a refusal, the refusal is of that key."""
    # Of two the run itself is stopped; with the mode of the table it runs, and without it is refused.
    others = {"precision.on_nonfinite_loss", "precision.loss_scale.patience", "precision.mode"}
    for key in sorted({key for key, (_, _, look) in EFFECTS.items() if look is refusal} - others):
        both, value, _ = EFFECTS[key]
        said = see(tmp_path, {**both, key: value}).error
        # A source is as wrong as the name that it does not have; half parameters are a matter of the mode.
        named = {
            "dataset.source": "dataset.name",
            "model.source": "of timm",
            "precision.mode": "dtype",
            "precision.param_dtype": "mode master",
        }
        assert named.get(key, key) in said, (key, said)
