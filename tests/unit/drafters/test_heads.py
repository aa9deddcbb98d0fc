"""Drafters of heads: their trees, and what they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.heads.heads import Heads, best_tree
from outpace.drafters.heads.hydra import Hydra, HydraConfig, HydraHeads
from outpace.drafters.heads.medusa import Medusa, MedusaConfig, MedusaHeads
from outpace.engine.engine import Engine
from outpace.testing import ToyTarget, check_drafter
from outpace.tree import depths, path_to
from parts import first

TARGET = ToyTarget()
PROMPT = [3, 9, 2, 7]
KINDS: dict[str, tuple[type[Heads], Any, Any]] = {
    "medusa": (MedusaHeads, MedusaConfig(heads=3, own_head=True), lambda h: Medusa(h, max_nodes=9)),
    "hydra": (HydraHeads, HydraConfig(heads=3), lambda h: Hydra(h, max_nodes=9)),
    "medusa of some ids": (MedusaHeads, MedusaConfig(heads=3, draft_vocabulary=20), Medusa),
    "hydra of some ids": (HydraHeads, HydraConfig(heads=3, draft_vocabulary=20), Hydra),
}
GROWN: dict[str, Any] = {
    "hydra": lambda h: Hydra(h, expand=3, max_nodes=7),
    "medusa": lambda h: Medusa(h, expand=3, max_nodes=7),
    "hydra of some ids": lambda h: Hydra(h, expand=20),
}


def heads(name: str, target: ToyTarget = TARGET) -> Heads:
    """Heads with weights large enough to affect their predictions."""
    cls, config, _ = KINDS[name]
    made = cls.new(config, target).double()
    if made.drafted.reduced:
        made.drafted.choose(torch.arange(target.vocabulary)[-len(made.drafted.ids) :])
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn(weight.shape, generator=random, dtype=weight.dtype) / 4)
    return made


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tokens[n] for n in path_to(draft.parents, node)) for node in range(len(draft))]


@pytest.mark.parametrize("name", first(1, KINDS))
def test_contract(name: str) -> None:
    check_drafter(KINDS[name][2](heads(name)), TARGET)


@pytest.mark.parametrize("name", first(1, GROWN))
def test_contract_of_trees_that_grow_by_confidence(name: str) -> None:
    check_drafter(GROWN[name](heads(name)), TARGET)


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_a_tree_by_confidence_has_the_most_probable_paths(name: str) -> None:
    made = heads(name)
    whole = KINDS[name][0].of(made, TARGET)
    drafter = type(KINDS[name][2](made))(made, expand=TARGET.vocabulary, max_nodes=9)
    engine = Engine(TARGET, drafter, adaptive=False)
    engine.add(PROMPT, SamplingParams(max_new_tokens=60, ignore_eos=True))
    engine.step()
    state = engine._batch.active[0].state
    (draft,) = drafter.propose([state])
    root, one = state.sequence.tokens[-1], torch.zeros(1, dtype=torch.long)
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(3):
        for path in [path for path in chances if len(path) == depth]:
            rows = whole.rows(state.before[None], one, torch.tensor([[root, *path]]))
            for token, chance in enumerate(rows[0].softmax(dim=-1).tolist()):
                chances[(*path, token)] = chances[path] * chance
    del chances[()]
    best = sorted(chances, key=lambda path: -chances[path])[:9]
    assert paths_of(draft) == best and max(map(len, best)) > 1
    assert draft.chances == pytest.approx([chances[path] for path in best])
    # Nothing is drafted after a path that does not pay for a row.
    state.sequence.row_cost = 1.01 * chances[best[0]]
    (draft,) = drafter.propose([state])
    first = sorted((path for path in chances if len(path) == 1), key=lambda path: -chances[path])
    assert paths_of(draft) == first[:9]


def test_the_best_tree_has_the_likeliest_nodes() -> None:
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3]]
    parents = best_tree(accuracies, 5)
    # Chances: .6, .6 * .5 = .3, .2, .6 * .3 = .18, .1 and .2 * .5 (offered later).
    assert parents == [-1, 0, -1, 0, -1]
    assert len(best_tree(accuracies, 99)) == 3 + 3 * 2
    assert max(depths(best_tree(accuracies, 99))) == 1
    assert best_tree([[0.5, 0.0], [0.0]], 9) == [-1]
    assert best_tree([[0.0, 0.0], [0.0]], 9) == [-1]


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_a_smaller_budget_drafts_the_likeliest_nodes(name: str) -> None:
    made = heads(name)
    made.accuracies.copy_(torch.linspace(0.6, 0.1, made.accuracies.numel()).view_as(made.accuracies))
    check_budgets(TARGET, type(KINDS[name][2](made))(made), made)


def check_budgets(target: ToyTarget, drafter: Any, made: Any) -> None:
    """Check that a smaller budget drafts the beginning of the tree, and a text's end its first layer."""
    engine = Engine(target, drafter, adaptive=False)
    sequence = engine.add(PROMPT, SamplingParams(max_new_tokens=60, ignore_eos=True))
    engine.step()
    whole = made.tree()
    for budget in (*range(1, len(whole) + 1), len(whole) + 3, None):
        sequence.budget = budget
        (draft,) = drafter.propose([engine._batch.active[0].state])
        assert sorted(depths(draft.parents)) == sorted(depths(whole[:budget])), budget
    sequence.limit = sequence.output_length + 2
    assert set(depths(drafter.propose([engine._batch.active[0].state])[0].parents)) == {0}


def test_hydra_sees_what_was_drafted_and_medusa_does_not() -> None:
    states, one = torch.randn(1, 16, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    paths = torch.tensor([[1, 2]]), torch.tensor([[1, 3]])
    for name, same in (("medusa", True), ("hydra", False)):
        made = heads(name)
        assert torch.equal(*(made.rows(states, one, path) for path in paths)) is same


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Medusa("x", max_nodes=0), "max_nodes must be at least 1"),
        (lambda: Medusa("x", max_nodes=3, branching="2x2"), "branching excludes"),
        (lambda: Medusa("x", expand=3, branching="2x2"), "branching excludes"),
        (lambda: Hydra("x", expand=0), "hydra: expand must be at least 1"),
        (lambda: Hydra("x", expand=3, draws="independent"), "cannot be independent draws"),
        (lambda: MedusaConfig(draft_vocabulary=-1), "draft_vocabulary must be at least 0"),
        (lambda: MedusaConfig(own_head=True, draft_vocabulary=4), "medusa: draft_vocabulary is of"),
        (lambda: HydraConfig(own_head=True, draft_vocabulary=4), "hydra: draft_vocabulary is of"),
        (lambda: MedusaHeads.new(MedusaConfig(draft_vocabulary=33), TARGET), "at most .*, 32, not 33"),
        (lambda: Medusa("x", branching="2x0"), "at least 1, not '2x0'"),
        (lambda: Medusa("x", branching="2xa"), "medusa: branching must be numbers"),
        (lambda: Hydra("x", draws="mine"), "hydra: draws must be 'coupled'"),  # type: ignore[arg-type]
        (lambda: MedusaConfig(heads=0), "at least 1"),
        (lambda: HydraConfig(layers=0), "at least 1"),
        (lambda: Engine(TARGET, Medusa(heads("medusa"), branching="2x2x2x2")), "there are only 3 heads"),
        (lambda: Engine(TARGET, Medusa("/nowhere")), "outpace train medusa"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, match: str) -> None:
    with pytest.raises(OutpaceError, match=match):
        make()
