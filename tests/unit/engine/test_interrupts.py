"""Interrupts: after an exception at any line of a call, the engine's next call gives the right tokens.

`make test` raises at some lines of each engine, `make test-slow` at every line.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from interrupts import Interrupted, Line, interrupt, lines, spread, tracer
from models import tiny_llama
from outpace.core import SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.targets import Target
from outpace.testing import ToyTarget
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES, START

PROMPTS = [[5], [6, 1, 6, 1, 6, 1, 6], [*range(1, 8), *range(1, 8), *range(1, 4)]]
SAMPLED = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
PARAMS = [SamplingParams(max_new_tokens=8, ignore_eos=True), SAMPLED, SAMPLED]


class Late(TimeoutError):
    """An error like any other, which a signal's handler raises where a time limit has passed."""


class Watcher:
    """An observer that knows which sequences are in the batch."""

    hidden_layers: tuple[int, ...] = ()
    timed = False

    def __init__(self) -> None:
        self.here: list[Sequence] = []

    def joined(self, sequence: Sequence, hidden: Mapping[int, torch.Tensor]) -> None:
        self.here.append(sequence)

    def stepped(self, steps: Seq[Step]) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        self.here = [one for one in self.here if one is not sequence]


def toy(drafter: Any = None, **options: Any) -> Engine:
    ticks = itertools.count()
    return Engine(ToyTarget(), drafter, observer=Watcher(), clock=lambda: next(ticks) / 1000, **options)


ROW = ToyTarget().new_cache().row_bytes
ENGINES: dict[str, Callable[[], Engine]] = {
    "none": toy,
    "preempting": lambda: toy("prompt_lookup", memory=40 * ROW, length=20, prefix_cache=10**5),
    "prefixes": lambda: toy("prompt_lookup:branches=2", prefix_cache=10**6),
    "lookahead": lambda: toy("lookahead:window=3,ngram=3"),
    "suffix": lambda: toy("suffix"),
    "combined": lambda: toy("combined:(token_recycling:max_nodes=16)+(prompt_lookup),max_nodes=12"),
    "draft_model": lambda: toy(DraftModel(ToyTarget(surprise=0.7), 3)),
    "rejection": lambda: toy(DraftModel(ToyTarget(surprise=0.7), 3), verifier="rejection"),
}
MANY = 240  # one line in this number


@functools.cache
def plain(name: str) -> list[list[int]]:
    engine = ENGINES[name]() if name == "rejection" else Engine(ToyTarget())
    return [found.tokens for found in engine.generate(PROMPTS, PARAMS)]


def decode(engine: Engine) -> None:
    engine.generate(PROMPTS, PARAMS)


def use(engine: Engine) -> None:
    """Call what else an engine has."""
    sequences = [engine.add(prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
    engine.step()
    stream = engine.stream(PROMPTS[2], SAMPLED)
    next(stream)
    stream.close()
    for sequence in sequences:
        engine.remove(sequence)
    scores = engine.score([1, 2, 3])
    next(scores)
    scores.close()


def remove_all(engine: Engine) -> None:
    """Remove what was added before an interrupt that came between two calls."""
    for sequence in engine.sequences:
        engine.remove(sequence)
        assert sequence.finish_reason is not None and sequence.place is None


def check(engine: Engine, name: str, where: str) -> None:
    """The engine is empty, and gives the right tokens."""
    assert engine.sequences == [], where
    found = engine.generate(PROMPTS, PARAMS, errors="return")
    assert [one.error for one in found] == [None] * len(PROMPTS), where
    assert [one.tokens for one in found] == plain(name), where
    assert engine.sequences == [] and len(engine._batch.cache) == 0, where
    assert isinstance(engine.observer, Watcher) and not engine.observer.here, where


@pytest.mark.parametrize("every", [MANY, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ENGINES)
def test_an_interrupt_at_any_line(name: str, every: int) -> None:
    check_every_line(ENGINES[name](), name, every, list(ENGINES).index(name))


def check_every_line(engine: Engine, name: str, every: int, offset: int = 0) -> None:
    """Interrupt an engine at one line in ``every``, and check it after each."""
    found = lines(lambda: decode(engine))
    reached = 0
    for line, time in spread(found, every, offset):
        reached += interrupt(lambda: decode(engine), line, time)
        check(engine, name, f"interrupted at {line}, the {time}. time")
    assert reached > len(found) / every / 2
    for line, time in spread(lines(lambda: use(engine)), every, offset):
        interrupt(lambda: use(engine), line, time)
        remove_all(engine)
        check(engine, name, f"interrupted at {line}, the {time}. time")


@pytest.mark.parametrize("every", [MANY, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["none", "suffix", "draft_model"])
def test_an_error_of_a_handler_at_any_line(name: str, every: int) -> None:
    """It may end a sequence as if it were that one's own error."""
    engine, offset = ENGINES[name](), list(ENGINES).index(name)
    found = lines(lambda: use(engine))
    for line, time in spread(found, every, offset):
        interrupt(lambda: use(engine), line, time, Late)
        remove_all(engine)
        check(engine, name, f"an error at {line}, the {time}. time")


@pytest.mark.parametrize("error", [Interrupted, Late])
def test_what_a_drafter_remembers_is_replaced(error: type[BaseException]) -> None:
    """An index that is half changed fails in every later request."""
    engine = ENGINES["suffix"]()
    found = lines(lambda: decode(engine))
    index = Counter({line: n for line, n in found.items() if line.file.endswith("suffix_automaton.py")})
    for line, time in spread(index, 2):
        interrupt(lambda: decode(engine), line, time, error)
        check(engine, "suffix", f"{error} at {line}, the {time}. time")


@pytest.mark.parametrize(
    ("file", "error"), [("guards.py", Interrupted), ("kv.py", Late)], ids=["guards", "cache"]
)
def test_at_any_line_of_a_file(file: str, error: type[BaseException]) -> None:
    """Of what begins and ends a call, and of the cache."""
    engine = ENGINES["none"]()
    found = {line: count for line, count in lines(lambda: use(engine)).items() if line.file.endswith(file)}
    assert found
    for line, count in sorted(found.items()):
        for time in sorted({1, count}):
            interrupt(lambda: use(engine), line, time, error)
            remove_all(engine)
            check(engine, "none", f"{error} at {line}, the {time}. time")


def test_an_interrupt_while_the_engine_is_renewed() -> None:
    engine = ENGINES["suffix"]()

    def broken() -> None:
        engine._turn.broken = True
        assert engine.sequences == []

    broken()
    for line, time in spread(lines(broken), 3):
        assert interrupt(broken, line, time), str(line)
        check(engine, "suffix", f"interrupted at {line}, the {time}. time")


# -- AsyncEngine -------------------------------------------------------------------------------------------


def ask(loop: asyncio.AbstractEventLoop, engine: AsyncEngine, *, fails: bool = False) -> list[Any]:
    """The tokens of the prompts, decoded together; their errors in their places."""

    async def all_of_them() -> list[Any]:
        asked = [engine.generate(prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=fails), 60)

    found = loop.run_until_complete(all_of_them())
    return [one.tokens if not isinstance(one, BaseException) else one for one in found]


def in_its_thread(line: Line | None, time: int = 1) -> Counter[Line]:
    """Decode three times; in the second, an engine's thread is interrupted at a line of it.

    Returns:
        The lines that the thread executed the second time.
    """
    found: Counter[Line] = Counter()
    counting = False

    def see(reached: Line) -> None:
        if counting:
            found[reached] += 1
            if reached == line and found[reached] == time:
                raise Interrupted

    loop = asyncio.new_event_loop()
    threading.settrace(tracer(see))
    try:
        engine = AsyncEngine(Engine(ToyTarget(), "prompt_lookup"))
    finally:
        threading.settrace(None)
    try:
        ask(loop, engine)
        counting = True
        for one in ask(loop, engine, fails=True):
            assert isinstance(one, list) or "interrupted" in str(one), (line, one)
        counting = False
        assert ask(loop, engine) == plain("none"), line
        assert (engine.waiting, engine.running, engine.failed) == (0, 0, None), line
        loop.run_until_complete(asyncio.wait_for(engine.shutdown(), 60))
        assert not engine._requests and not engine._asked
    finally:
        loop.close()
    return found


@pytest.mark.parametrize("every", [2 * MANY, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_the_thread_of_an_async_engine(every: int) -> None:
    found = in_its_thread(None)
    for line, time in spread(found, every):
        in_its_thread(line, time)
    front = Counter({line: count for line, count in found.items() if line.file.endswith("aio.py")})
    for line, _ in spread(front, max(every // 30, 1)):
        in_its_thread(line)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_a_task_that_awaits_an_async_engine(every: int) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # tasks that were interrupted
    engine = AsyncEngine(Engine(ToyTarget(), "prompt_lookup"))

    def call() -> None:
        loop.run_until_complete(engine.generate(PROMPTS[0], PARAMS[0]))

    try:
        for line, time in spread(lines(call), every):
            interrupt(call, line, time)
            assert ask(loop, engine) == plain("none"), line
        loop.run_until_complete(asyncio.wait_for(engine.shutdown(), 60))
        assert (engine.waiting, engine.running) == (0, 0)
    finally:
        loop.close()


# -- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2 * MANY, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["llama", "static", "bart"])
def test_an_interrupt_at_any_line_of_a_models_step(kind: str, every: int) -> None:
    check_models_step(kind, every, "lookahead:window=2,ngram=3")


def check_models_step(kind: str, every: int, drafter: str) -> None:
    """Interrupt a decoding of a kind of model at one line in ``every``, and check the next."""
    sources: Any = None
    prompts = [[7, 8, 7, 8, 7], [9, 4, 3]]
    if kind == "bart":
        family = SEQ2SEQ_FAMILIES["bart"]
        target, sources, prompts = Target(family.build()), family.sources((5, 9)), [[START], [START]]
    else:
        target = Target(tiny_llama(), **({"static": True} if kind == "static" else {}))
    engine = Engine(target, drafter, adaptive=False, slots=2)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)

    def call() -> list[list[int]]:
        return [found.tokens for found in engine.generate(prompts, params, sources=sources)]

    expected = [found.tokens for found in Engine(target, slots=2).generate(prompts, params, sources=sources)]
    assert call() == expected
    for line, time in spread(lines(call), every):
        interrupt(call, line, time)
        assert call() == expected, f"interrupted at {line}, the {time}. time"
        assert engine.sequences == [] and len(engine._batch.cache) == 0
