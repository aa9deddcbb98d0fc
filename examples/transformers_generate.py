"""Acceleration of transformers' own generate(): one additional line, and the calls stay unchanged.

Run it: python examples/transformers_generate.py
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import outpace


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32)
    prompt = tokenizer("import torch\n\n\ndef forward(self, x):\n", return_tensors="pt")
    options = {"max_new_tokens": 120, "pad_token_id": tokenizer.eos_token_id}

    began = time.perf_counter()
    stock = model.generate(**prompt, **options)
    seconds = time.perf_counter() - began
    print(f"stock: {stock.shape[1] - prompt.input_ids.shape[1]} tokens in {seconds:.2f} s")

    outpace.accelerate(model, "lookahead")  # the additional line

    began = time.perf_counter()
    fast = model.generate(**prompt, **options)
    seconds = time.perf_counter() - began
    print(f"accelerated: {fast.shape[1] - prompt.input_ids.shape[1]} tokens in {seconds:.2f} s")
    print(f"the same tokens: {torch.equal(stock, fast)}")

    # Streamers, stop strings and sampling work as before. The seed comes from torch.
    torch.manual_seed(0)
    model.generate(
        **prompt,
        **options,
        do_sample=True,
        temperature=0.7,
        stop_strings=["\n\n\n"],
        tokenizer=tokenizer,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )

    outpace.restore(model)  # and it is a plain model again


if __name__ == "__main__":
    main()
