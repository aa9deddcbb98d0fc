"""Heads as they learn, and the acceptance that training predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learning import train
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.heads.heads import Heads
from outpace.drafters.heads.hydra import Hydra, HydraConfig
from outpace.drafters.heads.medusa import Medusa, MedusaConfig
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.blockwise import Blockwise, BlockwiseConfig, BlockwiseHeads
from outpace_lab.train.data import Document
from outpace_lab.train.modules.heads import TrainedHydra, TrainedMedusa
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import TrainingBatch, ids_of, number
from parts import first
from unit.drafters.test_heads import check_budgets

TARGET = ToyTarget()
PROMPT = [3, 9, 2, 7]
KINDS: dict[str, tuple[type[Heads], Any, Any]] = {
    "medusa": (TrainedMedusa, MedusaConfig(heads=3, own_head=True), lambda h: Medusa(h, max_nodes=9)),
    "blockwise": (BlockwiseHeads, BlockwiseConfig(heads=3), Blockwise),
    "hydra": (TrainedHydra, HydraConfig(heads=3), lambda h: Hydra(h, max_nodes=9)),
    "medusa of some ids": (TrainedMedusa, MedusaConfig(heads=3, draft_vocabulary=20), Medusa),
    "blockwise of some ids": (BlockwiseHeads, BlockwiseConfig(heads=3, draft_vocabulary=20), Blockwise),
    "hydra of some ids": (TrainedHydra, HydraConfig(heads=3, draft_vocabulary=20), Hydra),
}


def heads(name: str, target: ToyTarget = TARGET) -> Heads:
    """Heads with weights large enough to affect their predictions."""
    cls, config, _ = KINDS[name]
    made = cls.new(config, target).double()
    made.suit(torch.arange(target.vocabulary))  # the last ids, if not all
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=random, dtype=weight.dtype) / 4)
    return made


def batch_of(text: list[int], prompt: int) -> TrainingBatch:
    return read_batch(TARGET, [[Document(tuple(text), prompt)]], (-1,))


@pytest.mark.parametrize("name", first(1, [name for name in KINDS if "blockwise" in name]))
@pytest.mark.slow
def test_contract(name: str) -> None:
    check_drafter(KINDS[name][2](heads(name)), TARGET)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_replay_predicts_what_decoding_accepts(verifier: str) -> None:
    """Heads that learnt this very text; each step accepts what ``accepted`` predicts at its root."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    (plain,) = Engine(TARGET).generate([PROMPT], params)
    batch = batch_of(PROMPT + plain.tokens, len(PROMPT))
    for name in KINDS:
        made = heads(name)
        losses = train(made, batch, 20, 0.01)
        assert losses[-1].total < losses[0].total, name
        accepted = made.accepted(batch)[0].tolist()
        engine = Engine(TARGET, type(KINDS[name][2](made))(made), verifier, adaptive=False)
        sequence = engine.add(PROMPT, params)
        seen = []
        while engine.sequences:
            root = len(sequence.tokens) - 1
            engine.step()
            if root < len(PROMPT):  # the drafter needs the states of the prompt, which are in this forward
                assert len(sequence.tokens) == len(PROMPT) + 1
            elif sequence.room > made.depth:
                assert len(sequence.tokens) - root - 2 == accepted[root], (name, root)
                seen.append(accepted[root])
        assert len(set(seen)) > 1, (name, seen)
        assert sequence.output == plain.tokens


@pytest.mark.parametrize("name", [name for name in KINDS if "some" in name])
def test_of_some_ids_the_targets_logits_are_learnt_where_the_label_is_one(name: str) -> None:
    made = heads(name)
    ids = torch.arange(12, 32)
    assert torch.equal(made.drafted.ids, ids)
    batch = batch_of([3, 14, 2, 27, 31, 4, 18, 12, 30], 2)
    seen = []

    def record(draft: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((target, labels))
        return draft.sum(dim=-1)

    losses = made.loss(batch, record)
    for depth, (target, labels) in enumerate(seen):
        places = [place for place in range(2 + depth, 9) if batch.tokens[0, place] in ids]
        assert ids[labels].tolist() == batch.tokens[0, places].tolist()
        expected = batch.logits[0, [place - 1 for place in places]][:, ids]
        torch.testing.assert_close(target, expected)
    # Among seven, six and five counted places, some with a token that cannot be drafted.
    assert losses.places.tolist() == [5, 5, 4]
    whole = losses.acceptance * torch.tensor([7, 6, 5])
    torch.testing.assert_close(whole, whole.round())


def test_trained_heads_keep_their_ids(tmp_path: Path) -> None:
    made = heads("medusa of some ids").float()
    made.suit(torch.arange(32).flip(0))
    assert made.drafted.ids.tolist() == list(range(12, 32))
    made.save(tmp_path)
    loaded = TrainedMedusa.load(tmp_path, TARGET)
    loaded.suit(torch.arange(32).flip(0))
    assert loaded.drafted.ids.tolist() == list(range(12, 32))
    states = torch.randn(2, 16, dtype=TARGET.hidden.dtype)
    spread = loaded.drafted.spread(loaded.guess(states, 1))
    assert spread[:, :12].isinf().all() and spread[:, 12:].isfinite().all()
    found = number(loaded.drafted, torch.tensor([0, 11, 12, 31]))
    assert found.tolist() == [-1, -1, 0, 19]
    assert ids_of(loaded.drafted, found[2:]).tolist() == [12, 31]


@pytest.mark.parametrize("name", ["medusa", "blockwise"])
def test_a_smaller_budget_drafts_the_likeliest_nodes(name: str) -> None:
    made = heads(name)
    made.calibrate([batch_of(PROMPT * 6, 0)])
    check_budgets(TARGET, type(KINDS[name][2](made))(made), made)


def test_heads_of_their_own_begin_as_the_targets() -> None:
    shared = TrainedMedusa.new(MedusaConfig(heads=2), TARGET).double()
    own = TrainedMedusa.new(MedusaConfig(heads=2, own_head=True), TARGET).double()
    states, one = torch.randn(3, 16, dtype=torch.float64), torch.arange(3)
    for path in (torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 2, dtype=torch.long)):
        found = own.rows(states, one, path)
        assert torch.allclose(found, shared.rows(states, one, path), atol=1e-4)
        assert torch.allclose(found, TARGET.head(states), atol=1e-4)


def test_accuracies_are_counted_by_rank() -> None:
    made = TrainedMedusa.new(MedusaConfig(heads=2), TARGET).double()
    batch = batch_of([3, 9, 2, 7, 1, 4, 8], 2)
    made.calibrate([batch])
    ranks = []
    for place in range(1, 5):  # the head of depth 1 at this place guesses the token three places on
        row = TARGET.head(batch.hidden[-1][0, place - 1])
        ranks.append(int((row > row[batch.tokens[0, place + 2]]).sum()))
    expected = torch.tensor([ranks.count(rank) / 4 for rank in range(10)], dtype=torch.float64)
    assert torch.equal(made.accuracies[1], expected)
    with pytest.raises(OutpaceError, match="longer than a draft"):
        made.calibrate([])


def test_blockwise_heads_read_the_state_alone() -> None:
    states, one = torch.randn(1, 16, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    made = heads("blockwise")
    assert torch.equal(*(made.rows(states, one, torch.tensor([[1, token]])) for token in (2, 3)))


def test_a_width_of_nothing_is_refused() -> None:
    with pytest.raises(OutpaceError, match="above 0"):
        BlockwiseConfig(width=0)


def test_hydras_heads_of_their_own_begin_with_the_targets() -> None:
    made = TrainedHydra.new(HydraConfig(heads=2, own_head=True, own_residual=True), TARGET).double()
    states = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(made.projections[1](states), TARGET.head(states), rtol=0, atol=1e-4)
