import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mprun.errors import ConfigError, nearest
from mprun.signatures import check_kwargs, import_target, legal_kwargs, public_names

Package = Callable[[dict[str, str]], str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Writes the files of a package that cannot be imported alive, and returns its name."""

    def write(files: dict[str, str]) -> str:
        name = f"pkg_{tmp_path.name.replace('-', '_')}"
        for path, text in {"__init__.py": "", **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\nraise RuntimeError('this code must not run')\n")
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def test_reads_torch_without_importing_it() -> None:
    code = (
        "import sys; from mprun.signatures import legal_kwargs as f; s = f('torch.optim:AdamW');"
        "assert {'lr', 'betas', 'fused'} <= set(s.names) and s.required == {'params'} and not s.open, s;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_function_parameters(package: Package) -> None:
    pkg = package({"a.py": "def f(x, /, a, b=print('no'), *args, c, d=1): ...\ndef g(a, **more): ..."})
    f, g = legal_kwargs(f"{pkg}.a:f"), legal_kwargs(f"{pkg}.a:g")
    assert (f.names, f.required, f.open) == (("a", "b", "c", "d"), {"a", "c"}, False)
    assert (g.names, g.open) == (("a",), True)


@pytest.mark.parametrize(
    ("body", "names", "is_open"),
    [
        ("class C(Base):\n  def __init__(self, own, **kw):\n    super().__init__(**kw)", ("own", "x", "y"), False),
        ("class C(Base):\n  def __init__(self, **kw):\n    super().__init__(1, **kw)", ("y",), False),
        ("class C(Base):\n  def __init__(self, **kw):\n    super().__init__(y=1, **kw)", ("x",), False),
        ("class C(Base):\n  def __init__(self, **kw):\n    self.z = kw.get('z')\n    super().__init__(**kw)", (), True),
        ("class C(Base): pass", ("x", "y"), False),
        ("class C(nn.Module): pass", (), False),
        ("from torch.nn import Module\nclass C(Module): pass", (), False),
        ("class C(Unknown): pass", (), True),
        ("C = Base", ("x", "y"), False),
        ("C = partial(Base, 3)", (), True),
        ("if True:\n  class C(Base): pass\nelse:\n  C = None", ("x", "y"), False),
        ("class C(C): pass", (), True),
    ],
)
def test_classes(package: Package, body: str, names: tuple[str, ...], is_open: bool) -> None:
    base = "from torch import nn\nfrom .base import Base\n"
    pkg = package({"base.py": "class Base:\n  def __init__(self, x, y=0): ...", "c.py": base + body})
    found = legal_kwargs(f"{pkg}.c:C")
    assert (found.names, found.open) == (names, is_open)


def test_real_modules_with_the_base_named_by_import() -> None:
    assert legal_kwargs("torch.nn:Sequential").open is False
    assert legal_kwargs("mprun.models.resnet:BasicBlock").names == ("width_in", "width", "stride")


@pytest.mark.parametrize(
    "init",
    [
        "from .deep.a import make",
        "from .deep.a import real as make",
        "from .deep import *",
        "try:\n  from not_installed import make\nexcept ImportError:\n  pass\nfrom .deep.a import make",
    ],
)
def test_follows_re_exports(package: Package, init: str) -> None:
    pkg = package(
        {
            "__init__.py": init,
            "deep/__init__.py": "from .a import *\nfrom ..nowhere import *",
            "deep/a.py": "def real(width): ...\ndef make(width): ...",
        }
    )
    found = legal_kwargs(f"{pkg}:make")
    assert "width" in found.names or found.open
    if "not_installed" not in init:
        assert found.names == ("width",)


def test_import_cycle_ends(package: Package) -> None:
    pkg = package({"a.py": "from .b import f", "b.py": "from .a import f"})
    assert legal_kwargs(f"{pkg}.a:f").open


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_pkg_x:f", r"no package 'no_such_pkg_x'"),
        ("torch.optm:Adam", r"no module 'optm': did you mean 'optim'\?"),
        ("torch.optim:AdmW", r"no 'AdmW': did you mean 'AdamW'\?"),
        ("torch.optim.AdamW", r"not of the form pkg.mod:attr"),
        ("torch optim:AdamW", r"not of the form pkg.mod:attr"),
        (":AdamW", r"not of the form pkg.mod:attr"),
    ],
)
def test_not_found_says_what_is_near(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        legal_kwargs(target)


def test_broken_source_is_a_config_error(package: Package) -> None:
    pkg = package({"a.py": "def f(:"})
    with pytest.raises(ConfigError, match=r"a\.py cannot be read as Python"):
        legal_kwargs(f"{pkg}.a:f")


def test_check_kwargs_names_key_and_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        check_kwargs("mprun.models.vit:vit", {"depth": 2, "dpeth": 3}, key="model.kwargs")
    assert str(caught.value).startswith("model.kwargs.dpeth is not a parameter of vit: did you mean 'depth'? legal: ")
    assert "embed_dim" in str(caught.value)
    check_kwargs("mprun.models.vit:vit", {"depth": 2}, key="model.kwargs")


def test_check_kwargs_reserved_and_open(package: Package) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.kwargs\.lr is filled in by the runner .*; legal: betas, eps"):
        check_kwargs("torch.optim:AdamW", {"lr": 1}, key="optimizer.kwargs", reserved=["params", "lr"])
    pkg = package({"a.py": "def f(a, **more): ..."})
    check_kwargs(f"{pkg}.a:f", {"anything": 1}, key="k")
    with pytest.raises(ConfigError, match=r"filled in by the runner and cannot be given$"):
        check_kwargs(f"{pkg}.a:f", {"b": 1}, key="k", reserved=["b"])


def test_nearest_with_nothing_near_or_too_many() -> None:
    assert nearest("x", []) == "legal: none"
    assert nearest("n007x", [f"n{i:03}" for i in range(99)]) == "did you mean 'n007'? 99 names are legal"


def test_public_names_lists_definitions_and_re_exports() -> None:
    names = public_names("torch.optim")
    assert {"AdamW", "SGD", "Muon"} <= set(names)
    assert not [name for name in names if name.startswith("_")]


def test_import_needs_trust_and_runs_nothing_without_it(package: Package) -> None:
    pkg = package({"a.py": "def f(): ..."})
    with pytest.raises(ConfigError, match=rf"model\.name={pkg}\.a:f runs code of '{pkg}'.*'trust=\[{pkg}\]'"):
        import_target(f"{pkg}.a:f", trust=["other"], key="model.name")
    assert pkg not in sys.modules
    with pytest.raises(ConfigError, match="no 'g'"):  # trusted, but not there: still nothing runs
        import_target(f"{pkg}.a:g", trust=[pkg], key="model.name")
    assert pkg not in sys.modules
    with pytest.raises(RuntimeError, match="this code must not run"):  # the user's own error passes through
        import_target(f"{pkg}.a:f", trust=[pkg], key="model.name")
    assert import_target("json.decoder:JSONDecoder", trust=["json"], key="k").__name__ == "JSONDecoder"
