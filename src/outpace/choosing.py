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
from numpy.typing import NDArray
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
# On the CPU a single row of a vocabulary up to this size is drawn faster by the reference.
_ALONE = 4096
# On the CPU noise is made for this many (row, token) pairs at a time, which stay in its cache.
_CHUNK = 1 << 16


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
    below = [children(tree.draft.parents) if tree.draft.tokens else [] for tree in trees]
    # Tree -> the nodes reached, which hold the same text, and that text.
    fronts: dict[int, tuple[list[int], list[int]]] = {place: ([-1], []) for place in range(len(trees))}
    while fronts:
        asks = [trees[place].ask(nodes[0], path) for place, (nodes, path) in fronts.items()]
        reached: dict[int, tuple[list[int], list[int]]] = {}
        for (place, (nodes, path)), token in zip(fronts.items(), choose(rows, asks), strict=True):
            found[place][nodes[0]] = token
            tokens = trees[place].draft.tokens
            if not tokens:
                continue
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
    plain = [place for place, ask in enumerate(asks) if ask.processor.plain]
    best = best_tokens(_gather(rows, [asks[place].row for place in plain])) if plain else []
    if len(plain) == len(asks):
        return best
    found = [NO_TOKEN] * len(asks)
    _put(found, plain, best)
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
    _heat(scores, params)
    found = [_UNDECIDED] * len(asks)
    cut = [own.top_k > 0 or own.top_p < 1 or own.min_p > 0 for own in params]
    whole = [place for place in range(len(asks)) if not cut[place]]
    step = max(1, _CHUNK // scores.shape[-1]) if scores.device.type == "cpu" else len(asks)
    for start in range(0, len(whole), step):
        places = whole[start : start + step]
        _put(found, places, _draw_whole(_gather(scores, places), [words[place] for place in places]))
    alone = len(asks) == 1 and scores.device.type == "cpu" and scores.shape[-1] <= _ALONE
    for size in () if alone else _SHORTLISTS:
        places = [place for place in range(len(asks)) if cut[place] and found[place] == _UNDECIDED]
        if not places or (size > _SHORTLISTS[0] and scores.shape[-1] <= _SHORTLISTS[0]):
            break
        limits = _limits([params[place] for place in places], scores.shape[-1])
        own_words = [words[place] for place in places]
        _put(found, places, _draw_cut(_gather(scores, places), own_words, limits, size))
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


def _keys(words: Seq[int], device: torch.device) -> Tensor:
    """Keys of rows, int64 [n, 1]."""
    return torch.tensor([[signed(word)] for word in words], device=device)


def _draw_whole(scores: Tensor, words: Seq[int]) -> list[int]:
    """Draws from all tokens of rows of heated scores, float32 [n, vocabulary].

    Args:
        words: the rows' keys.
    """
    device = scores.device
    noisy = noise_of(token_words(scores.shape[-1], device) ^ _keys(words, device)) + scores
    # Infinite and NaN scores are the reference's business.
    noisy.masked_fill_(~scores.amax(dim=-1, keepdim=True).isfinite(), -torch.inf)
    return [_UNDECIDED if token == NO_TOKEN else token for token in best_tokens(noisy)]


def _limits(params: Seq[SamplingParams], vocabulary: int) -> NDArray[np.float64]:
    """Top-k, top-p and min-p of each row, [3, n, 1]; without an effect where none is asked for."""
    limits = [
        [own.top_k if 0 < own.top_k < vocabulary else vocabulary for own in params],
        [own.top_p if own.top_p < 1 else 2.0 for own in params],
        [own.min_p if own.min_p > 0 else -1.0 for own in params],
    ]
    return np.array(limits)[..., None]


def _draw_cut(scores: Tensor, words: Seq[int], limits: NDArray[np.float64], size: int) -> list[int]:
    """Draws from what top-k, top-p and min-p leave of rows of heated scores, float32 [n, vocabulary].

    The best token with noise among those that may be left is the draw if it is certain to be left. The
    margins cover the reference's rounding: it sums float32 probabilities, whose sum is off by the vocabulary
    times 2 ** -24 at most, whatever the order. Only the shortlists come to the host, in one transfer.

    Args:
        words: the rows' keys.
        limits: see ``_limits``.
        size: look among this many best tokens of each row.

    Returns:
        The tokens; ``_UNDECIDED`` where rounding decides, or where more tokens may be left.
    """
    vocabulary = scores.shape[-1]
    size = min(size, vocabulary)
    best, ids = scores.topk(size)  # in descending order
    totals = (scores - best[:, :1]).exp_().sum(dim=1, keepdim=True)
    # Token ids and float32 numbers are exact in float64.
    lists = torch.cat([best.double(), ids.double(), totals.double()], dim=1).cpu()
    tokens = lists[:, size : 2 * size].long()
    noise = noise_of(token_words(vocabulary, tokens.device)[tokens] ^ _keys(words, tokens.device)).numpy()
    values, total = lists[:, :size].numpy(), lists[:, -1:].numpy()
    peak = values[:, :1]
    top_k, top_p, min_p = limits
    finite = np.isfinite(peak)
    with np.errstate(invalid="ignore"):
        weights = np.exp(values - peak)
        # Top-k leaves equals of the k-th. One past the end of the list is seen by its last token being left.
        kth = np.take_along_axis(values, np.minimum(top_k, size).astype(np.int64) - 1, axis=1)
        left = (values >= kth) & (values > -np.inf)
        total = np.where(top_k < vocabulary, (weights * left).sum(axis=1, keepdims=True), total)
        # Top-p leaves a token if those above it have less than p together; the first is always left.
        above = (weights.cumsum(axis=1) - weights) / total
    margin = vocabulary * 2.0**-23 + 1e-5
    certain = above < top_p - margin
    certain[:, 0] = True
    certain &= left & (weights > min_p * (1 + 1e-5))
    possible = left & (above <= top_p + margin) & (weights >= min_p * (1 - 1e-5))
    # Of equal ones, the order is the sort's: they are certain together, and possible together.
    certain = values > np.where(certain, -np.inf, values).max(axis=1, keepdims=True)
    possible = left & (values >= np.where(possible, values, np.inf).min(axis=1, keepdims=True))
    drawn = np.where(possible, values + noise, -np.inf).argmax(axis=1, keepdims=True)
    decided = np.take_along_axis(certain, drawn, axis=1) & finite
    if size < vocabulary:
        decided &= ~possible[:, -1:]
    found = np.where(decided, np.take_along_axis(tokens.numpy(), drawn, axis=1), _UNDECIDED)
    return [int(token) for token in found[:, 0]]
