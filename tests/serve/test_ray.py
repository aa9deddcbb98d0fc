"""The application for Ray Serve, with a stand-in for Ray; test_ray_cluster.py uses Ray."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from outpace.core import OutpaceError, SamplingParams
from outpace.loading import load
from outpace.serve.admission import Limits
from serving import Exchange, run

TEXT = "Question: What is 2 + 3?"
BODY = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}


class Died(Exception):
    """In place of Ray's error of a dead replica."""


class Router:
    """In place of Ray's router; ``holders`` are the replicas with a model."""

    holders: tuple[str, ...] = ()

    def __init__(self, loads: dict[str, int | None]) -> None:
        self.replica_queue_len_cache = SimpleNamespace(get=lambda one: loads[one.unique_id])

    def rank_replicas_via_multiplex(self, replicas: list[Any], model: str) -> list[list[Any]]:
        has = [one for one in replicas if one.replica_id.unique_id in self.holders]
        return [has, [one for one in replicas if one not in has], []]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``outpace.serve.ray`` over a Ray whose applications are what they were made of."""
    fakes: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.exceptions": {"RayActorError": Died},
        "ray.serve": {
            "Application": object,
            "multiplexed": lambda **options: kept,
            "ingress": lambda app: lambda: app,
            "deployment": lambda made, **options: SimpleNamespace(bind=lambda *args: (made, options, args)),
        },
        "ray.serve.config": {"RequestRouterConfig": lambda **options: options},
        "ray.serve.request_router": {
            "MultiplexMixin": type("MultiplexMixin", (), {}),
            "RequestRouter": Router,
            "PendingRequest": object,
            "RunningReplica": object,
        },
    }
    for name, contents in fakes.items():
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
    vars(sys.modules["ray"])["serve"] = sys.modules["ray.serve"]
    monkeypatch.delitem(sys.modules, "outpace.serve.ray", raising=False)
    yield importlib.import_module("outpace.serve.ray")
    sys.modules.pop("outpace.serve.ray", None)


def kept(load: Any) -> Any:
    """In place of Ray's ``multiplexed``: what was loaded stays."""

    async def model(self: Any, name: str) -> Any:
        vars(self).setdefault("kept", {})
        if name not in self.kept:
            self.kept[name] = await load(self, name)
        return self.kept[name]

    return model


class Messages:
    """A replica's messages as Ray's handle returns them; the replica dies after ``lives`` of them."""

    def __init__(self, messages: AsyncIterator[Any], lives: int) -> None:
        self._messages, self._lives = messages, lives

    def cancel(self) -> None:
        """End the replica's work; here it ends with the task."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._messages:
            if self._lives == 0:
                raise Died
            self._lives -= 1
            yield message


class Handle:
    """Ray's handle of one replica that dies, at each of the first calls, after this many messages."""

    def __init__(self, replica: Any, dies: list[int] | None = None) -> None:
        self.replica, self.dies = replica, dies or []
        self.calls: list[tuple[Any, ...]] = []
        self.answer = SimpleNamespace(remote=self._answer)

    def options(self, **options: Any) -> Handle:
        assert options["stream"] is True
        self.multiplexed = options["multiplexed_model_id"]
        return self

    def _answer(self, *args: Any) -> Messages:
        self.calls.append(args)
        return Messages(self.replica.answer(*args), self.dies.pop(0) if self.dies else -1)


async def replica_of(module: Any, **options: Any) -> tuple[Any, Any, list[str]]:
    """A configuration, a replica of its application, and the names of its models."""
    config = module.Config(drafter="prompt_lookup", prefix_cache=16, memory=0.2, **options)
    _, _, ((made, deployed, args),) = module.build(config)
    assert deployed["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}
    replica = made.__new__(made)
    await replica.__init__(*args)
    return config, replica, list(args[1])


def entry(module: Any, config: Any, handle: Handle, names: list[str]) -> Any:
    return module.Ingress(config, handle, names)


def ask(app: Any, body: Any = None, path: str = "/v1/completions", **headers: str) -> Exchange:
    raw = b"" if body is None else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": str(len(raw)), **headers}
    return Exchange(app, "GET" if body is None else "POST", path, raw, given)


def test_an_entry_passes_a_request_to_a_replica_and_its_answer_back(module: Any) -> None:
    async def main() -> None:
        config, replica, names = await replica_of(module, api_keys="secret, other", name="mine")
        handle = Handle(replica)
        app = entry(module, config, handle, names)
        refused = ask(app, BODY)
        await refused.text()
        assert refused.status == 401 and not handle.calls
        key = {"authorization": "Bearer other"}
        assert (await ask(app, BODY, **key).json())["choices"][0]["text"] == expected
        *chunks, done = await ask(app, BODY | {"stream": True}, **key).events()
        assert done == "[DONE]" and "".join(one["choices"][0]["text"] for one in chunks) == expected
        assert handle.calls[0][0] == handle.calls[1][0] == f'mine\0["{TEXT}"]'
        large = ask(app, BODY | {"prompt": "a" * 5 * 2**20}, **key)
        await large.text()
        assert large.status == 413
        assert (await ask(app, path="/health").json())["status"] == "ok"
        other = ask(app, BODY | {"model": "other"}, **key)
        assert "there is 'mine'" in await other.text() and other.status == 404

        await replica.check_health()
        (hosted,) = replica.kept.values()
        service, go_on = hosted.service, asyncio.Event()
        service.engine.add = lambda prompt: go_on.wait()  # a step that does not end
        await replica.check_health()
        clock = service.admission.clock
        service.admission.clock = lambda: clock() + service.admission.limits.stuck + 1
        with pytest.raises(RuntimeError, match="has not answered"):
            await replica.check_health()
        go_on.set()
        hosted.service.engine._failed = ValueError("planted")
        with pytest.raises(RuntimeError, match="failed"):
            await replica.check_health()

    plain = load()
    found = plain.engine("none").generate([plain.tokens(TEXT)], SamplingParams(max_new_tokens=12))[0]
    expected = found.text
    run(main)


def test_a_request_whose_replica_dies(module: Any) -> None:
    async def main() -> None:
        config, replica, names = await replica_of(module)
        whole = await ask(entry(module, config, Handle(replica), names), BODY).json()
        # Before its answer: another one answers, up to three times.
        handle = Handle(replica, dies=[0, 0])
        answered = await ask(entry(module, config, handle, names), BODY).json()
        assert answered["choices"] == whole["choices"] and len(handle.calls) == 3
        failed = ask(entry(module, config, Handle(replica, dies=[0, 0, 0]), names), BODY)
        assert (await failed.json())["error"]["code"] == "replica_failed" and failed.status == 503
        # In the middle of a stream: an error is its last event, and it is not repeated.
        handle = Handle(replica, dies=[3])
        events = await ask(entry(module, config, handle, names), BODY | {"stream": True}).events()
        assert events[-1]["error"]["code"] == "replica_failed" and "choices" in events[0]
        assert len(handle.calls) == 1
        # In the middle of an answer in one piece: it is cut, so that no client takes it for whole.
        cut = ask(entry(module, config, Handle(replica, dies=[1]), names), BODY)
        with pytest.raises(Died):
            await cut.task

    run(main)


def test_several_models(module: Any) -> None:
    async def main() -> None:
        config, replica, names = await replica_of(module, models='{"a": "smollm2", "b": "smollm2"}')
        handle = Handle(replica)
        app = entry(module, config, handle, names)
        assert [one["id"] for one in (await ask(app, path="/v1/models").json())["data"]] == ["a", "b"]
        assert list(replica.kept) == ["a"] and not handle.calls
        for model, path in (("b", "/v1/completions"), (None, "/v1/completions"), (None, "/v1/models/b")):
            found = ask(app, (BODY | {"model": model}) if path == "/v1/completions" else None, path)
            assert "error" not in await found.json() and found.status == 200
        assert [call[1] for call in handle.calls] == ["b", "a", "b"] and handle.multiplexed == "b"
        (turns,) = {one.service.texts.pool._turns for one in replica.kept.values()}
        assert turns.total.most == 1  # jobs at once, of all models: a replica's own cores may be fewer

        missing = ask(app, BODY | {"model": "c"})
        assert "there is 'a', 'b'" in await missing.text() and missing.status == 404

        # A model is unloaded when the last of its requests has ended.
        left = ask(app, BODY | {"stream": True, "max_tokens": 1900, "ignore_eos": True})
        await left.chunk()
        unloading = asyncio.ensure_future(vars(replica.kept["a"])["__del__"]())
        await asyncio.sleep(0.05)
        assert not unloading.done()
        left.task.cancel()
        await unloading
        await replica.check_health()

    load_model = module.load
    module.load = lambda name, *args, **options: load_model(None, *args, **options)
    run(main)


def test_the_router_prefers_the_replica_of_a_beginning(module: Any) -> None:
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]

    def chosen(key: str, loads: dict[str, int | None], model: str = "") -> list[list[str]]:
        router = module.PrefixRouter(dict.fromkeys("abc") | loads)
        router.initialize_state(enough=4)
        pending = SimpleNamespace(args=[key], metadata=SimpleNamespace(multiplexed_model_id=model))
        found = asyncio.run(router.choose_replicas(replicas, pending))
        return [[one.replica_id.unique_id for one in group] for group in found]

    order = chosen("key", {})
    assert sorted(order) == [["a"], ["b"], ["c"]] and chosen("key", {}) == order
    assert len({str(chosen(f"key {number}", {})[0]) for number in range(30)}) == 3
    assert chosen("key", {order[0][0]: 9}) == [*order[1:], order[0]]
    assert chosen("", {}) == [["a", "b", "c"]]
    module.PrefixRouter.holders = (order[2][0],)
    assert chosen("key", {}, "model") == [order[2], *order[:2]]
    assert asyncio.run(module.PrefixRouter({}).choose_replicas(replicas)) == [replicas]


def test_limits_are_those_of_the_server(module: Any) -> None:
    limits = module.Config().limits
    assert limits == Limits() and module.rooms(0.9, module.Config().prefix_cache)["prefix_cache"] == 0.1
    changed = module.Config(refuse_long_answers=True, lenient=True).limits
    assert changed.lenient and not changed.cut


def test_mistakes_are_refused(module: Any) -> None:
    for options, message in (
        ({"min_replicas": 3, "max_replicas": 2}, "at least min_replicas"),
        ({"models": {"a": "x"}, "name": "y"}, "leave out model and name"),
        ({"loaded": 2}, "name several in models"),
    ):
        with pytest.raises(OutpaceError, match=message):
            module.build(module.Config(**options))
    with pytest.raises(ValidationError, match="replicas"):
        module.Config(replicas=3)
    with pytest.raises(ValidationError, match="models"):
        module.Config(models="{")
