"""Drafters that fill a block of places in one forward: how they learn, and how their blocks become drafts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.core import OutpaceError
from outpace.drafters.support.draws import Draws, Noise
from outpace.drafters.support.growth import Growth, grow
from outpace.drafters.support.layer_cache import LayerCache, Slot
from outpace.drafters.support.shapes import Growing, shape_of
from outpace.drafters.support.vocabulary import Vocabulary
from outpace.learned.layers import LayerConfig
from outpace.learned.learned import Batch, Learned, Losses, Objective, accepted_of_chain, measure
from outpace.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """What drafters of blocks have in common.

    Attributes:
        tokens: drafted in a block.
        depth: decoder layers.
        anchors: places of each row of a batch that a block is learnt after, drawn anew for each batch.
        decay: a token at distance k counts exp(-(k - 1) / decay) in the loss: an early mistake costs more.
    """

    tokens: int = 7
    depth: int = 2
    anchors: int = 64
    decay: float = 4.0

    def __post_init__(self) -> None:
        for name in ("tokens", "depth", "anchors"):
            if getattr(self, name) < 1:
                raise OutpaceError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.decay > 0:
            raise OutpaceError(f"decay must be above 0, not {self.decay}")


class BlockModule(Learned):
    """A module that says, in one forward, what stands at several places after a text."""

    config: BlockConfig

    @abstractmethod
    def blocks(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Outputs [B, A, tokens, hidden size] for the places after each anchor.

        Args:
            anchors: [B, A], places of the batch, each the root of a draft.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """[..., vocabulary], of outputs [..., hidden size]."""

    def loss(self, batch: Batch, objective: Objective) -> Losses:
        config = self.config
        anchors = draw_places(batch, config.anchors, range(1, config.tokens + 1))
        states = self.blocks(batch, anchors)
        distances = torch.arange(config.tokens, dtype=torch.float64)
        weights: list[float] = torch.exp(-distances / config.decay).tolist()
        return measure(objective, self._depths(batch, anchors, states), weights)

    def _depths(
        self, batch: Batch, anchors: Tensor, states: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        rows = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(anchors)
        for place in range(self.config.tokens):
            where = batch.ahead(place + 1).gather(1, anchors)
            row, ahead = rows[where], anchors[where] + place
            yield (
                self.logits(states[:, :, place][where]),
                batch.logits[row, ahead],
                batch.tokens[row, ahead + 1],
            )

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        """Of a chain of all tokens of the block."""
        every = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        guesses = [
            self.logits(self.blocks(batch, anchors)).argmax(dim=-1)
            for anchors in every.split(self.config.anchors, dim=1)
        ]
        return accepted_of_chain(batch, torch.cat(guesses, dim=1))


def draw_places(batch: Batch, count: int, distances: Seq[int]) -> Tensor:
    """Places [B, A] at random, each once, first of those with something to learn so far ahead."""
    useful = torch.stack([batch.ahead(distance) for distance in distances]).any(dim=0)
    order = torch.rand(useful.shape).to(useful.device) + useful
    return order.topk(min(count, useful.shape[1]), dim=1).indices


def sees_own_block(anchors: int, width: int, device: torch.device) -> Tensor:
    """[A x width, A x width], true where two rows are of one block."""
    block = torch.arange(anchors * width, device=device) // width
    return block[:, None] == block


def sees_before(batch: Batch, anchors: Tensor, width: int, own: bool) -> Tensor:
    """[B, A x width, T], true where a row of an anchor's block sees a place of the text.

    Args:
        own: whether the anchor's place is seen too.
    """
    places = torch.arange(batch.tokens.shape[1], device=anchors.device)
    ends = anchors[..., None] + int(own)
    same = batch.documents.gather(1, anchors)[..., None] == batch.documents[:, None]
    return ((places < ends) & same).repeat_interleave(width, dim=1)


@dataclass(frozen=True)
class BlockShared(Growth):
    """What the sequences of one engine share."""

    module: Any  # a BlockModule
    cache: LayerCache


@dataclass
class BlockState:
    """A sequence for which blocks are drafted.

    Attributes:
        rows: those of committed places, in the drafter's cache.
        waiting: the target's states of committed places whose rows are not fed yet, by layer.
    """

    sequence: Sequence
    shared: BlockShared
    slot: Slot
    rows: int = 0
    waiting: list[Mapping[int, Tensor]] = field(default_factory=list)
    tree: Growing = field(init=False)


def share(method: str, module: BlockModule, draws: Noise) -> BlockShared:
    """A module with a cache of its own, drafting chains."""
    config, weight = module.config, next(module.parameters())
    return BlockShared(
        vocabulary=Vocabulary(),
        shape=shape_of(config.tokens, method=method),
        draws=Draws(draws),
        least=-math.inf,
        by_path=True,
        module=module,
        cache=LayerCache(config, config.depth, weight.dtype, weight.device),
    )


def begin_block(state: BlockState, most: int | None) -> bool:
    """Begin a draft; whether there is anything to draft.

    Args:
        most: tokens at most; None for the whole block.
    """
    shape = state.shared.shape
    depth = shape.depth if most is None else min(most, shape.depth)
    state.tree = Growing(state.sequence.within_reach(depth), shape)
    return state.tree.layers > 0


def grow_block(states: Seq[BlockState], logits: Tensor) -> None:
    """Draft the chains of some sequences.

    Args:
        logits: [n, tokens, vocabulary]; what stands at a place does not depend on what is drawn before it.
    """
    active = list(enumerate(states))
    while active:
        rows = [logits[place, state.tree.depth] for place, state in active]
        grow([state for _, state in active], torch.stack(rows))
        active = [(place, state) for place, state in active if state.tree.front]
