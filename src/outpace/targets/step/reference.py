"""What a target is compared with when it is tested: the stock model, and the texts of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from outpace.cache import Cache, Slot
from outpace.core import Source, UnsupportedModel
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.inputs.config import family
from outpace.targets.rows import Rows
from outpace.targets.step.bit_test import distinct_ids
from outpace.targets.step.tame import SLIDING

CHANGED = 2  # the row of a tree whose token is changed


class Shape(NamedTuple):
    """Seven rows for the test.

    Attributes:
        paths: its paths, as rows.
        kept: the rows that are kept.
        sees: a row whose logits must change if the token at row ``CHANGED`` does; ``blind``: rows whose must
            not.
    """

    name: str
    parents: Sequence[int]
    paths: Sequence[Sequence[int]]
    kept: Sequence[int]
    sees: int
    blind: list[int]


# A tree that is four deep, with branches that interleave; a chain of which a part is kept.
TREE_OF_SEVEN = Shape(
    "tree", (-1, 0, 0, 1, 1, 2, 4), ((0, 1, 3), (0, 1, 4, 6), (0, 2, 5)), (0, 1, 4, 6), 5, [0, 1, 3, 4, 6]
)
CHAIN_OF_SEVEN = Shape("chain", range(-1, 6), (range(7),), range(4), 5, [0, 1])


def shape_of(target: TargetModel) -> Shape:
    return CHAIN_OF_SEVEN if target.why_chains_only else TREE_OF_SEVEN


# Tokens before the tree, where windows matter and where they do not, and before the rows beside it.
PAST_WINDOW, SHORT, BESIDE = SLIDING + 1, 3, 2


class Imprecise(UnsupportedModel):
    """A target computes its model with more error than rounding explains."""


@dataclass(frozen=True)
class StockModel:
    """A model without outpace's parts, and how forwards and targets are made of it.

    Attributes:
        model: the modules whose forward the target's steps must equal.
        run: plain forward of a copy of the model over texts [B, n] decoded from a source; takes its options.
        target: a target of a copy, not tested, of which nothing is replaced.
        same: a target of a copy, not tested, with the same kinds of modules in place of its own; None if the
            model's own are in place.
        embedded: number of token ids that have an embedding.
        parts: modules that the target runs.
        sources: the test's two sources, if the model has an encoder.
        wider: where a tree fails in float32, it may pass in float64.
    """

    model: Any
    run: Callable[..., Any]
    target: Callable[[Any], TargetModel]
    embedded: int
    parts: Sequence[Any]
    same: Callable[[Any], TargetModel] | None = None
    sources: tuple[Source | None, Source | None] = (None, None)
    wider: bool = True


@dataclass(frozen=True)
class TrialTexts:
    """Token ids: two prompts, a tree after the first, rows beside it after the second, one after a path."""

    shape: Shape
    prompts: tuple[list[int], list[int]]
    tree: list[int]
    beside: list[int]
    last: int
    other: int

    @classmethod
    def for_target(cls, target: TargetModel, embedded: int, length: int, turn: int = 0) -> TrialTexts:
        """Texts with a first prompt of this many tokens, or as many as the context has room for."""
        room = length if target.context is None else target.context - 5
        if room < 1:
            raise UnsupportedModel(f"{family(target.model)} has a context of only {target.context} tokens")
        shape = shape_of(target)
        count, rows = min(target.vocabulary, embedded), len(shape.parents)
        pad = getattr(target.model.config, "pad_token_id", None)
        # Some families do not count a pad's position in a whole text, or hide it, but not in plain decoding.
        spread = distinct_ids(count, turn, length + BESIDE + rows + 4)
        ids = iter([(token + 1) % count if token == pad else token for token in spread])
        sizes = min(length, room), min(BESIDE, room), rows, 2, 1, 1
        first, second, tree, beside, (last,), (other,) = (list(islice(ids, size)) for size in sizes)
        return cls(shape, (first, second), tree, beside, last, other)

    def open(self, target: TargetModel, sources: Sequence[Source | None]) -> tuple[Cache, list[Slot]]:
        """A cache with both prompts."""
        cache, slots = target.new_cache(slots=2, length=64), []
        for prompt, source in zip(self.prompts, sources, strict=True):
            slots.append(slot := target.open(cache, source))
            target.forward(cache, Batch.of({slot: prompt}, None))
            cache.keep({slot: range(len(prompt))})
        return cache, slots

    def feeds(self, slots: Sequence[Slot]) -> dict[Slot, Rows]:
        return {slots[0]: Rows(self.tree, self.shape.parents), slots[1]: Rows(self.beside)}

    def paths(self) -> list[tuple[int, Sequence[int], list[int]]]:
        """Number of a prompt, rows of its forward, and the text that ends with these rows' tokens."""
        first = [(0, nodes, self.until(nodes)) for nodes in self.shape.paths]
        return [*first, (1, range(2), [*self.prompts[1], *self.beside])]

    def until(self, nodes: Sequence[int]) -> list[int]:
        """The first prompt and these nodes of the tree after it."""
        return [*self.prompts[0], *(self.tree[node] for node in nodes)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
