"""Processor time of a step outside the model: what the engine's Python and bookkeeping cost.

    OMP_NUM_THREADS=1 python lab/measure/overhead.py --out RESULT.json

Each case decodes the built-in prompts with the embedded model in float32 and one thread. For every step in
which no sequence joins or leaves, three times are measured, in milliseconds of the thread's processor time:

- engine: the step without ``target.forward``: drafting, choosing, the cache's ``keep``, bookkeeping.
- target: ``target.forward`` without the model: inputs, masks, the window on the cache.
- model: the model's own forward, with the rows that it writes to the cache.

``outside`` is the sum of the first two. Medians over the steps of a case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace

DRAFTERS = ("none", "prompt_lookup", "lookahead")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
    },
}
BATCHES = (1, 16)
TOKENS = 128  # of each output
PARTS = ("outside", "engine", "target", "model")


class Timer:
    """Seconds of processor time spent in a method since the last reading."""

    def __init__(self, owner: type, name: str) -> None:
        self._seconds = 0.0
        setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds += time.thread_time() - began

        return timed

    def read(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Bench:
    """The embedded model, its prompts, and timers in the target and the model."""

    def __init__(self, adaptive: bool) -> None:
        path = outpace.nano_path()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
        self._target = outpace.Target(model)
        self._adaptive = adaptive
        file = Path(outpace.__file__).parent / "bench" / "prompts" / "builtin.jsonl"
        items = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        self._prompts = [tokenizer(item["turns"][0])["input_ids"] for item in items if "turns" in item][:16]
        self._model_timer = Timer(type(self._target._modules.step), "forward")
        self._target_timer = Timer(type(self._target), "forward")

    def measure(self, drafter: str, sampling: str, batch: int, steps: int) -> dict[str, float]:
        """Median milliseconds of each part over at least ``steps`` steps."""
        engine = outpace.Engine(self._target, drafter, adaptive=self._adaptive)
        params = outpace.SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, seed=7, **SAMPLINGS[sampling])
        found: list[tuple[float, ...]] = []
        place = 0
        while len(found) < steps:
            for _ in range(batch):
                engine.add(self._prompts[place % len(self._prompts)], params)
                place += 1
            engine.step()  # the prompts
            while engine.sequences:
                self._model_timer.read(), self._target_timer.read()
                before = time.thread_time()
                stepped = engine.step()
                seconds = time.thread_time() - before
                model, target = self._model_timer.read(), self._target_timer.read()
                if len(engine.sequences) == len(stepped) == batch:
                    found.append((seconds - model, seconds - target, target - model, model))
        medians = [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
        return dict(zip(PARTS, medians, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    parser.add_argument("--steps", type=int, default=300, help="minimum number of steps per case")
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS)
    parser.add_argument("--samplings", nargs="*", default=list(SAMPLINGS), choices=SAMPLINGS)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--adaptive", action="store_true", help="let a governor choose the nodes drafted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.adaptive)
    rows: list[dict[str, Any]] = []
    print(f"{'drafter':<14} {'sampling':<10} {'batch':>5}", *(f"{part:>8}" for part in PARTS))
    for batch in options.batches:
        for drafter in options.drafters:
            for sampling in options.samplings:
                figures = bench.measure(drafter, sampling, batch, options.steps)
                rows.append({"drafter": drafter, "sampling": sampling, "batch": batch, **figures})
                values = (f"{figures[part]:8.3f}" for part in PARTS)
                print(f"{drafter:<14} {sampling:<10} {batch:>5}", *values, flush=True)
    if options.out:
        result = {"command": " ".join(sys.argv), "steps": options.steps, "milliseconds": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
