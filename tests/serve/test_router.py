"""Several models in one server: loaded at first use, unloaded for others, listed; tokens as each alone."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from folders import save_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.engine.engine import Engine
from outpace.loading import Loaded, load
from outpace.serve.admission import Limits
from outpace.serve.auth import Keys
from outpace.serve.engine import make_engine
from outpace.serve.room import Known, Room
from outpace.serve.router import Router
from outpace.serve.routes import make_app
from serving import LONG, STORY, Exchange, model, run

MIB = 2**20
TEXTS = ["Once upon a time", "A dog and a cat", "Question: What is 2 + 3?"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", chat=True)


class Shelf:
    """Models of a router, which counts their loads; ``fails`` are errors of the next ones by name."""

    def __init__(self, tiny: Path, sizes: dict[str, int]) -> None:
        self.tiny, self.sizes = tiny, sizes
        self.loads: list[str] = []
        self.rooms: dict[str, dict[str, Any]] = {}
        self.fails: dict[str, Exception] = {}
        self.gates: dict[str, Event] = {}  # a load waits for its own
        self.kept: dict[str, weakref.ref[Any]] = {}
        self.engines: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()

    def known(self, limits: Limits) -> list[Known]:
        def loads(name: str) -> Callable[[dict[str, Any]], tuple[Loaded, Engine]]:
            def one(room: dict[str, Any]) -> tuple[Loaded, Engine]:
                self.loads.append(name)
                self.rooms[name] = room
                if (gate := self.gates.get(name)) is not None:
                    assert gate.wait(60)
                if (error := self.fails.pop(name, None)) is not None:
                    raise error
                loaded = load(str(self.tiny), "float64", "cpu") if name.startswith("tiny") else model()
                self.kept[name] = weakref.ref(loaded.target)
                engine = make_engine(loaded, "prompt_lookup", limits, adaptive=False, **room)
                self.engines[name] = engine
                return loaded, engine

            return one

        return [Known(name, size, loads(name)) for name, size in self.sizes.items()]


class Client:
    """Sends requests to a router's application."""

    def __init__(self, app: Any, router: Router, shelf: Shelf) -> None:
        self.app, self.router, self.shelf = app, router, shelf

    def send(self, path: str, body: Any = None, **headers: str) -> Exchange:
        import json

        raw = b"" if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json", "content-length": str(len(raw)), **headers}
        return Exchange(self.app, "GET" if body is None else "POST", path, raw, given)

    def complete(self, model: str | None, prompt: str = TEXTS[0], **more: Any) -> Exchange:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "return_token_ids": True, **more}
        return self.send("/v1/completions", body | ({} if model is None else {"model": model}))

    async def tokens(self, model: str | None, prompt: str = TEXTS[0], **more: Any) -> list[int]:
        found = await self.complete(model, prompt, **more).json()
        assert "choices" in found, found
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids

    @contextmanager
    def held(self, model: str) -> Iterator[Event]:
        """A loaded model's engine takes eight steps, and then waits for what this yields."""
        engine, gate, free = self.shelf.engines[model], Event(), 8
        step = engine.step

        def waits() -> Any:
            nonlocal free
            free -= 1
            assert free >= 0 or gate.wait(60)
            return step()

        engine.step = waits  # type: ignore[method-assign]
        try:
            yield gate
        finally:
            gate.set()

    async def states(self) -> dict[str, str]:
        listed = await self.send("/v1/models").json()
        return {one["id"]: one["status"]["value"] for one in listed["data"]}


@asynccontextmanager
async def routing(
    tiny: Path,
    sizes: dict[str, int] | None = None,
    *,
    most: int = 4,
    free: int | None = None,
    keys: tuple[str, ...] = (),
    room: Room | None = None,
    **more: Any,
) -> AsyncIterator[Client]:
    options = {name: more.pop(name) for name in ("idle", "store", "sleep", "clock") if name in more}
    limits = Limits(**more)
    shelf = Shelf(tiny, sizes or {"nano": MIB, "tiny": MIB})
    room = room or Room(most, 0.5, 1, lambda device: free)
    app = make_app(Keys(keys), limits)
    router = Router(shelf.known(limits), limits, room, **options)
    app.state.service = router
    try:
        yield Client(app, router, shelf)
    finally:
        await router.close()


def plain(loaded: Loaded, text: str, **params: Any) -> list[int]:
    (found,) = Engine(loaded.target, tokenizer=loaded.tokenizer).generate(
        [loaded.tokens(text)], SamplingParams(**params)
    )
    return found.tokens


def test_each_model_is_loaded_at_its_first_request_and_has_its_own_tokens(tiny: Path) -> None:
    own = {"nano": model(), "tiny": load(str(tiny), "float64", "cpu")}

    async def main() -> None:
        async with routing(tiny) as client:
            assert await client.states() == {"nano": "unloaded", "tiny": "unloaded"}
            assert client.shelf.loads == []
            for text in TEXTS:  # in turns
                for name, loaded in own.items():
                    assert await client.tokens(name, text, max_tokens=24) == plain(
                        loaded, text, max_new_tokens=24
                    )
            assert client.shelf.loads == ["nano", "tiny"]
            asked = [(name, text) for text in TEXTS for name in own]  # at once
            more: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 24}
            found = await asyncio.gather(*(client.tokens(name, text, **more) for name, text in asked))
            for (name, text), tokens in zip(asked, found, strict=True):
                params = {"temperature": 0.9, "seed": 5, "max_new_tokens": 24}
                assert tokens == plain(own[name], text, **params)
            assert await client.states() == {"nano": "loaded", "tiny": "loaded"}
            card = await client.send("/v1/models/tiny").json()
            assert card["max_model_len"] == own["tiny"].target.context and card["chat"]
            assert await client.tokens(None) == await client.tokens("nano")

    run(main)


def test_steps_of_all_models_and_loading_take_turns(tiny: Path) -> None:
    """So each has the whole machine; and torch's default dtype is not that of a model which is being made."""

    async def main() -> None:
        async with routing(tiny) as client:
            held = list[bool]()
            load_one = client.router.models["tiny"].known.load
            steps = client.router._steps

            def note() -> None:
                held.append(steps._holder is not None)

            def loads(room: dict[str, Any]) -> Any:
                note()
                return load_one(room)

            known = client.router.models["tiny"].known
            client.router.models["tiny"].known = Known(known.name, known.bytes, loads)
            await client.tokens("nano")
            await client.tokens("tiny")
            for name in ("nano", "tiny"):
                engine = client.shelf.engines[name]
                step, add = engine.step, engine.add
                engine.step = lambda step=step: note() or step()  # type: ignore
                engine.add = lambda add=add, **more: note() or add(**more)  # type: ignore
                await client.tokens(name)
            assert len(held) > 5 and all(held)

    run(main)


def test_requests_at_once_share_a_load_and_a_stream_sees_nothing_of_it(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny) as client:
            gate = client.shelf.gates["nano"] = Event()
            streamed = client.complete("nano", stream=True)
            others = [client.complete("nano") for _ in range(3)]
            while client.shelf.loads != ["nano"]:
                await asyncio.sleep(0)
            assert (await client.states())["nano"] == "loading" and streamed.status is None
            assert (await client.send("/health").json()) == {"status": "ok"}
            assert (await client.send("/health/ready").json()) == {"status": "ready"}
            gate.set()
            events = await streamed.events()
            assert streamed.status == 200 and events[-1] == "[DONE]" and "error" not in events[0]
            ids = [token for one in events[:-1] for c in one["choices"] for token in c.get("token_ids") or ()]
            for other in others:
                assert (await other.json())["choices"][0]["token_ids"] == ids
            assert client.shelf.loads == ["nano"]

    run(main)


def test_the_longest_idle_is_unloaded_for_another(tiny: Path) -> None:
    async def main() -> None:
        sizes = {"nano": MIB, "tiny": MIB, "tiny2": MIB}
        async with routing(tiny, sizes, most=2) as client:
            first = await client.tokens("nano")
            await client.tokens("tiny")
            await client.tokens("nano")
            await client.tokens("tiny2")
            assert await client.states() == {"nano": "loaded", "tiny": "unloaded", "tiny2": "loaded"}
            gc.collect()
            assert client.shelf.kept["tiny"]() is None and client.shelf.kept["tiny2"]() is not None
            await client.tokens("tiny")
            assert await client.states() == {"nano": "unloaded", "tiny": "loaded", "tiny2": "loaded"}
            assert await client.tokens("nano") == first
            text = await client.send("/metrics").text()
            assert 'outpace:model_unloads_total{model_name="nano",reason="memory"} 1.0' in text
            assert 'outpace:model_loads_total{model_name="nano"} 2.0' in text

    run(main)


def test_memory_decides_and_what_cannot_fit_is_refused(tiny: Path) -> None:
    async def main() -> None:
        sizes = {"nano": 40 * MIB, "tiny": 50 * MIB, "huge": 101 * MIB}
        room = Room(4, 0.5, 1, lambda device: 100 * MIB)
        async with routing(tiny, sizes, room=room) as client:
            await client.tokens("nano")
            left = 60 * MIB // 4  # each has an equal part of what is left
            assert client.shelf.rooms["nano"] == {"memory": int(left * 0.5), "prefix_cache": MIB // 4}
            await client.tokens("tiny")
            assert await client.states() == {"nano": "unloaded", "tiny": "loaded", "huge": "unloaded"}
            refused = client.complete("huge")
            error = (await refused.json())["error"]
            assert refused.status == 503 and error["code"] == "model_too_large" and "GiB" in error["message"]
            assert refused.headers["x-should-retry"] == "false"
            assert client.shelf.loads == ["nano", "tiny"]
            assert (await client.states())["tiny"] == "loaded"  # nobody left for it

    run(main)


def test_memory_that_others_have_taken_is_refused_and_the_next_request_tries_again(tiny: Path) -> None:
    async def main() -> None:
        free = [100 * MIB]
        async with routing(tiny, {"nano": 40 * MIB}, room=Room(4, 0.5, 1, lambda device: free[0])) as client:
            client.router.room.of(client.router.models["nano"].known.device)
            free[0] = 10 * MIB
            refused = client.complete("nano")
            assert (await refused.json())["error"]["code"] == "no_memory" and refused.status == 503
            free[0] = 90 * MIB
            await client.tokens("nano")

    run(main)


def test_a_busy_model_finishes_first_and_its_new_requests_wait(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny, most=1) as client:
            await client.tokens("nano")
            with client.held("nano") as gate:
                stream = client.send("/v1/chat/completions", {**LONG, "model": "nano", "max_tokens": 40})
                assert await stream.chunk()
                other = client.complete("tiny")
                while (await client.states())["nano"] == "loaded":
                    pass
                assert (await client.states())["nano"] == "unloading"
                late = client.complete("nano")
                gate.set()
                events = await stream.events()
            assert events[-1] == "[DONE]" and not any("error" in one for one in events[:-1])
            assert len((await other.json())["choices"]) == 1
            assert len((await late.json())["choices"]) == 1
            assert client.shelf.loads == ["nano", "tiny", "nano"]

    run(main)


def test_who_waits_too_long_for_memory_is_refused_and_the_busy_model_stays(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny, most=1) as client:
            await client.tokens("nano")
            client.router.limits = Limits(wait=0)
            with client.held("nano") as gate:
                stream = client.send("/v1/chat/completions", {**LONG, "model": "nano", "max_tokens": 40})
                assert await stream.chunk()
                refused = client.complete("tiny")
                assert (await refused.json())["error"]["code"] == "waited_too_long" and refused.status == 503
                assert "retry-after" in refused.headers
                assert (await client.states()) == {"nano": "loaded", "tiny": "unloaded"}
                gate.set()
                assert (await stream.events())[-1] == "[DONE]"
            await client.tokens("nano")
            assert client.shelf.loads == ["nano"]
            await client.router.models["nano"].idle()
            loaded = client.send("/models/load", {"model": "tiny"})  # needs no time, since nobody is busy
            assert await loaded.json() == {"success": True}
            assert client.shelf.loads == ["nano", "tiny"]

    run(main)


def test_a_client_that_leaves_while_it_waits_costs_no_model_its_place(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny, most=1) as client:
            await client.tokens("nano")
            with client.held("nano") as gate:
                stream = client.send("/v1/chat/completions", {**LONG, "model": "nano", "max_tokens": 40})
                assert await stream.chunk()
                other = client.complete("tiny")
                while (await client.states())["nano"] == "loaded":
                    pass
                other.leave()
                await other.task
                gate.set()
                assert (await stream.events())[-1] == "[DONE]"
            assert await client.states() == {"nano": "loaded", "tiny": "unloaded"}
            assert client.shelf.loads == ["nano"] and not client.router._total.all

    run(main)


def test_an_error_of_loading_is_its_requests_and_the_next_one_tries_again(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with routing(tiny) as client:
            await client.tokens("tiny")
            for error, word in (
                (OutpaceError("no weights"), "no weights"),
                (MemoryError("all gone"), "all gone"),
            ):
                client.shelf.fails["nano"] = error
                gate = client.shelf.gates["nano"] = Event()
                refused = [client.complete("nano"), client.send("/models/load", {"model": "nano"})]
                while client.router.models["nano"].uses < 2:
                    await asyncio.sleep(0)
                gate.set()
                for one in refused:
                    found = (await one.json())["error"]
                    assert one.status == 503 and found["code"] == "not_loaded" and word in found["message"]
                    assert one.headers["x-should-retry"] == "false"
                listed = (await client.send("/models").json())["data"]
                status = {one["id"]: one["status"] for one in listed}
                assert status["tiny"] == {"value": "loaded"}
                assert status["nano"]["failed"] and word in status["nano"]["error"]
                assert await client.tokens("tiny")
            await client.tokens("nano")
            assert (await client.states())["nano"] == "loaded"

    with caplog.at_level(logging.CRITICAL):
        run(main)


def test_load_and_unload_on_request(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny, keys=("secret",)) as client:
            key = {"authorization": "Bearer secret"}
            assert (await client.send("/models/load", {"model": "tiny"}).json())["error"][
                "code"
            ] == "invalid_api_key"
            for _ in range(2):
                assert await client.send("/models/load", {"model": "tiny"}, **key).json() == {"success": True}
            assert client.shelf.loads == ["tiny"]
            for _ in range(2):
                assert await client.send("/models/unload", {"model": "tiny"}, **key).json() == {
                    "success": True
                }
            gc.collect()
            assert client.shelf.kept["tiny"]() is None
            for path in ("/models/load", "/models/unload", "/v1/completions"):
                unknown = client.send(
                    path, {"model": "nobody", "prompt": "a"} if "v1" in path else {"model": "nobody"}, **key
                )
                message = (await unknown.json())["error"]["message"]
                assert unknown.status == 404 and "'nano', 'tiny'" in message

    run(main)


def test_an_idle_model_is_unloaded_and_its_metrics_go_on(tiny: Path) -> None:
    async def main() -> None:
        now, waits = [0.0], list[float]()

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            now[0] += seconds

        async with routing(tiny, idle=30.0, clock=lambda: now[0], sleep=sleep) as client:
            for count in (1, 2):
                await client.tokens("tiny")
                while (await client.states())["tiny"] != "unloaded":
                    pass
                text = await client.send("/metrics").text()
                assert f'outpace:generation_tokens_total{{model_name="tiny"}} {8 * count}.0' in text
                assert f'outpace:model_unloads_total{{model_name="tiny",reason="idle"}} {count}.0' in text
                assert 'outpace:model_loaded{model_name="tiny"} 0.0' in text
                assert text.count("# TYPE outpace:generation_tokens_total counter") == 1
            assert waits == [30.0, 30.0]

    run(main)


def test_the_queue_is_one_for_all_models(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny, running=1, waiting=1) as client:
            await client.tokens("nano")
            gate = client.shelf.gates["tiny"] = Event()
            streams = [client.send("/v1/chat/completions", {**LONG, "model": "nano"}) for _ in range(2)]
            while client.router._total.all < 2:  # one of them is decoded
                await asyncio.sleep(0)
            client.router._total.reserve = 0  # what other clients would have
            client.router._total.share = 0
            full = client.complete("tiny")
            assert (await full.json())["error"]["code"] == "overloaded" and full.status == 429
            for stream in streams:
                stream.leave()
                await stream.task
            while client.router._total.all:
                await asyncio.sleep(0)
            waiting = [client.complete("tiny") for _ in range(2)]
            while client.shelf.loads != ["nano", "tiny"]:
                await asyncio.sleep(0)
            full = client.complete("nano")
            assert (await full.json())["error"]["code"] == "overloaded" and full.status == 429
            gate.set()
            for one in waiting:
                await one.json()
            assert not client.router._total.all

    run(main)


def test_an_engine_that_dies_is_loaded_anew(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with routing(tiny) as client:
            expected = await client.tokens("nano")
            await client.tokens("tiny")

            def die() -> Any:
                raise SystemError("gone")

            client.shelf.engines["nano"].step = die  # type: ignore[method-assign]
            failed = client.complete("nano")
            assert (await failed.json())["error"] and failed.status is not None and failed.status >= 500
            while (await client.states())["nano"] != "unloaded":
                pass
            assert (await client.send("/health").json())["status"] == "ok"
            assert await client.tokens("tiny")
            assert await client.tokens("nano") == expected

    with caplog.at_level(logging.CRITICAL):
        run(main)


@pytest.mark.parametrize("seconds", [60, 0])
def test_draining_finishes_what_runs_and_what_waits_for_a_model(tiny: Path, seconds: float) -> None:
    async def main() -> None:
        async with routing(tiny) as client:
            stream = client.send(
                "/v1/chat/completions", {**LONG, "model": "nano", "max_tokens": 200 if seconds else 1900}
            )
            assert await stream.chunk()
            gate = client.shelf.gates["tiny"] = Event()
            waits = client.complete("tiny")
            while client.shelf.loads != ["nano", "tiny"]:
                await asyncio.sleep(0)
            drained = asyncio.ensure_future(client.router.drain(seconds))
            while not client.router.draining:
                await asyncio.sleep(0)
            refused = client.complete("nano")
            assert (await refused.json())["error"]["code"] == "draining" and refused.status == 503
            ready = client.send("/health/ready")
            assert (await ready.json())["error"]["code"] == "draining"
            gate.set()
            events = await stream.events()
            found = await waits.json()
            await drained
            if seconds:
                assert events[-1] == "[DONE]" and found["choices"]
            else:
                assert events[-1]["error"]["code"] == "removed" and found["error"]["code"] == "draining"

    run(main)


def test_prefixes_of_each_model_are_kept_apart(tiny: Path, tmp_path: Path) -> None:
    async def main() -> None:
        texts = {"nano": "The cat. " * 30, "tiny": "The cat. " * 9}  # its tokens are bytes
        for hits in (False, True):
            async with routing(
                tiny, room=Room(2, 0.5, 64, lambda device: None), store=tmp_path / "store"
            ) as client:
                for name in texts:
                    found = await client.complete(name, texts[name]).json()
                    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                    assert (cached > 0) == hits, (name, cached)
        assert sorted(one.name for one in (tmp_path / "store").iterdir()) == ["nano", "tiny"]

    run(main)


def test_one_model_takes_the_same_paths(tiny: Path) -> None:
    from serving import serving

    async def main() -> None:
        async with serving() as client:
            assert await client.send("/models/load", {"model": "nano"}).json() == {"success": True}
            refused = client.send("/models/unload", {"model": "nano"})
            assert "only model" in (await refused.json())["error"]["message"] and refused.status == 400
            listed = await client.get("/models")
            assert listed == await client.get("/v1/models") and "status" not in listed["data"][0]

    run(main)


def test_a_conversation_of_each_api_reaches_its_model(tiny: Path) -> None:
    async def main() -> None:
        async with routing(tiny, most=1) as client:
            for name in ("tiny", "nano"):
                bodies = {
                    "/v1/chat/completions": {"messages": STORY, "max_tokens": 4},
                    "/v1/messages": {"messages": STORY, "max_tokens": 4},
                    "/v1/messages/count_tokens": {"messages": STORY},
                    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
                    "/tokenize": {"prompt": "Hello"},
                }
                for path, body in bodies.items():
                    exchange = client.send(path, {**body, "model": name})
                    found = await exchange.json()
                    assert exchange.status == 200 and found.get("model", name) == name, (path, found)
            assert client.shelf.loads == ["tiny", "nano"]

    run(main)
