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

from outpace.core import Draft, OutpaceError
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

    def check_least(self, **least: int) -> None:
        """Check options against their least values; None passes. For ``__post_init__``.

        Raises:
            OutpaceError: an option is below its least value; the message names both.
        """
        for option, bound in least.items():
            value = getattr(self, option)
            if value is not None and value < bound:
                raise OutpaceError(f"{self.name}: {option} must be at least {bound}, not {value}")

    @property
    def probabilities(self) -> bool:
        """True if its drafts bring the distributions they were drawn from."""
        return False

    @property
    def samples(self) -> bool:
        """True if its drafts bring distributions with the options it has: not if it drafts greedily."""
        return self.probabilities and getattr(self, "draws", None) != "greedy"

    @property
    def drops_distributions(self) -> bool:
        """True if it drops the distributions that parts of it sampled from.

        A verifier that weighs them is then refused.
        """
        return False

    @property
    def trees(self) -> bool:
        """True if its drafts may branch, with the options it has: a verifier of chains is then refused."""
        return False

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The numbers of nodes above 0, ascending, to which cutting its drafts makes sense; None for any.

        A cut draft keeps its first nodes, so the best ones come first.
        """
        return None

    @property
    def ramp(self) -> int:
        """Consecutive steps, after some without a draft, until it drafts as well as it can; at least 1."""
        return 1

    @property
    def reads_references(self) -> bool:
        """True if it reads ``sequence.references``; any other drafter refuses a request with references."""
        return False

    def attach(self, target: TargetModel) -> TargetModel:
        """The target that an engine decodes with when this drafter drafts: by default the target as it is.

        Called once by each engine, before ``prepare``, which gets what is returned. A drafter that drafts
        with the target itself may return a target that predicts the same and can do more.

        Raises:
            OutpaceError: the drafter does not fit the target.
        """
        return target

    def prepare(self, target: TargetModel) -> Any:
        """Check that the drafter fits the target, and return what its states share; once per engine.

        Raises:
            OutpaceError: it does not fit; the message gives the reason.
        """
        return None

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        """The target's layers whose hidden states it reads, as ``Output.hidden`` counts them.

        Those of the prompt arrive in ``read``, those of later rows in ``Step.hidden`` and ``Step.committed``.
        Called once per engine.

        Args:
            shared: what ``prepare`` returned.
        """
        return ()

    @abstractmethod
    def start(self, sequence: Sequence, shared: Any) -> State:
        """The state of a new sequence. ``sequence`` is live: its tokens grow as they are committed."""

    def read(self, states: Seq[State], hidden: Seq[Mapping[int, Tensor]]) -> None:
        """Take in the target's hidden states of the rows that sequences joined with. (By default nothing.)

        Called after ``start`` and before the first ``propose``, once for each sequence that has more than its
        root, if ``hidden_layers`` names any. With ``Step.committed`` every committed row then arrives exactly
        once, in order.

        Args:
            hidden: for each sequence, layer -> [len(tokens) - 1, size]: all rows but the root.
        """
        del states, hidden

    @abstractmethod
    def propose(self, states: Seq[State]) -> list[Draft]:
        """One draft for each sequence, maybe empty.

        Not called in plain steps. Of a draft, at most the first ``sequence.budget`` nodes are verified, and
        of one that states chances as many as pay, perhaps none.
        """

    @abstractmethod
    def observe(self, states: Seq[State], steps: Seq[Step]) -> None:
        """Take in the outcome of a step; drafts that were not asked for are empty.

        Sequences that ended with the step are included.
        """

    def revise(self, state: State, unchanged: int) -> bool:
        """Follow a text that was changed in another way than by the steps given to ``observe``.

        A ``cascade`` calls this on the drafter that drafts for its draft model, whose text is cut back where
        the target predicts something else.

        Args:
            unchanged: number of first tokens that are what they were; those after them may all be new.

        Returns:
            False (the default) if the state cannot follow: it is then stopped, and the sequence started
            again.
        """
        return False

    def stop(self, state: State) -> None:
        """Free what a sequence that has left holds. (By default nothing.)"""
        del state


class SequenceDrafter(Drafter[State]):
    """A drafter that handles one sequence at a time: implement ``start``, ``draft`` and ``learn``."""

    @abstractmethod
    def draft(self, state: State) -> Draft:
        """A draft for one sequence, maybe empty."""

    def learn(self, state: State, step: Step) -> None:
        """Take in the outcome of a step of one sequence. (By default nothing is learnt.)"""
        del state, step

    def propose(self, states: Seq[State]) -> list[Draft]:
        return [self.draft(state) for state in states]

    def observe(self, states: Seq[State], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            self.learn(state, step)


class Filler:
    """Source of tokens for cells that no forward has computed: from the text so far, the same in every run.

    A token that ends the text is avoided. Part of a request's state.

    Args:
        sequence: the sequence whose text they come from.
        seed: another seed picks others.
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
