"""Drafting with the target itself in rounded weights, on its own cache.

The best draft model for a model is itself, rounded: there is nothing to train or to fetch, the vocabulary is
the same, and it nearly always agrees (ML-SpecQD, Georganas et al. 2025, arXiv 2503.13565). It attends to the
rows that the target has committed, which are exact, and writes those of a draft after them; they are dropped
before the target verifies (QSpec, Zhao et al. 2024, arXiv 2410.11305, shares a cache between two precisions
too). So there is no second cache, no second reading of the prompt, and nothing to catch up on.

All sequences of a batch draft together, one forward per position. A chain ends where its probability falls
below what a further row is worth at the measured costs; beside its tokens hang second choices, which are
verified if they pay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws
from outpace.drafters.support.growth import grow
from outpace.drafters.support.shapes import Growing, TreeShape
from outpace.drafters.support.within import PartShared, Within, feed, layers_of, place_of
from outpace.drafters.support.worth import DraftSpeed, Lately, Rates
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.tree import select, worthwhile

_ROW = 0.06  # time of a further row in plain steps that is assumed of second choices, if not measured
_LEAST = 1e-9  # the chance that is stated for one that rounds to 0


@dataclass
class Weighed(Growing):
    """A chain with second choices beside its tokens.

    Attributes:
        rates: of right guesses so far.
        stated: per node, the confidence stated of it, given a right parent.
        chances: per node, the probability that it and its ancestors are right.
        branches: children of a node of the chain, at most.
        chooses: its tokens are chosen, or drawn with the target's own noise.
        price: time of a further row in plain steps.
    """

    rates: Rates = field(default_factory=Rates)
    stated: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    branches: int = 1
    chooses: bool = True
    price: float = _ROW

    def add(self, parent: int, tokens: Seq[int], weights: Seq[float]) -> range:
        nodes = super().add(parent, tokens, weights)
        above = self.chances[parent] if parent >= 0 else 1.0
        for rank, weight in enumerate(weights):
            self.stated.append(math.exp(weight))
            chance = self.rates.chance(rank, self.stated[-1])
            self.chances.append(above * min(max(chance, _LEAST), 1.0))
        return nodes

    def count(self, text: Seq[int]) -> None:
        """Count the nodes with right parents as right or wrong, by the text emitted after the root."""
        depth = {-1: 0}  # of the nodes that were right
        for node, parent in enumerate(self.parents):
            if (place := depth.get(parent, len(text))) < len(text):
                right = self.tokens[node] == text[place]
                self.rates.count(self.ranks[node], self.stated[node], right)
                if right:
                    depth[node] = place + 1


class Leading(TreeShape):
    """A chain of the likeliest tokens with second choices, which ends where a row is worth more than it.

    Args:
        depth: the longest chain.
        branches: children of a node of the chain, at most.
    """

    weighs = True

    def __init__(self, depth: int, branches: int) -> None:
        self.depth = depth
        self.branches = branches > 1
        self.key = ("leading", (depth, branches))

    def count(self, tree: Growing, node: int) -> int:
        assert isinstance(tree, Weighed)
        return tree.branches

    def front(self, tree: Growing, layer: Seq[int]) -> list[int]:
        assert isinstance(tree, Weighed)
        return [node for node in layer if not tree.ranks[node] and tree.chances[node] > tree.least]

    def within(self, nodes: int | None) -> Leading:
        return self

    def finish(self, tree: Growing, replacement: bool) -> Draft:
        assert isinstance(tree, Weighed)
        if not tree.chooses:
            return super().finish(tree, replacement=True)
        # The sort is stable: of equal chances the earlier node comes first, a parent before its child.
        ranked = sorted(range(len(tree.tokens)), key=lambda node: -tree.chances[node])
        kept = worthwhile([tree.chances[node] for node in ranked], tree.price)
        whole = Draft(tuple(tree.tokens), tuple(tree.parents), chances=tree.chances)
        return select(whole, ranked[:kept])


@dataclass(frozen=True, kw_only=True)
class SelfShared(PartShared):
    """Data that an engine's sequences share, beside the rounded target: what was measured of its drafts.

    Attributes:
        rates: of right guesses, of greedy and of sampled texts.
        forwards: number of sequences -> the time of a forward of theirs.
    """

    rates: dict[bool, Rates] = field(default_factory=lambda: {True: Rates(), False: Rates()})
    speed: DraftSpeed = field(default_factory=DraftSpeed)
    forwards: dict[int, Lately] = field(default_factory=dict)

    def row_seconds(self, count: int) -> float | None:
        """Seconds per drafted row where ``count`` sequences draft together; None if not measured."""
        taken = self.forwards.get(count)
        return taken.seconds / count if taken else None

    def took(self, count: int, seconds: float) -> None:
        """Note the time of a forward of ``count`` sequences."""
        self.forwards.setdefault(count, Lately()).add(seconds)


@dataclass
class SelfState(Within):
    """A sequence that its target drafts for, and the draft of this step.

    Attributes:
        drafted: seconds of the draft's forwards, its share of them.
    """

    shared: SelfShared
    drafted: float = field(init=False, default=0.0)

    def count(self, text: Seq[int]) -> None:
        """Count the draft's tokens as right or wrong, by the text emitted after the root."""
        assert isinstance(self.tree, Weighed)
        self.tree.count(text)


@dataclass(frozen=True)
class RoundedSelf(Drafter[SelfState]):
    """The model itself, with rounded weights.

    Attributes:
        bits: of the rounded weights, 4 or 8.
        num_speculative_tokens: maximum number of tokens of the chain, at least 1. It is shorter where further
            ones cost more time than they are expected to save.
        branches: tokens drafted per place of the chain, at least 1: beside the one that is continued, others
            that are likely enough. 1 drafts chains.
    """

    name: ClassVar[str] = "self"
    bits: int = 4
    num_speculative_tokens: int = 6
    branches: int = 2

    when: ClassVar[str] = "for any text, with a model of 16 or 32 bits on a CPU"
    paper: ClassVar[str] = (
        "Georganas et al. 2025, ML-SpecQD: Multi-Level Speculative Decoding with Quantized Drafts "
        "(arXiv 2503.13565); Zhao et al. 2024, QSpec: Speculative Decoding with Complementary Quantization "
        "Schemes (arXiv 2410.11305); coupled draws: Daliri et al. 2024 (arXiv 2408.07978)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_least(num_speculative_tokens=1, branches=1)
        if self.bits not in (4, 8):
            raise OutpaceError(f"self: bits must be 4 or 8, not {self.bits!r}")

    @property
    def trees(self) -> bool:
        return self.branches > 1

    @property
    def widths(self) -> tuple[int, ...]:
        # It drafts no more than pays; what is left to decide is whether to draft.
        return (self.num_speculative_tokens * self.branches,)

    def prepare(self, target: TargetModel) -> SelfShared:
        shape = Leading(self.num_speculative_tokens, self.branches)
        return SelfShared(shape=shape, draws=Draws(weigh=True), part=target.rounded(self.bits))

    def renew(self, shared: SelfShared, target: TargetModel) -> SelfShared:
        return SelfShared(shape=shared.shape, draws=shared.draws, part=shared.part)

    def warm(self, shared: SelfShared, slots: int) -> None:
        part: Any = shared.part
        part.make()

    def start(self, sequence: Sequence, shared: SelfShared) -> SelfState:
        self.warm(shared, 1)  # here, so that rounding is not counted as a draft's time
        state = SelfState(sequence, shared, place_of(sequence, self.name))
        state.tree = Weighed(0, shared.shape)
        return state

    def propose(self, states: Seq[SelfState]) -> list[Draft]:
        for state in states:
            state.tree, state.drafted = self._begin(state, len(states)), 0.0
        active = [state for state in states if state.tree.layers > 0]
        if active:
            shared = active[0].shared
            with active[0].place.cache.provisional():
                while active:
                    began = time.perf_counter()  # by default the engine's clock, too
                    grow(active, feed(shared.part, active))
                    seconds = time.perf_counter() - began
                    shared.took(len(active), seconds)
                    for state in active:
                        state.drafted += seconds / len(active)
                    active = [state for state in active if state.tree.front]
        return [state.tree.finish() for state in states]

    def observe(self, states: Seq[SelfState], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            sequence, shared = state.sequence, state.shared
            state.count(step.tokens)
            if sequence.plain_seconds is not None and sequence.row_cost is not None:
                time = 1 + sequence.row_cost * len(step.kept) + state.drafted / sequence.plain_seconds
                shared.speed.step(len(step.tokens), time)
            state.tree, state.drafted = Weighed(0, shared.shape), 0.0

    def _begin(self, state: SelfState, count: int) -> Weighed:
        """An empty tree; ``count`` sequences draft together."""
        sequence, shared = state.sequence, state.shared
        greedy = sequence.params.greedy
        tree = Weighed(layers_of(state), shared.shape, rates=shared.rates[greedy])
        # Candidates that are drawn without the target's noise come with a distribution, not with chances.
        tree.chooses = greedy or shared.draws.shares(sequence)
        tree.branches = self.branches if tree.chooses else 1
        plain, row, seconds = sequence.plain_seconds, sequence.row_cost, shared.row_seconds(count)
        if plain is not None and row is not None and seconds is not None:
            worth = shared.speed.tokens * (row + seconds / plain)
            tree.least = worth / tree.rates.usual
        tree.price = _ROW if row is None else row
        return tree
