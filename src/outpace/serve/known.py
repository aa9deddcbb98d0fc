"""Fields of others' APIs that this server knows and does nothing with: a refusal names whose they are."""

from __future__ import annotations

_FIELDS = {
    "OpenAI's": "audio functions function_call web_search_options moderation prompt top_logprobs "
    "reasoning_effort response_format tools tool_choice conversation background logprobs seed "
    "stop n best_of suffix echo presence_penalty frequency_penalty logit_bias prediction "
    "modalities safety_identifier context_management client_metadata include input instructions "
    "max_completion_tokens max_output_tokens max_tokens max_tool_calls messages parallel_tool_calls "
    "previous_response_id prompt_cache_key prompt_cache_retention reasoning store stream_options text "
    "truncation user verbosity",
    "Anthropic's": "mcp_servers container fallbacks diagnostics thinking system stop_sequences betas "
    "output_format cache_control inference_geo output_config speed",
    "vLLM's": "cache_salt chat_template_kwargs ignore_eos min_p min_tokens repetition_penalty "
    "return_token_ids stop_token_ids add_generation_prompt add_special_tokens allowed_token_ids "
    "bad_words chat_template "
    "continue_final_message detokenize documents guided_choice guided_grammar guided_json "
    "guided_regex include_reasoning include_stop_str_in_output kv_transfer_params length_penalty "
    "logits_processors mm_processor_kwargs priority prompt_logprobs request_id "
    "return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens "
    "structured_outputs thinking_token_budget truncate_prompt_tokens use_beam_search vllm_xargs",
    "llama-server's": "cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n "
    "dry_sequence_breakers dynatemp_exponent dynatemp_range grammar id_slot json_schema lora "
    "min_keep mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl input_extra input_prefix "
    "input_suffix n_discard n_indent n_keep n_predict n_probs parse_tool_calls "
    "post_sampling_probs reasoning_control reasoning_format repeat_last_n repeat_penalty "
    "response_fields return_progress return_tokens samplers sse_ping_interval t_max_predict_ms "
    "t_max_prompt_ms adaptive_target adaptive_decay top_n_sigma backend_sampling "
    "thinking_budget_tokens timings_per_token typical_p xtc_probability xtc_threshold",
    "DashScope's": "thinking_budget",
    "outpace's": "trace speculation speculation_metrics",
}
_OWNERS = {name: owner for owner, names in _FIELDS.items() for name in names.split()}


def refusal_of(place: str) -> str:
    """The message about a field that no type here has."""
    owner = _OWNERS.get(place)
    if owner is None:
        return f"unrecognized request argument: {place}"
    return f"{place}: this field of {owner} has no effect at this path; leave it out"
