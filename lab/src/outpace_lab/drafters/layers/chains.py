"""Chains that the target drafts by a part of itself, in its own cache."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.core import Draft
from outpace.drafters.support.growth import grow_whole
from outpace.drafters.support.shapes import Growing
from outpace.drafters.support.within import PartShared, Within, layers_of
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.rows import Rows


def draft_chains(states: Seq[Within], step: Callable[[list[Any]], Tensor]) -> list[Draft]:
    """Draft chains for several sequences, one depth at a time.

    Args:
        step: returns the logits [n, vocabulary] after the last token of each given sequence's chain.
    """
    for state in states:
        state.tree = Growing(layers_of(state), state.shared.shape)
    grow_whole(states, step)
    return [state.tree.finish() for state in states]


def draft_by_part(states: Seq[Within]) -> list[Draft]:
    """Draft chains by the form of the target in ``PartShared``, in the target's own cache."""
    if not states:
        return []
    shared = states[0].shared
    assert isinstance(shared, PartShared)
    with states[0].place.cache.provisional():
        return draft_chains(states, lambda active: feed(shared.part, active))


def feed(model: TargetModel, states: Seq[Within]) -> Tensor:
    """Run one forward over the last token of each chain, and commit its rows: the logits [n, vocabulary]."""
    cache = states[0].place.cache
    feeds = {state.place.slot: Rows([state.last]) for state in states}
    output = model.forward(cache, Batch.of(feeds))
    cache.keep(dict.fromkeys(feeds, (0,)))
    return torch.cat([output.logits_of(slot) for slot in feeds])
