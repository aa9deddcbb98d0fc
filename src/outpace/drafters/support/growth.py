"""Growth of trees of guesses, one layer at a time, by a model or by heads, for a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from torch import Tensor

from outpace.drafters.support.draws import Children, Draws
from outpace.drafters.support.runner import DraftRunner, Feed, Track
from outpace.drafters.support.shapes import Growing, TreeShape
from outpace.drafters.support.vocabulary import Vocabulary, VocabularyReader
from outpace.draws.sampling import warp
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Rules by which the trees of one engine's sequences grow.

    Attributes:
        least: the log of the least confidence with which a tree continues.
        by_path: whether that confidence is the whole path's, not the token's.
    """

    shape: TreeShape
    draws: Draws
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    least: float = -math.inf
    by_path: bool = True

    def ends(self, sequence: Sequence) -> frozenset[int]:
        """Tokens after which nothing is drafted."""
        return sequence.stop_tokens

    def revision(self) -> int:
        """Another number if tensors that a graph may have captured were replaced."""
        return 0

    def begin(self, sequence: Sequence) -> Growing:
        """An empty tree for this step, limited to the nodes that may be drafted and the useful depth.

        The limit is applied before drafting, since cutting a finished tree would keep only its first layers.
        """
        shape = self.shape.within(sequence.budget)
        least = math.log(sequence.row_cost) if sequence.row_cost else -math.inf
        return Growing(sequence.within_reach(shape.depth), shape, least=least, ends=self.ends(sequence))


class Grows(Protocol):
    """The part of a sequence's state that concerns its tree."""

    sequence: Sequence
    tree: Growing

    @property
    def shared(self) -> Growth: ...


G = TypeVar("G", bound=Grows)


@dataclass(frozen=True, kw_only=True)
class GrowthShared(Growth):
    """Data that an engine's sequences share: the draft model with its cache, and the rules of its trees.

    Attributes:
        mask: the token of places that it fills all in one forward; None if it drafts one after another.
    """

    runner: DraftRunner
    mask: int | None = None

    def ends(self, sequence: Sequence) -> frozenset[int]:
        return self.model.eos_token_ids if self.vocabulary.text else sequence.stop_tokens

    @property
    def model(self) -> TargetModel:
        return self.runner.model


@dataclass
class GrowthState:
    """A sequence's rows in the draft model's cache, its text in that model's tokens, and this step's tree."""

    sequence: Sequence
    shared: GrowthShared
    track: Track
    reader: VocabularyReader
    text: Seq[int] = ()
    tree: Growing = field(init=False)


def grow_whole(states: Seq[G], rows: Callable[[list[G]], Tensor]) -> None:
    """Grow every tree to its end.

    Args:
        rows: returns the logits [n, vocabulary] after the nodes of the front of each given tree.
    """
    active = [state for state in states if state.tree.layers > 0]
    while active:
        grow(active, rows(active))
        active = [state for state in active if state.tree.front]


def paths_of(active: Seq[Grows]) -> tuple[list[int], list[list[int]]]:
    """The paths to the nodes of the trees' fronts: whose each is, and its tokens, the root's first."""
    owners, paths = [], []
    for place, state in enumerate(active):
        for node in state.tree.front:
            owners.append(place)
            paths.append([state.sequence.tokens[-1], *state.tree.guessed(node)])
    return owners, paths


def grow(active: Seq[Grows], rows: Tensor) -> None:
    """Add the next layer to every tree.

    Args:
        rows: logits [n, vocabulary] after the nodes of each tree's front, tree after tree.
    """
    shared = active[0].shared
    nodes = [(state, node) for state in active for node in state.tree.front]
    counts = [state.tree.shape.count(state.tree, node) for state, node in nodes]
    quick = [place for place, (state, _) in enumerate(nodes) if _quick(state)]
    found: dict[int, Children] = {}
    if quick:
        chosen, ids = shared.vocabulary.drafted(rows if len(quick) == len(nodes) else rows[quick])
        best = shared.draws.best(chosen, [counts[place] for place in quick], ids)
        found = dict(zip(quick, best, strict=True))
    if listed := [place for place, (state, _) in enumerate(nodes) if _listed(state)]:
        chosen, ids = shared.vocabulary.drafted(rows if len(listed) == len(nodes) else rows[listed])
        among = shared.draws.among_best(
            chosen,
            [nodes[place][0].sequence for place in listed],
            [nodes[place][0].tree.depth for place in listed],
            [counts[place] for place in listed],
            ids,
        )
        found.update(zip(listed, among, strict=True))
    place = 0
    for state in active:
        layer: list[int] = []
        for node in state.tree.front:
            children = found.get(place) or _children(state, rows[place], node, counts[place])
            if confident(state, node, children):
                layer += hang(state.tree, node, children)
            place += 1
        advance(state, layer)


def feed_of(state: GrowthState) -> Feed:
    """The front of a tree as the draft model's input."""
    tree = state.tree
    parents = [tree.fed[tree.parents[node]] for node in tree.front]
    for row, node in enumerate(tree.front, len(state.track.parents)):
        tree.fed[node] = row
    return Feed((), state.shared.vocabulary.own([tree.tokens[node] for node in tree.front]), parents)


def _quick(state: Grows) -> bool:
    """True if children are simply the draft model's most probable tokens."""
    if state.shared.vocabulary.text:  # parameters by token id do not apply to its tokens
        return not state.shared.draws.draws_from(state.sequence)
    return state.sequence.processor.plain


def _listed(state: Grows) -> bool:
    """True if children are drawn with the target's noise from the most probable tokens alone."""
    sequence, shared = state.sequence, state.shared
    if not shared.draws.listed or shared.vocabulary.text or sequence.processor.adjusts:
        return False
    return not sequence.params.greedy and shared.draws.shares(sequence)


def _children(state: Grows, row: Tensor, node: int, count: int) -> Children:
    """The children of a node, by its sequence's parameters."""
    sequence, tree, draws = state.sequence, state.tree, state.shared.draws
    vocabulary, ids = state.shared.vocabulary, None
    if sequence.processor.adjusts and not vocabulary.text:
        scores = sequence.processor.adjust(vocabulary.logits(row[None])[0], tree.guessed(node))
    else:  # a row of the drafted ids alone is shorter
        rows, ids = vocabulary.drafted(row[None])
        scores = rows[0].float()
    if not draws.draws_from(sequence):
        return draws.best(warp(scores, sequence.params)[None], [count], ids)[0]
    children = draws.sampled(sequence, scores, tree.depth, len(tree.tokens), count, ids)
    if ids is None or children.distribution is None:
        return children
    return replace(children, distribution=vocabulary.whole(children.distribution))


def confident(state: Grows, node: int, children: Children) -> bool:
    """True if a tree continues from a node.

    The rule uses the best token's probability, not the drawn token's: whether a node has children must not
    depend on the children, or they would not be distributed as stated.
    """
    before = state.tree.weight(node) if state.shared.by_path else 0.0
    return before + children.peak >= state.shared.least


def hang(tree: Growing, node: int, children: Children) -> range:
    """Add children to a node and return their nodes."""
    if children.distribution is not None and children.tokens:
        tree.distributions[node] = children.distribution
    return tree.add(node, children.tokens, children.weights)


def advance(state: Grows, layer: Seq[int]) -> None:
    """End a layer and choose the next front, without tokens that end the text."""
    tree, shared = state.tree, state.shared
    tree.depth += 1
    stops = shared.ends(state.sequence)
    going = [node for node in layer if tree.tokens[node] not in stops]
    tree.front = tree.shape.front(tree, going) if tree.depth < tree.layers else []
