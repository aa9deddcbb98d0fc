"""DFlash (Chen, Liang, Liu 2026): a small block-diffusion drafter conditioned on the target's hidden states.

A block begins with the last committed token, and all other places are masked. One forward of a few layers, in
which the places of a block see each other in both directions, fills them. What the target thinks of the text
comes in beside: fused states of several of its layers give every layer of the drafter keys and values.

What differs from the paper: the mask is an embedding of its own, since most vocabularies have no such token;
tokens are drawn with the target's own noise by default; the objective is chosen in training. By default it is
smaller: two layers that read three of the target's and fill blocks of 8, where the paper has five layers that
read five of the target's, evenly spread, and blocks of 16. ``decay`` is the paper's for 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
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
from outpace.learned.hidden_layers import default_layers
from outpace.learned.layers import Attention, Layer, Rotary, Store, initialise
from outpace.learned.learned import Batch, Fit
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

_CHUNK = 512  # places of a text in one forward


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """What a DFlash drafter is made of, and how it is trained.

    Attributes:
        layers: of the target, whose states it reads, as ``Output.hidden`` counts them; as in 2+14+25; by
            default a low, a middle and a high one.
    """

    layers: tuple[int, ...] = ()


class DFlashModule(BlockModule):
    """DFlash's layers, and the fusion of the target's states."""

    method: ClassVar[str] = "dflash"
    config_type: ClassVar[type[DFlashConfig]] = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        size = config.hidden_size
        if size != fit.hidden_size:
            raise OutpaceError(
                "dflash: its rows begin as the target's embeddings and end in its head, so hidden_size must "
                f"be the target's, {fit.hidden_size}, not {size}; leave it out"
            )
        self.fc = nn.Linear(len(config.layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=config.eps)
        self.mask = nn.Parameter(torch.empty(1, size))
        self.layers = nn.ModuleList([Layer(config, norms=True) for _ in range(config.depth)])
        self.norm = nn.RMSNorm(size, eps=config.eps)
        self.rotary = Rotary(config)
        initialise(self)

    @classmethod
    def new(cls, config: DFlashConfig, target: TargetModel) -> Self:
        layers = config.layers or default_layers(target)
        return super().new(replace(config.sized(target.hidden.size), layers=layers), target)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.config.layers

    def joined(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's states of all layers that it reads, [..., layers x size], from those by layer."""
        return torch.cat([hidden[layer] for layer in self.config.layers], dim=-1)

    def fuse(self, states: Tensor) -> Tensor:
        """What the layers see of the target's joined states, [..., hidden size]."""
        fused: Tensor = self.hidden_norm(self.fc(states.to(self.mask.dtype)))
        return fused

    def masked(self, roots: Tensor) -> Tensor:
        """The rows of blocks, [..., 1 + tokens, hidden size], that begin with tokens [...]."""
        embedded = self.target.embed(roots).to(self.mask.dtype)[..., None, :]
        masks = self.mask.expand(*roots.shape, self.config.tokens, -1)
        return torch.cat([embedded, masks], dim=-2)

    def logits(self, states: Tensor) -> Tensor:
        return self.target.head(self.norm(states))

    def blocks(self, batch: Batch, anchors: Tensor) -> Tensor:
        count, width = anchors.shape[1], 1 + self.config.tokens
        text = self.fuse(self.joined(batch.hidden))
        text_angles = self.rotary(batch.positions, text)
        steps = torch.arange(width, device=anchors.device)
        positions = (batch.positions.gather(1, anchors)[..., None] + steps).flatten(1)
        own = sees_own_block(count, width, anchors.device).expand(len(anchors), -1, -1)
        mask = torch.cat([sees_before(batch, anchors, width, own=False), own], dim=-1)[:, None]
        states = self.masked(batch.tokens.gather(1, anchors)).flatten(1, 2)
        angles = self.rotary(positions, states)
        for layer in self.layers:
            attention = cast(Attention, layer.self_attn)
            states = layer(states, angles, mask, _behind(*attention.keys(text, text_angles)))
        filled: Tensor = states.unflatten(1, (count, width))[:, :, 1:]
        return filled


def _behind(keys: Tensor, values: Tensor) -> Store:
    """The store of rows that see a text's keys and values, and then each other."""
    return lambda own, theirs: (torch.cat([keys, own], dim=2), torch.cat([values, theirs], dim=2))


@dataclass(frozen=True)
class DFlash(Drafter[BlockState]):
    """A block-diffusion drafter.

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
        "Chen, Liang, Liu 2026, DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036)"
    )
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_noise("dflash", self.draws)
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 1:
            raise OutpaceError(
                f"dflash: num_speculative_tokens must be at least 1, not {self.num_speculative_tokens}"
            )

    def prepare(self, target: TargetModel) -> BlockShared:
        return share("dflash", DFlashModule.of(self.path, target), self.draws)

    def hidden_layers(self, shared: BlockShared) -> tuple[int, ...]:
        layers: tuple[int, ...] = shared.module.hidden_layers
        return layers

    def start(self, sequence: Sequence, shared: BlockShared) -> BlockState:
        return BlockState(sequence, shared, shared.cache.open())

    def stop(self, state: BlockState) -> None:
        state.shared.cache.close(state.slot)

    def read(self, states: Seq[BlockState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for state, own in zip(states, hidden, strict=True):
            state.waiting.append(own)

    def observe(self, states: Seq[BlockState], steps: Seq[Step]) -> None:
        self.read(states, [step.committed for step in steps])

    @torch.inference_mode()
    def propose(self, states: Seq[BlockState]) -> list[Draft]:
        active = [state for state in states if begin_block(state, self.num_speculative_tokens)]
        _feed_text([state for state in active if state.waiting])
        if active:
            grow_block(active, _fill(active))
        return [state.tree.finish() for state in states]


def _feed_text(behind: Seq[BlockState]) -> None:
    """Keys and values of what the target thinks of all places that wait."""
    texts = [_waited(state) for state in behind]
    for start in range(0, max((len(text) for text in texts), default=0), _CHUNK):
        late = [place for place, text in enumerate(texts) if len(text) > start]
        _feed_part(
            [behind[place] for place in late], [texts[place][start : start + _CHUNK] for place in late]
        )


def _waited(state: BlockState) -> Tensor:
    """The states of the places that waited, [n, layers x size]; none wait afterwards."""
    parts = [state.shared.module.joined(hidden) for hidden in state.waiting]
    state.waiting = []
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _feed_part(states: Seq[BlockState], texts: Seq[Tensor]) -> None:
    module, cache = states[0].shared.module, states[0].shared.cache
    fused = [module.fuse(text) for text in texts]
    forward = cache.begin(
        [Feed.text(state.slot, state.rows, len(rows)) for state, rows in zip(states, fused, strict=True)]
    )
    text = forward.pad(fused)
    angles = module.rotary(forward.positions, text)
    for place, layer in enumerate(module.layers):
        forward.store(place)(*layer.self_attn.keys(text, angles))
    forward.keep([len(rows) for rows in fused])
    for state, rows in zip(states, fused, strict=True):
        state.rows += len(rows)


def _fill(active: Seq[BlockState]) -> Tensor:
    """Logits [n, tokens, vocabulary] of the masked places; their rows leave the cache."""
    module, cache = active[0].shared.module, active[0].shared.cache
    width = 1 + module.config.tokens
    sees = np.ones((width, width), dtype=np.bool_)
    forward = cache.begin([Feed(state.slot, range(state.rows, state.rows + width), sees) for state in active])
    roots = torch.tensor([state.sequence.tokens[-1] for state in active], device=forward.positions.device)
    states = forward.pad(list(module.masked(roots)))
    angles = module.rotary(forward.positions, states)
    for place, layer in enumerate(module.layers):
        states = layer(states, angles, forward.mask, forward.store(place))
    forward.keep([0] * len(active))
    logits: Tensor = module.logits(torch.stack(forward.rows(states))[:, 1:])
    return logits
