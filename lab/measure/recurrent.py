"""Benchmark of a model with recurrent layers: the cost of a step by rows, drafters, and where time goes.

    python lab/measure/recurrent.py HYBRID --peer PEER --questions FILE.jsonl --out RESULT.json

HYBRID is what ``lab/tools/train_hybrid.py`` writes, PEER a model of about that size with attention alone, as
``src/outpace/models/outpace-nano``. FILE has a ``question`` per line, as GSM8K has.

- ``rows``: milliseconds of a forward after 200 tokens, by rows, of chains and of random trees.
- ``drafters``: processor time per token, relative to transformers' generate(), and tokens per step; on
  questions, and on passages that the model is asked to repeat.
- ``parts``: share of a forward's time by kind of operation.

Times are processor time of one thread, medians; ways take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import profile
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import taken

from outpace import Engine, SamplingParams, Target
from outpace.cache import KVCache, Slot
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch

WIDTHS = (1, 2, 4, 8, 16, 32)
DRAFTERS = ("none", "suffix", "lookahead", "prompt_lookup")
NEW = 80
KINDS = {
    "products with weights": ("linear", "addmm", "aten::mm"),
    "products of the scan and attention": ("bmm", "baddbmm", "matmul", "einsum", "attention"),
    "copies and gathers": ("copy_", "index", "cat", "gather", "scatter", "clone", "stack", "contiguous"),
}


def filled(target: CausalTarget) -> tuple[KVCache, Slot]:
    """A cache with a text of 200 random tokens."""
    cache = target.new_cache(1, 300)
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: random.Random(0).choices(range(1, 4000), k=200)}, None))
    cache.keep({slot: range(200)})
    return cache, slot


def step(target: CausalTarget, place: tuple[KVCache, Slot], width: int, tree: bool) -> None:
    """A forward of rows, all of which are rejected."""
    rng = random.Random(width)
    cache, slot = place
    given = rng.choices(range(1, 4000), k=width)
    parents = [rng.randrange(max(-1, node - 6), node) if tree and node else node - 1 for node in range(width)]
    target.forward(cache, Batch.of({slot: Rows(given, parents)}))
    cache.keep({})


def rows(targets: dict[str, CausalTarget], rounds: int) -> dict[str, Any]:
    """Milliseconds by width, model and shape of the draft."""
    places = {name: filled(target) for name, target in targets.items()}
    return {
        str(width): taken(
            {
                f"{name}, {shape}": partial(step, target, places[name], width, shape == "tree")
                for name, target in targets.items()
                for shape in ("chain", "tree")
            },
            rounds,
            median,
        )
        for width in WIDTHS
    }


def parts(target: CausalTarget, width: int) -> dict[str, float]:
    """Percent of the time in operations, by kind, and how much of the forward is none."""
    place = filled(target)
    step(target, place, width, tree=True)
    began = time.thread_time()
    for _ in range(20):
        step(target, place, width, tree=True)
    whole = time.thread_time() - began
    with profile() as seen:
        for _ in range(20):
            step(target, place, width, tree=True)
    spent: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        kind = next((kind for kind, words in KINDS.items() if any(w in event.key for w in words)), "the rest")
        spent[kind] += event.self_cpu_time_total
    total = sum(spent.values())
    return {"ms": round(whole / 20 * 1e3, 2), **{k: round(100 * v / total, 1) for k, v in spent.items()}}


def prompts(file: Path, count: int) -> dict[str, list[str]]:
    """Prompts in the forms that the embedded model learnt."""
    lines = [json.loads(line)["question"] for line in file.read_text("utf-8").splitlines()[:count]]
    return {
        "questions": [f"Question: {one}\nAnswer:" for one in lines],
        "repeat": [f"Document: {one}\nQuestion: Repeat the document.\nAnswer:" for one in lines],
    }


def drafters(model: Any, tokenizer: Any, texts: list[str], target: CausalTarget) -> dict[str, Any]:
    """Milliseconds per token of each way, tokens per step, and how many outputs are generate()'s."""
    times: dict[str, list[float]] = defaultdict(list)
    taus: dict[str, list[float]] = defaultdict(list)
    same: dict[str, int] = defaultdict(int)
    params = SamplingParams(max_new_tokens=NEW)
    engines = {name: Engine(target, name) for name in DRAFTERS}
    for text in texts:
        ids = tokenizer(text).input_ids
        began = time.thread_time()
        told = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW)[
            0, len(ids) :
        ].tolist()
        times["generate"].append((time.thread_time() - began) * 1e3 / len(told))
        for name, engine in engines.items():
            began = time.thread_time()
            (found,) = engine.generate([ids], params)
            times[name].append((time.thread_time() - began) * 1e3 / len(found.tokens))
            taus[name].append(len(found.tokens) / found.stats.steps)
            same[name] += found.tokens == told
    return {
        name: {
            "ms": round(median(spent), 3),
            "speed": round(median(a / b for a, b in zip(times["generate"], spent, strict=True)), 2),
            "tau": round(sum(taus[name]) / len(texts), 2) if name in taus else 1.0,
            "same": same.get(name),
        }
        for name, spent in times.items()
    }


def main() -> None:
    """Measure and write a JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hybrid", type=Path)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="number of prompts")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
        for name, folder in (("hybrid", options.hybrid), ("peer", options.peer))
    }
    targets = {name: Target(model) for name, model in models.items()}
    tokenizer = AutoTokenizer.from_pretrained(options.hybrid)
    result: dict[str, Any] = {
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        "rows": rows(targets, options.rounds),
        "parts": {
            f"{name}, {width} rows": parts(target, width)
            for name, target in targets.items()
            for width in (1, 16)
        },
    }
    for kind, texts in prompts(options.questions, options.count).items():
        result[kind] = drafters(models["hybrid"], tokenizer, texts, targets["hybrid"])
    options.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
