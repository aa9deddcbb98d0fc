"""All at once: preemption, drafters by request, prefix cache, chunked prompts, cancels and failures."""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import replace
from typing import Any

import pytest

from outpace.cache import KVCache
from outpace.core import SamplingParams, Speculation
from outpace.engine import scheduler
from outpace.engine.aio import AsyncEngine
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.targets.batch import Batch
from outpace.targets.rows import Output
from outpace.testing import ToyTarget

DRAFTERS = {"copy": "prompt_lookup:branches=2", "window": "lookahead:window=3,ngram=3"}
CHOICES = [None, "off", *DRAFTERS, Speculation("window", 2)]
BEGINNINGS = [[1 + (first + 7 * place) % 31 for place in range(70)] for first in range(3)]
CHUNK = 16


class Trouble(Exception):
    """An exception raised on purpose."""


class Watched(ToyTarget):
    """A target that counts chunks of prompts, and records the most rows of one."""

    chunks = widest = 0

    def forward(self, cache: Any, batch: Batch, *args: Any) -> Output:
        rows = [len(own.tokens) - len(batch.reads[slot]) for slot, own in batch.rows.items()]
        if any(rows):
            self.chunks += 1
            self.widest = max(self.widest, *rows)
        return super().forward(cache, batch, *args)


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    return Engine(ToyTarget(context=None)).generate([prompt], params)[0].tokens


def request(choices: random.Random) -> tuple[list[int], SamplingParams]:
    prompt = choices.choice(BEGINNINGS)[: choices.choice([5, 40, 70])] + choices.choices(range(1, 32), k=3)
    params = SamplingParams(
        max_new_tokens=choices.choice([8, 30, 60]),
        temperature=choices.choice([0.0, 0.9]),
        top_p=choices.choice([1.0, 0.9]),
        frequency_penalty=choices.choice([0.0, 1.0]),  # a token counted twice would show
        seed=choices.randrange(3),
        ignore_eos=True,
    )
    return prompt, params


async def serve(inner: Engine, requests: int, tasks: int) -> dict[str, int]:
    """Tasks that send requests of random kinds and fates; counts of what became of them."""
    choices = random.Random(11)
    todo = iter(range(requests))
    counts = dict.fromkeys(["completed", "cancelled", "failed", "drafted", "cached"], 0)

    async def task(engine: AsyncEngine) -> None:
        for _ in todo:
            prompt, params = request(choices)
            expected = alone(tuple(prompt), params)
            fate, after = choices.choice(["read", "read", "cancel", "fail"]), choices.randrange(1, 8)

            def fail(tokens: list[int], most: int = len(prompt) + after) -> bool:
                if len(tokens) >= most:
                    raise Trouble
                return False

            handle = await engine.add(
                prompt,
                replace(params, speculation=choices.choice(CHOICES)),
                wait=True,
                priority=choices.randrange(2),
                criteria=fail if fate == "fail" else None,
            )
            seen: list[int] = []
            try:
                async for token in handle:
                    seen.append(token.token)
                    if fate == "cancel" and len(seen) == after:
                        handle.cancel()
                        break
            except Trouble:
                counts["failed"] += 1
                assert seen == expected[:after]
                continue
            if fate == "cancel":
                counts["cancelled"] += 1
                assert seen == expected[:after]
                continue
            stats = (await handle.result()).stats
            assert stats.tokens == len(expected)  # none was emitted twice, and none dropped and drawn again
            counts["completed"] += 1
            counts["drafted"] += stats.drafted > 0
            counts["cached"] += stats.cached_tokens > 0
            assert seen == expected

    async with AsyncEngine(inner, max_waiting=16) as engine:
        await asyncio.gather(*(task(engine) for _ in range(tasks)))
    return counts


@pytest.fixture
def mixes() -> bool:
    """True if rows of prompts ride in steps."""
    return False


@pytest.fixture
def engine(mixes: bool, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with little memory, small chunks, a prefix cache and several drafters."""
    monkeypatch.setattr(KVCache, "_least_room", 64)
    monkeypatch.setattr(scheduler, "_ANSWER", 16)
    monkeypatch.setattr(scheduler, "_DRAFT", 8)
    target = Watched(context=None)
    target.mixes = mixes
    row = target.new_cache().row_bytes
    return Engine(
        target,
        "jacobi:num_speculative_tokens=3",
        adaptive=False,
        drafters=DRAFTERS,
        prefill_chunk=CHUNK,
        length=64,
        memory=220 * row,
        prefix_cache=400 * row,
    )


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(
    ("requests", "tasks"), [(60, 12), pytest.param(1500, 48, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_every_completed_text_is_that_of_plain_decoding(
    engine: Engine, requests: int, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine.target
    assert isinstance(target, Watched)
    preempted: list[Sequence] = []  # in the middle of their output
    make_room = engine._batch.scheduler.make_room

    def watch(cache: Any, give_way: Any) -> None:
        def shed(active: Any) -> None:
            preempted.extend([active.sequence] if active.sequence.output_length else [])
            give_way(active)

        make_room(cache, shed)

    monkeypatch.setattr(engine._batch.scheduler, "make_room", watch)
    counts = asyncio.run(serve(engine, requests, tasks))
    assert min(counts.values()) > 0
    assert counts["completed"] + counts["cancelled"] + counts["failed"] == requests
    assert target.chunks and target.widest == CHUNK
    resumed = [one for one in preempted if one.finish_reason == "length"]
    assert any(one.params.frequency_penalty for one in resumed)
    engine._turn.release()  # its thread has ended
    assert not engine.sequences and len(engine._batch.cache) == 0
