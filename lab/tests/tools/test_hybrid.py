"""The hybrid that measurements of recurrent models are made with."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from outpace import nano_path

pytest.importorskip("transformers.models.qwen3_5", reason="transformers has no Qwen3.5")

from train_hybrid import new_hybrid


def test_a_hybrid_begins_as_its_llama() -> None:
    """Embeddings and products alike; its attention, over one place, gives what the Llama's does."""
    folder = nano_path()
    old = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = new_hybrid(folder)
    place = made.config.layer_types.index("full_attention")
    assert torch.equal(made.lm_head.weight, old.lm_head.weight)
    layers = made.model.layers[place], old.model.layers[place]
    states = torch.randn(1, 1, old.config.hidden_size, generator=torch.Generator().manual_seed(0))
    angles = old.model.rotary_emb(states, torch.zeros(1, 1))
    for part in ("input_layernorm", "mlp"):
        torch.testing.assert_close(*(getattr(layer, part)(states) for layer in layers))
    found, told = (layer.self_attn(states, angles, attention_mask=None)[0] for layer in layers)
    torch.testing.assert_close(found, told)
    ids = torch.tensor([[5, 9, 2, 7]])
    assert made(ids).logits.isfinite().all()
