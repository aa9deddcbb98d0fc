"""Translation between the draft model's and the target's tokens: equal ids, shared tokens, or text.

Timor et al. 2025, Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies, arXiv 2502.05202. A draft is verified like any other, so it is exact whatever the vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.support.pieces import disagreement, pieces
from outpace.drafters.support.reading import TextReader
from outpace.learned.vocabulary import spread
from outpace.sequence import Sequence
from outpace.targets.base import TargetModel

Kind = Literal["same", "intersection", "text"]
_REMEDY = (
    "use vocabulary=intersection (only tokens that both have are drafted) or vocabulary=text (the draft is "
    "translated)"
)


class VocabularyReader(Protocol):
    """One sequence's committed text in the draft model's tokens."""

    def read(self) -> tuple[Seq[int], int]:
        """The text in the draft model's tokens, and how many leading ones the last call returned too."""

    def revise(self, unchanged: int) -> None:
        """Update after the sequence was cut back to its first ``unchanged`` tokens, and may have grown."""


class Vocabulary:
    """Vocabularies with the same ids: drafts need no translation.

    Attributes:
        late: number of tokens by which a text may grow per step, the root included.
        text: whether drafts consist of the draft model's tokens, to be translated by their text.
    """

    late = 2
    text = False

    def reader(self, sequence: Sequence) -> VocabularyReader:
        return _SameReader(sequence)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits over the target's ids, [n, vocabulary], from the draft model's, [n, its vocabulary].

        They are minus infinity for ids that are not drafted.
        """
        return rows

    def drafted(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits over the drafted ids alone, and these ids, in the target's; None for all of them."""
        return rows, None

    def whole(self, probabilities: Tensor) -> Tensor:
        """Probabilities of the target's ids, [vocabulary], from those of the drafted ids alone."""
        return probabilities

    def own(self, tokens: Seq[int]) -> Seq[int]:
        """Drafted tokens in the draft model's ids."""
        return tokens

    def draft(self, reader: VocabularyReader, draft: Draft) -> Draft:
        """A tree of drafted tokens in the target's ids."""
        return draft


class _SameReader:
    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._read = 0

    def read(self) -> tuple[Seq[int], int]:
        tokens, before = self._sequence.tokens, self._read
        self._read = len(tokens)
        return tokens, before

    def revise(self, unchanged: int) -> None:
        self._read = min(self._read, unchanged)


class Subset(Vocabulary):
    """A subset of the target's vocabulary, over which a module's logits are.

    Args:
        ids: the target's ids.
        size: number of the target's ids.
    """

    def __init__(self, ids: Tensor, size: int) -> None:
        self._ids = ids
        self._size = size

    def logits(self, rows: Tensor) -> Tensor:
        return spread(rows, self._ids, self._size)

    def drafted(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows, self._ids

    def whole(self, probabilities: Tensor) -> Tensor:
        return spread(probabilities, self._ids, self._size, 0.0)


class Current(Vocabulary):
    """Some of the target's vocabulary, or all of it: that of the latest forward.

    Attributes:
        ids: of the latest forward's logits, in the target's; None for all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.ids: Tensor | None = None

    def logits(self, rows: Tensor) -> Tensor:
        return rows if self.ids is None else spread(rows, self.ids, self._size)

    def drafted(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows, self.ids

    def whole(self, probabilities: Tensor) -> Tensor:
        return probabilities if self.ids is None else spread(probabilities, self.ids, self._size, 0.0)


def part_of(ids: Tensor | None, size: int) -> Vocabulary:
    """The vocabulary of a module that drafts these of the target's ids; None is all of them."""
    return Vocabulary() if ids is None else Subset(ids, size)


class Intersection(Vocabulary):
    """Token-level intersection (TLI, Timor et al. 2025): only tokens that both have are drafted.

    The draft model's distribution is restricted to those and renormalised, in the target's ids, so every way
    to draw and every verifier works as with one vocabulary. Tokens are equal if their bytes are, however each
    tokenizer writes a space.

    Raises:
        OutpaceError: the tokenizers have no token in common.
    """

    late = 8

    def __init__(self, draft: Any, target: Any, own_size: int, size: int) -> None:
        self._tokenizers = draft, target
        self._size = size
        ours, theirs = pieces(draft), pieces(target)
        if draft.eos_token_id is not None and target.eos_token_id is not None:
            ours["<end>"], theirs["<end>"] = draft.eos_token_id, target.eos_token_id
        pairs = {
            theirs[piece]: ours[piece]
            for piece in ours.keys() & theirs.keys()
            if ours[piece] < own_size and theirs[piece] < size
        }
        if not pairs:
            raise OutpaceError("draft_model: the two tokenizers have no token in common; use vocabulary=text")
        self._own = dict(sorted(pairs.items()))
        self._pairs = torch.tensor([list(self._own), list(self._own.values())])

    def reader(self, sequence: Sequence) -> VocabularyReader:
        return TextReader(sequence, *self._tokenizers)

    def logits(self, rows: Tensor) -> Tensor:
        theirs, ours = self._on(rows.device)
        return spread(rows[:, ours], theirs, self._size)

    def drafted(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        theirs, ours = self._on(rows.device)
        return rows[:, ours], theirs

    def whole(self, probabilities: Tensor) -> Tensor:
        return spread(probabilities, self._on(probabilities.device)[0], self._size, 0.0)

    def _on(self, device: torch.device) -> Tensor:
        """The target's ids and the draft model's, [2, pairs]."""
        self._pairs = self._pairs.to(device)
        return self._pairs

    def own(self, tokens: Seq[int]) -> Seq[int]:
        return [self._own[token] for token in tokens]


class TextOnly(Vocabulary):
    """String-level matching (SLEM, Timor et al. 2025): the drafted text is re-encoded in the target's tokens.

    The draft is a chain of point masses, so it is exact under every verifier.
    """

    late = 8
    text = True

    def __init__(self, draft: Any, target: Any, size: int) -> None:
        self._tokenizers = draft, target
        self._size = size

    def reader(self, sequence: Sequence) -> VocabularyReader:
        return TextReader(sequence, *self._tokenizers)

    def draft(self, reader: VocabularyReader, draft: Draft) -> Draft:
        assert isinstance(reader, TextReader)
        tokens = reader.translate(draft.tokens)
        legal = next((place for place, token in enumerate(tokens) if token >= self._size), len(tokens))
        return Draft(tuple(tokens[:legal]), tuple(range(-1, legal - 1)))


def vocabulary_of(kind: Kind, model: TargetModel, target: TargetModel, own: Any, theirs: Any) -> Vocabulary:
    """The translation of a draft model's tokens.

    Args:
        own: the draft model's tokenizer, None if unknown.
        theirs: the target's tokenizer.

    Raises:
        OutpaceError: the kind is "same" and the vocabularies differ, or a tokenizer is missing.
    """
    if kind == "same":
        _check_same(model, target, own, theirs)
        return Vocabulary()
    for option, tokenizer in (("tokenizer", own), ("target_tokenizer", theirs)):
        if tokenizer is None:
            raise OutpaceError(
                f"draft_model: vocabulary={kind} needs both tokenizers; give {option}, an object or a name"
            )
    if kind == "text":
        return TextOnly(own, theirs, target.vocabulary)
    return Intersection(own, theirs, model.vocabulary, target.vocabulary)


def _check_same(model: TargetModel, target: TargetModel, own: Any, theirs: Any) -> None:
    if model.vocabulary != target.vocabulary:
        raise OutpaceError(
            f"draft_model: the draft model has {model.vocabulary} token ids and the target "
            f"{target.vocabulary}; {_REMEDY}"
        )
    if own is None or theirs is None:
        return
    differ = disagreement(own, theirs)
    if differ is not None:
        place, ours, other = differ
        raise OutpaceError(
            f"draft_model: token {place} is {ours!r} to the draft model, {other!r} to the target; {_REMEDY}"
        )
