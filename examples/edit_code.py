"""Code editing with a predicted output: the old code is sent with the request as the prediction.

The first lines of the answer contain the edit, since the embedded model does not follow instructions. With a
larger model the prompt describes the change. docs/guides/generate.md explains it.

Run it: python examples/edit_code.py
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace

OLD = '''def total(items, rate):
    """The price of all items."""
    price = 0
    for item in items:
        price += item.price * item.count
    return price + price * rate
'''
BEGUN = '''def total(items, rate, discount):
    """The price of all items."""
    price = 0
    for item in items:'''


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    target = outpace.Target(AutoModelForCausalLM.from_pretrained(outpace.nano_path()))
    prompt = tokenizer(f"Document: {OLD}Question: Repeat the document.\nAnswer: {BEGUN}").input_ids
    prediction = tokenizer(OLD, add_special_tokens=False).input_ids
    params = outpace.SamplingParams(max_new_tokens=60)

    (plain,) = outpace.Engine(target).generate([prompt], params)
    # No governor, so that it drafts on any machine, whatever a step costs.
    engine = outpace.Engine(
        target, "reference:num_speculative_tokens=24", tokenizer=tokenizer, adaptive=False
    )
    (fast,) = engine.generate([prompt], params, references=[[prediction]])

    print(BEGUN + (fast.text or ""))
    print(f"the same tokens: {fast.tokens == plain.tokens}")
    print(f"{len(fast.tokens)} tokens in {fast.stats.steps} steps instead of {plain.stats.steps}")


if __name__ == "__main__":
    main()
