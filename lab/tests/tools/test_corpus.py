"""The training corpus of the embedded models."""

from __future__ import annotations

import json
import random
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corpus import (
    DIALOGUE_FILE,
    END_OF_TEXT,
    clean_code,
    detokenize,
    documented_functions,
    is_plain_code,
    make_correction,
    make_retrieval,
    permissive_licence,
    read_dialogue,
    read_gsm8k,
    split,
)

PARTS = {
    "prose": ["The mill was built in 1820. It burned down in 1871. A school stands there today."],
    "gsm8k": [
        "Question: Ann has 3 hens. Each lays 5 eggs. How many eggs are there?\nAnswer: 15",
        "Question: Bob has 2 cats. He buys 4 more. How many are there now?\nAnswer: 6",
    ],
    "function": ['def add(a, b):\n    """Add."""\n    total = a + b\n\n    return total'],
}


def distribution(**fields: str | list[str]) -> Any:
    """A package whose metadata has these fields (an underscore represents a hyphen)."""
    metadata = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            metadata[name.replace("_", "-")] = value
    return SimpleNamespace(metadata=metadata)


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License_Expression": "MIT"}, "MIT"),
        ({"License_Expression": "Apache-2.0 WITH LLVM-exception"}, "Apache-2.0 WITH LLVM-exception"),
        ({"License_Expression": "MIT OR GPL-3.0-only"}, None),
        ({"Classifier": ["License :: OSI Approved :: BSD License", "Topic :: Software"]}, "BSD"),
        ({"Classifier": ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]}, None),
        (
            {
                "Classifier": [
                    "License :: OSI Approved :: MIT License",
                    "License :: Proprietary",
                ]
            },
            None,
        ),
        ({"License": "MIT"}, "MIT"),
        ({"License": "see the file"}, None),
        ({}, None),
    ],
)
def test_only_packages_with_a_permissive_licence_are_read(fields: Any, licence: str | None) -> None:
    assert permissive_licence(distribution(**fields)) == licence


def test_a_split_holds_some_texts_out_and_loses_none() -> None:
    texts = [str(number) for number in range(500)]
    held_out, train = split(texts, random.Random(0))
    assert len(held_out) == 10
    assert sorted(held_out + train) == sorted(texts)


def test_gsm8k_loses_its_calculator_notes(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    problem = {"question": " How many? ", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 24"}
    path.write_text(json.dumps(problem) + "\n")
    assert read_gsm8k(path) == ["Question: How many?\nAnswer: 48/2 = 24 clips.\n#### 24"]


def test_each_turn_of_the_assistant_ends_the_text() -> None:
    conversations = read_dialogue(DIALOGUE_FILE)
    assert len(conversations) > 200
    for text in conversations:
        assert text.startswith("User: ")
        # The end of the last turn is the end of the document, which the encoding adds.
        assert text.count(END_OF_TEXT) == text.count("\nAssistant: ") - 1


def test_wikitext_becomes_english_again() -> None:
    line = 'He wrote " The Mill " , a @-@ b , in the band \'s 1 @,@ 000 th year ( 1999 ) .'
    assert detokenize(line) == 'He wrote "The Mill", a-b, in the band\'s 1,000 th year (1999).'


def test_code_loses_the_notice_at_its_top() -> None:
    assert clean_code("# Copyright\n# All rights\n\nimport os   \n\n\tx = 1\n") == "import os\n\n    x = 1\n"
    assert is_plain_code("import os\n")
    assert not is_plain_code("1234567890\n")
    assert not is_plain_code(f"x = '{END_OF_TEXT}'\n")


def test_functions_with_a_docstring_are_cut_out_without_indentation() -> None:
    method = '    def f(self):\n        """Do."""\n        a = 1\n        b = 2\n        return a + b\n'
    bare = "def g():\n    a = 1\n    b = 2\n    c = 3\n    return a\n"
    assert documented_functions(f"class C:\n{method}\n\n{bare}") == [
        'def f(self):\n    """Do."""\n    a = 1\n    b = 2\n    return a + b'
    ]
    assert documented_functions("def broken(:\n") == []


def test_what_is_to_be_copied_is_in_the_prompt() -> None:
    rng = random.Random(0)
    for _ in range(200):
        document, answer = make_retrieval(PARTS, rng).rsplit("\nAnswer: ", 1)
        assert answer in document
        text, passage = make_correction(PARTS, rng).split("\nCorrected: ")
        assert text.startswith("Text: ")
        changed = [a != b for a, b in zip(text[6:].split(), passage.split(), strict=True)]
        assert sum(changed) < len(changed) / 2
