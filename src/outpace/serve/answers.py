"""An answer taken apart as it comes: its reasoning, its text, and its calls of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from outpace.core import StreamedToken
from outpace.serve.calls import THOUGHT, CallFormat
from outpace.serve.json_calls import Signature, WrittenCall, may_be_unmarked, unmarked

Kind = Literal["text", "reasoning", "call"]
_NO_CALL = ValueError, KeyError, TypeError, RecursionError  # of text that only begins like a call
_LONGEST = 64  # characters of a mark
# States in which a forced call has been cut: by the answer's limit; or by a text that stops the answer
_CALLING = {False: {"head", "begin", "forced", "text", "call"}, True: {"forced"}}


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
        marks: the marks that are special tokens, so that they have no text, by their ids.
        thinks: reasoning is marked, by ``thought``. begun: the prompt has its first mark already.
    """

    calls: CallFormat | None = None
    functions: Mapping[str, Signature] = field(default_factory=dict)
    forced: bool = False
    parallel: bool = True
    marks: Mapping[int, str] = field(default_factory=dict)
    thinks: bool = False
    begun: bool = False
    thought: tuple[str, str] = THOUGHT[0]


class Answer:
    """Incremental parser of one answer.

    A call is read once it is complete, and what cannot be read is text; a forced one is passed on as it
    comes if its arguments are JSON. An answer that is calls without their marks as a whole is held back until
    it is known to be that.

    Args:
        decode: the text of token ids, without special tokens.
    """

    def __init__(self, manner: Manner, decode: Callable[[list[int]], str]) -> None:
        self._manner, self._decode = manner, decode
        self._left = ""  # what is not known yet
        self._tried = 0  # characters of it that do not end a call
        self._opened = ""  # the mark that began the call
        self._found = ""
        self._state = "reasoning" if manner.begun else "start"
        self.calls = 0
        self._heads: dict[str, str] = {}
        if manner.forced and manner.calls is not None:
            heads = {name: manner.calls.head(name) for name in manner.functions}
            self._heads = {head: name for name, head in heads.items() if head is not None}

    def push(self, tokens: Seq[StreamedToken]) -> list[Said]:
        """Add what was emitted; return what is known to be said by then."""
        self._left += self._text(tokens)
        return list(self._said())

    def end(self, complete: bool) -> list[Said]:
        """The rest.

        Args:
            complete: the answer was not cut off.
        """
        if self._manner.forced and not self.calls and self._state in _CALLING[complete]:
            return list(self._cut())
        found = list[Said]()
        while self._left or self._state == "call":
            found += self._ended(complete)
            found += self._said()
        return found

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
            before = self._state, self._left
            yield from self._step()
            if before == (self._state, self._left):
                return

    def _step(self) -> Iterator[Said]:
        """Take the next step from one state to another, as far as what is left decides it."""
        state, left = self._state, self._left
        if state == "start":
            self._start()
        elif state == "reasoning":
            yield from self._reason()
        elif state == "thought":
            yield from self._thought()
        elif state == "rest":  # after reasoning, blanks are no text
            self._left = left.lstrip()
            self._state = "rest" if not self._left else "begin"
        elif state == "after":  # and neither are blanks after a call
            self._left = left.lstrip()
            self._state = "text" if self._left else "after"
        elif state == "begin":
            yield from self._begin()
        elif state == "text":
            yield from self._words()
        elif state == "call":
            yield from self._call()
        elif state == "forced":
            yield from self._forced()

    def _start(self) -> None:
        """Decide whether the answer begins with reasoning."""
        said, mark = self._left.lstrip(), self._manner.thought[0]
        if not self._manner.thinks:
            self._state = "begin"
        elif said.startswith(mark):
            self._state, self._left = "reasoning", said[len(mark) :]
        elif said and not mark.startswith(said):
            self._state = "begin"

    def _begin(self) -> Iterator[Said]:
        """Decide whether what follows is calls without marks."""
        manner, left = self._manner, self._left
        if manner.forced and self._heads:
            self._state = "forced"
        elif manner.forced or manner.calls is None or not may_be_unmarked(left, manner.functions):
            self._state = "text"
        elif manner.calls.end and (place := manner.calls.end_of(left)) is not None:
            self._state = "text"
            with suppress(*_NO_CALL):  # calls of which the first mark alone is missing
                calls = unmarked(left[:place], manner.functions)
                self._left, self._state = left[place + len(manner.calls.end) :], "after"
                yield from self._called(calls)

    def _until(self, kind: Kind, marks: Seq[str]) -> Iterator[Said]:
        """Pass on what comes before the first of these marks; ``_found`` is that mark, "" for none."""
        text = self._left
        places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
        end, self._found = min(places, default=(len(text) - max(overlap(text, mark) for mark in marks), ""))
        self._left = text[end:]
        if text[:end]:
            yield Said(kind, text[:end])

    def _reason(self) -> Iterator[Said]:
        """Pass on reasoning, up to its end or to a call within it."""
        manner, close = self._manner, self._manner.thought[1]
        begin = manner.calls.begin if manner.calls is not None and not manner.forced else ""
        yield from self._until("reasoning", [mark for mark in (close, begin) if mark])
        if self._found == close:
            self._left, self._state = self._left[len(close) :], "rest"
        elif self._found:
            self._state = "thought"

    def _thought(self) -> Iterator[Said]:
        """Hold back what may be a call in reasoning that nothing ends; if an end comes, it is reasoning."""
        calls, close = self._manner.calls, self._manner.thought[1]
        assert calls is not None
        if close in self._left:
            self._state = "reasoning"
            text, _, self._left = self._left.partition(close)
            self._left = close + self._left
            yield Said("reasoning", text)
        elif not calls.may_begin(self._left[len(calls.begin) :]):
            self._left, self._state = self._left[len(calls.begin) :], "reasoning"
            yield Said("reasoning", calls.begin)

    def _words(self) -> Iterator[Said]:
        """Pass on text, up to the mark of a call."""
        calls = self._manner.calls
        marks = [mark for mark in (calls.begin, calls.inner) if mark] if calls is not None else []
        if not marks:
            text, self._left = self._left, ""
            if text:
                yield Said("text", text)
            return
        yield from self._until("text", marks)
        if self._found:
            assert calls is not None
            self._opened = calls.begin if self._found == calls.begin else ""
            self._left, self._state, self._tried = self._left[len(self._opened) :], "call", 0

    def _call(self) -> Iterator[Said]:
        """Pass on a call once its end has come."""
        calls, left = self._manner.calls, self._left
        assert calls is not None
        if not calls.may_begin(left):
            self._state = "text"
            yield Said("text", self._opened)
            return
        news, self._tried = left[max(0, self._tried - _LONGEST) :], len(left)
        if not any(mark in news for mark in calls.stops):
            return
        if (place := calls.end_of(left)) is not None:
            self._left = left[place + len(calls.end) :]
            yield from self._read(left[:place], calls.end)

    def _read(self, body: str, end: str) -> Iterator[Said]:
        """Pass on the calls between two marks, or their text if it only begins like a call."""
        calls = self._manner.calls
        assert calls is not None
        try:
            found = calls.read(body, self._manner.functions)
            if not found:
                raise ValueError("no call")
        except _NO_CALL:
            self._state = "text"
            yield Said("text", self._opened + body + end)
            return
        self._state = "after"
        yield from self._called(found)

    def _called(self, calls: Seq[WrittenCall]) -> Iterator[Said]:
        for call in calls:
            if self._manner.parallel or not self.calls:
                yield self._whole(call)

    def _whole(self, call: WrittenCall) -> Said:
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

    def _ended(self, complete: bool) -> Iterator[Said]:
        """What is left once nothing follows it, or a part of it."""
        left, calls, state = self._left, self._manner.calls, self._state
        if state == "call" and calls is not None and complete:
            place = calls.end_of(left, final=True)
            if place is None and calls.end and calls.end in left:  # its JSON is broken
                place = left.find(calls.end)
            cut = len(left) if place is None else place
            self._left = left[cut + len(calls.end) :]
            yield from self._read(left[:cut], "" if cut == len(left) else calls.end)
            return
        if state == "begin" and complete:
            self._state = "text"
            with suppress(*_NO_CALL):
                found = unmarked(left, self._manner.functions)
                self._left = ""
                yield from self._called(found)
            return
        self._left, self._state = "", "text"
        if state == "forced":
            yield from self._forced_end(left, complete)
        elif state == "thought":
            inner = Answer(replace(self._manner, thinks=False, begun=False), self._decode)
            inner._left = left
            said = [*inner._said(), *inner.end(complete)]
            self.calls = inner.calls
            yield from said if inner.calls else [Said("reasoning", left)]
        elif state == "call":
            yield Said("text", self._opened + left)
        elif left:
            yield Said("reasoning" if state == "reasoning" else "text", left)

    def _cut(self) -> Iterator[Said]:
        """A forced call that is cut after its name: the name, and what there is of its arguments.

        What comes before says nothing to a client, and is no text: OpenAI's answer has no call then either.
        """
        calls, functions = self._manner.calls, self._manner.functions
        assert calls is not None
        text = self._opened + self._left if self._state == "call" else self._left
        text = text[: len(text) - overlap(text, calls.end)]
        begun = [name for name in functions if text.startswith(calls.opening(name))]
        if len(begun) != 1:
            return
        arguments = ""
        with suppress(*_NO_CALL):
            whole = calls.read(text[len(calls.begin) :], functions)[0].arguments
            arguments = "" if whole == "{}" else whole.removesuffix("}").removesuffix('"')
        yield self._whole(WrittenCall(begun[0], arguments))

    def _forced_end(self, left: str, complete: bool) -> Iterator[Said]:
        calls = self._manner.calls
        assert calls is not None
        kept = len(calls.tail) if complete else overlap(left, calls.tail)
        piece = left[: len(left) - kept] if complete or kept > 1 else left  # one brace may be the arguments'
        if piece:
            yield Said("call", piece, 0)


def overlap(text: str, mark: str) -> int:
    """The number of characters at the end of a text with which a mark begins."""
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), 0)
