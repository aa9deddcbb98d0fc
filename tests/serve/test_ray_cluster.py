"""Ray Serve on this machine, with two and three replicas: `make test-ray` runs these.

REQUESTS is the number of requests while a replica is killed: `make test-ray` sends 500.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from outpace.core import SamplingParams
from outpace.embedded import nano_draft_path, nano_path
from outpace.loading import load

ray = pytest.importorskip("ray", reason="needs outpace[ray]; make test-ray installs it")
pytestmark = pytest.mark.slow

from ray import serve  # noqa: E402

from outpace.serve.ray import Config, build  # noqa: E402

COUNT = int(os.environ.get("REQUESTS", "100"))
STREAMS, TOKENS, KEY = 32, 24, "secret"
TEXTS = [f"Question: What is {i} + {i + 1}? Answer:" for i in range(20)]
SMALL: dict[str, Any] = {"cpus": 0.5, "memory": 0.1, "drafter": "prompt_lookup"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def alone(texts: list[str], model: str | None = None, count: int = TOKENS) -> list[str]:
    loaded = load(model)
    params = SamplingParams(max_new_tokens=count)
    found = [loaded.engine("none").generate([loaded.tokens(text)], params)[0].text for text in texts]
    return [text or "" for text in found]


def client(address: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=f"{address}/v1", timeout=120, headers={"Authorization": f"Bearer {KEY}"}
    )


async def ask(http: httpx2.AsyncClient, text: str, stream: bool = False, **more: Any) -> str:
    """One completion.

    Raises:
        ConnectionError: the answer is an error, or not whole.
    """
    body = {"prompt": text, "max_tokens": TOKENS, "temperature": 0, "stream": stream, **more}
    try:
        response = await http.post("/completions", json=body)
    except httpx2.HTTPError as error:
        raise ConnectionError(repr(error)) from error
    if response.status_code != 200:
        raise ConnectionError(f"{response.status_code} {response.text}")
    if not stream:
        return str(response.json()["choices"][0]["text"])
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    if data[-1] != "[DONE]" or any("error" in one for one in events):
        raise ConnectionError(f"the stream was cut: {data[-1]}")
    return "".join(choice["text"] for one in events for choice in one["choices"])


def replicas() -> set[int]:
    """Process ids of the replicas with a model."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().startswith(
                "ray::ServeReplica:default:outpace"
            ):
                found.add(int(entry.name))
        except OSError:  # it has just ended
            continue
    return found


def running() -> int:
    """Replicas that get requests."""
    states = serve.status().applications["default"].deployments["outpace"].replica_states
    return int(states.get("RUNNING", 0))


async def until(true: Callable[[], bool], seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, serve.status()
        await asyncio.sleep(0.2)


def loaded(work: Callable[[httpx2.AsyncClient, int], Awaitable[None]], address: str, streams: int) -> Any:
    """Streams that call ``work`` with 0, 1, ... until they are cancelled."""
    numbers = iter(range(10**9))

    async def stream(http: httpx2.AsyncClient) -> None:
        for number in numbers:
            await work(http, number)

    async def run() -> None:
        async with client(address) as http:
            await asyncio.gather(*(stream(http) for _ in range(streams)))

    return asyncio.ensure_future(run())


def test_requests_go_on_while_a_replica_is_killed_and_one_is_added(address: str) -> None:
    expected = alone(TEXTS)
    serve.run(
        build(
            Config(**SMALL, api_keys=KEY, min_replicas=2, max_replicas=3, target_ongoing=8, scale_up_after=1)
        )
    )
    assert httpx2.post(f"{address}/v1/completions", json={"prompt": "x"}).status_code == 401
    assert httpx2.get(f"{address}/health").status_code == 200
    before = replicas()
    assert len(before) == 2
    found: dict[int, str] = {}
    again: list[str] = []

    async def main() -> None:
        numbers, ended = itertools.count(), False

        async def stream(http: httpx2.AsyncClient) -> None:
            while not (ended and len(found) >= COUNT):
                number = next(numbers)
                while number not in found:
                    try:
                        found[number] = await ask(http, TEXTS[number % 20], stream=bool(number % 2))
                    except ConnectionError as error:
                        again.append(f"{number}: {error}")
                        await asyncio.sleep(0.5)

        async def change() -> None:
            nonlocal ended
            await until(lambda: len(found) >= COUNT // 3)
            os.kill(min(before), signal.SIGKILL)
            try:
                await until(lambda: bool(replicas() - before) and running() >= 2)
            finally:
                ended = True

        async with client(address) as http:
            await asyncio.gather(change(), *(stream(http) for _ in range(STREAMS)))

    asyncio.run(main())
    new = replicas() - before
    print(f"{len(found)} requests, {len(again)} repeated by the client, {len(new)} new replicas")
    assert new and min(before) not in replicas()
    assert all(text == expected[number % 20] for number, text in found.items())
    # Answers in one piece are repeated by the entry; streams that have begun are reported as cut.
    assert all(int(one.split(":")[0]) % 2 for one in again), again


def test_replicas_follow_the_load(address: str) -> None:
    expected = alone(TEXTS)
    serve.run(
        build(
            Config(
                **SMALL, api_keys=KEY, max_replicas=3, target_ongoing=2, scale_up_after=1, scale_down_after=2
            )
        )
    )

    async def check(http: httpx2.AsyncClient, number: int) -> None:
        assert await ask(http, TEXTS[number % 20], stream=bool(number % 2)) == expected[number % 20]

    async def main() -> None:
        await until(lambda: running() == 1)
        load = loaded(check, address, 12)
        await until(lambda: running() == 3 or load.done())
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await until(lambda: running() == 1)

    asyncio.run(main())


def test_an_update_loses_no_request(address: str) -> None:
    expected = alone(TEXTS)
    config = Config(**SMALL, api_keys=KEY, min_replicas=2, max_replicas=2)
    serve.run(build(config))
    before, answered = replicas(), 0

    async def check(http: httpx2.AsyncClient, number: int) -> None:
        nonlocal answered
        assert await ask(http, TEXTS[number % 20], stream=bool(number % 2)) == expected[number % 20]
        answered += 1

    async def main() -> None:
        load = loaded(check, address, 8)
        await until(lambda: answered > 20 or load.done())
        newer = config.model_copy(update={"drafter": "suffix"})
        await asyncio.to_thread(serve.run, build(newer))
        await until(lambda: not before & replicas() or load.done())
        so_far = answered
        await until(lambda: answered > so_far + 20 or load.done())
        load.cancel()
        with pytest.raises(asyncio.CancelledError):  # otherwise it is the error of a request
            await load

    asyncio.run(main())
    assert len(replicas()) == 2


def test_requests_that_begin_alike_share_a_replica(address: str) -> None:
    serve.run(build(Config(**SMALL, api_keys=KEY, min_replicas=3, max_replicas=3)))

    async def cached(http: httpx2.AsyncClient, story: int, number: int) -> int:
        text = f"Once upon a time there were {story} little dogs. " * 12 + f"Number {number}"
        body = {"prompt": text, "max_tokens": 1}
        response = await http.post("/completions", json=body)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def main() -> None:
        async with client(address) as http:
            first = [await cached(http, story, 0) for story in range(8)]
            assert max(first) < 64
            for number in range(1, 4):
                assert min([await cached(http, story, number) for story in range(8)]) > 64

    asyncio.run(main())


def test_several_models(address: str) -> None:
    models = {"nano": str(nano_path()), "draft": str(nano_draft_path())}
    expected = {name: alone(TEXTS[:4], model) for name, model in models.items()}
    assert expected["nano"] != expected["draft"]
    serve.run(build(Config(**SMALL, api_keys=KEY, models=json.dumps(models), min_replicas=2, max_replicas=2)))

    async def main() -> None:
        async with client(address) as http:
            listed = (await http.get("/models")).json()["data"]
            assert [one["id"] for one in listed] == list(models)
            asked = [(name, number) for number in range(4) for name in models]
            texts = await asyncio.gather(*(ask(http, TEXTS[number], model=name) for name, number in asked))
            assert list(texts) == [expected[name][number] for name, number in asked]
            with pytest.raises(ConnectionError, match=r"404.*there is 'nano', 'draft'"):
                await ask(http, "x", model="other")

    asyncio.run(main())


def test_who_leaves_is_not_waited_for(address: str) -> None:
    serve.run(build(Config(**SMALL, api_keys=KEY)))

    async def main() -> None:
        async with client(address) as http:
            long = {
                "prompt": "Once",
                "max_tokens": 1900,
                "ignore_eos": True,
                "stream": True,
                "speculation": "off",
            }
            async with http.stream("POST", "/completions", json=long) as response:
                async for _ in response.aiter_lines():
                    break
            text = ""
            for _ in range(50):
                text = (await http.get(f"{address}/metrics")).text
                if 'outpace:num_requests_running{model_name="outpace-nano"} 0.0' in text:
                    return
                await asyncio.sleep(0.2)
            raise AssertionError(text)

    asyncio.run(main())
