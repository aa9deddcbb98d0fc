"""Accuracy of a model's head after each of some layers, and what a pipeline could hide (ADR 20).

    python lab/measure/exits.py --data DIR --model smollm2 --json benchmarks/RESULT.json

DIR contains gsm8k_test*.jsonl and humaneval.jsonl. On the model's own greedy text: the share of tokens that
are the best, and among the best k, of the final norm and head after layer d, and the share of a step's time
that a pipeline could hide at most, that chance times the share of the layers above.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from outpace.bench.machine import machine
from outpace.bench.suites import load_suite
from outpace.core import SamplingParams
from outpace.loading import load

SUITES = ("gsm8k", "humaneval")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="a Llama, whose final norm and head are applied")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 15, 20, 24, 27])
    parser.add_argument("--best", type=int, default=3)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    loaded = load(given.model, given.dtype)
    model = loaded.target.model
    suites = [load_suite(name, given.data).first(given.limit) for name in SUITES]
    prompts = [loaded.plain_tokens(item.turns[0]) for suite in suites for item in suite.items]
    params = SamplingParams(max_new_tokens=given.new_tokens)
    hits = torch.zeros(len(given.layers), 2)
    tokens = 0
    for prompt, found in zip(prompts, loaded.engine("none").generate(prompts, params), strict=True):
        text = torch.tensor([prompt + found.tokens])
        states = model(text, output_hidden_states=True).hidden_states
        labels = text[0, len(prompt) :, None]
        tokens += len(labels)
        for at, layer in enumerate(given.layers):
            logits = model.lm_head(model.model.norm(states[layer][0, len(prompt) - 1 : -1]))
            equal = logits.topk(given.best).indices == labels
            hits[at] += torch.tensor([equal[:, 0].sum(), equal.any(dim=1).sum()])
    rows = []
    for layer, (first, among) in zip(given.layers, (hits / tokens).tolist(), strict=True):
        hidden = among * (1 - layer / loaded.target.layers)
        rows.append({"layer": layer, "best": first, f"among_{given.best}": among, "hidden_at_most": hidden})
        print(f"layer {layer}: {first:.2f} {among:.2f}, hidden at most {hidden:.0%}")
    result = {"machine": machine("cpu"), "command": " ".join(sys.argv), "tokens": tokens, "rows": rows}
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
