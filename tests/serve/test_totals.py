"""Totals of a server: each client has a share of each, whatever another holds."""

from __future__ import annotations

import ast
import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.serve.admission import Admission, Limits
from outpace.serve.errors import Refused
from outpace.serve.metrics import Metrics
from outpace.serve.totals import CLIENT, Total, Turns, network
from serving import run, serving

SERVE = Path(outpace.__file__).parent / "serve"
# What could be a total, and is none: a thread's work is taken by turns, or short.
KNOWN = {
    "routes.py: ThreadPoolExecutor": "readers",
    "grammar.py: ThreadPoolExecutor": "_here",
    "images.py: ThreadPoolExecutor": "_room",
    "texts.py: ThreadPoolExecutor": "a tokenizer that cannot be sent to a process; documented",
    "admission.py: deque": "ends of choices",
    "totals.py: deque": "the queues of Turns, of which each client has its own",
    "hosted.py: Queue": "of one request",
    "router.py: Lock": "loads of models, one for all requests that wait for it, which have their places",
}


def made(tree: ast.AST) -> set[str]:
    """The names of what might hold something for all clients that a module makes."""
    names = {"Semaphore", "BoundedSemaphore", "Queue", "deque", "ThreadPoolExecutor", "ProcessPoolExecutor"}
    names |= {"CapacityLimiter", "Lock"}
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = {getattr(one, "attr", getattr(one, "id", "")) for one in calls}
    return names & found


def test_whatever_holds_something_for_all_is_a_total() -> None:
    found = {
        f"{path.name}: {name}"
        for path in sorted(SERVE.glob("*.py"))
        for name in made(ast.parse(path.read_text("utf-8")))
        if path.name not in ("ray.py", "replicas.py")
    }
    assert found == set(KNOWN)
    assert made(ast.parse("a = asyncio.Semaphore(2)")) == {"Semaphore"}


def totals() -> dict[int, Total]:
    """All totals that there are."""
    return {id(one): one for one in gc.get_objects() if isinstance(one, Total)}


def test_each_total_of_a_server_leaves_another_client_its_share() -> None:
    async def main() -> None:
        before = totals()
        async with serving():
            found = [one for key, one in totals().items() if before.get(key) is not one]
            # choices, bodies, those who read them, workers, schemas and images here; connections have a test
            assert len(found) == 6
            for total in found:
                assert total.take("a", total.most) and not total.take("a", total.share)
                assert total.take("b", total.share) and not total.take("b", 1)
                total.give("b", total.share)
                total.give("a", total.held["a"])
                assert total.all == 0 and not total.held

    run(main)


def test_a_client_with_little_has_room_in_a_full_server() -> None:
    metrics = Metrics("", lambda: 0, lambda: 0, lambda: 0.0)
    admission = Admission(Limits(running=16, waiting=16), metrics, lambda: 0.0)

    def admitted(client: str, choices: int) -> Any:
        CLIENT.set(client)
        return admission.admit(choices)

    async def main() -> None:
        first = admitted("a", 32)
        with pytest.raises(Refused, match="full: 32 of 32"):
            admitted("a", 1)
        second = admitted("b", 2)
        with pytest.raises(Refused):
            admitted("b", 1)
        first.close()
        admitted("b", 30).close()
        second.close()
        assert admission.empty.is_set()

    run(main)


async def order(asked: dict[str, int], most: int) -> list[str]:
    """The order in which clients have a place, of which the first holds all until the others wait."""
    turns, found = Turns(most), list[str]()
    begin = asyncio.Event()

    async def work(client: str) -> None:
        async with turns.place(client):
            found.append(client)
            await begin.wait()

    tasks = []
    for client, count in asked.items():
        tasks += [asyncio.ensure_future(work(client)) for _ in range(count)]
    for _ in range(5):
        await asyncio.sleep(0)
    begin.set()
    await asyncio.gather(*tasks)
    assert turns.total.all == 0 and not turns._queues
    return found


def test_places_are_taken_in_turns() -> None:
    async def main() -> None:
        assert await order({"a": 3}, 1) == ["a"] * 3
        found = await order({"a": 9, "b": 3, "c": 3}, 2)
        assert found[:3] == ["a", "a", "b"]  # one that has none has a place at once
        assert sorted(found[3:9]) == ["a", "a", "b", "b", "c", "c"]
        found = await order(dict.fromkeys("abcd", 3), 1)
        assert sorted(found[2:6]) == ["a", "b", "c", "d"]

    run(main)


def test_a_client_that_leaves_the_queue_keeps_no_place() -> None:
    async def main() -> None:
        turns, begin = Turns(1), asyncio.Event()

        async def work() -> None:
            async with turns.place("a"):
                await begin.wait()

        first, second, third = (asyncio.ensure_future(work()) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        begin.set()
        await asyncio.gather(first, third)
        begin.clear()
        first, second = (asyncio.ensure_future(work()) for _ in range(2))
        await asyncio.sleep(0)
        begin.set()
        await first
        second.cancel()  # as it has its turn
        await asyncio.gather(second, return_exceptions=True)
        assert turns.total.all == 0 and not turns._queues

    run(main)


@pytest.mark.parametrize(
    ("address", "found"),
    [("10.0.0.7", "10.0.0.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("", ""), ("testclient",) * 2],
)
def test_a_network_is_one_client(address: str, found: str) -> None:
    assert network(address) == found
