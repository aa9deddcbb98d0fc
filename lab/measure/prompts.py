"""Tokens of prompt per second: stock transformers and outpace, on SmolLM2, or a random model of its shape.

    OMP_NUM_THREADS=1 python lab/measure/prompts.py [TYPE] [LENGTH ...]

TYPE is that of another family, such as starcoder2 or cohere.

Run after `make real`. Processor time of one thread, the median of rounds in which ways take turns. A prompt
is new, of random tokens; one token is generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outpace import Engine, SamplingParams, Target
from outpace.embedded import smollm2_path
from outpace.targets.hardware import processor

_ROUNDS = 3
_ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


def model_of(family: str | None, dtype: torch.dtype) -> Any:
    """SmolLM2, or a random model of another family in its shape."""
    if family is None:
        return AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=dtype).eval()
    shape = AutoConfig.from_pretrained(smollm2_path()).to_dict()
    sizes = {
        name: value for name, value in shape.items() if name.endswith("_size") or name.startswith("num_")
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, max_position_embeddings=8192)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def ways(family: str | None) -> dict[str, Callable[[list[int]], object]]:
    """What reads a prompt, by name."""
    found: dict[str, Callable[[list[int]], object]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = model_of(family, dtype)
        found[f"transformers, {name}"] = lambda prompt, model=model: model(
            torch.tensor([prompt]), use_cache=True, logits_to_keep=1
        )
        engine = Engine(Target(model_of(family, dtype)))
        found[f"outpace, {name}"] = lambda prompt, engine=engine: engine.generate([prompt], _ONE)
    return found


@torch.inference_mode()
def main(family: str | None, lengths: list[int]) -> None:
    torch.set_num_threads(1)
    given = ways(family)
    print(processor(), *given, sep=" | ")
    for length in lengths:
        speeds: dict[str, list[float]] = {name: [] for name in given}
        for seed in range(_ROUNDS):
            generator = torch.Generator().manual_seed(seed)
            prompt = torch.randint(100, 40_000, (length,), generator=generator).tolist()
            for name, read in given.items():
                began = process_time()
                read(prompt)
                speeds[name].append(length / (process_time() - began))
        print(length, *(f"{median(found):.0f}" for found in speeds.values()), sep=" | ", flush=True)


if __name__ == "__main__":
    named = next((word for word in sys.argv[1:] if not word.isdigit()), None)
    main(named, [int(word) for word in sys.argv[1:] if word.isdigit()] or [512, 2048, 8000])
