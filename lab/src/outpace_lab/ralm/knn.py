"""KNN-LM as a target: a model's probabilities mixed with those of the nearest neighbours of its state.

Khandelwal et al. 2020, Generalization through Memorization: Nearest Neighbor Language Models (arXiv
1911.00172), section 2. The mixture is made where logits are made, so every drafter drafts for it and every
verifier verifies it. Plain KNN-LM searches once per token; a step with a draft searches once for all of its
rows, which is what RaLMSpec's batched verification gains (Zhang et al. 2024, arXiv 2401.14021).

Differences: a key is the input of the model's head, where the paper takes that of the last feed-forward
layer; the search is exact. RaLMSpec predicts the datastore's answers by a cache of entries next to
those found before; here tokens are drafted, by any drafter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import Self

from outpace.cache import Cache
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.around import AroundTarget
from outpace.targets.base import TargetModel
from outpace.targets.batch import Batch
from outpace.targets.rows import Output


@dataclass(frozen=True)
class KnnStore:
    """States of a model at places of texts, and the token after each.

    Attributes:
        keys: [entries, hidden size], at least float32: differences of distances are far smaller than states.
        tokens: [entries].
    """

    keys: Tensor
    tokens: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, target: TargetModel, texts: Seq[Seq[int]], length: int = 256) -> Self:
        """Make a store of texts, given as token ids; pieces of ``length`` tokens are read by themselves.

        Raises:
            OutpaceError: no text has two tokens, or the target shares no hidden states.
        """
        keys: list[Tensor] = []
        tokens: list[int] = []
        for piece in (text[at : at + length] for text in texts for at in range(0, len(text) - 1, length)):
            if len(piece) < 2:
                continue
            cache = target.new_cache(1, len(piece))
            slot = target.open(cache)
            output = target.forward(cache, Batch.of({slot: list(piece[:-1])}, None), (-1,))
            states = output.hidden_of(slot, 0, len(piece) - 1)[-1]
            keys.append(states.to(torch.promote_types(states.dtype, torch.float32), copy=True))
            tokens += piece[1:]
        if not tokens:
            raise OutpaceError("a datastore of neighbours needs texts of at least two tokens")
        return cls(torch.cat(keys), torch.tensor(tokens, device=keys[0].device))

    @cached_property
    def _squares(self) -> Tensor:
        return self.keys.square().sum(dim=1)

    def search(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The nearest entries of each state [n, hidden size]: squared distances and tokens, [n, count]."""
        near = (self._squares - 2 * states @ self.keys.T).topk(count, largest=False)
        return near.values + states.square().sum(dim=1, keepdim=True), self.tokens[near.indices]


class KnnTarget(AroundTarget):
    """A model whose next-token probabilities are mixed with its neighbours'.

    A token's probability is (1 - weight) p + weight q, with p the model's, and q the softmax of the negative
    squared distances of the nearest entries, over ``temperature``, summed by their tokens. Sampling
    parameters apply to the mixture. Hidden states, embeddings and head are the model's, so a drafter that was
    trained for it drafts for the mixture.

    Args:
        inner: the model; not an encoder-decoder.
        store: made with it.
        neighbours: number of entries, at least 1.
        weight: at least 0 and below 1.
        temperature: above 0 and finite, in units of squared distance.

    Raises:
        OutpaceError: store and model do not fit together, or a value is out of range.
    """

    def __init__(
        self,
        inner: TargetModel,
        store: KnnStore,
        neighbours: int = 16,
        weight: float = 0.25,
        temperature: float = 1.0,
    ) -> None:
        if inner.has_encoder or inner.tells:
            raise UnsupportedModel("KnnTarget takes a decoder-only model in one process")
        if store.keys.shape[1] != inner.hidden.size:
            raise OutpaceError(
                f"the datastore's keys have {store.keys.shape[1]} numbers and the model's states "
                f"{inner.hidden.size}; make it with this model"
            )
        if not 1 <= neighbours <= len(store.tokens):
            raise OutpaceError(f"neighbours must be from 1 to {len(store.tokens)}, not {neighbours}")
        if not 0 <= weight < 1:
            raise OutpaceError(f"weight must be at least 0 and below 1, not {weight}")
        if not 0 < temperature < math.inf:
            raise OutpaceError(f"temperature must be above 0 and finite, not {temperature}")
        self.wrap(inner)
        self.plan = replace(inner.plan, exact=False, why_inexact="several rows are searched together")
        self.store, self.neighbours, self.weight, self.temperature = store, neighbours, weight, temperature

    @property
    def identity(self) -> str:
        return f"{self.inner.identity} with {self.neighbours} of {len(self.store.tokens)} neighbours"

    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Cache:
        return self.inner.new_cache(slots, length, capacity)

    @torch.inference_mode()
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        hidden_layers: Seq[int] = (),
    ) -> Output:
        if not len(batch.read):
            return self.inner.forward(cache, batch, hidden_layers)
        output = self.inner.forward(cache, batch, tuple(sorted({*hidden_layers, -1})))
        if output.logits is None:
            return output
        states = [output.hidden[slot][-1][torch.from_numpy(batch.reads[slot])] for slot in output.spans]
        return Output(self._mixed(output.logits, torch.cat(states)), output.spans, output.hidden)

    def _mixed(self, logits: Tensor, states: Tensor) -> Tensor:
        """The logarithms of the mixture's probabilities, [n, vocabulary], at least float32."""
        near, tokens = self.store.search(states.to(self.store.keys), self.neighbours)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        mixed = (1 - self.weight) * logits.to(dtype).softmax(dim=-1)
        own = self.weight * (-near.to(mixed) / self.temperature).softmax(dim=-1)
        return mixed.scatter_add_(1, tokens.to(mixed.device), own).log()
