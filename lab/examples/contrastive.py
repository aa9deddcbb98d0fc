"""Speculative contrastive decoding: the small model of the contrastive pair also drafts.

The amateur's logits are subtracted from the expert's, and the same amateur drafts. The text is that of plain
contrastive decoding, in fewer steps.

Run it: python lab/examples/contrastive.py
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.drafters.models.draft_model import DraftModel
from outpace_lab.targets import ContrastiveTarget

PROMPT = "def mean(values):\n    total = 0\n    for value in values:\n        "


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    expert, amateur = (
        outpace.Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        for path in (outpace.nano_path(), outpace.nano_draft_path())
    )
    target = ContrastiveTarget(expert, amateur, alpha=0.1, beta=0.5)
    prompts = [tokenizer(PROMPT).input_ids]
    params = outpace.SamplingParams(max_new_tokens=40)

    (plain,) = outpace.Engine(target).generate(prompts, params)
    engine = outpace.Engine(target, DraftModel(amateur), tokenizer=tokenizer, adaptive=False)
    (fast,) = engine.generate(prompts, params)
    for name, generation in (("plain", plain), ("speculative", fast)):
        print(f"{name:<12}{len(generation.tokens):>3} tokens in {generation.stats.steps} steps")
    print(f"the same tokens: {plain.tokens == fast.tokens}")
    print(fast.text)


if __name__ == "__main__":
    main()
