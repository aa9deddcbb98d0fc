"""A test whether a model can be a target: its logits for a tree of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outpace.core import Source, UnsupportedModel
from outpace.targets.base import Rows, TargetModel
from outpace.targets.checks import family

# The logits [n, vocabulary] of a text decoded from a source, by a forward without anything of ours.
Plain = Callable[[Source | None, list[int]], Tensor]

# A tree of seven rows, four deep, with branches that interleave; its paths, as rows.
_PARENTS = (-1, 0, 0, 1, 1, 2, 4)
_PATHS = ((0, 1, 3), (0, 1, 4, 6), (0, 2, 5))
# With another token at row 2, row 5 must change and these must not.
_CHANGED, _SEES, _SEE_NOT = 2, 5, [0, 1, 3, 4, 6]


@torch.inference_mode()
def self_test(
    target: TargetModel,
    model: PreTrainedModel,
    vocabulary: int,
    plain: Plain,
    sources: tuple[Source | None, Source | None] = (None, None),
) -> None:
    """Decode a tree beside a second sequence, keep a path, go on with one row; compare with plain forwards.

    Two things must hold. A token leaves the rows outside its subtree alone: two forwards of one shape agree
    there to the last bit (nearly, in a mixture of experts). And a tree's rows have the logits of their paths,
    up to rounding: this finds positions that are not honoured, and models whose rows see what follows.

    Args:
        vocabulary: number of token ids that have an embedding.
        plain: decodes a text without a target.
        sources: what the two sequences are decoded from, where the model has an encoder.

    Raises:
        UnsupportedModel: some logits differ by more than rounding.
    """
    # In half precision, rounding may send a row of a mixture to other experts, which changes all its logits.
    # That is chance, and other tokens have another; a family that is wrong is wrong with any.
    tries = 3 if model.dtype in (torch.float16, torch.bfloat16) else 1
    for turn in range(tries):
        ids = _spread(min(target.vocabulary, vocabulary), turn)
        try:
            return _test_tree(target, model, ids, plain, sources)
        except UnsupportedModel:
            if turn == tries - 1:
                raise
        except Exception as error:
            raise UnsupportedModel(f"{family(model)} fails on a tree of tokens: {error!r}") from error


def _test_tree(
    target: TargetModel,
    model: PreTrainedModel,
    ids: list[int],
    plain: Plain,
    sources: tuple[Source | None, Source | None],
) -> None:
    room = 9 if target.context is None else target.context - 5
    if room < 1:
        raise UnsupportedModel(f"{family(model)} has a context of only {target.context} tokens")
    prompts = [ids[: min(5, room)], ids[5 : 5 + min(3, room)]]
    tree, beside, last = ids[8:15], ids[15:17], ids[17]
    cache = target.new_cache(slots=2, length=64)
    slots = []
    for prompt, source in zip(prompts, sources, strict=True):
        slots.append(slot := target.open(cache, source))
        target.forward(cache, {slot: Rows(prompt)}, logits_from=None)
        cache.keep({slot: range(len(prompt))})

    def rows(tokens: list[int]) -> list[Tensor]:
        output = target.forward(cache, {slots[0]: Rows(tokens, _PARENTS), slots[1]: Rows(beside)})
        return [output.logits_of(slot).double() for slot in slots]

    def alone(place: int, prefix: list[int], path: list[int]) -> Tensor:
        """The logits after each token of a path, decoded plainly."""
        return plain(sources[place], [*prefix, *path])[-len(path) :].double()

    other = rows([*tree[:_CHANGED], ids[18], *tree[_CHANGED + 1 :]])
    found = rows(tree)
    allowed = _allowed(model.dtype, _check_subtree(model, found[0], other[0]))
    paths = [[tree[node] for node in nodes] for nodes in _PATHS]
    for nodes, path in zip(_PATHS, paths, strict=True):
        _check_path(model, found[0][list(nodes)], alone(0, prompts[0], path), allowed)
    _check_path(model, found[1], alone(1, prompts[1], beside), allowed)
    cache.keep({slots[0]: _PATHS[1], slots[1]: range(2)})
    after = target.forward(cache, {slots[0]: Rows([last])}).logits_of(slots[0])
    _check_path(model, after.double(), alone(0, [*prompts[0], *paths[1]], [last]), allowed)


def _spread(vocabulary: int, turn: int) -> list[int]:
    """Token ids for a test, distinct where the vocabulary allows (equal ones only weaken the test)."""
    start = round(0.618 * vocabulary)
    stride = next(n for n in range(start, start + vocabulary + 1) if math.gcd(n, vocabulary) == 1)
    return [(1 + turn + i * stride) % vocabulary for i in range(19)]


def agree(dtype: torch.dtype, found: Tensor, expected: Tensor) -> bool:
    """Tell whether two computations of the same logits, [n, vocabulary], differ by rounding alone."""
    return _difference(expected.double(), found.double()) <= _allowed(dtype, math.inf)


def _difference(rows: Tensor, others: Tensor) -> float:
    """The largest root mean square over rows, as a share of the spread of a row's logits."""
    difference = (rows - others.to(rows.device)).square().mean(dim=-1).sqrt()
    return float((difference / rows.std(dim=-1, correction=0).clamp(min=1e-12)).max())


def _allowed(dtype: torch.dtype, effect: float) -> float:
    """The difference that rounding may make, as a share of the spread of a row's logits.

    A mistake is about as large as the effect of one token on another's logits. That is small with untrained
    weights, so the limit is half of it, between what rounding is sure to stay below and what it may come to.
    """
    if dtype == torch.float64:
        low, high = 1e-6, 1e-4  # some attention computes its softmax in float32 always
    elif dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        low, high = 1e-5, 1e-3
    elif dtype == torch.float32:
        low, high = 1e-3, 1e-2
    else:
        low, high = 0.03, 0.1
    return min(max(effect / 2, low), high)


def _check_subtree(model: PreTrainedModel, rows: Tensor, others: Tensor) -> float:
    """Rows of a tree with two tokens at one node: those outside its subtree are the same.

    Returns the effect of the token on those inside, as a share of the spread of a row's logits.
    """
    leak = _difference(rows[_SEE_NOT], others[_SEE_NOT])
    effect = _difference(rows[[_SEES]], others[[_SEES]])
    if not leak <= effect / 4:
        raise UnsupportedModel(
            f"{family(model)} lets rows of a tree see more than their ancestors: it honours no 4-D mask "
            f"(a token changes logits below it by {effect:.2g} of their spread, others by {leak:.2g})"
        )
    return effect


def _check_path(model: PreTrainedModel, found: Tensor, plain: Tensor, allowed: float) -> None:
    """Rows of a tree and the same tokens decoded plainly."""
    off = _difference(plain, found)
    if not off <= allowed:
        raise UnsupportedModel(
            f"{family(model)} gives other logits for a tree of tokens than for its paths: it does not honour "
            f"a 4-D mask or positions (off by {off:.2g} of their spread; rounding explains {allowed:.2g})"
        )
