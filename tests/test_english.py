"""Plain English: docstrings begin with an action or a noun phrase, and prose uses the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FOLDERS = ("src", "tests", "benchmarks", "examples", "integrations", "tools")
ALL = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

# A docstring that begins like this is a question, a condition or a fragment.
_FIRST = re.compile(
    r"(what|whatever|whether|who|whoever|whose|whom|which|when|where|how|why|if|as|of|so|nothing|nobody)\b",
    re.IGNORECASE,
)
# Phrase -> what to write instead.
_BANNED = {
    r"stands?|stood|standing": "is accepted; represents",
    r"comes? true|came true": "is right, is accepted",
    r"so many(?! more)": "N, at most N",
    r"whoever|somebody": "the caller, the user, a thread",
    r"says?|said|saying": "predicts, emits, states",
    r"(is|are|was|were|be) (asked|wanted|told) of": "is requested from",
    r"without a (word|question)": "without a message, without a check",
    r"dear|dearer|dearest|dearly": "expensive",
    r"seldom": "rarely",
    r"(go|goes|went|gone|going) on": "continue",
    r"(go|goes|went) in(to)? behind": "follow",
    r"at hand": "available",
    r"or else": "otherwise",
    r"(?<!there )(is|are) no (multiples?|sandbox|folder|list|environment|benchmark|tree|plain)": "is not a",
    r"half a (character|file|line)": "part of",
    r"gives? back|given back": "frees, returns",
    r"lies?|lain": "is",
}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of docstrings, comments, and strings of several words."""
    tree = ast.parse(source)
    yield from docstrings(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.strip().count(" ") > 1
        ):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def questions(source: str) -> list[str]:
    """List the docstrings whose first line is no action and no noun phrase."""
    found = docstrings(ast.parse(source))
    return [f"{line}: {text.splitlines()[0]}" for line, text in found if _FIRST.match(text)]


def riddles(source: str) -> list[str]:
    """List the banned phrases in a source, each with what to write instead."""
    found = []
    for line, text in prose(source):
        plain = re.sub(r"``.*?``|`.*?`", "", text, flags=re.DOTALL)  # names in code may be anything
        for phrase, better in _BANNED.items():
            if matched := re.search(rf"\b({phrase})\b", plain, re.IGNORECASE):
                found.append(f"{line}: {matched[0]!r} -> {better!r}")
    return found


def found_in(files: Iterable[Path], check: Callable[[str], list[str]]) -> list[str]:
    """List what a check finds, with the files' paths."""
    return [f"{file.relative_to(ROOT)}:{one}" for file in files for one in check(file.read_text("utf-8"))]


def test_docstrings_begin_with_an_action_or_a_noun_phrase() -> None:
    assert not found_in(ALL, questions)


def test_the_words_are_those_of_the_field() -> None:
    assert not found_in(SOURCES, riddles)


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ('"""What a draft is for."""', questions),
        ('def f() -> None:\n    """If a node stands."""', questions),
        ('"""Check whoever asks."""', riddles),
        ("x = 1  # a row is dear here", riddles),
        ('raise ValueError(f"the tree of {x} cannot go on")', riddles),
        ('print("8 is no multiple of 3")', riddles),
    ],
)
def test_a_mistake_is_seen(line: str, check: Callable[[str], list[str]]) -> None:
    assert check(line)
