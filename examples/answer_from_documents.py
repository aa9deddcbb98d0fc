"""Retrieval-augmented answering: the answer repeats the documents that were retrieved, each a reference.

docs/guides/rag.md explains it. Run it: python examples/answer_from_documents.py
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace

DOCUMENTS = [
    "The bridge was built in 1893 by a firm from Leeds. It crosses the river below the old mill.",
    "The museum keeps four hundred paintings and a large organ. It is open on every day but Monday.",
]
QUESTION = "Repeat the document."


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    target = outpace.Target(AutoModelForCausalLM.from_pretrained(outpace.nano_path()))
    prompt = tokenizer(f"Document: {' '.join(DOCUMENTS)}\nQuestion: {QUESTION}\nAnswer:").input_ids
    references = [tokenizer(" " + text, add_special_tokens=False).input_ids for text in DOCUMENTS]
    params = outpace.SamplingParams(max_new_tokens=60)

    (plain,) = outpace.Engine(target).generate([prompt], params)
    # No governor, so that it drafts on any machine, whatever a step costs.
    engine = outpace.Engine(
        target, "reference:num_speculative_tokens=24", tokenizer=tokenizer, adaptive=False
    )
    (fast,) = engine.generate([prompt], params, references=[references])

    print(fast.text)
    print(f"the same tokens: {fast.tokens == plain.tokens}")
    print(f"{len(fast.tokens)} tokens in {fast.stats.steps} steps instead of {plain.stats.steps}")


if __name__ == "__main__":
    main()
