"""Tokens per step of lookahead decoding beside the original implementation's, on the same model and prompts.

    python benchmarks/lookahead_reference.py --reference DIR

DIR holds a model (`model/`) and `lookahead.json`: prompts as token ids, the greedy continuation of each,
and for each setting of the original implementation its tokens per step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import outpace
from outpace.core import SamplingParams
from outpace.drafters import Lookahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reference", type=Path, required=True)
    folder = parser.parse_args().reference
    reference = json.loads((folder / "lookahead.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, use_safetensors=True)
    target = outpace.Target(model)
    params = SamplingParams(max_new_tokens=reference["max_new_tokens"])
    print("| window | ngram | guesses | pool from text | original tau | tau | equal |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    for setting in reference["original"]:
        drafter = Lookahead(
            window=setting["window"],
            ngram=setting["ngram"],
            guesses=setting["guesses"],
            pool_from_prompt=setting["pool_from_prompt"],
            pool_from_output=setting["pool_from_prompt"],  # the original has one option for both
        )
        found = outpace.Engine(target, drafter).generate(reference["prompts"], params)
        equal = sum(g.tokens == t for g, t in zip(found, reference["greedy_tokens"], strict=True))
        tau = sum(g.stats.tokens for g in found) / sum(g.stats.steps for g in found)
        print(
            f"| {drafter.window} | {drafter.ngram} | {drafter.guesses} | {drafter.pool_from_prompt} "
            f"| {setting['tau']:.3f} | {tau:.3f} | {equal}/{len(found)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
