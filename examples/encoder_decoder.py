"""An encoder-decoder model: drafts for its decoder, and the text compared with transformers' own generate().

The model has random weights, so that no download is needed. The code is the same for a model that translates,
with its tokenizer. The drafter "reference" copies from an earlier version of the output, as when a sentence
is translated again after an edit; without one it copies from the source, as for a model that corrects texts.

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
    # An earlier version: a token was inserted since, and one replaced.
    earlier = [[[*tokens[:10], *tokens[11:25], 299, *tokens[26:]]] for tokens in stock]

    target = outpace.Target(model)
    params = outpace.SamplingParams(max_new_tokens=NEW)
    prompts = [target.start] * len(sources)  # what the decoder starts with
    for drafter in ("none", "lookahead", "reference"):
        # No governor, so that it drafts, though a model this small gains no time.
        engine = outpace.Engine(target, drafter, adaptive=False)
        references = earlier if drafter == "reference" else None
        generations = engine.generate(prompts, params, sources=sources, references=references)
        same = [generation.tokens for generation in generations] == stock
        steps = sum(generation.stats.steps for generation in generations)
        print(f"{drafter}: {steps} steps, the same tokens: {same}")


if __name__ == "__main__":
    main()
