"""Plain steps and losses of SmolLM2 with rounded weights, beside llama.cpp's.

    OMP_NUM_THREADS=1 PYTHONPATH=lab/tools python lab/measure/rounded.py TEXT

Run after `make real`, in the environment of `make test-llamacpp`. TEXT is a file whose first 4,096 tokens are
scored. A plain step is processor time, relative to that of bfloat16, the median of ratios measured in turns;
llama.cpp runs its own loop. The loss is in nats per token, over windows of 512.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_types import Own, smollm2
from outpace import Engine, Target
from outpace.embedded import smollm2_path
from outpace.targets.batch import Batch
from outpace.targets.hardware import processor
from outpace.testing.gguf import quantise

_TURNS, _STEPS, _WINDOW, _TOKENS = 9, 8, 512, 4096


def loss(target: Any, tokens: list[int]) -> float:
    """Nats per token."""
    engine, found = Engine(target), []
    for start in range(0, len(tokens), _WINDOW):
        for chunk in engine.score(tokens[start : start + _WINDOW], 0):
            found += [one.logprob for one in chunk]
    return -sum(found) / len(found)


def step_of(target: Any) -> Callable[[], None]:
    """A plain step of greedy decoding."""
    cache = target.new_cache(1, 512)
    slot, token = cache.allocate(), [1]

    def step() -> None:
        output = target.forward(cache, Batch.of({slot: token}))
        token[0] = int(output.logits[0].argmax())
        cache.keep({slot: [0]})

    return step


def seconds(step: Callable[[], None]) -> float:
    step()  # the others have emptied the processor's caches
    began = process_time()
    for _ in range(_STEPS):
        step()
    return (process_time() - began) / _STEPS


def main(text: Path) -> None:
    torch.set_num_threads(1)
    folder = smollm2_path()
    tokens = AutoTokenizer.from_pretrained(folder)(text.read_text("utf-8"))["input_ids"][:_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    targets = {"bfloat16": Target(model)}
    targets |= {f"`{name}`": Target(model, quantise=name) for name in ("int8", "int4")}
    steps = {name: step_of(target) for name, target in targets.items()}
    with TemporaryDirectory() as scratch:
        source = smollm2(Path(scratch) / "smollm2.gguf")
        for kind in ("q8_0", "q4_0"):
            path = quantise(source, kind, Path(scratch) / f"{kind}.gguf")
            steps[f"llama.cpp {kind}"] = Own(path).step
            targets[f"llama.cpp {kind}"] = Target(path, threads=1)
        ratios: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(_TURNS):
            taken = {name: seconds(step) for name, step in steps.items()}
            for name, one in taken.items():
                ratios[name].append(one / taken["bfloat16"])
        print(f"{processor()}, bfloat16 {taken['bfloat16'] * 1e3:.1f} ms")
        print("| weights | plain step, of bfloat16's | loss |\n| --- | ---: | ---: |")
        for name, target in targets.items():
            print(f"| {name} | {median(ratios[name]):.2f} | {loss(target, tokens):.4f} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
