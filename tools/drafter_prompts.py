"""Write prompts that a model is to answer, for drafters to learn its answers.

    python tools/drafter_prompts.py --data DATA --out prompts.jsonl

DATA contains gsm8k_train.jsonl, humaneval.jsonl, spec_bench.jsonl and wikitext2_prose.txt. The prompts have
the forms of `outpace bench`. None is in what a drafter is reported on: GSM8K's test split, MT-Bench, and the
first 84 problems of HumanEval.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter_texts import prose

QUESTIONS, ASKED_IN_CHATS = slice(0, 500), slice(500, 650)
PROGRAMS = slice(84, None)
CATEGORIES = ("qa", "translation", "math_reasoning")  # of Spec-Bench, those with short prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = list(prompts(given.data))
    random.Random(0).shuffle(found)  # prompts decoded together are of all lengths
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


def prompts(data: Path) -> Iterator[dict[str, Any]]:
    """Lines of a training file, in the format of ``outpace.train.data.read``."""
    questions = [line["question"] for line in _lines(data / "gsm8k_train.jsonl")]
    for question in questions[QUESTIONS]:
        yield {"prompt": f"Question: {question}\nAnswer:"}
    for question in questions[ASKED_IN_CHATS]:
        yield _chat(question)
    for problem in _lines(data / "humaneval.jsonl")[PROGRAMS]:
        yield {"prompt": problem["prompt"]}
    for asked in _lines(data / "spec_bench.jsonl"):
        if asked["category"] in CATEGORIES:
            yield _chat(asked["turns"][0])
    for text in prose(data):
        yield _chat(f"Write about {' '.join(text.split()[:4]).rstrip(',.')}.")


def _chat(asked: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}]}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
