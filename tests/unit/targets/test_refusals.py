"""Models that cannot be targets are refused at construction, by family, with the reason."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from outpace import Target
from outpace.core import OutpaceError, UnsupportedModel
from outpace.targets.batch import Batch
from outpace.targets.inputs.config import context_of
from parts import first
from zoo.families import BY_KIND, FAMILIES
from zoo.family import randomise

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}

# Class of the model, its config class, options, and what the error must say.
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("DogeForCausalLM", "DogeConfig", GROUPED, "limits its attention by keep_window_size"),
    (
        "TrOCRForCausalLM",
        "TrOCRConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "use_learned_position_embeddings": False,
        },
        r"positions after a pad \(token 1\)",
    ),
    (  # a pad that the self-test's copy with few embeddings does not have
        "TrOCRForCausalLM",
        "TrOCRConfig",
        {
            "vocab_size": 700,
            "pad_token_id": 600,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "use_learned_position_embeddings": False,
        },
        r"positions after a pad \(token 600\)",
    ),
    (
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        },
        "fails on a chain of tokens.*`decoder_input_ids` of length 1",
    ),
    (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
        "drops tokens beyond the capacity",
    ),
    (
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            **HEADS,
            "moe_eval_capacity_token_fraction": 0.5,
        },
        "drops tokens beyond the capacity",
    ),
    (
        "MusicgenForCausalLM",
        "MusicgenDecoderConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "pad_token_id": 0,
        },
        "no single table of embeddings",
    ),
    (
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        {
            "text_config": {"model_type": "opt", **SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
            "vision_config": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4},
            "qformer_config": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4},
        },
        "takes no (cache|past_key_values).*make a target of that, for text alone",
    ),
    ("RoFormerForCausalLM", "RoFormerConfig", {**SMALL, "pad_token_id": 0}, "its attention is not causal"),
    ("T5EncoderModel", "T5Config", {"vocab_size": 64, "d_model": 32, "num_layers": 1}, "modeling head"),
    ("LlamaModel", "LlamaConfig", SMALL, "no language modeling head"),
    ("BertModel", "BertConfig", {**SMALL, "pad_token_id": 0}, "no language modeling head"),
    ("BertForMaskedLM", "BertConfig", {**SMALL, "pad_token_id": 0}, "takes no (cache|past_key_values)"),
    ("BertLMHeadModel", "BertConfig", {**SMALL, "pad_token_id": 0}, "other logits for a tree"),
]


@pytest.mark.parametrize(("name", "config", "options", "reason"), REFUSED, ids=[case[0] for case in REFUSED])
def test_families(name: str, config: str, options: dict[str, Any], reason: str) -> None:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    model = getattr(transformers, name)(made).eval()
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        Target(model)
    assert made.model_type in str(caught.value)


class Deaf(transformers.LlamaForCausalLM):
    """Does not hear one of the arguments that a tree is placed by."""

    ignores = "nothing"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and self.ignores != "nothing":
            width, columns = mask.shape[-2:]
            if self.ignores == "mask":
                kwargs["attention_mask"] = torch.ones_like(mask).tril(columns - width)
            else:
                kwargs["position_ids"] = torch.arange(columns - width, columns)[None]
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)),
    ],
)
@pytest.mark.parametrize(
    ("ignores", "reason"), [("mask", "more than their ancestors"), ("positions", "paths")]
)
def test_the_self_test_decides(ignores: str, reason: str, dtype: torch.dtype) -> None:
    """In every precision; a mask with untrained weights too, where a token hardly changes others' logits."""
    torch.manual_seed(0)
    model = Deaf(transformers.LlamaConfig(**{**GROUPED, "hidden_size": 128})).to(dtype).eval()
    if ignores == "positions":
        randomise(model, seed=0)
    Target(model)
    model.ignores = ignores
    with pytest.raises(UnsupportedModel, match=f"Deaf .llama.*{reason}"):
        Target(model)


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("name", BY_KIND)
def test_right_families_in_half_precision(name: str, dtype: torch.dtype) -> None:
    Target(FAMILIES[name].build(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("experts", [False, True])
def test_deep_untrained_models_in_half_precision(experts: bool, dtype: torch.dtype) -> None:
    """Rounding adds up over layers, and turns experts' near-ties; weights are as transformers makes them."""
    torch.manual_seed(0)
    name, options = "Llama", {**GROUPED, "hidden_size": 128, "num_hidden_layers": 16}
    if experts:
        name = "Qwen3Moe"
        options |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "head_dim": 32}
    config = getattr(transformers, f"{name}Config")(**options)
    Target(getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval())


def llama(**options: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **options})).eval()


@pytest.mark.parametrize("vocabulary", [2, 3, 5, 17, 19])
def test_tiny_vocabularies(vocabulary: int) -> None:
    assert Target(llama(vocab_size=vocabulary)).vocabulary == vocabulary


def test_tiny_contexts() -> None:
    config = transformers.GPT2Config(
        **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 6}, bos_token_id=None
    )
    assert Target(transformers.GPT2LMHeadModel(config).eval()).context == 6
    config.n_positions = 5
    with pytest.raises(UnsupportedModel, match=r"gpt2.* has a context of only 5 tokens"):
        Target(transformers.GPT2LMHeadModel(config).eval())


def test_padded_embeddings() -> None:
    """Embeddings of more rows than the tokenizer has tokens: the vocabulary is what the head gives."""
    model = llama()
    model.resize_token_embeddings(70, pad_to_multiple_of=64, mean_resizing=False)
    assert Target(model).vocabulary == 128


def test_training_mode() -> None:
    model = llama(attention_dropout=0.5)
    target = Target(model)
    model.train()
    with pytest.raises(UnsupportedModel, match=r"llama.*training mode.*eval"):
        Target(model)
    with pytest.raises(OutpaceError, match="training mode"):
        target.forward(target.new_cache(), Batch.of({}))
    assert model.training


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, config = torch.get_rng_state(), model.config.to_dict()
    forwards = {name: module.forward for name, module in model.named_modules()}
    Target(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config and not model.training
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(module.forward == forwards[name] for name, module in model.named_modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_implementations() -> None:
    model = llama()
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(UnsupportedModel, match=r"llama.*paged.*'sdpa', 'eager'"):
        Target(model)


def test_not_a_transformers_model() -> None:
    with pytest.raises(UnsupportedModel, match="Linear is not a transformers model"):
        Target(torch.nn.Linear(2, 2))
    wrapped = torch.nn.Sequential(llama())
    for config in (SimpleNamespace(model_type="llama"), SimpleNamespace(), {"model_type": "llama"}):
        wrapped.config = config  # type: ignore[assignment]
        with pytest.raises(UnsupportedModel, match=r"Sequential.*pass the model inside it"):
            Target(wrapped)


def test_a_model_that_fails_by_itself() -> None:
    """The refusal says that this is not outpace's doing, and has the model's own error."""
    model = llama()
    model.model.layers[1].mlp.down_proj.weight.data = torch.zeros(3, 3)
    with pytest.raises(UnsupportedModel, match=r"by itself, without outpace: .*shapes cannot be multiplied"):
        Target(model)


@pytest.mark.parametrize("alone", [False, True])
def test_a_model_that_is_out_of_memory(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With outpace's inputs, or without them."""
    model = llama()

    def full(**given: Any) -> Any:
        if alone != ("use_cache" in given):
            raise MemoryError("no more")
        if alone:
            raise RuntimeError("something else")

    full.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(MemoryError, match="no more"):
        Target(model)


class Asserting(transformers.LlamaForCausalLM):
    """Refuses several rows by an assert without a message."""

    asserts = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.asserts and kwargs["input_ids"].shape[1] > 1:
            raise AssertionError
        return super().forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(transformers.LlamaForCausalLM.forward)  # type: ignore[attr-defined]


def test_an_assert_without_a_message() -> None:
    model = Asserting(transformers.LlamaConfig(**GROUPED)).eval()
    model.asserts = True
    shown = r"AssertionError at test_refusals\.py:\d+, 'raise AssertionError'"
    with pytest.raises(UnsupportedModel, match=shown):
        Target(model)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("return_dict", False, "returns tuples; set model.config.return_dict = True"),
        ("hidden_size", None, "no hidden_size in its config"),
        ("num_hidden_layers", None, "cannot make a cache from its config"),
    ],
)
def test_what_a_config_lacks(name: str, value: Any, reason: str) -> None:
    model = llama()
    vars(model.config)[name] = value
    with pytest.raises(UnsupportedModel, match=reason):
        Target(model)


def test_what_a_generation_config_lacks() -> None:
    """Its end tokens are then the config's."""
    model = llama()
    model.config.eos_token_id = 5
    del model.generation_config.eos_token_id
    assert Target(model).eos_token_ids == {5}


def test_rope_that_depends_on_the_length() -> None:
    """Past the original length the longest position decides the rope of all rows: the context ends there."""
    long = [1.0] * 4
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("LlamaConfig", {"max_position_embeddings": 512}, 512),
        (
            "LlamaConfig",
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            },
            64,
        ),
        (
            "Phi3Config",
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": long,
                    "long_factor": long,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 32,
                },
            },
            32,
        ),
    ]
    for name, options, context in cases:
        config = getattr(transformers, name)(**{**GROUPED, **options})
        assert context_of(config) == context
        assert Target(transformers.AutoModelForCausalLM.from_config(config).eval()).context == context


PER_TENSOR: list[Any] = [
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"input_activations": {"dynamic": True, "strategy": "tensor"}}},
    },
    {"quant_method": "quark", "layer": {"input_tensors": {"is_dynamic": True, "qscheme": "per_tensor"}}},
    SimpleNamespace(quant_type="Float8DynamicActivationFloat8WeightConfig(granularity=[PerTensor()])"),
]
PER_ROW: list[Any] = [
    None,
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"input_activations": {"dynamic": True, "strategy": "token"}}},
    },
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"input_activations": {"dynamic": False, "strategy": "tensor"}}},
    },
    SimpleNamespace(quant_type="Float8DynamicActivationFloat8WeightConfig(granularity=[PerRow()])"),
]


@pytest.mark.parametrize("quantization", PER_TENSOR)
def test_activations_quantised_per_tensor(quantization: Any) -> None:
    model = llama()
    model.config.quantization_config = quantization
    with pytest.raises(UnsupportedModel, match=r"llama.*per tensor.*per token"):
        Target(model)


@pytest.mark.parametrize("quantization", PER_ROW)
def test_other_quantisation_is_accepted(quantization: Any) -> None:
    model = llama()
    model.config.quantization_config = quantization
    Target(model)
