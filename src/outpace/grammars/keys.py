"""Keys of objects in a JSON text that grows by tokens: which tokens would repeat one.

A grammar can say which keys an object may have, but not that each of any number comes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Protocol

import llguidance
import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
_FEW = 64  # tokens, each of which is tried
_COPIES = 256  # of matchers at one token, with which they are tried


class Thought(Protocol):
    """What stands before a text: its marks, and whether the prompt has the first already."""

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def begun(self) -> bool: ...


class ObjectKeys:
    """The keys of the objects that a text is in.

    Args:
        quoting: the tokens that contain a quotation mark, with their bytes.
        spell: the bytes of tokens.
        thought: what comes before the text; None for nothing.
    """

    def __init__(
        self,
        quoting: Mapping[int, bytes],
        spell: Callable[[list[int]], bytes],
        thought: Thought | None = None,
    ) -> None:
        self._quoting, self._spell = quoting, spell
        self._text = _Text()
        self._marks = None if thought is None else (thought.begin.encode(), thought.end.encode())
        self._begun = thought is not None and thought.begun
        self._head = b""  # what was read before the text
        self._holding: dict[bytes, list[int]] = {}

    def feed(self, token: int) -> None:
        data = self._spell([token])
        if self._marks is not None:
            begin, end = self._marks
            self._head += data
            said = self._head.lstrip()
            self._begun = self._begun or said.startswith(begin)
            if self._begun and end in self._head:
                data = self._head.partition(end)[2]
            elif self._begun:
                self._head = (
                    self._head[-len(end) :] if len(self._head) > len(begin) + len(end) else self._head
                )
                return
            elif begin.startswith(said):
                return
            else:
                data = self._head
            self._marks = None
        self._text.feed(data)

    def others(self, matcher: llguidance.LLMatcher, allowed: Mask) -> Mask:
        """The allowed tokens without those that make a key of its object come twice, or must lead there.

        Where nothing else would be left, since a schema allows no other keys, they stay.
        """
        if self._marks is not None or not any(self._text.keys):
            return allowed
        left = self._left(matcher, self._text, allowed, iter(range(_COPIES)))
        return left if left.any() else allowed

    def _left(self, matcher: llguidance.LLMatcher, text: _Text, allowed: Mask, copies: Iterator[int]) -> Mask:
        found = allowed.copy()
        found[self._repeating(text)] = False
        few = np.flatnonzero(found)
        if len(few) > _FEW:  # not all of that many tokens begin a known key
            return found
        for token in map(int, few):
            after = deepcopy(text)
            after.feed(self._spell([token]))
            if not after.narrows() or next(copies, None) is None:
                continue
            following = matcher.deep_copy()
            if not following.consume_tokens([token]) or following.is_stopped():
                continue
            inner = unpacked(following.compute_bitmask(), len(allowed))
            found[token] = bool(self._left(following, after, inner, copies).any())
        return found

    def _repeating(self, text: _Text) -> list[int]:
        """The tokens with which a key would be one that its object has already."""
        found = list[int]()
        if text.key and text.quoted and not text.escaped:
            begun = bytes(text.word)
            for key in text.keys[-1]:
                if key.startswith(begun):
                    rest = key[len(begun) :] + b'"'
                    found += [token for token, data in self._quoting.items() if data.startswith(rest)]
            return found
        for key in {key for keys in text.keys for key in keys}:
            whole = b'"' + key + b'"'
            if whole not in self._holding:
                holding = [token for token, data in self._quoting.items() if whole in data]
                self._holding[whole] = holding
            for token in self._holding[whole]:
                after = deepcopy(text)
                after.feed(self._quoting[token])
                if after.repeated > text.repeated:
                    found.append(token)
        return found


def unpacked(mask: bytes, size: int) -> Mask:
    """llguidance's bits as one value for each token."""
    bits = np.frombuffer(mask, np.uint8)
    return np.unpackbits(bits, count=size, bitorder="little").astype(np.bool_)


class _Text:
    """Where a JSON text is.

    Attributes:
        keys: the keys so far of the objects that it is in; none of a list.
        key: the next or the present string is a key. quoted: it is in a string. escaped: after a backslash.
        word: the present string so far.
        repeated: number of keys that were repeated.
    """

    def __init__(self) -> None:
        self.keys: list[set[bytes]] = []
        self._objects: list[bool] = []
        self.key = self.quoted = self.escaped = False
        self.word = bytearray()
        self.repeated = 0

    def narrows(self) -> bool:
        """True where a key comes or is being written that may become one of those that are there."""
        if not (self.key and self.keys and self.keys[-1]):
            return False
        return not self.quoted or any(key.startswith(bytes(self.word)) for key in self.keys[-1])

    def feed(self, data: bytes) -> None:
        for byte in data:
            char = chr(byte)
            if self.quoted:
                self._within(byte, char)
            elif char == '"':
                self.quoted, self.word = True, bytearray()
            elif char in "{[":
                self.keys.append(set())
                self._objects.append(char == "{")
                self.key = char == "{"
            elif char in "}]" and self.keys:
                self.keys.pop()
                self._objects.pop()
                self.key = False
            elif char == ",":
                self.key = bool(self._objects) and self._objects[-1]
            elif char == ":":
                self.key = False

    def _within(self, byte: int, char: str) -> None:
        if self.escaped or char not in '"\\':
            self.word.append(byte)
            self.escaped = False
        elif char == "\\":
            self.word.append(byte)
            self.escaped = True
        else:
            self.quoted = False
            if self.key and self.keys:
                self.repeated += bytes(self.word) in self.keys[-1]
                self.keys[-1].add(bytes(self.word))
