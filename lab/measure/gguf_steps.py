"""Steps, rows and prompts of a GGUF file by outpace's own functions, beside llama.cpp's own loop.

    OMP_NUM_THREADS=1 PYTHONPATH=lab/tools python lab/measure/gguf_steps.py MODEL.gguf [THREADS [ROWS]]

Run in the environment of `make test-llamacpp`. Medians in turns: processor time in one thread, elapsed time
in several. ROWS is the length of the prompt, 512 if it is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from gguf_types import Own
from outpace.targets import of_file
from outpace.targets.batch import Batch
from outpace.targets.hardware import processor

_TURNS, _STEPS, _CONTEXT, _WIDTH = 7, 6, 100, 8


class Ours:
    """Steps after a text, and prompts, by a target."""

    def __init__(self, target: Any, rows: int) -> None:
        self._target, self._cache = target, target.new_cache(1, rows + _CONTEXT + 64)
        self._slot = self._cache.allocate()
        self._forward(range(10, 10 + _CONTEXT))
        self._cache.keep({self._slot: range(_CONTEXT)})

    def rows(self, count: int) -> None:
        """Forward rows after the text, as a step does, with all their logits."""
        self._forward(range(500, 500 + count))
        self._cache.truncate(self._slot, _CONTEXT)

    def prompt(self, count: int) -> None:
        """Forward a prompt, with the logits of its last row."""
        self._cache.truncate(self._slot, 0)
        for first in range(0, count, 512):
            some = range(100 + first, 100 + min(first + 512, count))
            self._forward(some, len(some) - 1)
            self._cache.keep({self._slot: range(len(some))})
        self._cache.truncate(self._slot, _CONTEXT)

    def _forward(self, tokens: range, first: int = 0) -> None:
        self._target.forward(self._cache, Batch.of({self._slot: list(tokens)}, first))


def turns(
    ways: dict[str, Callable[[], None]], clock: Callable[[], float], times: int, rounds: int
) -> dict[str, float]:
    """Seconds of each way, medians; before each is timed it runs once."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way()  # the others have emptied the processor's caches
            began = clock()
            for _ in range(times):
                way()
            found[name].append((clock() - began) / times)
    return {name: median(times) for name, times in found.items()}


def main(path: Path, threads: int = 1, rows: int = 512) -> None:
    torch.set_num_threads(threads)
    clock = process_time if threads == 1 else perf_counter
    ours = Ours(of_file(path, others=False), rows)
    theirs = Own(path, threads, rows + _CONTEXT + 64, _CONTEXT)
    print(f"{path.name} on {processor()}, {threads} threads")
    both: dict[str, Any] = {"outpace": ours, "llama.cpp": theirs}
    steps = {
        f"{name}, {width}": (lambda one=one, width=width: one.rows(width))
        for name, one in both.items()
        for width in (1, 2, 4, _WIDTH)
    }
    found = turns(steps, clock, _STEPS, _TURNS)
    plain = {name: found[f"{name}, 1"] for name in both}
    for name, seconds in found.items():
        own = plain[name.partition(",")[0]]
        print(f"{name} rows: {1e3 * seconds:.2f} ms, {seconds / own:.2f} steps")
    print(f"plain step, of llama.cpp's: {plain['outpace'] / plain['llama.cpp']:.2f}")
    prompts = turns({name: (lambda one=one: one.prompt(rows)) for name, one in both.items()}, clock, 1, 3)
    for name, seconds in prompts.items():
        print(f"{name}, prompt of {rows}: {rows / seconds:.0f} tokens/s")
    print(f"prompt, times as fast as llama.cpp: {prompts['llama.cpp'] / prompts['outpace']:.2f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
