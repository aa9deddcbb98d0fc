"""Promises under load and faults: one test per line of the table in docs/reference/server.md."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from outpace.cache import KVCache
from outpace.core import OutpaceError, SamplingParams
from outpace.engine import scheduler
from outpace.engine.engine import Engine
from outpace.serve import grammar
from outpace.serve.admission import Limits
from outpace.serve.engine import make_engine
from outpace.serve.listening import listen
from outpace.serve.server import Options, Server
from parts import first
from serving import LONG, STORY, Client, Exchange, model, run, serving

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of signals, which a server that gets one leaves to the system."""
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


async def decoding(client: Client, **more: Any) -> Exchange:
    """A long stream that has brought its first text."""
    exchange = client.send(CHAT, {**LONG, **more})
    await exchange.chunk()
    await exchange.chunk()
    return exchange


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_its_slot_back(stream: bool) -> None:
    async def main() -> None:
        async with serving(running=2) as client:
            with client.paced():
                running = [await decoding(client)]
                running += [client.send(CHAT, {**LONG, "stream": stream, "n": 2}) for _ in range(2)]
                first = client.chat(max_tokens=2)
                while client.service.engine.waiting < 4:  # others are running, joining and queued
                    await asyncio.sleep(0)
                for exchange in running:
                    exchange.leave()
            assert (await first.json())["usage"]["completion_tokens"] == 2
            await client.empty()
            for exchange in running:
                await exchange.task

    run(main)


def test_a_client_that_leaves_while_its_prompt_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving() as client:
            loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def slow(*given: Any, **more: Any) -> list[int]:
                loop.call_soon_threadsafe(begun.set)
                assert go_on.wait(60)
                return [5, 6]

            monkeypatch.setattr("outpace.serve.texts.read_text", slow)
            exchange = client.chat()
            await begun.wait()
            # The event loop is free while a thread tokenises.
            assert (await client.get("/health"))["status"] == "ok"
            exchange.leave()
            await exchange.task
            assert client.service.admission.inside == 1  # the work goes on, and is counted
            go_on.set()
            await client.empty()

    run(main)


def test_a_slow_reader_is_closed_and_slows_nobody() -> None:
    async def main() -> None:
        async with serving(unread=16) as client:
            slow = await decoding(client)
            slow.reads.clear()
            await client.chat(max_tokens=40, ignore_eos=True).json()
            while client.service.engine.running:
                await client.chat(max_tokens=8).json()  # others are served until it has been given up
            slow.reads.set()
            last = (await slow.text()).strip().splitlines()[-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert "unread" in error["message"]
            await client.empty()

    run(main)


def test_a_reader_that_accepts_nothing_is_cut_off() -> None:
    async def main() -> None:
        async with serving(send=0.01) as client:
            slow = await decoding(client)
            slow.reads.clear()
            await client.service.admission.empty.wait()
            slow.reads.set()
            assert "[DONE]" not in await slow.text()
            await client.empty()

    run(main)


def test_overload_is_refused_before_anything_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(running=1, waiting=1) as client:
            with client.paced():
                running = [await decoding(client), client.send(CHAT, LONG)]
                while client.service.admission.inside < 2:
                    await asyncio.sleep(0)
                monkeypatch.setattr(
                    client.service.prompts, "conversation", lambda *given, **more: pytest.fail("tokenised")
                )
                refused = client.chat()
                error = (await refused.json())["error"]
                assert refused.status == 429 and error["type"] == "rate_limit_error"
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.headers["x-should-retry"] == "true"
                monkeypatch.undo()
                assert 'requests_refused_total{model_name="nano",reason="overload"} 1.0' in (
                    await client.send("/metrics").text()
                )
                for exchange in running:
                    exchange.leave()
            await client.empty()
            assert "choices" in await client.chat(max_tokens=2).json()

    run(main)


def test_retry_after_follows_the_measured_rate() -> None:
    async def main() -> None:
        async with serving() as client:
            admission, now = client.service.admission, [0.0]
            admission.clock = lambda: now[0]
            for _ in range(5):
                admission.finished()
                now[0] += 4
            assert admission.seconds_for(1) == pytest.approx(4)
            assert admission.seconds_for(3) == pytest.approx(12)
            assert admission.seconds_for(10**6) == 60

    run(main)


def test_a_request_that_waits_too_long_gets_503() -> None:
    async def main() -> None:
        async with serving(running=1) as client:
            with client.paced():
                first = await decoding(client)
                client.service.admission.limits = Limits(running=1, wait=0)
                refused = client.chat()
                assert (await refused.json())["error"]["code"] == "waited_too_long"
                assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
            assert await first.chunk()  # the other goes on
            first.leave()
            await client.empty()

    run(main)


def test_a_request_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Exception):
        pass

    def broken(*given: Any) -> None:
        raise Broken("no more")

    async def main() -> None:
        monkeypatch.setattr(grammar.Grammar, "__call__", broken)
        async with serving() as client:
            good = client.chat(max_tokens=30, ignore_eos=True)
            form = {"response_format": {"type": "json_object"}}
            bad, streamed = client.chat(**form), client.chat(stream=True, **form)
            error = (await bad.json())["error"]
            assert bad.status == 500 and error["type"] == "server_error" and "no more" in error["message"]
            assert "no more" in (await streamed.events())[-1]["error"]["message"]
            assert streamed.status == 200
            expected = Engine(model().target, tokenizer=model().tokenizer).generate(
                [model().encode_chat(STORY)]
            )
            found = (await good.json())["choices"][0]["message"]["content"]
            assert found.startswith(expected[0].text)
            await client.empty()

    run(main)


def test_where_memory_runs_out_the_newest_goes_on_later_with_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        KVCache, "_least_room", 16
    )  # few rows are reserved ahead, so that requests outgrow them
    monkeypatch.setattr(scheduler, "_ANSWER", 4)
    monkeypatch.setattr(scheduler, "_DRAFT", 4)
    put_back: list[int] = []

    def change(engine: Engine) -> None:
        make_room = engine._batch.scheduler.make_room

        def watched(rows: Any, release: Any) -> None:
            def noted(active: Any) -> None:
                assert active.number == max(one.number for one in engine._batch.scheduler.active)
                put_back.append(active.number)
                release(active)

            make_room(rows, noted)

        engine._batch.scheduler.make_room = watched  # type: ignore[method-assign]

    async def main() -> None:
        prompt = model().encode_chat(STORY)
        asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
        memory = 200 * model().target.new_cache().row_bytes  # four such requests have 4 x 128 rows in the end
        async with serving(memory=memory, change=change) as client:
            kinds = [{"seed": seed, "stream": bool(seed % 2)} for seed in range(4)]
            sent = [client.chat(**asked, **kind, return_token_ids=True) for kind in kinds]
            for kind, exchange in zip(kinds, sent, strict=True):
                if kind["stream"]:
                    choices = [chunk["choices"][0] for chunk in (await exchange.events())[:-1]]
                    found = [token for choice in choices for token in choice.get("token_ids", ())]
                else:
                    found = (await exchange.json())["choices"][0]["token_ids"]
                params = SamplingParams(
                    max_new_tokens=60, temperature=0.8, ignore_eos=True, seed=kind["seed"]
                )
                assert found == Engine(model().target).generate([prompt], params)[0].tokens
            assert put_back
            await client.empty()

    run(main)


def test_where_the_engines_thread_dies_all_are_told() -> None:
    class Dead(BaseException):
        pass

    async def main() -> None:
        died = asyncio.Event()
        stop = [False]

        def change(engine: Engine) -> None:
            step = engine.step

            def dying() -> Any:
                if stop[0]:
                    raise RuntimeError("the engine is no more")
                return step()

            engine.step = dying  # type: ignore[method-assign]

        async with serving(change=change, on_failure=died.set) as client:
            stream = await decoding(client)
            stop[0] = True
            assert "no more" in (await stream.events())[-1]["error"]["message"]
            await died.wait()
            for path in ("/health", "/health/ready"):
                exchange = client.send(path)
                assert (await exchange.json())["error"]["code"] == "engine_failed"
                assert exchange.status == 503
            refused = client.chat()
            assert (await refused.json())["error"]["code"] == "engine_failed" and refused.status == 503
            assert client.service.admission.inside == 0

    run(main)


def test_silent_streams_are_pinged() -> None:
    async def main() -> None:
        async with serving(running=1, ping=0.01) as client:
            first = await decoding(client)
            second = client.send(
                "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1900, "stream": True}
            )
            # One of its two choices at most has joined, and the head is sent only then.
            first.leave()
            while b": ping" not in (chunk := await second.chunk() or b""):
                assert chunk
            second.leave()
            await client.empty()

    run(main)


# -- the process -------------------------------------------------------------------------------------------


def make_server(drain: float = 60) -> tuple[Server, Any, asyncio.Event]:
    ready = asyncio.Event()
    listener = listen("127.0.0.1", 0)
    limits = Limits()
    server = Server(
        Options(drain=drain, names=["nano"]),
        lambda: (model(), make_engine(model(), "none", limits, memory=0.2)),
        lambda service: ready.set(),
    )
    return server, listener, ready


async def first_lines(lines: Any) -> None:
    for _ in range(3):
        await anext(lines)


@pytest.mark.parametrize("drain", [60, 0])
def test_sigterm_drains(drain: float) -> None:
    async def main() -> None:
        server, listener, ready = make_server(drain)
        serving_ = asyncio.ensure_future(server.serve([listener]))
        await ready.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        body = {"messages": STORY, "max_tokens": 150, "ignore_eos": True, "stream": True}
        async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
            async with http.stream("POST", CHAT, json=body) as response:
                lines = response.aiter_lines()
                await first_lines(lines)
                server.handle_exit(signal.SIGTERM, None)
                if drain:
                    while not server.app.state.service.draining:
                        await asyncio.sleep(0)
                    refused = await http.post(CHAT, json=body)
                    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
                    assert (await http.get("/health/ready")).status_code == 503
                rest = [line async for line in lines if line.startswith("data: ")]
            assert ("[DONE]" in rest[-1]) == bool(drain)
            assert drain or json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "removed"
        await serving_
        assert server.error is None

    run(main)


STUCK = """
import asyncio, threading
from outpace.loading import load
from outpace.serve.admission import Limits
from outpace.serve.engine import make_engine
from outpace.serve.listening import listen
from outpace.serve.server import Options, Server

def ready(service):
    loop = asyncio.get_running_loop()
    for _ in range(64):  # no thread is left, and none of them ends
        loop.run_in_executor(None, threading.Event().wait)
    loop.call_soon(lambda: print(listener.getsockname()[1], flush=True))  # once the server has the service

listener = listen("127.0.0.1", 0)
model = load(None, "float64", "cpu")
server = Server(Options(drain=1), lambda: (model, make_engine(model, "none", Limits(), memory=0.2)), ready)
server.run(sockets=[listener])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("second", first(1, [signal.SIGINT, signal.SIGTERM]))
def test_a_second_signal_ends_the_process_whatever_threads_do(second: signal.Signals) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.send_signal(signal.SIGTERM)
        with httpx2.Client(base_url=url) as http, suppress(httpx2.TransportError):
            while http.get("/health/ready").status_code == 200:
                pass  # the first signal has not been handled
        assert process.poll() is None
        process.send_signal(second)
        _, said = process.communicate(timeout=60)
        assert process.returncode == -second and "Traceback" not in said
    finally:
        process.kill()
        process.communicate()


def test_health_fails_once_nothing_passes_through_the_engine() -> None:
    async def main() -> None:
        go_on, begun = threading.Event(), threading.Event()

        def change(engine: Engine) -> None:
            step = engine.step

            def stuck() -> Any:
                begun.set()
                assert go_on.wait(60)
                return step()

            engine.step = stuck  # type: ignore[method-assign]

        async with serving(change=change, stuck=60) as client:
            now = [0.0]
            client.service.admission.clock = lambda: now[0]
            assert (await client.get("/health"))["status"] == "ok"
            exchange = client.chat(max_tokens=2)
            await asyncio.to_thread(begun.wait)
            assert (await client.get("/health"))["status"] == "ok"  # a step may take a while
            now[0] = 61.0
            refused = client.send("/health")
            assert (await refused.json())["error"]["code"] == "engine_stuck" and refused.status == 503
            go_on.set()
            assert "choices" in await exchange.json()
            assert (await client.get("/health"))["status"] == "ok"
            await client.empty()

    run(main)


def test_a_busy_engine_is_healthy() -> None:
    """Neither a full batch nor a full queue nor a text that is scored is in the way of the question."""

    async def main() -> None:
        async with serving(running=1, waiting=2) as client:
            with client.paced():
                running = await decoding(client)
                more = [client.send(CHAT, LONG) for _ in range(2)]
                while client.service.admission.inside < 3:
                    await asyncio.sleep(0)
                while client.service.engine.waiting < 2:
                    await asyncio.sleep(0)
                for _ in range(3):
                    await client.service._asked()
                assert client.service.engine.waiting == 2 and client.service.engine.running == 1
                for exchange in (running, *more):
                    exchange.leave()
            await client.empty()

    run(main)


def test_the_server_answers_while_it_loads_and_ends_where_that_fails() -> None:
    async def main() -> None:
        loop, asked = asyncio.get_running_loop(), threading.Event()

        def load() -> Any:
            assert asked.wait(60)
            raise OutpaceError("no such folder")

        listener = listen("127.0.0.1", 0)
        server = Server(Options(), load, lambda service: None)
        serving_ = asyncio.ensure_future(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url) as http:
            assert (await http.get("/health")).status_code == 200
            refused = await http.get("/health/ready")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        asked.set()
        await serving_
        assert str(server.error) == "no such folder"
        assert loop.is_running()

    run(main)


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_a_signal_while_the_model_is_loaded_ends_the_server_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        while not server.should_exit:
            pass
        raise OutpaceError("loading was given up")

    server = Server(Options(), load, lambda service: None)
    server.run([listen("127.0.0.1", 0)])
    assert not caplog.records


def test_a_dead_engine_ends_the_server_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        server, listener, ready = make_server()
        serving_ = asyncio.ensure_future(server.serve([listener]))
        await ready.wait()

        def dying(engine: Engine) -> None:
            raise RuntimeError("gone")

        monkeypatch.setattr(Engine, "step", dying)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url) as http:
            refused = await http.post(CHAT, json={"messages": STORY})
            assert refused.status_code == 500 and "gone" in refused.json()["error"]["message"]
        await serving_
        assert isinstance(server.error, OutpaceError) and "gone" in str(server.error)

    run(main)


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    listener = listen("127.0.0.1", 0)
    with listener, pytest.raises(OutpaceError, match="--port"):
        listen("127.0.0.1", listener.getsockname()[1])
