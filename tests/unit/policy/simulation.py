"""A decoding that takes no time: recorded step costs, an acceptance process, seconds only counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from outpace.policy.plan import Outcome, Policy

Seconds = Callable[[int], float]  # rows of a forward -> its seconds
Chances = Callable[[int], float]  # output token -> the chance that a guess of it is right


def flat(rows: int) -> float:
    """A large accelerator: rows cost nothing."""
    return 20e-3


def linear(rows: int) -> float:
    """A processor: each row costs a tenth of the first."""
    return 3e-3 + 0.3e-3 * (rows - 1)


def steep(rows: int) -> float:
    """A busy machine: each row costs as much as the first."""
    return 3e-3 * rows


def stepped(rows: int) -> float:
    """Tiles of eight rows: the last of a tile costs no more than its first."""
    return 4e-3 + 2.4e-3 * ((rows - 1) // 8)


def jump(rows: int) -> float:
    """A matrix-vector kernel for one row, a slower matrix kernel for several: the second row costs most."""
    return 72e-3 if rows == 1 else 95e-3 + 2.5e-3 * max(0, rows - 8)


# Milliseconds of a step of outpace-nano, float32, on two cores, by rows: one recording, interpolated.
RECORDED = ((1, 3.1), (2, 3.6), (3, 3.9), (5, 4.5), (9, 5.7), (17, 7.4), (33, 11.8), (65, 20.6), (129, 39.0))


def recorded(rows: int) -> float:
    for (low, fast), (high, slow) in pairwise(RECORDED):
        if rows <= high:
            return 1e-3 * (fast + (slow - fast) * (rows - low) / (high - low))
    return 1e-3 * RECORDED[-1][1] * rows / RECORDED[-1][0]


CURVES: dict[str, Seconds] = {
    "flat": flat,
    "linear": linear,
    "steep": steep,
    "stepped": stepped,
    "jump": jump,
    "recorded": recorded,
}


@dataclass
class Machine:
    """Seconds of a step, with the noise of a busy machine, from a seed.

    Attributes:
        seconds: of a forward, by rows.
        draft: seconds of the drafter for a step, and for each node.
        jitter: standard deviation of a step's seconds, relative.
        outliers: chance that a step takes ten times as long.
        warm_up: how many times as long the first forward of each width takes.
    """

    seconds: Seconds
    draft: tuple[float, float] = (50e-6, 0.0)
    jitter: float = 0.0
    outliers: float = 0.0
    warm_up: float = 1.0
    seed: int = 0
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def noise(self) -> float:
        factor = max(0.5, 1 + self.jitter * self._random.gauss(0, 1))
        return factor * (10 if self._random.random() < self.outliers else 1)

    def forward(self, rows: int) -> float:
        first = self.warm_up if rows not in self.seen else 1.0
        self.seen.add(rows)
        return self.seconds(rows) * first * self.noise()


@dataclass
class Text:
    """Outcomes of a chain of guesses: each is right with a chance that depends on its place.

    Attributes:
        chance: of each guess.
        found: the chance that there is a draft at all in a step.
        longest: nodes that the drafter has at most.
        cold: steps in a row that the drafter needs before any guess is right.
        narrow: the same of narrow drafts, whose guesses full ones contain too; None if the drafter has none.
    """

    chance: Chances
    found: float = 1.0
    longest: int = 64
    cold: int = 0
    narrow: Text | None = None


def constant(chance: float) -> Chances:
    return lambda token: chance


def simulate(
    policy: Policy, machine: Machine, text: Text, tokens: int, batch: int = 1, seed: int = 1
) -> float:
    """Seconds that a batch takes for so many tokens of each sequence, on average over the sequences."""
    chances = random.Random(seed)
    seconds, done, warm = 0.0, 0.0, 0
    while done < tokens:
        plan = policy.plan(batch)
        budget = plan.nodes
        drafted, paths = [], []
        warm = warm + 1 if budget and not plan.narrow else 0
        drafts = text.narrow if warm <= text.cold and text.narrow else text
        for _ in range(batch):
            there = budget > 0 and chances.random() < drafts.found
            size = min(budget, drafts.longest) if there else 0
            length = 0
            if warm > text.cold or drafts is text.narrow:
                while length < size and chances.random() < drafts.chance(int(done) + length):
                    length += 1
            drafted.append(size)
            paths.append(range(length))
        drafting = (machine.draft[0] + machine.draft[1] * max(drafted)) * machine.noise() if budget else 1e-6
        outcome = Outcome(plan, drafted, paths, drafting, 0.0)
        verifying = machine.forward(outcome.rows)
        seconds += drafting + verifying
        done += 1 + sum(map(len, paths)) / batch
        policy.learn(replace(outcome, verify_seconds=verifying))
    return seconds
