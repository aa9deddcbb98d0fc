"""Boosting: a drafter that learns what others get wrong, and the acceptance of all together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.combined.combined import Combined
from outpace.drafters.heads.medusa import MedusaConfig
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import Target
from outpace_lab.train import data
from outpace_lab.train.boosting import accepted_together, fingerprint, load_earlier, still_wrong
from outpace_lab.train.data import Document
from outpace_lab.train.distil import answer
from outpace_lab.train.feed import Feed
from outpace_lab.train.loop import Training, train
from outpace_lab.train.metric import replay
from outpace_lab.train.modules.draft_model import DraftConfig, TrainedDraft
from outpace_lab.train.modules.heads import TrainedMedusa
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained

TARGET = Target(tiny_llama(vocabulary=41, context=64))
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
PROMPTS = [Document((token, token + 3, token + 1), 3, open=True) for token in range(1, 30)]
SETTINGS = Training(steps=40, rows=2, learning_rate=0.01, evaluate_every=40)
LENGTH = 3


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return answer(TARGET, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def first(documents: list[Document], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft model trained on half of the texts."""
    folder = tmp_path_factory.mktemp("boosting") / "first"
    rows = data.pack(documents[:14], 40)
    train(draft(0), rows, rows, SETTINGS, folder)
    return folder


def draft(seed: int) -> TrainedDraft:
    torch.manual_seed(seed)
    return TrainedDraft.new(DraftConfig(hidden_size=32, depth=1, num_speculative_tokens=LENGTH), TARGET)


def loaded(folder: Path) -> Trained:
    module = load_earlier(folder, TARGET)
    module.config = replace(module.config, num_speculative_tokens=LENGTH)
    return module


def test_places_that_an_earlier_drafter_gets_right_do_not_count(
    documents: list[Document], first: Path
) -> None:
    batch = read_batch(TARGET, [documents[5:8], documents[20:22]], ())
    earlier = loaded(first)
    assert isinstance(earlier, TrainedDraft)
    found = still_wrong(batch, [earlier])
    right = 0
    for row, documents_of_row in enumerate((documents[5:8], documents[20:22])):
        place = 0
        for document in documents_of_row:
            logits = earlier.model(input_ids=torch.tensor([document.tokens])).logits[0]
            guesses = [None, *logits.argmax(dim=-1).tolist()]
            for at, token in enumerate(document.tokens):
                counts = at >= document.prompt and guesses[at] != token
                assert bool(found.counted[row, place]) == counts
                right += at >= document.prompt and not counts
                place += 1
    assert right > 10 and int(found.counted.sum()) > 10
    other = draft(5).double()
    both = still_wrong(batch, [earlier, other])
    assert torch.equal(both.counted, found.counted & still_wrong(batch, [other]).counted)
    assert torch.equal(found.tokens, batch.tokens)


def test_training_is_fed_what_is_still_wrong(documents: list[Document], first: Path) -> None:
    rows = [documents[5:7], documents[20:22]]
    earlier = loaded(first)
    plain = Feed(draft(1), rows, together=2, seed=0).batch(0)
    fed = Feed(draft(1), rows, together=2, seed=0, earlier=[earlier])
    assert torch.equal(fed.batch(0).counted, still_wrong(plain, [earlier]).counted)
    assert fed.batch(0).counted.sum() < plain.counted.sum()
    # What is measured on is whole.
    assert next(iter(fed.each(rows))).counted.sum() == plain.counted.sum()


def test_what_is_learnt_is_drafted_together_as_was_measured(
    documents: list[Document], first: Path, tmp_path: Path
) -> None:
    rows = data.pack(documents, 40)
    entries: list[Mapping[str, Any]] = []
    module = draft(1)
    progress = train(module, rows, rows, SETTINGS, tmp_path, entries.append, [load_earlier(first, TARGET)])
    batch = read_batch(TARGET, rows, ())
    parts = [loaded(first), loaded(tmp_path)]
    alone = [replay([part], [batch]).expected_length for part in parts]
    together = replay(parts, [batch])
    assert together.expected_length > max(alone) + 0.05
    assert torch.equal(
        accepted_together(batch, parts), torch.maximum(*(part.accepted(batch) for part in parts))
    )
    # The earlier one drafts four tokens in training, three here.
    assert progress.best == pytest.approx(together.expected_length, rel=0.1)
    # What was learnt are the places that were wrong: more of them are right now than before.
    wrong = still_wrong(batch, [parts[0]])
    left = still_wrong(batch, parts)
    untrained = still_wrong(batch, [parts[0], draft(1).double()])
    assert left.counted.sum() < untrained.counted.sum() < wrong.counted.sum()
    folders = [str(first), str(tmp_path)]
    combined = Combined(tuple(DraftModel(folder, LENGTH) for folder in folders), row_cost=0.0)
    generations = Engine(TARGET, combined, adaptive=False).generate([d.tokens[:3] for d in documents], GREEDY)
    assert [tuple(g.tokens) for g in generations] == [d.tokens[3:] for d in documents]
    stats = [g.stats for g in generations]
    assert (together.steps, together.tokens) == (sum(s.steps for s in stats), sum(s.tokens for s in stats))


def test_any_method_may_come_before_and_after(documents: list[Document], first: Path, tmp_path: Path) -> None:
    rows = data.pack(documents, 40)
    settings = replace(SETTINGS, steps=2, evaluate_every=2)
    torch.manual_seed(0)
    heads = TrainedMedusa.new(MedusaConfig(heads=2), TARGET)
    train(
        heads,
        rows,
        rows[:3],
        settings,
        tmp_path / "heads",
        earlier=[load_earlier(first, TARGET)],
        calibration=rows[3:6],
    )
    before = load_earlier(tmp_path / "heads", TARGET)
    assert type(before) is TrainedMedusa
    found = train(draft(1), rows, rows[:3], settings, tmp_path / "draft", earlier=[before])
    assert found.best >= replay([before], [read_batch(TARGET, rows[:3], (-1,))]).expected_length


def test_a_run_goes_on_after_the_same_drafters_alone(
    documents: list[Document], first: Path, tmp_path: Path
) -> None:
    rows = data.pack(documents, 40)
    settings = replace(SETTINGS, steps=4, evaluate_every=2)

    def run(out: Path, earlier: Trained, stop: int | None = None) -> dict[str, torch.Tensor]:
        module = draft(1)

        def report(entry: Mapping[str, Any]) -> None:
            if entry["step"] == stop and "loss" in entry:
                raise KeyboardInterrupt

        train(module, rows[3:], rows[:3], settings, out, report, [earlier])
        return dict(module.state_dict())

    earlier = load_earlier(first, TARGET)
    whole = run(tmp_path / "whole", earlier)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", earlier, stop=3)
    other = draft(7)
    assert fingerprint(other) != fingerprint(draft(8)) and fingerprint(other) == fingerprint(draft(7))
    with pytest.raises(OutpaceError, match="belongs to a run with other earlier drafters"):
        run(tmp_path / "parts", other)
    parts = run(tmp_path / "parts", earlier)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_mistakes(documents: list[Document], first: Path, tmp_path: Path) -> None:
    rows = data.pack(documents, 40)
    with pytest.raises(OutpaceError, match="nowhere is not the folder of a trained drafter"):
        load_earlier(tmp_path / "nowhere", TARGET)
    (tmp_path / "config.json").write_text(json.dumps({"method": "magic"}))
    with pytest.raises(OutpaceError, match="names an unknown method"):
        load_earlier(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(OutpaceError, match="is not the folder of a trained drafter"):
        load_earlier(tmp_path, TARGET)
    with pytest.raises(OutpaceError, match="leave out on_policy, or the earlier drafters"):
        settings = replace(SETTINGS, on_policy=0.5)
        train(draft(1), rows, rows, settings, tmp_path, earlier=[load_earlier(first, TARGET)])
