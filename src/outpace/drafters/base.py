"""The contract of a drafter: a frozen dataclass of options that proposes trees of tokens.

A drafter can only propose, so it cannot break losslessness. What belongs to a request lives in its state,
what belongs to an engine in what ``prepare`` returns; a drafter itself is never written to, and one instance
may serve many engines.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from outpace.core import Draft
from outpace.sampling import key
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

State = TypeVar("State")


@dataclass(frozen=True)
class Drafter(ABC, Generic[State]):
    """Drafts for a batch of sequences.

    Class attributes:
        name: in spec strings and in the names of counts; by default the class's name in snake case.
        paper: where the method was published.

    What follows is a class attribute too, or a property where it depends on the options.
    """

    name: ClassVar[str]
    paper: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower().strip("_")

    @property
    def probabilities(self) -> bool:
        """Whether its drafts bring the distributions they were drawn from."""
        return False

    @property
    def samples(self) -> bool:
        """Whether its drafts bring distributions with the options it has: not where it drafts greedily."""
        return self.probabilities and getattr(self, "draws", None) != "greedy"

    @property
    def drops_distributions(self) -> bool:
        """Whether it drops the distributions that parts of it sampled from.

        A verifier that weighs them is then refused.
        """
        return False

    @property
    def trees(self) -> bool:
        """Whether its drafts may branch, with the options it has: a verifier of chains is then refused."""
        return False

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The numbers of nodes above 0, ascending, that it makes sense to cut its drafts to; None for any.

        What is left of a cut draft are its first nodes, so the best ones come first.
        """
        return None

    @property
    def ramp(self) -> int:
        """Steps in a row it takes, after some without a draft, to draft as well as it can; at least 1."""
        return 1

    @property
    def reads_references(self) -> bool:
        """Whether it reads ``sequence.references``: to any other, a request with references is refused."""
        return False

    def attach(self, target: TargetModel) -> TargetModel:
        """What an engine decodes with where this drafter drafts: by default the target as it is.

        Called once by each engine, before ``prepare``, which gets what is returned. A drafter that drafts
        with the target itself may return a target that says the same and does more.

        Raises:
            OutpaceError: the drafter does not fit the target.
        """
        return target

    def prepare(self, target: TargetModel) -> Any:
        """Called once by each engine: check that the drafter fits the target, return what its states share.

        Raises:
            OutpaceError: it does not fit; the message says why.
        """
        return None

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        """Hidden states it needs of the target, by layer, as ``Output.hidden`` counts them; by default none.

        Those of the prompt arrive in ``read``, those of later rows in ``Step.hidden`` and ``Step.committed``.
        Asked once by each engine.

        Args:
            shared: what ``prepare`` returned.
        """
        return ()

    @abstractmethod
    def start(self, sequence: Sequence, shared: Any) -> State:
        """The state of a new sequence. ``sequence`` is live: its tokens grow as they are committed."""

    def read(self, states: Seq[State], hidden: Seq[Mapping[int, Tensor]]) -> None:
        """The target's hidden states of what was there when sequences joined, for a drafter that needs any.

        Called after ``start`` and before the first ``propose``, once for each sequence that has more than its
        root. With ``Step.committed`` every committed row then arrives exactly once, in order. (By default
        nothing is read.)

        Args:
            hidden: for each sequence, layer -> [len(tokens) - 1, size]: all rows but the root.
        """
        del states, hidden

    @abstractmethod
    def propose(self, states: Seq[State]) -> list[Draft]:
        """One draft for each sequence, maybe empty.

        Left out in steps that are to be plain. Of a draft, the first ``sequence.budget`` nodes are taken; now
        and then none are, where the governor only looks at what would have been drafted.
        """

    @abstractmethod
    def observe(self, states: Seq[State], steps: Seq[Step]) -> None:
        """What became of the drafts, empty ones where none were asked for.

        Sequences that ended with the step are included.
        """

    def revise(self, state: State, unchanged: int) -> bool:
        """The text was changed otherwise than by steps that ``observe`` has heard of.

        A ``cascade`` asks this of the drafter that drafts for its draft model, whose text is cut back where
        the target says something else.

        Args:
            unchanged: the first so many tokens are what they were; those after them may all be new.

        Returns:
            False (the default) if the state cannot follow: it is then stopped, and the sequence started anew.
        """
        return False

    def stop(self, state: State) -> None:
        """A sequence has left; free what it holds. (By default nothing is held.)"""
        del state


class SequenceDrafter(Drafter[State]):
    """A drafter that handles one sequence at a time: implement ``start``, ``draft`` and ``learn``."""

    @abstractmethod
    def draft(self, state: State) -> Draft:
        """A draft for one sequence, maybe empty."""

    def learn(self, state: State, step: Step) -> None:
        """What became of the draft of one sequence. (By default nothing is learnt.)"""
        del state, step

    def propose(self, states: Seq[State]) -> list[Draft]:
        return [self.draft(state) for state in states]

    def observe(self, states: Seq[State], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            self.learn(state, step)


class Filler:
    """Tokens for cells that no forward has computed: picked from the text so far, the same in every run.

    A token that ends the text is avoided. Part of a request's state.

    Args:
        sequence: whose text.
        seed: picks others.
    """

    def __init__(self, sequence: Sequence, seed: int) -> None:
        self._sequence = sequence
        self._seed = seed
        self._picked = 0

    def __call__(self) -> int:
        tokens, stops = self._sequence.tokens, self._sequence.stop_tokens
        for _ in range(8):
            self._picked += 1
            token = tokens[key(self._seed, self._picked) % len(tokens)]
            if token not in stops:
                break
        return token
