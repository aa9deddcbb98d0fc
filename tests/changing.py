"""A small model whose weights tests change, and the ways to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM


def made(dtype: torch.dtype, layers: int = 1) -> Any:
    """A random model with biases and norms of heads, of sizes that every kernel takes."""
    config = Qwen3Config(
        vocab_size=112,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        attention_bias=True,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.2 * torch.randn_like(weight)
    return model.to(dtype).eval()


def by_fused_optimiser(model: Any, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = model.get_parameter(name)
    optimiser = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
    optimiser.step()
    weight.grad = None


def by_adding(model: Any, name: str) -> None:
    weight = model.get_parameter(name)
    weight.data.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).to(weight))


def by_copying(model: Any, name: str) -> None:
    data = model.get_parameter(name).data
    data.copy_(data.flip(0) * 1.5 + 0.25)


def by_numpy(model: Any, name: str) -> None:
    data = model.get_parameter(name).detach()
    if data.dtype == torch.bfloat16:
        data.view(torch.int16).numpy()[...] ^= -0x8000  # all signs
    else:
        data.numpy()[...] *= -1


def by_load_state_dict(model: Any, name: str) -> None:
    model.load_state_dict({name: model.get_parameter(name).detach() * 1.5}, strict=False, assign=True)


def by_new_data(model: Any, name: str) -> None:
    model.get_parameter(name).data = model.get_parameter(name).detach() * 1.5


def by_new_parameter(model: Any, name: str) -> None:
    owner, _, own = name.rpartition(".")
    changed = nn.Parameter(model.get_parameter(name).detach() * 1.5)
    setattr(model.get_submodule(owner), own, changed)


def in_place(model: Any, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)


WRITES: list[Callable[[Any, str], None]] = [
    by_fused_optimiser,
    by_adding,
    by_copying,
    by_numpy,
    by_load_state_dict,
    by_new_data,
    by_new_parameter,
    in_place,
]
