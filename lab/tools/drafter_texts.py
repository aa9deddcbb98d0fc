"""Write texts to train a drafter with, for a model with a chat template: arithmetic and prose.

    python lab/tools/drafter_texts.py --model smollm2 --data DATA --out texts/given.jsonl

DATA contains gsm8k_train.jsonl (GSM8K's training split) and wikitext2_prose.txt. Half of
the questions are chats, half in the form of `outpace bench`; paragraphs are answers to "Write about ...". All
tokens are to be learnt, questions too.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from outpace.loading.weights import load_tokenizer
from outpace_lab.train.data import Document, write

LONGEST = 500  # tokens
QUESTIONS = slice(120, 520)
PARAGRAPHS = 200
LETTERS = 900  # of a paragraph
JOINED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))  # WikiText's tokens within words
SPACED = re.compile(r" ([,.;:!?)])")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)[1]

    def chat(question: str, answer: str) -> list[int]:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"])

    def plain(text: str) -> list[int]:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*tokens, tokenizer.eos_token_id]

    texts = [
        plain(f"Question: {question}\nAnswer: {answer}") if number % 2 else chat(question, answer)
        for number, (question, answer) in enumerate(arithmetic(given.data))
    ]
    texts += [
        chat(f"Write about {' '.join(text.split()[:4]).rstrip(',.')}.", text) for text in prose(given.data)
    ]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write([Document(tuple(tokens[:LONGEST])) for tokens in texts], given.out)


def arithmetic(data: Path) -> list[tuple[str, str]]:
    """Questions and answers, without the marks for a calculator."""
    lines = (data / "gsm8k_train.jsonl").read_text("utf-8").splitlines()[QUESTIONS]
    found = []
    for line in map(json.loads, lines):
        answer = re.sub(r"<<.*?>>", "", line["answer"])
        found.append((line["question"], re.sub(r"\n#### (.*)$", r"\nThe answer is \1.", answer)))
    return found


def prose(data: Path) -> list[str]:
    """Beginnings of paragraphs, without the sentences that contain unknown words."""
    paragraphs = []
    for line in (data / "wikitext2_prose.txt").read_text("utf-8").split("\n"):
        text = line
        for apart, together in JOINED:
            text = text.replace(apart, together)
        text = SPACED.sub(r"\1", text.strip()).replace(" 's", "'s").replace("( ", "(")
        whole = " ".join(sentence for sentence in re.split(r"(?<=[.]) ", text) if "<unk>" not in sentence)
        text = whole[:LETTERS].rsplit(".", 1)[0] + "."
        if len(text) > 300:
            paragraphs.append(text)
    random.Random(0).shuffle(paragraphs)
    return paragraphs[:PARAGRAPHS]


if __name__ == "__main__":
    main()
