"""The choice of a replica for a request."""

from __future__ import annotations

import json

import pytest

from outpace.serve.replicas import crowded, preferred, ranks, read

REPLICAS = ["a", "b", "c", "d"]
KEYS = [f"key {number}" for number in range(400)]


def test_a_replica_that_leaves_moves_its_own_keys_alone() -> None:
    before = {key: preferred(key, REPLICAS) for key in KEYS}
    for key in KEYS:
        assert preferred(key, [name for name in REPLICAS if name != "b"])[0] == next(
            name for name in before[key] if name != "b"
        )
    firsts = [order[0] for order in before.values()]
    assert all(60 < firsts.count(name) < 140 for name in REPLICAS)


def test_a_crowded_replica_gets_no_more_while_others_have_room() -> None:
    first, second, *_ = preferred("key", REPLICAS)
    loads = dict.fromkeys(REPLICAS, 1)
    assert ranks("key", [REPLICAS], loads | {first: 3}, 4)[0] == first
    assert ranks("key", [REPLICAS], loads | {first: 4}, 4)[:2] == [second, preferred("key", REPLICAS)[2]]
    assert ranks("key", [REPLICAS], loads | {first: 4}, 4)[-1] == first
    assert not crowded(dict.fromkeys(REPLICAS, 9), 4) and not crowded({"a": 9}, 4)


def test_replicas_with_the_model_come_first() -> None:
    order = ranks("key", [["c"], ["a", "b", "d"]], {}, 4)
    assert order[0] == "c" and sorted(order) == REPLICAS
    assert ranks("key", [["c"], ["a", "b", "d"]], {"c": 9, "a": 0, "b": 0, "d": 0}, 4)[-1] == "c"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"prompt": "a" * 120 + "b"}, {"prompt": "a" * 120 + "c"}, True),
        ({"prompt": "a" * 8 + "b"}, {"prompt": "a" * 8 + "c"}, False),
        ({"prompt": [7] * 60 + [1]}, {"prompt": [7] * 60 + [2]}, True),
        ({"prompt": [1, 7]}, {"prompt": [2, 7]}, False),
        ({"messages": [{"role": "user", "content": "Hi"}], "temperature": 1},
         {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, True),
        ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}]},
         {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Ho"}]}, False),
        ({"system": "x", "messages": []}, {"system": "y", "messages": []}, False),
    ],
)  # fmt: skip
def test_what_begins_alike(one: object, other: object, alike: bool) -> None:
    found = [read(json.dumps(body).encode(), 96)[1] for body in (one, other)]
    assert all(found) and (found[0] == found[1]) == alike


def test_what_no_replica_could_read_has_no_beginning() -> None:
    assert read(b"{", 64) == read(b"[1]", 64) == read(b"", 64) == (None, "")
    assert read(b'{"model": 5, "prompt": "x"}', 64)[0] is None
    assert read(b'{"model": "m", "prompt": "x"}', 0) == ("m", "")
