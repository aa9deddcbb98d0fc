"""Ways of decoding that compete, and how fast each was, measured in rounds beside plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outpace.bench.halving import Halving, Round
from outpace.bench.items import Suite
from outpace.bench.lab.roof import wait
from outpace.bench.ours import Ours
from outpace.bench.run import Measured, Settings, Trace, measure
from outpace.bench.runs import BASELINE, Request, Run
from outpace.bench.statistics import interval, quartiles
from outpace.bench.subject import Subject
from outpace.core import OutpaceError

THROUGHPUT, LATENCY = "throughput", "latency"


@dataclass(frozen=True)
class Goal:
    """What is to be fast.

    Attributes:
        objective: ``throughput``, tokens per second of all prompts together, or ``latency``, tokens per
            second of one of them.
        batches: how many prompts are decoded at once; of several numbers the best is chosen.
    """

    objective: str = THROUGHPUT
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.objective not in (THROUGHPUT, LATENCY):
            raise OutpaceError(
                f"there is no objective {self.objective!r}; there are: {THROUGHPUT}, {LATENCY}"
            )
        if self.objective == LATENCY and len(self.batches) > 1:
            raise OutpaceError(
                "latency is least with one prompt at a time; give one --batch, that of the use to come"
            )

    @property
    def unit(self) -> int:
        """Prompts that every batch divides: candidates are compared on so many."""
        return math.lcm(*self.batches)


class Way(NamedTuple):
    """A way of decoding: a drafter's spec, and how many prompts at once."""

    spec: str
    batch: int

    def __str__(self) -> str:
        return self.spec if self.batch == 1 else f"{self.spec}, {self.batch} at once"


@dataclass(frozen=True)
class Unit:
    """What a way did with a unit of prompts; the seconds are as the objective counts them."""

    tokens: int
    seconds: float
    steps: int
    outputs: list[list[int]]


@dataclass(frozen=True)
class WaySpeed:
    """How fast a way is on some prompts.

    Attributes:
        tokens_per_second: by the objective.
        plain: the same of plain decoding, as many prompts at once.
        speedup: the median over units of prompts of the one over the other.
        interval: its 95% interval; None for a single unit.
        mean_accepted_length: tokens out per step.
        prompts: how many.
        equal: how many outputs are those of plain decoding.
        outputs: of how many.
    """

    tokens_per_second: float
    plain: float
    speedup: float
    interval: tuple[float, float] | None
    mean_accepted_length: float
    prompts: int
    equal: int
    outputs: int


class Frugal(Ours):
    """A drafter whose engine has a cache while it decodes alone: many of them fit into memory together.

    Room is made before a run's seconds begin.
    """

    def __init__(self, subject: Subject, spec: str, temperature: float = 0.0) -> None:
        super().__init__(subject.target, spec, temperature=temperature)
        self._device = subject.device
        self._engine.make_room(1, 1)

    def begin(self, anew: bool = False) -> None:
        """A new engine, as small."""
        super().begin(anew)
        self._engine.make_room(1, 1)

    def run(self, request: Request) -> Run:
        """Decode, step by step."""
        longest = max(map(len, request.prompts))
        self._engine.make_room(len(request.prompts), longest + request.max_new_tokens + 64)
        wait(self._device)
        try:
            return super().run(request)
        finally:
            self._engine.make_room(1, 1)


def method_of(subject: Subject, way: Way, settings: Settings) -> Frugal:
    try:
        return Frugal(subject, way.spec, settings.temperature)
    except OutpaceError as error:
        raise type(error)(f"{way.spec}: {error}") from None


@dataclass
class Rounds:
    """Measures rounds, and keeps what every way did."""

    subject: Subject
    suite: Suite
    goal: Goal
    settings: Settings
    methods: dict[Way, Frugal]
    found: dict[Way, list[Unit]] = field(default_factory=dict)

    def run(
        self,
        todo: Round,
        halving: Halving,
        stopped: Callable[[], bool],
        report: Callable[[str], None] = lambda text: None,
    ) -> list[Measured]:
        """A round, batch by batch; what only some of the batches were measured on does not count.

        Returns:
            What was measured, for each batch; plain decoding first.
        """
        # Who has left gives back its memory.
        self.methods = {way: method for way, method in self.methods.items() if str(way) in todo.names}
        unit = self.goal.unit
        part = replace(self.suite, items=self.suite.items[todo.first * unit : todo.stop * unit])
        took: dict[Way, list[Unit]] = {}
        found = []
        for batch in self.goal.batches:
            ways = [way for way in self.methods if way.batch == batch]
            ways.sort(key=lambda way: way.spec != BASELINE)  # plain decoding answers for all
            measured = measure(
                self.subject,
                [self.methods[way] for way in ways],
                part,
                batch,
                self.settings,
                stopped=lambda: _ticked(stopped, report),
                warm=todo.first > 0,
            )
            found.append(measured)
            for way, trace in zip(ways, measured.traces, strict=True):
                if trace.error is not None:
                    halving.fail(str(way), f"{way}: {trace.error}")
                else:
                    took[way] = self._units(measured, trace)
        whole = min(map(len, took.values()), default=0)
        for way, units in took.items():
            self.found.setdefault(way, []).extend(units[:whole])
            for one in units[:whole]:
                halving.learn(str(way), one.tokens, one.seconds)
        return found

    def _units(self, measured: Measured, trace: Trace) -> list[Unit]:
        each = self.goal.unit // measured.batch
        found = []
        for first in range(0, len(trace.runs) - each + 1, each):
            runs = [run for group in trace.runs[first : first + each] for run in group[0]]
            throughput = self.goal.objective == THROUGHPUT
            seconds = sum(run.seconds if throughput else sum(run.last_seconds) for run in runs)
            outputs = [output for run in runs for output in run.outputs]
            steps = sum(run.steps or 0 for run in runs)
            found.append(Unit(sum(run.tokens for run in runs), seconds, steps, outputs))
        return found

    def taus(self) -> dict[str, float]:
        """Tokens per step, the target's own included, of every way that was measured, by its name."""
        return {str(way): _tau(units) for way, units in self.found.items() if units}

    def speed(self, way: Way) -> WaySpeed:
        """How fast a way was, beside plain decoding of the same prompts."""
        units = self.found[way]
        plain = self.found[Way(BASELINE, way.batch)]  # measured in every round
        ratios = [
            (one.tokens / one.seconds) / (other.tokens / other.seconds)
            for one, other in zip(units, plain, strict=True)
        ]
        pairs = [
            (mine, theirs)
            for one, other in zip(units, plain, strict=True)
            for mine, theirs in zip(one.outputs, other.outputs, strict=True)
        ]
        return WaySpeed(
            sum(one.tokens for one in units) / sum(one.seconds for one in units),
            sum(one.tokens for one in plain) / sum(one.seconds for one in plain),
            quartiles(ratios)[1],
            interval(ratios),
            _tau(units),
            len(units) * self.goal.unit,
            sum(mine == theirs for mine, theirs in pairs),
            len(pairs),
        )


def _tau(units: Seq[Unit]) -> float:
    return sum(one.tokens for one in units) / sum(one.steps for one in units)


def _ticked(stopped: Callable[[], bool], report: Callable[[str], None]) -> bool:
    """Asked before each run: a chance to show that time goes by."""
    report("")
    return stopped()
