"""Inputs of trees that grow on a device: the plan that a graph is captured for, and each text's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.cache.lanes import power_of_two
from outpace.drafters.support.growth import Grows, Growth
from outpace.drafters.support.shapes import Confident, TreeShape, candidates_of
from outpace.drafters.support.vocabulary import Subset, Vocabulary
from outpace.draws.many_rows import host_keys, is_cut, limits_of
from outpace.draws.sampling import TINY_TEMPERATURE
from outpace.draws.warped import Warps
from outpace.tree import children

# How candidates follow from logits: the most probable tokens; those after temperature and cuts; draws with
# the target's own noise, or with separate noise.
Kind = Literal["best", "warped", "shared", "own"]


@dataclass(frozen=True)
class GrowthLayer:
    """A layer of growth: ``front`` nodes have ``count`` candidates for children each.

    Attributes:
        parents: for each node of the front, the candidate of the layer before that it is; None if confidence
            decides that.
    """

    front: int
    count: int
    parents: tuple[int, ...] | None


@dataclass(frozen=True)
class GrowthPlan:
    """All about the trees of a batch that a graph contains.

    Attributes:
        cut: whether top-k, top-p or min-p of some row has an effect.
        fused: whether the kernel for draws may be used.
        weigh, floor, by_path: ``Draws.weigh``, ``Growth.least`` and ``Growth.by_path``.
        most: nodes of the tree, for a tree by confidence.
        stops: number of tokens that end a text, with padding.
    """

    layers: tuple[GrowthLayer, ...]
    kind: Kind
    cut: bool
    fused: bool
    weigh: bool
    floor: float
    by_path: bool
    most: int | None
    stops: int

    @property
    def rows(self) -> int:
        """Number of nodes that are fed."""
        return sum(layer.front for layer in self.layers[1:])


def grows_on_device(shared: Growth) -> bool:
    """True if trees by these rules may grow on a device."""
    return type(shared.vocabulary) in (Vocabulary, Subset) and not shared.draws.replacement


def kind_of(state: Grows) -> Kind | None:
    """How a sequence's candidates follow from logits; None if the host must draw them."""
    shared, sequence = state.shared, state.sequence
    draws = shared.draws
    if not grows_on_device(shared) or sequence.processor.adjusts:
        return None
    if not draws.draws_from(sequence):
        return "best" if sequence.params.greedy else "warped"
    if draws.shares(sequence):
        return "shared"
    return None if state.tree.shape.branches or draws.weigh else "own"


def groups(states: Seq[Any], graphs: bool) -> Iterator[tuple[GrowthPlan | None, list[Any]]]:
    """The sequences with something to draft, by the plan that they share; None if the host draws for them.

    Args:
        graphs: a plan becomes a graph: it has all layers of its shape, needed or not, so that there are few.
    """
    found: dict[Any, list[Any]] = {}
    for state in states:
        if state.tree.layers > 0:
            kind = kind_of(state)
            found.setdefault(kind and (kind, state.tree.shape.key), []).append(state)
    for key, members in found.items():
        yield (None if key is None else _plan(key[0], members, graphs)), members


def _plan(kind: Kind, states: Seq[Grows], graphs: bool) -> GrowthPlan:
    shared, shape = states[0].shared, states[0].tree.shape
    params = [state.sequence.params for state in states]
    ends = max(len(shared.ends(state.sequence)) for state in states)
    cut, fused = any(map(is_cut, params)), all(own.temperature >= TINY_TEMPERATURE for own in params)
    depth = shape.depth if graphs else max(state.tree.layers for state in states)
    return plan_of(kind, shared, shape, depth, ends, cut, fused)


def plan_of(
    kind: Kind, shared: Growth, shape: TreeShape, depth: int, ends: int, cut: bool = False, fused: bool = True
) -> GrowthPlan:
    """The plan of trees of a shape.

    Args:
        depth: number of its layers that grow.
        ends: the most tokens that end a text.
    """
    return GrowthPlan(
        layers=layers_of(shape.key, depth),
        kind=kind,
        cut=kind != "best" and cut,
        fused=kind in ("shared", "own") and fused,
        weigh=shared.draws.weigh,
        floor=shared.least,
        by_path=shared.by_path,
        most=shape.nodes if isinstance(shape, Confident) else None,
        stops=power_of_two(ends) if isinstance(shape, Confident) and ends else 0,
    )


@lru_cache(maxsize=256)
def layers_of(key: tuple[str, tuple[int, ...]], depth: int) -> tuple[GrowthLayer, ...]:
    """The layers of a tree of a shape, by ``TreeShape.key``."""
    name, numbers = key
    if name == "confident":
        width = numbers[0]
        return tuple(GrowthLayer(width if place else 1, width, None) for place in range(depth))
    if name == "marginals":
        return tuple(GrowthLayer(1, candidates_of(numbers[0], place), (0,)) for place in range(depth))
    below, front, parents, layers = children(numbers), [-1], tuple[int, ...](), list[GrowthLayer]()
    while front and len(layers) < depth:
        count = max(len(below[node]) for node in front)
        layers.append(GrowthLayer(len(front), count, parents))
        next_ = {
            slot * count + rank: child
            for slot, node in enumerate(front)
            for rank, child in enumerate(below[node])
            if below[child]
        }
        parents, front = tuple(next_), list(next_.values())
    return tuple(layers)


# Of a place: rows before the tree, whether it is in use, the root, four parameters, the least weight.
_FIRST = 8


class GrowthNumbers(NamedTuple):
    """What the growth of a batch reads, on the device.

    Attributes:
        base: number of rows before each tree, [n].
        used: whether a place has a sequence, [n].
        roots: the last token of each text, [n].
        warps: the places' parameters.
        least: ``Growing.least``, [n].
        keys: the key of each layer's draws, [n, layers].
        stops: tokens that end each text, [n, stops].
    """

    base: Tensor
    used: Tensor
    roots: Tensor
    warps: Warps
    least: Tensor
    keys: Tensor
    stops: Tensor


def pack(
    plan: GrowthPlan, states: Seq[Any], places: Seq[int], bases: Seq[int], size: int
) -> NDArray[np.int64]:
    """The numbers of a batch for one upload, [size, n].

    Args:
        places: of the states in the batch.
        bases: number of rows before each tree.
    """
    count = _FIRST + len(plan.layers) + plan.stops
    numbers = np.zeros((size, count), np.int64)
    reals = numbers.view(np.float64)
    reals[:, [3, 5]] = 1.0
    numbers[:, 4], numbers[:, _FIRST + len(plan.layers) :] = 1, -1
    for state, place, base in zip(states, places, bases, strict=True):
        sequence, draws = state.sequence, state.shared.draws
        numbers[place, :3] = base, 1, sequence.tokens[-1]
        reals[place, 3] = sequence.params.temperature
        numbers[place, 4], reals[place, 5], reals[place, 6] = limits_of(sequence.params, _ALL)
        reals[place, 7] = state.tree.least
        if plan.kind in ("shared", "own"):
            root = sequence.output_length
            words = [draws.word(sequence, root, depth, depth) for depth in range(len(plan.layers))]
            numbers[place, _FIRST : _FIRST + len(words)] = host_keys(words)
        if plan.stops:
            ends = list(state.shared.ends(sequence))
            numbers[place, _FIRST + len(plan.layers) :][: len(ends)] = ends
    return numbers


_ALL = 1 << 40  # more tokens than any vocabulary has


def unpack(plan: GrowthPlan, numbers: Tensor) -> GrowthNumbers:
    """Split the array of ``pack`` on its device."""
    reals = numbers.view(torch.float64)
    keys = numbers[:, _FIRST : _FIRST + len(plan.layers)]
    warps = Warps(reals[:, 3], numbers[:, 4], reals[:, 5], reals[:, 6])
    used, stops = numbers[:, 1] > 0, numbers[:, _FIRST + len(plan.layers) :]
    return GrowthNumbers(numbers[:, 0], used, numbers[:, 2], warps, reals[:, 7], keys, stops)
