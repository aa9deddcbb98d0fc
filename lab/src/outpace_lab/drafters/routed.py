"""One drafter per topic: each request is drafted for by the one that a router picks from its prompt.

Liu et al. 2023, Online Speculative Decoding (arXiv 2310.07177), section 4: queries of one domain have their
own draft model, which learns from them alone (``outpace_lab.train.Topics``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.combined.parts import OfParts
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

Router = Callable[[Seq[int]], int]
"""The index of the drafter for a request, from its prompt; always the same for the same prompt."""

T = TypeVar("T")


class TopicRouter:
    """Router by the words of example prompts: naive Bayes over tokens.

    Args:
        examples: for each topic, some prompts as token ids.

    Raises:
        OutpaceError: a topic has no example.
    """

    def __init__(self, examples: Seq[Seq[Seq[int]]]) -> None:
        counts = [Counter(token for prompt in topic for token in prompt) for topic in examples]
        if not all(counts):
            raise OutpaceError("a router needs examples of each topic: give some prompts as token ids")
        known = len(set().union(*counts))
        self._none = [-math.log(count.total() + known) for count in counts]
        self._found = [
            {token: math.log((1 + n) / (count.total() + known)) for token, n in count.items()}
            for count in counts
        ]

    def __call__(self, prompt: Seq[int]) -> int:
        scores = [
            sum(found.get(token, none) for token in prompt)
            for found, none in zip(self._found, self._none, strict=True)
        ]
        return scores.index(max(scores))


class RoutedShared(NamedTuple):
    """Data of each part that an engine's sequences share, and the target's layers that it reads."""

    prepared: list[Any]
    layers: list[tuple[int, ...]]


@dataclass
class RoutedState:
    """A sequence's part, by its index, and its state there."""

    part: int
    own: Any
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Routed(OfParts[RoutedState]):
    """Drafters of which each sequence uses one.

    Attributes:
        parts: the drafters.
        router: picks a sequence's part from its prompt, as ``TopicRouter`` does.
    """

    router: Router = field(repr=False)

    paper: ClassVar[str] = "Liu et al. 2023, Online Speculative Decoding (OSD, arXiv 2310.07177), section 4"

    def __post_init__(self) -> None:
        if not self.parts or not all(isinstance(part, Drafter) for part in self.parts):
            raise OutpaceError(
                "routed: parts are drafters, at least one, as load_drafter('suffix') makes them"
            )

    @property
    def reads_references(self) -> bool:
        return all(part.reads_references for part in self.parts)

    def prepare(self, target: TargetModel) -> RoutedShared:
        prepared = [part.prepare(target) for part in self.parts]
        layers = [part.hidden_layers(own) for part, own in zip(self.parts, prepared, strict=True)]
        return RoutedShared(prepared, layers)

    def renew(self, shared: RoutedShared, target: TargetModel) -> RoutedShared:
        prepared = [part.renew(own, target) for part, own in zip(self.parts, shared.prepared, strict=True)]
        return shared._replace(prepared=prepared)

    def hidden_layers(self, shared: RoutedShared) -> tuple[int, ...]:
        return tuple(sorted({layer for own in shared.layers for layer in own}))

    def start(self, sequence: Sequence, shared: RoutedShared) -> RoutedState:
        place = self.router(sequence.prompt)
        if not 0 <= place < len(self.parts):
            raise OutpaceError(f"routed: the router picks drafter {place} of {len(self.parts)}")
        sequence.stats.count(f"route_{place}", 1)
        own = self.parts[place].start(sequence, shared.prepared[place])
        return RoutedState(place, own, shared.layers[place])

    def read(self, states: Seq[RoutedState], hidden: Seq[Mapping[int, Tensor]]) -> None:
        for part, own, rows in self._each(states, hidden):
            layers = own[0].layers
            if layers:
                part.read([s.own for s in own], [{layer: one[layer] for layer in layers} for one in rows])

    def propose(self, states: Seq[RoutedState]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for part, own, places in self._each(states, range(len(states))):
            drafts |= zip(places, part.propose([state.own for state in own]), strict=True)
        return [drafts[place] for place in range(len(states))]

    def observe(self, states: Seq[RoutedState], steps: Seq[Step]) -> None:
        for part, own, of_part in self._each(states, steps):
            part.observe([state.own for state in own], of_part)

    def revise(self, state: RoutedState, unchanged: int) -> bool:
        return self.parts[state.part].revise(state.own, unchanged)

    def stop(self, state: RoutedState) -> None:
        self.parts[state.part].stop(state.own)

    def _each(
        self, states: Seq[RoutedState], with_each: Seq[T]
    ) -> Iterator[tuple[Drafter[Any], list[RoutedState], list[T]]]:
        """Each part that has some of the states, with those states and what belongs to them."""
        for place, part in enumerate(self.parts):
            own = [pair for pair in zip(states, with_each, strict=True) if pair[0].part == place]
            if own:
                yield part, [state for state, _ in own], [one for _, one in own]
