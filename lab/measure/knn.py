"""Benchmark of KNN-LM: tokens per step and searches per token, with and without drafts.

    python lab/measure/knn.py --documents FILE --data DIR --entries 200000 --json RESULT.json

--documents is a text of one passage a line, which the datastore is made of; DIR contains gsm8k_test*.jsonl,
whose questions are the prompts, and humaneval.jsonl. `none` searches once per token, a drafter once per step.
Prompts take turns; all drafters must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from online import TOPICS, prompts_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.bench.machine import machine
from outpace.bench.methods import split_drafters
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace_lab.ralm import KnnStore, KnnTarget


def measure(engines: dict[str, Engine], prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Decode each prompt with each engine in turn: the drafters' counts, and their times over ``none``'s."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    steps = dict.fromkeys(engines, 0)
    for prompt in prompts:
        expected: list[int] = []
        for name, engine in engines.items():
            began = time.process_time()
            (found,) = engine.generate([prompt], params)
            seconds[name].append(time.process_time() - began)
            steps[name] += found.stats.steps
            expected = expected or found.tokens
            if found.tokens != expected:
                raise SystemExit(f"{name} has changed a token")
    return [
        {
            "drafter": name,
            "tokens_per_search": len(prompts) * tokens / steps[name],
            "speed": statistics.median(
                plain / own for plain, own in zip(seconds["none"], seconds[name], strict=True)
            ),
            "milliseconds_per_step": 1000 * sum(seconds[name]) / steps[name],
        }
        for name in engines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=outpace.nano_path())
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--prompts", type=int, default=4, help="of each of the two sets")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--drafters", default="none,suffix,token_recycling,lookahead:window=4,ngram=4,guesses=4"
    )
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    target = outpace.Target(AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval())
    texts, left = [], given.entries
    for line in given.documents.open(encoding="utf-8"):
        texts.append(tokenizer(line.strip()).input_ids[: left + 1])
        left -= max(len(texts[-1]) - 1, 0)
        if left < 2:
            break
    began = time.process_time()
    store = KnnStore.of(target, texts)
    built = time.process_time() - began
    mixture = KnnTarget(target, store)
    prompts = [one for topic in TOPICS for one in prompts_of(topic, given.data, tokenizer)[: given.prompts]]
    engines = {spec: Engine(mixture, spec, adaptive=False) for spec in split_drafters(given.drafters)}
    rows = measure(engines, prompts, given.tokens)
    for row in rows:
        print(row)
    result = {
        "machine": machine("cpu"),
        "command": " ".join(sys.argv),
        "entries": len(store.tokens),
        "seconds_to_build": built,
        "rows": rows,
    }
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
