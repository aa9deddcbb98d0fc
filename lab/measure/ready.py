"""Time and memory from the start of a process until a model is ready, the first time and later.

    python lab/measure/ready.py FOLDER FILE.gguf ... [--quantise int4] [--src src OTHER/src] [--turns 3]

Each load is a process of its own, by `outpace.load`, imports included; versions take turns. *First* has no
record of self-tests, *later* that of the first. Files are read once before, and functions in C compiled.
Medians: seconds by the clock, of the processor, and the most memory in GB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_LOADS = """
import json, resource, sys, time
import outpace
name, quantise = sys.argv[1:]
options = {"quantise": quantise} if quantise else {}
loaded = outpace.load(name, **options)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps([time.process_time(), peak]))
"""


class Cost(NamedTuple):
    clock: float
    processor: float
    memory: float


def load(source: str, name: str, quantise: str, tested: str) -> Cost:
    """Load a model in a process of its own; ``tested`` is the folder of its record."""
    env = {**os.environ, "PYTHONPATH": source, "OUTPACE_TESTED": tested}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _LOADS, name, quantise], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        clock = time.perf_counter() - began
    return Cost(clock, *json.loads(line))


def warm(name: str) -> None:
    path = Path(name)
    for file in [path] if path.is_file() else path.iterdir():
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--quantise", default="")
    parser.add_argument("--src", nargs="+", default=["src"])
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    print("| model | source | time | clock | processor | memory |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for name in given.names:
        warm(name)
        found: dict[tuple[str, str], list[Cost]] = {}
        for source in given.src * given.turns:
            with tempfile.TemporaryDirectory() as tested:
                for when in ("first", "later"):
                    cost = load(source, name, given.quantise, tested)
                    found.setdefault((source, when), []).append(cost)
        shown = f"{name} {given.quantise}".strip()
        for (source, when), costs in found.items():
            medians = " | ".join(f"{statistics.median(values):.2f}" for values in zip(*costs, strict=True))
            print(f"| {shown} | {source} | {when} | {medians} |")


if __name__ == "__main__":
    main()
