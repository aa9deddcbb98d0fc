"""SpecDec's Spec-Drafter (Xia et al. 2023): an independent model fills a block of masks in one forward.

It has embeddings and layers of its own and reads the text alone. The rows of a text see what is before them,
and stay in its cache; behind the last one stand the masks, one for each place, which see all of the text and
each other, and leave the cache after the forward.

What differs from the paper: a decoder, where that drafter has an encoder and a decoder; each place has a mask
embedding of its own; early places count more in training (``decay``); tokens are drawn with the target's own
noise by default. The paper's relaxed verification is the ``top_beta`` verifier, and lossy.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.blocks.blocks import (
    BlockConfig,
    BlockModule,
    BlockShared,
    BlockState,
    begin_block,
    grow_block,
    sees_before,
    sees_own_block,
    share,
)
from outpace.drafters.support.draws import Noise, check_noise
from outpace.drafters.support.layer_cache import Feed
from outpace.learned.layers import Layer, Rotary, initialise, itself
from outpace.learned.learned import Batch, Fit
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

_CHUNK = 512  # tokens of a text in one forward


@dataclass(frozen=True, kw_only=True)
class SpecDrafterConfig(BlockConfig):
    """What a Spec-Drafter is made of, and how it is trained. Its rows may have a size of their own."""


class SpecDrafterModule(BlockModule):
    """A model of its own; its head is its embeddings."""

    method: ClassVar[str] = "spec_drafter"
    config_type: ClassVar[type[SpecDrafterConfig]] = SpecDrafterConfig
    fitted: ClassVar[tuple[str, ...]] = ("vocabulary",)
    config: SpecDrafterConfig

    def __init__(self, config: SpecDrafterConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(fit.vocabulary, size)
        self.masks = nn.Parameter(torch.empty(config.tokens, size))
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.depth)])
        self.norm = nn.RMSNorm(size, eps=config.eps)
        self.rotary = Rotary(config)
        initialise(self)

    @classmethod
    def new(cls, config: SpecDrafterConfig, target: TargetModel) -> Self:
        return super().new(config.sized(target.hidden.size), target)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(self.norm(states), self.embed_tokens.weight)

    def blocks(self, batch: Batch, anchors: Tensor) -> Tensor:
        (rows, count), width, text = anchors.shape, self.config.tokens, batch.tokens.shape[1]
        device = anchors.device
        steps = torch.arange(1, width + 1, device=device)
        ahead = (batch.positions.gather(1, anchors)[..., None] + steps).flatten(1)
        positions = torch.cat([batch.positions, ahead], dim=1)
        causal = F.pad(batch.seen, (0, count * width))
        own = sees_own_block(count, width, device).expand(rows, -1, -1)
        block = torch.cat([sees_before(batch, anchors, width, own=True), own], dim=-1)
        mask = torch.cat([causal, block], dim=1)[:, None]
        masks = self.masks.repeat(count, 1).expand(rows, -1, -1)
        states = torch.cat([self.embed_tokens(batch.tokens), masks], dim=1)
        angles = self.rotary(positions, states)
        for layer in self.layers:
            states = layer(states, angles, mask, itself)
        filled: Tensor = states[:, text:].unflatten(1, (count, width))
        return filled


@dataclass(frozen=True)
class SpecDrafter(Drafter[BlockState]):
    """An independent non-autoregressive drafter.

    Attributes:
        path: folder of a trained drafter, or the module itself.
        num_speculative_tokens: tokens drafted, at most those of a block; all of them by default.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with noise of its own; "greedy": its most probable tokens.
    """

    path: Any = field(repr=False)
    num_speculative_tokens: int | None = None
    draws: Noise = "coupled"

    paper: ClassVar[str] = (
        "Xia et al. 2023, Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq "
        "Generation (SpecDec, arXiv 2203.16487)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_noise("spec_drafter", self.draws)
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise OutpaceError(
                f"spec_drafter: num_speculative_tokens must be at least 1, not {self.num_speculative_tokens}"
            )

    def prepare(self, target: TargetModel) -> BlockShared:
        return share("spec_drafter", SpecDrafterModule.of(self.path, target), self.draws)

    def start(self, sequence: Sequence, shared: BlockShared) -> BlockState:
        return BlockState(sequence, shared, shared.cache.open())

    def stop(self, state: BlockState) -> None:
        state.shared.cache.close(state.slot)

    def revise(self, state: BlockState, unchanged: int) -> bool:
        state.rows = min(state.rows, unchanged)
        state.shared.cache.truncate(state.slot, state.rows)
        return True

    def observe(self, states: Seq[BlockState], steps: Seq[Step]) -> None:
        """Nothing: the text is read when a block is wanted."""

    @torch.inference_mode()
    def propose(self, states: Seq[BlockState]) -> list[Draft]:
        active = [state for state in states if begin_block(state, self.num_speculative_tokens)]
        while behind := [state for state in active if len(state.sequence.tokens) - state.rows > _CHUNK]:
            _feed(behind, masks=0)
        if active:
            rows = _feed(active, masks=active[0].shared.module.config.tokens)
            grow_block(active, active[0].shared.module.logits(rows))
        return [state.tree.finish() for state in states]


def _feed(active: Seq[BlockState], masks: int) -> Tensor:
    """Feed the tokens that came since the last forward, a chunk at most, and masks behind them.

    Returns:
        What comes out of the masks, [n, masks, hidden size]; they leave the cache.
    """
    module, cache = active[0].shared.module, active[0].shared.cache
    device = module.masks.device
    feeds, inputs, widths = [], [], []
    for state in active:
        text = state.sequence.tokens[state.rows : state.rows + _CHUNK]
        width = len(text) + masks
        sees = np.tri(width, dtype=np.bool_)
        sees[len(text) :] = True
        feeds.append(Feed(state.slot, range(state.rows, state.rows + width), sees))
        embedded = module.embed_tokens(torch.tensor(text, dtype=torch.long, device=device))
        inputs.append(torch.cat([embedded, module.masks[:masks]]))
        widths.append(len(text))
    forward = cache.begin(feeds)
    states = forward.pad(inputs)
    angles = module.rotary(forward.positions, states)
    for place, layer in enumerate(module.layers):
        states = layer(states, angles, forward.mask, forward.store(place))
    forward.keep(widths)
    for state, width in zip(active, widths, strict=True):
        state.rows += width
    found = zip(forward.rows(states), widths, strict=True)
    return torch.stack([rows[width : width + masks] for rows, width in found])
