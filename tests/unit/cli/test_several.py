"""Names of several models for one server, and the options that go with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from folders import save_llama
from outpace.cli import app
from outpace.cli.several import named_models
from outpace.core import OutpaceError
from outpace.embedded import nano_path
from outpace.loading.sizes import bytes_of, weights_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models beside what is none."""
    found = tmp_path_factory.mktemp("models")
    save_llama(found / "tiny")
    for name in ("b.gguf", "mmproj-b.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "notes.txt"):
        (found / name).write_bytes(b"12345678")
    (found / "deep").mkdir()
    (found / "deep" / "d.Q8_0.gguf").write_bytes(b"")
    (found / "empty").mkdir()
    return found


def test_one_model_is_loaded_at_the_start_unless_it_may_be_unloaded(folder: Path) -> None:
    for given in ([], ["smollm2"], [str(folder / "tiny")], ["owner/name"], [str(folder / "none")]):
        assert named_models(given, True) is None
    assert named_models([], False) == {nano_path().name: None}
    assert named_models(["smollm2"], False) == {"smollm2": "smollm2"}


def test_names_are_given_or_those_of_folders_and_files(folder: Path) -> None:
    tiny = str(folder / "tiny")
    assert named_models([f"a={tiny}"], True) == {"a": tiny}
    assert named_models([tiny, "owner/name"], True) == {"tiny": tiny, "owner/name": "owner/name"}
    listed = {
        "b.gguf": "b.gguf",
        "c-00001-of-00002.gguf": "c-00001-of-00002.gguf",
        "deep": "deep/d.Q8_0.gguf",
        "tiny": "tiny",
    }
    assert named_models([str(folder)], True) == {name: str(folder / path) for name, path in listed.items()}
    for given, word in (([tiny, tiny], "--model NAME="), (["a="], "NAME=MODEL"), (["=a"], "NAME=MODEL")):
        with pytest.raises(OutpaceError, match=word):
            named_models(given, True)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    own = save_llama(tmp_path / "a=b")
    assert named_models([str(own)], True) is None
    assert named_models([str(own)], False) == {"a=b": str(own)}


def test_memory_is_that_of_the_files(folder: Path) -> None:
    (weights,) = weights_of(str(folder / "tiny"))
    size = weights.stat().st_size
    assert bytes_of(str(folder / "tiny"), "float32", "cpu") == int(1.25 * size * 2)
    assert bytes_of(str(folder / "tiny"), "float64", "cpu") == int(1.25 * size * 3)
    assert bytes_of(str(folder / "c-00001-of-00002.gguf")) == int(1.25 * 2 * 16)
    (folder / "e-00001-of-00002.gguf").write_bytes(b"1")
    with pytest.raises(OutpaceError, match=r"not whole.*e-00002-of-00002"):
        bytes_of(str(folder / "e-00001-of-00002.gguf"))
    with pytest.raises(OutpaceError, match="outpace pull owner/name"):
        weights_of("owner/name:Q4_0")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--served-model-name", "a"], "--served-model-name is for one model"),
        (["--device-map", "auto"], "--device-map is for one model"),
        (["--parallel", "draft"], "--parallel is for one model"),
        (["--llamacpp", "threads=1"], "--llamacpp is for .gguf files"),
        (["--model", "nowhere/"], "no such folder"),
    ],
)
def test_options_of_one_model_are_refused_by_name(folder: Path, options: list[str], word: str) -> None:
    given = ["serve", "--model", str(folder / "tiny"), "--models-idle", "5", "--port", "0", *options]
    found = CliRunner().invoke(app, given)
    assert found.exit_code and word in " ".join(found.output.split()), found.output


def test_options_of_transformers_are_refused_for_a_gguf_file(folder: Path) -> None:
    pytest.importorskip("llama_cpp")
    found = CliRunner().invoke(
        app, ["serve", "--model", str(folder / "b.gguf"), "--models-max", "1", "--stock"]
    )
    assert found.exit_code and "--stock is for transformers models" in " ".join(found.output.split())
