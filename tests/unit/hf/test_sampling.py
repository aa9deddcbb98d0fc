"""Sampling through generate(): repeatable by torch.manual_seed, and the same under every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, SynthIDTextWatermarkingConfig, TopKLogitsWarper

import outpace
from mtp_folders import write_beside
from outpace.drafters import DRAFTERS
from outpace.drafters.blocks.dflash_module import DFlashModule
from outpace.drafters.eagle.eagle_module import EagleModule
from outpace.drafters.heads.hydra import HydraHeads
from outpace.drafters.heads.medusa import MedusaHeads
from outpace.learned.learned import Learned
from parts import one_in
from unit.hf.tiny import make

WARPERS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    "typical_p": {"typical_p": 0.8},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.01},
    "top_h": {"top_h": 0.5},
    "renormalize": {"top_p": 0.9, "renormalize_logits": True},
    "penalty": {"repetition_penalty": 1.2, "temperature": 0.8, "no_repeat_ngram_size": 3},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)},
}


@pytest.fixture(scope="module")
def none() -> Any:
    return outpace.accelerate(make("llama"), "none")


@pytest.fixture(scope="module")
def lookahead() -> Any:
    return outpace.accelerate(make("llama"), "lookahead:window=3,ngram=3,guesses=3", adaptive=False)


def sample(model: Any, seed: int = 5, **options: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    tokens: list[list[int]] = model.generate(**{"do_sample": True, "max_new_tokens": 30} | options).tolist()
    return tokens


@pytest.mark.parametrize("name", one_in(2, WARPERS))
def test_tokens_equal_those_of_no_drafter(name: str, none: Any, lookahead: Any, batch: Any) -> None:
    expected = sample(none, **batch, **WARPERS[name])
    assert sample(lookahead, **batch, **WARPERS[name]) == expected
    assert sample(none, seed=6, **batch, **WARPERS[name]) != expected


def test_num_return_sequences(none: Any, lookahead: Any, batch: Any) -> None:
    options = {"num_return_sequences": 3, "repetition_penalty": 1.1, "encoder_no_repeat_ngram_size": 2}
    expected = sample(none, **batch, **options)
    assert sample(lookahead, **batch, **options) == expected
    assert len({tuple(row) for row in expected}) == 9  # each row has a seed of its own
    prompts = [row[:15] for row in expected]
    assert prompts == [row for row in batch["input_ids"].tolist() for _ in range(3)]


@pytest.mark.parametrize("name", sorted(set(WARPERS) - {"synthid"}))  # its processor counts its calls
def test_scores_are_those_stock_draws_from(name: str, none: Any, lookahead: Any, one: Any) -> None:
    """For any token, teacher-forced through the stock processors, the scores are the same."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    torch.manual_seed(3)
    options = {"do_sample": True, "max_new_tokens": 12} | WARPERS[name]
    found = lookahead.generate(**one, **options, **asked)
    stock = make("llama")
    config, _ = stock._prepare_generation_config(None, **options)
    stock._prepare_special_tokens(config, device="cpu")
    prompt = one["input_ids"]
    processors = stock._get_logits_processor(config, prompt.shape[1], prompt, device="cpu")
    for step, scores in enumerate(found.scores):
        prefix = found.sequences[:, : prompt.shape[1] + step]
        raw = stock(prefix).logits[:, -1].float()
        torch.testing.assert_close(found.logits[step], raw)
        torch.testing.assert_close(scores, processors(prefix, raw))
        assert torch.isfinite(scores[0, found.sequences[0, prefix.shape[1]]])


def test_recording_changes_no_token(lookahead: Any, one: Any) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for name, options in WARPERS.items():
        torch.manual_seed(2)
        options = {"do_sample": True, "max_new_tokens": 12} | options
        if name != "synthid":
            found = lookahead.generate(**one, **options, **asked).sequences.tolist()
            assert sample(lookahead, 2, **one, **options) == found


def test_the_distribution_is_the_stock_one(none: Any, batch: Any) -> None:
    """Frequencies of the first token against the stock scores (chi-square, 4 degrees of freedom)."""
    prompt = batch["input_ids"][2:]
    rows = sample(none, input_ids=prompt, num_return_sequences=1500, max_new_tokens=1, top_k=5)
    asked = {"return_dict_in_generate": True, "output_scores": True}
    scores = make("llama").generate(prompt, do_sample=True, top_k=5, max_new_tokens=1, **asked).scores[0][0]
    expected = 1500 * scores.softmax(dim=-1)
    counts = torch.bincount(torch.tensor([row[-1] for row in rows]), minlength=259)
    likely = expected > 0
    assert int(likely.sum()) == 5 and int(counts[~likely].sum()) == 0
    assert float(((counts - expected)[likely] ** 2 / expected[likely]).sum()) < 30


def test_greedy_leaves_the_generator_alone(lookahead: Any, one: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    lookahead.generate(**one, max_new_tokens=5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_warper_of_the_callers_own(none: Any, lookahead: Any, batch: Any) -> None:
    for warper in (TopKLogitsWarper(3), TopKLogitsWarper(2, filter_value=-5.0)):
        options = {"logits_processor": LogitsProcessorList([warper]), "top_p": 0.9}
        expected = sample(none, **batch, **options)
        assert sample(lookahead, **batch, **options) == expected


def test_a_processor_that_a_batch_has_used_before(none: Any, lookahead: Any, batch: Any) -> None:
    """SynthID's keeps a state for each row of the last batch it saw."""
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
    processor = config.construct_processor(259, "cpu")
    processor(batch["input_ids"], torch.zeros(3, 259))
    for model in (none, lookahead):
        found = sample(model, **batch, logits_processor=LogitsProcessorList([processor]))
        assert found == sample(none, **batch, watermarking_config=config)


OF_OPTIONS = {
    "either": "either:(suffix)+(prompt_lookup)",
    "combined": "combined:(lookahead)+(prompt_lookup)",
}


LEARNED = {cls.method: cls for cls in (DFlashModule, EagleModule, HydraHeads, MedusaHeads)}


def untrained(cls: type[Learned], model: Any, folder: Path) -> str:
    """The spec of an untrained learned drafter."""
    torch.manual_seed(0)
    cls.new(cls.config_type(), outpace.Target(model)).save(folder)
    return f"{cls.method}:path={folder}"


@pytest.mark.parametrize("name", one_in(2, sorted(set(DRAFTERS) - {"draft_model", "assistant", "peagle"})))
def test_every_drafter_by_its_spec(name: str, none: Any, batch: Any, tmp_path: Path) -> None:
    model = make("llama")
    if name in LEARNED:
        spec = untrained(LEARNED[name], model, tmp_path / name)
    elif name == "mtp":
        spec = f"mtp:path={write_beside(tmp_path / name, model, batch['input_ids'].tolist())}"
    else:
        spec = OF_OPTIONS.get(name, name)
    check_spec(spec, model, none, batch)


def check_spec(spec: str, model: Any, none: Any, batch: Any) -> None:
    """Check that greedy and sampled tokens under a drafter are those without one."""
    greedy = model.generate(**batch, max_new_tokens=20)
    outpace.accelerate(model, spec)
    assert model.generate(**batch, max_new_tokens=20).tolist() == greedy.tolist()
    assert sample(model, **batch) == sample(none, **batch)


def test_a_draft_model(none: Any, batch: Any) -> None:
    from outpace.drafters import DRAFTERS

    model = outpace.accelerate(make("llama"), DRAFTERS["draft_model"](make("llama"), 3), adaptive=False)
    assert sample(model, **batch) == sample(none, **batch)


def test_rejection_is_repeatable(batch: Any, none: Any) -> None:
    from outpace.drafters import DRAFTERS

    model = make("llama")
    outpace.accelerate(model, DRAFTERS["draft_model"](make("llama"), 3), verifier="rejection")
    first = sample(model, **batch)
    assert sample(model, **batch) == first
    assert sample(model, seed=6, **batch) != first
