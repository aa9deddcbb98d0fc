"""A drafter per topic: a router picks it, it learns from its own requests alone, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.copying.suffix import Suffix
from outpace.drafters.heads.medusa import Medusa, MedusaConfig
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.routed import Routed, TopicRouter
from outpace_lab.train import Learning, Online, Topics
from outpace_lab.train.modules.draft_model import DraftConfig, TrainedDraft
from outpace_lab.train.modules.heads import TrainedMedusa

PROMPTS = [[place % 2 + 1, place + 3, place + 5] for place in range(12)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
LEARNING = Learning(tokens=4096, length=64, updates=12, rows=4, learning_rate=5e-3, measured=20)


def odd(prompt: Any) -> int:
    return int(prompt[0] % 2)


def heads(folder: Path, target: TargetModel) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        TrainedMedusa.new(MedusaConfig(heads=3, own_head=True, max_nodes=8), target).save(folder)
    return f"medusa:path={folder}"


def weights(learner: Online) -> list[torch.Tensor]:
    return [weight.clone() for weight in learner.module.parameters()]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_each_learns_from_its_topic_and_no_token_changes(params: SamplingParams, tmp_path: Path) -> None:
    target = Target(tiny_llama(layers=3))
    topics = Topics(target, heads(tmp_path, target), odd, 2, LEARNING)
    engine = Engine(topics.target, topics.drafter, observer=topics, adaptive=False)
    plain = [found.tokens for found in Engine(target).generate(PROMPTS, params)]
    for _ in range(2):
        found = engine.generate(PROMPTS, params)
        assert [one.tokens for one in found] == plain
        assert [one.stats.extra.get("route_1", 0) for one in found] == [odd(prompt) for prompt in PROMPTS]
        topics.step()
    for place, learner in enumerate(topics.learners):
        records = [record for _, record in learner._buffer._records]
        assert len(records) == 12 and {odd(record.tokens) for record in records} == {place}
        assert len(learner.rounds) == 2
    # Requests of one topic leave the other's drafter as it is.
    before = [weights(learner) for learner in topics.learners]
    engine.generate(PROMPTS[::2], params)
    while topics.learners[1].step().kept != "learnt":  # type: ignore[union-attr]
        pass
    same = [
        all(map(torch.equal, old, weights(learner)))
        for old, learner in zip(before, topics.learners, strict=True)
    ]
    assert same == [True, False]
    topics.save(tmp_path / "learnt")
    assert Medusa(tmp_path / "learnt" / "1").prepare(target)


def test_generate_learns_too(tmp_path: Path) -> None:
    """transformers' generate() of an accelerated model, token for token, while the drafters learn from it."""
    model = tiny_llama(layers=3)
    target = Target(model)
    topics = Topics(target, heads(tmp_path, target), odd, 2, replace(LEARNING, every=100))
    expected = [model.generate(torch.tensor([prompt]), max_new_tokens=20) for prompt in PROMPTS]
    outpace.accelerate(model, learner=topics)
    for _ in range(2):
        found = [model.generate(torch.tensor([prompt]), max_new_tokens=20) for prompt in PROMPTS]
        assert all(map(torch.equal, found, expected))
        topics.step()
    assert [len(learner.rounds) for learner in topics.learners] == [2, 2]
    with topics:
        with pytest.raises(OutpaceError, match="in the background already"):
            topics.step()
        assert torch.equal(model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20), expected[0])
    outpace.restore(model)
    with pytest.raises(OutpaceError, match="was made for another model, or it has changed"):
        outpace.accelerate(tiny_llama(), learner=topics)
    with pytest.raises(OutpaceError, match="a learner has its own drafter"):
        outpace.accelerate(model, "suffix", learner=topics)
    with pytest.raises(OutpaceError, match="the learner has made the target"):
        outpace.accelerate(model, learner=topics, exact=True)


def test_copies_are_needed(tmp_path: Path) -> None:
    target = Target(tiny_llama(layers=3))
    with pytest.raises(OutpaceError, match="give the drafter by its folder"):
        Topics(target, Medusa(TrainedMedusa.new(MedusaConfig(), target)), odd, 2)
    with pytest.raises(OutpaceError, match="count must be at least 1"):
        Topics(target, heads(tmp_path, target), odd, 0)


def test_a_router_knows_its_examples_and_what_is_like_them() -> None:
    maths, code = [[1, 2, 3, 4], [1, 2, 9, 4]], [[5, 6, 7], [5, 6, 2, 8]]
    route = TopicRouter([maths, code])
    assert [route(prompt) for prompt in (*maths, *code)] == [0, 0, 1, 1]
    assert route([1, 4, 100, 101]) == 0 and route([2, 8, 100]) == 1
    with pytest.raises(OutpaceError, match="needs examples of each topic"):
        TopicRouter([maths, []])


def test_parts_draft_for_their_own_sequences_only() -> None:
    small = Target(tiny_llama(layers=1, seed=3))
    check_drafter(Routed((PromptLookup(), Suffix()), odd))
    target = Target(tiny_llama(layers=3))
    engine = Engine(target, Routed((PromptLookup(), DraftModel(small)), odd), adaptive=False)
    found = engine.generate(PROMPTS, GREEDY)
    assert [one.tokens for one in found] == [one.tokens for one in Engine(target).generate(PROMPTS, GREEDY)]
    alone = Engine(target, DraftModel(small), adaptive=False).generate(PROMPTS, GREEDY)
    for prompt, one, other in zip(PROMPTS, found, alone, strict=True):
        assert (one.stats.steps == other.stats.steps and one.stats.drafted > 0) or not odd(prompt)
    with pytest.raises(OutpaceError, match="picks drafter 2 of 2"):
        Engine(target, Routed((PromptLookup(), DraftModel(small)), lambda prompt: 2)).generate(PROMPTS[:1])
    with pytest.raises(OutpaceError, match="at least one"):
        Routed((), odd)


def test_a_draft_model_learns_from_its_own_text() -> None:
    target = ToyTarget()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        draft = TrainedDraft.new(DraftConfig(), target)
    learning = replace(LEARNING, on_policy=0.5, updates=20, rows=8, learning_rate=0.01)
    learner = Online(target, DraftModel(draft), learning)
    engine = Engine(target, learner.drafter, observer=learner, adaptive=False)
    steps = []
    for _ in range(4):
        found = engine.generate(PROMPTS, GREEDY)
        assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate(PROMPTS, GREEDY)]
        steps.append(sum(g.stats.steps for g in found))
        learner.step()
    assert min(steps[1:]) < 0.95 * steps[0]
    with pytest.raises(OutpaceError, match="cannot write its own text"):
        Online(target, Medusa(TrainedMedusa.new(MedusaConfig(), target)), learning)
    with pytest.raises(OutpaceError, match="on_policy must be a share"):
        Learning(on_policy=1.5)
