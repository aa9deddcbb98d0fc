"""The target's own token at each node of the drafts, for all sequences in one pass.

This runs between a forward and the walk along the drafts. The input is logits on their device, the output
token ids on the host, exactly those that ``sampling``'s functions return:

- penalties and bias are index operations over (row, token) pairs;
- noise is computed only for a short list per row: the tokens that top-k, top-p and min-p may keep. The best
  of these is the draw if it is certain to be kept; if rounding decides, the reference draws that row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import Draft, NoTokenLeft, OutpaceError, SamplingParams
from outpace.sampling import (
    TINY_TEMPERATURE,
    Key,
    Logits,
    Processor,
    best_tokens,
    host_noise,
    noise_of,
    noisy_argmax,
    penalised,
    token_words,
    truncate,
)
from outpace.tree import children, path_to

# Returned for a row in which every token is excluded, or a logit is NaN.
NO_TOKEN = -1
_UNDECIDED = -2
TOKENS_ONLY = (
    "ranks that share drafts tell the target's tokens alone, not its logits: use verifier='match' without "
    "logits processors and logprobs, or one rank"
)
# Up to this many logits an accelerator computes all nodes in one pass, including rows that no walk reaches;
# above it in rounds, with one transfer per accepted token. On the CPU transfers cost nothing.
AT_ONCE = 1 << 24
# Lengths of the lists of best tokens that are tried on accelerators, in this order.
_SHORTLISTS = (64, 1024)
# Noise is between -3.7 and 36.8: a token whose score is 41 below the best one's is never drawn.
_NEVER = math.exp(-41)
# Rounding of a logarithm may swap two noisy scores that differ by less than this.
_CLOSE = 1e-9
# On the CPU noise is computed for this many (row, token) pairs at a time, so that they stay in its cache.
_CHUNK = 1 << 16


class Ask(NamedTuple):
    """One row whose token is to be computed.

    Attributes:
        row: its index among the rows of the forward.
        processor, key: its sequence's.
        position: output index of the token that follows the row.
        path: tokens between the sequence's output and that token: those of the nodes on the path to it.
    """

    row: int
    processor: Processor
    key: Key
    position: int
    path: Seq[int] = ()


class Tree(NamedTuple):
    """One sequence's part of a forward.

    Attributes:
        first: the root's row; the draft's rows follow it.
        draft: the draft to verify.
        processor, key: the sequence's.
        root: output index of the token that follows the root.
        top: number of most probable tokens to return after each node as well; 0 for none.
    """

    first: int
    draft: Draft
    processor: Processor
    key: Key
    root: int
    top: int = 0

    def ask(self, node: int, path: Seq[int]) -> Ask:
        return Ask(self.first + 1 + node, self.processor, self.key, self.root + len(path), path)


class Told(Logits):
    """The target's tokens after the root and the nodes of a draft, for a process without the logits.

    Args:
        tokens: a row per node, root first, as returned by ``columns``.
        plain: the value passed to ``columns``.
    """

    def __init__(self, tokens: NDArray[np.int32], plain: bool) -> None:
        self._tokens = tokens
        self._plain = plain

    @staticmethod
    def columns(rows: Tensor, tree: Tree, nodes: Seq[int], plain: bool) -> NDArray[np.int32]:
        """The target's tokens after the root and the given nodes.

        Args:
            rows: their logits, root first, shape [1 + n, vocabulary].
            tree: the sequence's tree, with ``first`` 0, the root's row.
            nodes: n node indices, in the order of their rows.
            plain: omit the second and third column, which equal the first if decoding is plain.

        Returns:
            Columns: the target's own tokens, its keyed draws without penalties, the most probable tokens,
            and the ``tree.top`` most probable ones, one column each.
        """
        above = [path_to(tree.draft.parents, node) for node in (-1, *nodes)]
        paths = [[tree.draft.tokens[node] for node in path] for path in above]
        asks = [tree.ask(row - 1, path) for row, path in enumerate(paths)]
        found = [choose(rows, asks)]
        if not plain:
            found.append(guess(rows, [ask.position for ask in asks], tree.processor.params, tree.key))
            found.append(best_tokens(rows))
        columns = np.array(found, np.int32).T
        if not tree.top:
            return columns
        best = rows.topk(tree.top, dim=-1).indices.cpu().numpy()
        return np.concatenate([columns, best.astype(np.int32)], axis=1)

    @property
    def own(self) -> dict[int, int]:
        """Node -> the target's own token after it, -1 being the root."""
        return dict(enumerate(self._tokens[:, 0].tolist(), -1))

    @property
    def rows(self) -> Tensor:
        raise OutpaceError(TOKENS_ONLY)

    def __getitem__(self, node: int) -> Tensor:
        raise OutpaceError(TOKENS_ONLY)

    def gather(self, nodes: Seq[int]) -> Tensor:
        raise OutpaceError(TOKENS_ONLY)

    def select(self, nodes: Seq[int]) -> Told:
        return Told(self._tokens[[0, *(node + 1 for node in nodes)]], self._plain)

    def drawn(self, nodes: Seq[int], argmax: bool) -> list[int]:
        """The tokens of ``guess`` after these nodes; with ``argmax`` the most probable tokens."""
        column = 0 if self._plain else 2 if argmax else 1
        tokens: list[int] = self._tokens[[node + 1 for node in nodes], column].clip(min=0).tolist()
        return tokens

    def top(self, nodes: Seq[int], count: int) -> NDArray[np.int64]:
        first = 1 if self._plain else 3
        return self._tokens[[node + 1 for node in nodes], first : first + count].astype(np.int64)


def own_tokens(rows: Tensor, trees: Seq[Tree], at_once: int = AT_ONCE) -> list[dict[int, int]]:
    """The target's own token after each node that a walk along its own tokens can reach, -1 being the root.

    Args:
        rows: logits of a forward, shape [N, vocabulary].
        trees: trees of sequences without ``logits_processors``.
        at_once: number of logits up to which an accelerator computes all nodes in one pass.

    Returns:
        For each tree, node -> token; ``NO_TOKEN`` if every token is excluded.
    """
    if trees and all(tree.processor.plain for tree in trees):  # one argmax over all rows
        best = best_tokens(rows)
        return [dict(enumerate(best[t.first : t.first + 1 + len(t.draft)], -1)) for t in trees]
    size = sum(1 + len(tree.draft) for tree in trees) * rows.shape[-1]
    if rows.device.type != "cpu" and size <= at_once:
        return _everywhere(rows, trees)
    return _along(rows, trees)


def _everywhere(rows: Tensor, trees: Seq[Tree]) -> list[dict[int, int]]:
    """Compute the tokens after all nodes in one pass."""
    asks: list[Ask] = []
    for tree in trees:
        tokens, parents = tree.draft.tokens, tree.draft.parents
        for node in range(-1, len(tokens)):
            asks.append(tree.ask(node, [tokens[above] for above in path_to(parents, node)]))
    found = iter(choose(rows, asks))
    return [{node: next(found) for node in range(-1, len(tree.draft))} for tree in trees]


def _along(rows: Tensor, trees: Seq[Tree]) -> list[dict[int, int]]:
    """Compute tokens in rounds: after all roots, then after the children that match them, and so on."""
    found: list[dict[int, int]] = [{} for _ in trees]
    below = [children(tree.draft.parents) if tree.draft.tokens else [] for tree in trees]
    # Tree index -> the nodes reached, which all have the same path tokens, and those tokens.
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


def choose(rows: Tensor, asks: Seq[Ask]) -> list[int]:
    """The target's own tokens at the given rows; ``NO_TOKEN`` if every token is excluded.

    There is one transfer to the host per kind of decoding: plain greedy, greedy with penalties, sampled.

    Args:
        rows: logits of a forward, shape [N, vocabulary].
        asks: the rows, of sequences without ``logits_processors``.
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
            with torch.inference_mode():
                scores = _gather(rows, [ask.row for ask in part]).to(torch.float32, copy=True)
                _adjust(scores, part)
                _put(found, places, best_tokens(scores) if greedy else _sample(scores, part))
    return found


def guess(rows: Tensor, indices: Seq[int], params: SamplingParams, key: Key) -> list[int]:
    """The target's keyed draws at several rows: cheap guesses of the tokens that it emits there.

    Penalties and processors depend on a prefix that is not known yet and are ignored, so the tokens are only
    guesses, never the output.

    Args:
        rows: logits, shape [n, vocabulary].
        indices: output indices of the tokens that follow the rows, n of them.
    """
    if params.greedy:
        tokens = best_tokens(rows)
    else:
        bare = Processor(_bare(params), ())
        scores = rows.to(torch.float32, copy=True)
        tokens = _sample(scores, [Ask(row, bare, key, index) for row, index in enumerate(indices)])
    return [max(token, 0) for token in tokens]  # any guess will do for NO_TOKEN


def _bare(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )


def _put(found: list[int], places: Seq[int], tokens: Seq[int]) -> None:
    for place, token in zip(places, tokens, strict=True):
        found[place] = token


def _gather(rows: Tensor, indices: Seq[int]) -> Tensor:
    """The rows at these indices; a view if the indices are consecutive."""
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
    # Per token: its number of occurrences in the output, and its row's three penalties.
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
    for size in (None,) if scores.device.type == "cpu" else _SHORTLISTS:
        places = [place for place in range(len(asks)) if cut[place] and found[place] == _UNDECIDED]
        if not places:
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
        return NO_TOKEN  # an error only if a walk reaches this node


def _host_keys(words: Seq[int]) -> NDArray[np.int64]:
    """The rows' keys as int64, shape [n]."""
    return np.array(words, np.uint64).view(np.int64)


def _draw_whole(scores: Tensor, words: Seq[int]) -> list[int]:
    """Draws from all tokens of rows of heated scores, float32 [n, vocabulary].

    Args:
        words: the rows' keys.
    """
    device = scores.device
    noisy = (
        noise_of(
            token_words(scores.shape[-1], device) ^ torch.from_numpy(_host_keys(words)[:, None]).to(device)
        )
        + scores
    )
    # Rows with infinite or NaN scores are left to the reference.
    noisy.masked_fill_(~scores.amax(dim=-1, keepdim=True).isfinite(), -torch.inf)
    return [_UNDECIDED if token == NO_TOKEN else token for token in best_tokens(noisy)]


class _Limits(NamedTuple):
    """Top-k, top-p and min-p per row, each [n]; one that is off has a value without effect."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]


def _limits(params: Seq[SamplingParams], vocabulary: int) -> _Limits:
    return _Limits(
        np.array([own.top_k if 0 < own.top_k < vocabulary else vocabulary for own in params]),
        np.array([own.top_p if own.top_p < 1 else 2.0 for own in params]),
        np.array([own.min_p if own.min_p > 0 else -1.0 for own in params]),
    )


class _Lists(NamedTuple):
    """Candidate lists on the host, concatenated by row: every token that may be kept, and some others.

    Attributes:
        ends: row i has the indices ends[i] .. ends[i + 1] - 1; none if its list would be too short.
        ids: token ids, int64.
        values: heated scores, float64.
        weights: exp(score - the row's best score).
        totals: sum of the weights of all tokens that top-k keeps, [n].
    """

    ends: list[int]
    ids: NDArray[np.int64]
    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    totals: NDArray[np.float64]


def _margin(vocabulary: int) -> float:
    """Error bound of a sum of probabilities: the reference adds in float32, in an unspecified order."""
    return vocabulary * 2.0**-23 + 1e-5


def _lists_by_weight(scores: Tensor, limits: _Limits) -> _Lists:
    """Lists on the CPU: omit the tokens whose weight is too small for them to be kept.

    Tokens that each have at most (1 - top-p) / vocabulary of the total weight have at most 1 - top-p of it
    together, so the others reach top-p.
    """
    array, (count, vocabulary) = scores.numpy(), scores.shape
    weights = np.exp(array - array.max(axis=1, keepdims=True))
    for row in np.flatnonzero(limits.top_k < vocabulary):
        place = vocabulary - int(limits.top_k[row])
        weights[row, array[row] < np.partition(array[row], place)[place]] = 0
    totals = weights.sum(axis=1).astype(np.float64)
    reach = (1 - limits.top_p - _margin(vocabulary)) * totals / vocabulary
    least = np.maximum(np.maximum(reach, limits.min_p * (1 - 1e-5)), _NEVER)
    places = np.flatnonzero(weights > least[:, None])
    ends = np.searchsorted(places, np.arange(count + 1) * vocabulary).tolist()
    values, weights = array.ravel()[places].astype(np.float64), weights.ravel()[places].astype(np.float64)
    return _Lists(ends, places % vocabulary, values, weights, totals)


def _lists_of_best(scores: Tensor, limits: _Limits, size: int) -> _Lists:
    """Lists of the ``size`` best tokens, in one transfer; none for a row that may keep others too."""
    vocabulary = scores.shape[-1]
    size = min(size, vocabulary)
    best, ids = scores.topk(size)  # in descending order
    sums = (scores - best[:, :1]).exp_().sum(dim=1, keepdim=True)
    # Token ids and float32 numbers are exact in float64.
    lists = torch.cat([best.double(), ids.double(), sums.double()], dim=1).cpu().numpy()
    values, totals = lists[:, :size], lists[:, -1]
    top_k, top_p, min_p = limits
    weights = np.exp(values - values[:, :1])
    kth = np.take_along_axis(values, np.minimum(top_k, size)[:, None] - 1, axis=1)
    left = values >= kth  # including ties with the k-th
    totals = np.where(top_k < vocabulary, (weights * left).sum(axis=1), totals)
    # Whole if the last token is removed by top-k, or, with top-k off, by top-p or min-p.
    above = weights[:, :-1].sum(axis=1) > (top_p + _margin(vocabulary)) * totals
    whole = ~left[:, -1] | ((top_k == vocabulary) & (above | (weights[:, -1] < min_p * (1 - 1e-5))))
    left &= whole[:, None] | (size == vocabulary)
    ends = [0, *left.sum(axis=1).cumsum().tolist()]
    return _Lists(ends, lists[:, size:-1][left].astype(np.int64), values[left], weights[left], totals)


def _draw_cut(scores: Tensor, words: Seq[int], limits: _Limits, size: int | None = None) -> list[int]:
    """Draws from the tokens that top-k, top-p and min-p keep of heated scores, float32 [n, vocabulary].

    Args:
        words: the rows' keys.
        size: length of the lists; None for those by weight, on the CPU.

    Returns:
        The tokens; ``_UNDECIDED`` if rounding decides, a list is too short, or no score is finite.
    """
    vocabulary = scores.shape[-1]
    with np.errstate(invalid="ignore"):
        lists = _lists_by_weight(scores, limits) if size is None else _lists_of_best(scores, limits, size)
    ends, ids, values, weights, totals = lists
    keys = np.repeat(_host_keys(words), np.diff(ends))
    noisy = values + host_noise(token_words(vocabulary, torch.device("cpu")).numpy()[ids] ^ keys)
    _, top_p, min_p = limits
    margin, found = _margin(vocabulary), []
    for row, total in enumerate(totals.tolist()):
        own = slice(ends[row], ends[row + 1])
        bounds = (top_p[row] - margin) * total, (top_p[row] + margin) * total
        place = _winner(values[own], weights[own], noisy[own], bounds, float(min_p[row]))
        found.append(_UNDECIDED if place is None else int(ids[own][place]))
    return found


def _winner(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    noisy: NDArray[np.float64],
    top_p: tuple[float, float],
    min_p: float,
) -> int | None:
    """Index of the draw in a row's list: the best noisy score among the tokens that are kept.

    If the token with the best noisy score is certain to be kept, it is the draw. If it is certain to be
    removed, so is every token whose score is not higher, and the best of the others is tried.

    Args:
        noisy: values plus noise; overwritten.
        top_p: a token is certain to be kept if those before it weigh less than the first bound, and certain
            to be removed if they weigh more than the second.

    Returns:
        None if rounding decides, or the list is empty.
    """
    while len(noisy):
        best = int(noisy.argmax())
        top, value, weight = float(noisy[best]), values[best], float(weights[best])
        noisy[best] = -math.inf
        # The order of ties is up to the sort: all but the token itself may come before it.
        before = float(weights[values >= value].sum()) - weight
        if (before <= 0 or before < top_p[0]) and weight > min_p * (1 + 1e-5):
            return best if float(noisy.max()) < top - _CLOSE else None
        above = float(weights[values > value].sum())
        if not top > -math.inf or (above <= top_p[1] and weight >= min_p * (1 - 1e-5)):
            return None
        noisy[values <= value] = -math.inf
    return None
