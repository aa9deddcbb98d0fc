"""P-EAGLE (Hui et al. 2026): an EAGLE-3 that drafts all tokens in one forward.

The places that are not drafted yet have a mask's embedding in place of a token's, and a trained state in
place of the target's; each attends to the text and to the masks before it. Published drafters are read, in
the layouts of speculators and SpecForge.

Differences from the paper: what the places predict is drafted as the best tree of these marginals (DDTree),
with the target's own noise. The last place of the text is fed again with each block, so that its row, like
those of the masks, need not stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.drafters.eagle.eagle_module import EagleConfig, EagleModule
from outpace.drafters.support.blocks import BlockState, Places, ReadingBlockDrafter
from outpace.drafters.support.layer_cache import LayerFeed
from outpace.learned import published
from outpace.learned.formats import MASK_ENTRIES
from outpace.learned.learned import Fit
from outpace.learned.vocabulary import spread
from outpace.targets.base import TargetModel
from outpace.transfer import upload

_CHUNK = 512  # places of a text in one forward


class PEagleModule(Places, EagleModule):
    """EAGLE-3's layers, and what masked places read.

    Attributes:
        mask_hidden: the states that a mask has in place of the target's, [1, 1, layers x hidden size].
        mask_token: the token whose embedding a mask has.
    """

    method: ClassVar[str] = "peagle"
    mask_token: int

    def __init__(self, config: EagleConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.layers) * config.hidden_size))

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel) -> Self:
        """Load a published P-EAGLE, which may be a name on the hub."""
        place = published.find(folder, cls.method)
        described = published.read(place)
        if described is None:
            raise OutpaceError(f"peagle: there is no P-EAGLE's config.json in {place}; give a published one")
        return cls._load_published(place, described, target)

    def save(self, folder: str | Path) -> None:
        raise OutpaceError("peagle: a published drafter is not saved; keep its folder")

    @classmethod
    def _load_published(cls, folder: str | Path, described: Mapping[str, Any], target: TargetModel) -> Self:
        entries = ("mask_token_id", *MASK_ENTRIES)
        mask = next((described[name] for name in entries if described.get(name) is not None), None)
        if type(mask) is not int or not 0 <= mask < target.vocabulary:
            raise OutpaceError(
                f"peagle: the config.json in {folder} must have a mask_token_id below {target.vocabulary}, "
                f"not {mask!r}"
            )
        made = super()._load_published(folder, described, target)
        made.mask_token = mask
        return made

    def logits(self, states: Tensor) -> Tensor:
        return self.drafted_logits(states)

    def spread(self, logits: Tensor) -> Tensor:
        drafted = self.drafted
        return logits if drafted is None else spread(logits, drafted, self.fit.vocabulary)

    def masked(self) -> Tensor:
        """The feature of a masked place, [1, hidden size]."""
        return self.fused(list(self.mask_hidden[0].chunk(len(self.config.layers), dim=-1)))


@dataclass(frozen=True)
class PEagle(ReadingBlockDrafter):
    """P-EAGLE, an EAGLE-3 that drafts all tokens in one forward.

    Attributes:
        path: a published P-EAGLE (in the layout of speculators, or by SpecForge) by folder or hub name, or
            the module itself.
    """

    name: ClassVar[str] = "peagle"
    kind: ClassVar[type[Any]] = PEagleModule
    when: ClassVar[str] = "with a P-EAGLE drafter of your model, published"
    needs: ClassVar[str] = "its folder"
    paper: ClassVar[str] = (
        "Hui et al. 2026, P-EAGLE: Parallel-Drafting EAGLE with Scalable Training (arXiv 2602.01469)"
    )

    def ready(self, state: BlockState) -> bool:
        return bool(state.waiting)  # no state of the target is available before

    def fill(self, active: Seq[BlockState]) -> Tensor:
        for state in active:
            if len(state.waiting) > 1:
                layers = state.waiting[0]
                state.waiting = [
                    {layer: torch.cat([one[layer] for one in state.waiting]) for layer in layers}
                ]
        while behind := [state for state in active if _waiting(state) > _CHUNK]:
            _feed(behind, masks=0)
        return _feed(active, masks=active[0].shared.module.config.tokens - 1)


def _waiting(state: BlockState) -> int:
    """Number of places of the text that are not in the cache."""
    return len(next(iter(state.waiting[0].values())))


def _feed(active: Seq[BlockState], masks: int) -> Tensor:
    """Feed the next places of each text, followed by masks; the last place and the masks are dropped again.

    Returns:
        The outputs of that place and of the masks, [n, 1 + masks, hidden size].
    """
    module, cache = active[0].shared.module, active[0].shared.cache
    feeds, tokens, features, kept, masked = [], [], [], [], module.masked().expand(masks, -1)
    for state in active:
        (hidden,) = state.waiting
        width = min(_waiting(state), _CHUNK)
        text = state.sequence.tokens[state.rows + 1 : state.rows + 1 + width]
        own = module.features({layer: rows[:width] for layer, rows in hidden.items()})
        feeds.append(LayerFeed.text(state.slot, state.rows, width + masks))
        tokens.append(upload([*text, *[module.mask_token] * masks], own.device))
        features.append(torch.cat([own, masked]))
        kept.append(width - 1)
        state.waiting = [{layer: rows[width - 1 :] for layer, rows in hidden.items()}]
        state.rows += width - 1
    forward = cache.begin(feeds)
    outputs = module.advance(
        forward.pad(tokens), forward.pad(features), forward.positions, forward.mask, forward.store
    )
    forward.keep(kept)
    return torch.stack([rows[-1 - masks :] for rows in forward.rows(outputs)])
