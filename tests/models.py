"""Small models for tests."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(
    vocabulary: int = 97,
    context: int = 256,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layers: int = 2,
    heads: int = 4,
) -> LlamaForCausalLM:
    """A random Llama whose weights are large enough that its greedy text does not settle into one token."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8 * heads,
        intermediate_size=16 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()
