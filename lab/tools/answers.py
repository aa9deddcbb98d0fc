"""Let outpace-nano answer prompts, from which its drafters learn.

    python lab/tools/answers.py --data DATA --out WORK

The prompts are from the training split of its own corpus (see corpus.py), so that neither held-out texts nor
any benchmark's test split are learnt. Every second file of answers is greedy, the others are sampled at
temperature 1. WORK/answers contains JSONL files for `outpace train --data`, and WORK/texts the same prompts
with the corpus's own answers, for comparison. An interrupted run resumes after the last file.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from dataclasses import asdict
from pathlib import Path

from card_nano import prompt_of
from corpus import END_OF_TEXT, Corpus, build_corpus
from outpace.core import SamplingParams
from outpace.loading import Loaded, load
from outpace_lab.train import data
from outpace_lab.train.data import Document
from outpace_lab.train.distil import answer

SHARES = {"gsm8k": 0.57, "function": 0.25, "correction": 0.08, "retrieval": 0.08, "dialogue": 0.02}
"""Of the prompts, by kind."""

TEMPERATURES = (0.0, 1.0)
PROMPT_TOKENS = 256
"""Longer prompts are left out."""

PROMPTS_PER_FILE = 256
FILES = 8
TOGETHER = 64


def cut(corpus: Corpus, count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` prompts of all kinds, in a random order, each with the rest of its text.

    There are fewer if a kind has too few texts.
    """
    rng = random.Random(seed)
    found = []
    for kind, share in SHARES.items():
        texts = corpus.train[kind]
        for text in rng.sample(texts, min(len(texts), round(share * count))):
            prompt = signature(text) if kind == "function" else prompt_of(kind, text)[0]
            if prompt:
                found.append((prompt, text[len(prompt) :].split(END_OF_TEXT)[0] + END_OF_TEXT))
    return rng.sample(found, len(found))


def signature(code: str) -> str:
    """A function up to the end of its docstring; empty if it cannot be parsed by itself."""
    try:
        function = ast.parse(code).body[0]
    except SyntaxError:  # caused by a docstring that is not indented
        return ""
    assert isinstance(function, ast.FunctionDef)
    return "\n".join(code.splitlines()[: function.body[0].end_lineno]) + "\n"


def encode(model: Loaded, pairs: list[tuple[str, str]], new_tokens: int) -> list[Document]:
    """Tokenise the texts, with answers at most as long as the model's; omit those with long prompts."""
    found = []
    for prompt, rest in pairs:
        ids = model.tokens(prompt)
        if len(ids) <= PROMPT_TOKENS:
            found.append(Document((*ids, *model.plain_tokens(rest)[:new_tokens]), len(ids)))
    return found


def answers(model: Loaded, texts: list[Document], number: int, new_tokens: int) -> list[Document]:
    """The model's own answers to the prompts of one file."""
    params = SamplingParams(
        max_new_tokens=new_tokens,
        temperature=TEMPERATURES[number % len(TEMPERATURES)],
        seed=number * PROMPTS_PER_FILE,
    )
    return answer(model.target, texts, params, TOGETHER)


def keep(documents: list[Document], file: Path) -> None:
    """Write a file completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data.write(documents, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def main() -> None:
    """Write answers, texts, and the sources of the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sources of corpus.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--files", type=int, default=FILES, help="of 256 prompts each, at most")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    corpus = build_corpus(options.data)
    model = load()
    texts = encode(model, cut(corpus, options.prompts, options.seed), options.new_tokens)
    note = {"packages": [asdict(package) for package in corpus.packages], "shares": SHARES}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sources.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    for number in range(min(options.files, -(-len(texts) // PROMPTS_PER_FILE))):
        batch = texts[number * PROMPTS_PER_FILE : (number + 1) * PROMPTS_PER_FILE]
        name = f"{number:03}.jsonl"
        if not (options.out / "answers" / name).exists():
            keep(answers(model, batch, number, options.new_tokens), options.out / "answers" / name)
        if not (options.out / "texts" / name).exists():
            keep(batch, options.out / "texts" / name)
        print(f"{number * PROMPTS_PER_FILE + len(batch)} prompts", flush=True)


if __name__ == "__main__":
    main()
