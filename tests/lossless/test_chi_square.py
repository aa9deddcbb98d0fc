"""Speculative sampling through the whole engine: 50,000 texts are distributed as the target says."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers import LlamaForCausalLM

import outpace
from models import tiny_llama
from outpace.core import SamplingParams
from outpace.drafters import DraftModel

VOCABULARY = 5
LENGTH = 3
DRAWS = 50_000
BATCH = 1_000
PROMPT = [3, 1, 4]
TEMPERATURE = 2.0
LEAST = 1e-4  # p-value under which a test fails


def _expected(model: LlamaForCausalLM) -> NDArray[np.float64]:
    """Probability of each text of LENGTH tokens, in the order of itertools.product."""
    texts = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    with torch.inference_mode():
        rows = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, len(PROMPT) - 1 : -1]
    chosen = (rows.double() / TEMPERATURE).softmax(-1).gather(-1, torch.tensor(texts)[..., None])
    return chosen.squeeze(-1).prod(-1).numpy()


def _p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Of the chi-square test; texts expected fewer than 5 times are counted together."""
    rare = expected * counts.sum() < 5
    pooled = np.append(counts[~rare], counts[rare].sum())
    awaited = np.append(expected[~rare], expected[rare].sum()) * counts.sum()
    held = awaited > 0
    return float(stats.chisquare(pooled[held], awaited[held]).pvalue)


def _counts(engine: outpace.Engine) -> tuple[NDArray[np.int64], float]:
    """How often each text came, over seeds 0 to DRAWS - 1, and the acceptance rate."""
    found: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for start in range(0, DRAWS, BATCH):
        params = [
            SamplingParams(
                max_new_tokens=LENGTH, temperature=TEMPERATURE, ignore_eos=True, seed=start + place
            )
            for place in range(BATCH)
        ]
        for generation in engine.generate([PROMPT] * BATCH, params):
            found[tuple(generation.tokens)] += 1
            drafted += generation.stats.drafted
            accepted += generation.stats.accepted
    texts = itertools.product(range(VOCABULARY), repeat=LENGTH)
    return np.array([found[text] for text in texts]), accepted / drafted


def test_rejection_draws_from_the_target() -> None:
    target = tiny_llama(vocabulary=VOCABULARY, layers=1)
    draft = DraftModel(tiny_llama(vocabulary=VOCABULARY, layers=1, seed=1), num_draft_tokens=2)
    counts, acceptance = _counts(outpace.Engine(target, draft, verifier="rejection"))
    expected = _expected(target)
    assert 0.2 < acceptance < 0.9  # both outcomes of a draft are tried
    assert _p_value(counts, expected) > LEAST
    # The test can tell: the draft's own distribution is far off, and so is a small tilt of the target's.
    tilted = expected * np.linspace(0.95, 1.05, len(expected))
    assert _p_value(counts, tilted / tilted.sum()) < LEAST
