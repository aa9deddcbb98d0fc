"""One rank of the tests of ``test_ranks``: a separate process, over gloo.

Arguments: the mode, the rank, how many there are, the store's file, the time-out, and what goes wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore
from transformers import AutoModelForCausalLM

import outpace
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.loading.shared import sharding
from outpace.targets.ranks.led import LedTarget, follow
from outpace.targets.ranks.processes import Ranks
from outpace.targets.ranks.shared_drafts import ParallelTarget
from outpace.targets.stock.causal import CausalTarget

PROMPTS = [[5, 9, 7, 31, 5, 9, 7], [*range(20, 32), 20, 21, 22]]
DRAFTERS = ["lookahead:window=5,ngram=4,guesses=4", "prompt_lookup"]
SAMPLINGS = [
    SamplingParams(max_new_tokens=16),
    SamplingParams(max_new_tokens=16, temperature=0.6, repetition_penalty=1.2, seed=3),
]


def decoded(target: Any) -> list[list[int]]:
    return [
        generation.tokens
        for drafter in DRAFTERS
        for params in SAMPLINGS
        for generation in outpace.Engine(target, drafter).generate(PROMPTS, params)
    ]


def tiny(size: int) -> Any:
    """A model whose heads that many ranks can divide."""
    return tiny_llama(heads=2 * size)


def whole(mode: str, size: int) -> Any:
    if mode == "draft":
        return tiny(size)
    folder = Path(os.environ["TINY"])
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **sharding(size)).eval()


class Faulty(CausalTarget):
    """A target of which something goes wrong at its twelfth forward."""

    fault = ""
    count = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == 12:
            if self.fault == "raise":
                raise ValueError("planted")
            if self.fault == "interrupt":
                raise KeyboardInterrupt
            if self.fault == "die":
                os._exit(9)
            if self.fault == "slow":
                time.sleep(60)
        return super().forward(*args, **kwargs)


def main(mode: str, rank: int, size: int, store: str, timeout: float, fault: str = "") -> dict[str, Any]:
    ranks = Ranks(FileStore(store, size), rank, size, timeout)
    inner: Any = Faulty(whole(mode, size), plan="stock")
    inner.fault, inner.count = fault, 0
    if mode == "draft":
        inner = ParallelTarget(inner, ranks)
    ranks.ready()
    began = time.monotonic()
    try:
        if not ranks.leads:
            follow(inner, ranks)
            return {"ended": True}
        led = LedTarget(inner, ranks)
        try:
            found = decoded(led)
        except KeyboardInterrupt:
            found = decoded(led)
        expected = decoded(CausalTarget(tiny(size)))
        ranks.close()
        return {"equal": found == expected, "sent": ranks.sent}
    except OutpaceError as error:
        return {"error": str(error), "seconds": time.monotonic() - began, "kind": type(error).__name__}


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, rank, size, store, timeout, *fault = sys.argv[1:]
    print(json.dumps(main(mode, int(rank), int(size), store, float(timeout), *fault)), flush=True)
    os._exit(0)  # whatever connections are left
