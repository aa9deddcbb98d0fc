"""Figures in the documents: few in the README, at most two in a sentence, tables where there are more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# Measurements are of figures, the server's limits and decisions quote them.
PROSE = [README, *(ROOT / "docs").glob("*.md")]
PROSE += [
    page for folder in ("guides", "concepts", "reference") for page in (ROOT / "docs" / folder).glob("*.md")
]
PROSE += [
    page
    for page in (ROOT / "lab/docs").glob("*.md")
    if page.stem not in ("measurements", "measure", "papers")
]
_SPELLED = "two|three|four|five|six|seven|eight|nine|ten"
# A number by itself: not in a name (SmolLM2-135M, bfloat16), nor the number of a list's point.
_NUMBER = re.compile(rf"(?<![\w.,:-])(?:\d[\d.,]*\b|(?:{_SPELLED})\b)(?![\w-])", re.IGNORECASE)


def prose(text: str) -> str:
    """The text that is read as sentences: no code, no generated part, no addresses of links."""
    text = re.sub(r"<!-- [^\n]*written by.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|^    [^\n]*|`[^`\n]*`|^ *\d+\. ", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def numbers(text: str) -> list[str]:
    return _NUMBER.findall(text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text without its tables and headings."""
    lines = [line for line in prose(text).splitlines() if not line.lstrip().startswith(("|", "#"))]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*- )", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def density(text: str) -> float:
    """Numbers per 100 words."""
    return 100 * len(numbers(prose(text))) / len(re.findall(r"[A-Za-z][\w'-]*", prose(text)))


def crowded(text: str) -> list[str]:
    """The sentences with more than two numbers."""
    return [sentence for sentence in sentences(text) if len(numbers(sentence)) > 2]


def test_the_readme_is_short_and_has_few_figures() -> None:
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 80
    assert density(text) <= 3


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_a_list_of_figures(page: Path) -> None:
    assert crowded(page.read_text("utf-8")) == []


def test_figures_are_counted() -> None:
    assert numbers("SmolLM2-135M in bfloat16 takes 1.5 to two of 4,096, x86-64") == ["1.5", "two", "4,096"]
    assert density("a number 7 among words") == 25
    assert crowded("It takes 1, 2 or 3.\n\n| 1 | 2 | 3 |\n\n```\n1 2 3\n```\n") == ["It takes 1, 2 or 3."]
