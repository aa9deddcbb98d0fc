"""The target's own token at each node of the drafts, for all sequences in one pass.

This is the seam between a forward and the walk along the drafts: logits go in, where they are; token ids come
out on the host. They are the tokens of ``sampling``'s functions, bit for bit:

- penalties and bias are index operations over (row, token) pairs;
- noise is made only for tokens that may be left. For top-k, top-p and min-p those are looked for among the
  few best of a row. The winner is certain unless rounding decides whether it is left: such a row is drawn by
  the reference, one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core import Draft, NoTokenLeft, SamplingParams
from outpace.sampling import (
    TINY_TEMPERATURE,
    Key,
    Processor,
    best_tokens,
    noise_of,
    noisy_argmax,
    penalised,
    signed,
    token_words,
    truncate,
)
from outpace.tree import children, path_to

# In place of a token where every token is excluded, or a logit is NaN.
NO_TOKEN = -1
_UNDECIDED = -2
# Logits up to which an accelerator takes all nodes at once, at the cost of rows that no walk reaches, and not
# in rounds, at the cost of one transfer for each accepted token. On the CPU transfers cost nothing.
AT_ONCE = 1 << 24
# Numbers of best tokens among which those left by top-k, top-p and min-p are looked for, in turn.
_SHORTLISTS = (64, 1024)
# Noise is made for so many (row, token) pairs at a time.
_CHUNK = 1 << 21


class Ask(NamedTuple):
    """One row, and whose token is to be found there.

    Attributes:
        row: its index among the rows of the forward.
        processor, key: of its sequence.
        position: output index of the token that follows the row.
        path: tokens between the sequence's output and that token: those of the nodes on the way.
    """

    row: int
    processor: Processor
    key: Key
    position: int
    path: Seq[int] = ()


@dataclass(frozen=True)
class Tree:
    """One sequence's part of a forward.

    Attributes:
        first: the root's row; the draft's rows follow it.
        draft: what is verified.
        processor, key: of the sequence.
        root: output index of the token that follows the root.
    """

    first: int
    draft: Draft
    processor: Processor
    key: Key
    root: int

    def ask(self, node: int, path: Seq[int]) -> Ask:
        return Ask(self.first + 1 + node, self.processor, self.key, self.root + len(path), path)


def own_tokens(rows: Tensor, trees: Seq[Tree], at_once: int = AT_ONCE) -> list[dict[int, int]]:
    """The target's own token after each node that a walk along its own tokens can reach, -1 being the root.

    Args:
        rows: logits of a forward, shape [N, vocabulary].
        trees: of sequences without ``logits_processors``.
        at_once: logits up to which all nodes are asked for in one pass, elsewhere than on the CPU.

    Returns:
        For each tree, node -> token; ``NO_TOKEN`` where none is left.
    """
    size = sum(1 + len(tree.draft) for tree in trees) * rows.shape[-1]
    if rows.device.type != "cpu" and size <= at_once:
        return _everywhere(rows, trees)
    return _along(rows, trees)


def _everywhere(rows: Tensor, trees: Seq[Tree]) -> list[dict[int, int]]:
    """All nodes in one pass."""
    asks: list[Ask] = []
    for tree in trees:
        tokens, parents = tree.draft.tokens, tree.draft.parents
        for node in range(-1, len(tokens)):
            asks.append(tree.ask(node, [tokens[above] for above in path_to(parents, node)]))
    found = iter(choose(rows, asks))
    return [{node: next(found) for node in range(-1, len(tree.draft))} for tree in trees]


def _along(rows: Tensor, trees: Seq[Tree]) -> list[dict[int, int]]:
    """In rounds: the roots of all sequences, then the children that hold the tokens found, and so on."""
    found: list[dict[int, int]] = [{} for _ in trees]
    below = [children(tree.draft.parents) for tree in trees]
    # Tree -> the nodes reached, which hold the same text, and that text.
    fronts: dict[int, tuple[list[int], list[int]]] = {place: ([-1], []) for place in range(len(trees))}
    while fronts:
        asks = [trees[place].ask(nodes[0], path) for place, (nodes, path) in fronts.items()]
        reached: dict[int, tuple[list[int], list[int]]] = {}
        for (place, (nodes, path)), token in zip(fronts.items(), choose(rows, asks), strict=True):
            found[place][nodes[0]] = token
            tokens = trees[place].draft.tokens
            nodes = [child for node in nodes for child in below[place][node] if tokens[child] == token]
            if nodes:
                reached[place] = nodes, [*path, token]
        fronts = reached
    return found


@torch.inference_mode()
def choose(rows: Tensor, asks: Seq[Ask]) -> list[int]:
    """The target's own tokens at some rows; ``NO_TOKEN`` where none is left.

    There is one transfer to the host per kind of decoding: plain greedy, greedy with penalties, sampled.

    Args:
        rows: logits of a forward, shape [N, vocabulary].
        asks: which rows, of sequences without ``logits_processors``.
    """
    found = [NO_TOKEN] * len(asks)
    plain = [place for place, ask in enumerate(asks) if ask.processor.plain]
    if plain:
        _put(found, plain, best_tokens(_gather(rows, [asks[place].row for place in plain])))
    if len(plain) == len(asks):
        return found
    for greedy in (True, False):
        places = [
            place
            for place, ask in enumerate(asks)
            if ask.processor.params.greedy == greedy and not ask.processor.plain
        ]
        if places:
            part = [asks[place] for place in places]
            scores = _gather(rows, [ask.row for ask in part]).to(torch.float32, copy=True)
            _adjust(scores, part)
            _put(found, places, best_tokens(scores) if greedy else _sample(scores, part))
    return found


def guess(rows: Tensor, indices: Seq[int], params: SamplingParams, key: Key) -> list[int]:
    """The target's keyed draws at several rows: cheap guesses of what it emits there.

    Penalties and processors depend on a prefix that a guess does not have yet and are left out, so these are
    guesses, never the output.

    Args:
        rows: logits, shape [n, vocabulary].
        indices: output index of the token that follows each row, n of them.
    """
    if params.greedy:
        tokens = best_tokens(rows)
    else:
        bare = Processor(_bare(params), ())
        scores = rows.to(torch.float32, copy=True)
        tokens = _sample(scores, [Ask(row, bare, key, index) for row, index in enumerate(indices)])
    return [max(token, 0) for token in tokens]  # any guess will do where there is none


def _bare(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )


def _put(found: list[int], places: Seq[int], tokens: Seq[int]) -> None:
    for place, token in zip(places, tokens, strict=True):
        found[place] = token


def _gather(rows: Tensor, indices: Seq[int]) -> Tensor:
    """Some rows; a view where they follow each other."""
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        return rows[first : first + len(indices)]
    return rows[torch.tensor(indices, device=rows.device)]


def _adjust(scores: Tensor, asks: Seq[Ask]) -> None:
    """Add bias and penalties to rows of scores, float32 [n, vocabulary], in place."""
    flat, vocabulary = scores.view(-1), scores.shape[-1]

    def send(arrays: Seq[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(scores.device)

    biased = [(row, *ask.processor.bias) for row, ask in enumerate(asks) if len(ask.processor.bias[0])]
    if biased:
        places = send([row * vocabulary + ids for row, ids, _ in biased])
        flat[places] += send([values for _, _, values in biased])
    counted = [
        (row, ask.processor.params, *ask.processor.counts(ask.path))
        for row, ask in enumerate(asks)
        if ask.processor.penalises
    ]
    if not counted:
        return
    places = send([row * vocabulary + ids for row, _, ids, _ in counted])
    # A column each: how often a token is in the output, and the penalties of its row.
    columns = np.concatenate(
        [
            [
                times,
                np.full(len(times), params.repetition_penalty, np.float32),
                np.full(len(times), params.presence_penalty, np.float32),
                np.full(len(times), params.frequency_penalty, np.float32),
            ]
            for _, params, _, times in counted
        ],
        axis=1,
    )
    flat[places] = penalised(flat[places], *torch.from_numpy(columns).to(scores.device))


def _sample(scores: Tensor, asks: Seq[Ask]) -> list[int]:
    """Keyed draws from rows of adjusted scores, float32 [n, vocabulary], which are overwritten."""
    params = [ask.processor.params for ask in asks]
    words = [ask.key.target(ask.position) for ask in asks]
    keys = torch.tensor([[signed(word)] for word in words], device=scores.device)
    _heat(scores, params)
    found = [_UNDECIDED] * len(asks)
    cut = [place for place, own in enumerate(params) if own.top_k > 0 or own.top_p < 1 or own.min_p > 0]
    whole = sorted(set(range(len(asks))).difference(cut))
    size = max(1, _CHUNK // scores.shape[-1])
    for start in range(0, len(whole), size):
        places = whole[start : start + size]
        _put(found, places, _draw_whole(_gather(scores, places), _gather(keys, places)))
    for size in _SHORTLISTS:
        places = [place for place in cut if found[place] == _UNDECIDED]
        if not places or (size > _SHORTLISTS[0] and scores.shape[-1] <= _SHORTLISTS[0]):
            break
        limits = _limits([params[place] for place in places], scores)
        _put(found, places, _draw_cut(_gather(scores, places), _gather(keys, places), limits, size))
    for place, token in enumerate(found):
        if token == _UNDECIDED:
            found[place] = _draw_alone(scores[place], params[place], words[place])
    return found


def _heat(scores: Tensor, params: Seq[SamplingParams]) -> None:
    """Divide each row by its temperature, in place, as ``sampling.heat`` does."""
    temperatures = [own.temperature for own in params]
    tiny = [place for place, own in enumerate(temperatures) if own < TINY_TEMPERATURE]
    for place in tiny:
        scores[place] -= scores[place].amax()
    if any(own != 1 for own in temperatures):
        divisors = np.array([[max(own, 1e-30)] for own in temperatures], np.float32)
        scores /= torch.from_numpy(divisors).to(scores.device)


def _draw_alone(scores: Tensor, params: SamplingParams, word: int) -> int:
    """The reference's draw from a row of heated scores, shape [vocabulary]."""
    try:
        return noisy_argmax(truncate(scores, params), word)
    except NoTokenLeft:
        return NO_TOKEN  # an error where a walk comes by, and only there


def _draw_whole(scores: Tensor, keys: Tensor) -> list[int]:
    """Draws from all tokens of rows of heated scores, float32 [n, vocabulary].

    Args:
        keys: of the rows, int64 [n, 1].
    """
    words = token_words(scores.shape[-1], scores.device)
    noisy = noise_of(words ^ keys) + scores
    # Infinite and NaN scores are the reference's business.
    noisy.masked_fill_(~scores.amax(dim=-1, keepdim=True).isfinite(), -torch.inf)
    return [_UNDECIDED if token == NO_TOKEN else token for token in best_tokens(noisy)]


def _limits(params: Seq[SamplingParams], scores: Tensor) -> Tensor:
    """Top-k, top-p and min-p of each row, float64 [3, n, 1]; without an effect where none is asked for."""
    vocabulary = scores.shape[-1]
    limits = [
        [own.top_k if 0 < own.top_k < vocabulary else vocabulary for own in params],
        [own.top_p if own.top_p < 1 else 2.0 for own in params],
        [own.min_p if own.min_p > 0 else -1.0 for own in params],
    ]
    return torch.tensor(limits, dtype=torch.float64, device=scores.device)[..., None]


def _draw_cut(scores: Tensor, keys: Tensor, limits: Tensor, size: int) -> list[int]:
    """Draws from what top-k, top-p and min-p leave of rows of heated scores, float32 [n, vocabulary].

    The best token with noise among those that may be left is the draw if it is certain to be left. The
    margins cover the reference's rounding: it sums float32 probabilities, whose sum is off by the vocabulary
    times 2 ** -24 at most, whatever the order.

    Args:
        keys: of the rows, int64 [n, 1].
        limits: see ``_limits``.
        size: look among so many best tokens of each row.

    Returns:
        The tokens; ``_UNDECIDED`` where rounding decides, or where more tokens may be left.
    """
    vocabulary = scores.shape[-1]
    top_k, top_p, min_p = limits
    values, tokens = scores.topk(min(size, vocabulary))  # in descending order
    peak = values[:, :1]
    weights = (values.double() - peak).exp()
    # Top-k leaves equals of the k-th. One past the end of the list is seen by its last token being left.
    kth = values.gather(1, top_k.long().clamp(max=values.shape[1]) - 1)
    left = (values >= kth) & (values > -torch.inf)
    total = torch.where(
        top_k < vocabulary,
        (weights * left).sum(dim=1, keepdim=True),
        (scores - peak).exp_().sum(dim=1, keepdim=True),
    )
    # Top-p leaves a token if those above it have less than p together; the first is always left.
    above = (weights.cumsum(dim=1) - weights) / total
    margin = vocabulary * 2.0**-23 + 1e-5
    certain = above < top_p - margin
    certain[:, 0] = True
    certain &= left & (weights > min_p * (1 + 1e-5))
    possible = left & (above <= top_p + margin) & (weights >= min_p * (1 - 1e-5))
    # Of equal ones, the order is the sort's: they are certain together, and possible together.
    certain = values > values.masked_fill(certain, -torch.inf).amax(dim=1, keepdim=True)
    possible = left & (values >= values.masked_fill(~possible, torch.inf).amin(dim=1, keepdim=True))
    noisy = noise_of(token_words(vocabulary, scores.device)[tokens] ^ keys) + values
    best = noisy.masked_fill_(~possible, -torch.inf).argmax(dim=1, keepdim=True)
    decided = certain.gather(1, best) & peak.isfinite()
    if values.shape[1] < vocabulary:
        decided &= ~possible[:, -1:]
    drawn: list[int] = torch.where(decided, tokens.gather(1, best), _UNDECIDED)[:, 0].tolist()
    return drawn
