"""The latency model of shared drafts, and a governor that begins with it."""

from __future__ import annotations

import pytest

from outpace.policy.governor import Governor
from outpace.policy.latency import LatencyModel

ROWS = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.4, 16: 2.2, 32: 4.0, 64: 8.0}


def halves(nodes: int) -> int:
    return (nodes + 1) // 2


def test_sharing_pays_from_the_width_where_it_saves_more_than_the_exchange() -> None:
    cheap, dear = LatencyModel(ROWS, 0.1, halves), LatencyModel(ROWS, 1.0, halves)
    assert cheap.pays_from is not None and dear.pays_from is not None
    assert cheap.pays_from < dear.pays_from
    for model in (cheap, dear):
        least = model.pays_from or 0
        assert model.seconds(least) == model.shared(least) < model.alone(least)
        assert model.seconds(least - 1) == model.alone(least - 1)
    assert dear.shared(63) == pytest.approx(ROWS[32] + 1.0, rel=0.05)


def test_sharing_never_pays_where_rows_are_free_or_nothing_is_divided() -> None:
    assert LatencyModel(dict.fromkeys(ROWS, 1.0), 0.1, halves).pays_from is None
    chain = LatencyModel(ROWS, 0.1, lambda nodes: nodes)
    assert chain.pays_from is None and chain.seconds(40) == chain.alone(40)


def test_a_governor_begins_with_it() -> None:
    model = LatencyModel(ROWS, 0.1, halves)
    begun = Governor()
    begun.begin_with(model.costs())
    for nodes in (4, 32, 56):
        assert begun.forwards.seconds(1, 1 + nodes) == pytest.approx(model.seconds(nodes), rel=0.05)
