"""The sick cases and the healthy controls, as frozen values. What each claims is checked by ``tests/test_sick_models.py``.

A case is a run (``words``) and what is known about it by construction: which module is at fault, why, which instrument of
the lab is meant to say so, and what cures it.
"""

from __future__ import annotations

from dataclasses import dataclass

COMMON = (
    "trust=[tests]", "tracking=disabled", "device=cpu", "model=python", "dataset=python", "train.batch_size=16",
    "train.steps=40", "train.log_every=1", "optimizer.lr=1e-2", "precision.loss_scale.patience=40",
)  # fmt: skip
FP16, MASTER, BF16 = "fp16_dynamic", "fp16_master_dynamic", "bf16"

# How a fault shows:
#   stops    the run ends with an error: a non-finite loss, input or gradient, or too many skips in a row
#   refused  it does not begin
#   stalls   the loss ends far above FP32's
#   val      the training loss is FP32's, the validation loss is far above
#   stuck    a module's weights do not move
#   skips    at least ten steps are skipped
SYMPTOMS = ("stops", "refused", "stalls", "val", "stuck", "skips")
# Why. The first five are what a post-mortem can say of a step.
CAUSES = {
    "overflow_forward": "finite in FP32, inf or NaN in half, in the forward pass",
    "overflow_backward": "the same in the backward pass, at every loss scale",
    "scale": "the loss scale is too large, or kept too large; lower it and all is finite",
    "divergence": "NaN or inf in FP32 too, from the model or the learning rate",
    "bad_data": "NaN, inf or an absurd number in a sample",
    "underflow": "gradients become 0 in half at the scale in force",
    "silent_error": "a module's output is wrong in half, and finite",
    "lost_updates": "steps are lost in the rounding of half weights",
    "dtype": "half cannot be computed as the module is written, and torch says so",
}


@dataclass(frozen=True)
class Case:
    """One sick model or dataset.

    Attributes:
        name: unique.
        about: what somebody did, one line.
        model: attribute of ``tests.sick.models``, or ``module:attribute`` of ``tests.sick``; ``data`` of ``tests.sick.data``.
        words: overrides beyond ``COMMON``.
        precision: the option under which it shows.
        symptom: how (see ``SYMPTOMS``).
        culprits: paths of the modules at fault; empty where none is (data, scale, learning rate).
        cause: a key of ``CAUSES``.
        finds: instruments that should name it: ``postmortem diagnose search compare startup``.
        cure: overrides that make the run healthy, known by construction.
        sick_in_fp32: the fault is there in FP32 too.
        samples: ids of the samples at fault.
        accept: other causes that are as true.
        also: modules each of which, alone in FP32, cures it as well: under autocast what is computed from an FP32 tensor is FP32.
    """

    name: str
    about: str
    model: str
    data: str
    words: tuple[str, ...]
    precision: str
    symptom: str
    culprits: tuple[str, ...]
    cause: str
    finds: tuple[str, ...]
    cure: tuple[str, ...]
    sick_in_fp32: bool = False
    samples: tuple[int, ...] = ()
    accept: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def overrides(self, *more: str) -> list[str]:
        """The run as words of a command line, ``more`` last."""
        return run_words(self.model, self.data, f"precision={self.precision}", *self.words, *more)

    @property
    def fp32(self) -> list[str]:
        """The same run in FP32."""
        return run_words(self.model, self.data, "precision=fp32", *_no_precision(self.words))

    @property
    def should_be(self) -> list[str]:
        """What a cured run is held against: FP32, and where the fault is no matter of precision, FP32 with the cure."""
        return [*self.fp32, *_no_precision(self.cure)] if self.sick_in_fp32 else self.fp32


@dataclass(frozen=True)
class Control:
    """One healthy model: the lab has nothing to say about it but a loss scale's first skips."""

    name: str
    model: str
    data: str
    words: tuple[str, ...]
    precision: str

    def overrides(self, *more: str) -> list[str]:
        """The run as words of a command line, ``more`` last."""
        return run_words(self.model, self.data, f"precision={self.precision}", *self.words, *more)

    @property
    def fp32(self) -> list[str]:
        """The same run in FP32."""
        return run_words(self.model, self.data, "precision=fp32", *self.words)


def run_words(model: str, data: str, *words: str) -> list[str]:
    """A model and a dataset of this package, with what all runs have in common."""
    own = [f"dataset.name=tests.sick.data:{data}"]
    if not model.startswith("model="):
        own += [f"model.name=tests.sick.{model if ':' in model else f'models:{model}'}"]
    common = [w for w in COMMON if not (model.startswith("model=") and w == "model=python")]
    return [*common, *([model] if model.startswith("model=") else []), *own, *words]


def _no_precision(words: tuple[str, ...]) -> list[str]:
    return [word for word in words if not word.startswith("precision")]


def rule(*paths: str) -> tuple[str, ...]:
    """The cure that keeps these modules in FP32."""
    return (f"precision.fp32_modules=[{','.join(paths)}]",)


LM, REGRESSION = "dataset.task=language_model", "dataset.task=regression"
POSTMORTEM, DIAGNOSE, SEARCH, COMPARE, STARTUP = "postmortem", "diagnose", "search", "compare", "startup"
LOUD = (POSTMORTEM, DIAGNOSE, SEARCH)
