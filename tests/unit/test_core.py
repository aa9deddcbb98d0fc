"""Shared types: a drafter's own counts."""

from __future__ import annotations

import pytest

from outpace.core import OutpaceError, Stats


def test_counts_add_up() -> None:
    stats = Stats()
    for number in (2, 3):
        stats.count("rank_0_offered", number)
    assert stats.extra == {"rank_0_offered": 5}


@pytest.mark.parametrize(
    "name", ["", "PromptLookup drafted", "prompt-lookup", "_drafted", "2nd", "drafted\n"]
)
def test_a_count_has_a_name_fit_for_metrics(name: str) -> None:
    stats = Stats()
    with pytest.raises(OutpaceError, match="is not a valid name for a count"):
        stats.count(name, 1)
    assert not stats.extra
