"""Which models there are, without importing torch, timm or torchvision.

timm defines some 1300 models as decorated functions in ``timm/models/*.py``. Importing them takes two seconds; finding
the line ``def resnet50(`` by reading the files takes a fraction of one, and is enough to refuse a misspelt name early.
"""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

from mprun.config import ModelConfig, ModelSource
from mprun.errors import ConfigError, nearest
from mprun.signatures import check_kwargs

MODELS: dict[str, str] = {
    "vit": "mprun.models.vit:vit",
    "resnet": "mprun.models.resnet:resnet",
    "mlp": "mprun.models.mlp:mlp",
    "gpt": "mprun.models.gpt:gpt",
}
# Those of them that read tokens and give logits for each.
LANGUAGE_MODELS = ("gpt",)

# What fetches or unpickles files, or changes how a model is made rather than what it is. `model.init` loads weights.
RESERVED: dict[ModelSource, tuple[str, ...]] = {
    ModelSource.mprun: (),
    ModelSource.timm: (
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "checkpoint_path",
        "cache_dir",
        "scriptable",
        "exportable",
        "no_jit",
    ),
    ModelSource.torchvision: ("weights", "weights_backbone", "pretrained", "progress"),
    ModelSource.python: (),
}

_REGISTERED = re.compile(r"^@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


def target_of(config: ModelConfig) -> str:
    """The ``pkg.mod:attr`` whose signature ``model.kwargs`` must fit.

    Raises:
        ConfigError: ``model.name`` is unknown.
    """
    if config.source is ModelSource.python:
        return config.name
    known = MODELS if config.source is ModelSource.mprun else registered(config.source.value)
    # timm names may carry the tag of a set of weights (resnet50.a1_in1k); it says nothing about the architecture.
    name = config.name.partition(".")[0] if config.source is ModelSource.timm else config.name
    if name not in known:
        raise ConfigError(
            f"model.name={config.name!r} is not a model of {config.source.value}: {nearest(name, list(known))}"
        )
    return known[name]


def check_model(config: ModelConfig) -> None:
    """Check name and ``kwargs`` without importing anything.

    Builders of timm and torchvision take ``**kwargs``: what those may be only they know, when the model is built.

    Raises:
        ConfigError: an unknown name or keyword.
    """
    check_kwargs(target_of(config), config.kwargs, key="model.kwargs", reserved=RESERVED[config.source])


@lru_cache(maxsize=2)
def registered(package: str) -> dict[str, str]:
    """The registered builders of timm's or torchvision's ``models`` package: name -> ``pkg.mod:attr``.

    Args:
        package: ``timm`` or ``torchvision``.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model.source={package}: the package {package} is not installed")
    found = {}
    for path in sorted(Path(spec.submodule_search_locations[0], "models").glob("*.py")):
        for name in _REGISTERED.findall(path.read_text(encoding="utf-8")):
            found[name] = f"{package}.models.{path.stem}:{name}"
    return found
