"""``rejection``: speculative sampling on trees. The output has the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outpace.core import Draft, NoTokenLeft, Verdict
from outpace.draws.logits import Logits
from outpace.draws.many_rows import draw_rows, host_keys
from outpace.draws.noise import NO_TOKEN_LEFT, Stream
from outpace.draws.sampling import warp
from outpace.sequence import KeyedDraw
from outpace.transfer import upload
from outpace.tree import children, is_chain, path_to
from outpace.verify.base import Draw, Verifier, likelihood_ratio, no_chance, positive_part, proposal


class Numbers(NamedTuple):
    """What the walk along a chain needs, for each of its nodes, the root first.

    Attributes:
        target, draft: q and p of the token of the node below; 1 below the last.
        tokens: the token that is drawn if the one below is rejected, or if there is none.
        defined: 0 where no token is left to draw.
    """

    target: list[float]
    draft: list[float]
    tokens: list[float]
    defined: list[float]


def _on_device(logits: Logits, draft: Draft, draw: Draw) -> bool:
    if logits.device.type != "cuda" or not isinstance(draw, KeyedDraw) or draw.greedy:
        return False
    sequence = draw.sequence
    if sequence.processor.adjusts or sequence.params.logits_processors:
        return False  # scores depend on the tokens before them
    parents = range(-1, len(draft) - 1)
    whole = draft.distributions is None or all(node in draft.distributions for node in parents)
    return whole and is_chain(draft.parents)


def _reject_chain(logits: Logits, draft: Draft, draw: Any) -> Verdict:
    """``rejection`` of a chain whose logits are on a GPU, with one copy to the host.

    Node by node the host would wait for the device several times. Here every node's ratio and the token that
    is drawn if it is rejected are computed on the device, before it is known how far the walk goes.
    """
    numbers, path, tokens = _numbers(logits, draft, draw), list[int](), list[int]()
    for node in range(-1, len(draft)):
        if not numbers.defined[node + 1]:
            raise NoTokenLeft(NO_TOKEN_LEFT)
        child = node + 1
        accepted = False
        if child < len(draft):
            q, p = numbers.target[child], numbers.draft[child]
            if not p > 0:
                raise no_chance(draft.tokens[child], p)
            accepted = draw.accept(min(1.0, q / p), child)
        token = draft.tokens[child] if accepted else int(numbers.tokens[child])
        tokens.append(token)
        goes_on = draw.emit(token, logits, node)
        if not accepted:
            break
        path.append(child)
        if not goes_on:
            break
    return Verdict(path, tokens)


def _numbers(logits: Logits, draft: Draft, draw: KeyedDraw) -> Numbers:
    sequence, count = draw.sequence, len(draft)
    q = warp(logits.rows[: 1 + count].float(), sequence.params).double().softmax(dim=-1)
    left, target, drafted = q, q.new_ones(1 + count), q.new_ones(1 + count)
    if count:
        ids = upload(list(draft.tokens), q.device)[:, None]
        target[:count] = q[:count].gather(1, ids)[:, 0]
        if draft.distributions is None:
            p = torch.zeros_like(q[:count]).scatter_(1, ids, 1.0)
        else:
            p = torch.stack([draft.distributions[node].to(q) for node in range(-1, count - 1)])
        drafted[:count] = p.gather(1, ids)[:, 0]
        rest = (q[:count] - p).clamp(min=0)
        total = rest.sum(dim=-1, keepdim=True)
        left = torch.cat([torch.where(total > 0, rest / total, q[:count]), q[count:]])
    words = [sequence.key.node(Stream.RESIDUAL, draw.root, node) for node in range(-1, count)]
    weights = left / left.sum(dim=-1, keepdim=True)
    tokens = draw_rows(weights.log(), upload(host_keys(words), q.device))
    found: Tensor = torch.stack([target, drafted, tokens.double(), q.sum(dim=-1).isfinite().double()])
    return Numbers(*found.tolist())


# (draft, siblings, q, draw) -> the accepted sibling, or None, and the remaining q.
Attempt = Callable[[Draft, Seq[int], Tensor, Draw], tuple[int | None, Tensor]]


def rejection(logits: Logits, draft: Draft, draw: Draw, attempt: Attempt | None = None) -> Verdict:
    """Recursive rejection sampling: at each node, try its children in the order they were drawn.

    A child x is accepted with probability min(1, q(x) / p(x)); if it is rejected, q becomes the normalised
    positive part of q - p, and the next child is tried against that. If all are rejected, or there are none,
    a token is drawn from the remaining q. On a chain this is Chen et al. 2023, algorithm 2 (Leviathan et al.
    2023, algorithm 1). On a tree of candidates drawn with replacement, p is unchanged (SpecInfer, Miao et al.
    2023, algorithm 2); if drawn without, rejected candidates are removed from p, which is renormalised (Jeon
    et al. 2024, algorithm 2). A draft without distributions consists of point masses, p(x) = 1: a child is
    then accepted with its remaining probability in q. Equal siblings of such a draft, or drawn with
    replacement, are followed together: the children of each are draws after the same text.

    Args:
        attempt: function that tries the siblings; default ``try_in_turn``.

    Raises:
        OutpaceError: the draft gives a token of its own probability 0, or lacks a distribution.
    """
    below = children(draft.parents)
    path: list[int] = []
    tokens: list[int] = []
    nodes = [-1]
    while True:
        node = nodes[0]
        siblings = [child for parent in nodes for child in below[parent]]
        q = draw.distribution(logits, node)
        accepted, left = (attempt or try_in_turn)(draft, siblings, q, draw)
        token = draw.choose(left, node) if accepted is None else draft.tokens[accepted]
        tokens.append(token)
        goes_on = draw.emit(token, logits, node)
        if accepted is None:
            break
        path.append(accepted)
        if not goes_on:
            break
        nodes = [accepted]
        if draft.distributions is None or draft.replacement:
            nodes = [child for child in siblings if draft.tokens[child] == token]
    return Verdict(path_to(draft.parents, path[-1] if path else -1), tokens)


def try_in_turn(
    draft: Draft, siblings: Seq[int], q: Tensor, draw: Draw, lenience: float = 1.0
) -> tuple[int | None, Tensor]:
    """The first accepted sibling, or None, and q as it remains after the rejections before it.

    Args:
        lenience: factor of p, at most 1; below 1 acceptance is lossy.
    """
    p = None
    for child in siblings:
        token = draft.tokens[child]
        if p is None or draft.distributions is None:
            p = proposal(draft, draft.parents[child], token, q)
        if draw.accept(min(1.0, likelihood_ratio(q, p, token) / lenience), child):
            return child, q
        q = positive_part(q - lenience * p, otherwise=q)
        if not draft.replacement:
            p = without(p, token)
    return None, q


def without(p: Tensor, token: int) -> Tensor:
    """p without ``token``, renormalised; all zeros if nothing remains."""
    left = p.clone()
    left[token] = 0
    total = left.sum()
    return left / total if total > 0 else left


@dataclass(frozen=True)
class Rejection(Verifier):
    """The distribution of plain decoding, not its tokens; accepts a little more often than ``match``."""

    name: ClassVar[str] = "rejection"
    paper: ClassVar[str] = (
        "Chen et al. 2023 (arXiv 2302.01318); Leviathan et al. 2023 (arXiv 2211.17192); trees: Miao et al. "
        "2023, SpecInfer (arXiv 2305.09781); Jeon et al. 2024, Recursive Speculative Decoding (arXiv "
        "2402.14160)"
    )

    def verify(self, logits: Logits, draft: Draft, draw: Draw) -> Verdict:
        if _on_device(logits, draft, draw):
            return _reject_chain(logits, draft, draw)
        return rejection(logits, draft, draw)
