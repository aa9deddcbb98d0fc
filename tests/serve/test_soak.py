"""A soak: many mixed requests at 32 streams, of which some leave, some are hostile, some too large.

Texts to complete, chats, and chats that must call a tool.

SOAK is the number of requests: `make soak` runs 2,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.core import SamplingParams, StreamedToken
from outpace.engine.engine import Engine
from outpace.serve.chat import Chat, toolbox
from outpace.serve.dialogue import Dialogue
from outpace.serve.grammar import Grammar, Grammars
from outpace.serve.tools import answer_to
from outpace.serve.totals import Turns
from serving import Client, model, run, serving
from wires import listening, opened

COUNT = int(os.environ.get("SOAK", "12"))
STREAMS = 32
GROWN = 16  # MiB between the two halves of a long soak, at most
_CACHE = 2**26  # bytes
WORDS = ["The", "Question: what is 2 + 3?", "import os\n", "Once upon a time", "def add(a, b):\n"]
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green", "blue"]}, "coats": {"type": "integer"}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
SLOW_SCHEMA = {"allOf": [{"pattern": f"a.*{number}.*"} for number in range(200)], "type": "string"}
CALL = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "[" * 5000}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SLOW_SCHEMA}}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
BROKEN = {"type": "function", "function": {"name": "a", "parameters": {"$defs": 5}}}
LOOP = {"chat_template": "{% for a in range(99999) %}{% endfor %}"}
# What would run, stall, fill the memory or fail inside the server; and the answer's status.
HOSTILE: list[tuple[str, bytes | dict[str, Any], int]] = [
    (TEXT, b'{"prompt": "a", ', 400),
    (TEXT, b'{"prompt":[' + b",".join([b"{}"] * 150_000) + b"]}", 400),
    (TEXT, b'{"prompt":' + b"[" * 200_000, 400),
    (TEXT, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400),
    (CHAT, {**ASK, "messages": ASK["messages"] * 10_000}, 400),
    (CHAT, {**ASK, "messages": [*ASK["messages"], TURN, *ASK["messages"]]}, 400),  # too many tokens
    (CHAT, {**ASK, "chat_template_kwargs": LOOP}, 400),
    (CHAT, {**ASK, "chat_template_kwargs": {"messages": [], "self": 1}}, 400),
    (CHAT, {**ASK, "tools": [BROKEN], "tool_choice": "required"}, 400),
    (CHAT, {**ASK, "response_format": FORM}, 400),
    (TEXT, {"prompt": [[5] * 300] * 8, "max_tokens": 0, "echo": True, "logprobs": 5}, 200),
    (TEXT, {"prompt": [[5 + place % 90 for place in range(1500)]] * 16, "max_tokens": 1}, 200),  # cached rows
]
OTHERS = {"copy": "prompt_lookup:branches=1", "jacobi": "jacobi", "look": "lookahead:window=3,guesses=3"}


def held() -> float:
    """Memory of this process in MiB, without what it has freed already."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc keeps its own counsel
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def expected(asked: dict[str, Any]) -> str:
    """The engine's text; for a call, its arguments."""
    params = SamplingParams(
        max_new_tokens=asked["max_tokens"], temperature=asked["temperature"], seed=asked["seed"]
    )
    engine = Engine(model().target, tokenizer=model().tokenizer)
    if "prompt" in asked:
        return engine.generate([model().tokens(asked["prompt"])], params)[0].text or ""
    if "tools" not in asked:
        return engine.generate([model().encode_chat(asked["messages"])], params)[0].text or ""
    target, dialogue = model().target, Dialogue(model())
    grammars = Grammars(model().tokenizer, target.vocabulary, target.eos_token_ids, Turns(1))
    box = toolbox(Chat(messages=asked["messages"], tools=asked["tools"], tool_choice="required"))
    turns, options = dialogue.prepared(asked["messages"], box.shown)
    prompt = model().plain_tokens(model().render(turns, **options))
    grammar = Grammar(asyncio.run(grammars.compile(box.grammar(dialogue))), len(prompt))
    sequence = engine.add(prompt, replace(params, logits_processors=[grammar]), criteria=grammar.ended)
    while sequence.finish_reason is None:
        engine.step()
    asked_of = SimpleNamespace(prompts=[prompt], schema=box.grammar(dialogue), reasoning=None)
    parser = answer_to(SimpleNamespace(model=model(), dialogue=dialogue), box, asked_of)
    done = sequence.finish_reason != "length"
    found = sequence.generation()
    emitted = [StreamedToken(token, 0, "") for token in found.tokens]
    emitted[-1] = replace(emitted[-1], text=found.text or "")
    pieces = [*parser.push(emitted), *parser.end(done)]
    assert not done or parser.calls == 1
    return "".join(piece.text for piece in pieces)


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
    path, form = TEXT, chance.random()
    if form < 0.4:
        path = CHAT
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
        if form < 0.1:
            asked |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 48}
    kind = number % 12  # so that the shortest soak has each
    if kind == 0:
        place, body, status = HOSTILE[number // 12 % len(HOSTILE)]
        attacker = client.at(f"attacker {number % 3}")
        exchange = attacker.send(place, body, method="POST")
        assert ("error" in await exchange.json()) == (status != 200)
        assert exchange.status == status, place
    elif kind == 1:
        exchange = client.send(path, {**asked, "user": "a" * 2**20})
        assert "error" in await exchange.json() and exchange.status == 413
    elif kind in (2, 3):
        exchange = client.send(path, {**asked, "max_tokens": 500, "ignore_eos": True})
        for _ in range(chance.randrange(3) if asked["stream"] else 0):
            await exchange.chunk()
        exchange.leave()
        await exchange.task
    elif asked["stream"]:
        *chunks, done = await client.send(path, asked).events()
        assert done == "[DONE]"
        pieces = [c["choices"][0] for c in chunks if c["choices"]]
        texts[number] = asked, "".join(said(c.get("delta", c)) for c in pieces)
    else:
        (choice,) = (await client.send(path, asked).json())["choices"]
        texts[number] = asked, said(choice.get("message", choice))


def said(piece: dict[str, Any]) -> str:
    """The text of a choice, a message or a chunk; for a call, its arguments."""
    calls = piece.get("tool_calls") or [{"function": {}}]
    return piece.get("text") or piece.get("content") or calls[0]["function"].get("arguments") or ""


def test_soak() -> None:
    async def main() -> dict[int, tuple[dict[str, Any], str]]:
        texts: dict[int, tuple[dict[str, Any], str]] = {}
        memory, resting = list[float](), list[float]()

        async def stream(client: Client, numbers: Iterator[int]) -> None:
            for number in numbers:
                if number % max(1, COUNT // 10) == 0:
                    memory.append(held())
                await one(client, number, texts)

        async with serving("prompt_lookup", others=OTHERS, body=2**19, memory=_CACHE) as client:
            for half in (range(COUNT // 2), range(COUNT // 2, COUNT)):
                numbers = iter(half)
                await asyncio.gather(*(stream(client, numbers) for _ in range(STREAMS)))
                await client.empty()  # the cache gives its memory back, which it had touched bit by bit
                resting.append(held())
        print(f"{COUNT} requests, {len(texts)} complete; MiB held at each tenth:", *map(round, memory))
        print("MiB held at rest, after each half:", *map(round, resting))
        if COUNT >= 2000:  # the first thousand leave what is made at first use
            assert resting[1] - resting[0] < GROWN
        return texts

    texts = run(main, 3600)
    assert len(texts) > COUNT * 0.6
    known: dict[str, str] = {}
    for asked, text in texts.values():
        key = repr({**asked, "speculation": None, "stream": None})
        if key not in known:
            known[key] = expected(asked)
        assert text == known[key], asked


def wired() -> list[tuple[bytes, bool, list[int]]]:
    """What is sent on a connection, whether it is then half-closed, and the statuses of the answers."""
    body = b'{"prompt": "a"}'
    head = b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\n"
    size = b"content-length: %d\r\n" % len(body)
    ends = b"connection: close\r\n"
    good = head + b"host: a\r\n" + size + b"\r\n" + body
    return [
        (head + b"host: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + size + b"\r\n" + body, True, [200]),
        (
            head + b"host: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n" + size + b"\r\n" + body,
            True,
            [200],
        ),
        (good * 40, True, [200] * 40),
        (good * 3 + b"nonsense\r\n\r\n", False, [200, 200, 200, 400]),
        (good[:-1], True, [400]),
        (head + size + b"\r\n" + body, False, [400]),
        (head + b"host: a\r\nhost: b\r\n" + size + b"\r\n" + body, False, [400]),
        (head + b"host: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", False, [501]),
        (head + b"host: a\r\ncontent-encoding: gzip\r\n" + ends + size + b"\r\n" + body, False, [415]),
    ]


def test_soak_of_connections(caplog: pytest.LogCaptureFixture) -> None:
    """Beside connections that declare long bodies and send one byte, small requests are answered."""
    declared = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4000000\r\n\r\n{"

    async def main() -> None:
        async with listening() as (server, port):
            for number in range(max(1, COUNT // 50)):
                held = [await opened(port, declared) for _ in range(64)]
                for sent, half, wanted in wired():
                    streams = await opened(port, sent)
                    if half:
                        streams[1].write_eof()
                    found = re.findall(rb"HTTP/1\.1 (\d+)", await streams[0].read())
                    assert [int(one) for one in found] == wanted, (number, sent[:200])
                for streams in held:
                    streams[1].close()
            while server.server_state.connections:
                await asyncio.sleep(0)
            assert server.app.state.bodies.all == 0

    run(main, 3600)
    assert not [one for one in caplog.records if one.exc_info]
