"""``rejection`` of a chain whose logits are on a GPU: all of its numbers at once, in one copy to the host.

Node by node the host would wait for the device several times. Here every node's ratio and the token that is
drawn if it is rejected are computed on the device, before it is known how far the walk goes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.core import Draft, NoTokenLeft, Verdict
from outpace.draws.logits import Logits
from outpace.draws.many_rows import draw_rows, host_keys
from outpace.draws.noise import NO_TOKEN_LEFT, Stream
from outpace.draws.sampling import warp
from outpace.sequence import KeyedDraw
from outpace.transfer import upload
from outpace.tree import is_chain
from outpace.verify.base import Draw, no_chance


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


def applies(logits: Logits, draft: Draft, draw: Draw) -> bool:
    if logits.device.type != "cuda" or not isinstance(draw, KeyedDraw) or draw.greedy:
        return False
    sequence = draw.sequence
    if sequence.processor.adjusts or sequence.params.logits_processors:
        return False  # scores depend on the tokens before them
    parents = range(-1, len(draft) - 1)
    whole = draft.distributions is None or all(node in draft.distributions for node in parents)
    return whole and is_chain(draft.parents)


def verify_chain(logits: Logits, draft: Draft, draw: Any) -> Verdict:
    """``rejection`` of a chain; see there."""
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
