"""``traversal``: block verification of trees, from the leaves up. Preserves the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outpace.core import Draft, Verdict
from outpace.draws.logits import Logits
from outpace.tree import children, path_to
from outpace.verify.base import Draw, Verifier, likelihood_ratio, proposal
from outpace.verify.rejection import without
from outpace_lab.verify.block import chance_of_prefix


@dataclass
class _Open:
    """A node whose children are being tried, and its equal siblings, if they are followed together.

    Attributes:
        node: the first of them.
        share: current probability of accepting the path to it.
        q: the target's distribution as it remains after the rejected children.
        siblings: the children, and ``left`` those still to be tried.
        p: the distribution that the child being tried was drawn from.
    """

    node: int
    share: float
    q: Tensor
    siblings: Seq[int]
    left: Iterator[int]
    p: Tensor | None = None


def traversal(logits: Logits, draft: Draft, draw: Draw) -> Verdict:
    """Accept the first path, from the leaves up, that is accepted as a whole (Weng et al. 2025, algorithm 2).

    A path's share is the product of q / p over its tokens, limited to 1 after each. A leaf is accepted with
    probability share. If it is rejected, its parent's q becomes the normalised positive part of w q - p and
    its share w becomes e / (e + 1 - w), with e the sum of that part; then the next child is tried, and after
    the last one the parent itself. So the siblings after an unlikely child may make up for it. On a chain
    this is block verification.

    Equal siblings that a drafter chooses, or draws with replacement, are followed together, as by
    ``rejection``: the first is entered with the children of all. This changes no probability of acceptance
    above them: a node entered with a share is accepted, or a node below it, with that probability, whatever
    the number of its children. Once the first is rejected, the others' share is 0.

    Raises:
        OutpaceError: the draft gives a token of its own probability 0, or lacks a distribution.
    """
    below = children(draft.parents)
    together = draft.distributions is None or draft.replacement

    def enter(nodes: Seq[int], share: float) -> _Open:
        node, siblings = nodes[0], [child for parent in nodes for child in below[parent]]
        guessed = [draft.tokens[place] for place in path_to(draft.parents, node)]
        return _Open(node, share, draw.distribution(logits, node, guessed), siblings, iter(siblings))

    frames = [enter([-1], 1.0)]
    while True:
        frame = frames[-1]
        child = next(frame.left, None)
        if child is not None:
            token = draft.tokens[child]
            if frame.p is None or together:
                frame.p = proposal(draft, draft.parents[child], token, frame.q)
            share = min(1.0, frame.share * likelihood_ratio(frame.q, frame.p, token))
            if share > 0:
                equal = [node for node in frame.siblings if draft.tokens[node] == token]
                frames.append(enter(equal if together else [child], share))
            else:
                _reject(frame, draft, token)
        elif frame.node < 0 or draw.accept(frame.share, frame.node):
            break
        else:
            frames.pop()
            _reject(frames[-1], draft, draft.tokens[frame.node])
    return _emit(frames[-1], logits, draft, draw)


def _reject(frame: _Open, draft: Draft, token: int) -> None:
    """Update a node's q, share and p after the rejection of a child."""
    assert frame.p is not None  # the child was tried
    excess = (frame.share * frame.q - frame.p).clamp(min=0)
    total = float(excess.sum())
    # The excess is empty only by rounding, or if the share is small: then the node cannot be accepted.
    if total > 0:
        frame.q = excess / total
    frame.share = chance_of_prefix(frame.share, total)
    if not draft.replacement:
        frame.p = without(frame.p, token)


def _emit(last: _Open, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
    path = path_to(draft.parents, last.node)
    tokens: list[int] = []
    for place, node in enumerate(path):
        tokens.append(draft.tokens[node])
        if not draw.emit(tokens[-1], logits, draft.parents[node]):
            return Verdict(path[: place + 1], tokens)
    tokens.append(draw.choose(last.q, last.node))
    draw.emit(tokens[-1], logits, last.node)
    return Verdict(path, tokens)


@dataclass(frozen=True)
class Traversal(Verifier):
    """The distribution of plain decoding; block verification for trees."""

    name: ClassVar[str] = "traversal"
    paper: ClassVar[str] = (
        "Weng et al. 2025, Traversal Verification for Speculative Tree Decoding (arXiv 2505.12398)"
    )
    ahead: ClassVar[bool] = True

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        return traversal(logits, draft, draw)
