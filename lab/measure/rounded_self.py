"""Times plain decoding, of drafters in turns with it: prompts by chat template, governed, processor time.

    OMP_NUM_THREADS=1 python lab/measure/rounded_self.py MODEL FILE [FILE ...]

A FILE has a prompt a line, as JSON with ``question``, ``prompt`` or ``turns`` (GSM8K, HumanEval, Spec-Bench).
For each, and each drafter: the median over prompts of plain decoding's time over the drafter's, its 95%
interval, and the tokens per step. Prompts are the first of each file after those that warm the governors up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outpace import Engine, SamplingParams
from outpace.bench.statistics import interval
from outpace.engine.usual import usual
from outpace.loading import Loaded, load
from outpace.targets.hardware import processor

_LONGEST = 256  # tokens of a prompt


def options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="folder or name of a model")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="prompts")
    parser.add_argument(
        "--drafters", default="", help="specs, separated by semicolons; by default the usual one"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=24, help="of each file")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each file")
    parser.add_argument(
        "--warm", type=int, default=2, help="prompts of each file before those that are measured"
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--streams", type=int, default=1, help="prompts that are decoded together")
    return parser.parse_args()


def prompts_of(file: Path, loaded: Loaded) -> Iterator[list[int]]:
    for line in file.read_text("utf-8").splitlines():
        row = json.loads(line)
        text = row.get("question") or row.get("prompt") or row["turns"][0]
        yield loaded.encode(text, chat=loaded.has_template)[:_LONGEST]


def decode(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, list[list[int]], int]:
    """Processor seconds after the prompts' first tokens, the tokens, and the steps."""
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while any(not sequence.output for sequence in sequences):
        engine.step()
    before, steps, began = sum(len(s.output) for s in sequences), 0, time.process_time()
    while engine.sequences:
        engine.step()
        steps += 1
    seconds = time.process_time() - began
    tokens = [sequence.output for sequence in sequences]
    return seconds / max(sum(map(len, tokens)) - before, 1), tokens, steps


def measure(given: Any, loaded: Loaded, engines: dict[str, Engine], file: Path) -> None:
    params = SamplingParams(
        max_new_tokens=given.tokens, temperature=given.temperature, top_p=given.top_p, seed=7, ignore_eos=True
    )
    prompts = list(islice(prompts_of(file, loaded), given.skip + given.warm + given.prompts))
    found: dict[str, list[tuple[float, list[list[int]], int]]] = {name: [] for name in engines}
    groups = range(given.skip, len(prompts) - given.streams + 1, given.streams)
    for place in groups:
        for name, engine in engines.items():
            result = decode(engine, prompts[place : place + given.streams], params)
            if place >= given.skip + given.warm:
                found[name].append(result)
    for name, results in found.items():
        ratios = [plain[0] / own[0] for plain, own in zip(found["none"], results, strict=True)]
        low, high = interval(ratios) or (ratios[0], ratios[0])
        equal = all(plain[1] == own[1] for plain, own in zip(found["none"], results, strict=True))
        a_step = sum(sum(map(len, r[1])) for r in results) / sum(r[2] for r in results) / given.streams
        print(
            f"{file.stem:18} {name:40} {median(ratios):.2f} ({low:.2f} to {high:.2f})  "
            f"{a_step:.2f} tokens a step  {median(r[0] for r in results) * 1e3:.1f} ms a token  "
            f"{'equal' if equal else 'DIFFERENT TOKENS'}",
            flush=True,
        )


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    loaded = load(given.model, given.dtype, "cpu")
    specs = ["none", *filter(None, given.drafters.split(";"))]
    if not specs[1:]:
        specs.append(usual(loaded.target).spec)
    engines = {}
    for spec in specs:
        began = time.process_time()
        engines[spec] = loaded.engine(spec, slots=given.streams)
        print(f"{spec}: made in {time.process_time() - began:.1f} s")
    print(f"{loaded} by {processor()}, {given.tokens} tokens, {given.prompts} prompts a file", flush=True)
    for file in given.files:
        measure(given, loaded, engines, file)


if __name__ == "__main__":
    main()
