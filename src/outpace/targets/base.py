"""What the engine needs of a target: a cache, a forward, a context length, a vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from outpace.cache import KVCache, Slot
from outpace.core import Draft, OutpaceError, Source, UnsupportedModel
from outpace.targets.hardware import hardware


@dataclass(frozen=True)
class Rows:
    """What one sequence feeds to a forward: tokens, and the tree they form over its committed rows.

    ``parents`` is in rows: -1 hangs under the last committed row. None is a chain.

    A tree may go in over several forwards, if each is kept whole. ``fed`` are then the parents of its rows so
    far, the last ones committed; a parent counts from the tree's first row, and -1 is the row before that.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    fed: Sequence[int] = ()

    @property
    def tree(self) -> Sequence[int]:
        """Parents of all rows of the tree: those of ``fed``, then those of ``tokens``."""
        if self.parents is None:
            return range(-1, len(self.tokens) - 1)
        return [*self.fed, *self.parents] if self.fed else self.parents

    def __post_init__(self) -> None:
        if self.fed and self.parents is None:
            raise ValueError("rows that go on with a tree need their parents")

    @classmethod
    def under(cls, text: Sequence[int], draft: Draft) -> Rows:
        """A chain of text, its last token the root, and the draft under it."""
        root = len(text) - 1
        parents = (*range(-1, root), *(root + 1 + parent for parent in draft.parents))
        return cls((*text, *draft.tokens), parents)


def rows_of(slots: Sequence[Slot], feeds: Sequence[Rows]) -> tuple[int, list[Rows]]:
    """What a forward over some slots, in any order, is given: the first of them, and rows from it on.

    Slots between them feed nothing.
    """
    first = min(slot.index for slot in slots)
    rows = [Rows(())] * (max(slot.index for slot in slots) - first + 1)
    for slot, feed in zip(slots, feeds, strict=True):
        rows[slot.index - first] = feed
    return first, rows


def extra_rows(embeddings: Tensor, table: Tensor | int) -> Tensor:
    """A table of embeddings beside a model's own, [vocabulary, hidden size].

    One that is given is not copied, so that what it learns later is seen.

    Raises:
        OutpaceError: the table is of another size.
    """
    if isinstance(table, int):
        return embeddings.detach().mean(dim=0, keepdim=True).repeat(table, 1)
    if table.dim() != 2 or table.shape[1] != embeddings.shape[1]:
        raise OutpaceError(
            f"a table of embeddings for this model is [n, {embeddings.shape[1]}], not {list(table.shape)}"
        )
    return table.detach()


@dataclass(frozen=True)
class Output:
    """What a model says to the rows of a forward.

    Attributes:
        logits: [B, width - logits_from, vocabulary]; rows past a sequence's own are padding. None where none
            were wanted.
        hidden: layer -> [B, width, hidden size], the layers asked for. Layer 0 is the embeddings, layer i
            what comes out of the i-th block, -1 the input of the head (transformers' ``hidden_states``).

    Both may be made in inference mode; to train on them, clone them.
    """

    logits: Tensor | None
    hidden: dict[int, Tensor]

    def hidden_of(self, place: int, first: int, count: int) -> dict[int, Tensor]:
        """Of one sequence: layer -> [count, hidden size], its rows from ``first`` on."""
        return {layer: states[place, first : first + count] for layer, states in self.hidden.items()}


@dataclass(frozen=True)
class HiddenStates:
    """What a target's hidden states are like."""

    size: int
    dtype: torch.dtype
    device: torch.device


class TargetModel(ABC):
    """A model that can verify drafts.

    Attributes:
        vocabulary: number of token ids.
        context: positions it was made for; None for no limit.
        eos_token_ids: tokens that end a sequence.
        start: what the prompt of an encoder-decoder model begins with, if the model says.
        device: where its tokens go in; the CPU unless it says.
        extra: number of ids past the vocabulary that it takes; see ``with_embeddings``.

    Class attributes:
        has_encoder: a text is decoded from a source besides its prompt.
    """

    has_encoder: ClassVar[bool] = False

    vocabulary: int
    context: int | None
    eos_token_ids: frozenset[int]
    start: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")
    extra: int = 0

    @property
    def layers(self) -> int:
        """How many layers it has, as ``Output.hidden`` and ``some_layers`` count them.

        Raises:
            OutpaceError: it does not say.
        """
        raise OutpaceError(
            f"{_kind(self)} does not say how many layers it has; name those to read, or use another drafter"
        )

    @property
    def identity(self) -> str:
        """What the seconds of its forwards depend on: architecture, size, dtype, device by name, threads."""
        model = getattr(self, "model", None)
        if not isinstance(model, Module):
            return f"{type(self).__name__}, {self.vocabulary} token ids"
        weights = list(model.parameters())
        devices = {weight.device for weight in weights}
        places = [*sorted(map(str, devices)), *hardware(devices)]
        dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
        numbers = sum(weight.numel() for weight in weights)
        return ", ".join([type(model).__name__, f"{numbers} parameters", *dtypes, *places])

    @abstractmethod
    def new_cache(self, slots: int = 1, length: int = 256) -> KVCache:
        """A cache for this model: room for ``slots`` sequences of ``length`` rows (it grows)."""

    @property
    def hidden(self) -> HiddenStates:
        """What its hidden states are like.

        Raises:
            OutpaceError: it does not share them.
        """
        raise OutpaceError(f"{_kind(self)} shares no hidden states; use a drafter without trained parts")

    def embed(self, tokens: Tensor) -> Tensor:
        """Its embeddings of token ids: [...] -> [..., hidden size]. Gradients do not reach its weights.

        Raises:
            OutpaceError: it does not share them.
        """
        raise OutpaceError(f"{_kind(self)} shares no embeddings; use a drafter without trained parts")

    def head(self, states: Tensor) -> Tensor:
        """Logits of what comes out of its last layer: [..., hidden size] -> [..., vocabulary].

        Gradients go through to the states, where the caller's mode records them.

        Raises:
            OutpaceError: it does not share its head.
        """
        raise OutpaceError(f"{_kind(self)} shares no head; use a drafter without trained parts")

    def through(
        self,
        states: Tensor,
        positions: Tensor,
        seen: Tensor,
        hidden_layers: Sequence[int] = (),
        weights: Mapping[str, Tensor] | None = None,
    ) -> Output:
        """A forward without a cache, through which gradients reach what goes in.

        Args:
            states: what goes into the first layer, [B, N, hidden size].
            positions: [B, N].
            seen: which rows each row sees, [B, N, N], boolean.
            hidden_layers: which hidden states to return.
            weights: by name, in place of the model's own; gradients reach these too.

        Raises:
            OutpaceError: the target cannot be trained through.
        """
        raise OutpaceError(f"{_kind(self)} cannot be trained through; use another method")

    def read(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of a forward without a cache, through which gradients reach its weights.

        Args:
            tokens, positions: [B, N].
            seen: which rows each row sees, [B, N, N], boolean.

        Raises:
            OutpaceError: the target cannot be trained.
        """
        raise OutpaceError(f"{_kind(self)} cannot be trained; use a transformers model")

    def encode(self, source: Any) -> Source | None:
        """What a request gives besides its prompt, checked and encoded. None where there is nothing.

        Raises:
            OutpaceError: a source for a model without an encoder, none for a model with one, or a wrong one.
        """
        if source is not None:
            raise OutpaceError("this model has no encoder and takes no source; put the text into the prompt")
        return None

    def open(self, cache: KVCache, source: Source | None = None) -> Slot:
        """Take a slot of the cache into use for a sequence that is decoded from a source.

        ``cache.free(slot)`` gives it back; what the source put there moves with the slot.
        """
        return cache.allocate()

    def some_layers(self, layers: Sequence[int]) -> TargetModel:
        """This model with some of its layers only, counted from 0, in their order.

        It shares the weights, and runs on caches of this target: its rows lie in those layers, and it reads
        the rows that all layers together made.

        Raises:
            OutpaceError: a layer that is not there. UnsupportedModel: the model is no plain stack of layers.
        """
        raise UnsupportedModel(
            f"a {type(self).__name__} is no plain stack of layers, so none of them can be left out; use "
            "another drafter"
        )

    def with_embeddings(self, table: Tensor | int) -> TargetModel:
        """This model, which also takes token ids past its vocabulary: rows of a table of embeddings.

        Id ``vocabulary + i`` is row i. All else is the model's own, and it runs on caches of this target.

        Args:
            table: [n, hidden size], read anew in each forward; a number for so many copies of the mean of
                the model's embeddings.

        Raises:
            OutpaceError: a table of another size. UnsupportedModel: the model does not take embeddings.
        """
        raise UnsupportedModel(
            f"a {type(self).__name__} takes no embeddings in place of token ids; use another drafter"
        )

    @abstractmethod
    def forward(
        self,
        cache: KVCache,
        rows: Sequence[Rows],
        first: int = 0,
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """One forward over slots first .. first + len(rows) - 1 of the cache.

        The new rows lie behind the committed ones until ``cache.keep`` decides about them.

        Args:
            rows: what each sequence feeds; at least one of them at least one token.
            logits_from: the first row whose logits are wanted; None wants none (prefill).
            hidden_layers: which hidden states to return.

        Raises:
            OutpaceError: a static cache has no room for the rows.
        """


def _kind(target: TargetModel) -> str:
    return f"a target of the class {type(target).__name__}"
