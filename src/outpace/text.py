"""Text as tokens arrive: incremental decoding, stop strings, and what may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6


class Tokenizer(Protocol):
    """The one method needed of a tokenizer; transformers' tokenizers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decodes a growing list of tokens and looks for stop strings, across token boundaries.

    A token may hold a part of a character, and a tokenizer may decode a token by its neighbours; so text is
    taken as the difference of two decodings that start a few tokens back, and only where it ends in a whole
    character.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._start = 0  # decodings begin at this token ...
        self._read = 0  # ... and the tokens before this one are in `text`
        self._shown = 0  # characters handed out by `release`
        self.text = ""
        self.stopped = False

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._tokens[self._start : end], skip_special_tokens=True)

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string is now complete (the text is then cut before it)."""
        self._tokens.append(token)
        self._take(final=False)
        return self.stopped

    def _take(self, final: bool) -> None:
        old, new = self._decode(self._read), self._decode(len(self._tokens))
        if len(new) <= len(old) or (new.endswith(_INCOMPLETE) and not final):
            return
        searched = len(self.text)
        self.text += new[len(old) :]
        self._read = len(self._tokens)
        self._start = max(self._start, self._read - _CONTEXT)
        self._cut(searched)

    def _cut(self, searched: int) -> None:
        """Look for the earliest stop string that ends after the first ``searched`` characters."""
        found = [
            place
            for stop in self._stops
            if (place := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    @property
    def pending(self) -> bool:
        """Whether the last tokens are not in ``text`` yet: they end within a character, or say nothing."""
        return self._read < len(self._tokens)

    def release(self, final: bool = False) -> str:
        """Text not handed out yet, less what could still become a stop string; all of it if ``final``."""
        if final and not self.stopped:
            self._take(final=True)
        end = len(self.text)
        if not (final or self.stopped):
            end -= max((self._overlap(stop) for stop in self._stops), default=0)
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of ``stop`` that the text ends with."""
        for length in range(min(len(stop) - 1, len(self.text)), 0, -1):
            if self.text.endswith(stop[:length]):
                return length
        return 0
