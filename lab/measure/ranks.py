"""Shared drafts on this machine: measured forwards and telling, the model's answer, rows and bytes per step.

torchrun --nproc-per-node 2 lab/measure/ranks.py --model smollm2 --out ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from outpace.bench.machine import machine
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import load
from outpace.loading.shared import latency_of
from outpace.policy.governor import WIDTHS
from outpace.targets.ranks.led import LedTarget, follow
from outpace.targets.ranks.processes import Ranks
from outpace.targets.ranks.shared_drafts import ParallelTarget

PROMPTS = ["Question: What is 2 + 3? Answer:", "def fibonacci(n):\n", "Once upon a time, there was a"]
DRAFTERS = ["lookahead", "lookahead:window=15,ngram=5,guesses=15", "token_recycling", "prompt_lookup"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks.of_launcher(600)
    loaded = load(given.model, given.dtype, "cpu" if not torch.cuda.is_available() else None)
    part = ParallelTarget(loaded.target, ranks)
    latency = latency_of(part)
    ranks.ready()
    if not ranks.leads:
        follow(part, ranks)
        return
    led = LedTarget(part, ranks)
    widths = [n for n in WIDTHS if n <= 128]
    found: dict[str, Any] = {
        "machine": machine("cpu"),
        "load": os.getloadavg()[0],
        "model": str(loaded),
        "ranks": ranks.size,
        "forwards_ms": {rows: 1e3 * seconds for rows, seconds in latency.forwards.items()},
        "telling_ms": 1e3 * latency.telling,
        "pays_from": latency.pays_from,
        "alone_ms": {n: 1e3 * latency.alone(n) for n in widths},
        "shared_ms": {n: 1e3 * latency.shared(n) for n in widths},
        "drafters": {},
    }
    prompts = [loaded.encode(text) for text in PROMPTS]
    params = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True)
    for drafter in DRAFTERS:
        alone = Engine(loaded.target, drafter, adaptive=False)
        shared = Engine(led, drafter, adaptive=False)
        seconds: dict[str, list[float]] = {"alone": [], "shared": []}
        before = (part.traffic.steps, part.traffic.rows, part.traffic.whole, part.traffic.bytes, ranks.sent)
        equal = True
        for _ in range(given.repeats):
            outputs = []
            for name, engine in (("alone", alone), ("shared", shared)):
                began = time.perf_counter()
                outputs.append([engine.generate([prompt], params)[0].tokens for prompt in prompts])
                seconds[name].append(time.perf_counter() - began)
            equal = equal and outputs[0] == outputs[1]
        after = (part.traffic.steps, part.traffic.rows, part.traffic.whole, part.traffic.bytes, ranks.sent)
        steps, rows, whole, told, sent = (b - a for a, b in zip(before, after, strict=True))
        found["drafters"][drafter] = {
            "equal": equal,
            "rows_per_step": rows / steps,
            "rows_per_step_alone": whole / steps,
            "bytes_told_per_step": told / steps,
            "bytes_sent_per_step": sent / steps,
            "seconds_alone_over_shared": statistics.median(seconds["alone"])
            / statistics.median(seconds["shared"]),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
