"""Every other family of text, by its type: served with a small model made of the names in its config.

``WALKED`` and the tables below it name every type that transformers maps to a model that generates: a test
fails on one that is missing. ``families.py`` and its neighbours have those that are tested more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from zoo.chain_families import CHAINS
from zoo.families import FAMILIES
from zoo.family import COMMON
from zoo.image_families import IMAGE_FAMILIES
from zoo.recurrent_families import RECURRENT
from zoo.seq2seq_families import CHAIN_FAMILIES, COUNTING_FAMILIES, SEQ2SEQ_FAMILIES


def _each(types: str, value: Any) -> dict[str, Any]:
    """Each of these types, and a value for all."""
    return dict.fromkeys(types.split(), value)


# Type -> entries of its config that replace those found by name.
TINY: dict[str, Mapping[str, Any]] = {
    **_each(
        """
        afmoe apertus apertus1p5_text arcee aria_text axk1 beam bert bert-generation big_bird
        bigbird_pegasus biogpt bitnet blenderbot blenderbot-small codegen cohere cohere2_moe ctrl
        diffllama electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint
        gemma gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt_bigcode
        gpt_neox_japanese gptj granite_swa granitemoe granitemoe_swa granitemoeshared helium
        hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna marian mbart
        megatron-bert mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral3 mvp
        nanochat olmo olmo3 olmoe pegasus persimmon phi phimoe plbart qwen2_moe rembert roc_bert
        roformer sarvam_mla sarvam_moe seed_oss solar_open trocr vaultgemma whisper xglm youtu
        """,
        {},
    ),
    "cwm": {"bos_token_id": "default", "eos_token_id": "default"},
    "deepseek_v2": {"topk_method": "greedy", "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        "only": {
            **COMMON,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
        }
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "longcat_flash": {
        "only": {
            **COMMON,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "num_layers": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        }
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
}
# Those that take chains only.
CHAINED = {
    *_each(
        "bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart roformer trocr whisper",
        None,
    )
}
# Those of which one case is quick: other norms, positions, experts, heads, or kinds of layers than elsewhere.
QUICK = {
    "bert", "blenderbot", "cohere", "diffllama", "ernie4_5_moe", "exaone4", "gemma4_text",
    "glm4_moe", "gptj", "hunyuan_v1_moe", "jetmoe", "longcat_flash", "mimo_v2_flash", "minimax_m2",
    "olmo3", "phi", "seed_oss",
}  # fmt: skip
# Types that read images too, tested here with text alone; ``image_families.py`` has some with images.
TEXT_ALONE = _each(
    """
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu
    gemma3 git got_ocr2 granite_docling hyperclovax_vision_v2 idefics2 internvl kimi_k25 lfm2_vl
    lighton_ocr llava_next llava_next_video llava_onevision minimax_m3_vl mistral4 muse_glimmer
    ovis2 pp_chart2table qianfan_ocr qwen3_vl_moe shieldgemma2 video_llama_3 video_llava
    vipllava
    """,
    None,
)

_INDEX = "DynamicIndexedLayer"
_NO_CACHE = "takes no"
_PADS = "counts positions from the id of its pad on"
_STATES = "recurrent state by functions"
_WINDOW = "limits its attention by"
# Words of a reason -> the reason in full.
TOLD = {
    _INDEX: "keeps an index of keys beside them, which cannot be undone",
    _NO_CACHE: "its forward takes no cache",
    _PADS: f"{_PADS}, where outpace counts from 0",
    _STATES: "keeps a recurrent state by functions that outpace does not know",
    _WINDOW: "limits its attention by a window of its own",
    "cannot make a cache from its config": "transformers makes no cache for it: it reads bytes in patches",
    "takes no mask that fits": "takes no mask that fits what is in a cache",
    "several states of a row": "passes several states of a row from layer to layer",
    "names its head a decoder": "names its head a decoder, so that its layers are not found",
    "a window other than its config's": "has a window other than its config's",
    "one token at a time": "takes one token at a time once there is a cache",
    "masks of whole texts alone": "takes masks of whole texts alone",
}
# Type -> words of the reason for which it is refused.
REFUSED: dict[str, str] = {
    **_each("axk2 deepseek_v32 glm_moe_dsa hy_v4 dots3_note_text dots3_note", _INDEX),
    **_each("qwen4_exp qwen4_exp_text", _INDEX),
    **_each("inkling_text inkling2_text inkling2_loop_text doge", _WINDOW),
    **_each("recurrent_gemma", _WINDOW),
    **_each("openai-gpt xlnet reformer", _NO_CACHE),
    **_each("rwkv xlstm deepseek_v4", _STATES),
    **_each("roberta roberta-prelayernorm camembert data2vec-text xlm-roberta xlm-roberta-xl xmod", _PADS),
    "blt": "cannot make a cache from its config",
    "cpmant": "takes no mask that fits",
    "gemma3n_text": "several states of a row",
    "modernbert-decoder": "names its head a decoder",
    "moshi": "a window other than its config's",
    "prophetnet": "one token at a time",
    "xlm": "masks of whole texts alone",
}
# Type -> entries of a small model's config, for those refused whose names do not give one.
OF_REFUSED: dict[str, Mapping[str, Any]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": None,
    },
    "modernbert-decoder": dict.fromkeys(
        ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), "default"
    ),
    "xmod": {"default_language": "en_XX"},
}
# Type -> words of the reason, where kinds of layers decide; ``recurrent_families.py`` has a config.
REFUSED_IN_PART = {"minimax": _STATES, "zaya": _STATES}
_IMAGES = "reads images: no small model of it is built by the tests"
_SPEECH = "reads speech: no small model of it is built by the tests"
# Types that are neither tested nor refused by name: their self-test decides.
UNTESTED: dict[str, str] = {
    **_each("cohere_compass_text dbrx dots1", "no small model of it is built by the tests"),
    **_each("longt5 switch_transformers", "its encoder or experts need larger models"),
    **_each(
        """
        apertus1p5 blip blip-2 chameleon cohere_compass cosmos3_edge deepseek_ocr2 diffusion_gemma
        emu3 ernie4_5_vl_moe evolla fast_vlm florence2 gemma3n gemma4 gemma4_unified glm46v glm4v
        glm4v_moe glm5_next glm_ocr glmga granite4_vision hunyuan_vl hy_v4_vl idefics inkling2
        inkling2_loop inkling_mm_model instructblip instructblipvideo janus kosmos-2 kosmos-2.5
        lfm3_vl llama4 minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 mistral_large4 mllama molmo2
        muse_spark nemotron_h_omni paddleocr_vl paligemma perception_lm pix2struct pp_formulanet
        qwen2_5_omni qwen2_5_omni_thinker qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_omni_moe_thinker
        step3p7 udop unlimited_ocr vision-encoder-decoder phi4_multimodal
        """,
        _IMAGES,
    ),
    **_each(
        """
        audioflamingo3 canary cohere_asr fun_asr_nano glmasr granite_speech granite_speech_plus
        kyutai_speech_to_text moonshine moonshine_streaming moss_transcribe_diarize musicflamingo
        nemo_speechlm omniasr qwen2_audio qwen3_asr seamless_m4t_v2 speech-encoder-decoder
        speech_to_text vibevoice vibevoice_asr voxtral voxtral_realtime
        """,
        _SPEECH,
    ),
}
# Type -> why it does not generate text token by token.
NOT_TEXT = {
    **_each("gemma4_assistant gemma4_unified_assistant", "a drafter: see assistant"),
    **_each("musicgen musicgen_melody dia pop2piano speecht5", "emits sound"),
    "pi0": "emits movements",
}
WALKED = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM")


def walked() -> set[str]:
    """The types that the installed transformers maps to models that generate text."""
    return {kind for name in WALKED for kind in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})}


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
            one.config for one in [*SEQ2SEQ_FAMILIES.values(), *COUNTING_FAMILIES.values()]
        ],
        "encoder-decoder, chains": [one.config for one in CHAIN_FAMILIES.values()],
    }.items():
        for config in found:
            kinds.setdefault(type_of(config), kind)
    return {**kinds, "dory": "decoder-only, trees"}  # in test_configs.py
