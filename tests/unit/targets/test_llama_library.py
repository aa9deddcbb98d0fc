"""Messages if llama-cpp-python is missing, too old or does not load, and for options of other kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outpace.core import OutpaceError
from outpace.targets.llamacpp import library as llama_library
from outpace.targets.llamacpp.options import LlamaCppOptions

# The function behind the cache: the library that other tests use stays.
load = llama_library.library.__wrapped__


def test_a_missing_library_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(OutpaceError, match=r'is not installed: pip install .*\[llamacpp\]" --upgrade '):
        load()


@pytest.mark.parametrize("version", ["0.3.35", "0.2.90", None])
def test_an_old_library_is_told_before_it_is_used(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ModuleType("llama_cpp")
    if version is not None:
        old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", old)
    with pytest.raises(OutpaceError, match=r"is too old, 0\.3\.36 or later is needed: pip install "):
        load()


def test_a_library_that_does_not_load_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise OSError('libgomp.so.1: cannot open')")
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OutpaceError, match=r"installed, but does not load: libgomp\.so\.1"):
        load()


def test_files_that_are_no_models_are_refused_without_the_library(tmp_path: Path) -> None:
    folder, text = tmp_path / "folder.gguf", tmp_path / "text.gguf"
    folder.mkdir()
    text.write_text("hello")
    missing = tmp_path / "missing.gguf"
    for path, reason in ((folder, "is a folder"), (text, "not a GGUF file"), (missing, "no such file")):
        with pytest.raises(OutpaceError, match=reason):
            llama_library.check_file(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flash_attn", "auto"),
        ("repack", "auto"),
        ("threads", "2"),
        ("n_gpu_layers", None),
    ],
)
def test_values_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OutpaceError, match=f"{name} must be (true or false|a whole number), not {value!r}"):
        LlamaCppOptions(**{name: value})


@pytest.mark.parametrize("value", [None, 1, "yes"])
@pytest.mark.parametrize("name", ["check", "exact"])
def test_options_of_the_self_test_of_other_kinds(name: str, value: object) -> None:
    with pytest.raises(OutpaceError, match=f"{name} must be true, false or auto, not {value!r}"):
        LlamaCppOptions(**{name: value})  # type: ignore[arg-type]
