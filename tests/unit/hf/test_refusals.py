"""Calls that cannot be decoded are refused, and the message names the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaModel

import outpace
from outpace.core import OutpaceError, UnsupportedModel
from outpace.hf import Generate
from outpace.targets.inputs.config import CACHE
from unit.hf.tiny import make

CONFIGURED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams=1"),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, "num_beams=1"),
    "constraints": ({"force_words_ids": [[5]], "num_beams": 2}, "no constraints"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: leave it out"),
    "early exit": ({"assistant_early_exit": 1}, "assisted_generation: leave"),
    "DoLa": ({"dola_layers": "high"}, "leave dola_layers out"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "leave penalty_alpha out"),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions: leave it out",
    ),
    "hidden states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states: leave it out",
    ),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale=1"),
}


@pytest.fixture(params=["accelerate", "decode"])
def generate(request: pytest.FixtureRequest, plain: Any, fast: Any) -> Any:
    """generate() in both of its accelerated forms."""
    if request.param == "accelerate":
        return fast.generate
    return lambda *args, **kwargs: plain.generate(*args, custom_generate=outpace.decode("none"), **kwargs)


@pytest.mark.parametrize("name", CONFIGURED)
def test_options(name: str, generate: Any, one: Any) -> None:
    options, remedy = CONFIGURED[name]
    with pytest.raises(OutpaceError, match=remedy) as error:
        generate(**one, max_new_tokens=3, **options)
    through = "fallback=True" if isinstance(generate, Generate) else "without custom_generate"
    assert through in str(error.value)


def test_inputs_embeds(generate: Any, plain: Any, one: Any) -> None:
    embeds = plain.get_input_embeddings()(one["input_ids"])
    with pytest.raises(OutpaceError, match="pass the prompt as input_ids"):
        generate(inputs_embeds=embeds, max_new_tokens=3)
    with pytest.raises(OutpaceError, match="pass the prompt as input_ids"):
        generate(**one, inputs_embeds=embeds, max_new_tokens=3)


def test_a_filled_cache(generate: Any, plain: Any, one: Any) -> None:
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(one["input_ids"][:, :-1], **{CACHE: cache})
    with pytest.raises(OutpaceError, match="pass the whole text as input_ids and no cache"):
        generate(**one, **{CACHE: cache}, max_new_tokens=3)


def test_a_cache_of_another_kind(generate: Any, plain: Any, one: Any) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=plain.config, max_cache_len=64)
    with pytest.raises(OutpaceError, match="StaticCache: pass none, or an empty DynamicCache"):
        generate(**one, **{CACHE: cache}, max_new_tokens=3)


@pytest.mark.parametrize(
    ("mask", "remedy"),
    [
        ([1, 1, 1, 1, 1, 0], "padding_side = 'left'"),
        ([0, 0, 0, 0, 0, 0], "padding_side = 'left'"),
        ([0, 1, 1, 0, 1, 1], "mask the pads on the left only"),
        ([0, 1, 1, 1, 1, 1, 1], r"pass one of shape \(2, 6\)"),
    ],
)
def test_masks(mask: list[int], remedy: str, generate: Any) -> None:
    ids = torch.full((2, 6), ord("e"))
    with pytest.raises(OutpaceError, match=remedy):
        generate(ids, attention_mask=torch.tensor([[1] * len(mask), mask]), max_new_tokens=3)


def test_positions(generate: Any, one: Any) -> None:
    usual = torch.arange(one["input_ids"].shape[1])[None]
    generate(**one, position_ids=usual, max_new_tokens=2)
    with pytest.raises(OutpaceError, match="custom position_ids: leave them out"):
        generate(**one, position_ids=usual + 1, max_new_tokens=2)


def test_other_model_arguments(one: Any) -> None:
    model = outpace.accelerate(make("gpt2"), "none")
    with pytest.raises(OutpaceError, match="token_type_ids: pass input_ids and attention_mask only"):
        model.generate(**one, token_type_ids=torch.zeros_like(one["input_ids"]), max_new_tokens=2)


def test_training_mode(one: Any) -> None:
    model = outpace.accelerate(make("gpt2"), "none")
    model.train()
    with pytest.raises(OutpaceError, match=r"call model.eval\(\) first"):
        model.generate(**one, max_new_tokens=2)
    assert model.training


def test_what_a_callable_does_not_get_to_see(fast: Any, plain: Any, one: Any) -> None:
    with pytest.raises(OutpaceError, match="assistant_model: name a drafter instead"):
        fast.generate(**one, assistant_model=plain, max_new_tokens=3)
    with pytest.raises(OutpaceError, match="synced_gpus: pass synced_gpus=False"):
        fast.generate(**one, synced_gpus=True, max_new_tokens=3)
    assert fast.generate(**one, synced_gpus=False, max_new_tokens=3).shape[1] == one["input_ids"].shape[1] + 3


def test_sharded_models(monkeypatch: pytest.MonkeyPatch, fast: Any, one: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert fast.generate(**one, max_new_tokens=2).shape[0] == 1
    monkeypatch.setattr("outpace.hf.checks.is_fsdp_managed_module", lambda _: True)
    with pytest.raises(OutpaceError, match="run one whole model in each process"):
        fast.generate(**one, max_new_tokens=2)


def test_models() -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8}
    headless = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    for model in (headless, torch.nn.Linear(1, 1)):
        with pytest.raises(UnsupportedModel):
            outpace.accelerate(model)
        assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        (
            "MusicgenForCausalLM",
            "MusicgenDecoderConfig",
            {"vocab_size": 64, "ffn_dim": 48, "pad_token_id": 0},
        ),
        ("ViTForImageClassification", "ViTConfig", {"intermediate_size": 48}),
    ],
)
def test_models_without_a_table_of_tokens(name: str, config: str, options: dict[str, Any]) -> None:
    """Those whose ends have no weights of their own too."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **options)).eval()
    with pytest.raises(UnsupportedModel):
        outpace.accelerate(model)
    assert "generate" not in vars(model)


def test_an_encoder_of_features_has_no_table_of_tokens() -> None:
    """Speech2Text's raises instead of returning none."""
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64}
    config = transformers.Speech2TextConfig(**sizes, **heads, encoder_layers=1, decoder_layers=1)
    torch.manual_seed(0)
    model = transformers.Speech2TextForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedModel, match=r"speech_to_text.* gives other logits"):
        outpace.accelerate(model)


def test_parts() -> None:
    model = make("llama")
    with pytest.raises(OutpaceError, match="lookahaed"):
        outpace.accelerate(model, "lookahaed")
    with pytest.raises(OutpaceError, match="no verifier 'guess'"):
        outpace.accelerate(model, "none", verifier="guess")
    with pytest.raises(OutpaceError, match="lookahaed"):
        outpace.decode("lookahaed")
    with pytest.raises(OutpaceError, match="no verifier 'guess'"):
        outpace.decode("none", verifier="guess")
    assert "generate" not in vars(model)
