"""The public names of outpace, and that importing it is light."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import outpace

PUBLIC = {
    "AsyncEngine",
    "ContextOverflow",
    "Engine",
    "Generation",
    "OutpaceError",
    "SamplingParams",
    "Speculation",
    "Stats",
    "StreamedToken",
    "StructuredOutputs",
    "Target",
    "UnsupportedModel",
    "__version__",
    "accelerate",
    "decode",
    "drafters",
    "load",
    "load_drafter",
    "nano_draft_path",
    "nano_drafter_path",
    "nano_path",
    "restore",
    "testing",
}


def python(code: str) -> str:
    """Return the output of `code` in a fresh interpreter."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_public_names_are_pinned() -> None:
    assert set(outpace.__all__) == PUBLIC
    assert len(outpace.__all__) == len(PUBLIC)
    assert set(dir(outpace)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(outpace, name)
    if isinstance(value, type):
        assert value.__name__ == name


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(outpace, name)
    if not callable(value):
        return
    methods = vars(value).items() if inspect.isclass(value) else ()
    own = {f"{name}.{key}": method for key, method in methods if inspect.isfunction(method) and key[0] != "_"}
    assert [key for key, one in {name: value, **own}.items() if not inspect.getdoc(one)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = outpace.no_such_name


def test_import_is_light() -> None:
    heavy = python(
        "import sys, outpace\n"
        "outpace.nano_path(), outpace.__version__, dir(outpace)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich', 'typer'} & set(sys.modules)))"
    )
    assert heavy == "[]"


def test_a_package_resolves_on_its_own() -> None:
    """A package resolves in a fresh interpreter, where nothing else has imported the submodule yet."""
    assert python("import outpace; print(outpace.testing.__name__)") == "outpace.testing"


def test_embedded_models_are_in_the_package() -> None:
    package = Path(outpace.__file__).parent
    for path in (outpace.nano_path(), outpace.nano_draft_path()):
        assert path.is_relative_to(package)
        assert {"config.json", "model.safetensors"} <= {file.name for file in path.iterdir()}
    assert any(outpace.nano_path().glob("tokenizer*"))
