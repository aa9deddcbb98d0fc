"""generate() of encoder-decoder models: tokens, scores and caches equal those of the stock one."""

from __future__ import annotations

import copy
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import BartForConditionalGeneration, DynamicCache, EncoderDecoderCache, TextStreamer
from transformers.modeling_outputs import BaseModelOutput

import outpace
from outpace.core import OutpaceError
from outpace.targets.inputs.config import CACHE
from parts import in_turn
from unit.hf.tiny import Forwards
from zoo.family import VOCABULARY
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES, START

LENGTHS = (6, 17, 11)
TEXTS = [name for name, family in SEQ2SEQ_FAMILIES.items() if not family.features]
LOOKAHEAD = "lookahead:window=4,ngram=3,guesses=3"
EOS = 7
# A penalty keeps random decoders from repeating one token.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"repetition_penalty": 1.0},
    "penalty": {},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": EOS},
    "bad words": {"bad_words_ids": [[0], [31], [44, 60]], "no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": [31, 44], "begin_suppress_tokens": [58, 60]},
    "of the encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "least": {"min_new_tokens": 9, "eos_token_id": [EOS, 31, 44]},
    "max_length": {"max_new_tokens": None, "max_length": 19},
    "start token": {"decoder_start_token_id": 5},
    "no cache": {"use_cache": False},
    "several": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
}


@cache
def plain(name: str) -> Any:
    """A model that no test accelerates."""
    model = SEQ2SEQ_FAMILIES[name].build()
    model.generation_config.update(eos_token_id=EOS, repetition_penalty=3.0, max_new_tokens=26)
    return model


@cache
def fast(name: str) -> Any:
    return outpace.accelerate(copy.deepcopy(plain(name)), LOOKAHEAD, adaptive=False)


def padded(name: str, left: bool = False) -> dict[str, Any]:
    """Three texts of different lengths with their mask."""
    sources = SEQ2SEQ_FAMILIES[name].sources(LENGTHS)
    rows = []
    for source in sources:
        pads = [0] * (max(LENGTHS) - len(source))
        rows.append([*pads, *source] if left else [*source, *pads])
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def both(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    return plain(name).generate(**given), fast(name).generate(**given)


@pytest.mark.parametrize(("name", "left"), in_turn(TEXTS, [False, True]))
def test_a_batch_with_pads(name: str, left: bool) -> None:
    given = padded(name, left)
    expected, found = both(name, given)
    assert found.tolist() == expected.tolist()
    assert len({tuple(row) for row in expected.tolist()}) == 3
    alone = plain(name).generate(given["input_ids"])  # without a mask pads count as tokens
    assert fast(name).generate(given["input_ids"]).tolist() == alone.tolist()
    assert alone.tolist() != expected.tolist(), "the mask does not matter"


@pytest.mark.parametrize(
    ("option", "name"), in_turn(OPTIONS, ["t5", "bart", "t5-gated", "marian-two-vocabularies"])
)
def test_options(option: str, name: str) -> None:
    expected, found = both(name, padded(name) | OPTIONS[option])
    assert found.tolist() == expected.tolist()


def test_it_is_accelerated() -> None:
    """The model is accelerated; otherwise the tests above would pass for a wrapper that does nothing."""
    given = padded("bart") | {"repetition_penalty": 1.0, "eos_token_id": None, "max_new_tokens": 40}
    counter = Forwards(fast("bart"))
    expected, found = both("bart", given)
    counter.close()
    assert found.tolist() == expected.tolist()
    assert counter.count < 35


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_sampling_equals_our_plain_decoding(name: str) -> None:
    outputs = []
    for drafter in ("none", LOOKAHEAD, "prompt_lookup", "reference"):
        model = outpace.accelerate(copy.deepcopy(plain(name)), drafter, adaptive=False)
        torch.manual_seed(5)
        outputs.append(model.generate(**padded(name), do_sample=True, top_k=5).tolist())
        assert outputs[-1] == outputs[0], drafter
    assert outputs[0] != plain(name).generate(**padded(name)).tolist()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_scores_and_caches(name: str) -> None:
    end = int(plain(name).generate(**padded(name))[2, 8])
    given = padded(name) | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found = both(name, given | {"eos_token_id": end})
    assert type(found) is type(expected)
    assert found.sequences.tolist() == expected.sequences.tolist()
    running = (found.sequences[:, :-1] == end).cumsum(dim=1) == 0
    assert not running.all()
    for step, (ours, stock) in enumerate(zip(found.scores, expected.scores, strict=True)):
        alive = running[:, step]
        torch.testing.assert_close(ours[alive], stock[alive])
        torch.testing.assert_close(found.logits[step][alive], expected.logits[step][alive])
    mask = given["attention_mask"][:, None, :, None] != 0
    for kind, seen in (("self_attention_cache", running[:, None, :, None]), ("cross_attention_cache", mask)):
        mine, theirs = getattr(found[CACHE], kind), getattr(expected[CACHE], kind)
        for ours, stock in zip(mine.layers, theirs.layers, strict=True):
            torch.testing.assert_close(ours.keys * seen, stock.keys * seen, atol=1e-5, rtol=0)
            torch.testing.assert_close(ours.values * seen, stock.values * seen, atol=1e-5, rtol=0)
    assert all(found[CACHE].is_updated.values()) and found[CACHE].is_updated


def test_a_cache_of_the_callers_is_filled() -> None:
    mine = EncoderDecoderCache(DynamicCache(), DynamicCache())
    given = padded("bart")
    expected = plain("bart").generate(**given)
    assert fast("bart").generate(**given, **{CACHE: mine}).tolist() == expected.tolist()
    assert mine.get_seq_length() == expected.shape[1] - 1
    with pytest.raises(OutpaceError, match="a cache that is filled"):
        fast("bart").generate(**given, **{CACHE: mine})


def test_encoder_outputs_of_the_callers() -> None:
    given = padded("bart")
    states = plain("bart").get_encoder()(**given).last_hidden_state
    outputs = BaseModelOutput(last_hidden_state=states)
    expected = plain("bart").generate(**given)
    found = fast("bart").generate(encoder_outputs=outputs, attention_mask=given["attention_mask"])
    assert found.tolist() == expected.tolist()


def test_a_prompt_of_the_decoder() -> None:
    prompt = torch.tensor([[START, 3, 4], [START, 5, 6], [START, 9, 8]])
    for name in ("t5", "bart"):
        expected, found = both(name, padded(name) | {"decoder_input_ids": prompt})
        assert found.tolist() == expected.tolist()


def test_pads_before_the_prompt_of_the_decoder() -> None:
    """T5 counts distances; BART counts pads as positions, so that the engine, without pads, would differ."""
    prompt = torch.tensor([[START, 3, 4], [0, START, 6], [0, 0, START]])
    given = {"decoder_input_ids": prompt, "decoder_attention_mask": (prompt != 0).long()}
    texts = padded("t5")
    found = fast("t5").generate(**texts, **given)
    for row, own in enumerate(prompt):  # alone, since older transformers decode no such batch
        text = {name: value[row : row + 1] for name, value in texts.items()}
        expected = plain("t5").generate(**text, decoder_input_ids=own[None, own != 0])[0].tolist()
        assert found[row, (own == 0).sum() :].tolist()[: len(expected)] == expected[: found.shape[1] - row]
    with pytest.raises(OutpaceError, match="decode prompts of one length together"):
        fast("bart").generate(**padded("bart"), **given)


def test_a_streamer_gets_the_end() -> None:
    class Watch(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ends = 0

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ends += 1

    given = {"input_ids": torch.tensor([[5, 6, 8]])}
    stock, ours = Watch(), Watch()
    plain("bart").generate(**given, streamer=stock)
    fast("bart").generate(**given, streamer=ours)
    assert (ours.tokens, ours.ends) == (stock.tokens, stock.ends)


def test_restore() -> None:
    model = outpace.accelerate(copy.deepcopy(plain("bart")), "none")
    outpace.restore(model)
    assert model.generate.__func__ is BartForConditionalGeneration.generate


def test_the_callable_of_one_call() -> None:
    given = padded("t5")
    found = plain("t5").generate(**given, custom_generate=outpace.decode(LOOKAHEAD))
    assert found.tolist() == plain("t5").generate(**given).tolist()


@pytest.mark.parametrize("drafter", ["prompt_lookup", "reference"])
def test_drafters_copy_from_the_encoders_input(drafter: str) -> None:
    """A decoder that is made to repeat its source: copying leaves few steps, and changes no token."""
    source = torch.tensor([[50, 3, 17, 81, 20, 44, 9, 63, 72, 11, 25, 90, EOS]])
    model = copy.deepcopy(plain("bart"))

    def repeat(row: int, sent: torch.Tensor) -> list[int]:
        return [int(source[row, len(sent) - 1])]

    given = {"input_ids": source, "prefix_allowed_tokens_fn": repeat}
    expected = model.generate(**given)
    assert expected[0, 1:].tolist() == source[0].tolist()
    outpace.accelerate(model, drafter, adaptive=False)
    counter = Forwards(model)
    assert model.generate(**given).tolist() == expected.tolist()
    assert counter.count < 8  # one makes the source's keys and values; 13 tokens
    counter.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=1"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "leave it out"),
    "other arguments": (
        {"decoder_inputs_embeds": torch.ones(3, 1, 32)},
        "encoder's input and attention_mask",
    ),
    "pads alone": ({"attention_mask": torch.zeros(3, 17, dtype=torch.long)}, "at least one token"),
    "holes": (
        {
            "decoder_input_ids": torch.tensor([[START, 0, 4]] * 3),
            "decoder_attention_mask": torch.tensor([[1, 0, 1]] * 3),
        },
        "mask with holes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    options, remedy = REFUSED[name]
    with pytest.raises((OutpaceError, ValueError), match=remedy):
        fast("bart").generate(**padded("bart") | options)


# -- Whisper -----------------------------------------------------------------------------------------------

LANGUAGES = {"<|en|>": 50, "<|fr|>": 51, "<|de|>": 52}


def whisper(languages: bool) -> Any:
    """Whisper with 30 time stamps after its text, and with or without several languages."""
    model = SEQ2SEQ_FAMILIES["whisper"].build()
    config = model.generation_config
    config.update(
        eos_token_id=EOS, pad_token_id=EOS, suppress_tokens=[11, 12], begin_suppress_tokens=[13, EOS]
    )
    config.no_timestamps_token_id, config.is_multilingual = VOCABULARY - 31, languages
    config.prev_sot_token_id, config.max_length = 5, 40
    if languages:
        config.lang_to_id, config.task_to_id = LANGUAGES, {"transcribe": 53, "translate": 54}
    return model


def sound(frames: int) -> torch.Tensor:
    noise = torch.randn((3, 8, frames), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return noise * torch.tensor([1.0, 0.2, 3.0])[:, None, None]


def long() -> dict[str, Any]:
    """Sound of several windows, of different lengths."""
    mask = torch.ones(3, 90, dtype=torch.long)
    mask[1, 60:] = mask[2, 75:] = 0
    return {"input_features": sound(90), "attention_mask": mask, "return_timestamps": True}


SHORT = {"input_features": sound(24)}
CAUTIOUS = {"compression_ratio_threshold": 1.2, "logprob_threshold": -2.0}
SPOKEN: dict[str, dict[str, Any]] = {
    "plain": SHORT,
    "time stamps": SHORT | {"return_timestamps": True, "return_segments": True},
    "a prompt": SHORT | {"prompt_ids": torch.tensor([5, 20, 21, 22])},
    "scores": SHORT | {"return_dict_in_generate": True, "output_scores": True},
    "long": long(),
    "long, conditioned": long() | {"condition_on_prev_tokens": True},
    "long, one": {
        "input_features": sound(90)[:1],
        "return_timestamps": True,
        "condition_on_prev_tokens": True,
    },
    "silence": long() | {"no_speech_threshold": 0.002, "logprob_threshold": 0.0, "temperature": (0.0,)},
}
OF_LANGUAGES: dict[str, dict[str, Any]] = {
    "language and task": SHORT | {"language": "fr", "task": "translate"},
    "languages": SHORT | {"language": ["fr", "en", "de"]},
}


def told(found: Any) -> Any:
    """The parts of a result that are compared: tokens, times and segments."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if hasattr(found, "items"):
        skipped = (CACHE, "result", "scores")
        return {name: told(value) for name, value in found.items() if name not in skipped}
    return [told(value) for value in found] if isinstance(found, list | tuple) else found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "languages"),
    [*zip(SPOKEN, cycle((True, False)), strict=False), *((name, True) for name in OF_LANGUAGES)],
)
def test_whisper(name: str, languages: bool) -> None:
    model = whisper(languages)
    given = (SPOKEN | OF_LANGUAGES)[name]
    if name == "long, conditioned" and "prepare_inputs_for_generation" not in vars(type(model)):
        # Older transformers count the pads before a shorter row as positions.
        with pytest.raises(OutpaceError, match="decode prompts of one length together"):
            outpace.accelerate(model, "none").generate(**given)
        return
    expected = told(model.generate(**given))
    for drafter in ("none", "prompt_lookup", LOOKAHEAD):
        outpace.accelerate(model, drafter, adaptive=False)
        assert told(model.generate(**given)) == expected, drafter
        outpace.restore(model)


@pytest.mark.parametrize("languages", [True, False])
def test_silence_and_conditions_matter(languages: bool) -> None:
    """Silence and conditions change the output; otherwise the test above would pass without them."""
    model, given = whisper(languages), SPOKEN["silence"]
    heard = model.generate(**given).tolist()
    assert heard != model.generate(**given | {"no_speech_threshold": 1.0}).tolist()
    assert told(model.generate(**long())) != told(model.generate(**SPOKEN["long, conditioned"]))


def test_whisper_sampled() -> None:
    outputs = []
    for drafter in ("none", LOOKAHEAD):
        model = outpace.accelerate(whisper(True), drafter, adaptive=False)
        torch.manual_seed(0)
        outputs.append(told(model.generate(**long(), **CAUTIOUS, temperature=(0.0, 0.4, 0.8))))
    assert outputs[0] == outputs[1]


def test_whisper_without_attentions() -> None:
    model = outpace.accelerate(whisper(True), "none")
    before = model.config._attn_implementation
    with pytest.raises(OutpaceError, match="return_timestamps=True"):
        model.generate(**SHORT, return_token_timestamps=True)
    assert model.config._attn_implementation == before
