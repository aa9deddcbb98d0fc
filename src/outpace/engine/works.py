"""Work of single requests between the steps of an engine: sources to encode, and texts to score."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from outpace.cache import CacheFull
from outpace.core import OutpaceError, TokenLogprobs
from outpace.engine.engine import Engine
from outpace.engine.errand import Errand

_UNDISTURBED = 0.05  # seconds after which messages are read, where no step waits


class Work(Protocol):
    """Work in pieces.

    Attributes:
        client: whose it is: clients take turns.
        answer: called once, with the result or an error, also if it was cancelled.
        cancelled: returns True once the answer is no longer needed.
        holds: it has rows in the cache.
    """

    @property
    def client(self) -> str: ...

    @property
    def holds(self) -> bool: ...

    @property
    def answer(self) -> Callable[[Any], None]: ...

    @property
    def cancelled(self) -> Callable[[], bool]: ...

    def advance(self, engine: Engine, seconds: float) -> bool:
        """Run a piece, of about this time if that can be chosen; return True once the result is there.

        Raises:
            CacheFull: there is no room for its rows; it can be advanced later.
        """

    def result(self) -> Any:
        """The result."""

    def close(self) -> None:
        """Free what the work holds."""


@dataclass(eq=False)
class Score:
    """A text to score, 128 rows at a time.

    Attributes:
        chunks: what ``Engine.score`` returned; None before its first chunk.
        found: the log probabilities so far.
    """

    answer: Callable[[Any], None]
    cancelled: Callable[[], bool]
    tokens: Seq[int]
    top: int
    client: str = ""
    chunks: Generator[list[TokenLogprobs]] | None = None
    found: list[TokenLogprobs] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.chunks is not None

    def advance(self, engine: Engine, seconds: float) -> bool:
        if self.chunks is None:
            self.chunks = engine.score(self.tokens, self.top)
        try:
            more = next(self.chunks, None)
        except CacheFull:
            self.chunks = None
            raise
        self.found += more or ()
        return more is None

    def result(self) -> list[TokenLogprobs]:
        return self.found

    def close(self) -> None:
        if self.chunks is not None:
            self.chunks.close()


@dataclass(eq=False)
class Encoding:
    """A source to encode: it stops between the products of the encoder."""

    answer: Callable[[Any], None]
    cancelled: Callable[[], bool]
    source: Any
    client: str = ""
    errand: Errand[Any] | None = None
    holds = False

    def advance(self, engine: Engine, seconds: float) -> bool:
        if self.errand is None:
            self.errand = engine.encoding(self.source)
        return self.errand.advance(seconds)

    def result(self) -> Any:
        assert self.errand is not None
        return self.errand.result()

    def close(self) -> None:
        if self.errand is not None:
            self.errand.close()


class Works:
    """Work that waits for its turns. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Work]] = {}  # by client; the next one's first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, one: Work) -> None:
        self._waiting.setdefault(one.client, deque()).append(one)

    def advance(self, engine: Engine) -> None:
        """Do as much as there is time for between two steps."""
        allowance = engine.allowance
        until = allowance.clock() + _UNDISTURBED
        while self._waiting and allowance.open:
            client, works = next(iter(self._waiting.items()))
            with allowance.piece():
                ended = self._piece(engine, works[0], min(allowance.seconds, _UNDISTURBED))
            del self._waiting[client]
            if ended:
                works.popleft()
            if works:
                self._waiting[client] = works
            if ended is None or allowance.clock() >= until:
                break

    def _piece(self, engine: Engine, one: Work, seconds: float) -> bool | None:
        """Run a piece; return True if the work has ended, with any answer, None if it waits for rows."""
        try:
            if one.cancelled():
                one.answer(OutpaceError("nobody waits for this any more"))
            elif not one.advance(engine, seconds):
                return False
            else:
                one.answer(one.result())
        except CacheFull as error:
            if engine.sequences or any(other.holds for works in self._waiting.values() for other in works):
                return None  # others will give theirs back
            one.answer(error)
        except Exception as error:
            one.answer(error)
        one.close()
        return True

    def end(self, error: Exception, close: bool = True) -> None:
        """Answer all with an error, and free what they hold with ``close``: a failed engine cannot."""
        for works in self._waiting.values():
            for one in works:
                if close:
                    one.close()
                one.answer(error)
        self._waiting.clear()
