"""Drafters that fill a block of places in one forward.

A block follows its anchor, the root of a draft. Place k of a block, from 0, predicts the token k + 1 places
after the anchor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.support.draws import Draws, Noise
from outpace.drafters.support.forest import Grown, grow_from, grow_on_device
from outpace.drafters.support.growth import Growth, grow_whole
from outpace.drafters.support.layer_cache import Forward, LayerCache, LayerFeed, Slot
from outpace.drafters.support.plans import GrowthPlan
from outpace.drafters.support.shapes import Growing, shape_of
from outpace.learned.layers import Layer, LayerConfig, Rotary, initialise
from outpace.learned.vocabulary import DraftsPart
from outpace.sequence import Sequence
from outpace.spec import check_least
from outpace.targets.base import TargetModel
from outpace.targets.gpu.fixed import shapes_for


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


class BlockModule(DraftsPart):
    """A module that predicts, in one forward, the tokens at several places after a text.

    Attributes:
        windows: per layer, how far before it a row attends to; 0 for no limit. Empty for none at all.
    """

    config: BlockConfig
    windows: tuple[int, ...] = ()

    def add_layers(self, norms: bool = False) -> None:
        """Add the decoder layers and the final norm, and initialise all weights. Called last in ``__init__``.

        Args:
            norms: whether queries and keys are normalised.
        """
        config = self.config
        self.layers = nn.ModuleList([Layer(config, norms=norms) for _ in range(config.depth)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.rotary = Rotary(config)
        initialise(self)

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., drafted ids] from outputs [..., hidden size]."""


@dataclass(frozen=True, kw_only=True)
class BlockShared(Growth):
    """Data that an engine's sequences share."""

    module: Any  # a BlockModule
    cache: LayerCache


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
        kind: the class of its module.

    Attributes:
        path: a folder that ``outpace train`` wrote, or the module itself.
        num_speculative_tokens: number of tokens drafted, at most and by default those of a block.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with separate noise; "greedy": the most probable tokens.
    """

    path: Any = field(repr=False)
    num_speculative_tokens: int | None = None
    draws: Noise = "coupled"

    kind: ClassVar[type[BlockModule]]
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_choices("draws")
        self.check_least(num_speculative_tokens=1)

    def prepare(self, target: TargetModel) -> BlockShared:
        module = self.kind.of(self.path, target)
        config, weight = module.config, next(module.parameters())
        return BlockShared(
            shape=shape_of(config.tokens, method=self.name),
            draws=Draws(self.draws),
            module=module,
            cache=LayerCache.of(config, config.depth, weight, shapes_for(target)),
        )

    def renew(self, shared: BlockShared, target: TargetModel) -> BlockShared:
        return replace(shared, cache=shared.cache.renewed())

    def warm(self, shared: BlockShared, slots: int) -> None:
        shared.cache.warm(slots)

    def start(self, sequence: Sequence, shared: BlockShared) -> BlockState:
        return BlockState(sequence, shared, shared.cache.open())

    def stop(self, state: BlockState) -> None:
        state.shared.cache.close(state.slot)

    @abstractmethod
    def fill(self, active: Seq[BlockState]) -> Tensor:
        """Read the text committed since the last block, and fill the next block.

        Returns:
            Logits [n, tokens, vocabulary].
        """

    def grown(self, plan: GrowthPlan, members: Seq[BlockState]) -> Grown:
        """As ``fill``, and draw from the block on its device."""
        return grow_from(plan, members, self.fill(members))

    @torch.inference_mode()
    def propose(self, states: Seq[BlockState]) -> list[Draft]:
        active = [state for state in states if begin_block(state, self.num_speculative_tokens)]
        shapes = active[0].shared.cache.shapes if active else None
        if shapes is not None:
            active = grow_on_device(active, self.grown, shapes.captures)
        if active:
            # A place's logits do not depend on the tokens drawn before it.
            rows = {id(state): own for state, own in zip(active, self.fill(active), strict=True)}
            grow_whole(
                active, lambda states: torch.stack([rows[id(state)][state.tree.depth] for state in states])
            )
        return [state.tree.finish() for state in states]


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
    masks = {window: within(forward.mask, forward.positions, window) for window in {*module.windows}}
    for place, layer in enumerate(module.layers):
        mask = masks[module.windows[place]] if module.windows else forward.mask
        states = layer(states, angles, mask, forward.store(place))
    return states


def within(mask: Tensor, positions: Tensor, window: int) -> Tensor:
    """A mask, [S, 1, width, columns], without the columns that are more than ``window`` before a row.

    A column is the row at that position.

    Args:
        positions: of the rows, [S, width].
        window: 0 for no limit.
    """
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (columns >= positions[:, None, :, None] - window) if window else mask


def begin_block(state: BlockState, most: int | None) -> bool:
    """Begin a draft.

    Args:
        most: maximum number of tokens; None for the full block.

    Returns:
        True if there is anything to draft.
    """
    shape = state.shared.shape.within(most)
    state.tree = Growing(state.sequence.within_reach(shape.depth), shape)
    return state.tree.layers > 0
