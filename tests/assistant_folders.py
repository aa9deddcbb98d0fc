"""Tiny Gemma 4 targets, and assistants of them, in the layout in which they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from zoo.family import randomise

VOCABULARY, SIZE, WINDOW = 96, 32, 8
_HEADS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SHARED = 2  # layers of the target that have no keys of their own, as in Gemma 4 E2B


def gemma(shared: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A Gemma 4 of text with four layers.

    Args:
        shared: number of last layers that have no keys of their own.
    """
    config = Gemma4TextConfig(
        **{
            **_HEADS,
            "hidden_size": SIZE,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": 8 if shared else 0,
            "vocab_size_per_layer_input": VOCABULARY,
            **options,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    randomise(model, 0)
    return model


def assistant(seed: int = 1, ordered: bool = False, size: int = 16, **options: Any) -> Any:
    """An assistant of two layers for any of these, with random weights.

    Args:
        ordered: its head scores a few clusters of the vocabulary.
    """
    text = {
        **_HEADS,
        "hidden_size": size,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        **options,
    }
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text),
        backbone_hidden_size=options.get("backbone", SIZE),
        use_ordered_embeddings=ordered,
        num_centroids=12,
        centroid_intermediate_top_k=9,
    )
    made = Gemma4AssistantForCausalLM(config).eval()
    randomise(made, seed)
    if ordered:
        order = torch.randperm(text["vocab_size"], generator=torch.Generator().manual_seed(2))
        made.masked_embedding.token_ordering.copy_(order)
    return made


def write(folder: Path, **options: Any) -> Path:
    """A folder with an assistant, in float32."""
    made = assistant(**options)
    made.generation_config.num_assistant_tokens = 4
    made.save_pretrained(folder)
    return folder


def learn(made: Any, model: Any, texts: list[list[int]], steps: int = 60) -> None:
    """Train an assistant to predict a target's own texts, so that drafts are accepted."""
    ids = torch.tensor(texts)
    with torch.no_grad():
        told = model(ids, output_hidden_states=True, return_shared_kv_states=True)
    embedded = model.get_input_embeddings()(ids).detach()
    made.to(model.dtype)
    optimiser = torch.optim.Adam(list(made.parameters()), lr=3e-3)
    for step in range(steps):
        place = 2 + step % (ids.shape[1] - 5)
        state, loss = told.hidden_states[-1][:, place - 1 : place], 0.0
        seen = {kind: (k[:, :, :place], v[:, :, :place]) for kind, (k, v) in told.shared_kv_states.items()}
        for ahead in range(3):
            at = place + ahead
            out = made(
                inputs_embeds=torch.cat([embedded[:, at : at + 1], state], dim=-1),
                position_ids=torch.full((len(ids), 1), place),
                shared_kv_states=seen,
            )
            state = out.last_hidden_state
            loss = loss + torch.nn.functional.cross_entropy(out.logits[:, 0], ids[:, at + 1])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    made.eval()
