"""The kernels for keyed draws give the reference's tokens; in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from devices import TRITON_DEVICES
from outpace.core import SamplingParams
from outpace.draws.many_rows import keys_of
from outpace.draws.noise import key, noisy_argmax
from outpace.draws.sampling import warp

pytest.importorskip("triton")

from outpace.draws.draw_kernel import draw

TEMPERATURES = (1.0, 0.7, 2.5)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("size", [1, 5, 1024, 2500])
def test_tokens_are_the_references(size: int, device: str) -> None:
    generator = torch.Generator().manual_seed(size)
    scores = (torch.randn(3, size, generator=generator) * 2).to(device)
    params = [SamplingParams(temperature=own) for own in TEMPERATURES]
    for seed in range(4):
        words = [key(seed, row) for row in range(3)]
        found = draw(scores, torch.from_numpy(keys_of(params, words)).to(device)).tolist()
        assert found == [
            noisy_argmax(warp(row, own), word) for row, own, word in zip(scores, params, words, strict=True)
        ]


def telling(row: torch.Tensor, params: SamplingParams, first: int) -> int:
    """A key with which the last token that is kept is drawn, or one of the last."""
    kept = warp(row, params)
    order = kept.masked_fill(kept == -math.inf, math.inf).argsort().tolist()
    ranks = {order.index(noisy_argmax(kept, key(seed))): seed for seed in range(first, first + 100)}
    return key(ranks[min(ranks)])


CUTS = {
    "top_k": SamplingParams(temperature=0.9, top_k=3),
    "top_p": SamplingParams(temperature=1.5, top_p=0.8),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=7, top_p=0.7, min_p=0.05),
    "none": SamplingParams(temperature=1.1),
}


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("size", [40, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 1500))])
def test_tokens_after_cuts_are_the_references(size: int, device: str) -> None:
    """Rows with different cuts, and equal scores; a row is undecided only where rounding decides."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(len(CUTS), size, generator=generator) * 2
    scores[:, size // 2 :] = scores[:, size // 2 :].round()
    scores, params, undecided = scores.to(device), list(CUTS.values()), 0
    for first in range(1 if size == 40 else 4):
        words = [telling(row, own, 100 * first) for row, own in zip(scores, params, strict=True)]
        keys = torch.from_numpy(keys_of(params, words)).to(device)
        found = draw(scores, keys, cut=True).tolist()
        expected = [
            noisy_argmax(warp(row, own), word) for row, own, word in zip(scores, params, words, strict=True)
        ]
        undecided += found.count(-2)
        assert all(token in (-2, own) for token, own in zip(found, expected, strict=True))
    assert draw(scores, keys, cut=True, sure=False).min() >= 0
    assert undecided <= 2


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_some_ids(device: str) -> None:
    """Noise is that of the ids, not of the places."""
    scores, ids = torch.zeros(1, 40, device=device), torch.arange(0, 400, 10, device=device)
    words = [key(7)]
    keys = torch.from_numpy(keys_of([SamplingParams(temperature=1)], words)).to(device)
    assert draw(scores, keys, ids).tolist() == [noisy_argmax(scores[0], words[0], ids)]
    assert draw(scores, keys, ids).tolist() != draw(scores, keys).tolist()


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_what_the_reference_decides(device: str) -> None:
    """Infinite scores and NaN; two tokens with the same noise, whose scores are nearly the same."""
    size = 1030
    scores = torch.zeros(5, size)
    scores[0] = -math.inf
    scores[1, 1025] = math.inf
    scores[2, 3] = math.nan
    scores[3, 5:] = -math.inf  # the others are drawn
    scores = scores.to(device)
    params = [SamplingParams(temperature=1)] * 5
    keys = torch.from_numpy(keys_of(params, [key(row) for row in range(5)])).to(device)
    found = draw(scores, keys).tolist()
    assert found[:3] == [-2, -2, -2] and 0 <= found[3] < 5 and found[4] >= 0
    twins = torch.zeros(2, size, dtype=torch.long, device=device)  # one id everywhere: all noise is the same
    assert draw(scores[3:], keys[3:], twins[0]).tolist() == [-2, -2]
    assert min(draw(scores[3:], keys[3:], twins[0], sure=False).tolist()) >= 0
