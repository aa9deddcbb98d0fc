"""HTTP/1.1 as clients speak it: offers of other protocols, pipelines, half-closed connections, odd heads."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from serving import run
from wires import HEALTH, Streams, answered, chat, listening, opened

BODY = json.dumps({"prompt": "a"}).encode()
JSON = "content-type: application/json"
LENGTH = f"content-length: {len(BODY)}"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(*lines: str, body: bytes = BODY) -> bytes:
    head = "\r\n".join(["POST /tokenize HTTP/1.1", JSON, *lines])
    return head.encode() + b"\r\n\r\n" + body


async def statuses(streams: Streams, going_on: bool = False) -> list[int]:
    """The statuses of all answers, until the server has no more; then the client closes the connection.

    Args:
        going_on: with those that tell a client to wait, which come after a time.
    """
    found = await streams[0].read()
    streams[1].close()
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+)", found) if going_on or one != b"100"]


def caught(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Records with tracebacks, and errors."""
    return [one.getMessage() for one in caplog.records if one.exc_info or one.levelname == "ERROR"]


OFFERS = [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: a", "Sec-WebSocket-Version: 13"),
    ("Upgrade: h2c, websocket", "connection: keep-alive, upgrade"),
    ("Connection: upgrade", "Upgrade: TLS/1.0"),
]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framed", [(LENGTH, BODY), ("transfer-encoding: chunked", CHUNKED)])
@pytest.mark.parametrize("piece", [1, 2**16])
def test_an_offer_of_another_protocol_is_declined(
    offer: tuple[str, ...], framed: tuple[str, bytes], piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is answered with its body, and so is the next on the connection."""

    async def main() -> None:
        async with listening() as (_, port):
            streams = await opened(port)
            sent = post("host: a", *offer, framed[0], body=framed[1])
            for _ in range(2):
                for start in range(0, len(sent), piece):
                    streams[1].write(sent[start : start + piece])
                    if piece == 1:
                        await asyncio.sleep(0)
                status, found = await answered(streams)
                assert status == 200 and found["tokens"] == [65]
            streams[1].close()

    run(main)
    assert not caught(caplog)


@pytest.mark.parametrize("count", [9, 300])
def test_requests_sent_ahead_are_answered_in_their_order(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with listening() as (_, port):
            wanted = [f"{number:03}" for number in range(count)]
            sent = b""
            for one in wanted:
                sent += post(
                    "host: a", "content-length: 16", f"x-request-id: {one}", body=b'{"prompt":"a"}  '
                )
            streams = await opened(port, sent + chat() + HEALTH + b"connection: close\r\n\r\n")
            found = await streams[0].read()
            ids = re.findall(rb"x-request-id: (\d{3})\r", found)
            assert [one.decode() for one in ids] == wanted
            assert len(re.findall(rb"HTTP/1\.1 200 ", found)) == count + 2

    run(main)
    assert not caught(caplog)


def test_a_mistake_after_good_requests_leaves_their_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening() as (_, port):
            good = post("host: a", LENGTH)
            for wrong in (b"nonsense\r\n\r\n", post("host: a", "host: b", LENGTH), post(LENGTH)):
                assert await statuses(await opened(port, good + good + wrong + good)) == [200, 200, 400]
            streams = await opened(port, chat(max_tokens=60, ignore_eos=True, stream=True) + b"?\r\n\r\n")
            found = await streams[0].read()
            assert b"[DONE]" in found, found[-1500:]
            assert found.index(b"[DONE]") < found.index(b"HTTP/1.1 400 ")

    run(main)
    assert not caught(caplog)


def test_a_client_that_leaves_its_pipeline_ends_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening() as (server, port):
            long = chat(max_tokens=1900, ignore_eos=True, stream=True)
            streams = await opened(port, long * 100)
            await streams[0].readuntil(b"data:")
            (connection,) = server.server_state.connections
            assert len(connection.pipeline) < 40, "as many are known as fit into a piece that is parsed"
            streams[1].transport.abort()  # type: ignore[attr-defined]
            await server.app.state.service.admission.empty.wait()
            while server.server_state.connections:
                await asyncio.sleep(0)

    run(main)
    assert not caught(caplog)


@pytest.mark.parametrize("asked", [post("host: a", LENGTH), HEALTH + b"\r\n", chat(), chat(stream=True)])
def test_a_half_closed_connection_is_answered(asked: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening() as (server, port):
            for count in (1, 12):
                streams = await opened(port, asked * count)
                streams[1].write_eof()
                assert await statuses(streams) == [200] * count
            streams = await opened(port, asked[:-1])
            streams[1].write_eof()
            assert set(await statuses(streams)) <= {400}
            silent = await opened(port)
            silent[1].write_eof()
            assert await silent[0].read() == b""
            silent[1].close()
            while server.server_state.connections:
                await asyncio.sleep(0)
            assert server.app.state.bodies.all == 0

    run(main)
    assert not caught(caplog)


def test_a_client_that_has_left_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for an answer as a whole; one that only has closed its side is told to go on waiting."""
    monkeypatch.setattr("outpace.serve.protocol._PROBE", 0.02)

    async def main() -> None:
        async with listening() as (server, port):
            admission = server.app.state.service.admission
            asked = chat(max_tokens=1900, ignore_eos=True)
            leaving = await opened(port, asked)
            while not admission.inside:
                await asyncio.sleep(0)
            leaving[1].close()
            await admission.empty.wait()
            waiting = await opened(port, chat(max_tokens=200, ignore_eos=True))
            waiting[1].write_eof()
            *told, last = await statuses(waiting, going_on=True)
            assert set(told) == {100} and last == 200

    run(main)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (post(LENGTH), 400),
        (post("host: a", "host: a", LENGTH), 400),
        (post("host: a b", LENGTH), 400),
        (post("host: user@a", LENGTH), 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET http://a/health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", 200),
        (post("host: a", "transfer-encoding: gzip, chunked", body=CHUNKED), 501),
        (post("host: a", "transfer-encoding: gzip"), 501),
        (post("host: a", "transfer-encoding: Chunked", "connection: close", body=CHUNKED), 200),
        (post("host: a", "transfer-encoding: chunked", LENGTH, body=CHUNKED), 400),
        (post("host: a", LENGTH, "content-length: 3"), 400),
        (post("host: a", LENGTH, "content-encoding: gzip", "connection: close"), 415),
        (post("host: a", LENGTH, "content-encoding: x", "connection: close"), 415),
        (post("host: a", LENGTH, "content-encoding: Identity", "connection: close"), 200),
        (post("host: a", LENGTH, "expect: 200-ok"), 417),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_heads_get_the_status_of_their_mistake(
    asked: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> Any:
        async with listening() as (server, port):
            assert await statuses(await opened(port, asked)) == [status]
            assert server.app.state.bodies.all == 0

    run(main)
    assert not caught(caplog)
