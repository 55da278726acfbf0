"""The typed schema: every key that a user can set, its type, its default.

Hydra merges the YAML of ``conf/`` and the command line into these dataclasses (they are mutable because OmegaConf
fills them), so a wrong type or an unknown key is refused while composing. What types cannot say (ranges, rules
between keys, keys added with ``+``) is checked by ``mprun.config_check.to_config``, once, at the border. After that
the values are only read.

Enum members are the legal words on the command line. Keys that may be null can be switched off with ``null`` and, on
the command line, also with ``no``, ``off``, ``false`` or ``none``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Device(Enum):
    """Where the run happens. ``auto``: the GPU if there is one, otherwise the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class CpuFp16(Enum):
    """Which kernels compute FP16 on the CPU: ``fast`` up-casts, multiplies in FP32 and rounds once; ``native`` is torch's own."""

    auto = "auto"
    fast = "fast"
    native = "native"


class Mode(Enum):
    """Who owns the FP32 truth, and what runs in ``compute_dtype`` (see docs/semantics.md)."""

    full = "full"
    autocast = "autocast"
    master = "master"
    pure = "pure"


class DType(Enum):
    """Floating-point formats a policy can name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Fp32Matmul(Enum):
    """How FP32 matrix products are computed: exactly (``ieee``) or with inputs rounded to 10 mantissa bits (``tf32``)."""

    ieee = "ieee"
    tf32 = "tf32"


class ScaleKind(Enum):
    """The loss scale: none, a constant, or one that adapts to overflows."""

    none = "none"
    static = "static"
    dynamic = "dynamic"


class OnOverflow(Enum):
    """What follows an overflow: the window is dropped (``skip``), or run again at the backed-off scale (``retry``)."""

    skip = "skip"
    retry = "retry"


# Functional form, because one of the words, ``raise``, cannot be a Python attribute: ``OnNonFiniteLoss["raise"]``.
# What follows a NaN or inf loss: stop, or drop the batch and count it.
OnNonFiniteLoss = Enum("OnNonFiniteLoss", {"raise": "raise", "skip": "skip"})


class ModelSource(Enum):
    """Where a model's builder comes from."""

    mprun = "mprun"
    timm = "timm"
    torchvision = "torchvision"
    python = "python"


class DatasetSource(Enum):
    """Where a dataset comes from."""

    mprun = "mprun"
    python = "python"


class Task(Enum):
    """What the loss and the metrics are."""

    classification = "classification"
    language_model = "language_model"
    regression = "regression"


class TrackingMode(Enum):
    """Weights & Biases: ``offline`` writes files, ``disabled`` imports nothing, ``auto`` obeys WANDB_MODE, else offline."""

    auto = "auto"
    offline = "offline"
    online = "online"
    disabled = "disabled"


class CheckpointArtifact(Enum):
    """Which checkpoint W&B gets as an artifact when the run ends."""

    none = "none"
    best = "best"
    last = "last"


@dataclass
class ModelConfig:
    """``model.*``. ``kwargs`` go to the builder, checked against its signature."""

    name: str = "vit"
    source: ModelSource = ModelSource.mprun
    kwargs: dict[str, Any] = field(default_factory=dict)
    activation_checkpointing: bool = False
    compile: bool = False
    channels_last: bool = False
    init: str | None = None


@dataclass
class DatasetConfig:
    """``dataset.*``. ``augment`` names augmentations joined by ``+``, ``limit`` keeps n training examples (the first ones).

    ``mixup`` and ``cutmix`` are the alpha of their Beta distribution, 0 for off (see ``mprun/data/mix.py``).
    """

    name: str = "digits"
    source: DatasetSource = DatasetSource.mprun
    root: str | None = None
    task: Task = Task.classification
    kwargs: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    augment: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    limit: int | None = None


@dataclass
class LossScaleConfig:
    """``precision.loss_scale.*``, with torch's names and defaults. A static scale stays at ``init``."""

    kind: ScaleKind = ScaleKind.none
    init: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min: float = 2.0**-14
    max: float = 2.0**24
    hysteresis: int = 1
    on_overflow: OnOverflow = OnOverflow.skip
    patience: int = 50


@dataclass
class PrecisionConfig:
    """``precision.*``: one flat schema, so that any ``precision=`` option can follow any recipe."""

    name: str = "custom"
    mode: Mode = Mode.full
    param_dtype: DType = DType.float32
    compute_dtype: DType = DType.float32
    output_dtype: DType = DType.float32
    fp32_matmul: Fp32Matmul = Fp32Matmul.ieee
    eval_dtype: DType | None = None
    fp32_modules: list[str] = field(default_factory=list)
    on_nonfinite_loss: OnNonFiniteLoss = OnNonFiniteLoss["raise"]
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)


@dataclass
class OptimizerConfig:
    """``optimizer.*``: any ``torch.optim`` or timm name. Weight decay applies to matrices only (``ndim >= 2``)."""

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float | None = None
    betas: list[float] | None = None
    eps: float | None = None
    fused: bool | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScheduleConfig:
    """``schedule.*``: a multiplier of the learning rate per applied step; the last three keys are for ``wsd``, ``step``."""

    name: str = "constant"
    warmup_steps: int | None = None
    warmup_frac: float | None = None
    final: float = 0.0
    decay_frac: float = 0.2
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])
    gamma: float = 0.1


@dataclass
class EmaConfig:
    """``train.ema.*``: off while ``decay`` is null."""

    decay: float | None = None
    warmup: bool = True


@dataclass
class EarlyStopConfig:
    """``train.early_stop.*``: off while ``metric`` is null; ``patience`` counts evaluations without improvement."""

    metric: str | None = None
    patience: int = 10


@dataclass
class TrainConfig:
    """``train.*``. ``steps`` counts applied optimizer steps and wins over ``epochs``; the ``*_every`` are in steps."""

    epochs: int = 20
    steps: int | None = None
    batch_size: int = 64
    accumulate: int = 1
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    loss_weight: float = 1.0
    shuffle: bool = True
    drop_last: bool = False
    ema: EmaConfig = field(default_factory=EmaConfig)
    eval_every: int | None = None
    log_every: int = 10
    checkpoint_every: int | None = None
    keep: int = 1
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)


@dataclass
class TrackingConfig:
    """``tracking.*``: what goes to Weights & Biases. ``metrics.jsonl`` is written in any case and is the truth.

    ``report`` writes ``report.html`` when a run without a group ends (``mprun report`` makes it of any run folder, any time);
    ``log_report`` does so in any case and gives it to W&B.
    """

    mode: TrackingMode = TrackingMode.auto
    project: str = "mprun"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    log_checkpoint: CheckpointArtifact = CheckpointArtifact.none
    report: bool = True
    log_report: bool = False


# What follows a job that fails: the others run all the same, or no further one begins.
OnError = Enum("OnError", {"continue": "continue", "stop": "stop"})


@dataclass
class SweepConfig:
    """``sweep.*``: of a sweep (``-m``) as a whole. Its runs do not differ by these keys, and a run alone has no use for them."""

    name: str | None = None
    jobs: int = 1
    on_error: OnError = OnError["continue"]
    new: bool = False


@dataclass
class DiagnoseConfig:
    """``diagnose.*``: of ``mprun diagnose``; no run differs by these keys.

    ``steps`` of the FP32 run that is measured (the run's own length if that is shorter), one in ``every`` of them in full.
    """

    steps: int = 200
    every: int = 10


@dataclass
class CompareConfig:
    """``compare.*``: of ``mprun compare`` as a whole; no run differs by these keys. See ``mprun/numerics/parity.py``.

    ``seeds``: how many, counted from ``seed``, or a list of them. ``metric``: null for what a run calls its best. ``margin``: in
    the metric's unit, null for one point of top-1 or 1 % of the loss; never less than ``spread`` standard deviations of the
    baseline's seeds. ``gradient_steps``: applied steps of an FP32 run at which gradients are compared.
    """

    precisions: list[str] = field(default_factory=lambda: ["fp32", "bf16", "fp16_dynamic"])
    baseline: str = "fp32"
    seeds: Any = 3
    metric: str | None = None
    margin: float | None = None
    spread: float = 2.0
    confidence: float = 0.95
    gradient_steps: list[int] = field(default_factory=lambda: [0, 10, 100])
    strict: bool = False


@dataclass
class SearchConfig:
    """``search.*``: of the command ``search`` alone. ``budget`` is in sets of modules, ``tolerance`` scales what may differ."""

    budget: int = 200
    tolerance: float = 1.0
    steps: int = 100


@dataclass
class ProbeConfig:
    """``probe.*``: statistics of every module's tensors, every so many attempts; ``every=0`` is off, no ``modules`` are all."""

    every: int = 100
    modules: list[str] = field(default_factory=list)


@dataclass
class PostmortemConfig:
    """``postmortem.*``: how many skipped steps of a run are examined (a run that is stopped is examined always).

    ``save_batch`` keeps what was examined in ``postmortem/<attempt>.pt``.
    """

    skips: int = 3
    save_batch: bool = False


@dataclass
class NumericsConfig:
    """``numerics.*``: how numbers are computed where a device leaves a choice."""

    cpu_fp16: CpuFp16 = CpuFp16.auto


@dataclass
class Config:
    """The root. ``trust`` lists top-level packages whose code ``pkg:attr`` names may import; only the command line sets it."""

    command: str = "train"
    name: str = "${dataset.name}-${model.name}-${precision.name}"
    seed: int = 0
    device: Device = Device.auto
    resume: str | None = None
    trust: list[str] = field(default_factory=list)
    deterministic: bool = False
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    postmortem: PostmortemConfig = field(default_factory=PostmortemConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    meta: dict[str, Any] = field(default_factory=dict)
    expect: list[Any] = field(default_factory=list)
