"""Governed drafters beside plain decoding with many sequences, in processor time, on a busy machine too.

    OMP_NUM_THREADS=1 python lab/measure/streams.py --model FOLDER --data DIR --streams 32 --requests 64

Engines of one model, one plain and one per drafter, decode the same prompts (GSM8K, HumanEval, turns of
Spec-Bench in turn), as many at once as there are streams, each replaced when it ends. Outputs have a half
to one and a half times ``--tokens``: equal ones would end together in plain decoding alone, whose next
prompts are then read in large chunks. Steps alternate, so that other load affects all of them. Printed as
JSON: processor milliseconds per token, and plain decoding's divided by them, over all steps (prompts
included) and over the steps in which no prompt is read.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import load
from outpace.sequence import Sequence
from serving import prompts

PLAIN = "none"


class Run:
    """One engine, its requests, and the seconds and tokens of each step."""

    def __init__(self, engine: Engine, texts: list[list[int]], tokens: int, streams: int) -> None:
        self._engine, self._tokens, self._streams = engine, tokens, streams
        self._waiting = list(enumerate(texts))[::-1]
        self._decoding: dict[int, Sequence] = {}
        self.done: dict[int, Sequence] = {}
        self.steps: list[tuple[float, int, bool]] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._decoding)

    def step(self) -> None:
        while self._waiting and len(self._decoding) < self._streams:
            place, text = self._waiting.pop()
            tokens = self._tokens // 2 + 7 * place % self._tokens
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            self._decoding[place] = self._engine.add(text, params)
        before = {place: one.output_length for place, one in self._decoding.items()}
        began = time.process_time()
        self._engine.step()
        seconds = time.process_time() - began
        emitted = sum(one.output_length - before[place] for place, one in self._decoding.items())
        self.steps.append((seconds, emitted, all(before.values())))
        for place, one in list(self._decoding.items()):
            if one.finish_reason is not None:
                self.done[place] = self._decoding.pop(place)

    def per_token(self, decoding: bool) -> float:
        """Milliseconds per token, over all steps or over those without rows of prompts."""
        some = [one for one in self.steps if one[2] or not decoding]
        return 1e3 * sum(one[0] for one in some) / sum(one[1] for one in some)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=120, help="maximum tokens of a prompt, its last ones")
    parser.add_argument("--drafters", nargs="+", default=["lookahead"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(given.model, given.dtype, "cpu")
    texts = [loaded.tokens(text)[-given.prompt :] for text in prompts(given.data, given.requests)]
    runs = {
        name: Run(loaded.engine(name, clock=time.process_time), texts, given.tokens, given.streams)
        for name in (PLAIN, *given.drafters)
    }
    gc.collect()
    gc.freeze()  # a collection over all imported modules would fall on one of them
    while any(run.busy for run in runs.values()):
        for run in runs.values():
            if run.busy:
                run.step()
    plain, found = runs[PLAIN], dict[str, Any]()
    for name, run in runs.items():
        stats = [one.stats for one in run.done.values()]
        found[name] = {
            "ms_per_token": round(run.per_token(False), 2),
            "speed": round(plain.per_token(False) / run.per_token(False), 3),
            "speed_decoding": round(plain.per_token(True) / run.per_token(True), 3),
            "median_step_ms": round(1e3 * statistics.median(one[0] for one in run.steps if one[2]), 1),
            "drafted": sum(one.drafted for one in stats),
            "accepted": sum(one.accepted for one in stats),
            "tokens_as_plain": all(run.done[place].output == one.output for place, one in plain.done.items()),
        }
    print(json.dumps(vars(given) | {"data": str(given.data), "results": found}, indent=1))


if __name__ == "__main__":
    main()
