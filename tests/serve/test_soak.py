"""A soak: many mixed requests at 32 streams, of which some leave, some are wrong, some too large.

SOAK is the number of requests: `make soak` runs 1,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import resource
import statistics
from pathlib import Path
from typing import Any

from outpace.core import SamplingParams
from outpace.engine.engine import Engine
from serving import Client, model, run, serving

COUNT = int(os.environ.get("SOAK", "48"))
STREAMS = 32
GROWN = 16  # MiB between the middle and the end of a long soak, at most
WORDS = ["The", "Question: what is 2 + 3?", "import os\n", "Once upon a time", "def add(a, b):\n"]
OTHERS = {"copy": "prompt_lookup:branches=1", "jacobi": "jacobi", "look": "lookahead:window=3,guesses=3"}


def held() -> float:
    """Memory that this process holds, in MiB, without what it has freed already."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc keeps its own counsel
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def expected(asked: dict[str, Any]) -> str:
    params = SamplingParams(
        max_new_tokens=asked["max_tokens"], temperature=asked["temperature"], seed=asked["seed"]
    )
    engine = Engine(model().target, tokenizer=model().tokenizer)
    return engine.generate([model().tokens(asked["prompt"])], params)[0].text or ""


async def one(client: Client, number: int, texts: dict[int, tuple[dict[str, Any], str]]) -> None:
    """One request; the text of one that is complete is noted."""
    chance = random.Random(number)
    asked = {
        "prompt": chance.choice(WORDS),
        "max_tokens": chance.choice([1, 8, 24]),
        "temperature": chance.choice([0, 0.8]),
        "seed": chance.randrange(10),
        "speculation": chance.choice(["off", True, *OTHERS]),
        "stream": chance.random() < 0.5,
    }
    kind = chance.random()
    if kind < 0.05:
        exchange = client.send("/v1/completions", b'{"prompt": "a", ', method="POST")
        assert "error" in await exchange.json() and exchange.status == 400
    elif kind < 0.07:
        exchange = client.send("/v1/completions", {**asked, "prompt": "a" * 2**20})
        assert "error" in await exchange.json() and exchange.status == 413
    elif kind < 0.17:
        exchange = client.send("/v1/completions", {**asked, "max_tokens": 500, "ignore_eos": True})
        for _ in range(chance.randrange(3) if asked["stream"] else 0):
            await exchange.chunk()
        exchange.leave()
        await exchange.task
    elif asked["stream"]:
        *chunks, done = await client.send("/v1/completions", asked).events()
        assert done == "[DONE]"
        texts[number] = asked, "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    else:
        found = await client.send("/v1/completions", asked).json()
        texts[number] = asked, found["choices"][0]["text"]


def test_soak() -> None:
    async def main() -> dict[int, tuple[dict[str, Any], str]]:
        texts: dict[int, tuple[dict[str, Any], str]] = {}
        memory: list[float] = []
        numbers = iter(range(COUNT))

        async def stream(client: Client) -> None:
            for number in numbers:
                if number % max(1, COUNT // 10) == 0:
                    memory.append(held())
                await one(client, number, texts)

        async with serving("prompt_lookup", others=OTHERS, body=2**19) as client:
            await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
            await client.empty()
            memory.append(held())
        print(f"{COUNT} requests, {len(texts)} complete; MiB held at each tenth:", *map(round, memory))
        if COUNT >= 1000:  # one large batch more or less moves the first tenths
            assert statistics.median(memory[-3:]) - statistics.median(memory[3:6]) < GROWN
        return texts

    texts = run(main, 3600)
    assert len(texts) > COUNT * 0.6
    known: dict[str, str] = {}
    for asked, text in texts.values():
        key = repr({**asked, "speculation": None, "stream": None})
        if key not in known:
            known[key] = expected(asked)
        assert text == known[key], asked
