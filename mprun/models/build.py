"""From ``model.*`` and the facts of a dataset to a module: float32, on the CPU, randomly initialised.

The initial weights come from torch's global generator, which the caller seeds; the CPU's, so that a GPU run starts from
the same weights as a CPU run. Nothing is downloaded: weights of one's own are loaded by ``model.init``, not by a builder.
Input size, channels and classes follow from the dataset, unless ``model.kwargs`` says otherwise.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, Protocol, cast

from torch import nn

from mprun.config import ModelConfig, ModelSource, Task
from mprun.errors import ConfigError, nearest
from mprun.imports import no_wandb, uncollected
from mprun.models.argument_types import check_types
from mprun.models.catalog import LANGUAGE_MODELS, check_model, target_of
from mprun.models.trial import BAD_VALUE, fitting_model
from mprun.signatures import import_target, legal_kwargs

# torchvision's two networks with a second output in training, and an initialisation that they warn about.
_TORCHVISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


class InputSpec(Protocol):
    """What a model needs to know of a dataset (``mprun.data.DataSpec`` has it)."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """One input without the batch dimension, (C, H, W) for images."""

    @property
    def num_classes(self) -> int:
        """Size of the output."""

    @property
    def task(self) -> Task:
        """What the targets mean."""


def build_model(config: ModelConfig, spec: InputSpec, *, trust: Collection[str]) -> nn.Module:
    """Make the model of a run. Draws from the global CPU generator.

    Args:
        config: ``model.name``, ``model.source`` and ``model.kwargs`` are read.
        spec: input shape, number of classes and task.
        trust: top-level packages of the user's that may be imported.

    Returns:
        The module, float32, on the CPU, in training mode.

    Raises:
        ConfigError: an unknown name, ``model.kwargs`` that the builder does not take, or a model that cannot take such inputs.
    """
    check_model(config)
    classes = config.kwargs.get("num_classes", spec.num_classes)
    if isinstance(classes, int) and classes < spec.num_classes:
        raise ConfigError(f"model.kwargs.num_classes={classes} is fewer than the {spec.num_classes} of the dataset")
    builder = SOURCES[config.source]
    model = builder(config, spec, trust)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name={config.name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _mprun(config: ModelConfig, spec: InputSpec, trust: Collection[str]) -> Any:
    language = config.name in LANGUAGE_MODELS
    if language and len(spec.input_shape) == 1 and spec.task is not Task.language_model:
        raise ConfigError(
            f"model.name={config.name} predicts the next token: it needs dataset.task=language_model, not {spec.task.value}"
        )
    if spec.task is Task.language_model and not language:
        raise ConfigError(
            f"model.name={config.name} is no language model, and dataset.task=language_model: use model={LANGUAGE_MODELS[0]}"
        )
    build = import_target(target_of(config), trust=["mprun"], key="model.name")
    check_types(build, config.kwargs, key="model.kwargs")
    follows = {"input_shape": spec.input_shape, "num_classes": spec.num_classes}
    return _call(build, config, follows | config.kwargs)


def _timm(config: ModelConfig, spec: InputSpec, trust: Collection[str]) -> Any:
    with no_wandb(), uncollected("timm"):
        import timm

    fixed = timm.models.get_pretrained_cfg(config.name.partition(".")[0]).fixed_input_size

    def make(shape: tuple[int, ...], extra: dict[str, Any]) -> nn.Module:
        follows: dict[str, Any] = {"in_chans": shape[0], "num_classes": spec.num_classes}
        if fixed:
            follows["img_size"] = shape[1:]
        # timm prunes keywords that are None; `create_model` keeps weights away from here, `pretrained` is reserved.
        given = {"model_name": config.name, "pretrained": False, **follows, **config.kwargs, **extra}
        return cast(nn.Module, _call(timm.create_model, config, given))

    return fitting_model(make, _image_shape(config, spec), name=config.name, kwargs=config.kwargs)


def _torchvision(config: ModelConfig, spec: InputSpec, trust: Collection[str]) -> Any:
    with uncollected("torchvision"):
        from torchvision.models import get_model

    if config.kwargs.get("aux_logits"):
        raise ConfigError(
            f"model.kwargs.aux_logits={config.kwargs['aux_logits']}: in training {config.name} would return several outputs, and "
            "mprun trains one; leave it out"
        )

    def make(shape: tuple[int, ...], extra: dict[str, Any]) -> nn.Module:
        follows: dict[str, Any] = {"num_classes": spec.num_classes, **_TORCHVISION_DEFAULTS.get(config.name, {})}
        if config.name.startswith("vit_"):
            follows["image_size"] = shape[1]
        if config.name.startswith("maxvit"):
            follows["input_size"] = shape[1:]
        given = {"name": config.name, "weights": None, **follows, **config.kwargs, **extra}
        model = cast(nn.Module, _call(get_model, config, given))
        if shape[0] != 3:
            _replace_stem(model, shape[0])
        return model

    return fitting_model(make, _image_shape(config, spec), name=config.name, kwargs=config.kwargs)


def _python(config: ModelConfig, spec: InputSpec, trust: Collection[str]) -> Any:
    build = import_target(config.name, trust=trust, key="model.name")
    if isinstance(build, nn.Module) or not callable(build):
        raise ConfigError(
            f"model.name={config.name} is a {type(build).__name__}, not a class or function that returns a torch.nn.Module: "
            "each run makes its own model, under its seed"
        )
    parameters = inspect.signature(build).parameters
    follows: dict[str, Any] = {"input_shape": spec.input_shape, "num_classes": spec.num_classes}
    if len(spec.input_shape) == 3:
        channels, *size = spec.input_shape
        follows |= {"in_chans": channels, "img_size": size[0] if size[0] == size[1] else tuple(size)}
    kwargs = {key: value for key, value in follows.items() if key in parameters} | config.kwargs
    try:
        inspect.signature(build).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"model.kwargs={config.kwargs} do not fit {config.name}: {error}") from error
    return build(**kwargs)  # an error inside the user's code keeps its traceback


SOURCES: dict[ModelSource, Callable[[ModelConfig, InputSpec, Collection[str]], Any]] = {
    ModelSource.mprun: _mprun,
    ModelSource.timm: _timm,
    ModelSource.torchvision: _torchvision,
    ModelSource.python: _python,
}


def _call(build: Callable[..., Any], config: ModelConfig, kwargs: dict[str, Any]) -> Any:
    """Call a builder; what it says against its arguments becomes a ConfigError."""
    try:
        return build(**kwargs)
    except BAD_VALUE as error:
        text = str(error).strip() or type(error).__name__
        if match := re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", text):
            owner, wrong = match.groups()
            text = f"{wrong} is not a parameter of {owner}{_suggest(config, owner, wrong)}"
        if "can't allocate memory" in text:
            size = text.partition("you tried to allocate ")[2].partition(" bytes")[0]
            raise ConfigError(
                f"model.name={config.name} does not fit into memory: one of its tensors takes {size} bytes "
                f"(model.kwargs={config.kwargs}); take a smaller model or smaller inputs"
            ) from error
        raise ConfigError(f"model.kwargs={config.kwargs} do not fit {config.name}: {text}") from error


def _suggest(config: ModelConfig, owner: str, wrong: str) -> str:
    """The nearest parameter of the class or function that refused a keyword, if its source can be found."""
    module = target_of(config).partition(":")[0]
    try:
        return f": {nearest(wrong, legal_kwargs(f'{module}:{owner}').names)}"
    except ConfigError:
        return ""


def _image_shape(config: ModelConfig, spec: InputSpec) -> tuple[int, ...]:
    if len(spec.input_shape) != 3:
        raise ConfigError(f"model.name={config.name} takes images (C, H, W), not inputs of shape {spec.input_shape}")
    return spec.input_shape


def _replace_stem(model: nn.Module, channels: int) -> None:
    """Give the first convolution of a torchvision model another number of input channels, freshly initialised."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            parent, _, attribute = name.rpartition(".")
            stem = nn.Conv2d(
                channels,
                module.out_channels,
                module.kernel_size,  # type: ignore[arg-type]
                stride=module.stride,  # type: ignore[arg-type]
                padding=module.padding,  # type: ignore[arg-type]
                bias=module.bias is not None,
            )
            setattr(model.get_submodule(parent), attribute, stem)
            return
