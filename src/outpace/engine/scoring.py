"""Texts that an engine scores between its steps, a chunk at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outpace.core import TokenLogprobs
from outpace.engine.engine import Engine


@dataclass(eq=False)
class Score:
    """A text to score.

    Attributes:
        answer: called once, with the log probabilities or an error.
        cancelled: True once the answer is no longer needed.
        chunks: what ``Engine.score`` returned; None before its first chunk.
        found: the log probabilities so far.
    """

    answer: Callable[[list[TokenLogprobs] | Exception], None]
    cancelled: Callable[[], bool]
    tokens: Seq[int]
    top: int
    chunks: Generator[list[TokenLogprobs]] | None = None
    found: list[TokenLogprobs] = field(default_factory=list)


class Scores:
    """Texts waiting to be scored, first come, first served. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Score] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, one: Score) -> None:
        self._waiting.append(one)

    def advance(self, engine: Engine) -> None:
        """Score a chunk of the first text; drop it if it was cancelled."""
        if not self._waiting:
            return
        one = self._waiting[0]
        if one.chunks is None:
            one.chunks = engine.score(one.tokens, one.top)
        try:
            if not one.cancelled():
                one.found += next(one.chunks)
                return
        except StopIteration:
            one.answer(one.found)
        except Exception as error:
            one.answer(error)
        one.chunks.close()
        self._waiting.popleft()

    def end(self, error: Exception, close: bool = True) -> None:
        """Answer all texts with an error, and free their rows with ``close``: a failed engine cannot."""
        for one in self._waiting:
            if close and one.chunks is not None:
                one.chunks.close()
            one.answer(error)
        self._waiting.clear()
