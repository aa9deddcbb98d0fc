"""The choice of the stride, from recorded times."""

from __future__ import annotations

import numpy as np
import pytest

from outpace_lab.ralm.pace import Pace


def pace(
    hits: int,
    misses: int,
    decode: float,
    search: dict[int, float],
    asynchronous: bool = False,
    rounds: int = 30,
) -> Pace:
    """After many rounds alike: ``search`` maps numbers of queries to seconds."""
    made = Pace(most=16, asynchronous=asynchronous)
    for _ in range(rounds):
        made.guessed(hits, misses)
        made.decoded(decode)
        for queries, seconds in search.items():
            made.searched(queries, seconds)
    return made


def test_one_block_while_nothing_is_measured() -> None:
    assert Pace(16, False).stride() == 1
    assert Pace(0, False).stride() == 0


def test_a_slow_knowledge_base_is_asked_seldom() -> None:
    strides = [pace(19, 1, decode=1.0, search={4: seconds}).stride() for seconds in (0.0, 0.5, 4.0, 100.0)]
    assert strides == sorted(strides)
    assert strides[0] == 0
    assert strides[-1] == 16


def test_wrong_guesses_make_short_strides() -> None:
    strides = [pace(hits, 8 - hits, decode=1.0, search={4: 4.0}).stride() for hits in (0, 2, 4, 6, 8)]
    assert strides == sorted(strides)
    assert strides[0] < 2
    assert strides[-1] > 6


def test_a_search_whose_time_grows_with_its_queries_gains_nothing_by_batches() -> None:
    grows = pace(7, 1, decode=1.0, search={1: 4.0, 3: 12.0})
    constant = pace(7, 1, decode=1.0, search={1: 4.0, 3: 4.0})
    assert grows.stride() == 0
    assert constant.stride() > 3


def test_a_search_that_hides_behind_a_block_is_asked_for_each() -> None:
    assert pace(9, 1, decode=1.0, search={1: 0.9}, asynchronous=True).stride() == 0
    assert pace(9, 1, decode=1.0, search={1: 0.9}).stride() > 0
    assert pace(9, 1, decode=1.0, search={1: 9.0}, asynchronous=True).stride() > 3


def test_old_times_are_forgotten() -> None:
    made = pace(9, 1, decode=1.0, search={4: 100.0})
    assert made.stride() > 6
    for _ in range(40):
        made.searched(4, 0.0)
    assert made.stride() == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("hits", "misses"), [(1, 1), (7, 1), (1, 3)])
def test_the_rate_is_that_of_simulated_rounds(hits: int, misses: int, asynchronous: bool) -> None:
    """Blocks and seconds of rounds played out with coins, as the pipeline counts them."""
    decode, fixed, slope = 1.0, 1.5, 0.25
    search = {1: fixed + slope, 5: fixed + 5 * slope}
    made = pace(hits, misses, decode, search, asynchronous)
    random = np.random.default_rng(1)
    for stride in (0, 1, 4):
        right = random.random((40_000, stride + 1)) < made.hit_rate
        agreed = np.where(right.all(axis=1), stride + 1, right.argmin(axis=1))
        asked = fixed + slope * (stride + 1)
        if asynchronous:  # stride + 1 blocks are decoded, and one more if one of them was wrong
            blocks = np.minimum(agreed + 1, stride + 1)
            seconds = stride * decode + max(decode, asked) + decode * (agreed < stride + 1)
        else:  # stride blocks are decoded, and in any case one more
            blocks = np.minimum(agreed, stride) + 1
            seconds = np.full(len(agreed), stride * decode + asked + decode)
        assert made.rate(stride) == pytest.approx(blocks.sum() / seconds.sum(), rel=0.02)
