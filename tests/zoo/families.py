"""Model families that verify trees: their config class in transformers, and the options that differ.

An entry is ``Family(config, options)``, with ``sdpa=False`` if the family has eager attention alone,
``sliding=True`` if some of its layers see a window only, ``common=False`` if its config does not take the
usual names, and another ``seed`` if the random model loops. ``mixed_families.py`` has those with experts or
several kinds of layers, ``chain_families.py`` those that take chains only.
"""

from __future__ import annotations

import pytest

from zoo.family import VOCABULARY, WINDOW, Family
from zoo.mixed_families import MIXED

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig"),
    "mistral": Family("MistralConfig", {"sliding_window": WINDOW, "head_dim": 8}, sliding=True),
    "qwen2": Family("Qwen2Config"),
    "qwen2-sliding": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        sliding=True,
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 16}),
    "phi3": Family("Phi3Config", {"sliding_window": WINDOW}, sliding=True),
    "gpt2": Family(
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        common=False,
    ),
    "gpt-neox": Family("GPTNeoXConfig", seed=2),
    "opt": Family("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": Family("Starcoder2Config", {"sliding_window": WINDOW}, sliding=True, seed=3),
    "stablelm": Family("StableLmConfig", seed=1),
    "olmo2": Family("Olmo2Config"),
    "granite": Family(
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    **MIXED,
}

# All families, for a property that one of each kind shows: grouped heads, soft caps, experts, learned
# positions, sinks, compressed keys. The others are slow.
_KINDS = {"llama", "gemma2", "qwen3-moe", "gpt2", "gpt-oss", "deepseek-v3"}
BY_KIND = [pytest.param(name, marks=() if name in _KINDS else pytest.mark.slow) for name in FAMILIES]
