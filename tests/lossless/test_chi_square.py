"""Exact verifiers through the engine: 4,000 texts (slow: 50,000 with each) follow the target's distribution.

``tests/unit/verify`` shows that the verifiers are exact. What is left is that their draws are independent:
of each other, of the draft's, and of those in other steps.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from outpace.core import Draft, SamplingParams
from outpace.drafters import SequenceDrafter
from outpace.draws.noise import Stream, uniform
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from outpace.tree import children, path_to

VOCABULARY = 5
LENGTH = 3
BATCH = 250
PROMPT = [3, 1, 4]
TEMPERATURE = 6.0
LEAST = 1e-4  # p-value under which a test fails

CHAIN = (-1, 0)
TREE = (-1, -1, 0, 0, 1)


@dataclass(frozen=True)
class Sampled(SequenceDrafter[Sequence]):
    """Samples a tree of one shape from a draft model."""

    parents: tuple[int, ...]
    replacement: bool = True

    paper: ClassVar[str] = "none: for tests"
    probabilities: ClassVar[bool] = True

    @property
    def trees(self) -> bool:
        return self.parents != CHAIN

    def start(self, sequence: Sequence, shared: Any) -> Sequence:
        return sequence

    def draft(self, state: Sequence) -> Draft:
        tokens: list[int] = []
        rows: dict[int, Tensor] = {}
        for node, parent in enumerate(self.parents):
            rows[parent] = after(state, tokens, self.parents, parent)
            weights = dict(enumerate(rows[parent].tolist()))
            if not self.replacement:
                for sibling in range(node):
                    if self.parents[sibling] == parent:
                        del weights[tokens[sibling]]
            word = state.key.node(Stream.DRAFT, state.output_length, node)
            ends = list(itertools.accumulate(weights.values()))
            tokens.append(list(weights)[bisect(ends, uniform(word) * ends[-1], hi=len(ends) - 1)])
        return Draft(tokens, self.parents, rows, self.replacement)


@dataclass(frozen=True)
class Chosen(Sampled):
    """The draft model's most probable tokens: point masses."""

    probabilities: ClassVar[bool] = False

    def draft(self, state: Sequence) -> Draft:
        tokens: list[int] = []
        for node, parent in enumerate(self.parents):
            rank = children(self.parents)[parent].index(node)
            row = after(state, tokens, self.parents, parent)
            tokens.append(int(row.argsort(descending=True)[rank]))
        return Draft(tokens, self.parents)


@lru_cache
def guess(text: tuple[int, ...]) -> Tensor:
    """A draft model: the target's distribution after an output, wrong by a factor for each rank.

    The factors are such that a second sibling is neither always accepted nor always rejected: after the
    rejection of the third best, little of the best is left.
    """
    if len(text) >= LENGTH:
        return torch.full((VOCABULARY,), 1 / VOCABULARY, dtype=torch.float64)
    place = sum(token * VOCABULARY**power for power, token in enumerate(reversed(text)))
    row = torch.from_numpy(plain_chances(len(text) + 1)).reshape(-1, VOCABULARY)[place]
    wrong = row.clone()
    wrong[row.argsort(descending=True)] *= torch.tensor([0.92, 0.25, 2.4, 1.1, 0.7], dtype=torch.float64)
    return wrong / wrong.sum()


def after(state: Sequence, tokens: list[int], parents: tuple[int, ...], node: int) -> Tensor:
    return guess((*state.output, *(tokens[n] for n in path_to(parents, node))))


def target() -> ToyTarget:
    return ToyTarget(VOCABULARY, eos=None)


CASES: dict[str, tuple[str, Sampled]] = {
    "match": ("match", Chosen(TREE)),
    "rejection of a chain": ("rejection", Sampled(CHAIN)),
    "rejection with replacement": ("rejection", Sampled(TREE)),
    "rejection without replacement": ("rejection", Sampled(TREE, replacement=False)),
    "rejection of a top-k tree": ("rejection", Chosen(TREE)),
    "spectr": ("spectr", Sampled(TREE)),
    "block": ("block", Sampled(CHAIN)),
    "traversal": ("traversal", Sampled(TREE, replacement=False)),
}


# The others are slow, as are more draws.
_QUICK = ("rejection without replacement", "block")
SAMPLES = [
    *((case, 4_000) for case in _QUICK),
    *(pytest.param(case, 50_000, marks=pytest.mark.slow) for case in CASES),
]


@lru_cache
def plain_chances(length: int = LENGTH) -> NDArray[np.float64]:
    """Probability of each text of so many tokens, in the order of itertools.product."""
    texts = list(itertools.product(range(VOCABULARY), repeat=length))
    model = target()
    cache = model.new_cache(len(texts), len(PROMPT) + length)
    output = model.forward(cache, Batch.of({cache.allocate(): [*PROMPT, *text] for text in texts}))
    rows = torch.stack([output.logits_of(slot) for slot in output.spans])
    chances = (rows[:, len(PROMPT) - 1 : -1] / TEMPERATURE).softmax(-1)
    chosen = chances.gather(-1, torch.tensor(texts)[..., None])
    return chosen.squeeze(-1).prod(-1).numpy()


def p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """The p-value of the chi-square test; texts expected fewer than 5 times are pooled."""
    rare = expected * counts.sum() < 5
    pooled = np.append(counts[~rare], counts[rare].sum())
    awaited = np.append(expected[~rare], expected[rare].sum()) * counts.sum()
    held = awaited > 0
    return float(stats.chisquare(pooled[held], awaited[held]).pvalue)


def count(case: str, draws: int) -> tuple[NDArray[np.int64], float]:
    """Count each text over seeds 0 to draws - 1, and the mean accepted length."""
    verifier, drafter = CASES[case]
    engine = Engine(target(), drafter, verifier, adaptive=False, slots=BATCH, length=16)
    found: Counter[tuple[int, ...]] = Counter()
    steps = 0
    for start in range(0, draws, BATCH):
        params = [
            SamplingParams(max_new_tokens=LENGTH, temperature=TEMPERATURE, seed=start + place)
            for place in range(BATCH)
        ]
        for generation in engine.generate([PROMPT] * BATCH, params):
            found[tuple(generation.tokens)] += 1
            steps += generation.stats.steps
    texts = itertools.product(range(VOCABULARY), repeat=LENGTH)
    return np.array([found[text] for text in texts]), draws * LENGTH / steps


@pytest.mark.parametrize(("case", "draws"), SAMPLES)
def test_the_output_follows_the_targets_distribution(case: str, draws: int) -> None:
    counts, tau = count(case, draws)
    expected = plain_chances()
    assert 1.2 < tau < 2.8  # drafts are accepted and rejected
    assert p_value(counts, expected) > LEAST
    # The test can tell: a tilt of the target's distribution is far off.
    tilted = expected * np.linspace(0.6, 1.4, len(expected))
    assert p_value(counts, tilted / tilted.sum()) < LEAST
