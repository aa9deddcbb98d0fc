"""Error correction: the output is close to the input, so the input is drafted, also after each edit.

It uses SmolLM2-135M-Instruct, which ``make real`` fetches. Without it the embedded model stands in, which
drafts as well but repeats mistakes. docs/guides/generate.md explains it.

Run it: python examples/rewrite.py
"""

from __future__ import annotations

import outpace

TEXT = (
    "The teacher said that we should begin the lesson tommorow. "
    "Please bring your books, a pen and a seperate sheet of paper."
)


def main() -> None:
    try:
        model = outpace.load("smollm2", dtype="bfloat16")
        prompt = model.encode(f"Correct all spelling errors:\n{TEXT}", chat=True)
        reference = model.plain_tokens(TEXT)
    except outpace.OutpaceError:  # it has not been fetched
        model = outpace.load()
        prompt = model.encode(f"Text: {TEXT}\nCorrected:")
        reference = model.plain_tokens(" " + TEXT)  # as in the output: the colon is followed by a space
    params = outpace.SamplingParams(max_new_tokens=60)

    (plain,) = model.engine("none").generate([prompt], params)
    # No governor, so that it drafts on any machine, whatever a step costs.
    engine = model.engine("reference:num_speculative_tokens=24", adaptive=False)
    (fast,) = engine.generate([prompt], params, references=[[reference]])

    print(fast.text)
    print(f"the same tokens: {fast.tokens == plain.tokens}")
    print(f"{len(fast.tokens)} tokens in {fast.stats.steps} steps instead of {plain.stats.steps}")


if __name__ == "__main__":
    main()
