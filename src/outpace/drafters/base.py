"""Interface of drafters: frozen dataclasses of options that propose trees of tokens.

A drafter only proposes, so it cannot break losslessness. Data of a request belongs in the state that
``start`` returns, data of an engine in the value that ``prepare`` returns; the drafter itself is immutable,
and one instance may serve many engines.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from outpace.core import Draft
from outpace.draws.noise import key
from outpace.sequence import Sequence, Step
from outpace.spec import check_choices, check_least, check_most
from outpace.targets.base import TargetModel

State = TypeVar("State")


class Declared:
    """What a drafter says of itself and of its drafts.

    Class attributes:
        name: its name in spec strings and counts; by default the class's name in snake case.
        paper: the publication of the method.
        when: when to use it, in a few words that begin with for, to, with or on.
        needs: what it cannot draft without, beside the model; "" if it works by its bare name.

    The properties below may be overridden by class attributes, or by properties that depend on the options.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    when: ClassVar[str] = ""
    needs: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower().strip("_")

    def check_least(self, **least: int) -> None:
        """Check options against lower bounds, in ``__post_init__``, as ``outpace.spec.check_least``."""
        check_least(self.name, self, **least)

    def check_most(self, **most: int) -> None:
        """Check options against upper bounds, in ``__post_init__``, as ``outpace.spec.check_most``."""
        check_most(self.name, self, **most)

    def check_choices(self, *names: str) -> None:
        """Check ``Literal`` options, in ``__post_init__``, as ``outpace.spec.check_choices``."""
        check_choices(self.name, self, *names)

    @property
    def probabilities(self) -> bool:
        """True if its drafts include the distributions they were drawn from."""
        return False

    @property
    def samples(self) -> bool:
        """True if its drafts include distributions with the given options: not if it drafts greedily."""
        return self.probabilities and getattr(self, "draws", None) != "greedy"

    @property
    def drops_distributions(self) -> bool:
        """True if it drops the distributions that its parts sampled from.

        Verifiers that need them are then refused.
        """
        return False

    @property
    def trees(self) -> bool:
        """True if its drafts may branch with the given options: verifiers of chains are then refused."""
        return False

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The numbers of nodes above 0, ascending, to which its drafts may usefully be cut; None for any.

        A cut draft keeps its first nodes, so the best nodes must come first.
        """
        return None

    @property
    def narrow_widths(self) -> tuple[int, ...]:
        """The same of its narrow drafts; empty if it has none.

        A narrow draft leaves out the nodes that pay only in later steps. If ``sequence.narrow``, the drafter
        should propose such a draft.
        """
        return ()

    @property
    def ramp(self) -> int:
        """Consecutive drafted steps until it performs at its best again after a pause; at least 1."""
        return 1

    @property
    def reads_references(self) -> bool:
        """True if it reads ``sequence.references``. Other drafters refuse requests with references."""
        return False

    @property
    def reads_top(self) -> int:
        """Number of the target's most probable tokens per node that it reads through ``step.logits.top``.

        A drafter that reads full rows of logits, or hidden states, cannot draft for ranks that share drafts.
        """
        return 0


class ReadsStates(Generic[State]):
    """What a drafter reads of the target's hidden states; by default nothing."""

    def hidden_layers(self, shared: Any) -> tuple[int, ...]:
        """The target's layers whose hidden states it reads, numbered as in ``Output.hidden``.

        The prompt's hidden states arrive in ``read``, those of later rows in ``Step.hidden`` and
        ``Step.committed``. Called once per engine.

        Args:
            shared: what ``prepare`` returned.
        """
        return ()

    def drafts_unread(self, shared: Any) -> bool:
        """True if it can draft before it has read the prompt's hidden states (``Sequence.prompt_unread``).

        Args:
            shared: what ``prepare`` returned.
        """
        return False

    def read(self, states: Seq[State], hidden: Seq[Mapping[int, Tensor]]) -> None:
        """Read the target's hidden states of the rows that sequences joined with. By default does nothing.

        Called after ``start`` and before the first ``propose``, or, if ``drafts_unread``, the first
        ``observe``, once for each sequence with more rows than its root, if ``hidden_layers`` names layers.
        Together with ``Step.committed``, every committed row arrives exactly once, in order.

        Args:
            hidden: for each sequence, layer -> [len(tokens) - 1, size]: all rows but the root.
        """
        del states, hidden


class WorksBeside(Generic[State]):
    """What a drafter may do for another beside it, or between steps; by default nothing."""

    def propose_after(self, state: State, tokens: Seq[int], most: int) -> Draft:
        """Return what it would propose if the text went on with these tokens; by default nothing.

        Args:
            most: number of nodes, at most.
        """
        del state, tokens, most
        return Draft()

    def guide(self, state: State, guesses: Callable[[Seq[int], int], Draft]) -> None:
        """Take guesses of a cheaper drafter, its ``propose_after``; by default unused.

        A drafter whose tokens cost a forward each may check several guesses in one.
        """
        del state, guesses

    def promise(self, state: State) -> float:
        """A cheap upper estimate of the chance of a draft's first node, in [0, 1]; by default 0.

        In steps that would be plain, a sequence that is decoded alone is still drafted for if this is high.
        """
        del state
        return 0.0

    def catch_up(self, state: State) -> bool:
        """Prepare a piece of what the first ``propose`` of a long prompt needs; return False if more is left.

        Called after ``start``, until it returns True, between the steps of others. It need not be called.
        """
        del state
        return True

    def revise(self, state: State, unchanged: int) -> bool:
        """Update the state to a text that changed by other means than the steps given to ``observe``.

        A ``cascade`` calls this on the drafter of its draft model, whose text is cut back where the target
        predicts a different token.

        Args:
            unchanged: number of leading tokens that are unchanged; all tokens after them may be new.

        Returns:
            False (the default) if the state cannot be updated: it is then stopped, and the sequence started
            again.
        """
        return False


@dataclass(frozen=True)
class Drafter(Declared, ReadsStates[State], WorksBeside[State], ABC):
    """Base class of drafters for a batch of sequences.

    What it says of its drafts, and what it may read or do besides, stands in the classes above.
    """

    def attach(self, target: TargetModel) -> TargetModel:
        """Return the target that an engine with this drafter decodes with; by default ``target`` itself.

        Called once per engine, before ``prepare``, which receives the returned target. A drafter that drafts
        with the target itself may return a target with the same predictions and further capabilities.

        Raises:
            OutpaceError: the drafter does not fit the target.
        """
        return target

    def prepare(self, target: TargetModel) -> Any:
        """Check that the drafter fits the target, and return the data that its states share.

        Called once per engine.

        Raises:
            OutpaceError: it does not fit; the message gives the reason.
        """
        return None

    def renew(self, shared: Any, target: TargetModel) -> Any:
        """Return prepared data as new, after an interrupt that may have come in the middle of any method.

        All states have been dropped without ``stop``. By default the data are prepared again. A drafter that
        loads a model should keep it, which may have been trained meanwhile and takes seconds to load, and
        replace what changes in decoding.

        Args:
            shared: what ``prepare`` returned.
        """
        del shared
        return self.prepare(target)

    def warm(self, shared: Any, slots: int) -> None:
        """Prepare drafts for up to ``slots`` sequences, so that no request waits for it; by default nothing.

        Args:
            shared: what ``prepare`` returned, with no sequence.
        """
        del shared, slots

    @abstractmethod
    def start(self, sequence: Sequence, shared: Any) -> State:
        """Return the state of a new sequence. ``sequence`` is live: its tokens grow as they are committed."""

    @abstractmethod
    def propose(self, states: Seq[State]) -> list[Draft]:
        """Return one draft per sequence, possibly empty.

        Not called in plain steps. At most the first ``sequence.budget`` nodes of a draft are verified; if the
        draft states chances, only as many as pay, possibly none.
        """

    def observe(self, states: Seq[State], steps: Seq[Step]) -> None:
        """Learn from the outcome of a step; in steps without ``propose`` the drafts are empty.

        Sequences that ended with the step are included. By default does nothing.
        """
        del states, steps

    def stop(self, state: State) -> None:
        """Free the resources of a sequence that has left. By default does nothing."""
        del state


class SequenceDrafter(Drafter[State]):
    """A drafter that handles one sequence at a time: implement ``start``, ``draft`` and ``learn``."""

    @abstractmethod
    def draft(self, state: State) -> Draft:
        """Return a draft for one sequence, possibly empty."""

    def learn(self, state: State, step: Step) -> None:
        """Learn from the outcome of a step of one sequence. By default does nothing."""
        del state, step

    def propose(self, states: Seq[State]) -> list[Draft]:
        return [self.draft(state) for state in states]

    def observe(self, states: Seq[State], steps: Seq[Step]) -> None:
        for state, step in zip(states, steps, strict=True):
            self.learn(state, step)


class Filler:
    """Source of filler tokens for cells that no forward has computed, picked from the text so far.

    Deterministic; avoids tokens that end the text. Part of a request's state.

    Args:
        sequence: the sequence whose text the tokens come from.
        seed: seed of the picks.
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
