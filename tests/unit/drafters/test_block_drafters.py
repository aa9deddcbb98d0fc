"""DFlash: slots, refusals, and places without drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashConfig, DFlashModule
from outpace.engine.engine import Engine
from outpace.learned.folder import read_weights, write_folder
from outpace.targets import Target, TargetModel
from outpace.tree import depths, is_chain
from watching import Watch

TARGET = Target(tiny_llama(vocabulary=12))
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True)


def module(target: TargetModel = TARGET) -> DFlashModule:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return DFlashModule.new(DFlashConfig(tokens=4, layers=(2, 1)), target).double()


def test_a_sequence_that_leaves_gives_its_slot_back() -> None:
    engine = Engine(TARGET, DFlash(module()), "rejection")
    engine.generate(PROMPTS, SAMPLED)
    first, second = engine.add(PROMPTS[1], SAMPLED), engine.add(PROMPTS[2], SAMPLED)
    engine.step()
    engine.remove(first)
    engine.step()
    engine.remove(second)
    assert len(engine._draftings[None].shared.cache._cache) == 0


def test_fewer_tokens_are_the_first_of_the_block() -> None:
    made, drafts = module(), []
    for most in (None, 2):
        watch = Watch()
        engine = Engine(TARGET, DFlash(made, most), "rejection", observer=watch)
        engine.add(PROMPTS[2], SAMPLED)
        while not watch.steps or not len(watch.steps[-1].draft):  # the first step may be plain
            engine.step()
        drafts.append(watch.steps[-1].draft)
    assert len(drafts[0]) == 4 and len(drafts[1]) == 2
    assert list(drafts[0].tokens[:2]) == list(drafts[1].tokens)


def state_of(drafter: DFlash) -> Any:
    """The sampled sequence of an engine with this drafter, after a step, and the drafter's state of it."""
    engine = Engine(TARGET, drafter, adaptive=False)
    sequence = engine.add(PROMPTS[1], SAMPLED)
    engine.step()
    return sequence, engine._batch.active[0].state


def test_nothing_is_drafted_that_could_not_be_taken() -> None:
    drafter = DFlash(module(), max_nodes=0)
    sequence, state = state_of(drafter)
    for sequence.budget, room, expected in ((3, 9, 3), (None, 3, 2), (2, 2, 1), (None, 1, 0), (None, 9, 4)):
        sequence.limit = sequence.output_length + room
        assert len(drafter.propose([state])[0]) == expected


def test_a_tree_has_the_nodes_and_the_depth_that_may_be_taken() -> None:
    drafter = DFlash(module(), max_nodes=9)
    sequence, state = state_of(drafter)
    whole = drafter.propose([state])[0]
    assert len(whole) == 9 and not is_chain(whole.parents)
    for sequence.budget, room, most, deepest in (
        (3, 9, 3, 3),
        (None, 3, 9, 2),
        (5, 2, 5, 1),
        (None, 1, 0, 0),
    ):
        sequence.limit = sequence.output_length + room
        draft = drafter.propose([state])[0]
        assert len(draft) == most and max(depths(draft.parents), default=-1) < deepest
        if deepest > 2:
            assert draft.tokens == whole.tokens[:most]


def test_sampled_drafts_for_rejection_are_chains_with_distributions() -> None:
    """In the same batch a greedy draft is a tree: point masses."""
    watch = Watch()
    engine = Engine(TARGET, DFlash(module(), max_nodes=9), "rejection", adaptive=False, observer=watch)
    sampled = engine.add(PROMPTS[1], SAMPLED)
    engine.add(PROMPTS[2], replace(SAMPLED, temperature=0.0))
    while engine.sequences:
        engine.step()
    drafts = [(step.sequence is sampled, step.draft) for step in watch.steps if len(step.draft) > 2]
    for own in (True, False):
        found = [draft for which, draft in drafts if which == own]
        assert len(found) > 2
        assert all(is_chain(draft.parents) == own for draft in found)
        assert all((draft.distributions is not None) == own for draft in found)
        assert all((draft.chances is None) == own for draft in found)


def test_verifiers_of_chains_take_chains_alone() -> None:
    assert DFlash(module()).trees and not DFlash(module(), max_nodes=0).trees
    with pytest.raises(OutpaceError, match="max_nodes must be at least 0"):
        DFlash(module(), max_nodes=-1)


def test_a_target_in_bfloat16_is_drafted_for_in_bfloat16(tmp_path: Path) -> None:
    target = Target(tiny_llama(vocabulary=12, dtype=torch.bfloat16))
    module(target).float().save(tmp_path)
    drafter = DFlash(str(tmp_path))
    assert {weight.dtype for weight in drafter.prepare(target).module.parameters()} == {torch.bfloat16}
    for verifier in ("match", "rejection"):
        found = Engine(target, drafter, verifier, adaptive=False).generate(PROMPTS, SAMPLED)
        assert [len(g.tokens) for g in found] == [20] * 3
        assert sum(g.stats.accepted for g in found) > 3


def test_layers_that_the_target_has_not_are_refused(tmp_path: Path) -> None:
    deep = Target(tiny_llama(vocabulary=12, layers=5))
    DFlashModule.new(DFlashConfig(layers=(1, 4)), deep).save(tmp_path)
    with pytest.raises(OutpaceError, match=r"dflash: .* layers \[1, 4\], but this one has 2; .* train"):
        Engine(TARGET, DFlash(str(tmp_path)))
    for layers in ((3,), (-2, 1)):
        with pytest.raises(OutpaceError, match="give layers from 0 to 2"):
            DFlashModule.new(DFlashConfig(layers=layers), TARGET)
    assert DFlashModule.new(DFlashConfig(layers=(0, 2, -1)), TARGET).hidden_layers == (0, 2, -1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": 48}, "hidden_size must be the target's, 32, not 48"),
        ({"hidden_size": -1}, "-1"),
        ({"heads": "x"}, "config.json is not one of dflash"),
        ({"rope": 3}, "config.json is not one of dflash"),
        ({"layers": 1}, "config.json is not one of dflash"),
        ({"intermediate_size": -8}, "config.json is not one of dflash: .*negative"),
        ({"intermediate_size": 8}, r"tensor 'layers.0.mlp.gate_proj.weight' has shape \[88, 32\]"),
        ({"tokens": 0}, "dflash: tokens must be at least 1"),
    ],
)
def test_a_damaged_config_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    """A wrong value is refused though the digest is right."""
    module().save(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    del described["digest"]
    described["config"] |= change
    write_folder(tmp_path, described, read_weights(tmp_path))
    with pytest.raises(OutpaceError, match=match):
        DFlash(str(tmp_path)).prepare(TARGET)


def test_sizes_that_make_no_layer_are_refused() -> None:
    with pytest.raises(OutpaceError, match="leave it out"):
        DFlashModule.new(DFlashConfig(hidden_size=48), TARGET)
    for name in ("hidden_size", "intermediate_size", "head_size"):
        with pytest.raises(OutpaceError, match=f"{name} must be at least 1, or 0"):
            DFlashConfig(**{name: -4}).sized(32)
