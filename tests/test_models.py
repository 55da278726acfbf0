import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from mprun.config import Config, ModelConfig, ModelSource, Task
from mprun.errors import ConfigError
from mprun.models.build import build_model
from mprun.models.catalog import LANGUAGE_MODELS, MODELS, RESERVED, check_model, registered, target_of
from mprun.models.mlp import mlp
from mprun.models.resnet import resnet
from mprun.models.vit import vit
from mprun.signatures import legal_kwargs


@dataclass(frozen=True)
class Spec:
    input_shape: tuple[int, ...] = (1, 8, 8)
    num_classes: int = 10
    task: Task = Task.classification


DIGITS = Spec()
CONF = Path(__file__).parents[1] / "conf"


pytestmark = pytest.mark.usefixtures("one_thread")


def build(
    name: str, source: str = "mprun", spec: Spec = DIGITS, trust: tuple[str, ...] = (), **kwargs: Any
) -> nn.Module:
    """The model, from seed 0."""
    torch.manual_seed(0)
    return build_model(ModelConfig(name=name, source=ModelSource[source], kwargs=kwargs), spec, trust=trust)


def size(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def output(model: nn.Module, spec: Spec = DIGITS, batch: int = 3) -> torch.Tensor:
    """Logits of a random batch."""
    logits: torch.Tensor = model(torch.randn(batch, *spec.input_shape, generator=torch.Generator().manual_seed(1)))
    return logits


# -- own models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), [("vit", 136_000), ("resnet", 78_000), ("mlp", 26_000)])
def test_own_models_follow_the_dataset(name: str, parameters: int) -> None:
    model = build(name)
    assert size(model) == pytest.approx(parameters, rel=0.02)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert output(model).shape == (3, 10)
    wide = Spec((3, 16, 16), 7)
    assert output(build(name, spec=wide), wide).shape == (3, 7)
    assert output(build(name, num_classes=12)).shape == (3, 12)


IMAGE_MODELS = [name for name in MODELS if name not in LANGUAGE_MODELS]  # the others are in test_gpt.py


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    first, second = build(name).state_dict(), build(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    torch.manual_seed(1)
    other = build_model(ModelConfig(name=name), DIGITS, trust=()).state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = build(name)
    output(model).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in model.parameters())


def test_vit_is_the_documented_one() -> None:
    model: Any = build("vit")
    assert size(model) == 136_010
    assert model.pos_embed.shape == (1, 16, 64), "16 patches and no class token"
    assert float(model.pos_embed.detach().std()) == pytest.approx(1.0, rel=0.1)
    assert len(model.blocks) == 4
    assert build("vit", class_token=True, global_pool="token", depth=2).cls_token is not None


def test_vit_sees_from_the_start_where_a_patch_is() -> None:
    model = build("vit").eval()
    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert float(model.get_submodule("patch_embed")(images).std()) == pytest.approx(1.0, rel=0.2)
        here, elsewhere = model(images), model(images.roll(2, dims=3))  # the same patches, one column on
    assert float((here - elsewhere).std() / here.std()) > 0.1, "0.0009 with timm's initialisation"


@pytest.mark.parametrize("key", ["dropout", "attn_dropout", "drop_path"])
def test_vit_dropouts_act_in_training_only(key: str) -> None:
    model = build("vit", **{key: 0.5})
    assert not torch.equal(output(model), output(model))
    model.eval()
    assert torch.equal(output(model), output(model))


def test_resnet_halves_the_image_and_keeps_the_variance() -> None:
    model: Any = build("resnet")
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, out: shapes.append(tuple(out.shape)))
    output(model)
    assert shapes == [(3, 16, 8, 8), (3, 32, 4, 4), (3, 64, 2, 2)]
    assert [isinstance(block.shortcut, nn.Identity) for block in model.blocks] == [True, False, False]
    assert float(model.blocks[2].conv2.weight.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)
    assert output(build("resnet", widths=[8], dropout=0.5)).shape == (3, 10)


def test_mlp_layers() -> None:
    kinds = [type(layer) for layer in build("mlp", hidden=[5], norm="layernorm", dropout=0.1)]
    assert kinds == [nn.Flatten, nn.Linear, nn.LayerNorm, nn.GELU, nn.Dropout, nn.Linear]
    assert [type(layer) for layer in build("mlp", hidden=[])] == [nn.Flatten, nn.Linear]
    assert any(isinstance(layer, nn.BatchNorm1d) for layer in build("mlp", norm="batchnorm"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vit(input_shape=(1, 8, 6), num_classes=2), r"square images .*\(1, 8, 6\)"),
        (lambda: vit(input_shape=(64,), num_classes=2), r"square images .*\(64,\)"),
        (lambda: vit(input_shape=(1, 8, 8), num_classes=2, patch_size=3), r"patch_size=3 does not divide .* 8 pixels"),
        (
            lambda: vit(input_shape=(1, 8, 8), num_classes=2, num_heads=5),
            r"embed_dim=64 is not a multiple .*num_heads=5",
        ),
        (lambda: vit(input_shape=(1, 8, 8), num_classes=2, global_pool="token"), r"needs model\.kwargs\.class_token"),
        (lambda: resnet(input_shape=(64,), num_classes=2), r"images \(C, H, W\), not inputs of shape \(64,\)"),
        (lambda: resnet(input_shape=(1, 8, 8), num_classes=2, widths=[]), r"widths=\[\]"),
        (
            lambda: mlp(input_shape=(4,), num_classes=2, norm="bn"),
            r"norm='bn' is not one of layernorm, batchnorm, null",
        ),
        (lambda: mlp(input_shape=(4,), num_classes=2, hidden=[3, 0]), r"hidden=\[3, 0\]"),
        (lambda: build("vit", depth="four"), r"model\.kwargs\.depth='four' is not a whole number"),
        (lambda: build("vit", num_classes=9), r"model\.kwargs\.num_classes=9 is fewer than the 10 of the dataset"),
        (lambda: build("mlp", hiden=[3]), r"model\.kwargs\.hiden is not a parameter of mlp: did you mean 'hidden'\?"),
    ],
)
def test_sizes_that_do_not_fit_are_explained(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- catalog ------------------------------------------------------------------------------------------------------


def test_catalog_imports_nothing_heavy() -> None:
    code = (
        "import sys; from mprun.models.catalog import check_model, target_of, registered;"
        "from mprun.config import ModelConfig, ModelSource as S;"
        "check_model(ModelConfig(kwargs={'depth': 2}));"
        "assert target_of(ModelConfig(name='test_vit', source=S.timm)) == 'timm.models.vision_transformer:test_vit';"
        "assert target_of(ModelConfig(name='resnet18', source=S.torchvision)) == 'torchvision.models.resnet:resnet18';"
        "assert not {'torch', 'timm', 'torchvision', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_catalog_knows_what_the_libraries_register() -> None:
    import timm
    import torchvision

    assert set(registered("timm")) == set(timm.list_models())
    assert set(registered("torchvision")) == set(torchvision.models.list_models(module=torchvision.models))


@pytest.mark.parametrize(
    ("name", "source", "kwargs", "message"),
    [
        ("vti", "mprun", {}, r"model\.name='vti' is not a model of mprun: did you mean 'vit'\?"),
        ("resnet5O", "timm", {}, r"model\.name='resnet5O' is not a model of timm: did you mean 'resnet50\w*'\?"),
        ("hf-hub:someone/model", "timm", {}, r"is not a model of timm"),
        ("local-dir:/tmp", "timm", {}, r"is not a model of timm"),
        ("resnet81", "torchvision", {}, r"did you mean 'resnet18'\?"),
        ("test_vit", "timm", {"pretrained": True}, r"model\.kwargs\.pretrained is filled in by the runner"),
        ("test_vit", "timm", {"checkpoint_path": "x.pt"}, r"model\.kwargs\.checkpoint_path is filled in"),
        ("resnet18", "torchvision", {"weights": "DEFAULT"}, r"model\.kwargs\.weights is filled in"),
    ],
)
def test_catalog_refuses_unknown_names_and_downloads(
    name: str, source: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(ModelConfig(name=name, source=ModelSource[source], kwargs=kwargs))


def test_own_signatures_name_the_dataset_facts() -> None:
    for target in MODELS.values():
        assert legal_kwargs(target).required == {"input_shape", "num_classes"}
    assert set(RESERVED) == set(ModelSource)
    assert target_of(ModelConfig(name="a.b:C", source=ModelSource.python)) == "a.b:C"


def test_options_in_conf_are_the_models_and_the_sources() -> None:
    files = {path.stem: path for path in (CONF / "model").glob("*.yaml")}
    assert set(files) == {*MODELS, "timm", "torchvision", "python"}
    for name, path in files.items():
        assert path.read_text().startswith("# "), "`mprun list` shows the first comment"
        option = OmegaConf.load(path)
        merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), option)
        assert OmegaConf.is_missing(option, "name") == (name not in MODELS)
        if name in MODELS:
            check_model(OmegaConf.to_object(merged))  # type: ignore[arg-type]


def test_tuned_settings_fit_the_schema() -> None:
    files = sorted((CONF / "tuned").glob("*.yaml"))
    assert {"mlp_digits_adamw", "resnet_digits_adamw", "vit_digits_adamw", "gpt_python_docs_adamw"} <= {
        p.stem for p in files
    }
    for path in files:
        model, _, rest = path.stem.partition("_")
        dataset, _, optimizer = rest.rpartition("_")
        for group, option in (("model", model), ("dataset", dataset), ("optimizer", optimizer)):
            assert (CONF / group / f"{option}.yaml").exists(), f"{path.name} is for no {group} that there is"
        assert path.read_text().startswith("# @package _global_\n"), "Hydra reads the first line"
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))  # refuses unknown keys and wrong types


# -- timm and torchvision -----------------------------------------------------------------------------------------


def test_timm_models_follow_the_dataset() -> None:
    spec = Spec((1, 32, 32), 10)
    for name in ("test_vit", "test_resnet.r160_in1k"):  # with and without a fixed image size, and with a tag
        assert output(build(name, "timm", spec), spec).shape == (3, 10)
    assert build("test_vit", "timm", spec).patch_embed.img_size == (32, 32)
    assert len(build("test_vit", "timm", spec, depth=1).blocks) == 1


def test_timm_errors_name_model_kwargs() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.kwargs=\{'dpeth': 1\} do not fit test_vit: .*did you mean 'depth'\?"
    ):
        build("test_vit", "timm", dpeth=1)
    with pytest.raises(ConfigError, match=r"model\.kwargs=.* do not fit test_vit.nope: "):
        build("test_vit.nope", "timm")
    with pytest.raises(ConfigError, match=r"takes images \(C, H, W\), not inputs of shape \(64,\)"):
        build("test_vit", "timm", Spec((64,)))


# Each fails at another place: in the builder, in the forward pass, or (patches that do not divide the image) nowhere.
TOO_SMALL = [
    ("test_convnext", "timm", "Kernel size can't be greater than actual input size", 32, 1),
    ("test_maxvit", "timm", "integer modulo by zero", 32, None),
    ("test_coatnet", "timm", "batch2|broadcast", 32, None),
    ("test_vit", "timm", "its patches of 16 x 16 do not divide them", 32, 4),
    ("test_vit_relpos", "timm", "its patches of 16 x 16 do not divide them", 32, 4),
    ("squeezenet1_1", "torchvision", None, None, None),
    ("vgg11", "torchvision", "Output size is too small", 32, None),
    ("vit_b_32", "torchvision", "Input shape indivisible by patch size", 32, None),
]


@pytest.mark.parametrize(("name", "source", "reason", "side", "patch"), TOO_SMALL, ids=[row[0] for row in TOO_SMALL])
def test_images_of_a_wrong_size_are_refused_with_what_works(
    name: str, source: str, reason: str | None, side: int | None, patch: int | None
) -> None:
    spec = Spec((1, 28, 28))
    if reason is None:
        assert output(build(name, source, spec), spec).shape == (3, 10)
        return
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        build(name, source, spec)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert re.search(
        rf"model\.name={name} cannot take images of 28 x 28 pixels: .*({reason}).*; it takes {side} x {side}", text
    )
    larger = Spec((1, side or 0, side or 0))
    with torch.device("meta"):
        assert build(name, source, larger)(torch.zeros(2, *larger.input_shape)).shape == (2, 10), "the advice is good"
    assert ("patch_size" in text) == (patch is not None)
    if patch is not None:
        assert f"or model.kwargs.patch_size={patch} makes it fit" in text
        assert output(build(name, source, spec, patch_size=patch), spec).shape == (3, 10)


def test_the_trial_leaves_no_trace() -> None:
    """Weights, random numbers and buffers are those of the library's own builder."""
    import timm

    for name in ("test_resnet", "test_nfnet", "levit_128s"):
        torch.manual_seed(0)
        plain = timm.create_model(name, in_chans=3, num_classes=10)
        after = torch.get_rng_state()
        model = build(name, "timm", Spec((3, 32, 32)))
        if name != "levit_128s":  # which is also told the image's size
            assert torch.equal(torch.get_rng_state(), after)
            assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())
        assert all(module.training for module in model.modules())
        cached = [module for module in model.modules() if getattr(module, "attention_bias_cache", None)]
        assert not cached, "what an evaluation keeps must not outlive it"


def test_an_image_model_and_a_text_do_not_go_together() -> None:
    words = Spec((64,), 103, Task.language_model)
    for name in IMAGE_MODELS:
        with pytest.raises(ConfigError, match=rf"model\.name={name} is no language model, .*use model=gpt"):
            build(name, spec=words)
    with pytest.raises(ConfigError, match=r"takes images \(C, H, W\), not inputs of shape \(64,\)"):
        build("test_vit", "timm", words)
    with pytest.raises(ConfigError, match=r"the gpt takes sequences of token ids .*use dataset=python_docs"):
        build("gpt")
    with pytest.raises(ConfigError, match=r"model\.name=gpt .* needs dataset\.task=language_model, not classification"):
        build("gpt", spec=Spec((64,)))
    assert build("gpt", spec=words)(torch.zeros(2, 64, dtype=torch.long)).shape == (2, 64, 103)


FAMILIES = [
    "resnet50", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0", "swin_tiny_patch4_window7_224", "levit_128s",
    "mobilenetv3_small_100", "mixer_s32_224", "deit_tiny_distilled_patch16_224", "regnetx_002", "edgenext_xx_small",
    "maxvit_rmlp_nano_rw_256", "densenet121", "inception_v3", "xcit_nano_12_p16_224", "coat_tiny", "pit_ti_224",
    "eva02_tiny_patch14_224", "mobilevit_xxs", "ghostnet_100", "repvgg_a0", "hrnet_w18_small", "cait_xxs24_224", "csatv2",
    "crossvit_tiny_240", "poolformer_s12", "gmlp_ti16_224", "visformer_tiny", "tnt_s_patch16_224", "vovnet39a", "dla34",
    "efficientformer_l1", "fastvit_t8", "tiny_vit_5m_224", "hiera_tiny_224", "davit_tiny", "gcvit_xxtiny", "nest_tiny",
    "mvitv2_tiny", "swinv2_tiny_window8_256", "convmixer_768_32", "pvt_v2_b0", "twins_pcpvt_small", "mambaout_femto",
    "efficientvit_b0", "swiftformer_xs", "naflexvit_base_patch16_gap", "resnetv2_50", "convit_tiny", "cspdarknet53",
]  # fmt: skip


def check_everywhere(name: str, source: str) -> None:
    """Built on the meta device for four kinds of images: logits, or one line that says what works."""
    fits = 0
    for shape in ((1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)):
        with torch.device("meta"):
            try:
                model = build(name, source, Spec(shape))
                assert model(torch.zeros(2, *shape)).shape == (2, 10)
                fits += 1
            except ConfigError as error:
                text = str(error)
            else:
                continue
        size = f"{shape[1]} x {shape[2]}"
        advised = r"(it takes \d+ x \d+|model\.kwargs\.patch_size=\d+ makes it fit)"
        assert re.fullmatch(rf"model\.name={name} cannot take images of {size} pixels: .*; {advised}.*", text), text
    assert fits or name in ("inception_v3", "efficientformer_l1", "maxvit_t"), "made for 96 x 96 and more"


TINY = [name for name in registered("timm") if name.startswith("test_")]
CLASSIFIERS = [name for name in registered("torchvision") if not name.startswith("regnet")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, *FAMILIES])
def test_families_of_timm_take_small_images_or_say_what_they_take(name: str) -> None:
    check_everywhere(name, "timm")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_of_torchvision_take_small_images_or_say_what_they_take(name: str) -> None:
    check_everywhere(name, "torchvision")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regnet_x_400mf", "regnet_y_400mf"])
def test_regnets_of_torchvision_take_small_images(name: str) -> None:
    # Their builder reads numbers, which the meta device does not have.
    assert output(build(name, "torchvision"), DIGITS).shape == (3, 10)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("resnet18", DIGITS),
        ("squeezenet1_1", Spec((2, 32, 32))),
        ("googlenet", Spec((3, 32, 32), 4)),  # no second output, no warning about its initialisation
    ],
)
def test_torchvision_models_follow_the_dataset(name: str, spec: Spec) -> None:
    assert output(build(name, "torchvision", spec), spec).shape == (3, spec.num_classes)


def test_torchvision_errors_name_the_keyword() -> None:
    with pytest.raises(
        ConfigError, match=r"widht_per_group is not a parameter of ResNet: did you mean 'width_per_group'"
    ):
        build("resnet18", "torchvision", widht_per_group=3)


# -- a user's own model -------------------------------------------------------------------------------------------

USER_CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, in_chans, img_size, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_chans * img_size**2, width), nn.Linear(width, num_classes))

    def forward(self, x):
        return self.body(x)

def plain(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width))

def not_a_module():
    return 3

def fails():
    raise AttributeError("a bug of the user")
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nn.Module]]:
    """``user("Net", width=3)`` builds from the code above."""
    (tmp_path / "user_nets.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(attr: str, trust: tuple[str, ...] = ("user_nets",), **kwargs: Any) -> nn.Module:
        return build(f"user_nets:{attr}", "python", trust=trust, **kwargs)

    yield make
    sys.modules.pop("user_nets", None)


def test_user_model_gets_the_facts_it_asks_for(user: Callable[..., nn.Module]) -> None:
    assert output(user("Net", width=3)).shape == (3, 10)
    assert output(user("Net", num_classes=11)).shape == (3, 11)
    assert output(user("plain", width=6)).shape == (3, 6)


def test_user_model_mistakes(user: Callable[..., nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"'trust=\[user_nets\]'"):
        user("Net", trust=())
    assert "user_nets" not in sys.modules, "untrusted code did not run"
    with pytest.raises(ConfigError, match=r"model\.kwargs\.widht is not a parameter of Net: did you mean 'width'\?"):
        user("Net", widht=3)
    with pytest.raises(ConfigError, match=r"model\.kwargs=\{\} do not fit user_nets:plain: missing .*'width'"):
        user("plain")
    with pytest.raises(ConfigError, match=r"returned a int, not a torch\.nn\.Module"):
        user("not_a_module")
    with pytest.raises(AttributeError, match="a bug of the user"):
        user("fails")
