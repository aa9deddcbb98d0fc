"""Contrastive decoding as a target: an expert's logits contrasted with an amateur's (Li et al. 2022).

The contrast is a function of two rows of logits, so it is made where logits are made: this target runs both
models over the same rows, so all that decodes with a target decodes contrastively, with every drafter and
verifier. Plain contrastive decoding is the drafter that proposes nothing; speculative contrastive decoding
(Yuan et al. 2023, arXiv 2311.08981, section 3) is ``DraftModel(amateur)``: the amateur drafts, the contrast
decides.

Differences from Yuan et al.: they keep the amateur's logits from drafting, and run it once more, over the
last drafted token, for the bonus token's. Here drafting and contrasting know nothing of each other, and the
contrast's own forward of the amateur is over the whole draft. With K drafted tokens both make K + 1 forwards
of the amateur and one of the expert; theirs can spare one in steps that reject a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.cache import Cache, CacheFull, Slot
from outpace.core import PROMISES, OutpaceError, Promise, UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.base import TargetModel, checked_cache
from outpace.targets.batch import Batch
from outpace.targets.rows import Output


class PairCache(Cache):
    """The expert's cache and the amateur's, to which all changes apply alike.

    A slot is the expert's; ``beside`` maps it to the amateur's. A row is one of each.

    Args:
        expert, amateur: empty caches, made with the same arguments.
    """

    def __init__(self, expert: Cache, amateur: Cache) -> None:
        self.expert = expert
        self.amateur = amateur
        self.beside: dict[Slot, Slot] = {}
        self.static = expert.static
        self.copies_rows = expert.copies_rows and amateur.copies_rows
        self.max_slots, self.max_length = expert.max_slots, expert.max_length
        self.capacity = expert.capacity

    def __len__(self) -> int:
        return len(self.expert)

    @property
    def reserved(self) -> int:
        return max(self.expert.reserved, self.amateur.reserved)

    @property
    def row_bytes(self) -> int:
        return self.expert.row_bytes + self.amateur.row_bytes

    @property
    def bytes(self) -> int:
        return self.expert.bytes + self.amateur.bytes

    def cost(self, rows: int) -> int:
        return max(self.expert.cost(rows), self.amateur.cost(rows))

    def allocate(self, rows: int = 0) -> Slot:
        slot = self.expert.allocate(rows)
        try:
            self.beside[slot] = self.amateur.allocate(rows)
        except CacheFull:
            self.expert.free(slot)
            raise
        return slot

    def free(self, slot: Slot) -> None:
        self.expert.free(slot)
        self.amateur.free(self.beside.pop(slot))

    def length(self, slot: Slot) -> int:
        return self.expert.length(slot)

    def room(self, slot: Slot) -> int:
        return min(self.expert.room(slot), self.amateur.room(self.beside[slot]))

    def reserve(self, slot: Slot, rows: int) -> None:
        self.expert.reserve(slot, rows)
        self.amateur.reserve(self.beside[slot], rows)

    def truncate(self, slot: Slot, length: int, path: Sequence[int] = ()) -> None:
        self.expert.truncate(slot, length, path)
        self.amateur.truncate(self.beside[slot], length, path)

    def keep(self, paths: Mapping[Slot, Sequence[int]]) -> None:
        self.expert.keep(paths)
        self.amateur.keep({self.beside[slot]: path for slot, path in paths.items()})

    @contextmanager
    def provisional(self, ahead: Mapping[Slot, int] | None = None) -> Iterator[None]:
        theirs = None if ahead is None else {self.beside[slot]: rows for slot, rows in ahead.items()}
        with self.expert.provisional(ahead), self.amateur.provisional(theirs):
            yield

    def read_rows(self, slot: Slot, start: int, stop: int) -> tuple[Any, Any]:
        return (
            self.expert.read_rows(slot, start, stop),
            self.amateur.read_rows(self.beside[slot], start, stop),
        )

    def write_rows(self, slot: Slot, block: Any) -> None:
        self.expert.write_rows(slot, block[0])
        self.amateur.write_rows(self.beside[slot], block[1])


class ContrastiveTarget(AroundTarget):
    """Two models over the same text, with one's logits contrasted with the other's.

    Where e and a are the two models' logits, a token's logit is (1 + beta) e - beta a if the expert finds it
    at least alpha times as probable as its most probable token, otherwise -inf (Li et al. 2022, arXiv
    2210.15097, section 3, with the strength beta of O'Brien and Lewis 2023, arXiv 2309.09117, and of Yuan et
    al. 2023).
    All sampling parameters apply to the contrasted logits. Hidden states, embeddings, head and
    end-of-sequence tokens are the expert's, so a drafter that was trained for the expert drafts for the pair.

    Args:
        expert: the stronger model.
        amateur: a weaker model with the same vocabulary.
        alpha: plausibility, above 0 and at most 1.
        beta: strength of the contrast, at least 0; 0 keeps the expert's logits.

    Raises:
        OutpaceError: the models do not fit together, or a value is out of range.
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
        if empty[0].static != empty[1].static:
            raise OutpaceError("make both targets with static=True, or neither")
        self.wrap(expert)
        self.expert, self.amateur = expert, amateur
        self.alpha = alpha
        self.beta = beta
        contexts = [model.context for model in (expert, amateur) if model.context is not None]
        self.context = min(contexts, default=None)
        leaves = [model.max_leaves for model in (expert, amateur) if model.max_leaves is not None]
        self.max_leaves = min(leaves, default=None)
        why = expert.why_inexact or (amateur.why_inexact and f"the amateur: {amateur.why_inexact}")
        exact = expert.bit_exact and amateur.bit_exact
        self.plan = replace(expert.plan, exact=exact, why_inexact=why)
        self.prompts_differ = expert.prompts_differ or amateur.prompts_differ
        self.why_chains_only = expert.why_chains_only or amateur.why_chains_only

    @property
    def promise(self) -> Promise:
        return max(self.expert.promise, self.amateur.promise, key=PROMISES.index)

    @property
    def identity(self) -> str:
        return f"{self.expert.identity} against {self.amateur.identity}"

    def revision(self) -> int:
        return self.expert.revision() + self.amateur.revision()

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> PairCache:
        caches = [model.new_cache(slots, length, capacity) for model in (self.expert, self.amateur)]
        return PairCache(*caches)

    @torch.inference_mode()
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        pair = checked_cache(self, cache, PairCache)
        expert = self.expert.forward(pair.expert, batch, hidden_layers)
        theirs = replace(batch, slots=tuple(pair.beside[slot] for slot in batch.slots))
        amateur = self.amateur.forward(pair.amateur, theirs)
        if expert.logits is None:
            return expert
        # The two caches may have their slots in different orders.
        beside = torch.cat([amateur.logits_of(pair.beside[slot]) for slot in expert.spans])
        logits = contrast(expert.logits, beside, self.alpha, self.beta)
        return Output(logits, expert.spans, expert.hidden)


def contrast(expert: Tensor, amateur: Tensor, alpha: float, beta: float) -> Tensor:
    """Contrasted logits of rows of logits [..., vocabulary], at least float32."""
    dtype = torch.promote_types(expert.dtype, torch.float32)
    expert = expert.to(dtype)
    implausible = expert < expert.amax(dim=-1, keepdim=True) + math.log(alpha)
    scores = (1 + beta) * expert - beta * amateur.to(expert)
    return scores.masked_fill(implausible, -math.inf)
