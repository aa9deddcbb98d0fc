"""Drafters that fill a block of places in one forward.

A block follows its anchor, the root of a draft. Place k of a block, from 0, predicts the token k + 1 places
after the anchor. What it predicts does not depend on the tokens drafted at the places before it, so the draft
is the best tree of these marginals (DDTree), or, where a module has a head that makes it depend on them, a
chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, Noise
from outpace.drafters.support.forest import Grown, grow_from, grow_on_device
from outpace.drafters.support.growth import Growth, grow_whole, paths_of
from outpace.drafters.support.layer_cache import Forward, LayerCache, LayerFeed, Slot
from outpace.drafters.support.plans import GrowthPlan
from outpace.drafters.support.shapes import Confident, Growing, Marginals, TreeShape, shape_of
from outpace.learned.layers import Layer, LayerConfig, Rotary, initialise
from outpace.learned.vocabulary import DraftsPart
from outpace.sequence import Sequence, Step
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import shapes_for
from outpace.transfer import upload

_MOST_NODES = 1024
_WIDTH = 4  # nodes of a layer that get children, in a tree whose places depend on the tokens before them


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Options common to drafters of blocks.

    Attributes:
        tokens: tokens per block.
        depth: number of decoder layers.
        anchors: number of places per row after which a block is trained, drawn at random for each batch.
        decay: a token at distance k has the weight exp(-(k - 1) / decay) in the loss, since an early mistake
            costs more.
    """

    method: ClassVar[str]  # the drafter's name, for messages

    tokens: int = 7
    depth: int = 2
    anchors: int = 64
    decay: float = 4.0

    def __post_init__(self) -> None:
        check_least(self.method, self, tokens=1, depth=1, anchors=1)
        if not self.decay > 0:
            raise OutpaceError(f"{self.method}: decay must be above 0, not {self.decay}")


class Places(ABC):
    """What a module predicts at the places of a block.

    Attributes:
        conditional: whether what a place predicts depends on the tokens drafted before it, by ``after``.
    """

    conditional: bool = False

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., drafted ids] from outputs [..., hidden size]."""

    @abstractmethod
    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids, [..., vocabulary], from those of the drafted ids."""

    def after(self, logits: Tensor, states: Tensor, paths: Tensor) -> Tensor:
        """Logits [n, drafted ids] of a place after n paths, if it is ``conditional``.

        Args:
            logits: of the place by itself, [n, drafted ids].
            states: outputs of the block's places up to it, [n, 1 + depth, hidden size].
            paths: the tokens before it, the root first, [n, 1 + depth].
        """
        raise NotImplementedError

    def rows(self, states: Tensor, logits: Tensor, owners: Tensor, paths: Tensor) -> Tensor:
        """Logits [n, vocabulary] after n paths.

        Args:
            states: outputs of the places of each block, [B, tokens, hidden size].
            logits: of the same places, [B, tokens, drafted ids].
            owners: the block of each path, [n].
            paths: their tokens, the root first, [n, 1 + depth].
        """
        width = paths.shape[1]
        rows = logits[:, width - 1][owners.to(logits.device)]  # the target's head may be on another device
        if self.conditional:
            rows = self.after(rows.to(states.device), states[owners, :width], paths)
        return self.spread(rows)


class BlockModule(Places, DraftsPart):
    """A module that predicts, in one forward, the tokens at several places after a text.

    Attributes:
        windows: per layer, how far before it a row attends to; 0 for no limit. Empty for none at all.
        causal: per layer, whether a row attends to the rows of its block before it alone. Empty for no layer.
    """

    config: BlockConfig
    windows: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()

    def add_layers(self, norms: bool = False, kind: Callable[..., Layer] = Layer) -> None:
        """Add the decoder layers and the final norm, and initialise all weights. Called last in ``__init__``.

        Args:
            norms: whether queries and keys are normalised.
            kind: makes a layer.
        """
        config = self.config
        self.layers = nn.ModuleList([kind(config, norms=norms) for _ in range(config.depth)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.rotary = Rotary(config)
        initialise(self)

    def spread(self, logits: Tensor) -> Tensor:
        return self.drafted.spread(logits)


@dataclass(frozen=True, kw_only=True)
class BlockShared(Growth):
    """Data that an engine's sequences share.

    Attributes:
        module: it has the layers, and ``Places``.
        chain: the longest chain.
    """

    module: Any
    cache: LayerCache
    chain: TreeShape

    def rules_for(self, sequence: Sequence) -> BlockShared:
        """The same data, with a chain for a sequence whose verifier needs the distributions of its tokens.

        A tree of the likeliest tokens has none.
        """
        draws = replace(self.draws, weigh=False, independent=True)
        if not draws.draws_from(sequence) or draws.shares(sequence):
            return self
        return replace(self, shape=self.chain, draws=draws)


@dataclass
class BlockState:
    """A sequence for which blocks are drafted.

    Attributes:
        rows: number of rows of committed places in the drafter's cache.
        waiting: layer -> the target's states at committed places that are not in the cache yet.
    """

    sequence: Sequence
    shared: BlockShared
    slot: Slot
    rows: int = 0
    waiting: list[Mapping[int, Tensor]] = field(default_factory=list)
    tree: Growing = field(init=False)


@dataclass(frozen=True)
class BlockDrafter(Drafter[BlockState]):
    """Base class of drafters of blocks; subclasses define how the text is read and a block is filled.

    Class attributes:
        kind: the class of its module, which is ``Learned`` and has ``Places``.

    Attributes:
        path: a folder that ``outpace train`` wrote, or the module itself.
        num_speculative_tokens: tokens on a path of the draft, at most and by default those of a block.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": the most probable tokens.
        max_nodes: nodes of the draft, the paths of the block's tokens that are the most probable (DDTree); by
            default as many as a chain has. 0 drafts a chain; so do independent draws, whose distributions
            describe no such tree, and by default modules whose places depend on the tokens before them.
    """

    path: Any = field(repr=False)
    num_speculative_tokens: int | None = None
    draws: Noise = "coupled"
    max_nodes: int | None = None

    kind: ClassVar[type[Any]]
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_choices("draws")
        self.check_least(num_speculative_tokens=1, max_nodes=0)
        self.check_most(max_nodes=_MOST_NODES)

    @property
    def trees(self) -> bool:
        return self.max_nodes != 0

    def prepare(self, target: TargetModel) -> BlockShared:
        module = self.kind.of(self.path, target)
        config, weight = module.config, next(module.parameters())
        asked = self.num_speculative_tokens
        depth = config.tokens if asked is None else min(asked, config.tokens)
        chain = shape_of(depth, method=self.name)
        shape = chain if target.why_chains_only else self._shape(module, chain)
        return BlockShared(
            shape=shape,
            draws=Draws(self.draws, weigh=shape.weighs, independent=not shape.weighs),
            module=module,
            cache=LayerCache.of(config, config.depth, weight, shapes_for(target)),
            chain=chain,
        )

    def _shape(self, module: Places, chain: TreeShape) -> TreeShape:
        """The shape of its drafts."""
        nodes = chain.depth if self.max_nodes is None else self.max_nodes
        if not nodes or (module.conditional and self.max_nodes is None):
            return chain
        if module.conditional:
            return Confident(min(nodes, _WIDTH), nodes, chain.depth)
        return Marginals(nodes, chain.depth)

    def renew(self, shared: BlockShared, target: TargetModel) -> BlockShared:
        return replace(shared, cache=shared.cache.renewed())

    def warm(self, shared: BlockShared, slots: int) -> None:
        shared.cache.warm(slots)

    def start(self, sequence: Sequence, shared: BlockShared) -> BlockState:
        return BlockState(sequence, shared.rules_for(sequence), shared.cache.open())

    def stop(self, state: BlockState) -> None:
        state.shared.cache.close(state.slot)

    def ready(self, state: BlockState) -> bool:
        """True if a block can be filled."""
        return True

    @abstractmethod
    def fill(self, active: Seq[BlockState]) -> Tensor:
        """Read the text committed since the last block, and fill the next block.

        Returns:
            Outputs of the module's layers at its places, [n, tokens, hidden size].
        """

    def grown(self, plan: GrowthPlan, members: Seq[BlockState]) -> Grown:
        """As ``fill``, and draw from the block on its device."""
        states, module = self.fill(members), members[0].shared.module
        return grow_from(
            plan, members, None, states.device, partial(module.rows, states, module.logits(states))
        )

    @torch.inference_mode()
    def propose(self, states: Seq[BlockState]) -> list[Draft]:
        for state in states:
            state.tree = state.shared.begin(state.sequence)
        active = [state for state in states if state.tree.layers > 0 and self.ready(state)]
        shapes = active[0].shared.cache.shapes if active else None
        if shapes is not None:
            active = grow_on_device(active, self.grown, shapes.captures)
        if active:
            self._grow(active)
        return [state.tree.finish() for state in states]

    def _grow(self, active: Seq[BlockState]) -> None:
        """Grow the trees of all sequences, those by the same rules together."""
        module, filled = active[0].shared.module, self.fill(active)
        logits, places = module.logits(filled), {id(state): place for place, state in enumerate(active)}

        def rows(growing: Seq[BlockState]) -> Tensor:
            owners, paths = paths_of(growing)
            blocks = [places[id(growing[owner])] for owner in owners]
            given = (upload(each, filled.device) for each in (blocks, paths))
            found: Tensor = module.rows(filled, logits, *given)
            return found

        for weighs in (False, True):
            grow_whole([state for state in active if state.shared.draws.weigh == weighs], rows)


@dataclass(frozen=True)
class ReadingBlockDrafter(BlockDrafter):
    """Base class of drafters of blocks that read the target's hidden states."""

    def hidden_layers(self, shared: BlockShared) -> tuple[int, ...]:
        layers: tuple[int, ...] = shared.module.hidden_layers
        return layers

    def read(self, states: Seq[BlockState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, own in zip(states, hidden, strict=True):
            state.waiting.append(own)

    def observe(self, states: Seq[BlockState], steps: Seq[Step]) -> None:
        self.read(states, [step.committed for step in steps])


def run_layers(
    active: Seq[BlockState], feeds: Seq[LayerFeed], inputs: Seq[Tensor], keep: Seq[int]
) -> list[Tensor]:
    """Run one forward of the layers for all sequences.

    Args:
        inputs: rows of each sequence, [width, hidden size].
        keep: per sequence, the number of its first rows that stay in the cache.

    Returns:
        The outputs of each sequence's rows, [width, hidden size].
    """
    module, cache = active[0].shared.module, active[0].shared.cache
    forward = cache.begin(feeds)
    states = through(module, forward, forward.pad(inputs))
    forward.keep(keep)
    return forward.rows(states)


def through(module: BlockModule, forward: Forward, states: Tensor) -> Tensor:
    """The layers' outputs for the rows of a forward, [S, width, hidden size]."""
    angles = module.rotary(forward.positions, states)
    depth = len(module.layers)
    sights = list(zip(module.windows or [0] * depth, module.causal or [False] * depth, strict=True))
    masks = {sight: within(forward.mask, forward.positions, *sight) for sight in {*sights}}
    for place, layer in enumerate(module.layers):
        states = layer(states, angles, masks[sights[place]], forward.store(place))
    return states


def within(mask: Tensor, positions: Tensor, window: int, causal: bool) -> Tensor:
    """A mask, [S, 1, width, columns], without the columns that are far before a row, or after it.

    A column is the row at that position.

    Args:
        positions: of the rows, [S, width].
        window: how far before a row a column may be; 0 for no limit.
        causal: whether columns after a row are left out.
    """
    columns, rows = torch.arange(mask.shape[-1], device=mask.device), positions[:, None, :, None]
    mask = mask & (columns >= rows - window) if window else mask
    return mask & (columns <= rows) if causal else mask
