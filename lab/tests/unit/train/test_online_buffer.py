"""The buffer of online learning: the target's own text, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core import Draft, SamplingParams
from outpace.drafters import load_drafter
from outpace.draws.logits import Logits
from outpace.engine.engine import Engine
from outpace.sequence import Sequence, Step
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget
from outpace_lab.train.buffer import Buffer, Record, Recording, batch_of

TARGET = ToyTarget()
LAYERS = (1, -1)
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 9)] * 3]


class Watch:
    """An observer that records, and keeps every step."""

    hidden_layers = LAYERS
    timed = False

    def __init__(self, length: int, everywhere: bool) -> None:
        self._options = (length, everywhere)
        self._open: dict[Sequence, Recording] = {}
        self.records: dict[Sequence, list[Record]] = {}
        self.steps: dict[Sequence, list[Step]] = {}

    def joined(self, sequence: Sequence, hidden: Mapping[int, Tensor]) -> None:
        self._open[sequence] = Recording(sequence.tokens, hidden, *self._options)
        self.records[sequence], self.steps[sequence] = [], []

    def stepped(self, steps: Seq[Step]) -> None:
        for step in steps:
            self.steps[step.sequence].append(step)
            full = self._open[step.sequence].add(step, LAYERS)
            if full is not None:
                self.records[step.sequence].append(full)

    def left(self, sequence: Sequence) -> None:
        self.records[sequence].append(self._open.pop(sequence).end())


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("length", [12, 256])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=40, ignore_eos=True),
        SamplingParams(max_new_tokens=40, temperature=0.9, seed=3, ignore_eos=True),
    ],
)
@pytest.mark.parametrize("drafter", ["prompt_lookup:branches=2", "parallel_tokens", "none"])
def test_what_is_kept_is_what_the_target_says(
    drafter: str, params: SamplingParams, length: int, everywhere: bool
) -> None:
    watch = Watch(length, everywhere)
    found = Engine(TARGET, load_drafter(drafter), observer=watch, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(TARGET).generate(PROMPTS, params)]
    for sequence, records in watch.records.items():
        whole = plain(sequence.tokens)
        end = sequence.prompt_length
        expected = places(watch.steps[sequence], sequence.prompt_length, everywhere)
        seen: list[int] = []
        for record in records:
            start = end - record.context
            assert list(record.tokens) == sequence.tokens[start : start + len(record.tokens)]
            assert record.context <= length // 2 and len(record.tokens) < length + 12
            end = start + len(record.tokens)
            seen += [start + place for place in record.places]
            if record.places:
                assert torch.allclose(record.logits, whole.logits[[start + p for p in record.places]])
            for layer in LAYERS:
                rows = record.hidden[layer]
                assert len(rows) >= len(record.tokens) - 1
                assert torch.allclose(rows, whole.hidden[layer][start : start + len(rows)])
        # Each token of the output is learnt from once, and where the draft had failed.
        assert end == len(sequence.tokens) and seen == expected
        assert len(records) > 1 or length > 12


class Whole:
    def __init__(self, logits: Tensor, hidden: Mapping[int, Tensor]) -> None:
        self.logits, self.hidden = logits, hidden


def plain(tokens: Seq[int]) -> Whole:
    cache = TARGET.new_cache()
    slot = cache.allocate()
    output = TARGET.forward(cache, Batch.of({slot: tokens}), LAYERS)
    return Whole(output.logits_of(slot), output.hidden[slot])


def places(steps: Seq[Step], prompt: int, everywhere: bool) -> list[int]:
    """The places at which logits should be kept: counted again, from the trees."""
    found: list[int] = []
    root = prompt - 1
    for step in steps:
        for ahead in range(len(step.tokens)):
            node = step.path[ahead - 1] if ahead else -1
            accepted = ahead < len(step.path)
            guesses = len(step.draft) - step.draft.riders
            drafted = [n for n in range(guesses) if step.draft.parents[n] == node]
            failed = not accepted and (bool(drafted) or not guesses)
            if everywhere or failed:
                found.append(root + ahead)
        root += len(step.tokens)
    return found


@pytest.mark.parametrize(
    ("draft", "path", "tokens", "kept"),
    [
        (Draft([4, 5], [-1, 0]), [], [9], [1]),
        (Draft([4, 5], [-1, 0]), [0], [4, 9], [2]),
        (Draft([4, 5], [-1, 0]), [0, 1], [4, 5, 9], []),  # nothing was drafted after them
        (Draft([4, 5], [-1, 0]), [0], [4], []),  # the text ended there
        (Draft(), [], [9], [1]),
        (Draft([4, 40], [-1, 0], riders=1), [0], [4, 9], []),
        (Draft([40], [-1], riders=1), [], [9], [1]),  # a draft of riders alone guesses nothing
    ],
)
def test_rejected_places(draft: Draft, path: list[int], tokens: list[int], kept: list[int]) -> None:
    recording = Recording([1, 2], {}, 20, everywhere=False)
    rows = torch.arange(3.0)[:, None].expand(3, 8)
    recording.add(step(draft, path, tokens, rows), ())
    record = recording.end()
    assert list(record.places) == kept and record.tokens == (1, 2, *tokens) and record.context == 2
    # The row is that of the last node of the path.
    assert record.logits[:, :1].flatten().tolist() == [path[-1] + 1.0 if path else 0.0] * len(kept)


def step(draft: Draft, path: list[int], tokens: list[int], rows: Tensor) -> Step:
    sequence: Any = None
    return Step(draft, range(len(draft)), path, tokens, Logits(rows), 0, sequence, {})


def record(length: int, context: int = 1, places: Seq[int] = (1,), first: int = 0) -> Record:
    logits = torch.arange(len(places) * 5.0).view(-1, 5) + first
    hidden = {-1: torch.ones(length - 1, 2) * torch.arange(1, length)[:, None]}
    return Record(tuple(range(first, first + length)), context, tuple(places), logits, hidden)


def test_the_oldest_goes() -> None:
    buffer = Buffer(tokens=20, held_back=3, measured=5)
    every = [record(6, first=10 * number) for number in range(1, 10)]
    for number, one in enumerate(every, start=1):
        buffer.add(one)
        assert buffer.tokens == 6 * min(number, 3) <= 20
        kept = every[max(0, number - 3) : number]
        assert buffer.learnt == [other for other in kept if (every.index(other) + 1) % 3]
        assert buffer.held_back == [other for other in kept if not (every.index(other) + 1) % 3]
    buffer.add(record(4, context=4))  # nothing of the target's
    buffer.add(record(2, places=()))  # nothing to learn
    assert buffer.tokens == 20 and len(buffer.learnt) == 2


def test_the_newest_are_measured_on_where_they_are_enough() -> None:
    buffer = Buffer(tokens=1000, held_back=2, measured=12)
    every = [record(6, first=10 * number) for number in range(10)]
    for number, one in enumerate(every, start=1):
        buffer.add(one)
        # Five tokens of each are the target's own.
        assert buffer.held_back == (every[1:number:2][:-4:-1] if number > 5 else [])
    assert buffer.learnt == every[::2] and len(buffer.held_back) == 3


def test_records_as_a_batch() -> None:
    records = [record(4, 2, (1, 2)), record(3, 1, (0,), first=50)]
    batch = batch_of(records, (-1,), 5, torch.device("cpu"), learn=True)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [50, 51, 52, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.documents.tolist() == [[0, 0, 0, 0], [0, 0, 0, -1]]
    # The token after a place whose logits are known.
    assert batch.counted.int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch.logits[0, 1:3].tolist() == records[0].logits.tolist()
    assert batch.logits[1, 0].tolist() == records[1].logits[0].tolist()
    assert not batch.logits[0, 0].any() and not batch.logits[1, 1:].any()
    assert batch.hidden[-1][..., 0].tolist() == [[1, 2, 3, 0], [1, 2, 0, 0]]
    measured = batch_of(records, (-1,), 5, torch.device("cpu"), learn=False)
    assert measured.counted.int().tolist() == [[0, 0, 1, 1], [0, 1, 1, 0]]
    assert measured.logits.shape == batch.logits.shape and not measured.logits.any()
