"""Write prompts that a model is to answer, for drafters to learn its answers.

    python lab/tools/drafter_prompts.py --data DATA --model smollm2 --own 1500 --out prompts.jsonl

DATA contains gsm8k_train.jsonl, humaneval.jsonl and wikitext2_prose.txt. The prompts have the forms of
`outpace bench`. None is in what a drafter is reported on: GSM8K's test split, Spec-Bench with MT-Bench, and
the first 84 problems of HumanEval. Requests like MT-Bench's are written by the model itself: sampled where
its chat template has a user's turn (Xu et al. 2024, Magpie, arXiv 2406.08464, section 2).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter_texts import prose
from outpace.core import SamplingParams
from outpace.loading import load

QUESTIONS, ASKED_IN_CHATS = slice(0, 4000), slice(4000, 5500)
PROGRAMS = slice(84, None)
MARK = "|request|"
SHORTEST, LONGEST = 4, 96  # of a request that the model writes: words, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="for --own")
    parser.add_argument("--own", type=int, default=0, help="requests that the model writes")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    write(given.data, given.model, given.own, given.out)


def write(data: Path, model: str, own: int, out: Path) -> None:
    """Write all prompts to a file, ``own`` of them by the model."""
    found = [*prompts(data), *(map(_chat, own_requests(model, own)) if own else ())]
    random.Random(0).shuffle(found)  # prompts decoded together are of all lengths
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


def prompts(data: Path) -> Iterator[dict[str, Any]]:
    """Lines of a training file, in the format of ``outpace_lab.train.data.read``."""
    questions = [line["question"] for line in _lines(data / "gsm8k_train.jsonl")]
    for question in questions[QUESTIONS]:
        yield {"prompt": f"Question: {question}\nAnswer:"}
    for question in questions[ASKED_IN_CHATS]:
        yield _chat(question)
    for problem in _lines(data / "humaneval.jsonl")[PROGRAMS]:
        yield {"prompt": problem["prompt"]}
    for text in prose(data):
        yield _chat(f"Write about {' '.join(text.split()[:4]).rstrip(',.')}.")


def own_requests(model: str, count: int) -> list[str]:
    """At most ``count`` different requests that a chat model writes itself, at temperature 1."""
    loaded = load(model, "bfloat16")
    start = loaded.render([{"role": "user", "content": MARK}], add_generation_prompt=False).split(MARK)[0]
    params = [SamplingParams(max_new_tokens=LONGEST, temperature=1.0, seed=seed) for seed in range(count)]
    written = loaded.engine("none", max_running=32).generate([loaded.plain_tokens(start)] * count, params)
    texts = [one.text.strip() for one in written if one.finish_reason == "eos"]
    return [text for text in dict.fromkeys(texts) if len(text.split()) >= SHORTEST]


def _chat(asked: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}]}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
