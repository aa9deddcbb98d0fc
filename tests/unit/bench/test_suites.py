"""The prompts that come with the package, public sets, and a user's file."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from outpace import names
from outpace.bench import suites
from outpace.bench.suites import COPYING, load_suite, load_together
from outpace.core import OutpaceError


@pytest.mark.parametrize("name", COPYING)
def test_twenty_prompts_with_their_references(name: str) -> None:
    items = load_suite(name).items
    assert len({item.id for item in items}) == len({item.turns for item in items}) == len(items) == 20
    for item in items:
        (text,), (prompt,) = item.references, item.turns
        pattern = {
            "rewriting": r"Text: (.*)\nCorrected:",
            "retrieval": r"Document: (.*)\nQuestion: [^\n]+\nAnswer:",
        }[name]
        found = re.fullmatch(pattern, prompt)
        assert found is not None and found[1] == text
        assert item.ends and not item.chat and item.category == name


def test_builtin_is_sixty_prompts_over_seven_categories() -> None:
    items = load_suite("builtin").items
    assert len({item.id for item in items}) == len({item.turns for item in items}) == len(items) == 60
    assert Counter(item.category for item in items) == {
        "conversation": 10,
        "translation": 8,
        "summarization": 8,
        "qa": 8,
        "math": 10,
        "rag": 8,
        "code": 8,
    }
    for item in items:
        assert item.chat == (item.category == "conversation") == (len(item.turns) == 2)
        assert not item.ends and not item.references


def test_a_limit_takes_from_each_category_in_turn() -> None:
    suite = load_suite("builtin")
    assert Counter(item.category for item in suite.first(9).items) == {
        **dict.fromkeys(("conversation", "translation"), 2),
        **dict.fromkeys(("summarization", "qa", "math", "rag", "code"), 1),
    }
    assert suite.first(60) == suite.first(None) == suite.first(100) == suite
    kept = [item.id for item in suite.first(20).items]
    assert kept == [item.id for item in suite.items if item.id in kept]


def test_several_suites_as_one_take_turns() -> None:
    both = load_together("rewriting, retrieval")
    assert both.name == "rewriting,retrieval"
    assert [item.category for item in both.items[:4]] == ["rewriting", "retrieval"] * 2
    assert len({item.id for item in both.items}) == len(both.items) == 40
    assert load_together("builtin") == load_suite("builtin")
    with pytest.raises(OutpaceError, match="a suite twice"):
        load_together("builtin, builtin")


def test_an_unknown_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "installed", lambda group: {})
    with pytest.raises(OutpaceError, match="builtin, rewriting, retrieval, file:PATH"):
        load_suite("poetry")
    with pytest.raises(OutpaceError, match="gsm8k is in outpace-lab: pip install "):
        load_suite("gsm8k")


def test_a_suite_of_another_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"sayings": EntryPoint("sayings", "unit.bench.told:sayings", f"outpace.{'suites'}")}
    for module in (suites, names):
        monkeypatch.setattr(module, "installed", lambda group: found if group == "suites" else {})
    (item,) = load_suite("sayings", tmp_path).items
    assert item.turns == (str(tmp_path),)
    with pytest.raises(OutpaceError, match="builtin, rewriting, retrieval, sayings, file:PATH"):
        load_suite("poetry")


def write(file: Path, values: list[Any]) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")
    return file


# -- a user's file ---------------------------------------------------------------------------------------


def test_every_kind_of_line(tmp_path: Path) -> None:
    lines = [
        "text",
        {"prompt": "p", "category": "x", "references": ["r"]},
        {"question": "q", "id": "mine"},
        {"turns": ["a", "b"]},
        {"tokens": [1, 2]},
        {"prompt": "c", "chat": True},
    ]
    items = load_suite(f"file:{write(tmp_path / 'some.jsonl', lines)}").items
    assert [(item.turns, item.tokens, item.chat) for item in items] == [
        (("text",), (), False),
        (("p",), (), False),
        (("q",), (), False),
        (("a", "b"), (), True),
        ((), (1, 2), False),
        (("c",), (), True),
    ]
    assert [item.rounds for item in items] == [1, 1, 1, 2, 1, 1]
    assert [item.id for item in items] == ["some-1", "some-2", "mine", "some-4", "some-5", "some-6"]
    assert (items[1].category, items[1].references, items[0].category) == ("x", ("r",), "all")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("3", "neither a string nor an object"),
        ("{}", 'no "prompt", "question", "turns" or "tokens"'),
        ('""', 'no "prompt"'),
        ('{"turns": []}', '"turns" is empty'),
        ('{"turns": "text"}', 'no "prompt"'),
        ('{"tokens": ["a"]}', "not a list of token ids"),
        ('{"tokens": []}', "not a list of token ids"),
        ('{"prompt": "a", "references": "b"}', "not a list of non-empty strings"),
        ("{", "line 1: not JSON"),
        ('"good"\n\n{"turns": ["a", "b \\ud800"]}', "line 3: '\\ud800' is an unpaired surrogate"),
        ('{"prompt": "a", "references": ["\\udfff"]}', "line 1: '\\udfff' is an unpaired surrogate"),
        (10**5 * "[", "line 1: not JSON that can be read: nested too deep"),
        ("", "contains no prompt"),
        ('"a"\n{"prompt": "b", "id": "f-1"}', "have the id of another"),
    ],
)
def test_a_line_that_is_no_prompt(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(line, "utf-8")
    with pytest.raises(OutpaceError, match=re.escape(reason)) as caught:
        load_suite(f"file:{file}")
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="no such file"):
        load_suite(f"file:{tmp_path / 'missing.jsonl'}")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(OutpaceError, match="not UTF-8"):
        load_suite(f"file:{tmp_path / 'bytes.jsonl'}")
    packed = gzip.compress(b'"a prompt"\n' * 50)
    flipped = packed[:10] + b"\xff" + packed[11:]
    with pytest.raises(zlib.error):
        gzip.decompress(flipped)
    for broken in (b"no gzip", packed[:-12], flipped):
        (tmp_path / "broken.gz").write_bytes(broken)
        with pytest.raises(OutpaceError, match=r"cannot read .*broken\.gz: "):
            load_suite(f"file:{tmp_path / 'broken.gz'}")


def test_a_whole_character_of_two_escapes_is_one(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(r'"a \ud83d\ude00"', "utf-8")
    assert load_suite(f"file:{file}").items[0].turns == ("a \U0001f600",)
