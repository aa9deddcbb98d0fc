"""Log probabilities, of which a request may ask for millions: nothing waits for their text."""

from __future__ import annotations

import json
import threading
import tracemalloc
from typing import Any

import llguidance.hf
import pytest
import torch

from outpace.core import TokenLogprobs
from outpace.serve import formats, writers
from outpace.serve.formats import TokenTexts
from serving import STORY, Client, Exchange, run, serving, story

CHAT = {"logprobs": True, "top_logprobs": 20, "max_tokens": 6}
TEXT = {"logprobs": 20, "echo": True, "max_tokens": 6}


@pytest.mark.parametrize("stream", [False, True])
def test_threads_write_log_probabilities(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, loop = set[int](), threading.get_ident()
    text = TokenTexts.text

    def watched(self: TokenTexts, token: int) -> str:
        found.add(threading.get_ident())
        return text(self, token)

    monkeypatch.setattr(TokenTexts, "text", watched)

    async def main() -> None:
        async with serving() as client:
            await client.chat(stream=stream, **CHAT).text()
            await client.complete(story(), stream=stream, **TEXT).text()

    run(main)
    assert found and loop not in found


def test_what_llguidance_reads_is_made_before_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds Python's lock for a second, of a vocabulary of 50,000 tokens."""

    async def main() -> None:
        async with serving() as client:
            monkeypatch.setattr(llguidance.hf, "from_tokenizer", None)
            (choice,) = (await client.chat(**CHAT).json())["choices"]
            assert bytes(choice["logprobs"]["content"][0]["bytes"])
            (choice,) = (await client.chat(response_format={"type": "json_object"}).json())["choices"]
            assert choice["message"]["content"].startswith("{")

    run(main)


ASKED = [
    ("/v1/chat/completions", {"messages": STORY, **CHAT, "n": 3}),
    ("/v1/completions", {"prompt": ["the cat", "a dog"], **TEXT, "n": 3, "return_token_ids": True}),
]


async def pieces_of(client: Client, exchange: Exchange) -> list[bytes]:
    """The pieces of a response, of which a slow client's takes room."""
    exchange.reads.clear()
    while exchange.status is None:
        await client.get("/version")
    assert client.service.admission.inside
    exchange.reads.set()
    pieces = []
    while (piece := await exchange.chunk()) is not None:
        pieces.append(piece)
    await exchange.task
    await client.empty()
    return pieces


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_long_response_comes_in_pieces(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving() as client:
            exchange = client.send(path, {**body, "temperature": 0})
            whole = await exchange.json()
            assert "content-length" in exchange.headers
            for module in (formats, writers):
                monkeypatch.setattr(module, "PIECE", 2000)
            monkeypatch.setattr(writers, "_AT_ONCE", 2)
            pieces = await pieces_of(client, client.send(path, {**body, "temperature": 0}))
        assert len(pieces) > 5 and max(map(len, pieces)) < 9000
        again = json.loads(b"".join(pieces))
        assert again["choices"] == whole["choices"] and again["usage"] == whole["usage"]

    run(main)


def test_a_client_that_leaves_amid_a_long_response_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving() as client:
            for module in (formats, writers):
                monkeypatch.setattr(module, "PIECE", 500)
            exchange = client.chat(**CHAT)
            assert await exchange.chunk()
            exchange.leave()
            await exchange.task
            await client.empty()

    run(main)


def test_the_log_probabilities_of_a_token_take_few_bytes() -> None:
    row = torch.randn(5000, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    TokenLogprobs.of(row, 7, 20)
    tracemalloc.start()
    many = [TokenLogprobs.of(row, 7, 20) for _ in range(100)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 100 * 500
    best = row.topk(20)
    assert many[0].top == dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert many[0] == many[1] and many[0] != TokenLogprobs(many[0].logprob, {1: -1.0})
    assert next(iter(many[0].top)) == int(row.argmax())
