"""Contrastive decoding as a target: an expert's logits held against an amateur's (Li et al. 2022).

The contrast is a function of two rows of logits, so it is made where logits are made: this target runs both
models over the same rows, and whatever decodes with a target decodes contrastively, with every drafter and
verifier. Plain contrastive decoding is the drafter that proposes nothing; speculative contrastive decoding
(Yuan et al. 2023, arXiv 2311.08981, section 3) is ``DraftModel(amateur)``: the amateur drafts, the contrast
decides.

What differs from Yuan et al.: they keep the amateur's logits from drafting, and run it once more, over the
last drafted token, for the bonus token's. Here drafting and contrasting know nothing of each other, and the
contrast's own forward of the amateur is over the whole draft. With K drafted tokens both make K + 1 forwards
of the amateur and one of the expert; theirs can spare one in steps that reject a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.cache import KVCache, Slot
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.base import Output, Rows, TargetModel


class PairCache(KVCache):
    """The expert's rows. ``amateur``, the other model's cache, goes through every change with it.

    Args:
        like: an empty cache of the expert's; this one has its shapes.
        amateur: an empty cache of as many slots and rows.
    """

    def __init__(self, like: KVCache, amateur: KVCache) -> None:
        super().__init__(like.layers, like.slots, like.length, like.static)
        self.amateur = amateur
        self._beside: dict[Slot, Slot] = {}

    def allocate(self) -> Slot:
        slot = super().allocate()
        self._beside[slot] = self.amateur.allocate()
        return slot

    def free(self, slot: Slot) -> None:
        super().free(slot)
        self.amateur.free(self._beside.pop(slot))

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        super().truncate(slot, length, path)
        self.amateur.truncate(self._beside[slot], length, path)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        super().keep(paths)
        self.amateur.keep(paths)


class ContrastiveTarget(AroundTarget):
    """Two models over the same text, the one's logits held against the other's.

    Where e and a are the two models' logits, a token's logit is (1 + beta) e - beta a if the expert finds it
    at least alpha times as probable as its most probable token, else -inf (Li et al. 2022, arXiv 2210.15097,
    section 3, with the strength beta of O'Brien and Lewis 2023, arXiv 2309.09117, and of Yuan et al. 2023).
    All sampling parameters apply to the contrasted logits. Hidden states, embeddings, head and
    end-of-sequence tokens are the expert's, so a drafter that was trained for the expert drafts for the pair.

    Args:
        expert: the model whose answer is wanted.
        amateur: a weaker one with the same vocabulary.
        alpha: plausibility, above 0 and at most 1.
        beta: strength of the contrast, at least 0; 0 leaves the expert's logits, save the implausible.

    Raises:
        OutpaceError: the two do not fit each other, or a value is out of its range.
    """

    def __init__(
        self, expert: TargetModel, amateur: TargetModel, alpha: float = 0.1, beta: float = 0.5
    ) -> None:
        if not 0 < alpha <= 1:
            raise OutpaceError(f"alpha must be above 0 and at most 1, not {alpha}")
        if not 0 <= beta < math.inf:
            raise OutpaceError(f"beta must be a finite number of at least 0, not {beta}")
        if expert.has_encoder or amateur.has_encoder:
            raise UnsupportedModel(
                "expert and amateur must be decoder-only models: no slot of the pair has a source; decode an "
                "encoder-decoder model by itself, with outpace.Engine(model, drafter)"
            )
        if expert.vocabulary != amateur.vocabulary:
            raise OutpaceError(
                f"the expert has {expert.vocabulary} token ids and the amateur {amateur.vocabulary}; "
                "they need the same vocabulary"
            )
        empty = [model.new_cache(1, 1) for model in (expert, amateur)]
        if any(type(cache) is not KVCache for cache in empty):
            raise UnsupportedModel("expert and amateur must be models of one cache each, not pairs again")
        if empty[0].static != empty[1].static:
            raise OutpaceError("make both targets with static=True, or neither")
        self.expert = self.inner = expert
        self.amateur = amateur
        self.alpha = alpha
        self.beta = beta
        self.vocabulary = expert.vocabulary
        contexts = [model.context for model in (expert, amateur) if model.context is not None]
        self.context = min(contexts, default=None)
        self.eos_token_ids = expert.eos_token_ids

    @property
    def model(self) -> Any:
        """The expert's model, for drafters that load or build one like it."""
        return getattr(self.expert, "model", None)

    @property
    def identity(self) -> str:
        return f"{self.expert.identity} against {self.amateur.identity}"

    def new_cache(self, slots: int = 1, length: int = 256) -> PairCache:
        return PairCache(self.expert.new_cache(slots, length), self.amateur.new_cache(slots, length))

    @torch.inference_mode()
    def forward(
        self,
        cache: KVCache,
        rows: Sequence[Rows],
        first: int = 0,
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        if not isinstance(cache, PairCache):
            raise OutpaceError("a contrastive target needs a cache of its own: target.new_cache()")
        expert = self.expert.forward(cache, rows, first, logits_from, hidden_layers)
        amateur = self.amateur.forward(cache.amateur, rows, first, logits_from)
        if expert.logits is None or amateur.logits is None:
            return Output(None, expert.hidden)
        return Output(contrast(expert.logits, amateur.logits, self.alpha, self.beta), expert.hidden)


def contrast(expert: Tensor, amateur: Tensor, alpha: float, beta: float) -> Tensor:
    """Contrasted logits, at least float32, of rows of logits [..., vocabulary]."""
    dtype = torch.promote_types(expert.dtype, torch.float32)
    expert = expert.to(dtype)
    implausible = expert < expert.amax(dim=-1, keepdim=True) + math.log(alpha)
    scores = (1 + beta) * expert - beta * amateur.to(expert)
    return scores.masked_fill(implausible, -math.inf)
