"""The tokenizer of a GGUF file in the cache: the same, of this file alone, made anew where it is broken."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.integrations.gguf as conversion

from gguf_files import gguf_file
from outpace.targets.gguf import GgufFile, tokenizer, tokenizer_of

TEXT = "def f(x):\n    return  x + 1  # café 数 🙂"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The files whose tokenizers were converted, with a cache in the test's folder and no least size."""
    files = list[str]()
    own = conversion.get_gguf_tokenizer
    monkeypatch.setattr(conversion, "get_gguf_tokenizer", lambda path: files.append(path) or own(path))
    monkeypatch.setattr(tokenizer, "_LARGE", 1)
    monkeypatch.setattr(tokenizer, "cache_path", lambda: tmp_path / "cache")
    return files


def _read(path: Path) -> tuple[Any, ...]:
    found = tokenizer_of(GgufFile(path))()
    ids = found(TEXT).input_ids
    chat = found.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
    return ids, found.decode(ids), chat, found.all_special_tokens, found.name_or_path


def _entry(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache" / "tokenizers").iterdir()
    return found


def test_it_is_converted_once(converted: list[str], tmp_path: Path) -> None:
    path = gguf_file("float32")
    first = _read(path)
    assert _read(path) == first
    assert len(converted) == 1


def test_a_changed_file_has_its_own(converted: list[str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(gguf_file("float32"), path)
    end = tokenizer_of(GgufFile(path))().eos_token
    raw = path.read_bytes()
    assert end.swapcase() != end and end.encode() in raw
    path.write_bytes(raw.replace(end.encode(), end.swapcase().encode()))
    assert tokenizer_of(GgufFile(path))().eos_token == end.swapcase()
    assert len(converted) == 2


def test_other_versions_have_their_own(converted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = _read(gguf_file("float32"))
    for module in (tokenizer.transformers, tokenizer.tokenizers):
        monkeypatch.setattr(module, "__version__", "0")
        assert _read(gguf_file("float32")) == first
    assert len(converted) == 3


def _cut(entry: Path) -> None:
    file = entry / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-9])


def _changed(entry: Path) -> None:
    file = entry / "tokenizer.json"
    file.write_text(file.read_text("utf-8").replace("return", "renurt"), "utf-8")


def _added(entry: Path) -> None:
    (entry / "added_tokens.json").write_text('{"return": 0}')


def _unsealed(entry: Path) -> None:
    (entry / "digest").unlink()


def _taken(path: Path, target: Path) -> Path:
    raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))


def _others(entry: Path) -> None:
    entry.chmod(0o777)


@pytest.mark.parametrize("spoil", [_cut, _changed, _added, _unsealed, _others])
def test_a_broken_entry_is_made_anew(
    converted: list[str], spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    path = gguf_file("float32")
    first = _read(path)
    spoil(_entry(tmp_path))
    assert [_read(path), _read(path)] == [first, first]
    assert len(converted) == 2  # the third time it is read again


def test_without_a_cache_it_is_converted(converted: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert _read(gguf_file("float32")) == _read(gguf_file("float32"))
    assert len(converted) == 2


def test_another_process_may_have_been_faster(
    converted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = _read(gguf_file("float32"))
    shutil.rmtree(_entry(tmp_path))
    monkeypatch.setattr(Path, "rename", _taken)
    assert _read(gguf_file("float32")) == first
    assert not list((tmp_path / "cache" / "tokenizers").iterdir())  # nothing of this process


def test_what_is_not_read_as_it_was_is_not_kept(
    converted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tokenizer._loaded

    def other(folder: Path) -> Any:
        found = own(folder)
        found.backend_tokenizer.normalizer = tokenizer.tokenizers.normalizers.NFC()
        return found

    monkeypatch.setattr(tokenizer, "_loaded", other)
    assert _read(gguf_file("float32")) == _read(gguf_file("float32"))
    assert len(converted) == 2
    assert not list((tmp_path / "cache" / "tokenizers").iterdir())


def test_old_ones_go(converted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tokenizer, "_MOST", 1)
    _read(gguf_file("float32"))
    _read(gguf_file("float16"))
    _entry(tmp_path)
