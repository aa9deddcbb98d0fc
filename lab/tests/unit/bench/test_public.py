"""Public sets of prompts, from a folder or the hub."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outpace.bench.suites import load_suite
from outpace.core import OutpaceError
from outpace_lab.bench import public

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
    with pytest.raises(OutpaceError, match="is not gsm8k as it is published: there is no entry 'question'"):
        load_suite("gsm8k", tmp_path)
    write(tmp_path / "speed_bench.jsonl", SPEED_BENCH[1:])
    with pytest.raises(OutpaceError, match="the script of its makers"):
        load_suite("speed_bench", tmp_path)


def test_without_a_folder_and_without_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTPACE_DATA", raising=False)
    monkeypatch.setattr(public, "find_spec", lambda name: None)
    with pytest.raises(OutpaceError, match=r"--data DIR or OUTPACE_DATA.*pip install .*\[datasets\]"):
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
