"""The prompts that come with the package, public sets, and a user's file."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outpace.bench.suites import COPYING, load_suite, load_together
from outpace.core import OutpaceError
from outpace_lab.bench import public


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


def test_an_unknown_suite() -> None:
    with pytest.raises(OutpaceError, match="builtin, rewriting, retrieval, spec_bench"):
        load_suite("poetry")


# -- public sets -----------------------------------------------------------------------------------------

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
    {"question_id": 241, "category": "translation", "turns": ["three"], "reference": ["3"]},
]
GSM8K = [{"question": "How many?", "answer": "#### 1"}, {"question": "How much?", "answer": "#### 2"}]
HUMANEVAL = [
    {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): 1"}
]
SPEED_BENCH = [
    {"question_id": "a", "category": "coding", "turns": ["x", "y"]},
    {"question_id": "b", "category": "math", "turns": [f"{public._NOT_THERE} FROM THE SOURCE"]},
]


def write(file: Path, values: list[Any]) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")
    return file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "spec_bench.jsonl", SPEC_BENCH)
    write(tmp_path / "gsm8k_test_200.jsonl", GSM8K)
    write(tmp_path / "gsm8k_train.jsonl", [{"question": "train", "answer": ""}])
    write(tmp_path / "speed_bench.jsonl", SPEED_BENCH)
    packed = gzip.compress(json.dumps(HUMANEVAL[0]).encode())
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(packed)
    return tmp_path


def test_public_sets_from_a_folder(data: Path) -> None:
    spec = load_suite("spec_bench", data)
    assert [(item.category, item.turns, item.chat) for item in spec.items] == [
        ("mt_bench", ("one", "two"), True),
        ("translation", ("three",), True),
    ]
    assert spec.source == str(data / "spec_bench.jsonl")
    # MT-Bench is a part of Spec-Bench's file.
    assert [(item.category, item.turns) for item in load_suite("mt_bench", data).items] == [
        ("writing", ("one", "two"))
    ]
    assert [item.turns for item in load_suite("gsm8k", data).items] == [
        ("Question: How many?\nAnswer:",),
        ("Question: How much?\nAnswer:",),
    ]
    assert [(item.turns, item.chat) for item in load_suite("humaneval", data).items] == [
        (("def f():\n",), False)
    ]
    expected = [
        [None if item.expected is None else (item.expected.kind, item.expected.text) for item in found.items]
        for found in (spec, load_suite("gsm8k", data), load_suite("humaneval", data))
    ]
    assert expected == [
        [None, ("overlap", "3")],
        [("number", "#### 1"), ("number", "#### 2")],
        [("program", "def check(f): 1\ncheck(f)")],
    ]
    speed = load_suite("speed_bench", data)
    assert [item.id for item in speed.items] == ["a"] and speed.left_out == 1


def test_a_file_of_mt_bench_alone_comes_first(data: Path) -> None:
    write(data / "mt_bench.jsonl", [{"prompt_id": 1, "category": "stem", "prompt": ["a", "b"]}])
    assert [item.turns for item in load_suite("mt_bench", data).items] == [("a", "b")]


def test_the_environment_names_the_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_DATA", str(data))
    assert len(load_suite("gsm8k").items) == 2


def test_what_is_not_in_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match=r"gsm8k_test\*.jsonl.*hub"):
        load_suite("gsm8k", tmp_path)
    with pytest.raises(OutpaceError, match="no such folder"):
        load_suite("gsm8k", tmp_path / "missing")
    write(tmp_path / "gsm8k_test.jsonl", [{"text": "no question"}])
    with pytest.raises(OutpaceError, match="is not gsm8k as it is published: 'question'"):
        load_suite("gsm8k", tmp_path)
    write(tmp_path / "speed_bench.jsonl", SPEED_BENCH[1:])
    with pytest.raises(OutpaceError, match="the script of its makers"):
        load_suite("speed_bench", tmp_path)


def test_without_a_folder_and_without_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTPACE_DATA", raising=False)
    monkeypatch.setattr(public, "find_spec", lambda name: None)
    with pytest.raises(OutpaceError, match=r"--data DIR or OUTPACE_DATA.*outpace\[datasets\]"):
        load_suite("humaneval")


def test_the_hub_answers_through_its_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Loader:
        @staticmethod
        def load_dataset(**options: str) -> list[Any]:
            asked.append(options)
            if options["path"] == "openai/gsm8k":
                return GSM8K
            raise ConnectionError("no route to the hub\nmore")

    monkeypatch.delenv("OUTPACE_DATA", raising=False)
    monkeypatch.setattr(public, "find_spec", lambda name: name == "datasets")
    monkeypatch.setitem(__import__("sys").modules, "datasets", Loader)
    assert len(load_suite("gsm8k").items) == 2
    assert asked == [{"path": "openai/gsm8k", "name": "main", "split": "test"}]
    with pytest.raises(OutpaceError, match=r"cannot be fetched .*\(no route to the hub\); give --data"):
        load_suite("humaneval")


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
