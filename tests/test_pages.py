"""The code and the commands of the README, the quickstart, guides and concepts run as they are typed.

A block in Python, or of commands (sh), runs after those before it on its page. One that cannot run here has a
title that says what it needs; one that shows a part of a program has the program's path as its title.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
PAGES += [page for folder in ("guides", "concepts") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
SLOW = {"measure.md", "add-a-drafter.md", "rag.md"}  # over 3 s
# What blocks need that no test has. Fewer are better: add here only what cannot be had.
NEEDS = {
    "needs a package index": 2,
    "needs a real model": 3,
    "needs a clone": 1,
    "needs a model of text and images": 1,
    "needs an encoder-decoder model": 1,
    "needs a GPU": 1,
    "needs Whisper": 1,
    "needs llama.cpp": 2,
    "needs minutes": 1,
    "needs a terminal of its own": 3,
    "needs the server": 1,  # tests/serve/test_clients.py runs it
}
FILES = {
    "prompts.jsonl": '"Once upon a time"\n{"prompt": "import os"}\n',
    "document.txt": "The bridge was built in 1893 by a firm from Leeds.\n",
    "answers.jsonl": '"It was built in 1893."\n"By a firm from Leeds."\n',
    "texts/story.txt": "Once upon a time there was a little fox.\n",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.title.startswith("needs ")


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = re.findall(r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    assert 2 * len(found) == len(re.findall("^```", text, re.MULTILINE)), "a fence that cannot be read"
    return [Block(*own) for own in found]


def is_part(shown: str, program: str) -> bool:
    """Whether a program has these lines in a row, perhaps indented, whatever is blank between them."""
    lines, whole = ([line for line in text.splitlines() if line.strip()] for text in (shown, program))
    return any("\n".join(indent + line for line in lines) in "\n".join(whole) for indent in ("", " " * 4))


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run code, and the tests that it defines."""
    before = set(names)
    exec(compile(block.text, "page", "exec"), names)
    for name in set(names) - before:
        if name.startswith("test_"):
            names[name]()


def run_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each line, which may set ``PYTHONPATH`` for itself."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        with monkeypatch.context() as patch:
            if words[0].startswith("PYTHONPATH="):
                patch.syspath_prepend(str(ROOT / words.pop(0).partition("=")[2]))
            assert words[0] == "outpace", line
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)


def cases() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(page, marks=slow if page.name in SLOW else (), id=str(page.relative_to(ROOT)))
        for page in PAGES
        if any(
            own.language in ("python", "sh") and not own.title.startswith("needs ") for own in blocks(page)
        )
    ]


@pytest.mark.parametrize("page", cases())
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page):
        if not block.runs:
            continue
        if block.title:
            program = ROOT / block.title
            assert is_part(block.text, program.read_text("utf-8")), block.text
            monkeypatch.syspath_prepend(str(program.parent))
            names = names or dict(vars(importlib.import_module(program.stem)))
        elif block.language == "python":
            run_python(block, names)
        else:
            run_commands(block, monkeypatch)


def test_what_blocks_need_is_counted() -> None:
    found = [block.title for page in PAGES for block in blocks(page) if block.title.startswith("needs ")]
    assert Counter(found) == NEEDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_in_a_block_that_runs(page: Path) -> None:
    for block in blocks(page):
        if block.language not in ("python", "sh"):
            assert not re.search(r"^(outpace|pip|make|python) ", block.text, re.MULTILINE), block.text


def test_a_failing_page_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_part("a = 1\n\nb = 2\n", "if c:\n    a = 1\n    b = 2\n")
    assert not is_part("a = 1\nb = 3\n", "if c:\n    a = 1\n    b = 2\n")
    with pytest.raises(AssertionError, match="no_such"):
        run_commands(Block("sh", "", "outpace generate --prompt x --drafter no_such  # so\n"), monkeypatch)
    with pytest.raises(NameError):
        run_python(Block("python", "", "def test_it():\n    missing\n"), {})
    page = tmp_path / "page.md"
    page.write_text("```python needs nothing\n1\n```\n", "utf-8")
    with pytest.raises(AssertionError, match="cannot be read"):
        blocks(page)
