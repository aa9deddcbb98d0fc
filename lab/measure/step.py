"""Benchmark of a step on a CPU: stock transformers, packed weights, bit-exact, and native.

    OMP_NUM_THREADS=1 python lab/measure/step.py MODEL --dtype bfloat16 --out RESULT.json

Cases (``--only`` picks some):

- ``widths``: milliseconds of a forward after 200 tokens, by rows.
- ``nodes``: number of nodes of random trees whose logits are bit-identical to plain decoding's.
- ``attention``: milliseconds of one layer's attention for 1, 4, 8 and 16 rows over 2,000 and 8,000 columns.
- ``generate``: processor time of transformers' generate() and of ``outpace.accelerate(model, "none")``.
- ``equality``: tokens of drafters that differ from plain decoding's, one sequence at a time (``--batch``, and
  ``--temperature``).

Times are processor time of one thread, the minimum over rounds; ways take turns. Results are merged into the
file.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from turns import taken

import outpace
from outpace.cache import KVCache, Slot
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.cpu.exact_attention import exact_attention
from outpace.targets.hardware import processor

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {"plan": "stock"},
    "packed": {"plan": "packed"},
    "packed, bit-exact": {"plan": "exact"},
    "native": {},  # bit-exact
    "int8": {"quantise": "int8"},  # bfloat16 only, as int4
    "int4": {"quantise": "int4"},
}
WIDTHS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
DRAFTERS = ("lookahead", "prompt_lookup", "token_recycling", "suffix", "jacobi")  # need no training
GENERATOR = torch.Generator()


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 4000, (count,), generator=GENERATOR.manual_seed(seed)).tolist()


def filled(target: CausalTarget, length: int) -> tuple[KVCache, Slot]:
    """A cache with one text of random tokens."""
    cache = target.new_cache(1, length + 80)
    slot = cache.allocate()
    text = tokens(length)
    for start in range(0, length, 256):
        chunk = text[start : start + 256]
        target.forward(cache, Batch.of({slot: chunk}, None))
        cache.keep({slot: range(len(chunk))})
    return cache, slot


def steps(targets: dict[str, CausalTarget], length: int, widths: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds of a forward after a text, by width and way."""
    places = {name: filled(target, length) for name, target in targets.items()}

    def forward(name: str, width: int) -> None:
        cache, slot = places[name]
        targets[name].forward(cache, Batch.of({slot: tokens(width, 1)}))
        cache.keep({})

    return {
        str(width): taken({name: partial(forward, name, width) for name in targets}, rounds, min)
        for width in widths
    }


def attention(config: Any, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Milliseconds of transformers' attention and of outpace's, by columns and rows."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = torch.nn.Identity()
    layer.num_key_value_groups, layer.is_causal = heads // kv, True
    result: dict[str, Any] = {}
    for columns in (200, 2000, 8000):
        keys, values = (torch.randn(1, kv, 8200, size).to(dtype)[:, :, :columns] for _ in range(2))
        for width in (1, 4, 8, 16):
            query = torch.randn(1, width, heads, size).to(dtype).transpose(1, 2)
            seen = torch.ones(width, columns, dtype=torch.bool).tril(columns - width)
            mask = None if width == 1 else seen[None, None]
            ways = {
                name: partial(way, layer, query, keys, values, mask, scaling=size**-0.5)
                for name, way in (("transformers", sdpa_attention_forward), ("bit-exact", exact_attention))
            }
            with torch.inference_mode():
                result[f"{columns} columns, {width} rows"] = taken(ways, rounds, min)
    return result


def nodes(target: CausalTarget, trees: int) -> tuple[int, int]:
    """Number of nodes of random trees with logits bit-identical to plain decoding's, and of all nodes."""
    equal = total = 0
    for trial in range(trees):
        generator = torch.Generator().manual_seed(trial)
        size = int(torch.randint(8, 25, (1,), generator=generator))
        own, length = tokens(size, trial + 9), (61, 190, 133, 203, 37, 64, 250, 150, 20, 77)[trial % 10]
        parents = [-1]
        for node in range(1, size):
            parents.append(int(torch.randint(max(0, node - 6), node, (1,), generator=generator)))
        cache, slot = filled(target, length)
        tree = target.forward(cache, Batch.of({slot: Rows(own, parents)})).logits_of(slot).clone()
        cache.keep({})
        for leaf in set(range(size)) - set(parents):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            for node in path:
                alone = target.forward(cache, Batch.of({slot: [own[node]]})).logits_of(slot)[0]
                cache.keep({slot: [0]})
                equal += int(torch.equal(alone, tree[node]))
                total += 1
            cache.truncate(slot, length)
    return equal, total


def generate(model: Any, rounds: int) -> dict[str, Any]:
    """Seconds of 64 tokens after 64 with transformers, and with outpace without drafts."""
    ids = torch.tensor([tokens(64)])
    made: dict[str, dict[str, Any]] = {"transformers": {}}
    for name, step in (("none, as it is", WAYS["as it is"]), ("none", {})):
        outpace.accelerate(model, "none", **step)
        made[name] = {key: vars(model)[key] for key in ("generate", "__getstate__")}
        outpace.restore(model)

    def run(name: str) -> None:
        vars(model).update(made[name])
        model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
        outpace.restore(model)

    ways = {name: partial(run, name) for name in made}
    found = taken(ways, rounds, min)
    return found | {"transformers over none": round(found["transformers"] / found["none"], 3)}


def equality(
    target: CausalTarget,
    drafters: list[str],
    count: int,
    new: int,
    batch: int,
    temperature: float,
    first: int,
) -> dict[str, dict[str, int]]:
    """Number of tokens of each drafter, in ``count`` texts of ``new``, and of those unlike plain ones."""
    seeds = range(first, first + count)
    prompts = [tokens(24, seed) * 2 for seed in seeds]
    params = [
        outpace.SamplingParams(max_new_tokens=new, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in seeds
    ]

    def decoded(drafter: str, together: int) -> list[list[int]]:
        engine = outpace.Engine(target, drafter, adaptive=False)
        groups = [slice(at, at + together) for at in range(0, len(prompts), together)]
        reads = engine.drafter.reads_references
        return [
            list(one.tokens)
            for own in groups
            for one in engine.generate(prompts[own], params[own], references[own] if reads else None)
        ]

    references: list[list[list[int]]] = []
    plain, found = decoded("none", 1), {}
    # Plain decoding's text with another token here and there, which ends a draft.
    references = [[[token + (at % 17 == 16) for at, token in enumerate(text)]] for text in plain]
    for drafter in drafters:
        pairs = list(zip(decoded(drafter, batch), plain, strict=True))
        # Tokens after the first difference follow different texts, so only first differences count as flips.
        flips = sum(a != b for a, b in pairs)
        differing = sum(x != y for a, b in pairs for x, y in zip_longest(a, b))
        found[drafter] = {
            "tokens": sum(len(b) for _, b in pairs),
            "differing": differing,
            "outputs that differ": flips,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="+", default=["widths", "nodes", "attention", "generate"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trees", type=int, default=10)
    parser.add_argument("--texts", type=int, default=16, help="texts per drafter, for equality")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per text")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, help="for equality")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt, for equality")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS)[:3], choices=list(WAYS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model.eval().requires_grad_(False)
    targets = {name: CausalTarget(model, **WAYS[name]) for name in options.ways}
    result: dict[str, Any] = {
        "ways": {
            n: {"packed": dict(t.plan.packed), "bit-exact": t.bit_exact or t.why_inexact}
            for n, t in targets.items()
        }
    }
    if "widths" in options.only:
        result["widths"] = steps(targets, 200, WIDTHS, options.rounds)
    if "nodes" in options.only:
        result["nodes"] = {name: nodes(target, options.trees) for name, target in targets.items()}
    if "attention" in options.only:
        result["attention"] = attention(model.config, model.dtype, options.rounds)
    if "generate" in options.only:
        result["generate"] = generate(model, options.rounds)
    if "equality" in options.only:
        case = options.texts, options.tokens, options.batch, options.temperature, options.seed
        result[f"equality, batch {options.batch}, temperature {options.temperature}, seed {options.seed}"] = {
            name: equality(target, options.drafters, *case) for name, target in targets.items()
        }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        versions = (
            f"{processor()}, one thread, torch {torch.__version__}, transformers {transformers.__version__}"
        )
        held = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {"machine": versions}
        name = f"{Path(options.model).name}, {options.dtype}"
        held[name] = held.get(name, {}) | result
        options.out.write_text(json.dumps(held, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
