"""Heads: small networks that guess several tokens ahead from the target's last hidden state.

The target's state at place t, the row before the root, predicts the root's token, at place t + 1; the head of
depth d, from 0, guesses the token at place t + 2 + d. The tree of guesses is static, chosen by how often
each rank at each depth was right (Cai et al. 2024, Medusa, arXiv 2401.10774, section 2.3.3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.cache.lanes import LaneMemory, power_of_two
from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.best_first import best_first
from outpace.drafters.support.draws import Draws, Noise, check_grown
from outpace.drafters.support.forest import Grown, GrowthInputs, grow_on_device, grow_paths
from outpace.drafters.support.growth import Growth, grow_whole, paths_of
from outpace.drafters.support.plans import GrowthPlan, pack, unpack
from outpace.drafters.support.shapes import Confident, Growing, Static, TreeShape
from outpace.drafters.support.vocabulary import part_of
from outpace.learned.learned import Fit
from outpace.learned.vocabulary import DraftsPart, DraftVocabulary
from outpace.sequence import Sequence, Step
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import FixedShapes, shapes_for
from outpace.targets.gpu.graphs import Made
from outpace.transfer import upload

MOST_NODES = 1024  # of the tree that a configuration asks for
RANKS = 10  # guesses per head at most; it sizes the accuracies that folders of heads store


class Heads(DraftsPart):
    """Heads of any kind, one for each depth.

    Attributes:
        accuracies: rate at which the guess of each rank is right, [depths, ranks]; a rough prior until
            training has measured it.

    Args:
        depth: number of heads, one per depth.
        ranks: guesses per head that the tree may contain.
        max_nodes: maximum number of nodes of the tree.
    """

    accuracies: Tensor

    def __init__(self, config: Any, fit: Fit, depth: int, ranks: int, max_nodes: int) -> None:
        super().__init__(config, fit)
        self.drafted = DraftVocabulary(self.method, config.draft_vocabulary, fit)
        self.depth = depth
        self.max_nodes = max_nodes
        width = min(ranks, fit.vocabulary)
        prior = 0.5 * 0.8 ** torch.arange(depth)[:, None] * 0.4 ** torch.arange(width)
        self.register_buffer("accuracies", prior)

    @abstractmethod
    def rows(self, states: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        """Logits [n, drafted ids] of the token after each of n paths.

        Args:
            states: the target's states before the roots, [B, hidden size].
            owners: the index of each path's state, [n].
            paths: tokens from the root on, [n, 1 + depth].
        """

    def tree(self, max_nodes: int | None = None) -> list[int]:
        """Parents of the tree with the most expected right guesses."""
        return best_tree(self.accuracies.tolist(), self.max_nodes if max_nodes is None else max_nodes)


@dataclass(frozen=True)
class HeadConfig:
    """Options of heads, from which each method's derive.

    Attributes:
        heads: number of heads, one per token guessed ahead, at least 1.
        layers: layers per head, at least 1.
        own_head: whether each head has its own vocabulary projection; otherwise they share the target's.
        decay: weight of each head in the loss, relative to the one before.
        max_nodes: nodes of the tree that training measures.
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all.
    """

    heads: int = 4
    layers: int = 1
    own_head: bool = False
    decay: float = 0.8
    max_nodes: int = 32
    draft_vocabulary: int = 0

    method: ClassVar[str]

    def __post_init__(self) -> None:
        check_least(self.method, self, heads=1, layers=1, draft_vocabulary=0)
        check_nodes(self.method, self.max_nodes)
        if self.own_head and self.draft_vocabulary:
            raise OutpaceError(
                f"{self.method}: draft_vocabulary is of the target's head; leave it out, or own_head"
            )


def check_nodes(method: str, max_nodes: int) -> None:
    """Refuse a configuration whose tree has no node, or more than a forward should have.

    Raises:
        OutpaceError: it does.
    """
    if not 1 <= max_nodes <= MOST_NODES:
        raise OutpaceError(f"{method}: max_nodes must be between 1 and {MOST_NODES:,}, not {max_nodes:,}")


def best_tree(accuracies: Seq[Seq[float]], max_nodes: int) -> list[int]:
    """Parents of the tree with the most expected right guesses, likeliest nodes first.

    A node's probability is the product of the accuracies on its path. Nodes are taken in the order of
    probability (Cai et al. 2024, section 2.3.3), and after all higher-ranked siblings: none counts as more
    probable than those. There is at least one node, so that the drafter drafts.

    Args:
        accuracies: by depth and rank.
        max_nodes: maximum number of nodes.
    """

    def children_of(depth: int, chance: float) -> Iterator[tuple[float, int, int]]:
        ranks = accumulate(accuracies[depth], min) if depth < len(accuracies) else ()
        for rank, accuracy in enumerate(ranks):
            if accuracy > 0:
                yield chance * accuracy, rank, depth + 1

    return list(best_first(0, children_of, max_nodes, ()).parents) or [-1]


@dataclass(frozen=True, kw_only=True)
class HeadGrowth(Growth):
    """Data that an engine's sequences share: the heads, and the tree of their guesses.

    Attributes:
        shapes: captures their forwards on a GPU of CUDA; None elsewhere.
        memory: what these are captured over.
    """

    heads: Heads
    shapes: FixedShapes | None = None
    memory: LaneMemory = field(default_factory=LaneMemory)

    def revision(self) -> int:
        return self.heads.drafted.revision(self.heads.target)


@dataclass
class HeadState:
    """A sequence and its tree.

    Attributes:
        before: the target's hidden state of the row before the root, [hidden size]; None until there is one.
    """

    sequence: Sequence
    shared: HeadGrowth
    tree: Growing = field(init=False)
    before: Tensor | None = None

    def read(self, hidden: Mapping[int, Tensor]) -> None:
        """Read the hidden states of committed rows, layer -> [n, hidden size]."""
        self.before = hidden[-1][-1]

    def begin(self) -> None:
        """Begin a tree; without layers if there is no state of the target yet."""
        self.tree = self.shared.begin(self.sequence)
        if self.before is None:
            self.tree.layers = 0


@dataclass(frozen=True)
class HeadDrafter(Drafter[HeadState]):
    """Base class of drafters with heads; subclasses define the shape of the tree.

    Class attributes:
        kind: the class of its heads.

    Attributes:
        path: a folder that ``outpace train`` wrote, or the heads themselves.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": the most probable tokens.
    """

    path: Any = field(repr=False)
    draws: Noise = "coupled"

    kind: ClassVar[type[Heads]]
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_choices("draws")

    def heads(self, target: TargetModel) -> Heads:
        return self.kind.of(self.path, target)

    def shape(self, heads: Heads) -> TreeShape:
        return Static(heads.tree())

    def prepare(self, target: TargetModel) -> HeadGrowth:
        heads = self.heads(target)
        shape = self.shape(heads)
        return HeadGrowth(
            shape=shape,
            draws=Draws(self.draws, weigh=shape.weighs, independent=not shape.weighs),
            vocabulary=part_of(heads.drafted.part, target.vocabulary),
            heads=heads,
            shapes=shapes_for(target),
        )

    def renew(self, shared: HeadGrowth, target: TargetModel) -> HeadGrowth:
        return shared

    def hidden_layers(self, shared: HeadGrowth) -> tuple[int, ...]:
        return shared.heads.hidden_layers

    def start(self, sequence: Sequence, shared: HeadGrowth) -> HeadState:
        return HeadState(sequence, shared)

    def read(self, states: Seq[HeadState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, rows in zip(states, hidden, strict=True):
            state.read(rows)

    @torch.inference_mode()
    def propose(self, states: Seq[HeadState]) -> list[Draft]:
        """Draft for a batch, one depth at a time for all sequences."""
        for state in states:
            state.begin()
        left, shapes = states, states[0].shared.shapes if states else None
        if shapes is not None:
            left = grow_on_device(states, _run_growth, shapes.captures)
        grow_whole(left, _rows)
        return [state.tree.finish() for state in states]

    def observe(self, states: Seq[HeadState], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            state.read(step.committed)


@dataclass(frozen=True)
class TreeHeads(HeadDrafter):
    """Base class of drafters with heads whose guesses branch.

    Attributes:
        max_nodes: nodes of the tree of guesses; None is the number that the heads were trained with.
        expand: grow the tree by the heads' confidence (EAGLE-2, Li et al. 2024): N nodes of each layer get N
            children each, and the ``max_nodes`` best nodes are kept. By default the tree is static, chosen by
            measured accuracies. Under a verifier that needs independent draws the children are the most
            probable tokens.
    """

    max_nodes: int | None = None
    expand: int | None = None

    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(max_nodes=1, expand=1)
        check_grown(self.name, self.expand is not None, self.draws)

    def shape(self, heads: Heads) -> TreeShape:
        nodes = heads.max_nodes if self.max_nodes is None else self.max_nodes
        if self.expand is None:
            return Static(heads.tree(nodes))
        return Confident(self.expand, nodes, heads.depth)


def _run_growth(plan: GrowthPlan, members: Seq[HeadState]) -> Grown:
    """Grow the trees of sequences that share a plan, by a forward of fixed shapes."""
    shared, places = members[0].shared, range(len(members))
    before = torch.stack([state.before for state in members if state.before is not None])
    numbers = pack(plan, members, places, [0] * len(members), power_of_two(len(members)))
    assert shared.shapes is not None
    made = shared.shapes.replay(
        shared.memory,
        (plan, len(numbers), shared.revision()),
        lambda: GrowthInputs(numbers, before),
        lambda inputs: inputs.fill(numbers, places, before),
        lambda inputs: _growth(shared, plan, inputs),
    )
    return Grown.of(made, places)


def _growth(shared: HeadGrowth, plan: GrowthPlan, inputs: GrowthInputs) -> Made:
    """Grow trees from the data in the inputs, without any data from the host."""
    ids = shared.vocabulary.drafted(inputs.given)[1]
    return grow_paths(plan, unpack(plan, inputs.numbers), ids, partial(shared.heads.rows, inputs.given))


def _rows(active: Seq[HeadState]) -> Tensor:
    """Logits after the nodes of each tree's front, tree after tree, [n, drafted ids]."""
    before = torch.stack([state.before for state in active if state.before is not None])
    owners, paths = (upload(each, before.device) for each in paths_of(active))
    return active[0].shared.heads.rows(before, owners, paths)


class Residual(nn.Module):
    """Residual layer x + SiLU(W x + b), initialised to the identity (Cai et al. 2024, section 2.1)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + nn.functional.silu(self.linear(states))
