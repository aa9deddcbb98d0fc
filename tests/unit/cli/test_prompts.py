"""Prompts and their references from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.cli.prompts import read
from outpace.core import OutpaceError


def test_references_come_from_files_and_from_lines(tmp_path: Path) -> None:
    file, first, second = tmp_path / "prompts.jsonl", tmp_path / "a.txt", tmp_path / "b.txt"
    rows = [{"prompt": "one", "references": ["x", "y"]}, {"prompt": "two"}, "three"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    first.write_text("first\nlines\n", "utf-8")
    second.write_text("second", "utf-8")
    found = read(None, file, [first, second])
    shared = ("first\nlines", "second")
    assert [prompt.references for prompt in found] == [("x", "y", *shared), shared, shared]
    assert [prompt.line for prompt in found] == [1, 2, 3]
    assert read("a prompt", None, [second])[0].references == ("second",)
    assert read("a prompt", None)[0].references == ()


@pytest.mark.parametrize("references", ["text", [1], [""], None, {"a": "b"}])
def test_references_of_a_line_are_texts(tmp_path: Path, references: object) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "one", "references": references}), "utf-8")
    with pytest.raises(OutpaceError, match='line 1: "references" is not a list of non-empty strings'):
        read(None, file)


def test_a_reference_that_is_empty_or_missing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n", "utf-8")
    with pytest.raises(OutpaceError, match="is empty"):
        read("a prompt", None, [tmp_path / "empty.txt"])
    with pytest.raises(OutpaceError, match="cannot read"):
        read("a prompt", None, [tmp_path / "missing.txt"])
