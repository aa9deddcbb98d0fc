"""Commands, options, specs, links, paths and code in the documents work, and generated pages are current.

What they say of outpace-lab is tested by ``lab/tests/test_documents.py``.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import shlex
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
import yaml
from typer.main import get_command

from outpace.bench.methods import split_drafters
from outpace.cli.app import KNOWN_AS, app
from outpace.core import OutpaceError
from outpace.drafters import DRAFTERS, load_drafter
from outpace.plugins import why_absent
from outpace.verify import VERIFIERS, load_verifier

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outpace"
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "integrations").rglob("*.md")),
    ROOT / "lab" / "README.md",
]
CARDS = sorted((SOURCE / "models").rglob("README.md"))
CODE = [ROOT / name for name in ("src", "lab/src", "lab/tools", "examples", "integrations", "tools")]
MOST_LINES = 6_200  # of what is to be read to change decoding, whatever it is
_SPEC = re.compile(r"[\s\"'(+`]([a-z_]+:[a-z_]+=[^\s\"'`]+|[a-z]+:\([^\s\"'`]+)")
_PLACE = re.compile(r"(src|tests|docs|tools|examples|benchmarks|integrations|lab|\.ci)/[\w./-]*")


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


DOCUMENTS = pytest.mark.parametrize("file", FILES, ids=name_of)


@cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """The options of each command, by its path, as in ("bench", "compare")."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], set[str]]]:
        names = {name for own in command.params for name in (*own.opts, *own.secondary_opts)}
        yield path, {*names, "--help"}
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, (*path, name))

    return dict(walk(get_command(app), ()))


def code(text: str) -> list[str]:
    """Blocks and spans of code, without drawn boxes, whose titles are cut."""
    text = "\n".join(line for line in text.splitlines() if "╭" not in line)
    blocks = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        text = text.replace(block, "")
    return [*blocks, *re.findall(r"`[^`]+`", text)]


def lines_of_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each call of the command line."""
    for piece in code(text):
        for line in piece.replace("\\\n", " ").strip("`").splitlines():
            if line.strip().startswith("outpace "):
                words = shlex.split(line, comments=True)
                yield words[1 : words.index("|") if "|" in words else None]


def load_named(spec: str) -> None:
    """A spec must describe a drafter, unless it is of a reader's own package."""
    if not spec.startswith("my_package."):
        load_drafter(spec)


def load_drafters(text: str) -> None:
    for spec in split_drafters(text):
        load_drafter(spec)


READ: dict[str, Callable[[str], Any]] = {
    "--drafter": load_named,
    "--drafters": load_drafters,
    "--verifier": load_verifier,
}


def what_is_wrong(words: list[str]) -> str | None:
    path: tuple[str, ...] = ()
    words = [KNOWN_AS.get(word, word) for word in words[:1]] + words[1:]
    while len(words) > len(path) and (*path, words[len(path)]) in commands():
        path = (*path, words[len(path)])
    kind = {(): "command", ("bench",): "benchmark"}.get(path, "")
    if len(words) > len(path) and why_absent(kind, words[len(path)]):
        return None
    if not path and words and re.fullmatch("[a-z]+", words[0]):
        return f"there is no command {words[0]}"
    names = [word.partition("=")[0] for word in words if re.match("--?[a-z]", word)]
    unknown = [name for name in names if name not in commands()[path]]
    if unknown:
        return f"outpace {' '.join(path)} has no {unknown[0]}"
    for option, read in READ.items():
        if option in words:
            spec = words[words.index(option) + 1]
            if not spec.startswith("my_package."):  # the reader's own
                read(spec)
    return None


@DOCUMENTS
def test_commands_and_their_options_are_there(file: Path) -> None:
    for words in lines_of_commands(file.read_text("utf-8")):
        assert what_is_wrong(words) is None, (words, what_is_wrong(words))


@DOCUMENTS
def test_options_named_in_the_text_are_there(file: Path) -> None:
    ours = {name for names in commands().values() for name in names}
    others = {"--check", "--numprocesses", "--no-build-isolation"}  # of ruff, pytest and pip
    others |= {"--max-restarts"}  # of torchrun
    others |= {"--only"}  # of a script that trains
    others |= {"--spec-type", "--no-cache-prompt"}  # of llama-server
    others |= {"--speculative-config"}  # of vLLM
    others |= {"--speculative-num-draft-tokens", "--enable-custom-logit-processor"}  # of SGLang
    for piece in code(file.read_text("utf-8")):
        if not piece.startswith("```"):
            for name in re.findall(r"`(--[a-z0-9-]+)", piece):
                assert name in ours | others, name


def specs(text: str) -> list[str]:
    return [spec for piece in code(text) for spec in _SPEC.findall(f" {piece}")]


def load_method(spec: str) -> None:
    name = spec.partition(":")[0]
    if name in VERIFIERS:
        load_verifier(spec)
    elif name in DRAFTERS:
        load_drafter(spec)


@DOCUMENTS
def test_specs_are_of_drafters_and_verifiers_as_they_are(file: Path) -> None:
    for spec in specs(file.read_text("utf-8")):
        load_method(spec)


@pytest.mark.parametrize("file", (*FILES, *CARDS), ids=name_of)
def test_files_and_scripts_named_in_code_are_there(file: Path) -> None:
    if file.name == "CHANGELOG.md":
        return
    for piece in code(file.read_text("utf-8")):
        for word in re.findall(r"[^\s`'\"()=]+", piece):
            if _PLACE.fullmatch(word):
                assert (ROOT / word).exists(), word


@DOCUMENTS
def test_modules_named_in_code_are_there(file: Path) -> None:
    if file.is_relative_to(ROOT / "docs"):
        for name in re.findall(r"`(?!lab/)([a-z_]+/[\w/]+\.(?:py|c))`", file.read_text("utf-8")):
            assert (SOURCE / name).exists() or (ROOT / name).exists(), name


def read_to_change_decoding(text: str) -> list[str]:
    """The files of the reading order, in its order."""
    table = text[text.index("## What to read") :].partition("\n\nThen, by")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 80


def test_the_reading_order_is_short() -> None:
    named = read_to_change_decoding((ROOT / "docs" / "concepts" / "architecture.md").read_text("utf-8"))
    lines = sum(len((SOURCE / name).read_text("utf-8").splitlines()) for name in named)
    assert len(named) > 20 and len(named) == len(set(named))
    assert lines <= MOST_LINES


@pytest.mark.parametrize("page", reference.ALL, ids=name_of)
def test_generated_pages_are_current(page: Path) -> None:
    text = page.read_text("utf-8")
    assert reference.renewed(text) == text, "run: python tools/reference.py"


def test_a_stale_page_is_seen() -> None:
    page = (reference.PAGES / "methods.md").read_text("utf-8")
    stale = page.replace("| name | what it does", "| name | what it did")
    assert stale != page == reference.renewed(stale)


def anchors(file: Path) -> list[str]:
    """The anchors that GitHub gives the headings of `file`."""
    headings = re.findall(r"^#+ (.*)", file.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(file: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each link to a place in the repository."""
    text = re.sub(r"^```.*?^```|`[^`]*`", "", file.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in address:
            path, _, anchor = address.partition("#")
            yield (file.parent / path if path else file), anchor


@DOCUMENTS
def test_links_lead_to_files_and_headings(file: Path) -> None:
    for path, anchor in links(file):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), (path.name, anchor)


def test_every_page_is_reached_from_the_index(folder: Path = ROOT / "docs") -> None:
    reached, ahead = set[Path](), [folder / "index.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page not in reached and page.suffix == ".md" and page.is_relative_to(folder.resolve()):
            reached.add(page)
            ahead += [path for path, _ in links(page)]
    assert {page.resolve() for page in folder.rglob("*.md")} == reached


# -- code ------------------------------------------------------------------------------------------------


def blocks(file: Path, language: str) -> list[str]:
    """The blocks of code in a language."""
    text = file.read_text("utf-8")
    return re.findall(rf"^```{language}(?: title=[^\n]*)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@DOCUMENTS
def test_code_can_be_parsed(file: Path) -> None:
    for block in blocks(file, "python"):
        ast.parse(textwrap.dedent(block))
    for block in blocks(file, "json"):
        json.loads(block)
    for block in blocks(file, "yaml"):
        yaml.safe_load(block)


def imported(block: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of outpace and outpace-lab that code imports, and the names from them."""
    for node in ast.walk(ast.parse(textwrap.dedent(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outpace"):
            yield from ((str(node.module), own.name) for own in node.names)


@DOCUMENTS
def test_names_that_code_imports_are_there(file: Path) -> None:
    for block in blocks(file, "python"):
        for module, name in imported(block):
            assert hasattr(importlib.import_module(module), name), (module, name)


# -- promises --------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "concepts" / "exactness.md"
# A claim of equal tokens; the paragraph or docstring has to name the page that limits it.
_CLAIM = re.compile(
    r"(without changing|not) (one|a single|any) (output )?token|without changing (a token|what)"
    r"|no token( of the output)?( can)? changes?\b"
    r"|changes? (no|not one|not a single) token|token for token|identical (tokens|texts?|outputs?)",
    re.IGNORECASE,
)
# A sentence about the tokens of transformers' own generate(), and what has to limit it.
_TOKENS = r"(tokens?|texts?|bits|outputs?)"
_OF_STOCK = re.compile(
    rf"(?=.*\b(stock|transformers')(?: own)?[` ]*generate\(\)|.*\bgenerate\(\)'s (own )?{_TOKENS})"
    rf"(?=.*(\b(same {_TOKENS}|equals?|identical|those of|{_TOKENS} of)\b|generate\(\)'s))",
    re.IGNORECASE | re.DOTALL,
)
_LIMIT = re.compile(r"near-ties?|not (those|the tokens) of|differ|compared?\b|stock=True", re.IGNORECASE)


def beyond_the_page(text: str) -> list[str]:
    """List the promises in a paragraph or a docstring that exceed docs/concepts/exactness.md."""
    found = [] if "exactness.md" in text else [claim[0] for claim in _CLAIM.finditer(text)]
    for sentence in re.split(r"(?<=[.!?;])\s+", text):
        if _OF_STOCK.match(sentence) and not _LIMIT.search(sentence):
            found.append(" ".join(sentence.split()))
    return found


def paragraphs(text: str) -> list[str]:
    """The paragraphs, points of lists and rows of tables of a document, without blocks of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text)


@pytest.mark.parametrize("file", [file for file in (*FILES, *CARDS) if file != PAGE], ids=name_of)
def test_no_document_promises_more_than_the_page(file: Path) -> None:
    assert not [one for part in paragraphs(file.read_text("utf-8")) for one in beyond_the_page(part)]


def test_no_docstring_or_message_promises_more_than_the_page() -> None:
    found = [
        f"{file}:{line}: {one}"
        for folder in CODE
        for file in folder.rglob("*.py")
        for line, text in prose(file.read_text("utf-8"))
        for one in beyond_the_page(text)
    ]
    assert found == []


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of strings, comments and docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize(
    "text",
    [
        "Make generate() faster. Greedy tokens are those of the stock generate().",
        "See docs/concepts/exactness.md. The output equals transformers' own generate().",
        "Drafts change not one token of the output.",
        "It is fast, without changing a single token",
        "The result is generate()'s text; it is what a model would write.",
        "Drafts for its decoder, with the text of transformers' own generate().",
        "It makes models answer faster without changing what they say.",
        "generate faster without changing a token of the output",
        "Answers are equal, token for token.",
    ],
)
def test_a_promise_beyond_the_page_is_seen(text: str) -> None:
    assert beyond_the_page(text)


@pytest.mark.parametrize(
    "text",
    [
        "Beside the stock generate() tokens may differ at near-ties.",
        "Without changing one token ([exactly](exactness.md)).",
        "With stock=True plain decoding has the tokens of the stock generate().",
        "A callable for one call of the stock generate().",
    ],
)
def test_a_promise_within_the_page_is_allowed(text: str) -> None:
    assert not beyond_the_page(text)


@pytest.mark.parametrize(
    "line",
    [
        "outpace bensh --suite gsm8k",
        "outpace bench --suites gsm8k",
        "outpace pull a --suite gsm8k",
        "outpace generate --drafter lookahead:windows=3",
    ],
)
def test_a_mistake_is_seen(line: str) -> None:
    (words,) = lines_of_commands(f"```\n{line}  # so\n```")
    try:
        assert what_is_wrong(words) is not None
    except OutpaceError as error:
        assert "windows" in str(error)
