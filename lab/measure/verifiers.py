"""Verifiers of drawn trees, a drafter of another vocabulary, and contrastive decoding, on a real model.

    python lab/measure/verifiers.py --data DIR --draft DRAFT --out RESULT.json

The draft model, and the amateur of contrastive decoding, is --draft, as `outpace train draft_model` writes
it without `draft_vocabulary`, or the model itself without the layers of --skip; that costs nearly as much
as the target, so then only tau compares verifiers. Chains have three tokens, trees three children with two
each. Prompts are the first of HumanEval, GSM8K and MT-Bench; methods take turns on each. Printed are tokens
per step (tau) and, as the median over prompts, tokens per second over plain decoding's in the same run: of
the model, sampled or greedy as the method, and of the contrastive pair. Outputs under `match` must equal
plain decoding's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

import outpace
from outpace.bench.machine import machine
from outpace.bench.suites import load_suite
from outpace.core import SamplingParams
from outpace.drafters import Drafter, load_drafter
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.loading import load
from outpace.targets import Target
from outpace_lab.targets import ContrastiveTarget

SUITES = ("humaneval", "gsm8k", "mt_bench")
PLAIN, GREEDY, PAIR = "plain", "plain, greedy", "contrastive"
BASES = (PLAIN, GREEDY, PAIR)

Method = tuple[Any, Drafter[Any] | str, str, bool]  # target, drafter, verifier, sampled


def without(model: Any, skipped: set[int]) -> Any:
    """A copy of a Llama model without some of its layers."""
    found = copy.copy(model)
    found._modules = dict(model._modules)
    found.model = copy.copy(model.model)
    found.model._modules = dict(model.model._modules)
    kept = [copy.deepcopy(layer) for at, layer in enumerate(model.model.layers) if at not in skipped]
    for place, layer in enumerate(kept):
        layer.self_attn.layer_idx = place
    found.model.layers = nn.ModuleList(kept)
    found.config = copy.deepcopy(model.config)
    found.config.num_hidden_layers = len(kept)
    found.model.config = found.config
    return found


def methods(target: Any, small: Any) -> dict[str, Method]:
    pair = ContrastiveTarget(target, Target(small))
    chain = {"num_speculative_tokens": 3}
    tree = {"num_speculative_tokens": 2, "branching": "3x2"}
    drawn = {**tree, "draws": "independent"}
    twice = {**drawn, "replacement": True}
    return {
        PLAIN: (target, "none", "match", True),
        GREEDY: (target, "none", "match", False),
        "match, chain": (target, DraftModel(small, **chain), "match", True),
        "match, tree": (target, DraftModel(small, **tree), "match", True),
        "rejection, chain": (target, DraftModel(small, **chain), "rejection", True),
        "block, chain": (target, DraftModel(small, **chain), "block", True),
        "rejection, tree with (SpecInfer)": (target, DraftModel(small, **twice), "rejection", True),
        "rejection, tree without (RSD)": (target, DraftModel(small, **drawn), "rejection", True),
        "spectr, tree": (target, DraftModel(small, **twice), "spectr", True),
        "traversal, tree": (target, DraftModel(small, **drawn), "traversal", True),
        "another vocabulary, intersection": (target, _nano("intersection"), "match", False),
        "another vocabulary, text": (target, _nano("text"), "match", False),
        PAIR: (pair, "none", "match", False),
        f"{PAIR}, the amateur drafts": (pair, DraftModel(small, **chain), "match", False),
        f"{PAIR}, suffix": (pair, "suffix", "match", False),
    }


def _nano(vocabulary: str) -> Drafter[Any]:
    return load_drafter(f"draft_model:model={outpace.nano_path()},vocabulary={vocabulary}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    small_model = parser.add_mutually_exclusive_group(required=True)
    small_model.add_argument("--draft", help="folder of a draft model of the same vocabulary")
    small_model.add_argument("--skip", help="layers that the draft model lacks")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=900, help="no further prompt is begun after these")
    parser.add_argument("--only", default="", help="methods whose name begins so, and plain decoding")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    loaded = load(given.model, given.dtype, "cpu")
    if given.draft:
        small = load(given.draft, given.dtype, "cpu").target.model
    else:
        small = without(loaded.target.model, set(map(int, given.skip.split(","))))
    chosen = {
        name: method
        for name, method in methods(loaded.target, small).items()
        if name in BASES or name.startswith(given.only)
    }
    engines = {
        name: Engine(target, drafter, verifier, loaded.tokenizer, adaptive=False)
        for name, (target, drafter, verifier, _) in chosen.items()
    }
    base = {
        name: PAIR if name.startswith(PAIR) else PLAIN if sampled else GREEDY
        for name, (*_, sampled) in chosen.items()
    }
    suites = [load_suite(name, given.data).items[: given.limit] for name in SUITES]
    items = [item for turn in zip(*suites, strict=True) for item in turn]
    runs: dict[str, list[tuple[int, int, float]]] = {name: [] for name in engines}
    outputs: dict[str, list[list[int]]] = {name: [] for name in engines}
    started = time.perf_counter()
    for place, item in enumerate(items):
        if time.perf_counter() - started > given.seconds:
            break
        prompt = loaded.tokens(item.turns[0])
        for name, engine in engines.items():
            heat = 0.8 if chosen[name][-1] else 0.0
            params = SamplingParams(given.tokens, heat, seed=place, ignore_eos=True)
            began = time.perf_counter()
            (found,) = engine.generate([prompt], params)
            runs[name].append((found.stats.tokens, found.stats.steps, time.perf_counter() - began))
            outputs[name].append(found.tokens)
        print(f"{place + 1} of {len(items)}", file=sys.stderr, flush=True)
    rows = {}
    for name, each in runs.items():
        same = outputs[name] == outputs[base[name]]
        if chosen[name][2] == "match" and not same:
            raise SystemExit(f"{name}: outputs differ from those of {base[name]}")
        ratios = [
            one[0] / one[2] * plain[2] / plain[0] for one, plain in zip(each, runs[base[name]], strict=True)
        ]
        tau = sum(one[0] for one in each) / sum(one[1] for one in each)
        rows[name] = {"tau": tau, "speed": statistics.median(ratios), "equal": same, "runs": each}
        print(f"{name:<48} tau {tau:.2f}  {rows[name]['speed']:.2f} x")
    facts = {"machine": machine("cpu"), "command": " ".join(sys.argv), "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
