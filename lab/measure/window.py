"""Tokens per step of lookahead with the window moved by one place (as published) or by the accepted tokens.

python lab/measure/window.py --model smollm2 --data FOLDER

Counts only, no times: they are the same on every machine, except for near-ties. --data is a folder with
gsm8k_test_200.jsonl, humaneval.jsonl and spec_bench.jsonl.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from outpace import Engine, SamplingParams
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.loading import load

TASKS = {"gsm8k": "gsm8k_test_200.jsonl", "humaneval": "humaneval.jsonl", "mt_bench": "spec_bench.jsonl"}


def questions(data: Path, task: str, count: int) -> list[str]:
    """Prompts of a task, evenly spread over it."""
    found = []
    for line in (data / TASKS[task]).read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        if task == "gsm8k":
            found.append(item["question"])
        elif task == "humaneval":
            found.append("Complete this Python function:\n\n" + item["prompt"])
        elif item["question_id"] <= 160:  # the part that is MT-Bench
            found.append(item["turns"][0])
    return found[:: len(found) // count][:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load(options.model, device="cpu")
    params = SamplingParams(max_new_tokens=options.tokens)
    rows = []
    for task in TASKS:
        prompts = [model.encode(text, chat=True) for text in questions(options.data, task, options.prompts)]
        for (window, ngram, guesses), pools in (((7, 5, 7), (False, True)), ((5, 3, 5), (True,))):
            for pool in pools:
                drafter = Lookahead(window, ngram, guesses, pool_from_prompt=pool, pool_from_output=pool)
                for moves_by in ("one", "accepted"):
                    for seed in range(options.seeds):
                        own = replace(drafter, moves_by=moves_by, seed=seed)
                        engine = Engine(model.target, own, adaptive=False, slots=4)
                        stats = [generation.stats for generation in engine.generate(prompts, params)]
                        tau = sum(one.tokens for one in stats) / sum(one.steps for one in stats)
                        rows.append(
                            {
                                "task": task,
                                "options": [window, ngram, guesses],
                                "pool_from_text": pool,
                                "moves_by": moves_by,
                                "seed": seed,
                                "tau": tau,
                            }
                        )
                        print(*rows[-1].values(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"model": str(model), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
