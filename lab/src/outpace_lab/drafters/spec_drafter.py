"""SpecDec's Spec-Drafter (Xia et al. 2023): an independent model fills a block of masks in one forward.

Like ``dflash`` it fills a block, but without the target's hidden states: it has its own embeddings and reads
only the text, after the source if the target is an encoder-decoder model. Rows of a source attend to each
other; row t of the text attends to the source and to rows 0 to t. They stay in the cache; after the last row
come the masks, one per place of the block, which attend to all before and to each other, and are then removed
from the cache.

Differences from the paper: one stack of layers instead of an encoder and a decoder; a separate mask embedding
for each place; early places have more weight in training (``decay``); tokens are drawn with the target's own
noise by default. The paper's relaxed verification is the lossy verifier ``top_beta``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from outpace.drafters.support.blocks import BlockConfig, BlockDrafter, BlockState, run_layers
from outpace.drafters.support.layer_cache import LayerFeed
from outpace.learned.layers import itself
from outpace.learned.learned import Fit
from outpace.learned.vocabulary import DraftVocabulary
from outpace.targets.base import TargetModel
from outpace_lab.train.modules.blocks import TrainedBlocks, sees_before, sees_own_block
from outpace_lab.train.trained import TrainingBatch

_CHUNK = 512  # tokens of a text in one forward


@dataclass(frozen=True, kw_only=True)
class SpecDrafterConfig(BlockConfig):
    """A Spec-Drafter's size, and how it is trained. Its hidden size may differ from the target's."""

    method: ClassVar[str] = "spec_drafter"


class SpecDrafterModule(TrainedBlocks):
    """A model independent of the target, with tied head and embeddings."""

    method: ClassVar[str] = "spec_drafter"
    config_type: ClassVar[type[SpecDrafterConfig]] = SpecDrafterConfig
    fitted: ClassVar[tuple[str, ...]] = ("vocabulary",)
    config: SpecDrafterConfig

    def __init__(self, config: SpecDrafterConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.drafted = DraftVocabulary(self.method, 0, fit)
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

    def blocks(self, batch: TrainingBatch, anchors: Tensor) -> Tensor:
        (rows, count), width = anchors.shape, self.config.tokens
        device = anchors.device
        source = batch.tokens[:, :0] if batch.source is None else batch.source
        before = (source >= 0).sum(dim=1, keepdim=True)  # tokens of the source
        steps = torch.arange(1, width + 1, device=device)
        ahead = (batch.positions.gather(1, anchors)[..., None] + steps).flatten(1)
        order = torch.arange(source.shape[1], device=device).expand_as(source)
        positions = torch.cat([order, before + batch.positions, before + ahead], dim=1)
        causal = F.pad(batch.seen, (0, count * width))
        own = sees_own_block(count, width, device).expand(rows, -1, -1)
        block = torch.cat([sees_before(batch, anchors, width, own=True), own], dim=-1)
        after = torch.cat([causal, block], dim=1)
        # The source attends to itself, and what follows to the source.
        sources = (source >= 0)[:, None].expand(-1, positions.shape[1], -1)
        mask = torch.cat([sources, F.pad(after, (0, 0, source.shape[1], 0))], dim=2)[:, None]
        masks = self.masks.repeat(count, 1).expand(rows, -1, -1)
        embedded = self.embed_tokens(torch.cat([source.clamp(min=0), batch.tokens], dim=1))
        states = torch.cat([embedded, masks], dim=1)
        angles = self.rotary(positions, states)
        for layer in self.layers:
            states = layer(states, angles, mask, itself)
        filled: Tensor = states[:, embedded.shape[1] :].unflatten(1, (count, width))
        return filled


@dataclass(frozen=True)
class SpecDrafter(BlockDrafter):
    """Independent non-autoregressive drafter."""

    kind: ClassVar[type[Any]] = SpecDrafterModule
    when: ClassVar[str] = "to study a drafter that guesses a block at once"
    needs: ClassVar[str] = "a folder from outpace train"
    paper: ClassVar[str] = (
        "Xia et al. 2023, Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq "
        "Generation (SpecDec, arXiv 2203.16487)"
    )

    def revise(self, state: BlockState, unchanged: int) -> bool:
        state.rows = min(state.rows, len(_source(state)) + unchanged)
        state.shared.cache.truncate(state.slot, state.rows)
        return True

    def fill(self, active: Seq[BlockState]) -> Tensor:
        while behind := [state for state in active if _length(state) - _stop(state) > 0]:
            _feed(behind, masks=0)
        return _feed(active, masks=active[0].shared.module.config.tokens)


def _source(state: BlockState) -> Seq[int]:
    """The tokens that the text is decoded from."""
    source = state.sequence.source
    return () if source is None else source.tokens


def _length(state: BlockState) -> int:
    """Tokens of source and text."""
    return len(_source(state)) + len(state.sequence.tokens)


def _stop(state: BlockState) -> int:
    """The end of the next chunk: a source is read as a whole, since its rows attend to each other."""
    return min(max(state.rows + _CHUNK, len(_source(state))), _length(state))


def _feed(active: Seq[BlockState], masks: int) -> Tensor:
    """Feed the next chunk of each source and text, followed by masks.

    Returns:
        The outputs of the masks, [n, masks, hidden size], whose rows do not stay in the cache.
    """
    module = active[0].shared.module
    feeds, inputs, widths = [], [], []
    for state in active:
        source, first, stop = _source(state), state.rows, _stop(state)
        start, end = (max(place - len(source), 0) for place in (first, stop))
        text = [*source[first:stop], *state.sequence.tokens[start:end]]
        width = len(text) + masks
        sees = np.tri(width, dtype=np.bool_)
        sees[:, : max(len(source) - first, 0)] = True
        sees[len(text) :] = True
        feeds.append(LayerFeed(state.slot, range(state.rows, state.rows + width), sees))
        embedded = module.embed_tokens(torch.tensor(text, dtype=torch.long, device=module.masks.device))
        inputs.append(torch.cat([embedded, module.masks[:masks]]))
        widths.append(len(text))
    found = run_layers(active, feeds, inputs, keep=widths)
    for state, width in zip(active, widths, strict=True):
        state.rows += width
    return torch.stack([rows[width:] for rows, width in zip(found, widths, strict=True)])
