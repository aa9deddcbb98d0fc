"""The cascade: the chain is the draft model's own, in fewer of its forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.none import NoDraft
from outpace.drafters.parallel.jacobi import Jacobi
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.draws.noise import Key
from outpace.engine.engine import Engine
from outpace.sequence import Sequence
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.cascade import Cascade
from outpace_lab.drafters.provisional import Provisional
from parts import first, in_turn

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
GREEDY = SamplingParams(max_new_tokens=25)
SAMPLED = SamplingParams(max_new_tokens=25, temperature=1.0, seed=3)
PENALISED = SamplingParams(
    max_new_tokens=25, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, seed=4, ignore_eos=True
)
INNER: dict[str, Any] = {
    "none": NoDraft(),
    "prompt_lookup": PromptLookup(),
    "lookahead": Lookahead(window=3, ngram=3, guesses=3),
    "jacobi": Jacobi(num_speculative_tokens=4),
    "smaller": DraftModel(ToyTarget(surprise=0.5), 3),
    "smaller_tree": DraftModel(ToyTarget(surprise=0.5), 3, branching="2x2"),
}


def middle(count: int = 5, draws: Any = "coupled") -> DraftModel:
    return DraftModel(ToyTarget(surprise=0.7), count, draws)


def run(drafter: Drafter[Any], params: SamplingParams, monkeypatch: Any, verifier: str = "match") -> Any:
    """Tokens of each sequence, which come and go, and every draft."""
    drafts: list[Draft] = []
    propose = type(drafter).propose

    def watch(self: Any, states: Any) -> list[Draft]:
        found: list[Draft] = propose(self, states)
        if self is drafter:
            drafts.extend(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(type(drafter), "propose", watch)
        engine = Engine(ToyTarget(), drafter, verifier, adaptive=False)
        sequences = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
        engine.step()
        sequences.append(engine.add(PROMPTS[2], params))
        engine.step()
        engine.remove(sequences[0])
        while engine.sequences:
            engine.step()
    return sequences, drafts


@pytest.mark.parametrize(("inner", "params"), in_turn(INNER, [GREEDY, SAMPLED, PENALISED]))
def test_it_drafts_what_the_draft_model_drafts_alone(inner: str, params: Any, monkeypatch: Any) -> None:
    alone, wanted = run(middle(), params, monkeypatch)
    found, drafts = run(Cascade(middle(), INNER[inner]), params, monkeypatch)
    assert [s.output for s in found] == [s.output for s in alone]
    assert [d.tokens for d in drafts] == [d.tokens for d in wanted]
    for one, other in zip(drafts, wanted, strict=True):
        assert (one.distributions is None) == (other.distributions is None)
        for parent, row in (other.distributions or {}).items():
            assert one.distributions is not None
            torch.testing.assert_close(one.distributions[parent], row, atol=1e-9, rtol=0)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize(
    ("inner", "params"),
    in_turn(["prompt_lookup", "lookahead", "smaller_tree"], [GREEDY, SAMPLED, PENALISED]),
)
def test_a_tail_follows_the_chain_and_the_draft_model_does_not_run_for_it(
    inner: str, params: Any, verifier: str, monkeypatch: Any
) -> None:
    alone, wanted = run(Cascade(middle(3), INNER[inner]), params, monkeypatch, verifier)
    found, drafts = run(Cascade(middle(3), INNER[inner], tail=2), params, monkeypatch, verifier)
    if verifier == "match":
        plain, _ = run(NoDraft(), params, monkeypatch)
        # The first sequence leaves early, after as many steps, not tokens.
        assert [s.output for s in found[1:]] == [s.output for s in plain[1:]]
        assert [s.output for s in alone[1:]] == [s.output for s in plain[1:]]
    assert 3 < max(map(len, drafts)) <= 5
    for draft in drafts:
        assert draft.parents == tuple(range(-1, len(draft) - 1))
        for parent, row in (draft.distributions or {}).items():
            assert parent < 2 or row[draft.tokens[parent + 1]] == row.sum() == 1
    if inner == "smaller_tree":  # the toy's text hardly repeats, so those that copy are rarely right
        first = next(draft for draft in wanted if len(draft) == 3)
        assert any(draft.tokens[:3] == first.tokens and len(draft) == 5 for draft in drafts)
        assert any(sum(s.stats.accepted_per_position[3:]) for s in found)
    assert all(s.stats.extra["draft_steps"] <= 3 * s.stats.steps for s in found)


def test_a_good_inner_drafter_saves_forwards_of_the_draft_model(monkeypatch: Any) -> None:
    def forwards(inner: str) -> int:
        sequences, _ = run(Cascade(middle(8), INNER[inner]), GREEDY, monkeypatch)
        return sum(s.stats.extra["draft_steps"] for s in sequences)

    assert forwards("smaller") < 0.6 * forwards("none")
    assert forwards("prompt_lookup") < forwards("none")


@pytest.mark.parametrize(
    "drafter",
    first(
        2,
        [
            Cascade(middle(), INNER["prompt_lookup"]),
            Cascade(middle(3, "independent"), INNER["smaller"]),
            Cascade(middle(3), INNER["prompt_lookup"], tail=3),
            Cascade(middle(3, "greedy"), INNER["lookahead"]),
            Cascade(DraftModel(ToyTarget(surprise=0.7, context=30), 6), INNER["smaller"]),
        ],
    ),
)
@pytest.mark.slow
def test_it_keeps_the_contract(drafter: Cascade) -> None:
    check_drafter(drafter)


@pytest.mark.parametrize("coupled", [True, False])
def test_the_noise_is_the_targets_or_new_in_each_step(coupled: bool) -> None:
    original = Sequence(PROMPTS[1], SAMPLED, Key(3, coupled), limit=20)
    text, words = Provisional(original, "coupled"), []
    for _ in range(2):
        text.follow(4)
        words.append([text.key.target(index) for index in range(6)])
        original.append(5)
    assert (words[0] == words[1]) == coupled
    assert (words[0] == [Key(3).target(index) for index in range(6)]) == coupled


def test_under_rejection_the_chain_does_not_depend_on_the_inner_drafter(monkeypatch: Any) -> None:
    found, drafts = run(Cascade(middle(4), INNER["none"]), SAMPLED, monkeypatch, "rejection")
    again, same = run(Cascade(middle(4), INNER["smaller"]), SAMPLED, monkeypatch, "rejection")
    assert [s.output for s in found] == [s.output for s in again]
    assert [d.tokens for d in drafts] == [d.tokens for d in same]
    _, shared = run(Cascade(middle(4), INNER["none"]), SAMPLED, monkeypatch, "match")
    assert drafts[0].tokens != shared[0].tokens


def test_it_has_a_spec_string() -> None:
    drafter = load_drafter(
        "cascade:draft=(draft_model:num_speculative_tokens=6),inner=(prompt_lookup:branches=2)"
    )
    assert drafter == Cascade(DraftModel(num_speculative_tokens=6), PromptLookup(branches=2))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (PromptLookup(), "draft must have a model"),
        (DraftModel(ToyTarget(), branching="2"), "drafts whole chains"),
        (DraftModel(ToyTarget(), min_confidence=0.5), "drafts whole chains"),
        (DraftModel(ToyTarget(vocabulary=48)), "48 token ids and the target 32"),
    ],
)
def test_who_cannot_draft_for_the_target_is_refused(draft: Any, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        Engine(ToyTarget(), Cascade(draft, PromptLookup()))


def test_an_inner_drafter_that_needs_hidden_states_is_refused() -> None:
    class Head(NoDraft):
        def hidden_layers(self, shared: None) -> tuple[int, ...]:
            return (1,)

    with pytest.raises(OutpaceError, match="Head needs the target's hidden states"):
        Engine(ToyTarget(), Cascade(middle(), Head()))
