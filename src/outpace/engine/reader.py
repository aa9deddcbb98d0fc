"""Streaming of a sequence: tokens and text emitted since the last read."""

from __future__ import annotations

from outpace.core import StreamedToken, TokenLogprobs
from outpace.sequence import Sequence


class Reader:
    """Reader of a growing sequence: returns each token once, with the text that may be shown by then."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._read = 0

    def new(self) -> list[StreamedToken]:
        """Return the tokens emitted since the last call; the last one has the text of all of them."""
        sequence, first = self._sequence, self._read
        tokens = sequence.output[first:]
        text = ""
        if sequence.text is not None and tokens and sequence.error is None:
            text = sequence.text.release(final=sequence.finish_reason is not None)
        self._read = last = first + len(tokens)
        return [
            StreamedToken(
                token, sequence.steps[place], text if place == last - 1 else "", self._logprobs(place)
            )
            for place, token in enumerate(tokens, first)
        ]

    def _logprobs(self, place: int) -> TokenLogprobs | None:
        sequence = self._sequence
        place -= sequence.output_length - len(sequence.logprobs)  # none of tokens before a resumption
        return sequence.logprobs[place] if sequence.params.logprobs is not None and place >= 0 else None
