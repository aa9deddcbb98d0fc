"""Which of many candidates is the best, within a time: successive halving, as a pure policy.

All candidates are measured on a few prompts, the better half of them on more, until one is left (Karnin,
Koren, Somekh 2013, *Almost Optimal Exploration in Multi-Armed Bandits*; Jamieson, Talwalkar 2016, arXiv
1502.07943). Every round takes about the same time, so those that are close together at the end have been
measured most. All that are left have been measured on the same prompts.

Nothing here knows a model or a clock: whoever measures asks for a round and tells what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outpace.core import OutpaceError


@dataclass
class Candidate:
    """What was measured of a candidate so far.

    Attributes:
        name: who it is.
        tokens: emitted in each group of prompts, from the first on.
        seconds: that each group took.
        failed: why it is out, if it cannot be measured.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None

    @property
    def measured(self) -> int:
        """Groups of prompts measured."""
        return len(self.tokens)

    @property
    def speed(self) -> float:
        """Tokens per second over all that was measured."""
        return sum(self.tokens) / sum(self.seconds) if self.tokens else 0.0


@dataclass(frozen=True)
class Round:
    """What is to be measured next: these candidates, on the groups of prompts ``first`` to ``stop`` - 1."""

    names: tuple[str, ...]
    first: int
    stop: int


class Halving:
    """Rounds of measurements that end with one candidate.

    Args:
        names: the candidates.
        groups: groups of prompts that there are.
        budget: seconds for all of it; infinite for as long as it takes.
        baselines: candidates that are measured in every round, so that there is something to compare with.
        share: one in so many stays after a round.

    Raises:
        OutpaceError: no candidates, no prompts, no time, or a name twice.
    """

    def __init__(
        self, names: Seq[str], groups: int, budget: float, baselines: Seq[str] = (), share: int = 2
    ) -> None:
        if not names or len(set(names)) < len(names):
            raise OutpaceError(f"candidates are at least one, and each has its own name, not {list(names)}")
        if groups < 1 or not budget > 0 or share < 2:
            raise OutpaceError(
                f"halving needs prompts, time, and at least 2 of which one stays; not {groups} groups of "
                f"prompts, {budget} seconds, {share}"
            )
        if not set(baselines) <= set(names):
            raise OutpaceError(f"baselines are candidates too: {list(baselines)}, {list(names)}")
        self.candidates = {name: Candidate(name) for name in names}
        self.baselines = frozenset(baselines)
        self._rivals = len(names) - len(self.baselines)
        self.rounds = max(1, math.ceil(math.log(max(1, self._rivals), share)))
        self._groups = groups
        self._budget = budget
        self._share = share
        self._left = list(names)
        self._round = 0
        self._probed = False
        self._overhead = 0.0

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return self._overhead + sum(sum(one.seconds) for one in self.candidates.values())

    @property
    def left(self) -> list[str]:
        """Candidates that may still be the best, the best so far first."""
        return sorted(self._left, key=lambda name: -self.candidates[name].speed)

    @property
    def best(self) -> Candidate:
        """The fastest of those that were measured most: a lucky start is no proof.

        Raises:
            OutpaceError: none could be measured; the message has the first reason.
        """
        measured = self._measured()
        if not measured:
            reasons = [one.failed for one in self.candidates.values() if one.failed]
            raise OutpaceError(
                "no candidate could be measured: " + (reasons[0] if reasons else "give a larger --budget")
            )
        known = [self.candidates[name] for name in self._left]
        return max((one for one in known if one.measured == measured), key=lambda one: one.speed)

    def next(self) -> Round | None:
        """The next round; None where one candidate is left, or time or prompts are used up.

        First all are measured on one group of prompts, to learn what they take. Where no group fits into what
        a round has, more candidates leave.
        """
        done = self._measured()
        if not self._probed:
            self._probed = True
            return self._take(done, 1)
        if self._round == 0:
            self._round = 1
            if (count := self._count(done)) > 0:
                return self._take(done, count)
        while True:
            self._halve()
            rivals = [name for name in self._left if name not in self.baselines]
            if self._round == self.rounds or len(rivals) < 2 or done == self._groups:
                return None
            self._round += 1
            if (count := self._count(done)) > 0:
                return self._take(done, count)

    def learn(self, name: str, tokens: int, seconds: float) -> None:
        """A candidate has decoded its next group of prompts.

        Raises:
            OutpaceError: in no time, which cannot be.
        """
        if not seconds > 0 or tokens < 0:
            raise OutpaceError(f"{name}: {tokens} tokens in {seconds} seconds is no measurement")
        self.candidates[name].tokens.append(tokens)
        self.candidates[name].seconds.append(seconds)

    def fail(self, name: str, why: str) -> None:
        """A candidate cannot be measured: it is out."""
        self.candidates[name].failed = why
        if name in self._left:
            self._left.remove(name)

    def spend(self, seconds: float) -> None:
        """Time went into something else."""
        self._overhead += seconds

    def _measured(self) -> int:
        """Groups of prompts that those measured most have behind them."""
        return max((self.candidates[name].measured for name in self._left), default=0)

    def _count(self, done: int) -> int:
        """How many more groups of prompts the round has: as many as fit into its part of the time that is
        left, by what those that take part have taken so far, and no more than so many that the last round
        uses up all, each round ``share`` times as many as the one before.
        """
        part = float(self._share) ** (self._round - self.rounds)
        most = math.ceil(self._groups * part) - done
        seconds = (self._budget - self.spent) / (self.rounds - self._round + 1)
        known = [self.candidates[name] for name in self._left]
        each = sum(sum(one.seconds) / one.measured for one in known if one.measured)
        return most if math.isinf(seconds) or not each else min(most, int(seconds / each))

    def _take(self, first: int, count: int) -> Round:
        return Round(tuple(self.left), first, first + count)

    def _halve(self) -> None:
        """Only the better ones stay, and the baselines."""
        keep = max(1, math.ceil(self._rivals / self._share**self._round))
        rivals = [name for name in self.left if name not in self.baselines]
        stay = {*rivals[:keep], *self.baselines}
        self._left = [name for name in self._left if name in stay]
