"""Greedy tokens, scores and caches equal those of the stock generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    WatermarkingConfig,
)

import outpace
from outpace.targets.inputs.config import CACHE
from parts import in_turn
from unit.hf.tiny import BOS, EOS, NEVER, PAD, Forwards, make

E, T, N = ord("e"), ord("t"), ord("n")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"max_new_tokens": 80},
    "one token": {"max_new_tokens": 1},
    "max_length": {"max_new_tokens": None, "max_length": 31},
    "default length": {"max_new_tokens": None},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[N, N], [T], [E, ord("s"), E]]},
    "min_new_tokens": {"min_new_tokens": 30},
    "min_length": {"min_length": 35},
    "forced_eos": {"forced_eos_token_id": EOS, "max_new_tokens": 12},
    "forced_bos": {"forced_bos_token_id": BOS},
    "suppress_tokens": {"suppress_tokens": [E, EOS]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [E, N, T, ord("h"), ord("s")]},
    "sequence_bias": {"sequence_bias": {(E, T): 9.0, (N,): -3.0}},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.2)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "renormalize_logits": {"renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "two eos": {"eos_token_id": [EOS, N]},
    "other eos": {"eos_token_id": E},
    "negative eos": {"eos_token_id": -1},
    "other pad": {"pad_token_id": BOS},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 4},
    "many": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9, "eos_token_id": N},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(("name", "plain"), in_turn(OPTIONS, ["llama", "gpt2"]), indirect=["plain"])
def test_tokens_equal_stock(name: str, plain: Any, fast: Any, batch: dict[str, Any]) -> None:
    options = {"max_new_tokens": 48} | OPTIONS[name]
    expected = plain.generate(**batch, **options)
    found = fast.generate(**batch, **options)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_it_is_accelerated(plain: Any, fast: Any, forwards: Forwards, one: dict[str, Any]) -> None:
    """Fewer forwards than tokens: the test of tokens above would pass for a wrapper that does nothing."""
    options = {"max_new_tokens": 48, "eos_token_id": NEVER}
    assert fast.generate(**one, **options).tolist() == plain.generate(**one, **options).tolist()
    assert forwards.count < 40


def test_a_batch_without_attention_mask(plain: Any, fast: Any, batch: dict[str, Any]) -> None:
    """transformers takes the mask from the pad tokens."""
    expected = plain.generate(batch["input_ids"], max_new_tokens=20)
    assert fast.generate(batch["input_ids"], max_new_tokens=20).tolist() == expected.tolist()


def test_generation_config(plain: Any, fast: Any, batch: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=30, repetition_penalty=1.4, eos_token_id=N, pad_token_id=PAD)
    expected = plain.generate(**batch, generation_config=config)
    assert fast.generate(**batch, generation_config=config).tolist() == expected.tolist()
    assert config.eos_token_id == N


def test_the_models_own_generation_config(batch: dict[str, Any]) -> None:
    model = make("llama")
    model.generation_config.update(eos_token_id=N, repetition_penalty=1.4, max_new_tokens=25)
    expected = model.generate(**batch)
    assert outpace.accelerate(model).generate(**batch).tolist() == expected.tolist()


def test_without_any_prompt(plain: Any, fast: Any) -> None:
    assert fast.generate(max_new_tokens=9).tolist() == plain.generate(max_new_tokens=9).tolist()


class Watch(LogitsProcessor):
    """Notes what it is shown, and writes into its scores."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores)
        assert scores.dtype == torch.float32
        self.seen.extend(tuple(row.tolist()) for row in input_ids)
        scores[:, E] -= 1.5 * (input_ids.shape[1] % 3)
        return scores


def test_processors_see_each_row_as_stock_shows_it(plain: Any, fast: Any, batch: dict[str, Any]) -> None:
    stock, ours = Watch(), Watch()
    options = {"max_new_tokens": 20, "eos_token_id": NEVER, "pad_token_id": PAD}
    expected = plain.generate(**batch, **options, logits_processor=LogitsProcessorList([stock]))
    found = fast.generate(**batch, **options, logits_processor=LogitsProcessorList([ours]))
    assert found.tolist() == expected.tolist()
    assert sorted(ours.seen) == sorted(stock.seen)  # once for each token, pads included


def test_a_processor_is_not_called_behind_the_end(fast: Any, batch: dict[str, Any]) -> None:
    watch = Watch()
    processors = LogitsProcessorList([watch])
    found = fast.generate(**batch, max_new_tokens=20, eos_token_id=[E, N], logits_processor=processors)
    prompt = batch["input_ids"].shape[1]
    tokens = sum(int((row[prompt:] != PAD).sum()) for row in found)
    assert len(watch.seen) == tokens < 60


def test_prefix_allowed_tokens_fn_gets_its_rows_batch_id(
    plain: Any, fast: Any, batch: dict[str, Any]
) -> None:
    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        assert sent.tolist()[: batch["input_ids"].shape[1]] == batch["input_ids"][row].tolist()
        return [E + row, T + row, N + (len(sent) + row) % 3]

    options: dict[str, Any] = {"max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed}
    expected = plain.generate(**batch, **options)
    assert len({tuple(row) for row in expected[:, 15:].tolist()}) == 3
    assert fast.generate(**batch, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{"eos_token_id": N}, {"repetition_penalty": 1.3, "eos_token_id": N}])
def test_scores_and_logits_equal_stock(
    options: dict[str, Any], plain: Any, fast: Any, batch: dict[str, Any]
) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = plain.generate(**batch, **options, **asked, max_new_tokens=40)
    found = fast.generate(**batch, **options, **asked, max_new_tokens=40)
    assert type(found) is type(expected)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.attentions is None and found.hidden_states is None
    running = torch.ones(3, dtype=torch.bool)
    prompt = batch["input_ids"].shape[1]
    for name in ("scores", "logits"):
        ours, stock = found[name], expected[name]
        assert len(ours) == len(stock) == found.sequences.shape[1] - prompt
        running[:] = True
        for step, (a, b) in enumerate(zip(ours, stock, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a[running], b[running])
            assert not a[~running].any()  # documented: zeros where a row has ended
            running &= found.sequences[:, prompt + step] != N
    assert not running.all()


def test_logits_are_raw_under_a_processor_that_writes_into_its_scores(fast: Any, one: Any) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found = fast.generate(**one, **asked, max_new_tokens=5, logits_processor=LogitsProcessorList([Watch()]))
    for step, (scores, logits) in enumerate(zip(found.scores, found.logits, strict=True)):
        bias = 1.5 * ((one["input_ids"].shape[1] + step) % 3)
        torch.testing.assert_close(logits[:, E] - scores[:, E], torch.tensor([bias]))


def test_only_what_was_asked_for_is_recorded(fast: Any, one: dict[str, Any]) -> None:
    found = fast.generate(**one, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    assert found.scores is None and len(found.logits) == 4
    assert isinstance(fast.generate(**one, max_new_tokens=4, output_scores=True), torch.Tensor)


def test_caches_equal_stock_and_go_on(plain: Any, fast: Any, batch: dict[str, Any]) -> None:
    options = {"max_new_tokens": 12, "eos_token_id": NEVER, "return_dict_in_generate": True}
    expected, found = plain.generate(**batch, **options), fast.generate(**batch, **options)
    cache, stock = found[CACHE], expected[CACHE]
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == stock.get_seq_length() == found.sequences.shape[1] - 1
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 12, dtype=torch.long)], dim=1)
    real = mask[:, None, :-1, None].bool()
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(a * real, b * real)
    last = found.sequences[:, -1:]
    positions = mask.sum(dim=1, keepdim=True) - 1
    with torch.no_grad():
        a, b = (
            plain(input_ids=last, attention_mask=mask, position_ids=positions, **{CACHE: c}).logits
            for c in (cache, stock)
        )
    torch.testing.assert_close(a, b)


def test_caches_of_rows_that_ended(fast: Any, batch: dict[str, Any]) -> None:
    found = fast.generate(**batch, max_new_tokens=40, eos_token_id=N, return_dict_in_generate=True)
    ends = [(row != PAD).nonzero()[-1].item() for row in found.sequences]
    assert len(set(ends)) > 1
    for layer in found[CACHE].layers:
        assert layer.keys.shape[2] == found.sequences.shape[1] - 1
        for row, end in enumerate(ends):
            pads = int((batch["attention_mask"][row] == 0).sum())
            used = layer.keys[row].abs().sum(dim=(0, 2)) > 0
            assert used.nonzero().squeeze(1).tolist() == list(range(pads, int(end)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_an_empty_cache_of_the_callers_is_filled(fast: Any, one: dict[str, Any], name: str) -> None:
    cache = DynamicCache(config=fast.config)
    found = fast.generate(**one, max_new_tokens=6, **{name: cache})
    assert cache.get_seq_length() == found.shape[1] - 1


def test_no_cache_is_given_back_where_none_is_used(fast: Any, one: dict[str, Any]) -> None:
    found = fast.generate(**one, max_new_tokens=4, return_dict_in_generate=True, use_cache=False)
    assert found.get(CACHE) is None


def test_generation_ends_at_the_context(caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama", max_position_embeddings=40)
    prompt = torch.tensor([[E, T, N] * 5])
    expected = model.generate(prompt, max_new_tokens=60, eos_token_id=NEVER)
    outpace.accelerate(model)
    found = model.generate(prompt, max_new_tokens=60, eos_token_id=NEVER)
    assert found.tolist() == expected[:, :40].tolist()
    assert "context of 40" in caplog.text
    caplog.clear()
    assert model.generate(prompt, max_new_tokens=25, eos_token_id=NEVER).shape[1] == 40
    assert "context" not in caplog.text
    with pytest.raises(outpace.OutpaceError, match="fills the model's context of 40"):
        model.generate(torch.tensor([[E] * 40]), max_new_tokens=4)


def test_rows_end_at_the_context_together(batch: dict[str, Any]) -> None:
    model = make("llama", max_position_embeddings=30)
    expected = model.generate(**batch, max_new_tokens=60, eos_token_id=NEVER)
    found = outpace.accelerate(model).generate(**batch, max_new_tokens=60, eos_token_id=NEVER)
    assert found.shape == (3, 30)
    assert found.tolist() == expected[:, :30].tolist()


def test_pads_take_no_room_in_the_context() -> None:
    model = make("llama", max_position_embeddings=30)
    prompt = torch.tensor([[PAD] * 6 + [E, T, N]])
    options = {"attention_mask": (prompt != PAD).long(), "max_new_tokens": 60, "eos_token_id": NEVER}
    expected = model.generate(prompt, **options)
    found = outpace.accelerate(model).generate(prompt, **options)
    assert found.tolist() == expected[:, :36].tolist()


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_decode_works_for_one_call(verifier: str, plain: Any, batch: dict[str, Any]) -> None:
    expected = plain.generate(**batch, max_new_tokens=30)
    custom = outpace.decode("none" if verifier == "rejection" else "lookahead", verifier)
    for _ in range(2):
        found = plain.generate(**batch, max_new_tokens=30, custom_generate=custom)
        assert found.tolist() == expected.tolist()
    assert "generate" not in vars(plain)
