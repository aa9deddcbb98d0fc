"""Drafting with the target itself, after a sequence's committed rows in the target's own cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.cache import Place
from outpace.core import OutpaceError
from outpace.drafters.support.growth import Growth
from outpace.drafters.support.shapes import Growing
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel


@dataclass
class Within:
    """A sequence for which the target drafts, and the chain of this step.

    Attributes:
        place: its place in the target's cache.
    """

    sequence: Sequence
    shared: Growth
    place: Place
    tree: Growing = field(init=False)

    @property
    def last(self) -> int:
        """The end of the chain so far, at first the root."""
        end = self.tree.front[-1]
        return self.tree.tokens[end] if end >= 0 else self.sequence.tokens[-1]


@dataclass(frozen=True, kw_only=True)
class PartShared(Growth):
    """Data that an engine's sequences share: the target in the form in which it drafts.

    Attributes:
        part: the target without some layers, or over a window of its cache.
        after: nothing is drafted for a sequence with at most this many committed rows.
    """

    part: TargetModel
    after: int = 0


def place_of(sequence: Sequence, name: str) -> Place:
    """The place of a sequence's rows in the target's cache.

    Raises:
        OutpaceError: it has none, since it is the text of a draft model.
    """
    if sequence.place is None:
        raise OutpaceError(
            f"{name} drafts in the target's own cache, so it cannot draft for a draft model; use it by itself"
        )
    return sequence.place


def layers_of(state: Within, depth: int | None = None) -> int:
    """The longest chain that may be drafted; 0 before the prompt is in the cache.

    (The last rows of a first prompt are computed in the first step, which therefore has no draft.)

    Args:
        depth: a limit beside those of the sequence and the cache; by default the shape's.
    """
    sequence, place = state.sequence, state.place
    length = len(sequence.tokens)
    after = state.shared.after if isinstance(state.shared, PartShared) else 0
    if place.rows != length - 1 or place.rows < after:
        return 0
    layers = sequence.within_reach(state.shared.shape.depth if depth is None else depth)
    bounded = place.cache.static or place.cache.capacity is not None
    return min(layers, place.cache.room(place.slot) - length) if bounded else layers
