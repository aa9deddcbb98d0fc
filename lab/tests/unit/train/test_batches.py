"""The batches that modules learn from, and their losses."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace_lab.train.trained import TrainingBatch, accepted_of_chain, measure


def batch(tokens: list[list[int]], documents: list[list[int]], counted: list[list[int]]) -> TrainingBatch:
    rows = torch.tensor(tokens)
    return TrainingBatch(
        tokens=rows,
        positions=torch.zeros_like(rows),
        documents=torch.tensor(documents),
        counted=torch.tensor(counted).bool(),
        hidden={},
        scores=torch.zeros(*rows.shape, 10),
    )


def test_nothing_looks_across_documents_or_into_padding() -> None:
    packed = batch([[1, 2, 3, 4, 5, 0]], [[0, 0, 0, 1, 1, -1]], [[0, 1, 1, 0, 1, 0]])
    assert packed.ahead(1).int().tolist() == [[1, 1, 0, 1, 0, 0]]
    assert packed.ahead(2).int().tolist() == [[1, 0, 0, 0, 0, 0]]
    assert not packed.ahead(6).any()
    padded = batch([[1, 0, 0]], [[0, -1, -1]], [[0, 1, 1]])
    assert not padded.ahead(1).any()


def test_a_draft_is_accepted_as_far_as_it_is_right() -> None:
    packed = batch([[1, 2, 3, 4, 5]], [[0, 0, 0, 0, 1]], [[1] * 5])
    guesses = torch.tensor([[[2, 3, 9], [3, 9, 5], [4, 5, 0], [5, 0, 0], [0, 0, 0]]])
    assert accepted_of_chain(packed, guesses).tolist() == [[2, 1, 1, 0, 0]]


def test_losses_are_means_by_depth() -> None:
    def objective(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        return labels.double() + draft[:, 0]

    draft = torch.tensor([[0.0, 1.0], [5.0, 0.0]])
    empty = torch.zeros(0, 2)
    depths = [(draft, draft, torch.tensor([1, 1])), (empty, empty, torch.zeros(0, dtype=torch.long))]
    found = measure(objective, depths, [2.0, 1.0])
    assert found.loss.tolist() == [3.5, 0.0] and found.total == 7
    assert found.acceptance.tolist() == [0.5, 0.0] and found.places.tolist() == [2, 0]
