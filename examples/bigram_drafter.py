"""A custom drafter in one file, which guesses each token from the one before it.

docs/guides/add-a-drafter.md explains it line by line. Run it: python examples/bigram_drafter.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from outpace import Engine, SamplingParams
from outpace.core import Draft
from outpace.drafters import SequenceDrafter
from outpace.sequence import Sequence, Step
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import chain


@dataclass
class BigramState:
    """The state of one request: the last token that followed each token, and the length of text read."""

    sequence: Sequence
    follower: dict[int, int] = field(default_factory=dict)
    read: int = 0


@dataclass(frozen=True)
class Bigram(SequenceDrafter[BigramState]):
    """Drafts a chain in which each token is the last one that followed its predecessor.

    Attributes:
        length: maximum number of tokens drafted per step.
    """

    length: int = 4

    paper: ClassVar[str] = "none: an example"

    def __post_init__(self) -> None:
        self.check_least(length=1)

    def start(self, sequence: Sequence, shared: Any) -> BigramState:
        state = BigramState(sequence)
        self._read(state)
        return state

    def draft(self, state: BigramState) -> Draft:
        guesses = [state.sequence.tokens[-1]]
        while len(guesses) <= self.length and guesses[-1] in state.follower:
            guesses.append(state.follower[guesses[-1]])
        return chain(guesses[1:])

    def learn(self, state: BigramState, step: Step) -> None:
        self._read(state)

    def _read(self, state: BigramState) -> None:
        tokens = state.sequence.tokens
        for place in range(state.read, len(tokens) - 1):
            state.follower[tokens[place]] = tokens[place + 1]
        state.read = len(tokens) - 1


def main() -> None:
    check_drafter(Bigram())
    prompts = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
    params = SamplingParams(max_new_tokens=100, temperature=0.7, seed=1)
    target = ToyTarget()
    plain = Engine(target).generate(prompts, params)
    fast = Engine(target, Bigram(), adaptive=False).generate(prompts, params)
    assert [g.tokens for g in fast] == [g.tokens for g in plain]
    for name, generations in (("plain", plain), ("bigram", fast)):
        tokens = sum(g.stats.tokens for g in generations)
        steps = sum(g.stats.steps for g in generations)
        print(f"{name:7} {tokens} tokens in {steps} steps: {tokens / steps:.2f} per step")


if __name__ == "__main__":
    main()
