"""llama.cpp through llama-cpp-python, and outpace on the same GGUF file, in turns.

Tokens per second of processor time. One prompt at a time, greedy, 64 new tokens, one thread; the time after
the first step counts. A ratio is one of medians over prompts. Run in an environment with llama-cpp-python:

    taskset -c 1 python benchmarks/llamacpp.py model.gguf gsm8k,humaneval --limit 6 [--draft draft.gguf]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from outpace import Engine, SamplingParams, Target
from outpace.bench.suites import load_suite
from outpace.drafters import DraftModel

TOKENS = 64
LONGEST = 700  # tokens of a prompt
DRAFTERS = {
    "none": None,
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix",
    "token_recycling": "token_recycling",
    "combined": "combined:(suffix)+(token_recycling)",
    "lookahead": "lookahead:window=4,ngram=4,guesses=4",
}


def peer(path: str, lookup: int = 0, flash: bool = False) -> Any:
    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    threads = {"n_threads": 1, "n_threads_batch": 1}
    more = {"draft_model": draft, "logits_all": draft is not None, "flash_attn": flash, "verbose": False}
    return llama_cpp.Llama(model_path=path, n_ctx=1024, **threads, **more)


def run_peer(model: Any, ids: list[int]) -> tuple[list[int], float]:
    model.reset()
    output: list[int] = []
    began = 0.0
    for token in model.generate(ids, temp=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, reset=True):
        output.append(int(token))
        if len(output) == 1:
            began = time.thread_time()
        if len(output) == TOKENS:
            break
    return output, (TOKENS - 1) / (time.thread_time() - began)


def run_ours(engine: Engine, ids: list[int]) -> tuple[list[int], float]:
    sequence = engine.add(ids, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    first: tuple[float, int] | None = None
    while engine.sequences:
        engine.step()
        if first is None and sequence.output_length:
            first = time.thread_time(), sequence.output_length
    sequence.check()
    assert first is not None
    return list(sequence.output), (TOKENS - first[1]) / (time.thread_time() - first[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("suites")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--draft")
    given = parser.parse_args()
    torch.set_num_threads(1)
    target = Target(given.file, threads=1)
    methods: dict[str, Any] = {
        "llama.cpp": peer(given.file),
        "llama.cpp, flash attention": peer(given.file, flash=True),
        "llama.cpp, prompt lookup of 10": peer(given.file, 10),
        "llama.cpp, prompt lookup of 3": peer(given.file, 3),
    }
    drafters: dict[str, Any] = dict(DRAFTERS)
    if given.draft:
        drafters["draft_model"] = DraftModel(Target(given.draft, threads=1))
    methods |= {name: Engine(target, drafter, length=1024) for name, drafter in drafters.items()}
    order = np.random.default_rng(0)
    for suite in given.suites.split(","):
        texts = [item.turns[0] for item in load_suite(suite, given.data).items if item.turns]
        prompts = [target.tokenizer(text).input_ids for text in texts]
        prompts = [ids for ids in prompts if len(ids) < LONGEST][: given.limit]
        speeds: dict[str, list[float]] = {name: [] for name in methods}
        equal = dict.fromkeys(methods, 0)
        for turn, ids in enumerate([prompts[0], *prompts]):  # the first warms up
            outputs = {}
            for name in order.permutation(list(methods)):
                method = methods[name]
                run = run_ours if isinstance(method, Engine) else run_peer
                outputs[name], speed = run(method, ids)
                if turn:
                    speeds[name].append(speed)
            for name in methods if turn else ():
                equal[name] += outputs[name] == outputs["none" if name in drafters else "llama.cpp"]
        medians = {name: statistics.median(found) for name, found in speeds.items()}
        print(f"{suite}, {len(prompts)} prompts, load {os.getloadavg()[0]:.1f}")
        for name, speed in medians.items():
            ratios = f"{speed / medians['none']:.2f} x none, {speed / medians['llama.cpp']:.2f} x llama.cpp"
            print(f"  {name:31} {speed:6.1f} tokens/s, {ratios}, equal {equal[name]}/{len(prompts)}")


if __name__ == "__main__":
    main()
