"""Families that take chains only: their positions or masks cannot be set."""

from __future__ import annotations

from typing import Any

from zoo.family import VOCABULARY, WINDOW, Family

_OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

CHAINS: dict[str, Family] = {
    "bloom": Family("BloomConfig", {**_OLD, "n_layer": 2, "n_head": 4}, sdpa=False, common=False),
    "mpt": Family(
        "MptConfig",
        {**_OLD, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        sdpa=False,
        common=False,
    ),
    "falcon-alibi": Family(
        "FalconConfig",
        {**_OLD, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        common=False,
    ),
    "gpt-neo": Family(
        "GPTNeoConfig",
        {
            **_OLD,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 256,
        },
        sdpa=False,
        common=False,
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "bart-decoder": Family(
        "BartConfig",
        {
            **{name: value for name, value in _OLD.items() if name != "hidden_size"},
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "pad_token_id": 0,
            "forced_eos_token_id": None,
        },
        common=False,
    ),
}
