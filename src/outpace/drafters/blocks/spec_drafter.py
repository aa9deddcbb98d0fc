"""SpecDec's Spec-Drafter (Xia et al. 2023): an independent model fills a block of masks in one forward.

Like ``dflash`` it fills a block, but without the target's hidden states: it has its own embeddings and reads
only the text. Row t of a text attends to rows 0 to t and stays in the cache; after the last row come the
masks, one per place of the block, which attend to all of the text and to each other, and are then removed
from the cache.

Differences from the paper: a decoder instead of an encoder and a decoder; a separate mask embedding for each
place; early places have more weight in training (``decay``); tokens are drawn with the target's own noise by
default. The paper's relaxed verification is the lossy verifier ``top_beta``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from outpace.drafters.blocks.blocks import (
    BlockConfig,
    BlockDrafter,
    BlockModule,
    BlockState,
    run_layers,
    sees_before,
    sees_own_block,
)
from outpace.drafters.support.layer_cache import Feed
from outpace.learned.layers import itself
from outpace.learned.learned import Batch, Fit
from outpace.targets.base import TargetModel

_CHUNK = 512  # tokens of a text in one forward


@dataclass(frozen=True, kw_only=True)
class SpecDrafterConfig(BlockConfig):
    """A Spec-Drafter's size, and how it is trained. Its hidden size may differ from the target's."""

    method: ClassVar[str] = "spec_drafter"


class SpecDrafterModule(BlockModule):
    """A model independent of the target, with tied head and embeddings."""

    method: ClassVar[str] = "spec_drafter"
    config_type: ClassVar[type[SpecDrafterConfig]] = SpecDrafterConfig
    fitted: ClassVar[tuple[str, ...]] = ("vocabulary",)
    config: SpecDrafterConfig

    def __init__(self, config: SpecDrafterConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.embed_tokens = nn.Embedding(fit.vocabulary, config.hidden_size)
        self.masks = nn.Parameter(torch.empty(config.tokens, config.hidden_size))
        self.add_layers()

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
class SpecDrafter(BlockDrafter):
    """Independent non-autoregressive drafter."""

    kind: ClassVar[type[BlockModule]] = SpecDrafterModule
    paper: ClassVar[str] = (
        "Xia et al. 2023, Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq "
        "Generation (SpecDec, arXiv 2203.16487)"
    )

    def revise(self, state: BlockState, unchanged: int) -> bool:
        state.rows = min(state.rows, unchanged)
        state.shared.cache.truncate(state.slot, state.rows)
        return True

    def fill(self, active: Seq[BlockState]) -> Tensor:
        while behind := [state for state in active if len(state.sequence.tokens) - state.rows > _CHUNK]:
            _feed(behind, masks=0)
        module = active[0].shared.module
        logits: Tensor = module.logits(_feed(active, masks=module.config.tokens))
        return logits


def _feed(active: Seq[BlockState], masks: int) -> Tensor:
    """Feed at most ``_CHUNK`` new tokens of each text, followed by masks.

    Returns:
        The outputs of the masks, [n, masks, hidden size], whose rows do not stay in the cache.
    """
    module = active[0].shared.module
    feeds, inputs, widths = [], [], []
    for state in active:
        text = state.sequence.tokens[state.rows : state.rows + _CHUNK]
        width = len(text) + masks
        sees = np.tri(width, dtype=np.bool_)
        sees[len(text) :] = True
        feeds.append(Feed(state.slot, range(state.rows, state.rows + width), sees))
        embedded = module.embed_tokens(torch.tensor(text, dtype=torch.long, device=module.masks.device))
        inputs.append(torch.cat([embedded, module.masks[:masks]]))
        widths.append(len(text))
    found = run_layers(active, feeds, inputs, keep=widths)
    for state, width in zip(active, widths, strict=True):
        state.rows += width
    return torch.stack([rows[width:] for rows, width in zip(found, widths, strict=True)])
