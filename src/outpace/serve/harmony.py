"""The format of gpt-oss, harmony: an answer is messages, each with a channel and perhaps a recipient.

A message is ``<|channel|>CHANNEL<|message|>TEXT`` after a role, which the prompt has for the first one. The
channel ``analysis`` is reasoning, and what has the recipient ``functions.NAME`` is a call. Source: OpenAI's
description of the format, https://github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outpace.serve.answers import Answer, Kind, Manner, Said
from outpace.serve.calls import JsonCalls
from outpace.serve.json_calls import Signature, WrittenCall, call_of, may_be_unmarked, object_of, outside

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = "<|end|>", "<|call|>", "<|return|>", _START
_HEADS = _CHANNEL, " to=", _START
_TO = re.compile(r"\bto=functions\.([\w.-]+)")
_OF = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True)
class Harmony(JsonCalls):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}``, as gpt-oss writes it."""

    begin: str = _CHANNEL

    @property
    def marks(self) -> tuple[str, ...]:
        return (_CHANNEL, "<|constrain|>", _MESSAGE, *_ENDS)

    def head(self, name: str) -> str:
        return f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}"

    def read(self, text: str, functions: Mapping[str, Signature]) -> list[WrittenCall]:
        head, _, body = text.partition(_MESSAGE)
        if (found := _TO.search(head)) is None:
            raise ValueError("a call has no name")
        return [call_of(found[1], object_of(body))]


class HarmonyAnswer(Answer):
    """Incremental parser of an answer in harmony; same interface as ``Answer``."""

    def __init__(self, manner: Manner, decode: Callable[[list[int]], str]) -> None:
        super().__init__(manner, decode)
        self._head = ""  # of the message that is being read
        self._state = "head"

    def _step(self) -> Iterator[Said]:
        if self._state == "head":
            self._read_head()
        elif self._state == "forced":
            yield from self._forced()
        elif self._state != "call":
            yield from self._body("reasoning" if self._state == "analysis" else "text")
        elif (place := self._end(outside)) is not None:
            body, self._left, self._state = self._left[: place[0]], self._left[place[1] :], "head"
            yield from self._message(body)

    def _forced(self) -> Iterator[Said]:
        """As of other formats, but for the token that ends the answer, which no grammar has."""
        for end in _ENDS:
            self._left = self._left.removesuffix(end)
        yield from super()._forced()

    def _read_head(self) -> None:
        """Read the head of a message once it is complete; what cannot be one is the text of an answer."""
        opened = self._left.removeprefix(f"{_START}assistant")
        if any(map(opened.startswith, self._heads)):
            self._left, self._state = opened, "forced"
        elif _MESSAGE in self._left:
            self._head, _, self._left = self._left.partition(_MESSAGE)
            found = _OF.search(self._head)
            name = _TO.search(self._head)
            called = name is not None and self._manner.calls is not None
            self._state = "call" if called else "analysis" if found and found[1] == "analysis" else "text"
        elif self._left and not any(
            self._left.startswith(head) or head.startswith(self._left) for head in _HEADS
        ):
            functions = self._manner.functions
            self._state = "head" if functions and may_be_unmarked(self._left, functions) else "text"

    def _end(self, places: Callable[[str, str], Iterator[int]]) -> tuple[int, int] | None:
        """Where the text of a message ends, and where the next one begins; None if it goes on."""
        ends = [(place, end) for end in _ENDS if (place := next(places(self._left, end), None)) is not None]
        if not ends:
            return None
        place, end = min(ends)
        return place, place if end == _START else place + len(end)

    def _body(self, kind: Kind) -> Iterator[Said]:
        """Pass on what comes before the end of a message."""
        yield from self._until(kind, _ENDS)
        if self._found:
            self._left = self._left.removeprefix(self._found) if self._found != _START else self._left
            self._state = "head"

    def _message(self, body: str) -> Iterator[Said]:
        try:
            (call,) = Harmony().read(f"{self._head}{_MESSAGE}{body}", self._manner.functions)
        except (ValueError, TypeError, RecursionError):  # text that only begins like a call
            yield Said("text", f"{self._head}{_MESSAGE}{body}")
            return
        yield from self._called([call])

    def _ended(self, complete: bool) -> Iterator[Said]:
        left, state = self._left, self._state
        if state == "forced":
            yield from super()._ended(complete)
        elif state == "call" and complete:  # the token that ends it ended the answer, or its JSON is broken
            place = self._end(_anywhere) or (len(left), len(left))
            self._left, self._state = left[place[1] :], "head"
            yield from self._message(left[: place[0]])
        elif state == "head" and complete and self._manner.functions:
            self._state = "begin"
            yield from super()._ended(complete)
        else:
            self._left, self._state = "", "text"
            if state == "call":
                yield Said("text", f"{self._head}{_MESSAGE}{left}")
            elif left:
                yield Said("reasoning" if state == "analysis" else "text", left)


def _anywhere(text: str, mark: str) -> Iterator[int]:
    """The first place of a mark."""
    if (place := text.find(mark)) >= 0:
        yield place


def one_call_each(turns: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as gpt-oss's template takes it.

    The template shows one call of a turn: a turn of several becomes one turn for each, with its result. What
    was thought before a call is ``thinking``, and it has no other text beside it.
    """
    found = list[dict[str, Any]]()
    results = {turn["tool_call_id"]: turn for turn in turns if turn.get("tool_call_id")}
    placed = set[str]()
    for turn in turns:
        calls = turn.get("tool_calls") or ()
        if not calls:
            if turn.get("tool_call_id") not in placed:
                found.append(turn)
            continue
        thought = "\n".join(filter(None, (turn.get("reasoning_content"), turn["content"])))
        for number, call in enumerate(calls):
            own = {"role": "assistant", "content": "", "tool_calls": [call]}
            found.append(own | ({"thinking": thought} if thought and not number else {}))
            if len(calls) > 1 and (result := results.get(call["id"])) is not None:
                found.append(result)
                placed.add(call["id"])
    return found
