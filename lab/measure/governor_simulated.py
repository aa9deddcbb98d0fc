"""The governor on many dictated texts, without a model: policies compared in seconds and without noise.

    python lab/measure/governor_simulated.py --data DIR

DIR contains gsm8k_test*.jsonl. Each text is like the "dictated" one of governor.py: a quarter GSM8K, half
random tokens, a quarter GSM8K. The drafts of prompt_lookup at each place, and how much of them is right, are
computed; step times are recorded ones (``--steps``), with seeded jitter. The policy's own arithmetic is
timed, with warm caches, and multiplied by ``--arithmetic``, since a forward leaves the caches cold. Printed
as JSON: the time under the governor relative to the best fixed width of each part, on the random halves alone
relative to plain decoding, and on each first quarter under a new governor relative to its best fixed width.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from governor import FIXED, texts
from transformers import AutoTokenizer

import outpace
from outpace.core import SamplingParams
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.draws.noise import Key
from outpace.policy.governor import Governor, Pinned
from outpace.policy.plan import Outcome, Policy
from outpace.sequence import Sequence as Text

# Milliseconds of a step by nodes verified: the embedded model in float32 on two cores of an Intel Xeon, and
# SmolLM2-135M in float32 (whose second row is expensive) and bfloat16 (whose first rows cost nothing) on a
# core of an AMD EPYC with AVX-512, interpolated; there too, a model of 0.1 billion parameters in llama.cpp's
# q4_0 and q8_0, whose four rows cost two and four plain steps.
STEPS = {
    "nano": (2.3, 2.99, 2.92, 3.24, 3.33, 3.45, 3.6, 3.84, 3.9, 4.1, 4.15, 4.21, 4.87, 5.0, 5.1, 5.1, 5.37),
    "smollm2-float32": (72, *(96,) * 7, 98, 101, 104, 107, 110, 112, 115, 118, 122),
    "smollm2-bfloat16": (57, 57, 58, 58, 60, 62, 64, 66, 69, 71, 73, 75, 77, 79, 81, 83, 85),
    "q4_0": (5.1, 8.4, 9.7, 9.8, 13, 15.5, 16.5, 16.7, 20, 22, 23, 23.7, 25.3, 25.6, 25.8, 25.8, 29),
    "q8_0": (7.6, 24.1, 34.5, 34.3, 41, 41, 41, 41, 46, 49, 50, 50, 52, 52, 52, 52, 57),
}
IDLE, LOOK, FOUND, NODE = 0.012, 0.0225, 0.041, 0.0015  # drafter: not called, no match, match, per node
JITTER, SLOW = 0.06, 0.03  # standard deviation, relative; chance that a step takes up to twice as long
QUARTER = 128  # tokens
APART = 8  # questions per text

Place = tuple[int, list[int]]  # number of nodes drafted there, and the right ones


def places(prompt: list[int], text: list[int]) -> list[Place]:
    """The draft before each token of a text, without a limit on its nodes."""
    drafter = PromptLookup(num_speculative_tokens=len(STEPS["nano"]) - 1)
    sequence = Text(prompt, SamplingParams(), Key(0), limit=len(text), eos_token_ids=frozenset())
    state = drafter.start(sequence, None)
    found = []
    for start, token in enumerate(text):
        draft = drafter.draft(state)
        path: list[int] = []
        children = {guess: node for node, guess in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        for said in text[start:]:
            node = children.get((path[-1] if path else -1, said))
            if node is None:
                break
            path.append(node)
        found.append((len(draft), path))
        sequence.append(token)
    return found


def decode(
    policy: Policy,
    text: Sequence[Place],
    noise: random.Random,
    arithmetic: float,
    steps: Sequence[float],
) -> list[float]:
    """Milliseconds of each part: a quarter, half, a quarter."""
    parts, place = [0.0, 0.0, 0.0], 0
    while place < len(text):
        began = time.thread_time()
        plan = policy.plan(1)
        thought = 1e3 * arithmetic * (time.thread_time() - began) if policy.timed else 0.0
        size, right = text[place]
        size = min(size, plan.nodes)
        path = right[: next((i for i, node in enumerate(right) if node >= size), None)]
        draft = thought + (IDLE if not plan.nodes else FOUND + NODE * size if size else LOOK)
        verify = steps[size] * max(0.85, 1 + JITTER * noise.gauss(0, 1))
        verify *= noise.choice((1.3, 1.5, 2)) if noise.random() < SLOW else 1
        began = time.thread_time()
        policy.learn(Outcome(plan, [size], [path], draft / 1e3, verify / 1e3))
        thought = 1e3 * arithmetic * (time.thread_time() - began) if policy.timed else 0.0
        parts[min(2, (place // QUARTER + 1) // 2)] += draft + verify + thought
        place += 1 + len(path)
    return parts


def dictations(data: Path, count: int) -> list[list[Place]]:
    """``count`` texts, each from separate questions."""
    tokenizer = AutoTokenizer.from_pretrained(outpace.nano_path())
    pairs = texts(data)
    if len(pairs) < APART * count:
        raise SystemExit(f"{count} texts need {APART * count} questions; there are {len(pairs)}")
    found = []
    for first in range(0, APART * count, APART):
        own = "\n\n".join(question + answer for question, answer in pairs[first + 1 : first + APART])
        told = tokenizer(own).input_ids
        generator = torch.Generator().manual_seed(first)
        noise = torch.randint(len(tokenizer), (2 * QUARTER,), generator=generator).tolist()
        text = told[:QUARTER] + noise + told[QUARTER : 2 * QUARTER]
        found.append(places(tokenizer(pairs[first][0]).input_ids, text))
    return found


def fixed(width: int, text: list[Place], steps: Sequence[float]) -> list[float]:
    """Milliseconds of each part with a fixed width, averaged over a few runs."""
    runs = [decode(Pinned(width), text, random.Random(seed), 0.0, steps) for seed in range(3)]
    return [statistics.mean(parts) for parts in zip(*runs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arithmetic", type=float, default=2.0)
    parser.add_argument("--steps", choices=STEPS, default="nano")
    options = parser.parse_args()
    told = dictations(options.data, options.texts)
    steps = STEPS[options.steps]
    best = [
        [min(parts) for parts in zip(*(fixed(w, text, steps) for w in (0, *FIXED)), strict=True)]
        for text in told
    ]
    hard = [text[QUARTER : 3 * QUARTER] for text in told]
    governed, alone, begun = [], [], []
    for seed in range(options.seeds):
        governor, noise = Governor(), random.Random(seed)
        decode(governor, told[-1], noise, options.arithmetic, steps)  # it has seen some text before
        governed += [decode(governor, text, noise, options.arithmetic, steps) for text in told]
        governor = Governor()
        alone += [sum(decode(governor, text, noise, options.arithmetic, steps)) for text in hard]
        begun += [decode(Governor(), text[:QUARTER], noise, options.arithmetic, steps)[0] for text in told]
    ratios = [sum(mine) / sum(ideal) for mine, ideal in zip(governed, best * options.seeds, strict=True)]
    result = {
        "over_best": statistics.mean(ratios),
        "worst": max(ratios),
        "parts": [
            statistics.mean(mine) / statistics.mean(ideal)
            for mine, ideal in zip(zip(*governed, strict=True), zip(*best, strict=True), strict=True)
        ],
        "random_over_plain": statistics.mean(alone)
        / statistics.mean(sum(fixed(0, text, steps)) for text in hard),
        "begun_over_best": statistics.mean(begun) / statistics.mean(first for first, _, _ in best),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
