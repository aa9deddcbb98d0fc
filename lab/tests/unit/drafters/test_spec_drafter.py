"""SpecDec's drafter: state, slots, sources, and places without drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models import tiny_llama
from outpace.core import Draft, OutpaceError, SamplingParams
from outpace.drafters.models.draft_model import DraftModel
from outpace.drafters.support.blocks import BlockModule
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace_lab.drafters.cascade import Cascade
from outpace_lab.drafters.parallel_tokens import LookAhead, LookAheadConfig, ParallelTokens
from outpace_lab.drafters.spec_drafter import SpecDrafter, SpecDrafterConfig, SpecDrafterModule
from outpace_lab.train.data import Document
from outpace_lab.train.reading import read_batch
from watching import Watch
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES, START

TARGET = Target(tiny_llama(vocabulary=12))
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
DRAFTERS: dict[str, Any] = {"spec_drafter": SpecDrafter}


def module(name: str, target: TargetModel = TARGET) -> BlockModule:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return SpecDrafterModule.new(SpecDrafterConfig(tokens=4, hidden_size=24), target).double()


def same(found: Draft, expected: Draft) -> bool:
    """True if two drafts have the same tokens, drawn from the same distributions."""
    rows = found.distributions or {}, expected.distributions or {}
    return (
        list(found.tokens) == list(expected.tokens)
        and rows[0].keys() == rows[1].keys()
        and all(torch.allclose(rows[0][node], rows[1][node], atol=1e-6) for node in rows[0])
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sequence_that_leaves_gives_its_slot_back(name: str) -> None:
    engine = Engine(TARGET, DRAFTERS[name](module(name)), "rejection")
    engine.generate(PROMPTS, SAMPLED)
    first, second = engine.add(PROMPTS[1], SAMPLED), engine.add(PROMPTS[2], SAMPLED)
    engine.step()
    engine.remove(first)
    engine.step()
    engine.remove(second)
    assert len(engine._draftings[None].shared.cache._cache) == 0


@pytest.mark.parametrize("changed", [[], [4], [4, 4, 4], [4, 8, 4, 8, 1, 2, 3]])
@pytest.mark.parametrize("kept", [1, 6, 9])
def test_a_text_that_was_changed_is_read_from_there(kept: int, changed: list[int]) -> None:
    drafter = SpecDrafter(module("spec_drafter"))
    engine = Engine(TARGET, drafter, "rejection")
    sequence = engine.add(PROMPTS[2], SAMPLED)
    while len(sequence.tokens) < 12:
        engine.step()
    state = engine._batch.active[0].state
    drafter.propose([state])
    del sequence.tokens[kept:]
    sequence.tokens += changed
    assert drafter.revise(state, kept)
    (found,) = drafter.propose([state])
    (fresh,) = drafter.propose([drafter.start(sequence, engine._draftings[None].shared)])
    assert len(found) == 4 and same(found, fresh)


def test_a_spec_drafter_drafts_for_a_draft_model() -> None:
    small = Target(tiny_llama(vocabulary=12, layers=1, seed=3))
    drafter = Cascade(DraftModel(small, num_speculative_tokens=5), SpecDrafter(module("spec_drafter", small)))
    found = Engine(TARGET, drafter, adaptive=False).generate(PROMPTS, SAMPLED)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(TARGET).generate(PROMPTS, SAMPLED)]
    assert sum(g.stats.extra["inner_accepted"] for g in found) > 5


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_spec_drafter_reads_sources_as_in_training(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is the block that training fills after the same place of the same text and source."""
    monkeypatch.setattr("outpace_lab.drafters.spec_drafter._CHUNK", chunk)
    family = SEQ2SEQ_FAMILIES["bart"]
    target = Target(family.build())
    made, sources = module("spec_drafter", target), family.sources((9, 3))
    drafter = SpecDrafter(made)
    engine = Engine(target, drafter, adaptive=False)
    params = SamplingParams(12, 1.0, seed=5)
    sequences = [engine.add([START, 7, 8, 9, 10], params, source=source) for source in sources]
    engine.step()
    states = [active.state for active in engine._batch.active]
    with torch.inference_mode():
        found = made.logits(drafter.fill(states))
    texts = [
        Document(tuple(s.tokens), 5, source=tuple(own)) for s, own in zip(sequences, sources, strict=True)
    ]
    for text, logits in zip(texts, found, strict=True):
        for beside in texts:  # longer or shorter, with more or fewer pads
            batch = read_batch(target, [[text], [beside]], made.hidden_layers)
            anchors = torch.tensor([[len(text.tokens) - 1], [0]])
            torch.testing.assert_close(made.logits(made.blocks(batch, anchors))[0, 0], logits)
    swapped = replace(texts[0], source=texts[1].source)
    batch = read_batch(target, [[swapped]], made.hidden_layers)
    anchors = torch.tensor([[len(swapped.tokens) - 1]])
    assert not torch.allclose(made.logits(made.blocks(batch, anchors))[0, 0], found[0], atol=1e-3)


@pytest.mark.parametrize("name", DRAFTERS)
def test_fewer_tokens_are_the_first_of_the_block(name: str) -> None:
    made, drafts = module(name), []
    for most in (None, 2):
        watch = Watch()
        engine = Engine(TARGET, DRAFTERS[name](made, most), "rejection", observer=watch)
        engine.add(PROMPTS[2], SAMPLED)
        while not watch.steps or not len(watch.steps[-1].draft):  # the first step may be plain
            engine.step()
        drafts.append(watch.steps[-1].draft)
    assert len(drafts[0]) == 4 and len(drafts[1]) == 2
    assert list(drafts[0].tokens[:2]) == list(drafts[1].tokens)


@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_is_drafted_that_could_not_be_taken(name: str) -> None:
    chains = {"max_nodes": 0} if name == "spec_drafter" else {}
    drafter = DRAFTERS[name](module(name), **chains)
    engine = Engine(TARGET, drafter, adaptive=False)
    sequence = engine.add(PROMPTS[1], SAMPLED)
    engine.step()
    state = engine._batch.active[0].state
    for sequence.budget, room, expected in ((3, 9, 3), (None, 3, 2), (2, 2, 1), (None, 1, 0), (None, 9, 4)):
        sequence.limit = sequence.output_length + room
        assert len(drafter.propose([state])[0]) == expected


@pytest.mark.parametrize("name", [*DRAFTERS, "parallel_tokens"])
def test_a_target_in_bfloat16_is_drafted_for_in_bfloat16(name: str, tmp_path: Path) -> None:
    target = Target(tiny_llama(vocabulary=12, dtype=torch.bfloat16))
    if name == "parallel_tokens":
        LookAhead.new(LookAheadConfig(3), target).save(tmp_path)
        drafter: Any = ParallelTokens(str(tmp_path))
    else:
        module(name, target).float().save(tmp_path)
        drafter = DRAFTERS[name](str(tmp_path))
        assert {weight.dtype for weight in drafter.prepare(target).module.parameters()} == {torch.bfloat16}
    for verifier in ("match", "rejection"):
        found = Engine(target, drafter, verifier, adaptive=False).generate(PROMPTS, SAMPLED)
        assert [len(g.tokens) for g in found] == [20] * 3
        assert sum(g.stats.accepted for g in found) > 3


def test_a_spec_drafter_fits_targets_of_any_size_with_its_vocabulary(tmp_path: Path) -> None:
    module("spec_drafter").save(tmp_path)
    other = Target(_wider())
    found = Engine(other, SpecDrafter(str(tmp_path)), adaptive=False).generate(PROMPTS, SAMPLED)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(other).generate(PROMPTS, SAMPLED)]
    with pytest.raises(OutpaceError, match=r"a vocabulary of 12, but this target, .*, has 13"):
        SpecDrafter(str(tmp_path)).prepare(Target(tiny_llama(vocabulary=13)))


def _wider() -> Any:
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).double().eval()


def test_sizes_that_make_no_layer_are_refused() -> None:
    for name in ("hidden_size", "intermediate_size", "head_size"):
        with pytest.raises(OutpaceError, match=f"{name} must be at least 1, or 0"):
            SpecDrafterModule.new(SpecDrafterConfig(**{name: -4}), TARGET)
