"""Documents from files and folders: what is read, where a document ends, and which mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outpace.core import OutpaceError
from outpace_lab.cli import corpus


def documents(file: Path, field: str = "text", end: int | None = None) -> list[str | list[int]]:
    """The documents that the pieces of a file form."""
    found: list[str | list[int]] = []
    parts: list[str | list[int]] = []
    for piece in corpus.read(file, field, end):
        parts.append(piece.content if isinstance(piece.content, str) else [int(t) for t in piece.content])
        if piece.last:
            found.append("".join(parts) if isinstance(parts[0], str) else [t for part in parts for t in part])
            parts = []
    assert not parts, "the last document does not end"
    return found


def test_a_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffGrüße,\r\nworld\n".encode())
    assert documents(tmp_path / "a.txt") == ["Grüße,\nworld\n"]
    (tmp_path / "empty.txt").write_text("", "utf-8")
    assert documents(tmp_path / "empty.txt") == []


def test_a_long_text_comes_in_pieces_cut_at_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_LETTERS", 10)
    text = "".join(f"line {number}\n" for number in range(50)) + "x" * 95
    (tmp_path / "a.txt").write_text(text, "utf-8")
    pieces = list(corpus.read(tmp_path / "a.txt", "text", None))
    assert "".join(str(piece.content) for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(str(piece.content).endswith("\n") for piece in pieces if "line" in str(piece.content))
    assert max(len(str(piece.content)) for piece in pieces) <= 20  # also where a line does not end
    assert sum(piece.size for piece in pieces) == len(text)


def test_lines_are_documents(tmp_path: Path) -> None:
    lines = ["one", [1, 2], {"text": "two", "id": 7}, {"text": [3]}, []]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", "utf-8")
    assert documents(file) == ["one", [1, 2], "two", [3], []]
    assert sum(piece.size for piece in corpus.read(file, "text", None)) == file.stat().st_size - 1
    file.write_text('{"body": "x"}', "utf-8")
    assert documents(file, field="body") == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: not JSON"),
        (r'{"text": "\udc00"}', r"line 2: '\\udc00' is an unpaired surrogate"),
        ('{"body": "x"}', "line 2: no 'text'; name the field that contains the text with --field"),
        ("17", "line 2: neither a text nor a list"),
        ("[1, true]", "line 2: neither a text nor a list"),
        ("[1.5]", "line 2: neither a text nor a list"),
        ('{"text": null}', "line 2: neither a text nor a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'"good"\n{line}\n', "utf-8")
    with pytest.raises(OutpaceError, match=message):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("together", [3, 1 << 20])
def test_arrays_of_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type[np.integer], together: int
) -> None:
    monkeypatch.setattr(corpus, "_TOKENS", together)
    file = tmp_path / "a.npy"
    np.save(file, np.array([5, 6, 0, 7, 0, 0, 8, 9], dtype))
    assert documents(file) == [[5, 6, 0, 7, 0, 0, 8, 9]]
    assert documents(file, end=0) == [[5, 6, 0], [7, 0], [0], [8, 9]]
    assert documents(file, end=9) == [[5, 6, 0, 7, 0, 0, 8, 9]]
    np.save(file, np.array([[5, 6, 7, 8], [1, 2, 3, 4]], dtype))
    assert documents(file) == [[5, 6, 7, 8], [1, 2, 3, 4]]
    np.save(file, np.array([], dtype))
    assert documents(file) == []


@pytest.mark.parametrize("array", [np.array([1.5]), np.zeros((2, 2, 2), int), np.array(["a"]), np.array(3)])
def test_arrays_that_hold_no_token_ids(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(OutpaceError, match="is not an array of token ids"):
        documents(tmp_path / "a.npy")


def test_a_file_that_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_text("hello", "utf-8")
    with pytest.raises(OutpaceError, match="is not an array of token ids"):
        documents(tmp_path / "a.npy")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'"caf\xe9"')
    with pytest.raises(OutpaceError, match="is not UTF-8 text"):
        documents(tmp_path / name)


def test_a_folder_is_searched_for_texts(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/c.txt", "a.py", ".git/config", "b/.hidden"):
        (tmp_path / name).write_text("text", "utf-8")
    (tmp_path / "long.txt").write_bytes(
        b"x" + "ü".encode() * 8192
    )  # a letter over the end of what is sniffed
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "zeros.bin").write_bytes(bytes(10))
    np.save(tmp_path / "tokens.npy", np.arange(3))
    files, passed = corpus.find([tmp_path])
    assert [file.name for file in files] == ["a.py", "c.txt", "long.txt", "tokens.npy"]
    assert [file.name for file in passed] == ["image.png", "zeros.bin"]
    assert corpus.find([tmp_path / "image.png"])[0] == [tmp_path / "image.png"]  # asked for by name


def test_sources_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="there is no text in"):
        corpus.find([tmp_path])
    with pytest.raises(OutpaceError, match="no such file or folder"):
        corpus.find([tmp_path, tmp_path / "nothing"])
