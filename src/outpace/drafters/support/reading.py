"""Incremental translation of the target's text into another tokenizer's tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.drafters.support.pieces import special_tokens
from outpace.sequence import Sequence
from outpace.text import TextStream

_WINDOW = 32  # tokens at the end of a text that are re-encoded when it grows
_TRIES = 16
_CONTEXT = 8  # tokens before a draft that are included in its translation
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


class GrowingTokens:
    """Tokens of a text that grows at its end.

    New text may change the tokens before it: "wal" becomes "walking". The end of the text is therefore
    re-encoded. Earlier tokens are final once the rest is encoded the same without them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []
        self._begin = 0  # character at which the tokens that are not final begin

    def __call__(self, text: str) -> tuple[list[int], int]:
        """Tokens of the whole text, and the number of leading tokens that are final."""
        settled = len(self._settled)
        rest = text[self._begin :]
        tokens = encode(self._tokenizer, rest)
        found = self._settled + tokens
        if len(tokens) > 2 * _WINDOW:
            self._settle(rest, tokens)
        return found, settled

    def _settle(self, text: str, tokens: list[int]) -> None:
        last = len(tokens) - _WINDOW
        for cut in range(last, max(last - _TRIES, 0), -1):
            head = self._tokenizer.decode(tokens[:cut])
            if text.startswith(head) and encode(self._tokenizer, text[len(head) :]) == tokens[cut:]:
                self._settled += tokens[:cut]
                self._begin += len(head)
                return


class TextReader:
    """One sequence's text in the draft model's tokens.

    Special tokens that both tokenizers have under the same name are mapped, others are omitted. The text
    between special tokens is decoded and re-encoded.

    Args:
        sequence: the sequence to read.
        own: the draft model's tokenizer.
        target: the target's tokenizer.
    """

    def __init__(self, sequence: Sequence, own: Any, target: Any) -> None:
        self._sequence = sequence
        self._own = own
        self._target = target
        self._special = _shared_special(own, target)
        bos = own.bos_token_id
        self._lead = [bos] if bos is not None and bos in own("").input_ids else []
        self.revise(0)

    def revise(self, unchanged: int) -> None:
        """Read the whole text again, since any token may change; cutting back is rare."""
        self._seen = 0
        self._closed = list(self._lead)
        self._tokens: list[int] = []
        self._open()

    def _open(self) -> None:
        self._stream = TextStream(self._target)
        self._encoding = GrowingTokens(self._own)
        self._start = self._seen  # the target's token at which this stretch of text begins

    def read(self) -> tuple[list[int], int]:
        closed = len(self._closed)
        for token in self._sequence.tokens[self._seen :]:
            self._seen += 1
            if token not in self._special:
                self._stream.push(token)
                continue
            # A special token ends this stretch of text, so its tokens are final.
            self._closed += self._encoding(self._stream.text)[0]
            own = self._special[token]
            if own is not None and self._closed != [own]:
                self._closed.append(own)
            self._open()
        tokens, settled = self._encoding(self._stream.text)
        unchanged = closed + (settled if len(self._closed) == closed else 0)
        self._tokens = self._closed + tokens
        return self._tokens, unchanged

    def translate(self, tokens: Seq[int]) -> list[int]:
        """Translate tokens drafted after the last ``read`` into the target's.

        Empty if the text ends inside a character, or if no tokens of the target decode to exactly that text
        after the committed ones.
        """
        if self._stream.pending:
            return []
        before = self._tokens[-_CONTEXT:]
        old = self._own.decode(before, skip_special_tokens=True)
        new = self._own.decode([*before, *tokens], skip_special_tokens=True).rstrip(_INCOMPLETE)
        if not new.startswith(old) or new == old:
            return []
        drafted = new[len(old) :]
        committed = self._sequence.tokens[max(self._start, self._seen - _CONTEXT) : self._seen]
        text = self._target.decode(committed, skip_special_tokens=True)
        whole = encode(self._target, text + drafted)
        if whole[: len(committed)] == committed:
            return whole[len(committed) :]
        # The target's tokenizer would merge text into the last committed token: continue after it.
        rest = encode(self._target, drafted)
        spelt = self._target.decode([*committed, *rest], skip_special_tokens=True)
        return rest if spelt == text + drafted else []


def _shared_special(own: Any, target: Any) -> dict[int, int | None]:
    """Map the target's special tokens to the draft model's of the same name."""
    names = special_tokens(own)
    return {place: names.get(name) for name, place in special_tokens(target).items()}
