"""What a further row costs with rounded weights, and what drafts gain on top of them, on SmolLM2.

    OMP_NUM_THREADS=1 python lab/measure/rounded_drafts.py PROMPTS.jsonl [MODEL.gguf ...]

Run after `make real`; files in GGUF format need llama-cpp-python. PROMPTS has a ``prompt`` a line, as
HumanEval has. Without files: bfloat16, ``int8`` and ``int4``. Processor time of one thread, models in turns:

- milliseconds of a forward after 200 tokens by rows, and relative to one row, medians of seven;
- milliseconds a token of a governed engine, and how many times faster than plain decoding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch

from outpace import SamplingParams
from outpace.loading import Loaded, load
from outpace.targets.batch import Batch
from outpace.targets.hardware import processor

_WIDTHS, _ROUNDS, _CONTEXT = (1, 2, 4, 8, 16, 32), 7, 200
_DRAFTERS = ("none", "suffix:memory=0", "suffix", "lookahead")
_ONE, _SOME = SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=128)


def models(files: list[str]) -> dict[str, Loaded]:
    """The models by name."""
    if files:
        return {Path(file).stem: load(file, llamacpp="threads=1") for file in files}
    return {
        name: load("smollm2", "bfloat16", "cpu", quantise=None if name == "bfloat16" else name)
        for name in ("bfloat16", "int8", "int4")
    }


def widths(given: dict[str, Loaded]) -> None:
    """Print what forwards of several rows take."""
    seconds: dict[tuple[str, int], list[float]] = {}
    opened: dict[str, Any] = {}
    for name, loaded in given.items():
        cache = loaded.target.new_cache(1, 512)
        slot = cache.allocate()
        loaded.target.forward(cache, Batch.of({slot: list(range(100, 100 + _CONTEXT))}))
        cache.keep({slot: range(_CONTEXT)})
        opened[name] = cache, slot
    for _ in range(_ROUNDS):
        for name, (cache, slot) in opened.items():
            for width in _WIDTHS:
                for _ in range(2):  # the others have emptied the processor's caches
                    began = process_time()
                    given[name].target.forward(cache, Batch.of({slot: list(range(1000, 1000 + width))}))
                    taken = process_time() - began
                    cache.truncate(slot, _CONTEXT)
                seconds.setdefault((name, width), []).append(taken)
    print("rows", *given, sep=" | ")
    for width in _WIDTHS:
        cells = [
            f"{1e3 * median(seconds[name, width]):.1f} "
            f"({median(a / b for a, b in zip(seconds[name, width], seconds[name, 1], strict=True)):.2f})"
            for name in given
        ]
        print(width, *cells, sep=" | ", flush=True)


def drafts(given: dict[str, Loaded], prompts: list[str]) -> None:
    """Print what governed drafters gain, after each prompt."""
    engines = {
        (name, drafter): loaded.engine(drafter) for name, loaded in given.items() for drafter in _DRAFTERS
    }
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    for number, prompt in enumerate(prompts, 1):
        for (name, drafter), engine in engines.items():
            ids = given[name].encode(prompt)
            engine.generate([ids], _ONE)
            began = process_time()
            [generation] = engine.generate([ids], _SOME)
            seconds[name, drafter] += process_time() - began
            tokens[name, drafter] += len(generation.tokens)
        each = {key: seconds[key] / tokens[key] for key in engines}
        for name in given:
            cells = [f"{drafter} {1e3 * each[name, drafter]:.1f}" for drafter in _DRAFTERS]
            gains = [f"{each[name, 'none'] / each[name, drafter]:.2f}" for drafter in _DRAFTERS[1:]]
            print(number, name, *cells, *gains, sep=" | ", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print(processor())
    given = models(sys.argv[2:])
    widths(given)
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    drafts(given, [json.loads(line)["prompt"] for line in lines[5:100:5]])


if __name__ == "__main__":
    main()
