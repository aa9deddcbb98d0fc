"""Every type of transformers that generates text: served in families of the zoo, with text alone, or refused.

``WALKED`` and the tables above it name every type that transformers maps to a model that generates: a test
fails on one that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from zoo.chain_families import CHAINS
from zoo.families import FAMILIES
from zoo.family import WINDOW
from zoo.image_families import IMAGE_FAMILIES
from zoo.recurrent_families import RECURRENT
from zoo.seq2seq_families import (
    CHAIN_FAMILIES,
    COUNTING_FAMILIES,
    FURTHER_CHAINS,
    FURTHER_FAMILIES,
    SEQ2SEQ_FAMILIES,
)
from zoo.tiny_families import MROPE, ROPE, TINY, each

_TOWER = {
    "model_type": "siglip_vision_model",  # where the published one needs timm
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def _gemma4(kind: str) -> dict[str, Any]:
    """The text of a Gemma 4 that reads more."""
    return {"text_config": {"only": {**TINY["gemma4_text"]["only"], "model_type": kind, "pad_token_id": 0}}}


# Types that read images or sound too, tested here with text alone; ``image_families.py`` has images.
TEXT_ALONE: dict[str, Mapping[str, Any]] = {
    **each(
        """
        aria audioflamingo3 aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid
        exaone4_5 fuyu gemma3 git glmasr got_ocr2 granite_docling granite_speech
        granite_speech_plus hyperclovax_vision_v2 idefics2 internvl janus kimi_k25 lfm2_vl
        lighton_ocr llama4 llava_next llava_next_video llava_onevision minimax_m3_vl mistral4
        moss_transcribe_diarize muse_glimmer musicflamingo omniasr ovis2 phi4_multimodal
        pp_chart2table qianfan_ocr qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr qwen3_vl_moe
        shieldgemma2 vibevoice_asr video_llama_3 video_llava vipllava voxtral
        """,
        {},
    ),
    **each(
        "cosmos3_edge glm46v glm4v paddleocr_vl",
        {"text_config": {"rope_parameters": MROPE}},
    ),
    **each(
        "glm_ocr glmga",
        {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}, "head_dim": 8}},
    ),
    **each(
        "qwen2_5_omni_thinker qwen3_omni_moe_thinker",
        {"text_config": {"rope_parameters": MROPE}, "vision_start_token_id": 93},
    ),
    **each("emu3 mllama", {"text_config": {"bos_token_id": 1, "eos_token_id": 2}}),
    "apertus1p5": {
        "audio_config": {"codebook_dim": "default", "hidden_size": "default", "codebook_size": 4},
        "vision_config": {"codebook_size": 4},
        "image_token_offset": 80,
        "audio_token_offset": 84,
    },
    "chameleon": {"vocabulary_map": {"<image>": 94}},
    "cohere_compass": {
        "text_config": {
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"full_attention": MROPE},
        }
    },
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
        }
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_num_experts": 4,
            "moe_intermediate_size": [16, 16],
            "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
        }
    },
    "fast_vlm": {"vision_config": {"only": _TOWER}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n": {
        "text_config": TINY["gemma3n_text"],
        "instead": {"vision_config": {**_TOWER, "rms_norm_eps": 1e-6, "vocab_offset": 96, "vocab_size": 8}},
    },
    "gemma4": _gemma4("gemma4_text"),
    "gemma4_unified": _gemma4("gemma4_unified_text"),
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}, "head_dim": 16}
    },
    "granite4_vision": {
        "deepstack_layer_map": [],
        "downsample_rate": "2/4",
        "vision_config": {"hidden_size": 64},
    },
    "hunyuan_vl": {
        "text_config": {"head_dim": 8, "rope_parameters": {**ROPE, "xdrope_section": [1, 1, 1, 1]}}
    },
    "mistral3": {"text_config": {"sliding_window": "default"}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": "default", "out_hidden_size": 32}},
    "paligemma": {"attn_implementation": "eager"},
    "perception_lm": {"vision_config": {"only": {**_TOWER, "model_args": {"embed_dim": 32}}}},
    "step3p7": {"text_config": {"sliding_window": WINDOW}},
}
# Those whose published layers keep a state, which the models here do not.
STATEFUL_AS_PUBLISHED = {"lfm2_vl"}
# Those that read sound, and no image.
SOUND = each(
    """
    audioflamingo3 fun_asr_nano glmasr granite_speech granite_speech_plus moss_transcribe_diarize
    musicflamingo omniasr qwen2_audio qwen3_asr vibevoice_asr voxtral
    """,
    None,
)

_INDEX = "DynamicIndexedLayer"
_NO_CACHE = "takes no"
_NO_PAST = "takes no past_key_values"
_PADS = "counts positions from the id of its pad on"
_REFERENCE = "DynamicReferenceSlidingWindowLayer"
_STATES = "recurrent state by functions"
_STATES_OF_TEXT = "a recurrent state is kept for text alone"
_CAPACITY = "capacity of its experts"
_NO_TEXT = "takes no step without features"
_NO_TABLE = "no single table of embeddings"
_MASK = "a mask that its encoder returns"
_WINDOW = "limits its attention by"
# Words of a reason -> the reason in full.
TOLD = {
    _INDEX: "keeps an index of keys beside them, which cannot be undone",
    _NO_CACHE: "its forward takes no cache",
    _NO_PAST: "its forward takes no cache",
    _PADS: f"{_PADS}, where outpace counts from 0",
    _REFERENCE: "keeps a window beside the rows of its image, which cannot be undone",
    _STATES: "keeps a recurrent state by functions that outpace does not know",
    _STATES_OF_TEXT: "reads more than text beside a recurrent state; its language model alone may be served",
    _NO_TEXT: "takes no step without features of what it reads beside text",
    _NO_TABLE: "has no single table of embeddings: it reads more than a text's tokens",
    _MASK: "reads a mask that its encoder returns, of which outpace keeps the states alone",
    _CAPACITY: "drops tokens beyond the capacity of its experts, so that rows change each other",
    _WINDOW: "limits its attention by a window of its own",
    "cannot make a cache from its config": "transformers makes no cache for it: it reads bytes in patches",
    "takes no mask that fits": "takes no mask that fits what is in a cache",
    "names its head a decoder": "names its head a decoder, so that its layers are not found",
    "a window other than its config's": "has a window other than its config's",
    "one token at a time": "takes one token at a time once there is a cache",
    "not one after another": "fills in the tokens of a block in any order, not one after another",
    "masks of whole texts alone": "takes masks of whole texts alone",
}
# Type -> words of the reason for which it is refused.
REFUSED: dict[str, str] = {
    **each("axk2 deepseek_v32 glm_moe_dsa hy_v4 dots3_note_text dots3_note", _INDEX),
    **each("glm5_next hy_v4_vl mistral_large4", _INDEX),
    **each("qwen4_exp qwen4_exp_text", _INDEX),
    **each("inkling_text inkling2_text inkling2_loop_text doge", _WINDOW),
    **each("recurrent_gemma inkling2 inkling2_loop inkling_mm_model", _WINDOW),
    **each("canary cohere_asr udop", _MASK),
    **each("idefics kosmos-2 voxtral_realtime", _NO_TEXT),
    **each("kyutai_speech_to_text pp_formulanet", _NO_TABLE),
    **each("blip blip-2 evolla instructblip instructblipvideo", _NO_PAST),
    **each("qwen2_5_omni qwen3_omni_moe vibevoice", _NO_PAST),
    **each("lfm3_vl minicpm_ocr minicpmv4_6 minicpmv4_7 nemotron_h_omni nemo_speechlm", _STATES_OF_TEXT),
    **each("kosmos-2.5 speech_to_text", _PADS),
    **each("moonshine moonshine_streaming", "reads input_values"),
    **each("openai-gpt xlnet reformer", _NO_CACHE),
    **each("rwkv xlstm deepseek_v4", _STATES),
    **each("roberta roberta-prelayernorm camembert data2vec-text xlm-roberta xlm-roberta-xl xmod", _PADS),
    "blt": "cannot make a cache from its config",
    "cpmant": "takes no mask that fits",
    "diffusion_gemma": "not one after another",
    "modernbert-decoder": "names its head a decoder",
    "moshi": "a window other than its config's",
    "pix2struct": "reads flattened_patches",
    "prophetnet": "one token at a time",
    "speech-encoder-decoder": "reads inputs",
    "switch_transformers": _CAPACITY,
    "unlimited_ocr": _REFERENCE,
    "vision-encoder-decoder": "takes no attention_mask",
    "xlm": "masks of whole texts alone",
}
# Type -> entries of a small model's config, for those refused whose names do not give one.
OF_REFUSED: dict[str, Mapping[str, Any]] = {
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 32}},
    "modernbert-decoder": dict.fromkeys(
        ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), "default"
    ),
    "xmod": {"default_language": "en_XX"},
}
# Type -> words of the reason, where kinds of layers decide; ``recurrent_families.py`` has a config.
REFUSED_IN_PART = {"minimax": _STATES, "zaya": _STATES}
# Type -> why it does not generate text token by token.
NOT_TEXT = {
    **each("gemma4_assistant gemma4_unified_assistant", "a drafter: see assistant"),
    **each("musicgen musicgen_melody dia pop2piano speecht5", "emits sound"),
    "pi0": "emits movements",
}
# Part of the name of a mapping of transformers -> the class that loads by it.
WALKED = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "IMAGE_TEXT_TO_TEXT": "AutoModelForImageTextToText",
    "MULTIMODAL_LM": "AutoModelForMultimodalLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "SPEECH_SEQ_2_SEQ": "AutoModelForSpeechSeq2Seq",
}


def _types(name: str) -> Mapping[str, Any]:
    """The types of a mapping, of which older transformers has fewer."""
    found: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})
    return found


def walked() -> set[str]:
    """The types that the installed transformers maps to models that generate text."""
    return {kind for name in WALKED for kind in _types(name)}


def auto_of(kind: str) -> str:
    """The name of the first class that loads a type."""
    return next(auto for name, auto in WALKED.items() if kind in _types(name))


def type_of(config: str) -> str:
    """The type of a class of configs, by its name."""
    kind: str = getattr(transformers, config).model_type
    return kind


def tested_elsewhere() -> dict[str, str]:
    """Type -> the table's kind of those that other files of the zoo have."""
    kinds: dict[str, str] = {}
    for kind, found in {
        "decoder-only, trees": [one.config for one in FAMILIES.values()],
        "decoder-only, chains": [one.config for one in CHAINS.values()],
        "recurrent, trees": [one.config for one in RECURRENT.values()],
        "with images, trees": [f"{prefix}Config" for prefix, _ in IMAGE_FAMILIES.values()],
        "encoder-decoder, trees": [
            one.config
            for families in (SEQ2SEQ_FAMILIES, COUNTING_FAMILIES, FURTHER_FAMILIES)
            for one in families.values()
        ],
        "encoder-decoder, chains": [
            one.config for one in [*CHAIN_FAMILIES.values(), *FURTHER_CHAINS.values()]
        ],
    }.items():
        for config in found:
            kinds.setdefault(type_of(config), kind)
    return {**kinds, "dory": "decoder-only, trees"}  # in test_configs.py
