"""The draft cache contains the rows of the text, after any tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models import tiny_llama
from outpace.drafters.support import runner as module
from outpace.drafters.support.runner import DraftRunner, Feed, Track
from outpace.targets import CausalTarget, TargetModel
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget

TEXTS = [[5, 3, 8], [7], [1, 2, 3, 4, 5, 6]]


def models() -> list[Any]:
    return [ToyTarget, lambda: CausalTarget(tiny_llama(vocabulary=32))]


def logits_after(model: TargetModel, tokens: list[int]) -> Tensor:
    cache = model.new_cache()
    slot = cache.allocate()
    return model.forward(cache, Batch.of({slot: tokens})).logits_of(slot)[-1]


def same_rows(runner: DraftRunner, track: Track) -> None:
    """The track's rows are those of a fresh prefill of its tokens."""
    assert not track.parents
    assert runner.cache.length(track.slot) == len(track.tokens)
    cache = runner.model.new_cache()
    slot = cache.allocate()
    if track.tokens:
        runner.model.forward(cache, Batch.of({slot: track.tokens}, None))
        cache.keep({slot: range(len(track.tokens))})
    for layer in range(len(cache.layers)):
        for fresh, kept in zip(cache.rows(layer, slot), runner.cache.rows(layer, track.slot), strict=True):
            torch.testing.assert_close(kept, fresh, atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", models())
def test_a_tree_in_several_forwards_is_its_paths(make: Any) -> None:
    model = make()
    runner = DraftRunner(model)
    tracks = [runner.open() for _ in TEXTS]
    # Two of them grow trees of different widths, one only reads; then a second layer, uneven again.
    rows = runner.feed(
        tracks, [Feed(TEXTS[0], (9, 4), (-1, -1)), Feed(TEXTS[1]), Feed(TEXTS[2], (9, 9, 2), (-1, -1, 1))]
    )
    paths = [TEXTS[0], [*TEXTS[0], 9], [*TEXTS[0], 4], TEXTS[1]]
    paths += [TEXTS[2], [*TEXTS[2], 9], [*TEXTS[2], 9], [*TEXTS[2], 9, 2]]
    for row, path in zip(rows, paths, strict=True):
        torch.testing.assert_close(row, logits_after(model, path), atol=1e-9, rtol=0)
    rows = runner.feed(tracks[:2], [Feed((), (6, 7, 7), (0, 1, 1)), Feed((), (8,), (-1,))])
    paths = [[*TEXTS[0], 9, 6], [*TEXTS[0], 4, 7], [*TEXTS[0], 4, 7], [*TEXTS[1], 8]]
    for row, path in zip(rows, paths, strict=True):
        torch.testing.assert_close(row, logits_after(model, path), atol=1e-9, rtol=0)
    # What the texts became: along the tree's second branch, off the tree, and through an equal sibling.
    runner.rewind(tracks[0], [*TEXTS[0], 4, 7, 1, 1], 3)
    runner.rewind(tracks[1], [*TEXTS[1], 2], 1)
    runner.rewind(tracks[2], [*TEXTS[2], 9, 2, 5], 6)
    assert [track.tokens for track in tracks] == [[*TEXTS[0], 4, 7], TEXTS[1], [*TEXTS[2], 9, 2]]
    for track in tracks:
        same_rows(runner, track)
    runner.close(tracks[0])
    same_rows(runner, tracks[2])


@pytest.mark.parametrize("make", models())
def test_a_single_row_that_goes_on_with_a_tree_sees_its_own_branch(make: Any) -> None:
    model = make()
    runner = DraftRunner(model)
    track = runner.open()
    runner.feed([track], [Feed([1, 2], (5, 6), (-1, -1))])
    (row,) = runner.feed([track], [Feed((), (7,), (0,))])
    torch.testing.assert_close(row, logits_after(model, [1, 2, 5, 7]), atol=1e-9, rtol=0)
    (row,) = runner.feed([track], [Feed((), (8,), (1,))])
    torch.testing.assert_close(row, logits_after(model, [1, 2, 6, 8]), atol=1e-9, rtol=0)


def test_a_text_that_changes_is_cut_back_to_what_it_shares() -> None:
    runner = DraftRunner(ToyTarget())
    track = runner.open()
    runner.feed([track], [Feed([1, 2, 3, 4, 5])])
    runner.rewind(track, [1, 2, 9, 4, 5, 6])
    assert track.tokens == [1, 2]
    same_rows(runner, track)
    runner.rewind(track, [1, 2])  # the last token is fed again: its logits are wanted
    assert track.tokens == [1]
    same_rows(runner, track)


def test_late_texts_catch_up_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 2)
    runner = DraftRunner(ToyTarget())
    tracks = [runner.open() for _ in TEXTS]
    runner.catch_up(tracks, TEXTS)
    assert [track.tokens for track in tracks] == [[5, 3], [], [1, 2, 3, 4]]
    for track in tracks:
        same_rows(runner, track)
