"""Retrieval while decoding: the document in front of the text is looked up again every few tokens.

Speculation guesses most of the documents from a local cache and queries the knowledge base for several at
once: the same answer with fewer calls. Needs `pip install 'outpace-lab[ralm]'`.

Run it: python lab/examples/ralm.py
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace_lab.ralm import BM25Retriever, RalmPipeline, Speculation

DOCUMENTS = [
    "The bridge over the river was built in 1893 by a firm from Leeds, and repaired in 1951.",
    "The museum keeps four hundred paintings, a large organ and the letters of the painter.",
    "The island lies nine miles off the coast. A ferry goes there twice a day in summer.",
    "The album was recorded in a barn near Bristol in 1994, and the band toured with it for a year.",
    "The castle was sold to a merchant named Harris, who kept horses in the great hall.",
    "The storm destroyed two hundred houses in the harbour and sank the ferry.",
    "The parliament met for the first time in October, in a school near the river.",
    "The firm from Leeds built nine bridges, three of them over the river.",
]
QUESTION = "Question: What did the storm destroy, and where does the ferry go?\nAnswer:"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    model = AutoModelForCausalLM.from_pretrained(outpace.nano_path(), dtype=torch.float32)
    engine = outpace.Engine(model, "prompt_lookup", tokenizer=tokenizer)

    retriever = BM25Retriever(DOCUMENTS)
    contexts = [tokenizer(f"Document: {text}\n").input_ids for text in DOCUMENTS]
    question = tokenizer(QUESTION).input_ids
    params = outpace.SamplingParams(max_new_tokens=48, ignore_eos=True)

    tokens = {}
    for name, speculation in (("plain", None), ("speculative", Speculation(stride=3, prefetch=4))):
        pipeline = RalmPipeline(
            engine, retriever, contexts, stride=4, query_tokens=16, speculation=speculation
        )
        answer = pipeline.generate(question, params)
        tokens[name] = answer.tokens
        stats = answer.stats
        print(
            f"{name:<12}{stats.batches:>3} calls of the knowledge base, {stats.queries} queries, "
            f"{stats.rollbacks} rollbacks, {stats.seconds:.2f} s"
        )
    print(f"the same tokens: {tokens['plain'] == tokens['speculative']}")
    print("documents:", *answer.documents)
    print(answer.text)


if __name__ == "__main__":
    main()
