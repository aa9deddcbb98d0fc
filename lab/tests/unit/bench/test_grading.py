"""Grades: numbers, programs that run with limits, overlap; and their comparison with plain decoding's."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

from outpace.bench.items import Expected, Item, Suite
from outpace.bench.run import Measured, MethodRuns, Settings
from outpace.bench.runs import MethodRun
from outpace.core import OutpaceError
from outpace.loading import Loaded
from outpace_lab.bench import grading
from outpace_lab.bench.grading import Quality, check_gradable, grader_of, last_number, passes
from outpace_lab.bench.results import lab_rows_of
from unit.bench.told import Told


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9 * 2 = $18 a day.\n#### 18", "18"),
        ("She makes $1,200.50 in 3 days: 1,200.50", "1200.50"),
        (" It is -7.", "-7"),
        (" 18\n\nQuestion: How many are 5?\nAnswer: 6", "18"),
        ("none at all", None),
    ],
)
def test_the_last_number_of_an_answer(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("assert 1 + 1 == 2", True),
        ("from typing import List\nimport math, re, collections\nprint('x' * 100000)", True),
        ("assert 1 + 1 == 3", False),
        ("def f(:", False),
        ("raise SystemExit(0)", False),
        ("x = bytearray(3 << 29)", False),
        ("open('a', 'w')", False),
        ("import os\nos.open('a', os.O_CREAT | os.O_WRONLY)", False),
        ("import os\nos.system('true')", False),
        ("import os\nos.fork()", False),
        ("import subprocess\nsubprocess.run(['true'])", False),
        ("import socket\nsocket.socket()", False),
        ("import shutil\nshutil.rmtree('nowhere', ignore_errors=True)", False),
        ("import torch", False),
    ],
)
def test_programs_run_with_limits(program: str, passed: bool) -> None:
    assert passes(program) == passed


def test_a_program_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_SECONDS", 1)
    assert not passes("while True: pass")
    monkeypatch.setattr(grading, "_WALL", 0.5)
    assert not passes("import time\ntime.sleep(60)")


def answered(model: Loaded, item: Item, text: str) -> float | None:
    return grader_of(model)(item, model.plain_tokens(text))


def test_completions_are_cut_where_the_function_ends(model: Loaded) -> None:
    expected = Expected("program", "def check(f):\n    assert f(2) == 4\ncheck(twice)")
    item = Item("a", "code", ("def twice(x):\n",), expected=expected)
    right = "    return 2 * x\n"
    assert answered(model, item, right) == 1
    assert answered(model, item, right + "def rest(:\n") == answered(model, item, right + "# more\n(") == 1
    assert answered(model, item, "    return x\n") == 0
    assert answered(model, Item("b", "code", ("x",)), right) is None


def test_equal_answers_are_graded_once(model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(grading, "passes", lambda program: bool(ran.append(program)) or True)
    grade = grader_of(model)
    item = Item("a", "code", ("def f():\n",), expected=Expected("program", "check(f)"))
    for text in (" return 1", " return 1", " return 2"):
        assert grade(item, model.plain_tokens(text)) == 1
    assert [program.splitlines()[1] for program in ran] == [" return 1", " return 2"]
    assert all(program.endswith("\ncheck(f)\n") for program in ran)


def test_overlap_is_rouge_l(model: Loaded) -> None:
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    item = Item("a", "summarization", ("x",), expected=Expected("overlap", "a b c d"))
    # The longest common subsequence is a, c, d: precision 3/3, recall 3/4.
    assert answered(model, item, "a c d") == pytest.approx(2 * 0.75 / 1.75)


def test_better_and_worse_than_plain_decoding() -> None:
    items = tuple(Item(name, "x", ("?",), expected=Expected("number", name)) for name in "1235")
    items += (Item("4", "x", ("?",)),)
    runs = {
        "none": [[1], [2], [0], [0], [0]],  # right, right, wrong, wrong, not graded
        "other": [[0], [2], [3], [5], [1]],  # wrong, right, right, right, not graded
    }
    traces = [
        MethodRuns(Told(name, []), [[[MethodRun([output], 1.0, 0.5, 1)]] for output in outputs])
        for name, outputs in runs.items()
    ]
    groups = [(item,) for item in items]
    found = Measured(Suite("s", items, "here"), 1, Settings(4), groups, [[[[9]]]] * 5, traces)

    def grader(item: Item, answer: list[int]) -> float | None:
        return None if item.expected is None else float(str(answer[0]) == item.expected.text)

    none, other = lab_rows_of(found, lambda asked, output: 0.0, None, grader)
    assert none.quality == (Quality("number", 4, 0.5, 0.5, 0, 0),)
    assert other.quality == (Quality("number", 4, 0.75, 0.5, 2, 1),)
    assert lab_rows_of(found, lambda asked, output: 0.0, None)[0].quality == ()


def test_what_cannot_be_graded_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def suite(expected: Expected | None) -> list[Suite]:
        return [Suite("s", (Item("a", "x", ("?",), expected=expected),), "here")]

    with pytest.raises(OutpaceError, match="nothing to grade"):
        check_gradable(suite(None), True)
    program = suite(Expected("program", ""))
    with pytest.raises(OutpaceError, match="allow it with --run-code"):
        check_gradable(program, False)
    check_gradable(program, True)
    monkeypatch.setattr(grading, "find_spec", lambda name: None)
    with pytest.raises(OutpaceError, match="needs a POSIX system"):
        check_gradable(program, True)
    with pytest.raises(OutpaceError, match=r"pip install .*lab\[grade\]"):
        check_gradable(suite(Expected("overlap", "")), False)


def test_the_worker_is_a_script_that_imports_nothing_of_outpace() -> None:
    text = Path(grading._WORKER).read_text("utf-8")
    assert not re.search(r"^\s*(import|from) outpace", text, re.MULTILINE)
