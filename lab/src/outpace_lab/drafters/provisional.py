"""Text ahead of the target: tokens that a draft model has emitted and the target has not verified."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from outpace.core import OutpaceError
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.support.draws import Noise
from outpace.draws.logits import Logits
from outpace.draws.noise import Key, Stream, key
from outpace.draws.sampling import Processor
from outpace.learned.vocabulary import drafted_ids
from outpace.sequence import KeyedDraw, Sequence
from outpace.targets.base import TargetModel


@dataclass(frozen=True)
class Decoder:
    """A draft model, and its options for decoding a chain.

    Attributes:
        length: number of tokens in the chain.
        noise: the noise with which they are drawn.
    """

    model: TargetModel
    length: int
    noise: Noise


def decoder_of(draft: DraftModel, target: TargetModel) -> Decoder:
    """The draft model and its options for a chain.

    Raises:
        OutpaceError: the options describe anything but a chain in the target's vocabulary.
    """
    if draft.trees or draft.vocabulary != "same" or draft.min_confidence:
        raise OutpaceError(
            "draft_model: inside a cascade it drafts whole chains in the target's vocabulary; leave out "
            "branching, acceptance, expand, min_confidence and vocabulary"
        )
    model = draft.load(target)
    if drafted_ids(model.model) is not None:
        raise OutpaceError(
            f"draft_model: {model.name} drafts a part of its vocabulary, so it cannot be the model of a "
            "cascade; train one without draft_vocabulary"
        )
    draft.translation(model, target)
    return Decoder(model, draft.num_speculative_tokens, draft.draws)


class Provisional(Sequence):
    """A sequence as a draft model decodes it: the committed text, followed by the chain being drafted.

    The parameters are the sequence's, except those that concern only emitted tokens. The noise is the
    target's if the two may share it, otherwise specific to this step.

    Args:
        original: the sequence that the draft is for.
        noise: the noise with which the draft model draws; "greedy" does not draw.
    """

    def __init__(self, original: Sequence, noise: Noise) -> None:
        params = replace(original.params, stop=(), logits_processors=(), logprobs=None)
        if noise == "greedy":
            params = replace(params, temperature=0.0)
        super().__init__(
            original.prompt,
            params,
            original.key,
            original.limit,
            original.eos_token_ids,
            references=original.references,
            output=original.output,
        )
        self.original = original
        self._coupled = noise == "coupled" and original.key.coupled
        self._committed = len(self.tokens)

    @property
    def chain(self) -> list[int]:
        """Tokens of the draft model after the committed text."""
        return self.tokens[self._committed :]

    def follow(self, length: int) -> int:
        """Update to the committed text, with room for a chain of ``length`` tokens after it.

        Returns:
            The number of leading tokens that are unchanged.
        """
        text, same = self.original.tokens, self._committed
        while same < min(len(text), len(self.tokens)) and text[same] == self.tokens[same]:
            same += 1
        params, counts = self.params, len(self.tokens) > same
        self.tokens[same:] = text[same:]
        self.steps[same - self.prompt_length :] = self.original.steps[same - self.prompt_length :]
        if counts and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
            self.processor = Processor(params, self.prompt)
            same_output = self.prompt_length
        else:
            same_output = same
        for token in text[same_output:]:
            self.processor.observe(token)
        self._committed = len(text)
        self.limit = self.output_length + length
        self.stopped_by = None
        if not self._coupled:
            self.key = Key(key(self.original.key.seed, Stream.DRAFT, self.output_length))
        return same


class RecordingDraw(KeyedDraw):
    """Draws of a draft model that record the distribution of each token; none if greedy."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence)
        self.distributions: list[Tensor] = []

    def token(self, logits: Logits, node: int) -> int:
        if not self.sequence.params.greedy:
            self.distributions.append(self.distribution(logits, node))
        return super().token(logits, node)
