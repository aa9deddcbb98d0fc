"""Self-speculative decoding: the target without some layers drafts in the target's own cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from models import tiny_llama
from outpace.cache import KVCache
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters import load_drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.drafters.models.draft_model import DraftModel
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget
from outpace.targets.batch import Batch
from outpace.testing import ToyTarget, check_drafter
from outpace_lab.drafters.cascade import Cascade
from outpace_lab.drafters.layers.self_speculative import SelfSpeculative
from parts import in_turn

PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6], [*range(1, 12), *range(1, 12)]]
LONG = SamplingParams(max_new_tokens=41, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=41, temperature=0.8, seed=3, ignore_eos=True)


@pytest.mark.parametrize(
    "drafter",
    [
        SelfSpeculative("1"),
        SelfSpeculative((0,), 2, "independent"),
        SelfSpeculative("0", 7, "greedy"),
        SelfSpeculative("1", 6, min_confidence=0.5),
    ],
)
@pytest.mark.slow
def test_it_keeps_the_contract(drafter: SelfSpeculative) -> None:
    check_drafter(drafter)


def half_still() -> LlamaForCausalLM:
    """A tiny Llama whose layers 1 and 3 do nothing: without them it is still itself."""
    model = tiny_llama(vocabulary=40, layers=4)
    with torch.no_grad():
        for layer in (1, 3):
            block = model.model.layers[layer]
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("params", [LONG, SAMPLED])
def test_layers_that_do_nothing_may_be_skipped(params: SamplingParams) -> None:
    # Were one row of its draft wrong, or one draw, some draft would be rejected.
    model = half_still()
    plain = Engine(model).generate(PROMPTS, params)
    for count in (1, 2, 5):
        found = Engine(model, SelfSpeculative("1+3", count), adaptive=False).generate(PROMPTS, params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        for generation in found:
            assert generation.stats.accepted == generation.stats.drafted
            # One prompt is a root alone, so no prompt's last rows are fed with its root, in a plain step.
            assert generation.stats.steps == -(-41 // (count + 1))


def test_a_prompt_that_goes_in_with_the_first_step_is_not_drafted_from() -> None:
    (found,) = Engine(half_still(), SelfSpeculative("1+3", 3), adaptive=False).generate(PROMPTS[1:2], LONG)
    assert found.stats.accepted == found.stats.drafted
    assert found.stats.steps == 1 + 40 // 4


@pytest.mark.parametrize(("params", "static"), in_turn([LONG, SAMPLED], [False, True]))
def test_a_tiny_llama_drafts_for_itself(params: SamplingParams, static: bool) -> None:
    target = CausalTarget(tiny_llama(vocabulary=40, layers=3), static=static)
    plain = Engine(target, slots=4, length=64).generate(PROMPTS, params)
    found = Engine(target, SelfSpeculative("1"), slots=4, length=64, adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.stats.accepted for g in found) > 0


def test_it_reads_the_rows_that_all_layers_made() -> None:
    target = ToyTarget()
    part = target.some_layers([1])
    cache = target.new_cache()
    slot = cache.allocate()
    target.forward(cache, Batch.of({slot: [3, 9, 2]}))
    cache.keep({slot: range(3)})
    before = [rows.clone() for rows in cache.rows(1, slot)]
    own = part.new_cache()
    mine = own.allocate()
    part.forward(own, Batch.of({mine: [3, 9, 2]}))
    own.keep({mine: range(3)})
    with cache.provisional():
        found = part.forward(cache, Batch.of({slot: [7]})).logits
        cache.keep({slot: [0]})
    alone = part.forward(own, Batch.of({mine: [7]})).logits
    assert found is not None and alone is not None and not torch.equal(found, alone)
    assert cache.length(slot) == 3
    assert all(torch.equal(old, new) for old, new in zip(before, cache.rows(1, slot), strict=True))


def test_nothing_of_a_draft_stays_in_the_cache() -> None:
    target = ToyTarget()
    engine = Engine(target, SelfSpeculative("1", 6), adaptive=False)
    sequence = engine.add([3, 9, 2, 7], LONG)
    engine.step()
    (active,) = engine._batch.active
    (draft,) = engine.drafter.propose([active.state])
    assert len(draft) == 6
    cache = engine._batch.cache
    assert isinstance(cache, KVCache)
    length = cache.length(active.slot)
    assert length == len(sequence.tokens) - 1
    assert all(float(buffer[:, 0, :, length:].abs().sum()) == 0 for buffer in cache._lanes[0].buffers)


def test_low_confidence_ends_a_chain() -> None:
    found = [
        Engine(ToyTarget(), SelfSpeculative("1", 6, min_confidence=least), adaptive=False).generate(
            PROMPTS, LONG
        )
        for least in (0.0, 0.5, 1.0)
    ]
    drafted = [sum(g.stats.drafted for g in generations) for generations in found]
    rates = [sum(g.stats.accepted for g in found[i]) / drafted[i] for i in (0, 1)]
    assert drafted[0] > drafted[1] > drafted[2] == 0
    assert rates[1] > rates[0]


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_its_distributions_serve_the_verifiers_that_weigh(verifier: str) -> None:
    found = Engine(ToyTarget(), SelfSpeculative("1"), verifier, adaptive=False).generate(PROMPTS, SAMPLED)
    assert sum(g.stats.accepted for g in found) > 0


def test_it_rides_with_others() -> None:
    drafter = Combined((SelfSpeculative("1", 3), PromptLookup()))
    plain = Engine(ToyTarget()).generate(PROMPTS, SAMPLED)
    found = Engine(ToyTarget(), drafter, adaptive=False).generate(PROMPTS, SAMPLED)
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.stats.extra["self_speculative_accepted"] for g in found) > 0


def test_it_does_not_draft_for_a_draft_model() -> None:
    cascade = Cascade(DraftModel(ToyTarget(surprise=0.7)), SelfSpeculative("1"))
    with pytest.raises(OutpaceError, match="cannot draft for a draft model"):
        Engine(ToyTarget(), cascade, adaptive=False).generate(PROMPTS, LONG)


def test_a_file_names_the_layers(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps({"skip": [1, 2], "layers": 4}))
    drafter = load_drafter(f"self_speculative:skip={file},num_speculative_tokens=4")
    assert isinstance(drafter, SelfSpeculative)
    assert drafter.skipped(4) == (1, 2)
    with pytest.raises(OutpaceError, match="for a target of 4 layers, but this one has 5"):
        drafter.skipped(5)
    file.write_text("{}")
    with pytest.raises(OutpaceError, match="contains no layers to skip"):
        drafter.skipped(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ""}, "name the layers"),
        ({"skip": "0+1"}, "at least one must stay"),
        ({"skip": "2"}, "layers 0 to 1"),
        ({"skip": "-1"}, "layers 0 to 1"),
        ({"skip": "1,2"}, "not '1,2'"),
        ({"skip": "1", "num_speculative_tokens": 0}, "at least 1"),
        ({"skip": "1", "draws": "wild"}, "draws must be"),
        ({"skip": "1", "min_confidence": 1.5}, "between 0 and 1"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        Engine(ToyTarget(), SelfSpeculative(**options))  # type: ignore[arg-type]


def test_other_families_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel .* plain stack of layers"):
        Engine(GPT2LMHeadModel(config).eval(), SelfSpeculative("1"))
