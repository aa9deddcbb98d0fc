"""Drafts of a model that was adapted to fill masked places, all in one forward (PARD, An et al. 2025).

The tokens that are not drafted yet are masks, so what a place predicts does not depend on those before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

from torch import Tensor

from outpace.drafters.support.forest import Grown, grow_from, grow_on_device
from outpace.drafters.support.growth import GrowthState, grow_whole
from outpace.drafters.support.plans import GrowthPlan
from outpace.drafters.support.runner import Feed
from outpace.transfer import upload


def grow_masked(active: Seq[GrowthState], mask: int) -> None:
    """Grow the trees of texts by one forward of their draft model.

    Args:
        mask: the token of a masked place.
    """
    shared = active[0].shared
    runner, masks = shared.runner, [state.tree.layers - 1 for state in active]
    feeds = [
        Feed(state.text[state.track.stem :], [mask] * count, range(-1, count - 1))
        for state, count in zip(active, masks, strict=True)
    ]
    rows = runner.feed([state.track for state in active], feeds)
    ends = list(accumulate(count + 1 for count in masks))
    first = {id(state): end - count - 1 for state, end, count in zip(active, ends, masks, strict=True)}

    def run(plan: GrowthPlan, members: Seq[GrowthState]) -> Grown:
        own, ids = shared.vocabulary.drafted(rows)
        spans = [[first[id(state)], first[id(state)] + state.tree.layers - 1] for state in members]
        begin, last = upload(spans, rows.device).unbind(1)

        def after(owners: Tensor, paths: Tensor) -> Tensor:
            return own[(begin + paths.shape[1] - 1).minimum(last)[owners]]

        return grow_from(plan, members, ids, rows.device, after)

    def rows_of(growing: Seq[GrowthState]) -> Tensor:
        places = [first[id(state)] + state.tree.depth for state in growing for _ in state.tree.front]
        return rows[upload(places, rows.device)]

    left = list(active)
    if runner.model.plays(len(active)):
        left = grow_on_device(left, run, graphs=False)
    grow_whole(left, rows_of)
