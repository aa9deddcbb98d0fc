"""What a row costs a mixture of experts, beside a dense model of the same active size, and what is drafted.

    OMP_NUM_THREADS=1 nice python lab/measure/experts.py --out RESULT.json

Random weights, in bfloat16: rows then reach experts evenly, as in a trained model whose experts are balanced.
``--shapes`` picks ``tiny`` (3 million active parameters) or ``1b`` (a billion active ones of 3.5; 7 GB).

- ``milliseconds``: processor time of a forward after 64 tokens, by rows, medians of rounds in which numbers
  of rows take turns.
- ``chosen``: by a drafter whose tokens are right with a chance of 0.8 each, up to 15 in a chain: the mean
  number of nodes that the governor had verified per step, in the last of several texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.initialization import no_init_weights

from outpace import Engine, SamplingParams, Target
from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.draws.noise import key
from outpace.sequence import Sequence, Step
from outpace.targets import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.hardware import processor

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXT, LONGEST, RIGHT = 64, 15, 0.8
COMMON: dict[str, Any] = {"max_position_embeddings": 1024, "tie_word_embeddings": True, "eos_token_id": None}
# Sizes, experts and how many of them a token takes; an expert's inner size.
SHAPES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "tiny": (
        {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64},
        32, 4, 128,
    ),
    "1b": (
        {"vocab_size": 32768, "hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 96},
        40, 10, 512,
    ),
}  # fmt: skip
ROUNDS = {"tiny": 15, "1b": 3}
TEXTS = {"tiny": (4, 200), "1b": (2, 24)}  # texts, and tokens of each


def model_of(shape: str, experts: bool) -> Any:
    sizes, count, taken, inner = SHAPES[shape]
    if experts:
        config: Any = Qwen3MoeConfig(
            **COMMON, **sizes, num_experts=count, num_experts_per_tok=taken, moe_intermediate_size=inner
        )
    else:
        config = Qwen3Config(**COMMON, **sizes, intermediate_size=taken * inner)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    block = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).bfloat16() / 50
    for name, weight in model.named_parameters():  # one block again and again, since drawing takes minutes
        flat = weight.data.view(-1)
        if "norm" in name:
            flat.fill_(1)
            continue
        for start in range(0, len(flat), len(block)):
            part = flat[start : start + len(block)]
            part.copy_(block[: len(part)])
    return model


def milliseconds(target: TargetModel, rounds: int) -> dict[int, float]:
    """Processor time of a forward by rows, of a chain."""
    cache = target.new_cache(1, CONTEXT + max(WIDTHS) + 1)
    slot = cache.allocate()
    text = torch.randint(1, target.vocabulary, (CONTEXT + max(WIDTHS),)).tolist()
    target.forward(cache, Batch.of({slot: text[:CONTEXT]}, None))
    cache.keep({slot: range(CONTEXT)})
    taken: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for turn in range(rounds + 1):  # the first warms up
        for width in WIDTHS:
            start = time.process_time()
            target.forward(cache, Batch.of({slot: text[CONTEXT : CONTEXT + width]}))
            if turn:
                taken[width].append(1000 * (time.process_time() - start))
            cache.keep({slot: ()})
    return {width: statistics.median(own) for width, own in taken.items()}


@dataclass(frozen=True, eq=False)
class Knowing(SequenceDrafter[Sequence]):
    """A chain of the right tokens, each of them with a chance; ``right`` has the text."""

    right: list[int] = field(default_factory=list)

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        done = state.output_length
        tokens = self.right[done : done + LONGEST]
        for place in range(len(tokens)):
            if key(len(state.tokens), place) % 1000 >= 1000 * RIGHT:
                tokens[place] = (tokens[place] + 1) % 500
        return Draft(tokens, range(-1, len(tokens) - 1))


class Counting:
    """An observer that counts the nodes verified in each step."""

    hidden_layers: tuple[int, ...] = ()
    timed = False

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        pass

    def stepped(self, steps: Seq[Step]) -> None:
        self.nodes += [len(step.draft) for step in steps]

    def left(self, sequence: Sequence) -> None:
        pass


def chosen(target: TargetModel, texts: int, length: int) -> Mapping[str, float]:
    """What the governor had verified, in the last of several texts."""
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    prompt = list(range(1, 17))
    (plain,) = Engine(target).generate([prompt], params)
    counting = Counting()
    engine = Engine(target, Knowing(right=plain.tokens), observer=counting)
    for _ in range(texts):
        counting.nodes.clear()
        (found,) = engine.generate([prompt], params)
    assert found.tokens == plain.tokens or not target.bit_exact
    return {
        "nodes per step": statistics.mean(counting.nodes),
        "tokens per step": found.stats.tokens / found.stats.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", default="tiny,1b")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: dict[str, Any] = {"processor": processor()}
    for shape in args.shapes.split(","):
        for name, experts in (("experts", True), ("dense", False)):
            target = Target(model_of(shape, experts), check=False)
            own = results[f"{shape}, {name}"] = {}
            for what, measure in (
                ("milliseconds", partial(milliseconds, target, ROUNDS[shape])),
                ("chosen", partial(chosen, target, *TEXTS[shape])),
            ):
                own[what] = measure()
                args.out.write_text(json.dumps(results, indent=1), "utf-8")
            del target, measure


if __name__ == "__main__":
    main()
