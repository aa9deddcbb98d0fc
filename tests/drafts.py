"""Small models and drafts for the enumeration of verifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from enumeration import Model, Script, Text
from outpace.core import Draft
from outpace.tree import depths, path_to


def table(seed: int, zeros: float = 0.0, vocabulary: int = 4) -> Model:
    """A model with a random distribution after each text; a share of its probabilities are 0."""
    rows: dict[Text, Tensor] = {}

    def model(text: Text) -> Tensor:
        if text not in rows:
            generator = torch.Generator().manual_seed(hash((seed, text)) % 2**31)
            weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 3
            weights[torch.rand(vocabulary, generator=generator) < zeros] = 0
            if weights.sum() == 0:
                weights[seed % vocabulary] = 1
            rows[text] = weights / weights.sum()
        return rows[text]

    return model


def always(*probabilities: float) -> Model:
    """A model that predicts the same after every text."""
    row = torch.tensor(probabilities, dtype=torch.float64)
    return lambda text: row


def fixed(draft: Draft) -> Callable[[Script], Draft]:
    return lambda script: draft


def sampled(model: Model, parents: Sequence[int], replacement: bool = True) -> Callable[[Script], Draft]:
    """Drafts a tree of this shape by sampling, a node's children in order.

    Without replacement a node may run out of candidates: it then has fewer children.
    """

    def draft(script: Script) -> Draft:
        tokens: list[int] = []
        kept: list[int] = []
        place = {-1: -1}
        first: dict[int, Tensor] = {}
        left: dict[int, Tensor] = {}
        for node, parent in enumerate(parents):
            if parent not in place:
                continue
            above = place[parent]
            if above not in first:
                first[above] = left[above] = model(tuple(tokens[n] for n in path_to(kept, above)))
            if not left[above].sum() > 0:
                continue
            token = script.draw((left[above] / left[above].sum()).tolist())
            if not replacement:
                left[above] = left[above].clone()
                left[above][token] = 0
            place[node] = len(tokens)
            tokens.append(token)
            kept.append(above)
        return Draft(tokens, kept, {parent: first[parent] for parent in set(kept)}, replacement)

    return draft


def chain_shape(length: int) -> list[int]:
    return list(range(-1, length - 1))


@st.composite
def shapes(draw: st.DrawFn, size: int) -> list[int]:
    """Parents of a tree of up to so many nodes."""
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, size)))]


@st.composite
def trees(draw: st.DrawFn, vocabulary: int = 4, size: int = 7) -> Draft:
    """Trees of chosen tokens, with equal siblings among them."""
    parents = draw(shapes(size))
    return Draft([draw(st.integers(0, vocabulary - 1)) for _ in parents], parents)


def height(parents: Sequence[int]) -> int:
    """Nodes on the longest path."""
    return max(depths(parents), default=-1) + 1
