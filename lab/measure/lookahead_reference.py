"""Tokens per step of lookahead decoding and of the original implementation, on the same model and prompts.

    python lab/measure/lookahead_reference.py --reference DIR

DIR contains a model (`model/`) and `lookahead.json`: prompts as token ids, the greedy continuation of each,
and the original implementation's tokens per step for each setting. The window moves by one place per step, as
in the original, or by the number of accepted tokens; two seeds of each.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import outpace
from outpace.core import SamplingParams
from outpace.drafters.parallel.lookahead import Lookahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reference", type=Path, required=True)
    folder = parser.parse_args().reference
    reference = json.loads((folder / "lookahead.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, use_safetensors=True)
    target = outpace.Target(model)
    params = SamplingParams(max_new_tokens=reference["max_new_tokens"])
    print("| window | ngram | guesses | pool from text | original | moved by one | by the accepted | equal |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for setting in reference["original"]:
        pool = setting["pool_from_prompt"]  # the original has one option for prompt and output
        drafter = Lookahead(
            setting["window"],
            setting["ngram"],
            setting["guesses"],
            pool_from_prompt=pool,
            pool_from_output=pool,
        )
        taus: dict[str, list[str]] = {"one": [], "accepted": []}
        equal = 0
        for moves_by, seed in product(taus, (0, 1)):
            own = replace(drafter, moves_by=moves_by, seed=seed)
            found = outpace.Engine(target, own, adaptive=False, slots=4).generate(
                reference["prompts"], params
            )
            equal += sum(g.tokens == t for g, t in zip(found, reference["greedy_tokens"], strict=True))
            tau = sum(g.stats.tokens for g in found) / sum(g.stats.steps for g in found)
            taus[moves_by].append(f"{tau:.3f}")
        print(
            f"| {drafter.window} | {drafter.ngram} | {drafter.guesses} | {pool} | {setting['tau']:.3f} "
            f"| {', '.join(taus['one'])} | {', '.join(taus['accepted'])} | {equal}/{4 * len(found)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
