"""Incremental detokenisation: text as tokens arrive, stop strings, and the text that may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6


class Tokenizer(Protocol):
    """The one method needed of a tokenizer; transformers' tokenizers have it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decoder of a growing list of tokens that finds stop strings across token boundaries.

    A token may contain part of a character, and its text may depend on its neighbours. New text is therefore
    the difference of two decodings that begin a few tokens back, and is taken only if it ends in a whole
    character.

    With stop strings each token is decoded as it arrives; otherwise only when the text is read.

    Args:
        least: number of tokens whose text completes no stop string; later tokens may complete one that begins
            in it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), least: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._least = least
        self._tokens: list[int] = []
        self._start = 0  # decodings begin at this token ...
        self._read = 0  # ... and the tokens before this one are in `_text`
        self._seen = 0  # number of tokens at the last decoding
        self._shown = 0  # characters that `release` has returned
        self._text = ""
        self.stopped_by: str | None = None  # the stop string that is complete

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._tokens[self._start : end], skip_special_tokens=True)

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string is now complete (the text is then cut before it)."""
        self._tokens.append(token)
        if self._stops:
            self._take()
        return self.stopped

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """The text of the tokens so far, up to the last whole character."""
        self._take()
        return self._text

    @property
    def pending(self) -> bool:
        """True if the last tokens are not in ``text`` yet: they end inside a character, or have no text."""
        self._take()
        return self._read < len(self._tokens)

    def _take(self, final: bool = False) -> None:
        """Decode tokens that are not in the text yet; with ``final``, even if a character is incomplete."""
        if self._read == len(self._tokens) or (self._seen == len(self._tokens) and not final):
            return
        self._seen = len(self._tokens)
        old, new = self._decode(self._read), self._decode(len(self._tokens))
        if len(new) <= len(old) or (new.endswith(_INCOMPLETE) and not final):
            return
        searched = len(self._text)
        self._text += new[len(old) :]
        self._read = len(self._tokens)
        self._start = max(self._start, self._read - _CONTEXT)
        if len(self._tokens) > self._least:
            self._cut(searched)

    def _cut(self, searched: int) -> None:
        """Cut the text at the stop string that ends first after the first ``searched`` characters.

        Of several that end there, at the longest: the text then contains no part of any.
        """
        found = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := self._text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if found:
            _, place, self.stopped_by = min(found)
            self._text = self._text[:place]

    def release(self, final: bool = False) -> str:
        """Return new text, except what could still become a stop string; with ``final``, all of it."""
        if not self.stopped:
            self._take(final)
        end = len(self._text)
        if not (final or self.stopped):
            end -= max((self._overlap(stop) for stop in self._stops), default=0)
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper prefix of ``stop`` that the text ends with."""
        for length in range(min(len(stop) - 1, len(self._text)), 0, -1):
            if self._text.endswith(stop[:length]):
                return length
        return 0
