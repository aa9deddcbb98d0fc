"""Measurement of all methods on the same prompts: after a warm-up, interleaved prompt by prompt."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

from outpace.bench.items import Item, Suite
from outpace.bench.runs import Method, MethodRun, PromptBatch
from outpace.bench.subject import encode, references
from outpace.core import OutpaceError, out_of_memory
from outpace.loading import Loaded


@dataclass(frozen=True)
class Settings:
    """Decoding options, the same for every method.

    Attributes:
        max_new_tokens: maximum number of tokens per answer.
        temperature: 0 is greedy.
        top_p: probability of the smallest set of tokens that sampling keeps; 1 keeps all.
        seed: the first prompt's seed, increased by 1 per prompt. The order of the methods depends on it too.
        repeats: number of times everything is measured, after a warm-up.
        ends: answers end at the model's end tokens. Otherwise all have ``max_new_tokens`` tokens, except in
            suites whose outputs repeat a text.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    repeats: int = 1
    ends: bool = False


@dataclass
class MethodRuns:
    """Runs of one method on a suite.

    Attributes:
        runs: its runs, [group][repeat][turn].
        error: reason why it failed; it is then not run again.
        left: it was dropped because it was too slow.
    """

    method: Method
    runs: list[list[list[MethodRun]]] = field(default_factory=list)
    error: str | None = None
    left: bool = False

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def all_runs(self) -> list[MethodRun]:
        return [run for group in self.runs for repeat in group for run in repeat]

    @property
    def active(self) -> bool:
        """True if the method is still being measured."""
        return self.error is None and not self.left


@dataclass
class Measured:
    """Runs of every method on a suite; the first one is plain decoding.

    Attributes:
        batch: maximum number of prompts decoded together.
        groups: the items decoded together.
        prompts: the prompts' token ids, [group][turn][prompt].
    """

    suite: Suite
    batch: int
    settings: Settings
    groups: list[tuple[Item, ...]] = field(default_factory=list)
    prompts: list[list[list[list[int]]]] = field(default_factory=list)
    traces: list[MethodRuns] = field(default_factory=list)

    def taking_part(self, group: int, turn: int) -> list[Item]:
        return [item for item in self.groups[group] if item.rounds > turn]


def measure(
    subject: Loaded,
    methods: Seq[Method],
    suite: Suite,
    batch: int,
    settings: Settings,
    advanced: Callable[[Measured], None] = lambda measured: None,
    stopped: Callable[[], bool] = lambda: False,
    warm_up: bool = True,
) -> Measured:
    """Decode a suite with every method.

    The first method's answers are used in the later prompts of a conversation, so that all methods decode the
    same prompts.

    Args:
        methods: plain decoding first.
        advanced: called after each group of prompts with the measurements so far; it may drop methods.
        stopped: called before each run; if True, measuring ends with the complete groups.
        warm_up: decode the first prompts once without counting; needless where seconds do not matter.

    Raises:
        OutpaceError: plain decoding failed.
    """
    items = suite.items
    groups = [items[start : start + batch] for start in range(0, len(items), batch)]
    traces = [MethodRuns(method) for method in methods]
    measured = Measured(suite, batch, settings, traces=traces)
    # A different order of methods for each suite and batch size.
    key = f"{settings.seed}, {batch}, {items[0].id}"
    runner = _Runner(subject, traces, settings, stopped, key)
    for method in methods:
        method.begin(anew=True)
    if warm_up:
        runner.warm_up(groups[0])
    with _settled():
        for repeat in range(settings.repeats):
            for method in methods:
                method.begin()
            for place, group in enumerate(groups):
                found = runner.group(group, place * batch)
                if found is None:
                    return measured
                if repeat == 0:
                    measured.groups.append(group)
                    measured.prompts.append(found.prompts)
                for trace in traces:
                    if trace.active:
                        if repeat == 0:
                            trace.runs.append([])
                        trace.runs[place].append(found.runs[trace.name])
                advanced(measured)
    return measured


@contextmanager
def _settled() -> Iterator[None]:
    """Exclude all objects allocated so far from garbage collections.

    A collection over all loaded libraries takes as long as dozens of steps, and would be charged to the
    method that happens to run. Where the process has excluded objects before, all of them stay excluded.
    """
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


@dataclass
class _Found:
    """A group's turns: the prompts, and the runs of each method."""

    prompts: list[list[list[int]]]
    runs: dict[str, list[MethodRun]]


class _Runner:
    def __init__(
        self,
        subject: Loaded,
        traces: list[MethodRuns],
        settings: Settings,
        stopped: Callable[[], bool],
        key: str,
    ) -> None:
        self._subject = subject
        self._traces = traces
        self._settings = settings
        self._stopped = stopped
        self._random = random.Random(key)
        self._firsts: list[int] = []

    def warm_up(self, group: Seq[Item]) -> None:
        """Run every method once, so that one-time work, also for this batch size, is not measured."""
        for trace in self._traces:
            if not self._stopped():
                self._one(trace, self._request(group, [[] for _ in group], 0))

    def group(self, group: Seq[Item], place: int) -> _Found | None:
        """Decode a group's turns with every method, in a new order per turn; return None if stopped."""
        found = _Found([], {trace.name: [] for trace in self._traces})
        answers: dict[str, list[list[int]]] = {item.id: [] for item in group}
        for turn in range(max(item.rounds for item in group)):
            asked = [item for item in group if item.rounds > turn]
            request = self._request(asked, [answers[item.id] for item in asked], place)
            for trace in self._order():
                if self._stopped():
                    return None
                run = self._one(trace, request)
                if run is not None:
                    found.runs[trace.name].append(run)
            found.prompts.append([list(prompt) for prompt in request.prompts])
            plain = found.runs[self._traces[0].name][turn]
            for item, output in zip(asked, plain.outputs, strict=True):
                answers[item.id].append(output)
        return found

    def _order(self) -> list[MethodRuns]:
        """Draw an order of the methods; in N orders of N methods each is first once.

        This spreads the effect of a method's leftover state, in caches and spinning threads, over the others.
        """
        count = len(self._traces)
        if not self._firsts:
            self._firsts = self._random.sample(range(count), count)
        first = self._firsts.pop()
        others = [place for place in range(count) if place != first]
        self._random.shuffle(others)
        return [self._traces[place] for place in (first, *others)]

    def _one(self, trace: MethodRuns, request: PromptBatch) -> MethodRun | None:
        """Run a method once; an error fails only its own row, unless it is plain decoding."""
        if not trace.active:
            return None
        try:
            return trace.method.run(request)
        except Exception as error:  # another library may raise any error
            trace.error = reason(error)
            if trace is self._traces[0]:
                raise OutpaceError(f"plain decoding failed: {trace.error}") from error
        return None

    def _request(self, items: Seq[Item], answers: Seq[Seq[Seq[int]]], place: int) -> PromptBatch:
        settings = self._settings
        return PromptBatch(
            prompts=[
                encode(self._subject, item, before) for item, before in zip(items, answers, strict=True)
            ],
            references=[references(self._subject, item) for item in items],
            max_new_tokens=settings.max_new_tokens,
            ends=settings.ends or all(item.ends for item in items),
            temperature=settings.temperature,
            top_p=settings.top_p,
            seeds=[(settings.seed + place + i) % 2**64 for i in range(len(items))],
        )


def reason(error: Exception) -> str:
    """Format the reason for a failure on one line; outpace's errors need no class name."""
    if out_of_memory(error):
        return "out of memory; a smaller --batch or --max-new-tokens needs less"
    if isinstance(error, OutpaceError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
