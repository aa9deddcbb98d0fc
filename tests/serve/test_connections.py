"""Limits of connections: heads and bodies in size and time, their number, and that refusals arrive."""

from __future__ import annotations

import asyncio
import json

import pytest

from outpace.serve.admission import Limits
from outpace.serve.protocol import Guarded
from serving import model, run
from wires import HEALTH, answered, chat, limit_buffers, listening, opened, sent


@pytest.mark.parametrize(
    "head",
    [b"GET /health HTTP/1.1\r\na: ", b"GET /", b"GET /health HTTP/1.1\r\n",
     b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: "],
)  # fmt: skip
def test_a_head_without_end_is_refused(head: bytes) -> None:
    piece = b"b: c\r\n" * 10_000 if head.endswith(b"\r\n") else b"a" * 60_000

    async def main() -> None:
        async with listening() as (_, port):
            streams = await opened(port, head)
            await sent(streams, 100, piece)
            status, found = await answered(streams)
            assert status == 431 and "head" in found["error"]["message"]
            status, found = await answered(await opened(port, HEALTH + b"\r\n"))
            assert (status, found["status"]) == (200, "ok")

    run(main)


def test_bodies_in_small_chunks_are_read() -> None:
    body = json.dumps({"prompt": "a" * 40_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"

    async def main() -> None:
        async with listening() as (_, port):
            head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            streams = await opened(port, head + b"transfer-encoding: chunked\r\n\r\n" + chunks)
            status, found = await answered(streams)
            assert status == 200 and found["count"] == len(model().tokens("a" * 40_000))
            streams[1].write(HEALTH + b"a: " + b"a" * 60_000 + b"\r\n\r\n")  # and the connection goes on
            assert (await answered(streams))[0] == 200

    run(main)


@pytest.mark.parametrize("part", [HEALTH, chat()[:-5]])
def test_a_request_that_does_not_end_is_refused(part: bytes) -> None:
    async def main() -> None:
        async with listening(head=0.2, receive=0.2) as (server, port):
            silent = await opened(port)
            streams = await opened(port, part)
            status, found = await answered(streams)
            assert status == 408 and "too long" in found["error"]["message"]
            assert await streams[0].read() == b"" == await silent[0].read()  # both are closed
            streams[1].close()
            assert (await answered(await opened(port, chat())))[0] == 200
            assert server.app.state.service.admission.inside == 0 == server.app.state.bodies.all

    run(main)


def test_a_stream_is_not_ended_by_the_time_for_requests() -> None:
    async def main() -> None:
        async with listening(head=0.1, receive=0.1) as (_, port):
            streams = await opened(port, chat(max_tokens=60, ignore_eos=True, stream=True))
            found = await streams[0].readuntil(b"[DONE]")
            assert b" 200 " in found
            streams[1].write(chat())
            await streams[0].readuntil(b"\r\n\r\n")

    run(main)


def test_the_connection_that_was_idle_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "connections", 3)

    async def main() -> None:
        async with listening() as (server, port):
            server.places.share = 1
            busy = await opened(port, chat(max_tokens=1900, ignore_eos=True, stream=True))
            await busy[0].readuntil(b"data:")
            idle = []
            for _ in range(4):
                idle.append(await opened(port, HEALTH))  # half of a head
                while idle[-1][1].get_extra_info("sockname") not in {
                    one.client for one in server.server_state.connections
                }:
                    await asyncio.sleep(0)
            assert await idle[0][0].read() == await idle[1][0].read() == b""
            for streams in idle[2:]:
                streams[1].write(b"\r\n")
                assert (await answered(streams))[0] == 200
                streams[1].close()
            while len(server.server_state.connections) > 1:
                await asyncio.sleep(0)
            server.places.most = server.places.share = 1
            status, found = await answered(await opened(port, HEALTH))
            assert status == 503 and found["error"]["code"] == "overloaded"
            await busy[0].readuntil(b"data:")  # which goes on
            busy[1].close()

    run(main)


@pytest.mark.parametrize("closes", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize("framed", [b"content-length: %d\r\n", b"transfer-encoding: chunked\r\n"])
@pytest.mark.parametrize("key", [b"", b"x-api-key: b\r\n"])
def test_the_answer_to_a_body_that_is_too_long_arrives(closes: bytes, framed: bytes, key: bytes) -> None:
    """Though the client sends all of it before it reads; one without a key is refused for that."""
    piece = b"a" * 2**16

    async def main() -> None:
        async with listening(keys=("b",), body=2**20) as (server, port):
            size = b"" if b"chunked" in framed else framed % (200 * len(piece))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            streams = await opened(port, head + closes + key + (size or framed) + b"\r\n")
            chunk = piece if size else b"10000\r\n" + piece + b"\r\n"
            await sent(streams, 200, chunk)
            status, found = await answered(streams)
            assert status == (413 if key else 401) and found["error"]["message"]
            assert server.app.state.bodies.all == 0
            streams[1].close()

    run(main)


def test_bodies_count_by_what_has_arrived() -> None:
    """What is declared takes no room, and a small body waits for none."""
    head = (
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    long = json.dumps({"prompt": "a " * 40_000}).encode()

    async def main() -> None:
        async with listening(body=2**20) as (server, port):
            bodies = server.app.state.bodies
            bodies.most = bodies.share = bodies.reserve = 2**17
            declared = [await opened(port, head % 2**20 + b"{") for _ in range(40)]
            chunked = await opened(port, head.replace(b"content-length: %d", b"transfer-encoding: chunked"))
            chunked[1].write(b"20000\r\n" + b" " * 2**17 + b"\r\n")
            while bodies.all < 2**17:
                await asyncio.sleep(0)
            assert (await answered(await opened(port, chat())))[0] == 200
            status, found = await answered(await opened(port, head % len(long) + long))
            assert status == 503 and found["error"]["code"] == "overloaded"
            for streams in (*declared, chunked):
                streams[1].close()
            while bodies.all:
                await asyncio.sleep(0)
            assert (await answered(await opened(port, head % len(long) + long)))[0] == 400  # many tokens

    run(main)


def detokenize() -> bytes:
    """A request whose answer has 200 KB."""
    body = json.dumps({"tokens": [5] * 200_000}).encode()
    head = b"POST /detokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


STREAM = chat(max_tokens=1000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)


@pytest.mark.parametrize(
    "asked", [detokenize(), detokenize() + chat(), STREAM], ids=["whole", "two", "stream"]
)
def test_a_connection_whose_answer_is_not_read_ends(asked: bytes) -> None:
    """It keeps no place among the connections, and nothing of the answer."""

    async def main() -> None:
        async with listening(send=0.2) as (server, port):
            limit_buffers(server)
            silent = await opened(port, asked, buffer=4096)
            silent[1].transport.pause_reading()  # type: ignore[attr-defined]
            while not server.server_state.connections:
                await asyncio.sleep(0)
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            await server.app.state.service.admission.empty.wait()
            assert server.app.state.bodies.all == 0
            silent[1].close()

    run(main)


def test_a_slow_reader_has_all_of_its_answer() -> None:
    """Each piece that it takes is progress."""

    async def main() -> None:
        async with listening() as (server, port):
            limit_buffers(server)
            streams = await opened(port, detokenize(), buffer=4096)
            head = await streams[0].readuntil(b"\r\n\r\n")
            (one,) = server.server_state.connections
            assert isinstance(one, Guarded)
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
            while (left := one.transport.get_write_buffer_size()) and size > 2**16:
                one._stalled()  # as after a time in which it took something
                while one.transport.get_write_buffer_size() == left and size > 2**16:
                    size -= len(await streams[0].read(5000))
            await streams[0].readexactly(size)
            streams[1].close()

    run(main)
