"""One of two drafters per sequence and step: a cheap one where it is worth more, otherwise the other.

What the first one's draft is worth in a step follows from the chances that it states. The second one costs
too much to be asked for comparison; what its drafts are worth is measured: tokens per time of the steps in
which it drafted (Liu et al. 2025, Not-a-Bandit, arXiv 2510.20064, choose among draft models by what they
reach). It may check guesses of the first one on its way, so that its own tokens cost less than a forward each
(two levels, as in ML-SpecQD, Georganas et al. 2025, arXiv 2503.13565).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import Drafter
from outpace.drafters.combined.parts import OfParts
from outpace.drafters.combined.share import PartStep
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel
from outpace.tree import worthwhile

_FIRST, _SECOND = range(2)
_KEEP = 0.95  # share of earlier steps' weight that a new one leaves
_FORGET = 0.02  # share of what the second one lacks of it that is forgotten in each step of the first one
_HOPE = 2.0  # tokens per plain step's time that the second one is assumed to reach at first
_SURE = 2.0  # tokens that are expected of a draft of the first one that is taken where no costs are known
_WIDE = 32  # nodes of a draft that copies, at most
_NOTHING = Draft()


class Reached:
    """Tokens per time of the steps in which the second drafter drafted; time in plain steps."""

    def __init__(self) -> None:
        self._tokens, self._time = _HOPE, 1.0

    @property
    def speed(self) -> float:
        return self._tokens / self._time

    def step(self, tokens: int, time: float) -> None:
        self._tokens, self._time = self._tokens * _KEEP + tokens, self._time * _KEEP + time

    def rest(self) -> None:
        """Forget, in a step of the first one, that the second reached little, so that it is tried again."""
        if self.speed < _HOPE:
            self._tokens += _FORGET * (_HOPE * self._time - self._tokens)


class EitherShared(NamedTuple):
    """Data that an engine's sequences share: those of each part, and what the second one reaches."""

    prepared: list[Any]
    reached: Reached


@dataclass
class EitherState:
    """A sequence's states of the parts, which of them drafted, and the seconds that the second one took."""

    sequence: Sequence
    reached: Reached
    states: list[Any] = field(default_factory=list)
    drafted: int = -1
    seconds: float = 0.0


@dataclass(frozen=True)
class Either(OfParts[EitherState]):
    """One of two drafters in each step: the first where its draft is worth more, otherwise the second.

    Attributes:
        parts: the two, as in ``either:(suffix:memory=0)+(self)``. The first is cheap and states chances.
    """

    when: ClassVar[str] = "to copy where a text repeats, and to draft with a model elsewhere"
    needs: ClassVar[str] = "two drafters, as in either:(suffix:memory=0)+(self)"
    paper: ClassVar[str] = (
        "Liu et al. 2025, Not-a-Bandit: Provably No-Regret Drafter Selection in Speculative Decoding for "
        "LLMs (arXiv 2510.20064)"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if len(self.parts) != 2 or not all(isinstance(part, Drafter) for part in self.parts):
            raise OutpaceError("either: give it two drafters, as in either:(suffix:memory=0)+(self)")
        if any(type(part).attach is not Drafter.attach for part in self.parts):
            raise OutpaceError("either: a part must not replace the target by its own; use it by itself")

    @property
    def widths(self) -> tuple[int, ...] | None:
        # Both draft no more than pays; what is left to decide is whether to draft.
        widths = [part.widths for part in self.parts]
        return None if widths[_SECOND] is None else (max(_WIDE, *(own[-1] for own in widths if own)),)

    def prepare(self, target: TargetModel) -> EitherShared:
        prepared = [part.prepare(target) for part in self.parts]
        if any(part.hidden_layers(own) for part, own in zip(self.parts, prepared, strict=True)):
            raise OutpaceError("either: a part must not read hidden states; use combined")
        return EitherShared(prepared, Reached())

    def renew(self, shared: EitherShared, target: TargetModel) -> EitherShared:
        return EitherShared(
            [part.renew(own, target) for part, own in zip(self.parts, shared.prepared, strict=True)],
            Reached(),
        )

    def warm(self, shared: EitherShared, slots: int) -> None:
        for part, own in zip(self.parts, shared.prepared, strict=True):
            part.warm(own, slots)

    def start(self, sequence: Sequence, shared: EitherShared) -> EitherState:
        state = EitherState(sequence, shared.reached)
        try:
            for part, own in zip(self.parts, shared.prepared, strict=True):
                state.states.append(part.start(sequence, own))
            self.parts[_SECOND].guide(
                state.states[_SECOND], partial(self.parts[_FIRST].propose_after, state.states[_FIRST])
            )
        except BaseException:
            self.stop(state)
            raise
        return state

    def stop(self, state: EitherState) -> None:
        for part, own in zip(self.parts, state.states, strict=False):  # fewer states if a start failed
            part.stop(own)

    def revise(self, state: EitherState, unchanged: int) -> bool:
        state.drafted = -1
        own = zip(self.parts, state.states, strict=True)
        return all(part.revise(of_part, unchanged) for part, of_part in own)

    def promise(self, state: EitherState) -> float:
        return max(part.promise(own) for part, own in zip(self.parts, state.states, strict=True))

    def propose(self, states: Seq[EitherState]) -> list[Draft]:
        first, second = self.parts
        drafts = first.propose([state.states[_FIRST] for state in states])
        left = [place for place, state in enumerate(states) if not _wins(drafts[place], state)]
        for state in states:
            state.drafted, state.seconds = _FIRST, 0.0
        if left:
            began = time.perf_counter()  # by default the engine's clock, too
            found = second.propose([states[place].states[_SECOND] for place in left])
            seconds = (time.perf_counter() - began) / len(left)
            for place, draft in zip(left, found, strict=True):
                if draft.tokens:
                    drafts[place] = draft
                    states[place].drafted, states[place].seconds = _SECOND, seconds
        return drafts

    def observe(self, states: Seq[EitherState], steps: Seq[Step]) -> None:
        for place, part in enumerate(self.parts):
            own = [
                step if state.drafted == place else PartStep(step, _NOTHING, (), ())
                for state, step in zip(states, steps, strict=True)
            ]
            part.observe([state.states[place] for state in states], own)
        for state, step in zip(states, steps, strict=True):
            sequence = state.sequence
            if state.drafted >= 0:
                name = self.parts[state.drafted].name
                sequence.stats.count(f"{name}_drafted", len(step.draft))
                sequence.stats.count(f"{name}_accepted", len(step.path))
            plain, row = sequence.plain_seconds, sequence.row_cost
            if state.drafted == _FIRST:
                state.reached.rest()
            if state.drafted == _SECOND and plain is not None and row is not None:
                state.reached.step(len(step.tokens), 1 + row * len(step.draft) + state.seconds / plain)
            state.drafted = -1


def _wins(draft: Draft, state: EitherState) -> bool:
    """True if a draft of the first part is worth more than the second one's are."""
    row, chances = state.sequence.row_cost, sorted(draft.chances or (), reverse=True)
    if state.sequence.plain_seconds is None or row is None:
        return sum(chances) >= _SURE
    nodes = worthwhile(chances, row)
    return (1 + sum(chances[:nodes])) / (1 + row * nodes) > state.reached.speed
