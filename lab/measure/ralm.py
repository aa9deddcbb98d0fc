"""Benchmark of speculative retrieval: calls of the knowledge base, and the time saved.

    python lab/measure/ralm.py --documents FILE --data DIR --out RESULT.json

--documents is a text whose paragraphs are the knowledge base, DIR contains gsm8k_test*.jsonl, whose questions
are the prefixes. The model decodes with a document in front of the text that is looked up again
every --stride tokens: by BM25, and by exact search among dense vectors (the mean of the model's embeddings of
a text's tokens: it finds texts with similar words, which is sufficient here). `plain` queries before each
block, `speculative` guesses. Prefixes take turns; tokens must be equal. --latency simulates a knowledge base
on another machine, which answers a batch after a fixed delay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.bench.machine import machine
from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace_lab.ralm import (
    BM25Retriever,
    DenseRetriever,
    RalmGeneration,
    RalmPipeline,
    Retriever,
    Speculation,
)

WAYS = {"plain": None, "speculative": Speculation()}


class Remote:
    """A remote knowledge base: each batch of queries is answered after a delay in milliseconds."""

    def __init__(self, base: Retriever[Any], milliseconds: float) -> None:
        self._base, self._seconds = base, milliseconds / 1000
        self.encode, self.scores = base.encode, base.scores

    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        time.sleep(self._seconds)
        return self._base.search(queries, count)


def paragraphs(file: Path, most: int, words: int) -> list[str]:
    """Paragraphs of more than a few words, each cut to ``words`` words."""
    found = [line.split() for line in file.read_text("utf-8").splitlines()]
    return [" ".join(line[:words]) for line in found if len(line) > 8][:most]


def dense(texts: Sequence[str], tokenizer: Any, table: torch.Tensor) -> DenseRetriever:
    def encode(text: str) -> np.ndarray[Any, Any]:
        ids = tokenizer(text, add_special_tokens=False).input_ids or [0]
        vector = table[ids].mean(dim=0).numpy()
        return vector / np.linalg.norm(vector)

    return DenseRetriever(np.stack([encode(text) for text in texts]), encode)


def measured(make: Callable[[Speculation | None], RalmPipeline[Any]], prefixes: list[list[int]]) -> Any:
    """Totals over all prefixes of each way, and the median of the paired speedups."""
    pipelines = {name: make(how) for name, how in WAYS.items()}
    params = SamplingParams(max_new_tokens=64, ignore_eos=True, seed=0)
    found: dict[str, list[RalmGeneration]] = {name: [] for name in WAYS}
    for turn, prefix in enumerate([prefixes[0], *prefixes]):  # the first warms up
        for name in list(WAYS)[:: 1 if turn % 2 else -1]:
            found[name].append(pipelines[name].generate(prefix, params))
    counted = {name: runs[1:] for name, runs in found.items()}
    if any(
        one.tokens != other.tokens for one, other in zip(found["plain"], found["speculative"], strict=True)
    ):
        raise SystemExit("the outputs are not equal")
    pairs = zip(counted["plain"], counted["speculative"], strict=True)
    speedups = [plain.stats.seconds / guessed.stats.seconds for plain, guessed in pairs]
    return {
        "speedup": statistics.median(speedups),
        **{name: totals(runs) for name, runs in counted.items()},
    }


def totals(runs: Sequence[RalmGeneration]) -> dict[str, float]:
    names = ("batches", "queries", "blocks", "rollbacks", "seconds_search", "seconds_wait", "seconds_decode")
    found = {name: sum(getattr(run.stats, name) for run in runs) for name in names}
    return found | {"hit_rate": statistics.mean(run.stats.hit_rate for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=str(outpace.nano_path()), help="folder of the model")
    parser.add_argument("--most", type=int, default=20000, help="maximum number of documents")
    parser.add_argument("--words", type=int, default=64, help="maximum words per document")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--stride", type=int, default=4)
    parser.add_argument("--latency", type=float, nargs="*", default=[0, 20, 100], help="in milliseconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, use_safetensors=True)
    texts = paragraphs(options.documents, options.most, options.words)
    contexts = [tokenizer(f"{text}\n").input_ids for text in texts]
    file = next(iter(sorted(options.data.glob("gsm8k_test*.jsonl"))), None)
    if file is None:
        raise SystemExit(f"no gsm8k_test*.jsonl in {options.data}")
    lines = [json.loads(line)["question"] for line in file.read_text("utf-8").splitlines()]
    prefixes = [tokenizer(f"Question: {line}\nAnswer:").input_ids for line in lines[: options.prompts]]
    bases = {
        "bm25": BM25Retriever(texts),
        "dense": dense(texts, tokenizer, model.get_input_embeddings().weight.detach()),
    }
    engine = Engine(model, tokenizer=tokenizer)
    result: dict[str, Any] = {
        "machine": machine(str(model.device)),
        "command": " ".join(sys.argv),
        "documents": len(texts),
        "prompts": len(prefixes),
    }
    for name, base in bases.items():
        for latency in options.latency:
            remote = Remote(base, latency) if latency else base

            def make(how: Speculation | None, remote: Retriever[Any] = remote) -> RalmPipeline[Any]:
                return RalmPipeline(engine, remote, contexts, stride=options.stride, speculation=how)

            label = f"{name}, {latency:g} ms away" if latency else name
            result[label] = measured(make, prefixes)
            print(f"{label}: {result[label]['speedup']:.2f} x", file=sys.stderr)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
