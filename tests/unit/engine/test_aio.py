"""AsyncEngine: requests from many tasks and threads, cancelled, slow and failing ones, shutting down."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import torch

from outpace.core import OutpaceError, SamplingParams, StreamedToken
from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.engine.handles import Handle, QueueFull
from outpace.testing import ToyTarget

T = TypeVar("T")
PROMPTS = [[3, 4, 5, 3, 4], [7, 1], [9, 2, 9, 2, 9, 2, 9], [11, 12, 13]]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=100, ignore_eos=True)


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(48 + token) for token in token_ids)


class Gate:
    """A criterion that blocks the engine's thread in a step until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, tokens: list[int]) -> bool:
        self.calls += 1
        self.reached.set()
        assert self.opened.wait(60)
        return False


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main(), 120)

    return asyncio.run(limited())


def make(drafter: str | None = None) -> Engine:
    return Engine(ToyTarget(), drafter, tokenizer=Letters())


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    return Engine(ToyTarget()).generate([prompt], [params])[0].tokens


async def read(handle: Handle) -> list[StreamedToken]:
    return [token async for token in handle]


def is_empty(engine: Engine) -> bool:
    engine._turn.release()  # its thread has ended
    return not engine.sequences and len(engine._batch.cache) == 0


def test_tokens_text_and_result_are_those_of_the_engine() -> None:
    async def main() -> None:
        async with AsyncEngine(make) as engine:
            handles = [await engine.add(prompt, GREEDY) for prompt in PROMPTS]
            for prompt, handle in zip(PROMPTS, handles, strict=True):
                tokens = await read(handle)
                expected = alone(prompt, GREEDY)
                assert [token.token for token in tokens] == expected
                assert "".join(token.text for token in tokens) == Letters().decode(expected)
                found = await handle.result()
                assert (found.tokens, found.finish_reason) == (expected, "length")

    run(main)


def test_a_mistake_in_a_request_is_raised_by_add_and_nothing_else_happens() -> None:
    async def main() -> None:
        async with AsyncEngine(make, max_waiting=1) as engine:
            for _ in range(3):
                with pytest.raises(OutpaceError, match="empty"):
                    await engine.add([], GREEDY)
            assert engine.waiting == 0
            handle = await engine.add(PROMPTS[0], GREEDY)
            assert (await handle.result()).tokens == alone(PROMPTS[0], GREEDY)

    run(main)


def test_a_request_that_fails_ends_alone() -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(PROMPTS[1]) + 3:
            raise ZeroDivisionError("a processor's own mistake")
        return scores

    async def main() -> None:
        async with AsyncEngine(make) as engine:
            bad = await engine.add(PROMPTS[1], SamplingParams(max_new_tokens=9, logits_processors=[fail]))
            good = await engine.add(PROMPTS[0], GREEDY)
            seen = []
            with pytest.raises(ZeroDivisionError):
                async for token in bad:
                    seen.append(token.token)
            assert len(seen) == 4
            with pytest.raises(ZeroDivisionError):
                await bad.result()
            assert (await good.result()).tokens == alone(PROMPTS[0], GREEDY)
            assert engine.failed is None

    run(main)


@pytest.mark.parametrize("how", ["cancel", "task", "drop"])
def test_a_request_that_is_cancelled_frees_its_slot_by_the_next_step(how: str) -> None:
    inner = make()

    async def main() -> None:
        async with AsyncEngine(inner) as engine:
            gate = Gate()
            handle = await engine.add(PROMPTS[0], LONG, criteria=gate)
            await asyncio.to_thread(gate.reached.wait)
            if how == "cancel":
                handle.cancel()
            elif how == "task":
                task = asyncio.create_task(handle.result())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                del handle
                gc.collect()
            gate.opened.set()
            assert (await engine.generate(PROMPTS[1], GREEDY)).tokens == alone(PROMPTS[1], GREEDY)
            assert gate.calls == 1
            if how != "drop":
                found = await handle.result()
                assert (found.finish_reason, len(found.tokens)) == ("removed", 1)

    run(main)
    assert is_empty(inner)


def test_the_queue_is_bounded_and_can_be_waited_for() -> None:
    async def main() -> None:
        async with AsyncEngine(make, max_waiting=3) as engine:
            gate = Gate()
            first = await engine.add(PROMPTS[0], GREEDY, criteria=gate)
            await asyncio.to_thread(gate.reached.wait)
            waiting = [asyncio.create_task(engine.add(prompt, GREEDY)) for prompt in PROMPTS[1:3]]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await engine.add(PROMPTS[3], GREEDY)
            late = asyncio.create_task(engine.add(PROMPTS[3], GREEDY, wait=True))
            await asyncio.sleep(0)
            assert not late.done()
            gate.opened.set()
            for prompt, task in zip(PROMPTS[1:], [*waiting, late], strict=True):
                assert (await (await task).result()).tokens == alone(prompt, GREEDY)
            assert (await first.result()).tokens == alone(PROMPTS[0], GREEDY)
            assert engine.waiting == 0

    run(main)


def test_a_reader_that_falls_behind_is_ended_and_nobody_else() -> None:
    async def main() -> None:
        async with AsyncEngine(make, max_unread=8) as engine:
            slow = await engine.add(PROMPTS[0], GREEDY)
            assert (await engine.generate(PROMPTS[1], GREEDY)).tokens == alone(PROMPTS[1], GREEDY)
            seen = []
            with pytest.raises(OutpaceError, match="unread"):
                async for token in slow:
                    seen.append(token.token)
            assert 0 < len(seen) <= 9
            assert seen == alone(PROMPTS[0], GREEDY)[: len(seen)]

    run(main)


def test_tokens_that_the_event_loop_has_not_delivered_yet_are_unread_too() -> None:
    async def main() -> None:
        async with AsyncEngine(make, max_unread=8) as engine:
            slow = await engine.add(PROMPTS[0], GREEDY)
            while engine.running or engine.waiting:
                time.sleep(0.001)  # the loop delivers nothing meanwhile
            tokens = []
            with pytest.raises(OutpaceError, match="unread"):
                while news := await slow.read():  # the last step's may arrive after the others
                    tokens += news
            assert 0 < len(tokens) <= 9

    run(main)


def test_tasks_of_several_event_loops_share_an_engine() -> None:
    engine = AsyncEngine(make)
    found: dict[int, list[int]] = {}

    def thread(place: int) -> None:
        async def main() -> None:
            handle = await engine.add(PROMPTS[place], GREEDY)
            found[place] = [token.token for token in await read(handle)]

        run(main)

    threads = [threading.Thread(target=thread, args=(place,)) for place in range(len(PROMPTS))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    run(engine.shutdown)
    assert found == {place: alone(prompt, GREEDY) for place, prompt in enumerate(PROMPTS)}


def test_an_event_loop_that_is_gone_stops_nothing() -> None:
    inner = make()
    engine = AsyncEngine(inner)

    async def leave() -> None:
        kept.append(await engine.add(PROMPTS[0], SamplingParams(max_new_tokens=100, ignore_eos=True)))

    async def stay() -> list[int]:
        handle = await engine.add(PROMPTS[1], GREEDY)
        tokens = (await handle.result()).tokens
        await engine.shutdown()
        return tokens

    kept: list[Handle] = []  # alive, so that nothing cancels it
    run(leave)
    assert run(stay) == alone(PROMPTS[1], GREEDY)
    assert is_empty(inner)


def test_shutdown_drains() -> None:
    inner = make()

    async def main() -> None:
        engine = AsyncEngine(inner)
        handles = [await engine.add(prompt, GREEDY) for prompt in PROMPTS]
        await engine.shutdown()
        for prompt, handle in zip(PROMPTS, handles, strict=True):
            assert (await handle.result()).tokens == alone(prompt, GREEDY)
        with pytest.raises(OutpaceError, match="shut down"):
            await engine.add(PROMPTS[0])
        await engine.shutdown()

    run(main)
    assert is_empty(inner)


def test_shutdown_without_draining_removes_what_runs() -> None:
    inner = make()

    async def main() -> None:
        engine = AsyncEngine(inner)
        gate = Gate()
        handle = await engine.add(PROMPTS[0], LONG, criteria=gate)
        await asyncio.to_thread(gate.reached.wait)
        stopping = asyncio.create_task(engine.shutdown(drain=False))
        await asyncio.sleep(0)
        gate.opened.set()
        await stopping
        assert (await handle.result()).finish_reason == "removed"

    run(main)
    assert is_empty(inner)


def test_draining_ends_when_its_time_is_up() -> None:
    async def main() -> None:
        engine = AsyncEngine(make)
        gate = Gate()
        handle = await engine.add(PROMPTS[0], LONG, criteria=gate)
        stopping = asyncio.create_task(engine.shutdown(timeout=0.0))
        await asyncio.to_thread(gate.reached.wait)
        while engine._inbox.qsize() < 2:  # the second order to stop, which does not drain
            await asyncio.sleep(0)
        gate.opened.set()
        await stopping
        assert (await handle.result()).finish_reason == "removed"

    run(main)


class Broken(Engine):
    def step(self) -> Any:
        raise RuntimeError("the engine itself is broken")


@pytest.mark.parametrize("make_broken", [lambda: Broken(ToyTarget()), lambda: Engine(ToyTarget(), "no_such")])
def test_a_thread_that_dies_tells_everybody(make_broken: Callable[[], Engine]) -> None:
    async def main() -> None:
        engine = AsyncEngine(make_broken)
        with pytest.raises((RuntimeError, OutpaceError)):
            await (await engine.add(PROMPTS[0], GREEDY)).result()
        await asyncio.to_thread(engine._thread.join)
        assert engine.failed is not None
        with pytest.raises(OutpaceError, match="has failed"):
            await engine.add(PROMPTS[0], GREEDY)
        await engine.shutdown()

    run(main)


@pytest.mark.parametrize("wrong", [{"max_waiting": 0}, {"max_waiting": 1.5}, {"max_unread": True}])
def test_refuses_arguments_of_the_wrong_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(OutpaceError, match=next(iter(wrong))):
        AsyncEngine(make, **wrong)
    with pytest.raises(OutpaceError, match="takes an Engine"):
        AsyncEngine("lookahead")  # type: ignore[arg-type]


# -- many tasks at once ----------------------------------------------------------------------------------


class Trouble(Exception):
    pass


async def stress(requests: int, tasks: int, seed: int) -> tuple[Engine, int]:
    """Tasks that add, read slowly, cancel and fail at random; returns the engine and what was completed."""
    inner = Engine(ToyTarget(), "prompt_lookup", adaptive=False, tokenizer=Letters())
    choices = random.Random(seed)
    kinds = [
        (prompt, SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=temperature, seed=seed))
        for prompt in PROMPTS
        for length in (1, 7, 20)
        for temperature in (0.0, 1.0)
    ]
    expected = [alone(prompt, params) for prompt, params in kinds]
    todo = iter(range(requests))
    completed = 0

    async def task(engine: AsyncEngine) -> None:
        nonlocal completed
        for _ in todo:
            kind = choices.randrange(len(kinds))
            prompt, params = kinds[kind]
            fate = choices.choice(["read", "read", "slow", "result", "cancel", "drop", "fail"])
            after = choices.randrange(1, 8)

            def fail(tokens: list[int], most: int = len(prompt) + after) -> bool:
                if len(tokens) >= most:
                    raise Trouble
                return False

            more = {"criteria": fail} if fate == "fail" else {}
            handle = await engine.add(prompt, params, wait=True, **more)
            if fate == "result":
                seen = (await handle.result()).tokens
            else:
                seen = []
                try:
                    async for token in handle:
                        seen.append(token.token)
                        if fate == "slow":
                            for _ in range(choices.randrange(20)):
                                await asyncio.sleep(0)
                        if fate in ("cancel", "drop") and len(seen) == after:
                            break
                except Trouble:
                    assert fate == "fail"
                    assert seen == expected[kind][:after]
                    continue
            if fate == "cancel":
                handle.cancel()
            elif fate == "drop":
                del handle
            if len(seen) < len(expected[kind]):
                assert fate in ("cancel", "drop")
            else:
                completed += 1
            assert seen == expected[kind][: len(seen)]

    async with AsyncEngine(inner, max_waiting=16) as engine:
        await asyncio.gather(*(task(engine) for _ in range(tasks)))
        assert engine.waiting == 0
    return inner, completed


def check_stress(requests: int) -> None:
    inner, completed = asyncio.run(stress(requests, 64, seed=5))
    assert completed > requests // 2
    assert is_empty(inner)


def test_64_tasks_at_random() -> None:
    check_stress(200)


@pytest.mark.slow
def test_64_tasks_and_2000_requests_at_random() -> None:
    check_stress(2000)


def test_texts_are_scored_between_the_steps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.engine._SCORED", 2)
    engine, text = make(), [3, 4, 5, 3, 4, 7]
    (first_step,) = Engine(ToyTarget()).generate([text[:1]], [SamplingParams(max_new_tokens=1, logprobs=1)])

    async def main() -> None:
        async with AsyncEngine(engine) as served:
            long = asyncio.ensure_future(served.generate(PROMPTS[0], LONG))
            first, second = await asyncio.gather(served.score(text, 1), served.score(text))
            given_up = asyncio.ensure_future(served.score(text * 20))
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(OutpaceError, match="from 0 to"):
                await served.score([3, 10**6])
            assert [one.logprob for one in first] == [one.logprob for one in second]
            assert len(first) == len(text) - 1 and first_step.logprobs is not None
            assert first[0].top == pytest.approx(first_step.logprobs[0].top)
            assert (await long).tokens == alone(PROMPTS[0], LONG)

    run(main)
    assert len(engine._batch.cache) == 0


def test_an_engine_that_ends_answers_those_who_wait_for_scores() -> None:
    async def main() -> None:
        gate = Gate()
        served = AsyncEngine(make())
        held = await served.add(PROMPTS[0], LONG, criteria=gate)
        await asyncio.to_thread(gate.reached.wait, 60)
        scored = asyncio.ensure_future(served.score([3, 4, 5]))
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(served.shutdown(drain=False))
        await asyncio.sleep(0)
        gate.opened.set()
        await ending
        with pytest.raises(OutpaceError, match="shut down"):
            await scored
        with pytest.raises(OutpaceError, match="shut down"):
            await served.score([3, 4])
        assert (await held.result()).finish_reason == "removed"

    run(main)
