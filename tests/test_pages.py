"""The code and the commands of the README, the quickstart, guides and concepts run as they are typed.

A block in Python, or of commands (sh), runs after those before it on its page. One that cannot run here has a
title that says what it needs; one that shows a part of a program has the program's path as its title.

A block of text with the title "prints" is what the block before it prints, but for lines of times. The run
writes it with OUTPACE_PAGES=write in the environment.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
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
    "needs a clone": 2,
    "needs a model of text and images": 1,
    "needs an encoder-decoder model": 1,
    "needs a GPU": 1,
    "needs Whisper": 1,
    "needs llama.cpp": 2,
    "needs a GGUF file": 1,
    "needs minutes": 1,
    "needs a terminal of its own": 3,
    "needs the server": 1,  # tests/serve/test_clients.py runs it
}
PRINTS = "prints"
_FILE = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END\n", re.DOTALL | re.MULTILINE)  # a file that a page makes
_TIMES = re.compile("second|speed|tokens/s")  # in a line that differs from run to run


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


def run_python(block: Block, names: dict[str, Any]) -> str:
    """Run code, and the tests that it defines; what it prints."""
    before = set(names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.text, "page", "exec", dont_inherit=True), names)
        for name in set(names) - before:
            if name.startswith("test_"):
                names[name]()
    return printed.getvalue()


def make_file(found: re.Match[str]) -> str:
    Path(found[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(found[1]).write_text(found[2], "utf-8")
    return ""


def run_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make its files and run each line, which may set ``PYTHONPATH`` for itself; what they print."""
    printed = ""
    for line in _FILE.sub(make_file, block.text).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[:2] == ["mkdir", "-p"]:  # of a file that has been made
            continue
        with monkeypatch.context() as patch:
            if words[0].startswith("PYTHONPATH="):
                patch.syspath_prepend(str(ROOT / words.pop(0).partition("=")[2]))
            assert words[0] == "outpace", line
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)
            printed += result.stdout
    return printed


def stable(printed: str) -> str:
    """What is the same in every run."""
    lines = [line.rstrip() for line in printed.splitlines() if not _TIMES.search(line)]
    return "\n".join(lines).strip("\n") + "\n"


def even(printed: str) -> str:
    """A text whose tables have narrow columns: their widths follow from the times in them."""
    return "\n".join(
        re.sub(r"([ ━─])\1+", r"\1", line) if re.match("[┏┃┡│└]", line) else line
        for line in printed.split("\n")
    )


def check_printed(page: Path, block: Block, printed: str) -> None:
    """Compare what a page shows with what was printed, or write it there."""
    if even(block.text) == even(printed):
        return
    if os.environ.get("OUTPACE_PAGES") == "write":
        before, after = (f'```{block.language} title="{PRINTS}"\n{text}```' for text in (block.text, printed))
        page.write_text(page.read_text("utf-8").replace(before, after, 1), "utf-8")
        return
    assert even(block.text) == even(printed), "run with OUTPACE_PAGES=write"


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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {}
    printed = ""
    for block in blocks(page):
        if block.title == PRINTS:
            check_printed(page, block, stable(printed))
        if not block.runs:
            continue
        if block.title:
            program = ROOT / block.title
            assert is_part(block.text, program.read_text("utf-8")), block.text
            monkeypatch.syspath_prepend(str(program.parent))
            names = names or dict(vars(importlib.import_module(program.stem)))
        elif block.language == "python":
            printed = run_python(block, names)
        else:
            printed = run_commands(block, monkeypatch)


def test_what_blocks_need_is_counted() -> None:
    found = [block.title for page in PAGES for block in blocks(page) if block.title.startswith("needs ")]
    assert Counter(found) == NEEDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_in_a_block_that_runs(page: Path) -> None:
    for block in blocks(page):
        if block.language not in ("python", "sh"):
            assert not re.search(r"^(outpace|pip|make|python) ", block.text, re.MULTILINE), block.text


def test_a_failing_page_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_part("a = 1\n\nb = 2\n", "if c:\n    a = 1\n    b = 2\n")
    assert not is_part("a = 1\nb = 3\n", "if c:\n    a = 1\n    b = 2\n")
    with pytest.raises(AssertionError, match="no_such"):
        run_commands(Block("sh", "", "outpace generate --prompt x --drafter no_such  # so\n"), monkeypatch)
    shown = Block("text", PRINTS, "one\n")
    check_printed(tmp_path, shown, stable("one  \n2 tokens per second\n"))
    with pytest.raises(AssertionError, match="OUTPACE_PAGES"):
        check_printed(tmp_path, shown, stable("two\n"))
    made = run_commands(Block("sh", "", "mkdir -p a\ncat > a/b.txt <<'END'\none\nEND\n"), monkeypatch)
    assert made == "" and Path("a/b.txt").read_text("utf-8") == "one\n"
    with pytest.raises(NameError):
        run_python(Block("python", "", "def test_it():\n    missing\n"), {})
    page = tmp_path / "page.md"
    page.write_text("```python needs nothing\n1\n```\n", "utf-8")
    with pytest.raises(AssertionError, match="cannot be read"):
        blocks(page)
