"""An encoder-decoder model: drafts for its decoder, with the text of transformers' own generate().

The model has random weights, so that no download is needed. The code is the same for a model that corrects or
translates, with its tokenizer; the drafter "reference" then copies from the source.

Run it: python examples/encoder_decoder.py
"""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

import outpace

NEW = 40


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).double().eval()
    sources = [[12, 40, 7, 255, 31, 1], [9, 14, 99, 3, 27, 180, 66, 31, 5, 1]]

    stock = []
    for source in sources:
        output = model.generate(torch.tensor([source]), max_new_tokens=NEW, do_sample=False)
        stock.append(output[0, 1:].tolist())

    target = outpace.Target(model)
    params = outpace.SamplingParams(max_new_tokens=NEW)
    prompts = [target.start] * len(sources)  # what the decoder starts with
    for drafter in ("none", "lookahead", "reference"):
        engine = outpace.Engine(
            target, drafter, adaptive=False
        )  # drafts, though a model this small gains nothing
        generations = engine.generate(prompts, params, sources=sources)
        same = [g.tokens for g in generations] == stock
        steps = sum(g.stats.steps for g in generations)
        print(f"{drafter}: {steps} steps, the same tokens: {same}")


if __name__ == "__main__":
    main()
