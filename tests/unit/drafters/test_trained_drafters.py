"""EAGLE and DFlash are exact with any weights, and a folder drafts as the module that was saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.base import Drafter
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashConfig, DFlashModule
from outpace.drafters.eagle.eagle import Eagle
from outpace.drafters.eagle.eagle_module import EagleConfig, EagleModule
from outpace.draws.noise import Stream, noisy_argmax
from outpace.engine.engine import Engine
from outpace.learned.learned import Learned
from outpace.targets import Target, TargetModel
from outpace.testing import ToyTarget, check_drafter
from parts import first
from watching import Watch

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, seed=3, ignore_eos=True)


def eagle1(target: TargetModel) -> EagleModule:
    return EagleModule.new(EagleConfig(version=1), target)


def eagle3(target: TargetModel) -> EagleModule:
    return EagleModule.new(
        EagleConfig(layers=(0, 1, 2), depth=2, draft_vocabulary=target.vocabulary - 5, steps=4), target
    )


def dflash(target: TargetModel) -> DFlashModule:
    return DFlashModule.new(DFlashConfig(layers=(1, 2), tokens=5, anchors=16), target)


def dflash_of_some_ids(target: TargetModel) -> DFlashModule:
    config = DFlashConfig(layers=(1, 2), tokens=5, anchors=16, draft_vocabulary=target.vocabulary - 5)
    made = DFlashModule.new(config, target)
    made.drafted.choose(torch.arange(5, target.vocabulary))
    return made


MAKERS: dict[str, tuple[Callable[[TargetModel], Learned], type[Drafter[Any]]]] = {
    "eagle1": (eagle1, Eagle),
    "eagle3": (eagle3, Eagle),
    "dflash": (dflash, DFlash),
    "dflash of some ids": (dflash_of_some_ids, DFlash),
}
TREES = {"eagle1": {"expand": 3, "max_nodes": 9}, "eagle3": {"expand": 3, "max_nodes": 9}}


class Silent(ToyTarget):
    layers = TargetModel.layers


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama())


@lru_cache
def plain(params: SamplingParams) -> list[list[int]]:
    return [found.tokens for found in Engine(llama()).generate(PROMPTS, params)]


def module(name: str, target: TargetModel) -> Learned:
    """A module with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MAKERS[name][0](target).double()


def options(name: str) -> list[dict[str, Any]]:
    return [{}, TREES[name]] if name in TREES else [{}]


CASES = [(name, own) for name in MAKERS for own in options(name)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("name", "own"), CASES)
def test_tokens_are_those_of_plain_decoding(name: str, own: dict[str, Any], params: SamplingParams) -> None:
    drafter = MAKERS[name][1](module(name, llama()), **own)
    found = Engine(llama(), drafter, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == plain(params)
    assert sum(g.stats.drafted for g in found) > 100


@pytest.mark.parametrize("name", first(1, ["eagle3", *(name for name in MAKERS if name != "eagle3")]))
def test_the_contract_holds(name: str) -> None:
    target = ToyTarget()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        check_drafter(MAKERS[name][1](MAKERS[name][0](target).double()), target)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("name", MAKERS)
def test_each_token_is_drawn_from_the_distribution_it_brings_with_noise_of_its_own(
    name: str, verifier: str
) -> None:
    watch = Watch()
    chains = {"max_nodes": 0} if name.startswith("dflash") and verifier == "block" else {}
    drafter = MAKERS[name][1](module(name, llama()), **chains)
    found = Engine(llama(), drafter, verifier, observer=watch, adaptive=False).generate(PROMPTS, SAMPLED)
    assert [len(g.tokens) for g in found] == [24] * 3
    for step in watch.steps:
        rows = step.draft.distributions or {}
        assert rows.keys() == set(step.draft.parents)
        for node, (token, parent) in enumerate(zip(step.draft.tokens, step.draft.parents, strict=True)):
            word = step.sequence.key.node(Stream.DRAFT, step.root, node)
            assert token == noisy_argmax(rows[parent].log(), word)
    assert sum(len(step.draft) for step in watch.steps) > 100


@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_drafts_as_the_module_did(name: str, tmp_path: Path) -> None:
    made, drafter = module(name, llama()), MAKERS[name][1]
    made.save(tmp_path)
    again = drafter(str(tmp_path))
    assert again.hidden_layers(again.prepare(llama())) == made.hidden_layers
    found = [
        Engine(llama(), own, adaptive=False).generate(PROMPTS, SAMPLED) for own in (drafter(made), again)
    ]
    assert [g.stats.accepted for g in found[0]] == [g.stats.accepted for g in found[1]]
    assert [g.tokens for g in found[1]] == plain(SAMPLED)


@pytest.mark.parametrize("name", MAKERS)
def test_a_long_prompt_is_read_in_pieces(name: str) -> None:
    prompt = [(7 * place + place // 5) % 90 + 1 for place in range(1100)]
    target = Target(tiny_llama(context=2048))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    made = module(name, target)
    found = Engine(target, MAKERS[name][1](made), adaptive=False).generate([prompt, [5]], params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(target).generate([prompt, [5]], params)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Eagle("x", draws="none"), "draws"),
        (lambda: Eagle("x", expand=3), "max_nodes"),
        (lambda: Eagle("x", expand=3, max_nodes=9, draws="independent"), "independent"),
        (lambda: Eagle("x", min_confidence=2.0), "min_confidence"),
        (lambda: DFlash("x", num_speculative_tokens=0), "num_speculative_tokens"),
        (lambda: EagleConfig(version=2), "version"),
        (lambda: EagleConfig(version=1, norm_output=True), "norm_output needs EAGLE-3"),
        (lambda: EagleConfig(version=1, norm_before_residual=True), "norm_before_residual needs EAGLE-3"),
        (lambda: EagleModule.new(EagleConfig(hidden_size=48), llama()), "must be the target's, 32, not 48"),
        (
            lambda: EagleModule.new(EagleConfig(version=1, hidden_size=16), llama()),
            "must be the target's, 32, not 16",
        ),
        (lambda: EagleModule.new(EagleConfig(draft_vocabulary=98), llama()), "at most .*, 97, not 98"),
        (lambda: DFlashConfig(tokens=0), "tokens"),
        (lambda: DFlashConfig(heads=4, kv_heads=3).sized(32), "kv_heads"),
        (lambda: EagleModule.new(EagleConfig(), Silent()), "how many layers"),
        (lambda: Engine(ToyTarget(), DFlash("/nowhere")), "outpace train dflash"),
    ],
)
def test_what_is_not_possible_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        make()
