"""The target's own token at each node of the drafts, for all sequences in one pass.

This runs between a forward and the walk along the drafts. The input is logits on their device, the output
token ids on the host, exactly those that ``sampling``'s functions return:

- penalties and bias are index operations over (row, token) pairs;
- draws from many rows are one pass (``many_rows``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.core import Draft, SamplingParams
from outpace.draws.many_rows import NO_TOKEN, put, sample
from outpace.draws.noise import Key
from outpace.draws.sampling import Processor, best_tokens, penalised
from outpace.native.draw import as_float32
from outpace.transfer import gather, upload
from outpace.tree import children, path_to

# Up to this many logits an accelerator computes all nodes in one pass, including rows that no walk reaches;
# above it in rounds, with one transfer per accepted token. On the CPU transfers cost nothing.
AT_ONCE = 1 << 24


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


def told_columns(rows: Tensor, tree: Tree, nodes: Seq[int], plain: bool) -> NDArray[np.int32]:
    """The target's tokens after the root and the given nodes, for ``logits.DrawnTokens``.

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


def own_tokens(
    rows: Tensor, trees: Seq[Tree], array: NDArray[np.float32] | None = None
) -> list[dict[int, int]]:
    """The target's own token after each node that a walk along its own tokens can reach, -1 being the root.

    Args:
        rows: logits of a forward, shape [N, vocabulary].
        trees: trees of sequences without ``logits_processors``.
        array: the rows as an array, if there is one. After a forward, which empties the processor's caches,
            PyTorch takes longer to make one than NumPy takes to search it.

    Returns:
        For each tree, node -> token; ``NO_TOKEN`` if every token is excluded.
    """
    if trees and all(tree.processor.plain for tree in trees):  # one argmax over all rows
        best = best_tokens(rows if array is None else array)
        return [dict(enumerate(best[t.first : t.first + 1 + len(t.draft)], -1)) for t in trees]
    size = sum(1 + len(tree.draft) for tree in trees) * rows.shape[-1]
    if rows.device.type != "cpu" and size <= AT_ONCE:
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
    best = best_tokens(gather(rows, [asks[place].row for place in plain])) if plain else []
    if len(plain) == len(asks):
        return best
    found = [NO_TOKEN] * len(asks)
    put(found, plain, best)
    for greedy in (True, False):
        places = [
            place
            for place, ask in enumerate(asks)
            if ask.processor.params.greedy == greedy and not ask.processor.plain
        ]
        if places:
            part = [asks[place] for place in places]
            scores = _adjusted(gather(rows, [ask.row for ask in part]), part)
            if greedy:
                tokens = best_tokens(scores)
            else:
                params = [ask.processor.params for ask in part]
                tokens = sample(scores, params, [ask.key.target(ask.position) for ask in part])
            put(found, places, tokens)
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
        tokens = sample(as_float32(rows), [params] * len(indices), [key.target(index) for index in indices])
    return [max(token, 0) for token in tokens]  # any guess will do for NO_TOKEN


@torch.inference_mode()
def _adjusted(rows: Tensor, asks: Seq[Ask]) -> Tensor:
    """Scores, float32 [n, vocabulary], from rows of logits: with bias and penalties."""
    if not any(ask.processor.penalises or len(ask.processor.bias[0]) for ask in asks):
        return as_float32(rows)
    scores = rows.to(torch.float32, copy=True)
    flat, vocabulary = scores.view(-1), scores.shape[-1]

    def send(arrays: Seq[np.ndarray]) -> Tensor:
        return upload(np.concatenate(arrays), scores.device)

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
        return scores
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
    flat[places] = penalised(flat[places], *upload(columns, scores.device))
    return scores
