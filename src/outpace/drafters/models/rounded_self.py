"""Drafting with the target itself in rounded weights, on its own cache.

The best draft model for a model is itself, rounded: there is nothing to train or to fetch, the vocabulary is
the same, and it nearly always agrees (ML-SpecQD, Georganas et al. 2025, arXiv 2503.13565). It attends to the
rows that the target has committed, which are exact, and writes those of a draft after them; they are dropped
before the target verifies (QSpec, Zhao et al. 2024, arXiv 2410.11305, shares a cache between two precisions
too). So there is no second cache, no second reading of the prompt, and nothing to catch up on.

All sequences of a batch draft together, one forward per position, or for several: where a cheaper drafter has
guesses, they are checked in one forward of several rows, which takes little longer than one of a single row.
A chain ends where its probability falls below what a further row is worth at the measured costs; beside its
tokens hang second choices, which are verified if they pay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws
from outpace.drafters.support.growth import grow
from outpace.drafters.support.shapes import Growing, TreeShape
from outpace.drafters.support.vocabulary import Current
from outpace.drafters.support.within import PartShared, Within, layers_of, place_of
from outpace.drafters.support.worth import DraftSpeed, Lately, Missed, Rates
from outpace.learned.frequent import common
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.tree import select, worthwhile

_ROW = 0.06  # time of a further row in plain steps that is assumed of second choices, if not measured
_MORE = 0.12  # time of a further row of a drafting forward, in such forwards, if not measured
_COPIED = 8  # guesses of another drafter that are checked in a forward, at most
_LONGEST = 32  # tokens of a chain with such guesses, at most
_READ = 1024  # last tokens of a prompt that it has too
_LISTED = 64  # most probable tokens from which a sampled one is drawn
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
        forwards: number of sequences -> the time of a forward of one row each.
        more: number of sequences -> the time of a further row, in such forwards.
        few: the rounded target with a cut head; None if it cannot be cut, or is cut by little.
        missed: of what that does not predict.
    """

    part: Any
    vocabulary: Current
    few: Any = None
    missed: Missed = field(default_factory=Missed)

    rates: dict[bool, Rates] = field(default_factory=lambda: {True: Rates(), False: Rates()})
    speed: DraftSpeed = field(default_factory=DraftSpeed)
    forwards: dict[int, Lately] = field(default_factory=dict)
    more: dict[int, Lately] = field(default_factory=dict)

    def row_seconds(self, count: int) -> float | None:
        """Seconds per drafted row where ``count`` sequences draft together; None if not measured."""
        taken = self.forwards.get(count)
        return taken.seconds / count if taken else None

    def more_cost(self, count: int) -> float:
        """Time of a further row where ``count`` sequences draft together, in forwards of one row each."""
        taken = self.more.get(count)
        return taken.seconds if taken else _MORE

    def took(self, count: int, seconds: float, rows: int | None = None) -> None:
        """Note the time of a forward of ``count`` sequences over ``rows`` rows, by default one each."""
        further = 0 if rows is None else rows - count
        if not further:
            self.forwards.setdefault(count, Lately()).add(seconds)
        elif single := self.forwards.get(count):
            share = max(seconds / single.seconds - 1, 0.0) / further
            self.more.setdefault(count, Lately()).add(share)


@dataclass
class SelfState(Within):
    """A sequence that its target drafts for, and the draft of this step.

    Attributes:
        drafted: seconds of the draft's forwards, its share of them.
        guesses: what another drafter proposes after some further tokens; None without one.
    """

    shared: SelfShared
    drafted: float = field(init=False, default=0.0)
    guesses: Callable[[Seq[int], int], Draft] | None = field(init=False, default=None)

    def copied(self, price: float) -> list[int]:
        """Guesses below the chain that are worth a further row each.

        Args:
            price: time of such a row, in forwards of one row.
        """
        tree = self.tree
        most = min(tree.layers - tree.depth - 1, _COPIED)
        if self.guesses is None or most < 1:
            return []
        draft = self.guesses(tree.guessed(tree.front[-1]), most)
        tokens: list[int] = []
        chances: list[float] = []
        above = -1
        for node, parent in enumerate(draft.parents):
            if parent == above and draft.chances is not None:  # the first of siblings is the likeliest
                above = node
                tokens.append(draft.tokens[node])
                chances.append(draft.chances[node])
        return tokens[: worthwhile(chances, price)]

    @property
    def chooses(self) -> bool:
        """True if its tokens are point masses."""
        assert isinstance(self.tree, Weighed)
        return self.tree.chooses

    def count(self, text: Seq[int]) -> None:
        """Count the draft's tokens as right or wrong, by the text emitted after the root."""
        assert isinstance(self.tree, Weighed)
        self.tree.count(text)


@dataclass(frozen=True)
class RoundedSelf(Drafter[SelfState]):
    """The model itself, with rounded weights.

    Attributes:
        bits: of the rounded weights, 4 or 8.
        num_speculative_tokens: maximum number of forwards of a draft, at least 1. Each gives a token, or more
            where another drafter's guesses are its own; there are fewer where further tokens cost more time
            than they are expected to save.
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
        part: Any = target.rounded(self.bits)
        first = common(part.vocabulary)
        few = part.few(first) if part.head_share and first < part.vocabulary // 2 else None
        draws = Draws(weigh=True, listed=_LISTED)
        return SelfShared(shape=shape, draws=draws, vocabulary=Current(part.vocabulary), part=part, few=few)

    def renew(self, shared: SelfShared, target: TargetModel) -> SelfShared:
        return SelfShared(
            shape=shared.shape,
            draws=shared.draws,
            vocabulary=Current(target.vocabulary),
            part=shared.part,
            few=shared.few,
        )

    def warm(self, shared: SelfShared, slots: int) -> None:
        shared.part.make()

    def start(self, sequence: Sequence, shared: SelfShared) -> SelfState:
        self.warm(shared, 1)  # here, so that rounding is not counted as a draft's time
        state = SelfState(sequence, shared, place_of(sequence, self.name))
        if shared.few is not None:
            shared.few.add(sequence.tokens[-_READ:])
        state.tree = Weighed(0, shared.shape)
        return state

    def guide(self, state: SelfState, guesses: Callable[[Seq[int], int], Draft]) -> None:
        state.guesses = guesses

    def propose(self, states: Seq[SelfState]) -> list[Draft]:
        for state in states:
            state.tree, state.drafted = self._begin(state, len(states)), 0.0
        active = [state for state in states if state.tree.layers > 0]
        if active:
            part = _part_of(active)
            with active[0].place.cache.provisional():
                for _ in range(self.num_speculative_tokens):
                    began = time.perf_counter()  # by default the engine's clock, too
                    rows = advance(part, active)
                    seconds = time.perf_counter() - began
                    active[0].shared.took(len(active), seconds, rows)
                    for state in active:
                        state.drafted += seconds / len(active)
                    active = [state for state in active if state.tree.front]
                    if not active:
                        break
        return [state.tree.finish() for state in states]

    def observe(self, states: Seq[SelfState], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            sequence, shared = state.sequence, state.shared
            state.count(step.tokens)
            if shared.few is not None:
                shared.missed.count(shared.few.add(step.tokens), len(step.tokens))
            if sequence.plain_seconds is not None and sequence.row_cost is not None:
                time = 1 + sequence.row_cost * len(step.kept) + state.drafted / sequence.plain_seconds
                shared.speed.step(len(step.tokens), time)
            state.tree, state.drafted = Weighed(0, shared.shape), 0.0

    def _begin(self, state: SelfState, count: int) -> Weighed:
        """An empty tree; ``count`` sequences draft together."""
        sequence, shared = state.sequence, state.shared
        greedy = sequence.params.greedy
        tree = Weighed(layers_of(state, _LONGEST), shared.shape, rates=shared.rates[greedy])
        # Candidates that are drawn without the target's noise come with a distribution, not with chances.
        tree.chooses = greedy or shared.draws.shares(sequence)
        tree.branches = self.branches if tree.chooses else 1
        plain, row, seconds = sequence.plain_seconds, sequence.row_cost, shared.row_seconds(count)
        if plain is not None and row is not None and seconds is not None:
            worth = shared.speed.tokens * (row + seconds / plain)
            tree.least = worth / tree.rates.usual
        tree.price = _ROW if row is None else row
        return tree


def _part_of(active: Seq[SelfState]) -> TargetModel:
    """The rounded target as it is now, with a cut head where that pays, for all forwards of a draft."""
    shared = active[0].shared
    cut = _cuts(active)
    part: TargetModel = (shared.few if cut else shared.part).now()
    shared.vocabulary.ids = shared.few.ids if cut else None
    return part


def _cuts(active: Seq[SelfState]) -> bool:
    shared, sequence = active[0].shared, active[0].sequence
    plain, seconds, speed = sequence.plain_seconds, shared.row_seconds(len(active)), shared.speed
    # A distribution that is verified is over all tokens.
    if shared.few is None or plain is None or seconds is None or not all(s.chooses for s in active):
        return False
    return shared.missed.pays(seconds / plain * shared.part.head_share * speed.tokens, speed.a_step)


def advance(part: TargetModel, active: Seq[SelfState]) -> int:
    """Let each chain grow by a token, and by one more for each guess below it that it confirms.

    Returns:
        The number of rows of the forward.
    """
    shared, cache = active[0].shared, active[0].place.cache
    price = shared.more_cost(len(active))
    feeds = {state.place.slot: [state.last, *state.copied(price)] for state in active}
    output = part.forward(cache, Batch.of(feeds))
    right = dict.fromkeys(feeds, 0)
    left = list(active)
    while left:
        rows = [output.logits_of(state.place.slot)[right[state.place.slot]] for state in left]
        grow(left, torch.stack(rows))
        going = []
        for state in left:
            slot = state.place.slot
            right[slot] += 1
            ahead = feeds[slot][right[slot] :]
            if state.tree.front and ahead and state.last == ahead[0]:
                going.append(state)
        left = going
    cache.keep({slot: range(count) for slot, count in right.items()})
    return sum(map(len, feeds.values()))
