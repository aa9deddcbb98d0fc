"""The contract of a target: a cache, a forward, a context length, a vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from outpace.cache import Cache, Slot
from outpace.choosing import Told, Tree
from outpace.core import Draft, OutpaceError, Source, UnsupportedModel
from outpace.targets.hardware import hardware


@dataclass(frozen=True)
class Rows:
    """Input of one sequence to a forward: tokens, and the tree they form over its committed rows.

    ``parents`` is in rows: -1 hangs under the last committed row. None is a chain.

    A tree may go in over several forwards, if each is kept whole. ``fed`` are then the parents of its rows so
    far, the last ones committed; a parent counts from the tree's first row, and -1 is the row before that.

    ``asked`` is what a target that ``tells`` is asked for: its tokens after these nodes. (Of no use is its
    ``first``.)
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    fed: Sequence[int] = ()
    asked: Tree | None = None

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
    def under(cls, text: Sequence[int], draft: Draft, asked: Tree | None = None) -> Rows:
        """A chain of text, its last token the root, and the draft under it."""
        root = len(text) - 1
        parents = (*range(-1, root), *(root + 1 + parent for parent in draft.parents))
        return cls((*text, *draft.tokens), parents, asked=asked)


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
    """Predictions of a model for the rows of a forward; valid until the next forward.

    Attributes:
        logits: [N, vocabulary], all wanted rows of all slots in one line, without padding. None where none
            were wanted.
        spans: slot -> where its rows lie in ``logits``, in the order there.
        hidden: slot -> layer -> [width, hidden size], of the layers asked for. Layer 0 is the embeddings,
            layer i what comes out of the i-th block, -1 the input of the head (transformers'
            ``hidden_states``). Rows past those that the slot fed are padding.
        told: slot -> the target's tokens, of one that ``tells``; its logits are None.

    Both may be made in inference mode; to train on them, clone them.
    """

    logits: Tensor | None
    spans: Mapping[Slot, slice]
    hidden: Mapping[Slot, Mapping[int, Tensor]] = field(default_factory=dict)
    told: Mapping[Slot, Told] = field(default_factory=dict)

    def span(self, slot: Slot) -> slice:
        """Range of a slot's rows in ``logits``."""
        return self.spans[slot]

    def logits_of(self, slot: Slot) -> Tensor:
        """[n, vocabulary], of a slot's wanted rows.

        Raises:
            ValueError: none were wanted.
        """
        if self.logits is None:
            raise ValueError("no logits were wanted of this forward")
        return self.logits[self.spans[slot]]

    def hidden_of(self, slot: Slot, first: int, count: int) -> dict[int, Tensor]:
        """Hidden states of a slot's rows first .. first + count - 1: layer -> [count, hidden size]."""
        return {layer: states[first : first + count] for layer, states in self.hidden.get(slot, {}).items()}

    @classmethod
    def of(
        cls,
        slots: Sequence[Slot | None],
        feeds: Mapping[Slot, Rows],
        logits: Tensor | None,
        logits_from: int | None,
        hidden: Mapping[int, Tensor],
    ) -> Output:
        """Outputs of a padded forward, [B, ...], in the order of ``slots``, of which some feed nothing.

        Args:
            logits: [B, width - logits_from, vocabulary]; or None.
            hidden: layer -> [B, width, hidden size].
        """
        states: dict[Slot, dict[int, Tensor]] = {}
        spans: dict[Slot, slice] = {}
        parts, end = [], 0
        for place, slot in enumerate(slots):
            if slot is None or slot not in feeds:
                continue
            if hidden:
                states[slot] = {layer: rows[place] for layer, rows in hidden.items()}
            if logits is not None and logits_from is not None:
                count = max(len(feeds[slot].tokens) - logits_from, 0)
                spans[slot] = slice(end, end + count)
                end += count
                parts.append(logits[place, :count])
        if logits is None or logits_from is None:
            return cls(None, {}, states)
        # One slot's rows need no copy, nor do those of all slots without padding.
        whole = end == logits.shape[0] * logits.shape[1]
        line = parts[0] if len(parts) == 1 else logits.flatten(0, 1) if whole else torch.cat(parts)
        # Draws are made in float64, which MPS lacks.
        return cls(line.cpu() if line.device.type == "mps" else line, spans, states)

    @classmethod
    def join(cls, outputs: Sequence[Output]) -> Output:
        """Outputs over different slots as one."""
        if len(outputs) == 1:
            return outputs[0]
        logits = [output.logits for output in outputs if output.logits is not None]
        spans: dict[Slot, slice] = {}
        offset = 0
        for output in outputs:
            for slot, span in output.spans.items():
                spans[slot] = slice(offset + span.start, offset + span.stop)
            offset += 0 if output.logits is None else len(output.logits)
        hidden = {slot: states for output in outputs for slot, states in output.hidden.items()}
        return cls(torch.cat(logits) if logits else None, spans, hidden)


class Reading(NamedTuple):
    """Outputs of a forward without a cache.

    Attributes:
        logits: [B, N, vocabulary].
        hidden: layer -> [B, N, hidden size], as in ``Output``.
    """

    logits: Tensor
    hidden: dict[int, Tensor]


@dataclass(frozen=True)
class HiddenStates:
    """Size, dtype and device of a target's hidden states."""

    size: int
    dtype: torch.dtype
    device: torch.device


class TargetModel(ABC):
    """A model that can verify drafts.

    Attributes:
        vocabulary: number of token ids.
        context: positions it was made for; None for no limit.
        eos_token_ids: tokens that end a sequence.
        start: tokens that the prompt of an encoder-decoder model begins with, if its config has them.
        model: the transformers model that it is made of; None where there is none.
        device: where its tokens go in; the CPU by default.
        extra: number of ids past the vocabulary that it takes; see ``with_embeddings``.
        row_step: the rows of a forward are padded to a multiple of this.
        bit_exact: the logits of a row are the same to the last bit in plain decoding and in a forward with
            any number of rows, any tree, any other sequences, and after any chunks of the prompt.
        inexact: why it is not bit-exact; empty if it is.
        packed: kernel -> linear layers whose weights it reads in a layout made for it.
        max_leaves: most leaves that the drafts of a forward may have, those of all sequences together; None
            for no limit.
        tokenizer: the one that comes with the model, if one does.
        tells: it answers with the target's own tokens at ``Rows.asked``, and with no logits.

    Class attributes:
        has_encoder: a text is decoded from a source besides its prompt.
    """

    has_encoder: ClassVar[bool] = False

    vocabulary: int
    context: int | None
    eos_token_ids: frozenset[int]
    start: tuple[int, ...] = ()
    model: Any = None
    device: torch.device = torch.device("cpu")
    extra: int = 0
    row_step: int = 1
    bit_exact: bool = False
    inexact: str = "not tested"
    packed: Mapping[str, int] = MappingProxyType({})
    max_leaves: int | None = None
    tokenizer: Any = None
    tells: bool = False

    @property
    def name(self) -> str:
        """The model's name or path; without one, its class."""
        if self.model is None:
            return type(self).__name__
        return str(self.model.name_or_path or type(self.model).__name__)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its weights and logits; float32 where there is no model."""
        dtype: torch.dtype = torch.float32 if self.model is None else self.model.dtype
        return dtype

    @property
    def layers(self) -> int:
        """Number of layers, as ``Output.hidden`` and ``some_layers`` count them.

        Raises:
            OutpaceError: the number is not known.
        """
        raise OutpaceError(
            f"{_kind(self)} does not say how many layers it has; name those to read, or use another drafter"
        )

    @property
    def identity(self) -> str:
        """Architecture, size, dtype, device and threads, by name: what the seconds of a forward depend on."""
        model = self.model
        if model is None:
            return f"{type(self).__name__}, {self.vocabulary} token ids"
        weights = list(model.parameters())
        devices = {weight.device for weight in weights}
        places = [*sorted(map(str, devices)), *hardware(devices)]
        dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
        numbers = sum(weight.numel() for weight in weights)
        return ", ".join([type(model).__name__, f"{numbers} parameters", *dtypes, *places])

    @abstractmethod
    def new_cache(self, slots: int = 1, length: int = 256, capacity: int | None = None) -> Cache:
        """A cache for this model.

        Args:
            slots: sequences to make room for.
            length: rows to make room for in each; slots and rows grow, unless the cache is static.
            capacity: rows that it may reserve in all; None for no limit.
        """

    @property
    def hidden(self) -> HiddenStates:
        """Size, dtype and device of its hidden states.

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
    ) -> Reading:
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
        """The source of a request, checked and encoded; None where there is none.

        Raises:
            OutpaceError: a source for a model without an encoder, none for a model with one, or a wrong one.
        """
        if source is not None:
            raise OutpaceError("this model has no encoder and takes no source; put the text into the prompt")
        return None

    def open(self, cache: Cache, source: Source | None = None, rows: int = 0) -> Slot:
        """Take a slot of the cache into use for a sequence that is decoded from a source.

        ``cache.free(slot)`` gives it back, with what the source put there.

        Args:
            cache: one that ``new_cache`` made.
            rows: rows to make room for; 0 for as many as the cache was made for.

        Raises:
            CacheFull: too few rows are left.
        """
        return cache.allocate(rows)

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
            table: [n, hidden size], read anew in each forward; or a number n: n copies of the mean of
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
        cache: Cache,
        feeds: Mapping[Slot, Rows],
        logits_from: int | None = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """One step of some slots of a cache that ``new_cache`` made.

        The new rows lie behind the committed ones until ``cache.keep`` closes the forward.

        Args:
            feeds: what each slot feeds; at least one of them at least one token.
            logits_from: the first row of each slot whose logits are wanted; None wants none (prefill).
            hidden_layers: which hidden states to return.

        Raises:
            CacheFull: the cache has no room for the rows. OutpaceError: another target's cache.
        """


Own = TypeVar("Own", bound=Cache)


def own_cache(target: TargetModel, cache: Cache, kind: type[Own]) -> Own:
    """A cache as the class that a target's caches are of.

    Raises:
        OutpaceError: it is none of this target's.
    """
    if not isinstance(cache, kind):
        raise OutpaceError(f"{_kind(target)} needs a cache of its own: target.new_cache()")
    return cache


def _kind(target: TargetModel) -> str:
    return f"a target of the class {type(target).__name__}"
