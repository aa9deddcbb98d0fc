"""Error correction: the output is close to the input, so the input is drafted, also after each edit.

docs/guides/generate.md explains it. Run it: python examples/rewrite.py
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace

TEXT = "She bougth three aples and a bottel of milk. Then she went home and cooked diner for her famly."


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    target = outpace.Target(AutoModelForCausalLM.from_pretrained(outpace.nano_path()))
    prompt = tokenizer(f"Text: {TEXT}\nCorrected:").input_ids
    # As in the output: the colon is followed by a space.
    reference = tokenizer(" " + TEXT, add_special_tokens=False).input_ids
    params = outpace.SamplingParams(max_new_tokens=60)

    (plain,) = outpace.Engine(target).generate([prompt], params)
    # No governor, so that it drafts on any machine, whatever a step costs.
    engine = outpace.Engine(
        target, "reference:num_speculative_tokens=24", tokenizer=tokenizer, adaptive=False
    )
    (fast,) = engine.generate([prompt], params, references=[[reference]])

    print(fast.text)
    print(f"the same tokens: {fast.tokens == plain.tokens}")
    print(f"{len(fast.tokens)} tokens in {fast.stats.steps} steps instead of {plain.stats.steps}")


if __name__ == "__main__":
    main()
