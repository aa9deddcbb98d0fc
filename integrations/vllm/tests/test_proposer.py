"""The proposer in a small imitation of vLLM's runner: rows that move, prompts read in chunks, drafts cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.copying.suffix import Suffix
from outpace.draws.noise import Key
from outpace.sequence import Sequence as Text
from outpace.testing import ToyTarget
from outpace_lab.datastores.writer import DatastoreWriter
from outpace_vllm import Proposer
from outpace_vllm.proposer import best_path

VOCABULARY = 50
CONTEXT = 160


def config(spec: object, most: int = 8) -> Any:
    """The parts of vLLM's ``VllmConfig`` that are read."""
    return SimpleNamespace(
        additional_config={} if spec is None else {"outpace": spec},
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: VOCABULARY,
            max_model_len=CONTEXT,
            tokenizer="no folder",
            hf_text_config=SimpleNamespace(eos_token_id=None),
        ),
    )


def says(text: Sequence[int]) -> int:
    """The model: its next token depends on the last two and, now and then, on the length of the text."""
    return (7 * text[-1] + 3 * text[-2] + (len(text) % 11 == 0)) % 13


def decoded(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(says(text))
    return text


@dataclass
class Row:
    """A request in the batch; ``read`` counts the tokens of its prompt that were fed."""

    name: int
    text: list[int]
    end: int
    prompt: int
    read: int = 0
    draft: list[int] = field(default_factory=list)


class Runner:
    """vLLM between two calls of a proposer: rows are verified, admitted, ended, moved and interrupted."""

    def __init__(self, proposer: Proposer, seed: int = 0, slots: int = 4) -> None:
        self.proposer, self.random = proposer, random.Random(seed)
        self.ids = np.zeros((slots, CONTEXT), np.int32)
        self.accepted = 0
        self.finished: dict[int, list[int]] = {}
        self.check: Callable[[list[int], list[int]], None] = lambda text, draft: None

    def run(self, prompts: list[list[int]], count: int = 60, moving: bool = True) -> list[list[int]]:
        waiting = [Row(name, list(p), len(p) + count, len(p)) for name, p in enumerate(prompts)]
        rows: list[Row] = []
        while waiting or rows:
            while waiting and len(rows) < len(self.ids):
                rows.append(waiting.pop(0))
            new = [self.step(row) for row in rows]
            self.propose(rows, new)
            self.finished |= {row.name: row.text for row in rows if len(row.text) == row.end}
            rows = [row for row in rows if len(row.text) < row.end]
            if moving:
                self.random.shuffle(rows)
        return [self.finished[name] for name in range(len(prompts))]

    def step(self, row: Row) -> list[int]:
        """Feed a row and return the emitted tokens."""
        if row.read < row.prompt:
            row.read = min(row.prompt, row.read + 16)
            if row.read < row.prompt:
                return []
        new: list[int] = []
        # The scheduler may verify only the beginning of a draft.
        for token in row.draft[: self.random.choice((2, 100))]:
            if says(row.text + new) != token:
                break
            new.append(token)
        self.accepted += len(new)
        new = [*new, says(row.text + new)][: row.end - len(row.text)]
        row.text += new
        return new

    def propose(self, rows: list[Row], new: list[list[int]]) -> None:
        lengths = np.array([len(row.text) for row in rows], np.int32)
        self.ids[:] = -1
        for place, row in enumerate(rows):
            self.ids[place, : len(row.text)] = row.text
        drafts = self.proposer.propose(new, lengths, self.ids, slot_mappings=None)
        for row, emitted, draft in zip(rows, new, drafts, strict=True):
            assert len(draft) <= self.proposer.most
            assert not draft or len(row.text) + len(draft) < CONTEXT
            assert emitted or not draft
            if emitted:
                self.check(row.text, draft)
            row.draft = draft


def prompts(seed: int, count: int = 9) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(13) for _ in range(rng.randrange(3, 60))] for _ in range(count)]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that states of ``suffix`` were started with."""
    lengths: list[int] = []
    plain = Suffix.start

    def start(self: Suffix, sequence: Text, shared: Any) -> Any:
        lengths.append(len(sequence.tokens))
        return plain(self, sequence, shared)

    monkeypatch.setattr(Suffix, "start", start)
    return lengths


@pytest.fixture
def datastore(tmp_path: Path) -> Path:
    file = tmp_path / "texts.datastore"
    with DatastoreWriter(file, VOCABULARY, memory=1 << 20) as writer:
        for prompt in prompts(5):
            writer.add(decoded(prompt, 60))
    return file


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "reference", "retrieval"])
def test_it_drafts_what_is_accepted_and_changes_no_token(name: str, seed: int, datastore: Path) -> None:
    spec = f"retrieval:path={datastore}" if name == "retrieval" else name
    runner = Runner(Proposer(config(spec)), seed)
    assert runner.run(prompts(seed)) == [decoded(prompt, 60) for prompt in prompts(seed)]
    assert runner.accepted > 25


@pytest.mark.parametrize("drafter", [PromptLookup(branches=1), Suffix(branches=1, memory=0)])
def test_a_draft_is_that_of_the_rows_own_text(drafter: PromptLookup | Suffix) -> None:
    """However the row came to where it is: a drafter that starts with the same text drafts the same.

    The length of a draft of ``suffix`` depends on the matches that it has seen go right and wrong as well.
    """
    seen = []

    def check(text: list[int], draft: list[int]) -> None:
        sequence = Text(text[:1], SamplingParams(), Key(0), CONTEXT - 1, output=text[1:])
        sequence.budget = 8
        state: Any = drafter.start(sequence, drafter.prepare(ToyTarget()))
        expected = list(drafter.draft(state).tokens)[: max(0, min(8, CONTEXT - len(text) - 1))]
        if drafter.name == "suffix":
            assert bool(draft) == bool(expected)
            expected, draft = expected[: len(draft)], draft[: len(expected)]
        assert draft == expected
        seen.append(len(draft))

    runner = Runner(
        Proposer(config("prompt_lookup" if drafter.name == "prompt_lookup" else "suffix:memory=0"))
    )
    runner.check = check
    runner.run(prompts(1))
    assert max(seen) == 8


def test_a_request_keeps_its_state_wherever_its_row_goes(starts: list[int]) -> None:
    texts = prompts(2)
    Runner(Proposer(config("suffix"))).run(texts)
    assert sorted(starts) == sorted(len(text) + 1 for text in texts)


def test_requests_with_the_same_text_have_a_state_each(starts: list[int]) -> None:
    text = prompts(3)[0]
    assert Runner(Proposer(config("suffix"))).run([text] * 4) == [decoded(text, 60)] * 4
    assert len(starts) == 4


def test_a_prompt_that_is_a_running_text_takes_no_state(starts: list[int]) -> None:
    proposer = Proposer(config("suffix"))
    ids = np.zeros((2, CONTEXT), np.int32)
    ids[:, :5] = [1, 2, 3, 1, 2]
    proposer.propose([[2]], np.array([5], np.int32), ids)
    assert starts == [5]
    # The first row has the same text, and its prompt is still read; then the second goes on.
    ids[1, 5] = 3
    proposer.propose([[], [3]], np.array([5, 6], np.int32), ids)
    assert starts == [5]


def test_a_request_that_comes_back_starts_again(starts: list[int]) -> None:
    proposer = Proposer(config("suffix:memory=0"))
    ids = np.zeros((1, CONTEXT), np.int32)
    ids[0, :6] = [1, 2, 3, 1, 2, 3]
    proposer.propose([[2]], np.array([5], np.int32), ids)
    proposer.propose([], np.array([], np.int32), ids)
    assert proposer.propose([[3]], np.array([6], np.int32), ids)[0][:3] == [1, 2, 3]
    assert starts == [5, 6]


def test_suffix_remembers_requests_that_ended() -> None:
    proposer = Proposer(config("suffix"))
    ids = np.zeros((1, CONTEXT), np.int32)
    ids[0, :10] = [9, 8, 20, 21, 22, 23, 24, 25, 26, 27]
    for length in range(3, 11):
        assert proposer.propose([[ids[0, length - 1]]], np.array([length], np.int32), ids) == [[]]
    ids[0, :4] = [5, 20, 21, 22]
    assert proposer.propose([[22]], np.array([4], np.int32), ids)[0][:3] == [23, 24, 25]


def test_reference_learns_how_much_was_accepted() -> None:
    """Drafts grow past their first length after copies that were accepted completely, or shrink."""
    proposer = Proposer(config("reference:num_speculative_tokens=4", most=32))
    text = [*range(40), 0, 1]
    ids = np.zeros((1, CONTEXT), np.int32)
    lengths = []
    new = [1]
    for _ in range(3):
        ids[0, : len(text)] = text
        (draft,) = proposer.propose([new], np.array([len(text)], np.int32), ids)
        lengths.append(len(draft))
        new = [*draft, draft[-1] + 1]
        text += new
    assert lengths == [4, 8, 16]

    proposer = Proposer(config("reference:num_speculative_tokens=4", most=32))
    ids[0, :45] = [*range(40), 0, 1, 2, 99, 98]
    assert len(proposer.propose([[1]], np.array([42], np.int32), ids)[0]) == 4
    assert len(proposer.propose([[2, 99]], np.array([44], np.int32), ids)[0]) == 2


def test_nothing_is_drafted_past_the_context() -> None:
    proposer = Proposer(config("prompt_lookup"))
    ids = np.ones((1, CONTEXT), np.int32)
    counts = [
        len(proposer.propose([[1]], np.array([length], np.int32), ids)[0])
        for length in range(CONTEXT - 4, CONTEXT + 1)
    ]
    assert counts == [3, 2, 1, 0, 0]


def test_the_path_of_a_tree_is_its_first_children() -> None:
    assert best_path(Draft([1, 2, 3, 4, 5], [-1, -1, 0, 0, 2])) == [1, 3, 5]
    assert best_path(Draft()) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "name a drafter"),
        (5, "name a drafter"),
        ("sufix", "Did you mean 'suffix'"),
        ("token_recycling", "token_recycling cannot draft in vLLM: it reads the target's most probable"),
        ("lookahead", "lookahead cannot draft in vLLM: it needs"),
        ("suffix:branches=4", "leave out branches"),
        ("reference:prompt=false", "no references"),
    ],
)
def test_what_cannot_draft_is_refused(spec: object, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        Proposer(config(spec))


def test_a_datastore_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.datastore"
    with DatastoreWriter(file, 5000, memory=1 << 20) as writer:
        writer.add([1, 2, 3, 4999])
    with pytest.raises(OutpaceError, match="vocabulary of 5000"):
        Proposer(config(f"retrieval:path={file}"))
