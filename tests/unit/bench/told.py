"""A method of the benchmark with prescribed results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outpace.bench.items import Item, Suite
from outpace.bench.peers import Library
from outpace.bench.runs import Method, MethodRun, PromptBatch


class Told(Method):
    """A method whose answers and seconds are given; it records its requests in a shared log."""

    peer = False
    verifier = "match"

    def __init__(
        self,
        name: str,
        log: list[tuple[str, PromptBatch]],
        answer: Callable[[list[int]], list[int]] = lambda prompt: [len(prompt), 1, 2, 3],
        seconds: float = 1.0,
    ) -> None:
        super().__init__(name, promised=True)
        self.begun: list[bool] = []
        self._log = log
        self._answer = answer
        self._seconds = seconds

    def begin(self, anew: bool = False) -> None:
        self.begun.append(anew)

    def run(self, request: PromptBatch) -> MethodRun:
        self._log.append((self.name, request))
        outputs = [self._answer(list(prompt)) for prompt in request.prompts]
        return MethodRun(
            outputs, self._seconds, self._seconds / 2, 1, forwards=3, steps=3, drafted=2, accepted=1
        )


def sayings(data: Path | None) -> Suite:
    """A suite of one prompt, which is the folder that it is read from."""
    return Suite("sayings", (Item("one", "all", (str(data),)),), "here")


THEIRS = Library(("plain", "fast"), lambda subject, kind, environment, options: Told(f"theirs:{kind}", []))
