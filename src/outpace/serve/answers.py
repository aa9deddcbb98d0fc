"""An answer taken apart as it comes: its reasoning, its text, and its calls of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from outpace.core import StreamedToken
from outpace.serve.calls import Bare, Call, CallFormat, Signature

Kind = Literal["text", "reasoning", "call"]
_THINK = "<think>", "</think>"


class Said(NamedTuple):
    """A piece of an answer.

    Attributes:
        call: the number of the call that it is a part of.
        name: the name of the called function, in the call's first piece.
        text: the text, or a part of the call's arguments as JSON.
    """

    kind: Kind
    text: str
    call: int = 0
    name: str | None = None


@dataclass(frozen=True)
class Manner:
    """What an answer may consist of.

    Attributes:
        calls: the format of calls; None if there are no functions.
        functions: those that may be called.
        forced: the answer is one call, by its grammar.
        parallel: it may have several calls.
        marks: the tokens that are special, so that they have no text, by their ids: marks of the format.
        thinks: reasoning is marked. begun: the prompt has its first mark already.
    """

    calls: CallFormat | None = None
    functions: Mapping[str, Signature] = field(default_factory=dict)
    forced: bool = False
    parallel: bool = True
    marks: Mapping[int, str] = field(default_factory=dict)
    thinks: bool = False
    begun: bool = False


class Answer:
    """Incremental parser of one answer.

    A call is read once it is complete, and what cannot be read is text; a forced one is passed on as it
    comes if its arguments are JSON.

    Args:
        decode: the text of token ids, without special tokens.
    """

    def __init__(self, manner: Manner, decode: Callable[[list[int]], str]) -> None:
        self._manner, self._decode = manner, decode
        self._left = ""  # what is not known yet
        self._state = "reasoning" if manner.begun else "start"
        self.calls = 0
        self._heads: dict[str, str] = {}
        if manner.forced and manner.calls is not None:
            heads = {name: manner.calls.head(name) for name in manner.functions}
            self._heads = {head: name for name, head in heads.items() if head is not None}
            self._state = "forced" if self._heads else "text"

    def push(self, tokens: Seq[StreamedToken]) -> list[Said]:
        """Add what was emitted; return what is known to be said by then."""
        self._left += self._text(tokens)
        return list(self._said())

    def end(self, complete: bool) -> list[Said]:
        """The rest.

        Args:
            complete: the answer was not cut off.
        """
        return list(self._rest(complete))

    def _text(self, tokens: Seq[StreamedToken]) -> str:
        """The text of tokens, with special ones that are marks in their places."""
        text = "".join(token.text for token in tokens)
        marks = self._manner.marks
        if not marks or not any(token.token in marks for token in tokens):
            return text
        after, found = list[int](), ""
        for token in reversed(tokens):
            if token.token not in marks:
                after.insert(0, token.token)
                continue
            own = self._decode(after).rstrip("\N{REPLACEMENT CHARACTER}") if after else ""
            kept = len(text) - len(own) if text.endswith(own) else len(text)
            text, found, after = text[:kept], marks[token.token] + text[kept:] + found, []
        return text + found

    # -- what is known -----------------------------------------------------------------------------------

    def _said(self) -> Iterator[Said]:
        while True:
            state, left = self._state, self._left
            if state == "start":
                self._start()
            elif state == "reasoning":
                yield from self._until(_THINK[1], "reasoning", "rest")
            elif state == "rest":  # after reasoning, blanks are no text
                self._left = left.lstrip()
                self._state = "rest" if not self._left else "begin"
            elif state == "after":  # and neither are blanks after a call
                self._left = left.lstrip()
                self._state = "text" if self._left else "after"
            elif state == "begin":
                self._begin()
            elif state == "text":
                begin = self._manner.calls.begin if self._manner.calls is not None else ""
                if begin:
                    yield from self._until(begin, "text", "call")
                elif left:
                    self._left = ""
                    yield Said("text", left)
            elif state == "call":
                yield from self._call()
            elif state == "forced":
                yield from self._forced()
            if (state, left) == (self._state, self._left):
                return

    def _start(self) -> None:
        """Decide whether the answer begins with reasoning."""
        said = self._left.lstrip()
        if not self._manner.thinks or self._manner.forced:
            self._state = "begin"
        elif said.startswith(_THINK[0]):
            self._state, self._left = "reasoning", said[len(_THINK[0]) :]
        elif said and not _THINK[0].startswith(said):
            self._state = "begin"

    def _begin(self) -> None:
        """Decide whether what follows is a call without a mark."""
        calls, said = self._manner.calls, self._left.lstrip()
        if not isinstance(calls, Bare):
            self._state = "text"
        elif any(said.startswith(opening) for opening in calls.openings):
            self._state = "call"
        elif said and not any(opening.startswith(said) for opening in calls.openings):
            self._state = "text"

    def _until(self, mark: str, kind: Kind, after: str) -> Iterator[Said]:
        """Pass on what comes before a mark."""
        text, left = self._left, ""
        if mark in text:
            text, _, left = text.partition(mark)
            self._state = after
        else:
            kept = overlap(text, mark)
            text, left = text[: len(text) - kept], text[len(text) - kept :]
        self._left = left
        if text:
            yield Said(kind, text)

    def _call(self) -> Iterator[Said]:
        """Pass on a call once its end has come."""
        calls = self._manner.calls
        if calls is not None and calls.end and calls.end in self._left:
            body, _, self._left = self._left.partition(calls.end)
            self._state = "after"
            yield from self._read(calls, body, calls.end)

    def _read(self, calls: CallFormat, body: str, end: str) -> Iterator[Said]:
        try:
            found = calls.read(body, self._manner.functions)
            if not found:
                raise ValueError("no call")
        except (ValueError, KeyError, TypeError, RecursionError):  # text that only begins like a call
            self._state = "text"
            yield Said("text", calls.begin + body + end)
            return
        for call in found:
            if self._manner.parallel or not self.calls:
                yield self._whole(call)

    def _whole(self, call: Call) -> Said:
        self.calls += 1
        return Said("call", call.arguments, self.calls - 1, call.name)

    def _forced(self) -> Iterator[Said]:
        """Pass on the arguments of a call that the grammar forces."""
        calls = self._manner.calls
        assert calls is not None
        if not self.calls:
            head = next((head for head in self._heads if self._left.startswith(head)), None)
            if head is None:
                return
            self._left = self._left[len(head) :]
            self.calls = 1
            piece = self._tailless()
            yield Said("call", piece, 0, self._heads[head])
        elif piece := self._tailless():
            yield Said("call", piece, 0)

    def _tailless(self) -> str:
        """What is left, but for as much as the tail has."""
        calls = self._manner.calls
        kept = len(calls.tail) if calls is not None else 0
        cut = max(0, len(self._left) - kept)
        piece, self._left = self._left[:cut], self._left[cut:]
        return piece

    # -- the end -----------------------------------------------------------------------------------------

    def _rest(self, complete: bool) -> Iterator[Said]:
        left, calls, state = self._left, self._manner.calls, self._state
        self._left = ""
        if state == "forced":
            yield from self._forced_end(left, complete)
        elif state == "call" and calls is not None:
            if complete and not calls.end:
                yield from self._read(calls, left, "")
            elif left or calls.begin:
                yield Said("text", calls.begin + left)
        elif left and state == "reasoning":
            yield Said("reasoning", left)
        elif left:
            yield Said("text", left)

    def _forced_end(self, left: str, complete: bool) -> Iterator[Said]:
        calls = self._manner.calls
        assert calls is not None
        if not self.calls:  # cut off before the name was known
            if left:
                yield Said("text", left)
            return
        kept = len(calls.tail) if complete else overlap(left, calls.tail)
        piece = left[: len(left) - kept] if complete or kept > 1 else left  # one brace may be the arguments'
        if piece:
            yield Said("call", piece, 0)


def overlap(text: str, mark: str) -> int:
    """The number of characters at the end of a text with which a mark begins."""
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), 0)
