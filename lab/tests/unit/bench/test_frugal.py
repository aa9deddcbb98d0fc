"""Candidates that hold memory only while they decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.bench.items import Item, Suite
from outpace.bench.ours import Ours
from outpace.bench.run import Settings, measure
from outpace.bench.runs import PromptBatch
from outpace.cache.lanes import Lane
from outpace.loading import Loaded
from outpace_lab.bench.tuning import Frugal

SPECS = [
    "none",
    "suffix:num_speculative_tokens=8",
    "lookahead:window=3,ngram=3,guesses=3",
    "token_recycling:max_nodes=8",
]


def request(model: Loaded, texts: tuple[str, ...], seed: int) -> PromptBatch:
    prompts = [model.tokens(text) for text in texts]
    return PromptBatch(prompts, [[]] * len(texts), 24, False, 1.0, [seed + i for i in range(len(texts))])


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_said_is_the_same_and_drafters_remember(model: Loaded, spec: str) -> None:
    """The second run drafts from the first one's outputs, where the drafter remembers any."""
    usual = Ours(model.target, spec, adaptive=False, temperature=1.0)
    frugal = Frugal(model, spec, 1.0, adaptive=False)
    plain = Ours(model.target, "none", temperature=1.0)
    for seed in (3, 3, 5):
        asked = request(model, ("abcabcabc", "xyzxyz"), seed)
        told, expected = frugal.run(asked), usual.run(asked)
        assert told.outputs == expected.outputs == plain.run(asked).outputs
        assert (told.drafted, told.accepted) == (expected.drafted, expected.accepted)
    for method in (usual, frugal):
        method.begin()
    asked = request(model, ("abcabcabc",), 3)
    assert (again := frugal.run(asked)).outputs == plain.run(asked).outputs
    assert again.accepted == usual.run(asked).accepted


def test_room_is_made_before_the_seconds_begin_and_given_back(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Frugal(model, "suffix")
    assert method._engine.room == (1, 1)
    rooms = []
    grown: list[Any] = []
    right, resize = Ours.run, Lane.resize

    def spied(self: Ours, asked: PromptBatch) -> Any:
        rooms.append(self._engine.room)
        return right(self, asked)

    def growing(self: Lane, places: int, room: int) -> None:
        if (places, room) != (self.places, self.room):
            grown.append((places, room))
        resize(self, places, room)

    monkeypatch.setattr(Ours, "run", spied)
    monkeypatch.setattr(Lane, "resize", growing)
    asked = request(model, ("abc", "xyz", "def"), 0)
    for _ in range(2):
        method.run(asked)
        assert method._engine.room == (1, 1)
        method.begin()
        assert method._engine.room == (1, 1)
    slots, length = rooms[1]
    assert slots >= 3 and length > 24 and not grown


def test_an_error_gives_the_room_back_too(model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Ours, asked: PromptBatch) -> Any:
        raise ValueError("no")

    method = Frugal(model, "none")
    monkeypatch.setattr(Ours, "run", fail)
    with pytest.raises(ValueError, match="no"):
        method.run(request(model, ("abc",), 0))
    assert method._engine.room == (1, 1)


def test_one_candidate_at_a_time_has_a_cache(model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [Frugal(model, spec) for spec in SPECS]
    suite = Suite("some", tuple(Item(str(i), "all", (f"say {i}",)) for i in range(4)), "here")
    most: list[int] = []
    right = Ours.run

    def spied(self: Ours, asked: PromptBatch) -> Any:
        most.append(sum(one._engine.room != (1, 1) for one in methods))
        return right(self, asked)

    monkeypatch.setattr(Ours, "run", spied)
    measure(model, methods, suite, 2, Settings(max_new_tokens=8))
    assert most == [1] * len(SPECS) * 3  # a warm-up, and two groups of prompts


def test_what_is_on_a_gpu_is_waited_for(model: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are written asynchronously, and would count as the first step's seconds."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(str(device)))
    monkeypatch.setattr(Ours, "run", lambda self, asked: order.append("ran"))
    Frugal(replace(model, device="cuda:1"), "none").run(request(model, ("abc",), 0))
    assert order == ["cuda:1", "ran"]
