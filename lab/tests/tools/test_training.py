"""The training of the embedded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train_nano
from card_nano import prompt_of, repeated_share
from corpus import Corpus
from muon import Muon, orthogonalised
from outpace import nano_draft_path, nano_path
from train_nano import Batches, Clock, Record, Stream, check_same_data, encode, learning_rate, train_tokenizer

CORPUS = Corpus(train={"code": ["def f(x):\n    return x + 12\n\n\ndef g(x):\n    return f(x)\n"] * 50})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(CORPUS, seed=0)


def test_the_tokenizer_loses_nothing(tokenizer: Any) -> None:
    text = "def f(x):\n\n        return 'naïve ' + 123  \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("text", ["x\n    y", "x\n\n    y", "x\n"])
def test_a_newline_is_a_token_of_its_own(tokenizer: Any, text: str) -> None:
    """A newline is a separate token, so that a prompt may end with one whatever follows."""
    tokens = [tokenizer.decode([token]) for token in tokenizer(text).input_ids]
    assert all(token == "\n" for token in tokens if "\n" in token)
    assert "\n" in tokens


def test_digits_are_single_and_texts_end(tokenizer: Any) -> None:
    (tokens,) = encode(tokenizer, ["123"])
    assert len(tokens) == 4 and tokens[-1] == train_nano.END_ID


def test_a_stream_gives_every_token_once_an_epoch() -> None:
    documents = [np.arange(10 * start, 10 * start + 7, dtype=np.uint16) for start in range(5)]
    stream = Stream(documents, seed=1)
    first, second = stream.take(35), stream.take(35)
    assert sorted(first.tolist()) == sorted(np.concatenate(documents).tolist())
    assert sorted(second.tolist()) == sorted(first.tolist())
    assert second.tolist() != first.tolist()


def test_batches_go_on_where_their_state_was_taken() -> None:
    encoded = {kind: [np.arange(i, i + 50, dtype=np.uint16) for i in range(9)] for kind in train_nano.MIX}
    batches = Batches.of(encoded, seed=3)
    batches.next(1024, 64)
    other = Batches.of(encoded, seed=3)
    other.restore(batches.state())
    assert torch.equal(batches.next(1024, 64), other.next(1024, 64))


def test_a_checkpoint_of_other_documents_is_refused() -> None:
    """Other documents are refused: another tokenizer would give every token another meaning."""
    earlier = Record(packages=[{"name": "rich", "version": "14.0"}], documents={"code": 3})
    check_same_data(earlier, Record(packages=earlier.packages, documents={"code": 3}))
    with pytest.raises(SystemExit, match=r"gone: \[\], new: \['typer 0.16'\]"):
        more = [*earlier.packages, {"name": "typer", "version": "0.16"}]
        check_same_data(earlier, Record(packages=more, documents={"code": 4}))
    with pytest.raises(SystemExit, match="other documents"):
        check_same_data(earlier, Record(packages=earlier.packages, documents={"code": 4}))


def test_the_clock_leaves_a_pause_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(train_nano.time, "monotonic", lambda: now)
    clock = Clock(minutes=1.0, _last=now)
    for gap in (15.0, 500.0, 15.0):
        now += gap
        clock.tick()
    assert clock.active == 30.0
    assert clock.progress == 0.5


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(progress / 100) for progress in range(101)]
    assert rates[0] == 0.0 and max(rates) == pytest.approx(1.0) and rates[-1] == 0.0
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


@pytest.mark.parametrize("shape", [(24, 24), (64, 16), (16, 64)])
def test_muon_evens_the_singular_values_out(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before, after = torch.linalg.svdvals(matrix), torch.linalg.svdvals(orthogonalised(matrix))
    assert before.max() / before.min() > 1.5
    assert after.min() > 0.5 and after.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.dist(orthogonalised(matrix), u @ v) < 0.4 * min(shape) ** 0.5


def test_muon_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(8, 8, generator=generator)
    found = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([found], lr=0.05, weight_decay=0.0)
    for _ in range(200):
        optimizer.zero_grad()
        (found - wanted).square().sum().backward()
        optimizer.step()
    assert torch.dist(found, wanted) < 0.2 * wanted.norm()


def test_repeated_four_grams() -> None:
    assert repeated_share([1, 2, 3, 4, 5, 6]) == 0.0
    assert repeated_share([1, 2, 3, 4] * 3) == pytest.approx(5 / 9)
    assert repeated_share([1, 2]) == 0.0


def test_a_held_out_text_is_cut_into_a_prompt_and_its_answer() -> None:
    assert prompt_of("retrieval", "Document: a\nQuestion: b\nAnswer: a") == (
        "Document: a\nQuestion: b\nAnswer:",
        " a",
    )
    assert prompt_of("dialogue", "User: Hi\nAssistant: Hello!<|endoftext|>User: Bye\nAssistant: Bye!") == (
        "User: Hi\nAssistant:",
        " Hello!",
    )


def test_the_embedded_models_are_small_enough() -> None:
    sizes = [(Path(path) / "model.safetensors").stat().st_size for path in (nano_path(), nano_draft_path())]
    assert sum(sizes) <= 16e6
    assert sizes[1] <= sizes[0] / 6
