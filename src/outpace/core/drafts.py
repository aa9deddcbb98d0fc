"""A draft and the verdict on it, and what a model is given beside tokens."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Draft:
    """A tree of guessed tokens under a sequence's last committed token, its root.

    Attributes:
        tokens: the guesses, n of them.
        parents: ``parents[i] < i``; -1 is the root.
        distributions: for a drafter that *samples*: parent node -> the full distribution, shape
            [vocabulary], from which that node's children were drawn. None for a drafter that *chooses*
            (n-gram, top-k, argmax): its tokens are point masses.
        replacement: whether siblings were drawn with replacement.
        riders: number of nodes at the end that are not guesses: they are in the forward for their logits
            and are never accepted. Their tokens may be ids beyond the vocabulary if the target was given
            embeddings for them. No guess is a descendant of a rider.
        chances: the drafter's estimate, per node, of the probability that it is accepted: above 0 and at
            most its parent's; None if the drafter has no estimates. ``combined`` weighs drafts by them.
    """

    tokens: Seq[int] = ()
    parents: Seq[int] = ()
    distributions: Mapping[int, torch.Tensor] | None = None
    replacement: bool = True
    riders: int = 0
    chances: Seq[float] | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if self.chances is not None and len(self.chances) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.chances)} chances")
        count = len(self.parents)
        if count and not (min(self.parents) >= -1 and all(map(operator.lt, self.parents, range(count)))):
            raise ValueError(f"a node's parent must come before it, or be -1: {list(self.parents)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def guesses(self) -> Draft:
        """The draft without its riders: what is verified."""
        if not self.riders:
            return self
        count = len(self) - self.riders
        chances = None if self.chances is None else self.chances[:count]
        return Draft(
            self.tokens[:count], self.parents[:count], self.distributions, self.replacement, chances=chances
        )


@dataclass(frozen=True, eq=False)
class Source:
    """An encoder's output for one input of an encoder-decoder model. Requests may share one.

    Attributes:
        states: the encoder's hidden states, shape [length, size].
        tokens: the encoder's input ids if encoder and decoder share a vocabulary, otherwise empty.
    """

    states: torch.Tensor
    tokens: Seq[int] = ()


@dataclass(frozen=True, eq=False)
class PromptStates(Source):
    """A prompt with images as a language model reads it: the inputs of its first layer, and their positions.

    Attributes:
        states: the embeddings of the whole prompt, shape [length, hidden size].
        positions: shape [axes, length], for a model with several axes of positions (Qwen2-VL: time, height,
            width); None if they count from 0. The text after the prompt continues each axis from its last.
        deep: what is added to the first layers' outputs (Qwen3-VL's features of images), shape [layers,
            length, hidden size], 0 where there is no image; None for other models.
    """

    positions: torch.Tensor | None = None
    deep: torch.Tensor | None = None


class Verdict:
    """A verifier's decision: the accepted nodes, the root's child first, and the tokens to emit.

    ``tokens`` contains the accepted nodes' tokens and then the bonus token, the target's own. The bonus is
    absent only if the sequence ended on an accepted token.
    """

    __slots__ = ("path", "tokens")

    def __init__(self, path: list[int], tokens: list[int]) -> None:
        self.path = path
        self.tokens = tokens
