"""One part's view of a step in which several drafters drafted together."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import cached_property

from torch import Tensor

from outpace.core import Draft
from outpace.draws.logits import Logits
from outpace.sequence import Step
from outpace.tree import path_to, select


class PartStep(Step):
    """A step restricted to one part's nodes, as if the part had drafted alone.

    Most parts read only the text, so everything else is computed on first use.

    Args:
        whole: the step of all parts together.
        proposal: the part's draft.
        nodes: for each of its nodes, the node of the merged proposal that represents it; -1 for none.
        layers: the target's layers that the part reads.
    """

    def __init__(self, whole: Step, proposal: Draft, nodes: Seq[int], layers: Seq[int]) -> None:
        vars(self).update(  # a step is frozen
            tokens=whole.tokens,
            root=whole.root,
            sequence=whole.sequence,
            _whole=whole,
            _proposal=proposal,
            _nodes=nodes,
            _layers=layers,
        )

    _whole: Step
    _proposal: Draft
    _nodes: Seq[int]
    _layers: Seq[int]

    @cached_property
    def _in_whole(self) -> list[int]:
        """For each node of the part's draft, its node in the whole step; -1 if it was not verified."""
        verified = {old: new for new, old in enumerate(self._whole.kept)}
        return [verified.get(node, -1) for node in self._nodes]

    @cached_property
    def kept(self) -> Seq[int]:
        return [node for node, there in enumerate(self._in_whole) if there >= 0]

    @cached_property
    def draft(self) -> Draft:
        return select(self._proposal, self.kept)

    @cached_property
    def path(self) -> list[int]:
        accepted = set(self._whole.path)
        own = enumerate(self._in_whole[node] for node in self.kept)
        return path_to(
            self.draft.parents, max((node for node, there in own if there in accepted), default=-1)
        )

    @cached_property
    def logits(self) -> Logits:
        return self._whole.logits.select([self._in_whole[node] for node in self.kept])

    @cached_property
    def own(self) -> Mapping[int, int]:
        places = {-1: -1, **dict(enumerate(self._in_whole[node] for node in self.kept))}
        return {node: self._whole.own[there] for node, there in places.items() if there in self._whole.own}

    @cached_property
    def hidden(self) -> Mapping[int, Tensor]:
        rows = [0, *(self._in_whole[node] + 1 for node in self.kept)]
        return {layer: self._whole.hidden[layer][rows] for layer in self._layers}

    @cached_property
    def committed(self) -> Mapping[int, Tensor]:
        return {layer: self._whole.committed[layer] for layer in self._layers}
