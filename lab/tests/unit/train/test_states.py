"""The target's states kept on disk, and what is computed from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.heads.medusa import MedusaConfig
from outpace.targets.batch import Batch
from outpace.targets.rows import Output
from outpace.targets.stock.causal import CausalTarget
from outpace.testing import ToyTarget
from outpace_lab.train.data import Document, pack
from outpace_lab.train.distil import answer
from outpace_lab.train.feed import Feed
from outpace_lab.train.loop import Training, train
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.reading import read_batch
from outpace_lab.train.states import KeptStates

ROWS = [[Document((5, 6, 7), 1), Document((3, 9), 0)], [Document((8, 2, 4, 1), 2)]]


class Counting(CausalTarget):
    """Records the number of tokens of each sequence of each forward."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.fed: list[list[int]] = []
        super().__init__(*given, **options)

    def forward(self, cache: Any, batch: Batch, *more: Any, **named: Any) -> Output:
        self.fed.append(batch.widths.tolist())
        return super().forward(cache, batch, *more, **named)


def counting(seed: int = 0) -> Counting:
    return Counting(tiny_llama(vocabulary=40, seed=seed))


def test_kept_states_are_those_of_a_forward_and_each_row_is_run_once(tmp_path: Path) -> None:
    target = counting()
    plain = read_batch(target, ROWS, (1,))
    for run in range(2):
        kept = KeptStates(tmp_path, target)
        before = len(target.fed)
        found = read_batch(target, ROWS, (1,), kept)
        assert len(target.fed) - before == (0 if run else len(ROWS))
        assert torch.equal(found.tokens, plain.tokens) and torch.equal(found.counted, plain.counted)
        there = found.documents >= 0
        torch.testing.assert_close(found.hidden[1], plain.hidden[1])
        torch.testing.assert_close(found.logits[there], plain.logits[there])
        assert not found.logits.is_inference() and not found.hidden[1].is_inference()


def test_without_layers_the_target_runs_when_logits_are_asked_for_in_its_own_dtype() -> None:
    target = counting()
    expected = read_batch(target, ROWS, (1,)).logits
    before = len(target.fed)
    found = read_batch(target, ROWS, ())
    assert len(target.fed) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found.logits, expected) and torch.equal(found.logits, expected)
    assert len(target.fed) == before + 1


def test_states_of_another_target_or_of_other_layers_or_texts_are_not_taken(tmp_path: Path) -> None:
    target = counting()
    read_batch(target, ROWS, (1,), KeptStates(tmp_path, target))
    others = [(counting(seed=1), ROWS, (1,)), (target, ROWS, (0,)), (target, [[Document((5, 6, 8))]], (1,))]
    for other, rows, layers in others:
        kept, before = KeptStates(tmp_path, other), len(other.fed)
        found = read_batch(other, rows, layers, kept)
        assert len(other.fed) - before == len(rows)
        there = found.documents >= 0
        torch.testing.assert_close(found.logits[there], read_batch(other, rows, ()).logits[there])


def test_states_kept_for_more_layers_serve_those_who_read_fewer(tmp_path: Path) -> None:
    target = counting()
    kept = KeptStates(tmp_path, target)
    whole = read_batch(target, ROWS, (0, 1), kept)
    before = len(target.fed)
    found = read_batch(target, ROWS, (1,), kept)
    assert len(target.fed) == before
    assert torch.equal(found.hidden[1], whole.hidden[1]) and torch.equal(found.logits, whole.logits)
    assert not torch.equal(whole.hidden[0], whole.hidden[1])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    target = counting()
    read_batch(target, ROWS, (), KeptStates(tmp_path, target))
    for file in tmp_path.iterdir():
        file.write_bytes(b"no states")
    with pytest.raises(OutpaceError, match=r"\.safetensors cannot be read .* delete it"):
        read_batch(target, ROWS, (), KeptStates(tmp_path, target))


def test_training_from_kept_states_gives_the_same_weights(tmp_path: Path) -> None:
    target = counting()
    prompts = [Document((token, token + 3), 2, open=True) for token in range(1, 15)]
    texts = answer(target, prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
    rows, held_out = pack(texts[4:], 16), pack(texts[:4], 16)
    settings = Training(steps=6, rows=2, learning_rate=0.01, evaluate_every=3, objective="forward_kl")

    def weights(name: str, kept: KeptStates | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        made = TrainedMedusa.new(MedusaConfig(heads=2, own_head=True, max_nodes=6), target).double()
        train(made, rows, held_out, settings, tmp_path / name, calibration=held_out, kept=kept)
        return dict(made.state_dict())

    plain = weights("plain", None)
    kept = KeptStates(tmp_path / "states", target)
    first = weights("first", kept)
    before = len(target.fed)
    again = weights("again", kept)
    assert len(target.fed) == before  # nothing is run twice
    for name, weight in plain.items():
        torch.testing.assert_close(first[name], weight)
        assert torch.equal(first[name], again[name])


def test_text_of_the_drafter_itself_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = counting()
    module = TrainedMedusa.new(MedusaConfig(heads=2), target)
    monkeypatch.setattr("outpace_lab.train.feed.own_text", lambda module, rows, seed: rows)
    feed = Feed(module, ROWS, 2, 0, on_policy=1.0, kept=KeptStates(tmp_path, target))
    assert feed.batch(0).sampled and not list(tmp_path.iterdir())
    assert not replace(feed, on_policy=0.0).batch(0).sampled and len(list(tmp_path.iterdir())) == 2


def test_as_one_answer_ends_another_begins() -> None:
    target = counting()
    prompts = [Document((token, token + 3, token + 1), 3, open=True) for token in range(1, 25)]
    params = SamplingParams(max_new_tokens=40)
    answers = answer(target, prompts, params, together=4)
    lengths = sorted(len(document.tokens) - document.prompt for document in answers)
    assert lengths[0] < lengths[-1]
    assert max(map(len, target.fed)) == 4
    in_turns = counting()
    for start in range(0, len(prompts), 4):
        answer(in_turns, prompts[start : start + 4], params, together=4)
    assert len(target.fed) < len(in_turns.fed)  # not only those of one row: chunks depend on measured times


def test_a_target_whose_logits_are_not_its_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="train without keeping states"):
        KeptStates(tmp_path, ToyTarget())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutpaceError, match=r"states cannot be kept in .*file: File exists"):
        KeptStates(tmp_path / "file", counting())
