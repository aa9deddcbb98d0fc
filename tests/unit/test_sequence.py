"""The limits of a sequence's next draft."""

from __future__ import annotations

import pytest

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget


@pytest.mark.parametrize(
    ("budget", "depth", "reach"), [(None, 5, 5), (None, 20, 9), (3, 5, 3), (12, 20, 9), (3, 2, 2), (0, 5, 0)]
)
def test_no_more_is_within_reach_than_could_be_accepted_or_is_wanted(
    budget: int | None, depth: int, reach: int
) -> None:
    """The last of ten tokens still allowed is the target's own."""
    sequence = Engine(ToyTarget()).add([1, 2, 3], SamplingParams(max_new_tokens=10))
    sequence.budget = budget
    assert sequence.within_reach(depth) == reach


def test_at_the_last_token_nothing_is() -> None:
    sequence = Engine(ToyTarget()).add([1, 2, 3], SamplingParams(max_new_tokens=1))
    assert sequence.within_reach(4) == 0
