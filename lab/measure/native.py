"""A plain step of each native family beside the same model's step on transformers' modules.

    OMP_NUM_THREADS=1 python lab/measure/native.py [FAMILY ...]

Random models in bfloat16 of about 0.2 billion parameters; processor time of a step, the median of rounds in
which both take turns, after a prompt of 100 tokens.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outpace.cache import Cache, Slot
from outpace.targets import CausalTarget
from outpace.targets.batch import Batch
from outpace.targets.hardware import processor
from outpace.targets.native.recipe import RECIPES

_ROUNDS, _STEPS, _PROMPT = 7, 4, 100
_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 896,
    "intermediate_size": 2_816,
    "num_hidden_layers": 14,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2_048,
    "pad_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {"gpt_neox": {"num_key_value_heads": 14}}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SIZES, **_OWN.get(family, {})})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step(target: CausalTarget, cache: Cache, slot: Slot) -> float:
    """Seconds of a plain step."""
    begin = time.process_time()
    for _ in range(_STEPS):
        target.forward(cache, Batch.of({slot: [7]}))
        cache.keep({})
    return (time.process_time() - begin) / _STEPS


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    print(processor())
    for family in families or RECIPES:
        model = model_of(family)
        targets = [CausalTarget(model, check=False, plan=plan) for plan in ("native", "exact")]
        opened = []
        for target in targets:
            cache = target.new_cache(length=256)
            slot = cache.allocate()
            target.forward(cache, Batch.of({slot: list(range(_PROMPT))}, None))
            cache.keep({slot: range(_PROMPT)})
            opened.append((target, cache, slot))
        times = [[1e3 * step(*each) for each in opened] for _ in range(_ROUNDS)]
        native, other = (median(column) for column in zip(*times, strict=True))
        ratio = median(one / another for one, another in times)
        beside = targets[1].plan.name
        print(f"| `{family}` | {beside} | {other:.1f} | {native:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
