"""The arguments of transformers' ``generate()``: honoured, without effect, or refused.

docs/reference/transformers.md shows these lists.
Arguments of the model's forward (``attention_mask``, images, a cache) are in ``checks.py``.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

# The tokens are those that the stock generate() means by them.
HONOURED = (
    # of generate() itself
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "streamer", "tokenizer", "custom_generate",
    # length and end
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings",
    "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "token_healing",
    # sampling
    "do_sample", "num_return_sequences", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
    "epsilon_cutoff", "eta_cutoff",
    # logits
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values",
    "renormalize_logits", "watermarking_config",
    # results
    "return_dict_in_generate", "output_scores", "output_logits",
)  # fmt: skip

# Refused if set, by ``checks.py``; what to do instead.
REFUSED = {
    "num_beams": "pass num_beams=1",
    "constraints": "pass no constraints",
    "force_words_ids": "pass no constraints",
    "dola_layers": "leave it out",
    "penalty_alpha": "leave it out",
    "guidance_scale": "leave it out, or pass 1",
    "assistant_model": "name a drafter in accelerate",
    "prompt_lookup_num_tokens": "leave it out; a drafter does its work",
    "assistant_early_exit": "leave it out; a drafter does its work",
    "use_mtp": "leave it out; the drafter mtp does its work",
    "is_assistant": "leave it out; it is for a model that drafts for another",
    "synced_gpus": "pass False, and run one whole model in each process",
    "output_attentions": "run the model once over the result for them",
    "output_hidden_states": "run the model once over the result for them",
}

_BEAMS = "is about beams, which are refused"
_ASSISTANT = "is about assistants, which are refused"
_CACHE = "is about transformers' cache; outpace has its own"
_COMPILED = "is about transformers' forwards; outpace has its own steps"

# Taken and unused, as the stock generate() leaves them unused without what they are about.
WITHOUT_EFFECT = {
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "num_beam_groups": _BEAMS,
    "diversity_penalty": _BEAMS,
    "low_memory": "is about contrastive search, which is refused",
    "negative_prompt_ids": "is about guidance_scale, which is refused",
    "negative_prompt_attention_mask": "is about guidance_scale, which is refused",
    "assistant_tokenizer": _ASSISTANT,
    "num_assistant_tokens": _ASSISTANT,
    "num_assistant_tokens_schedule": _ASSISTANT,
    "assistant_confidence_threshold": _ASSISTANT,
    "max_matching_ngram_size": _ASSISTANT,
    "assistant_lookbehind": _ASSISTANT,
    "target_lookbehind": _ASSISTANT,
    "assistant_ensemble_weight": _ASSISTANT,
    "speculation_type": _ASSISTANT,
    "use_cache": _CACHE,
    "cache_implementation": f"{_CACHE} ('quantized', which changes tokens, and 'paged' are refused)",
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "prefill_chunk_size": _COMPILED,
    "compile_config": _COMPILED,
    "disable_compile": _COMPILED,
    "continuous_batching_config": "is about generate_batch(), which is not accelerated",
    "trust_remote_code": "is about custom_generate",
}


def fields() -> set[str]:
    """The fields of a GenerationConfig in this version of transformers."""
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}


def unknown(config: GenerationConfig) -> list[str]:
    """The fields of a config that are set, and of which outpace does not know what they do."""
    unlisted = fields().difference(HONOURED, REFUSED, WITHOUT_EFFECT)
    defaults: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    return sorted(
        name for name in unlisted if getattr(config, name, None) not in (None, False, defaults.get(name))
    )
