"""Tokens per second of plain decoding by where the engine runs, and by what else the machine does.

    python lab/measure/threads.py FOLDER [--quantise int4] [--threads 1,2] [--busy 0,1,2] [--rounds 3]

Rounds in turns, one engine in the main thread and one in another; medians. Busy programs use a core each.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

import outpace

TOKENS = 32
PROMPT = [list(range(100, 164))]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run programs that use a core each meanwhile."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def speed(engine: outpace.Engine, threads: int) -> float:
    torch.set_num_threads(threads)
    began = time.perf_counter()
    engine.generate(PROMPT, outpace.SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    return TOKENS / (time.perf_counter() - began)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--quantise", choices=("int8", "int4"))
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    loaded = outpace.load(given.folder, "bfloat16", "cpu", quantise=given.quantise)
    with ThreadPoolExecutor(1) as other:
        here, there = loaded.engine("none"), other.submit(loaded.engine, "none").result()
        ways: dict[str, Callable[[int], float]] = {
            "main thread": partial(speed, here),
            "another thread": lambda threads: other.submit(speed, there, threads).result(),
        }
        for way in ways.values():
            way(given.threads[-1])
        for programs in given.busy:
            found: dict[tuple[str, int], list[float]] = {}
            with busy(programs):
                for _ in range(given.rounds):
                    for name, way in ways.items():
                        for threads in given.threads:
                            found.setdefault((name, threads), []).append(way(threads))
            for (name, threads), each in found.items():
                print(
                    f"{programs} busy, {name}, {threads} threads: {statistics.median(each):.1f}", flush=True
                )


if __name__ == "__main__":
    main()
