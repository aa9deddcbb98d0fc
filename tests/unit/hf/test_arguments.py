"""Each argument of transformers' generate() is in one list, and the lists say what becomes of it."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation import GenerationMixin

import outpace
from outpace.core import OutpaceError
from outpace.hf import arguments
from outpace.hf.arguments import HONOURED, REFUSED, WITHOUT_EFFECT, fields
from unit.hf.test_criteria import After
from unit.hf.test_streaming import Tape
from unit.hf.tiny import BOS, EOS, NEVER, PAD, make
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "transformers.md"
NEW = 14
DRAWS = {"do_sample": True, "top_k": 0}
E, N, OH = map(ord, "eno")
# Arguments of the call with a value that changes its result; of those of sampling one that leaves one token.
CALLS: dict[str, dict[str, Any]] = {
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=3.0)},
    "logits_processor": {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(30, E, "cpu")])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([After(E, 2)])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [E, OH, N][len(ids) % 2 :]},
    "max_length": {"max_new_tokens": None, "max_length": 19},
    "max_new_tokens": {"max_new_tokens": 7},
    "min_length": {"min_length": 24, "eos_token_id": E},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": E},
    "max_time": {"max_time": 1e-9},
    "eos_token_id": {"eos_token_id": [E, N]},
    "pad_token_id": {"eos_token_id": E, "pad_token_id": 9},
    "forced_bos_token_id": {"input_ids": torch.tensor([[E]]), "forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "do_sample": {"do_sample": True, "top_k": 1},
    "num_return_sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "temperature": {**DRAWS, "temperature": 1e-4},
    "top_k": {**DRAWS, "top_k": 1},
    "top_p": {**DRAWS, "top_p": 1e-6},
    "min_p": {**DRAWS, "min_p": 1.0},
    "top_h": {**DRAWS, "top_h": 1e-6},
    "typical_p": {**DRAWS, "typical_p": 1e-6},
    "epsilon_cutoff": {**DRAWS, "epsilon_cutoff": 0.9999},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[E], [OH, N]]},
    "sequence_bias": {"sequence_bias": [[[N, E], -9.0], [[OH], 2.0]]},
    "suppress_tokens": {"suppress_tokens": [E, OH]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [E, OH, N]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.4)},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
}
RESULTS = ["return_dict_in_generate", "output_scores", "output_logits"]
# In tests of their own, below.
APART = {
    "inputs", "streamer", "tokenizer", "custom_generate", "stop_strings", "token_healing", "bos_token_id",
    "decoder_start_token_id", "eta_cutoff", "renormalize_logits", "remove_invalid_values", *RESULTS,
}  # fmt: skip
SET: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "constraints": {"constraints": [object()], "num_beams": 2},
    "force_words_ids": {"force_words_ids": [[5]], "num_beams": 2},
    "dola_layers": {"dola_layers": "high"},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "guidance_scale": {"guidance_scale": 1.5},
    "assistant_model": {"assistant_model": object()},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
    "is_assistant": {"is_assistant": True},
    "synced_gpus": {"synced_gpus": True},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
}
IGNORED: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 3.0,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "low_memory": True,
    "negative_prompt_ids": torch.tensor([[5, 6]]),
    "negative_prompt_attention_mask": torch.tensor([[1, 1]]),
    "assistant_tokenizer": object(),
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 4,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"max_cache_len": 99},
    "max_cache_len": 99,
    "prefill_chunk_size": 2,
    "compile_config": None,
    "disable_compile": True,
    "continuous_batching_config": None,
    "trust_remote_code": True,
}


@cache
def model(fast: bool) -> Any:
    """In float32; plain texts of it do not loop at once."""
    made = make("llama").float()
    return outpace.accelerate(made, "lookahead:window=3,ngram=3,guesses=3", adaptive=False) if fast else made


def both(one: Any, **options: Any) -> tuple[Any, Any]:
    """The results of the stock generate() and of the accelerated one."""
    given = {**one, "max_new_tokens": NEW, **options}
    return model(False).generate(**given), model(True).generate(**given)


def taken() -> set[str]:
    """The names that this version's generate() takes: of its signature, those it looks for, and fields."""
    source = "".join(
        inspect.getsource(getattr(GenerationMixin, name))
        for name in ("generate", "_extract_generation_mode_kwargs")
        if hasattr(GenerationMixin, name)
    )
    looked_for = set(re.findall(r'[^_]kwargs\.(?:pop|get)\("(\w+)"', source)) - {"input_ids"}
    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    return fields() | named | looked_for


def test_each_is_in_one_list() -> None:
    lists = [*HONOURED, *REFUSED, *WITHOUT_EFFECT]
    assert len(lists) == len(set(lists))
    assert taken() <= set(lists)
    assert {"max_time", "streamer", "assistant_tokenizer", "trust_remote_code"} <= taken()
    assert {*CALLS, *APART} == set(HONOURED) and SET.keys() == REFUSED.keys()
    assert IGNORED.keys() == WITHOUT_EFFECT.keys()


def test_the_page_lists_them() -> None:
    honoured, refused, without = (part.split("\n\n")[1] for part in DOCS.read_text().split("\n## ")[1:4])
    assert re.findall(r"`(\w+)`", honoured) == list(HONOURED)
    assert dict(re.findall(r"\| `(\w+)` \| (.+) \|", refused)) == REFUSED
    assert dict(re.findall(r"\| `(\w+)` \| (.+) \|", without)) == WITHOUT_EFFECT


def only_known(given: dict[str, Any]) -> dict[str, Any]:
    """Skip a test whose field this version of transformers lacks."""
    if not given.keys() <= taken() | {"input_ids"}:
        pytest.skip("a field of other versions of transformers")
    return given


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_honoured(name: str, batch: Any) -> None:
    options = only_known(CALLS[name])
    prompt = {"input_ids": options["input_ids"]} if "input_ids" in options else batch
    expected, found = both(prompt, **options)
    assert found.tolist() == expected.tolist()
    torch.manual_seed(0)
    rest = {key: value for key, value in options.items() if key != name}
    default = model(True).generate(**{**prompt, "max_new_tokens": NEW, **rest})
    assert name == "do_sample" or default.tolist() != found.tolist(), "the argument changes nothing"


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str, one: Any) -> None:
    expected, found = both(one, **{"return_dict_in_generate": True, name: True})
    assert found.keys() >= {key for key in expected if key not in ("cache", "past_key_values")}
    for key in {"output_scores": ["scores"], "output_logits": ["logits"]}.get(name, []):
        for ours, stock in zip(found[key], expected[key], strict=True):
            torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("options", [{"renormalize_logits": True}, {**DRAWS, "eta_cutoff": 0.3}], ids=str)
def test_scores(options: dict[str, Any], one: Any) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
    expected, found = both(one, **asked, **options)
    torch.testing.assert_close(found.scores, expected.scores)
    default = both(one, **asked, do_sample="eta_cutoff" in options, top_k=0)[1]
    assert not torch.equal(found.scores[0], default.scores[0])


def test_invalid_values(one: Any) -> None:
    """Infinite logits become finite ones, of which the largest is chosen."""
    outputs = []
    for fast in (False, True):
        made = make("llama").float()
        if fast:
            outpace.accelerate(made, "lookahead:window=3,ngram=3,guesses=3")
        with torch.no_grad():
            made.lm_head.bias[NEVER] = torch.inf
        asked = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 4}
        found = made.generate(**one, **asked, remove_invalid_values=True)
        assert all(bool(scores.isfinite().all()) for scores in found.scores)
        outputs.append(found.sequences.tolist())
    assert outputs[0] == outputs[1]


def test_inputs_and_streamer(one: Any) -> None:
    tapes = Tape(), Tape()
    for fast, tape in enumerate(tapes):
        model(bool(fast)).generate(one["input_ids"], max_new_tokens=9, streamer=tape)
    assert tapes[0].calls == tapes[1].calls
    expected, found = both({}, bos_token_id=E, eos_token_id=EOS)
    assert found.tolist() == expected.tolist() and found[0, 0] == E != BOS


def test_stop_strings(one: Any, tokenizer: Any) -> None:
    expected, found = both(one, stop_strings=["n", "to"], tokenizer=tokenizer)
    assert found.tolist() == expected.tolist() and found.shape[1] < 12 + NEW


def test_the_start_of_a_decoder() -> None:
    source = {"input_ids": torch.tensor([[5, 9, 11, 4]])}
    outputs = []
    for fast in (False, True):
        made = SEQ2SEQ_FAMILIES["t5"].build(torch.float32)
        if fast:
            outpace.accelerate(made, "lookahead:window=3,ngram=3,guesses=3")
        outputs.append(made.generate(**source, decoder_start_token_id=7, max_new_tokens=9).tolist())
    assert outputs[0] == outputs[1] and outputs[0][0][0] == 7


class Merging:
    """The tokenizer with a further token: "th" is token ``NEVER``, which no text is encoded to."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.bos_token_id, self.pad_token_id = inner.bos_token_id, inner.pad_token_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_vocab(self) -> dict[str, int]:
        return {**self._inner.get_vocab(), "th": NEVER}

    def convert_tokens_to_ids(self, token: str) -> Any:
        return NEVER if token == "th" else self._inner.convert_tokens_to_ids(token)


@pytest.mark.parametrize("where", ["call", "both", "config", "model"])
def test_token_healing(where: str, tokenizer: Any) -> None:
    """A last "t" becomes "th" where that is likelier; a streamer gets the healed prompt first."""
    outputs, tapes = [], (Tape(), Tape())
    for fast, tape in enumerate(tapes):
        made = make("llama").float()
        made.lm_head.bias.data[NEVER] = 3.0  # healing favours the token that is there by 1
        if fast:
            outpace.accelerate(made, "lookahead:window=3,ngram=3,guesses=3")
        given: dict[str, Any] = {"max_new_tokens": 9, "token_healing": True}
        if where == "config":
            given = {"generation_config": GenerationConfig(**given)}
        if where == "both":
            given = {"generation_config": GenerationConfig(max_new_tokens=9), "token_healing": True}
        if where == "model":
            del given["token_healing"]
            made.generation_config.token_healing = True
            made.heal_tokens = lambda ids, _: torch.where(ids == ord("t"), NEVER, ids)
        ids = tokenizer(["seet", "to t"], return_tensors="pt")["input_ids"]
        outputs.append(made.generate(ids, **given, tokenizer=Merging(tokenizer), streamer=tape).tolist())
    assert outputs[0] == outputs[1]
    assert NEVER in [row[3] for row in outputs[0]]
    assert tapes[0].calls == tapes[1].calls


def test_token_healing_that_is_not_done(one: Any, tokenizer: Any) -> None:
    spaced = tokenizer("the one ", return_tensors="pt")["input_ids"]
    with pytest.raises(OutpaceError, match=r"8.*7.*heal_tokens\(input_ids, tokenizer\) as the prompt|7.*8"):
        model(True).generate(spaced, token_healing=True, tokenizer=tokenizer, max_new_tokens=3)
    with pytest.raises(ValueError, match="must pass the model's tokenizer"):
        model(True).generate(**one, token_healing=True, max_new_tokens=3)


def test_custom_generate(one: Any) -> None:
    """It replaces outpace's decoding for a call."""
    found = model(True).generate(**one, custom_generate=lambda model, input_ids, **_: input_ids)
    assert found.tolist() == one["input_ids"].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SET)
def test_refused(name: str, one: Any) -> None:
    with pytest.raises(OutpaceError, match=r"outpace does not decode with .*: .*outpace\.restore\(model\)"):
        model(True).generate(**one, max_new_tokens=3, **only_known(SET[name]))


def test_paged_caches_are_refused(one: Any) -> None:
    for given in (
        {"cache_implementation": "paged"},
        {"generation_config": GenerationConfig(cache_implementation="paged")},
    ):
        with pytest.raises(OutpaceError, match="leave cache_implementation out"):
            model(True).generate(**one, max_new_tokens=3, **given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IGNORED)
def test_without_effect(name: str, one: Any) -> None:
    """Here and in the stock generate()."""
    if name not in taken():
        pytest.skip("a field of other versions of transformers")
    expected, found = both(one, max_new_tokens=6, **{name: IGNORED[name]})
    assert found.tolist() == expected.tolist() == model(False).generate(**one, max_new_tokens=6).tolist()


def test_fields_of_later_versions_are_refused_if_set(monkeypatch: pytest.MonkeyPatch, one: Any) -> None:
    monkeypatch.setattr(arguments, "HONOURED", tuple(set(HONOURED) - {"min_p", "top_h"}))
    with pytest.raises(OutpaceError, match="min_p, which it does not know: leave it out"):
        model(True).generate(**one, max_new_tokens=3, do_sample=True, min_p=0.1)
    model(True).generate(**one, max_new_tokens=3)


def test_arguments_of_the_forward(one: Any) -> None:
    """An empty cache and usual masks are taken, any other argument that is set is refused."""
    ids = one["input_ids"]
    model(True).generate(ids, attention_mask=torch.ones_like(ids), cache=DynamicCache(), max_new_tokens=2)
    assert PAD not in ids
    with pytest.raises(OutpaceError, match="the model argument output_router_logits: pass input_ids"):
        outpace.accelerate(make("llama")).generate(ids, output_router_logits=True, max_new_tokens=2)
