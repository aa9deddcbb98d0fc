"""EAGLE, DFlash and SpecDec's drafter: exact with any weights, learning, and correct held-out figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from learning import train
from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.base import Drafter
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashConfig
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleConfig
from outpace.draws.noise import Stream, noisy_argmax
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.spec_drafter import SpecDrafter, SpecDrafterConfig, SpecDrafterModule
from outpace_lab.train.data import Document
from outpace_lab.train.metric import Replay
from outpace_lab.train.modules.blocks import TrainedDFlash
from outpace_lab.train.modules.eagle import TrainedEagle
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained
from parts import in_turn
from watching import Watch

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
STEPS = 50


def eagle1(target: TargetModel) -> TrainedEagle:
    return TrainedEagle.new(EagleConfig(version=1), target)


def eagle3(target: TargetModel) -> TrainedEagle:
    return TrainedEagle.new(
        EagleConfig(layers=(0, 1, 2), depth=2, draft_vocabulary=target.vocabulary - 5, steps=4), target
    )


def dflash(target: TargetModel) -> TrainedDFlash:
    return TrainedDFlash.new(DFlashConfig(layers=(1, 2), tokens=5, anchors=16), target)


def dflash_of_some_ids(target: TargetModel) -> TrainedDFlash:
    config = DFlashConfig(layers=(1, 2), tokens=5, anchors=16, draft_vocabulary=target.vocabulary - 5)
    made = TrainedDFlash.new(config, target)
    made.suit(torch.arange(target.vocabulary))
    return made


def spec_drafter(target: TargetModel) -> SpecDrafterModule:
    return SpecDrafterModule.new(SpecDrafterConfig(tokens=5, hidden_size=48), target)


MAKERS: dict[str, tuple[Callable[[TargetModel], Trained], type[Drafter[Any]]]] = {
    "eagle1": (eagle1, Eagle),
    "eagle3": (eagle3, Eagle),
    "dflash": (dflash, DFlash),
    "dflash of some ids": (dflash_of_some_ids, DFlash),
    "spec_drafter": (spec_drafter, SpecDrafter),
}
# That are learnt.
DEPTHS = {"eagle1": 1, "eagle3": 4, "dflash": 5, "dflash of some ids": 5, "spec_drafter": 5}
RATES = {"spec_drafter": 1e-2}  # it has the language to learn, not the target's states to go on with
TREES = {"eagle1": {"expand": 3, "max_nodes": 9}, "eagle3": {"expand": 3, "max_nodes": 9}}


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama())


@lru_cache
def plain(params: SamplingParams) -> list[list[int]]:
    return [found.tokens for found in Engine(llama()).generate(PROMPTS, params)]


def module(name: str, target: TargetModel) -> Trained:
    """A module with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MAKERS[name][0](target).double()


@lru_cache
def trained(name: str) -> tuple[Trained, list[Any], Any]:
    """A module after some steps on the target's own greedy text, the losses on the way, and the batch."""
    answers = zip(PROMPTS, plain(GREEDY), strict=True)
    texts = [Document((*prompt, *answer), len(prompt)) for prompt, answer in answers]
    made = module(name, llama())
    batch = read_batch(llama(), [texts], made.hidden_layers)
    return made, train(made, batch, STEPS, RATES.get(name, 5e-3)), batch


def options(name: str) -> list[dict[str, Any]]:
    return [{}, TREES[name]] if name in TREES else [{}]


CASES = [(name, own) for name in MAKERS for own in options(name)]


@pytest.mark.parametrize(("name", "own", "params"), in_turn(CASES, [GREEDY, SAMPLED]))
def test_tokens_are_those_of_plain_decoding(name: str, own: dict[str, Any], params: SamplingParams) -> None:
    for made in (module(name, llama()), trained(name)[0]):
        found = Engine(llama(), MAKERS[name][1](made, **own), adaptive=False).generate(PROMPTS, params)
        assert [g.tokens for g in found] == plain(params)
    # It has learnt the greedy text; the sampled one is another.
    assert sum(g.stats.accepted for g in found) > (20 if params is GREEDY else 0)


@pytest.mark.parametrize("name", MAKERS)
def test_training_lowers_the_loss_and_raises_acceptance(name: str) -> None:
    _, losses, _ = trained(name)
    assert losses[-1].total.item() < 0.7 * losses[0].total.item()
    assert bool((losses[-1].acceptance > losses[0].acceptance + 0.1).all())
    assert len(losses[0].acceptance) == DEPTHS[name]


def test_a_linear_start_is_the_best_linear_map_and_a_layer_that_adds_nothing() -> None:
    target = llama()
    module = TrainedEagle.new(EagleConfig(version=1, linear_start=True), target).double()
    torch.manual_seed(0)
    texts = [Document(tuple(torch.randint(1, target.vocabulary, (40,)).tolist())) for _ in range(16)]
    batch = read_batch(target, [texts[:8], texts[8:]], module.hidden_layers)
    module.begin_linearly(iter([batch]))
    (outputs,) = module.unroll(batch, 1)
    where = batch.documents[:, 1:] == batch.documents[:, :-1]
    before, after = batch.hidden[-1][:, :-1][where], batch.hidden[-1][:, 1:][where]
    rows = torch.cat([target.embed(batch.tokens[:, 1:][where]), before], dim=-1)
    best = torch.linalg.lstsq(torch.cat([rows, torch.ones(len(rows), 1)], dim=-1).double(), after.double())
    fitted = torch.cat([module.fc.weight, module.fc.bias[:, None]], dim=1).T.double()
    assert torch.allclose(outputs[where], module.fc(rows))
    assert (fitted - best.solution).norm() < 0.05 * best.solution.norm()
    with pytest.raises(OutpaceError, match="linear_start needs EAGLE-1"):
        EagleConfig(linear_start=True)


@pytest.mark.parametrize("name", MAKERS)
def test_decoding_accepts_what_the_replay_says(name: str) -> None:
    """Steps are those that the held-out figure foretells: caches, positions and masks are as in training, and
    drafts are as long, where nobody says otherwise.
    """
    made, _, batch = trained(name)
    chains = {"max_nodes": 0} if DEPTHS[name] == 5 else {}  # those of blocks, as the figure has them
    drafter = MAKERS[name][1](made, **chains)
    found = Engine(llama(), drafter, adaptive=False).generate(PROMPTS, GREEDY)
    answers = zip(PROMPTS, plain(GREEDY), strict=True)
    later = [Document((*prompt, *answer), len(prompt)) for prompt, answer in answers]
    replay = Replay()
    replay.add(read_batch(llama(), [later], ()), made.accepted(batch))
    assert replay.expected_length > 1.3
    assert replay.steps == sum(g.stats.steps for g in found)
    assert replay.tokens == sum(g.stats.tokens for g in found)


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_looks_across_documents(name: str) -> None:
    """A text alone in a batch has the losses and acceptance that it has after another text."""
    made = module(name, llama())
    texts = [Document((7, 7, 2, 9, 1, 4, 3, 8)), Document((3, 9, 2, 7, 11, 12, 13, 14))]
    both, alone = (read_batch(llama(), [row], made.hidden_layers) for row in (texts, texts[1:]))
    if isinstance(made, TrainedEagle):
        outputs = [list(made.unroll(batch, 3)) for batch in (both, alone)]
        for packed, own in zip(*outputs, strict=True):
            torch.testing.assert_close(packed[:, 8:13], own[:, :5])
    else:
        packed, own = made.blocks(both, torch.tensor([[8, 10]])), made.blocks(alone, torch.tensor([[0, 2]]))
        torch.testing.assert_close(packed, own)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("name", MAKERS)
def test_each_token_is_drawn_from_the_distribution_it_brings_with_noise_of_its_own(
    name: str, verifier: str
) -> None:
    """``test_training_and_drafting`` shows that those are the drafter's distributions at the place."""
    watch, blocks = Watch(), DEPTHS[name] == 5
    chains = {"max_nodes": 0} if blocks and verifier == "block" else {}
    drafter = MAKERS[name][1](trained(name)[0], **chains)
    found = Engine(llama(), drafter, verifier, observer=watch, adaptive=False).generate(PROMPTS, SAMPLED)
    assert [len(g.tokens) for g in found] == [24] * 3
    assert sum(g.stats.accepted for g in found) > 0
    for step in watch.steps:
        rows = step.draft.distributions or {}
        assert rows.keys() == set(step.draft.parents)
        for node, (token, parent) in enumerate(zip(step.draft.tokens, step.draft.parents, strict=True)):
            word = step.sequence.key.node(Stream.DRAFT, step.root, node)
            assert token == noisy_argmax(rows[parent].log(), word)
    assert sum(len(step.draft) for step in watch.steps) > 100


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_drafts_as_the_module_did(name: str, tmp_path: Path) -> None:
    made, drafter = trained(name)[0], MAKERS[name][1]
    made.save(tmp_path)
    again = drafter(str(tmp_path))
    assert again.hidden_layers(again.prepare(llama())) == made.hidden_layers
    found = [
        Engine(llama(), own, adaptive=False).generate(PROMPTS, SAMPLED) for own in (drafter(made), again)
    ]
    assert [g.stats.accepted for g in found[0]] == [g.stats.accepted for g in found[1]]
    assert [g.tokens for g in found[1]] == plain(SAMPLED)


@pytest.mark.slow
def test_the_contract_holds_for_a_spec_drafter() -> None:
    target = ToyTarget()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        check_drafter(SpecDrafter(spec_drafter(target).double()), target)


def test_a_spec_drafter_reads_a_long_prompt_in_pieces() -> None:
    prompt = [(7 * place + place // 5) % 90 + 1 for place in range(1100)]
    target = Target(tiny_llama(context=2048))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    drafter = SpecDrafter(module("spec_drafter", target))
    found = Engine(target, drafter, adaptive=False).generate([prompt, [5]], params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate([prompt, [5]], params)]


def test_draws_that_there_are_not_are_refused() -> None:
    with pytest.raises(OutpaceError, match="draws"):
        SpecDrafter("x", draws="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MAKERS)
def test_outpace_drafts_from_the_folder_as_the_module_did(name: str, tmp_path: Path) -> None:
    """What the module that learns saves is loaded by the class without training, and drafts the same."""
    made, drafter = trained(name)[0], MAKERS[name][1]
    made.save(tmp_path)
    loaded = drafter(str(tmp_path)).prepare(llama())
    assert isinstance(made, Trained)
    own = type(loaded.module).load(tmp_path, llama())  # packs no weights, in float32
    assert name == "spec_drafter" or not isinstance(own, Trained)
    found, expected = own.state_dict(), made.state_dict()
    assert found.keys() == expected.keys() and own.config == made.config
    assert all(torch.equal(found[key].float(), expected[key].float()) for key in found)
