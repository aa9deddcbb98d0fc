"""Token Recycling (Luo et al. 2024, arXiv 2408.08696).

Decoding uses only the best token of each row of logits. This method stores the most probable tokens of each
row, rejected nodes' rows included, in an adjacency matrix: token -> candidates that the target last predicted
after it (section 3.1). A draft follows the candidates from the root over a fixed tree (section 3.2). This
needs no model, no training and no text to look up: only a few million numbers.

Differences from the paper: its tree of 80 nodes was tuned by hand, while this tree is computed from the
probability that the target's token is the candidate of a given rank, and is optimal for any number of nodes,
the best first; if a token is in several rows of a step, the accepted row is stored; nothing is drafted after
a token that ends the text. Nothing is learnt from the prompt's rows, since the engine computes no logits for
them.

Rows of plain steps are ranked only when a draft needs them, or several at once: while a governor drafts
nothing, a step just copies a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import Draft
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.support.best_first import best_first
from outpace.drafters.support.memories import Memories
from outpace.draws.logits import DrawnTokens
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.tree import depths

Indices = NDArray[np.int64]

_WAITING = 16  # maximum number of rows that wait to be ranked


class Candidates:
    """A matrix of candidates, and the rows of logits that wait to be ranked for it.

    Args:
        follow: the candidates after each token, the most probable first, shape [vocabulary + 1, top_k].
            Unknown candidates, and those in the last row, are ``vocabulary``, which is not a token.
    """

    def __init__(self, follow: NDArray[np.int32]) -> None:
        self._follow = follow
        self.top_k = len(follow[0])
        self._waiting: dict[int, Tensor | NDArray[np.float32]] = {}

    @property
    def follow(self) -> NDArray[np.int32]:
        """The matrix, with all rows ranked."""
        if self._waiting:
            self._rank()
        return self._follow

    def _rank(self) -> None:
        rows = torch.stack([torch.as_tensor(row) for row in self._waiting.values()])
        self._follow[list(self._waiting)] = rows.topk(self.top_k, dim=-1).indices.cpu().numpy()
        self._waiting.clear()

    def wait(self, token: int, row: Tensor | NDArray[np.float32]) -> None:
        """Rank the logits after a token later; of several rows of a token the latest counts."""
        self._waiting[token] = row
        if len(self._waiting) == _WAITING:
            self._rank()


@dataclass
class TokenRecyclingState:
    """A sequence, and its candidates, possibly shared with other sequences."""

    sequence: Sequence
    candidates: Candidates


@dataclass(frozen=True)
class TokenRecycling(SequenceDrafter[TokenRecyclingState]):
    """Token Recycling: drafts tokens that the target found likely before, from a matrix of candidates.

    Attributes:
        max_nodes: tokens in the tree, at least 1.
        top_k: candidates kept per token, at least 1.
        share: learn from all sequences of an engine that share a memory (``Speculation.memory``); otherwise
            each starts empty. (Under ``rejection`` the tokens of a seed depend on the drafts, and therefore,
            if shared, on earlier requests.)
    """

    max_nodes: int = 80
    top_k: int = 8
    share: bool = True

    when: ClassVar[str] = "on an accelerator with few requests, for texts that do not repeat"
    paper: ClassVar[str] = (
        "Luo et al. 2024, Turning Trash into Treasure: Accelerating Inference of Large Language Models with "
        "Token Recycling (arXiv 2408.08696)"
    )

    def __post_init__(self) -> None:
        self.check_least(max_nodes=1, top_k=1)
        self.check_most(max_nodes=4096)

    @property
    def trees(self) -> bool:
        return self.top_k > 1 and self.max_nodes > 1

    @property
    def reads_top(self) -> int:
        return self.top_k

    def prepare(self, target: TargetModel) -> Memories[Candidates]:
        size = target.vocabulary
        shape = size + 1, min(self.top_k, size)
        return Memories(lambda: Candidates(np.full(shape, size, dtype=np.int32)))

    def start(self, sequence: Sequence, shared: Memories[Candidates]) -> TokenRecyclingState:
        return TokenRecyclingState(sequence, shared.memory_of(sequence) if self.share else shared.new())

    def draft(self, state: TokenRecyclingState) -> Draft:
        sequence, follow = state.sequence, state.candidates.follow
        unknown, top_k = len(follow) - 1, follow.shape[1]
        budget = self.max_nodes if sequence.budget is None else min(self.max_nodes, sequence.budget)
        tree = template(budget, top_k)
        drafted = np.empty(
            budget + 1, dtype=np.int32
        )  # the root's token is the last entry, so index -1 maps to it
        drafted[-1] = sequence.tokens[-1]
        for layer, above, ranks in tree.layers:
            drafted[layer] = follow[drafted[above], ranks]
        tokens = drafted[:-1].tolist()
        if unknown in tokens or not sequence.stop_tokens.isdisjoint(tokens):
            return _prune(tokens, tree.parents, sequence.stop_tokens.union([unknown]), unknown)
        return Draft(tokens, tree.parents)

    def revise(self, state: TokenRecyclingState, unchanged: int) -> bool:
        return True  # the candidates after a token do not depend on the text before it

    def learn(self, state: TokenRecyclingState, step: Step) -> None:
        candidates, root = state.candidates, state.sequence.tokens[-len(step.tokens) - 1]
        if not step.draft.tokens and not isinstance(step.logits, DrawnTokens):
            candidates.wait(root, step.logits.copied(-1))
            return
        # Of nodes with the same token the later entry is used: the one on the accepted path, if any.
        nodes = {token: node for node, token in enumerate(step.draft.tokens)}
        nodes |= {root: -1} | {step.draft.tokens[node]: node for node in step.path}
        candidates.follow[list(nodes)] = step.logits.top(list(nodes.values()), candidates.top_k)


def _prune(tokens: Seq[int], parents: Seq[int], last: frozenset[int], unknown: int) -> Draft:
    """The draft without nodes whose token is unknown, and without descendants of a token in ``last``."""
    place = {-1: -1}
    kept: list[int] = []
    above: list[int] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token != unknown and parent in place:
            above.append(place[parent])
            if token not in last:
                place[node] = len(kept)
            kept.append(token)
    return Draft(kept, above)


@dataclass(frozen=True)
class Template:
    """The shape of a tree whose first n nodes are the best tree of n nodes, for every n.

    Attributes:
        parents: parent of each node, as in a draft.
        layers: for each depth, its nodes, their parents, and their ranks among their parent's candidates.
    """

    parents: tuple[int, ...]
    layers: tuple[tuple[Indices, Indices, Indices], ...]


@lru_cache(maxsize=256)
def template(nodes: int, top_k: int) -> Template:
    """The tree of ``nodes`` nodes with the highest expected acceptance under ``chance``.

    A node's acceptance probability is the product of the chances on its path, so the optimal tree consists of
    the nodes with the highest products, picked greedily as in Medusa's sparse tree (Cai et al. 2024, arXiv
    2401.10774, section 2.3.3). Without a limit on depth this is also Sequoia's optimum (Chen et al. 2024,
    arXiv 2402.12374, section 3.1).
    """

    def children(_: None, product: float) -> list[tuple[float, int, None]]:
        return [(product * chance(rank), rank, None) for rank in range(top_k)]

    tree = best_first(None, children, nodes, ())
    depth = np.array(depths(tree.parents), dtype=np.int64)
    layers = [(depth == d).nonzero()[0] for d in range(max(depth, default=-1) + 1)]
    above, ranks = np.array(tree.parents, dtype=np.int64), np.array(tree.tokens, dtype=np.int64)
    return Template(tuple(tree.parents), tuple((layer, above[layer], ranks[layer]) for layer in layers))


def chance(rank: int) -> float:
    """The probability that the target's token is the candidate of this rank, given an accepted parent."""
    return 0.45 * math.pow(rank + 1, -1.4)
