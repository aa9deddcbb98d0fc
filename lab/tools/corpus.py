"""Build the corpus on which the outpace-nano models are trained.

A corpus is a dictionary from a kind of document to its texts, in two splits. The kinds are:

    gsm8k       "Question: ... Answer: ..." from GSM8K's train split
    code        Python files of the standard library and of permissively licensed packages
    function    functions with docstrings, cut out of those files
    prose       articles of WikiText-2, put back into plain English
    dialogue    the conversations in dialogue.txt
    correction  "Text: ... Corrected: ...", made by adding spelling errors
    retrieval   "Document: ... Question: ... Answer: ...", where the answer is copied from the document

The last two kinds are made from the others after the split, so that no held-out text is ever trained on.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import random
import re
import string
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
"""Ends every document, and every turn of the assistant."""

GSM8K_FILE = "gsm8k_train.jsonl"
PROSE_FILE = "wikitext2_prose.txt"
DIALOGUE_FILE = Path(__file__).with_name("dialogue.txt")

HELD_OUT_SHARE = 0.02

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "LLVM-exception",
    "MIT",
    "PSF-2.0",
    "Zlib",
}
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
STATED = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache-2.0": "Apache-2.0",
    "BSD": "BSD",
    "BSD-3-Clause": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT": "MIT",
}
"""The licence fields of packages that state neither an expression nor a classifier."""

PACKAGE_CHARACTERS = 1_500_000
"""Maximum per package, so that the largest do not dominate."""

FILE_CHARACTERS = (400, 100_000)
"""Shorter files are worthless; longer ones are mostly generated tables."""

SKIPPED_FOLDERS = {
    "__pycache__",
    "_vendor",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "test",
    "testing",
    "tests",
    "turtledemo",
}


@dataclass(frozen=True)
class Package:
    """A source of Python files, with the licence its metadata states."""

    name: str
    version: str
    licence: str


@dataclass
class Corpus:
    """The texts by kind, in two splits, and the packages that the code came from."""

    train: dict[str, list[str]] = field(default_factory=dict)
    held_out: dict[str, list[str]] = field(default_factory=dict)
    packages: list[Package] = field(default_factory=list)


def build_corpus(data: Path, seed: int = 0) -> Corpus:
    """Read every source, split it, and derive the copying kinds from each split."""
    files, packages = read_code(random.Random(seed))
    sources = {
        "gsm8k": read_gsm8k(data / GSM8K_FILE),
        "code": files,
        "prose": read_prose(data / PROSE_FILE),
        "dialogue": read_dialogue(DIALOGUE_FILE),
    }
    corpus = Corpus(packages=packages)
    for kind, texts in sources.items():
        # Each kind has its own generator, so that its split does not depend on the size of the others.
        corpus.held_out[kind], corpus.train[kind] = split(texts, random.Random(f"{seed} {kind}"))
    for part, count in ((corpus.train, 14_000), (corpus.held_out, 200)):
        rng = random.Random(f"{seed} {count}")
        part["function"] = [code for text in part["code"] for code in documented_functions(text)]
        part["correction"] = [make_correction(part, rng) for _ in range(count)]
        part["retrieval"] = [make_retrieval(part, rng) for _ in range(count)]
    return corpus


def split(texts: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Shuffle, and return the held-out texts and the rest."""
    shuffled = rng.sample(texts, len(texts))
    count = max(4, round(HELD_OUT_SHARE * len(texts)))
    return shuffled[:count], shuffled[count:]


# --- Sources -----------------------------------------------------------------------------------------------


def read_gsm8k(path: Path) -> list[str]:
    """The problems as "Question: ... Answer: ...", without the <<48/2=24>> calculator notes."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        answer = re.sub(r"<<[^>]*>>", "", problem["answer"])
        texts.append(f"Question: {problem['question'].strip()}\nAnswer: {answer.strip()}")
    return texts


def read_dialogue(path: Path) -> list[str]:
    """The conversations between blank lines, with the end-of-text token after each turn of the assistant."""
    texts = []
    for conversation in re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip()):
        turns = re.split(r"\n(?=User: )", conversation.strip())
        texts.append(END_OF_TEXT.join(turns))
    return texts


def read_prose(path: Path) -> list[str]:
    """The articles of WikiText, one text each."""
    raw = path.read_text(encoding="utf-8")
    articles = re.split(r"\n = (?=[^=])", raw)
    texts = (clean_article(" = " + article) for article in articles)
    return [text for text in texts if len(text) > 300]


def clean_article(article: str) -> str:
    """Undo WikiText's tokenisation, and drop the sentences with an unknown word."""
    paragraphs = []
    for line in article.splitlines():
        line = line.strip()
        heading = re.fullmatch(r"(?:= )+(.*?)(?: =)+", line)
        if heading:
            if "<unk>" not in heading[1]:
                paragraphs.append(detokenize(heading[1]))
            continue
        kept = [sentence for sentence in sentences_of(detokenize(line)) if "<unk>" not in sentence]
        if kept:
            paragraphs.append(" ".join(kept))
    return "\n\n".join(paragraphs)


def detokenize(line: str) -> str:
    """Put the spaces of a WikiText line back where English has them."""
    line = re.sub(r" @([-,.])@ ", r"\1", line)
    # An unknown word alone in brackets or in a list can be removed without harm to the sentence.
    line = re.sub(r" \( <unk> \)| , <unk>(?= ,)", "", line)
    line = re.sub(r'" ([^"]*?) "', r'"\1"', line)
    line = re.sub(r" ([,.;:!?%)\]])", r"\1", line)
    line = re.sub(r"([(\[$£]) ", r"\1", line)
    line = re.sub(r" (?:'|’) ?(s|t|re|ve|ll|d|m)\b", r"'\1", line)
    return re.sub(r"(\w) ' ", r"\1' ", line)


def sentences_of(paragraph: str) -> list[str]:
    """A rough split after . ! or ? followed by a space and a capital, a quote or a number."""
    return [
        part.strip() for part in re.split(r"(?<=[a-z0-9)\"][.!?]) (?=[A-Z\"$0-9])", paragraph) if part.strip()
    ]


# --- Python code -------------------------------------------------------------------------------------------


def read_code(rng: random.Random) -> tuple[list[str], list[Package]]:
    """Python files of the standard library and of the installed packages with a permissive licence."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # A distribution may store other packages below its standard library; those have their own licences.
    outside = {"dist-packages", "site-packages"}
    standard = [
        path for path in sorted(root.rglob("*.py")) if not outside.intersection(path.parts[len(root.parts) :])
    ]
    texts = list(python_texts(root, standard))
    packages = [Package("Python standard library", sysconfig.get_python_version(), "PSF-2.0")]
    for distribution in sorted(importlib.metadata.distributions(), key=lambda each: each.name.lower()):
        licence = permissive_licence(distribution)
        if licence is None or distribution.name == "outpace":
            continue
        root = Path(str(distribution.locate_file("")))
        paths = [root / file for file in distribution.files or [] if file.suffix == ".py"]
        chosen = limit(python_texts(root, rng.sample(paths, len(paths))), PACKAGE_CHARACTERS)
        if chosen:
            texts += chosen
            packages.append(Package(distribution.name, distribution.version, licence))
    return texts, packages


def permissive_licence(distribution: importlib.metadata.Distribution) -> str | None:
    """The licence that the metadata states, or None unless every part of it is permissive."""
    metadata = distribution.metadata
    expression = "".join(metadata.get_all("License-Expression") or [])
    if expression:
        parts = set(re.findall(r"[\w.+-]+", expression)) - {"AND", "OR", "WITH"}
        return expression if parts <= PERMISSIVE else None
    classifiers = [
        line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or [] if "License ::" in line
    ]
    if classifiers:
        if not all(classifier in CLASSIFIERS for classifier in classifiers):
            return None
        return " AND ".join(sorted({CLASSIFIERS[classifier] for classifier in classifiers}))
    return STATED.get("".join(metadata.get_all("License") or []).strip())


def python_texts(root: Path, paths: Iterable[Path]) -> Iterator[str]:
    """The cleaned text of each usable file below root."""
    for path in paths:
        if SKIPPED_FOLDERS.intersection(path.parts[len(root.parts) : -1]):
            continue
        try:
            text = clean_code(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if FILE_CHARACTERS[0] <= len(text) <= FILE_CHARACTERS[1] and is_plain_code(text):
            yield text


def clean_code(text: str) -> str:
    """Drop the comment block at the top (usually a licence notice) and trailing spaces."""
    lines = [line.rstrip().expandtabs(4) for line in text.splitlines()]
    start = 0
    while start < len(lines) and (not lines[start] or lines[start].startswith("#")):
        start += 1
    return "\n".join(lines[start:]).strip() + "\n"


def is_plain_code(text: str) -> bool:
    """True if a file is code rather than a table, another alphabet, or text with the special token."""
    digits = sum(map(text.count, string.digits))
    longest = max(map(len, text.splitlines()), default=0)
    ascii_only = len(text.encode()) - len(text) < 0.01 * len(text)
    return END_OF_TEXT not in text and ascii_only and digits < 0.06 * len(text) and longest < 400


def limit(texts: Iterable[str], characters: int) -> list[str]:
    """The first texts whose total length fits."""
    chosen, total = [], 0
    for text in texts:
        total += len(text)
        if total > characters:
            break
        chosen.append(text)
    return chosen


def documented_functions(text: str) -> list[str]:
    """The functions of a file that have a docstring and are 5 to 60 lines long, without indentation."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and node.end_lineno is not None:
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            # A docstring with nothing after it teaches the model to stop where a body should come.
            if 5 <= source.count("\n") + 1 <= 60 and len(node.body) > 1:
                functions.append(source)
    return functions


# --- Copying -----------------------------------------------------------------------------------------------


def make_correction(texts: dict[str, list[str]], rng: random.Random) -> str:
    """A passage with spelling errors, and the passage."""
    passage = " ".join(pick_sentences(texts, rng, most=4))
    return f"Text: {misspell(passage, rng)}\nCorrected: {passage}"


def misspell(text: str, rng: random.Random) -> str:
    """Misspell about one word in seven with a typing error."""
    return re.sub(r"[A-Za-z]{4,}", lambda word: slip(word[0], rng) if rng.random() < 0.15 else word[0], text)


def slip(word: str, rng: random.Random) -> str:
    """Swap, drop, double or replace one letter after the first."""
    place = rng.randrange(1, len(word) - 1)
    before, letter, after = word[:place], word[place], word[place + 1 :]
    slips = [
        before + after[0] + letter + after[1:],
        before + after,
        before + letter + letter + after,
        before + rng.choice(string.ascii_lowercase) + after,
    ]
    return rng.choice(slips)


def make_retrieval(texts: dict[str, list[str]], rng: random.Random) -> str:
    """A document, a question about it, and the span of the document that answers it."""
    if rng.random() < 0.15:
        code = rng.choice(texts["function"])
        if len(code) < 700:
            return f"Document: {code.rstrip()}\nQuestion: Repeat the document.\nAnswer: {code.rstrip()}"
    passage = pick_sentences(texts, rng, least=3, most=8)
    question, answer = ask(passage, rng)
    return f"Document: {' '.join(passage)}\nQuestion: {question}\nAnswer: {answer}"


def ask(passage: list[str], rng: random.Random) -> tuple[str, str]:
    """A question that one sentence of the passage answers, or the whole passage does."""
    sentence = rng.choice(passage)
    words = sentence.rstrip(".!?").split()
    start = rng.randrange(max(1, len(words) - 3))
    phrase = " ".join(words[start : start + 3]).strip(",;:")
    choices = [
        ("Repeat the document.", " ".join(passage)),
        ("What is the first sentence?", passage[0]),
        ("What is the last sentence?", passage[-1]),
        (f'Which sentence has the words "{phrase}"?', sentence),
        (f"What does the document say about {phrase}?", sentence),
        (f'How does the sentence that begins with "{" ".join(words[:3])}" go on?', sentence),
    ]
    return rng.choices(choices, weights=[3, 1, 1, 4, 5, 3])[0]


def pick_sentences(texts: dict[str, list[str]], rng: random.Random, most: int, least: int = 1) -> list[str]:
    """Some consecutive sentences of a paragraph of prose, or of a few mathematical problems."""
    while True:
        if rng.random() < 0.6:
            paragraph = rng.choice(rng.choice(texts["prose"]).split("\n\n"))
        else:
            problems = rng.sample(texts["gsm8k"], 2)
            paragraph = " ".join(problem.split("\n")[0].removeprefix("Question: ") for problem in problems)
        sentences = sentences_of(paragraph) if paragraph.endswith((".", "?", "!")) else []
        if len(sentences) >= least:
            count = min(len(sentences), rng.randint(least, most))
            start = rng.randrange(len(sentences) - count + 1)
            return sentences[start : start + count]
