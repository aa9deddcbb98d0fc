"""Decoder layers for drafters with their own module, structured and named as Llama's.

Published drafters therefore load unchanged. Where a layer's keys and values are stored (in a cache while
decoding, in the batch itself in training) is the caller's choice, passed as a ``Store``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from outpace.core import OutpaceError
from outpace.transfer import upload

_DEVIATION = 0.02  # of a matrix's initial entries

# New rows' keys and values, each [B, heads, width, size] -> those of all rows that are attended to.
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The size of decoder layers.

    Attributes:
        hidden_size: hidden size; 0 is the target's.
        intermediate_size: size of the feed-forward part; 0 is about 8/3 of the hidden size.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_size: size of a head; 0 is the hidden size divided by the number of heads.
        eps: epsilon of the norms.
        bias: whether the attention projections have a bias.
        rope: transformers' ``rope_parameters``: ``rope_theta``, ``rope_type`` and the parameters of that
            type.
        context: maximum number of positions; some types of rope depend on it.
    """

    hidden_size: int = 0
    intermediate_size: int = 0
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 0
    eps: float = 1e-6
    bias: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    context: int = 2048

    def sized(self, hidden_size: int) -> Self:
        """The config with default sizes resolved.

        Args:
            hidden_size: the target's hidden size.

        Raises:
            OutpaceError: sizes that are invalid for attention.
        """
        for name in ("hidden_size", "intermediate_size", "head_size"):
            if getattr(self, name) < 0:
                raise OutpaceError(
                    f"{name} must be at least 1, or 0 for the default, not {getattr(self, name)}"
                )
        size = self.hidden_size or hidden_size
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise OutpaceError(
                f"heads must be a multiple of kv_heads, both at least 1; not {self.heads} and {self.kv_heads}"
            )
        # Rotary embeddings rotate pairs of numbers.
        head = self.head_size or max(size // self.heads // 2 * 2, 2)
        if head % 2:
            raise OutpaceError(f"head_size must be even, not {head}")
        wide = self.intermediate_size or -(-size * 8 // 3 // 8) * 8
        return replace(self, hidden_size=size, intermediate_size=wide, head_size=head)

    def transformers(self) -> dict[str, Any]:
        """These sizes by the names of a LlamaConfig."""
        return {
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "rms_norm_eps": self.eps,
            "attention_bias": self.bias,
            "rope_parameters": dict(self.rope),
            "max_position_embeddings": self.context,
        }


class Rotary:
    """Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), of the types that transformers computes.

    Not a module, so that its frequencies stay float32 when the layers are cast.
    """

    def __init__(self, config: LayerConfig) -> None:
        if torch.get_default_device().type == "meta":
            return  # of a sketch, which is never run
        kind = config.rope.get("rope_type", "default")
        size = config.head_size
        self._scale = 1.0
        if kind == "default":
            steps = torch.arange(0, size, 2, dtype=torch.float32) / size
            self._frequencies = float(config.rope["rope_theta"]) ** -steps
            return
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
            raise OutpaceError(
                f"rope type {kind!r} is unknown, or depends on the length of the text; a drafter may have "
                "default, linear, llama3 or yarn"
            )
        made = LlamaConfig(**config.transformers())
        self._frequencies, self._scale = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"))

    def __call__(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, width, head size] of positions [B, width], in the dtype of ``like``."""
        if self._frequencies.device != positions.device:  # a graph may contain no upload
            self._frequencies = upload(self._frequencies, positions.device)
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return (angles.cos() * self._scale).to(like), (angles.sin() * self._scale).to(like)


def rotate(states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rows [B, heads, width, size] rotated by their positions."""
    cos, sin = angles
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention.

    Args:
        inputs: width of the rows from which queries, keys and values are computed.
        norms: whether queries and keys are normalised per head, as in Qwen3.
    """

    def __init__(self, config: LayerConfig, inputs: int, norms: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, config.head_size
        self.q_proj = nn.Linear(inputs, self.heads * self.size, bias=config.bias)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.size, bias=config.bias)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.size, bias=config.bias)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=config.bias)
        self.q_norm = nn.RMSNorm(self.size, eps=config.eps) if norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.size, eps=config.eps) if norms else nn.Identity()

    def keys(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, width, size] of rows [B, width, inputs]."""
        shape = (*states.shape[:2], self.kv_heads, self.size)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        return rotate(keys, angles), self.v_proj(states).view(shape).transpose(1, 2)

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, store: Store) -> Tensor:
        """Attend with rows [B, width, inputs] and return [B, width, hidden size].

        Args:
            mask: [B or 1, 1, width, columns], true where a row attends to a column of the keys and values
                that ``store`` returns.
        """
        batch, width, _ = states.shape
        queries = self.q_norm(self.q_proj(states).view(batch, width, self.heads, self.size)).transpose(1, 2)
        keys, values = store(*self.keys(states, angles))
        # Heads that share keys become rows: no keys are copied, and one row per head is torch's slowest case.
        groups = self.heads // self.kv_heads
        rows = rotate(queries, angles).reshape(batch, self.kv_heads, groups * width, self.size)
        seen = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
        seen = seen.reshape(batch, self.heads, width, self.size)
        out: Tensor = self.o_proj(seen.transpose(1, 2).reshape(batch, width, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    """One decoder layer, with norms before attention and before the feed-forward part.

    Args:
        normed: whether there is a norm before attention.
        norms: whether queries and keys are normalised.
    """

    def __init__(self, config: LayerConfig, normed: bool = True, norms: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size, norms)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.eps) if normed else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.eps)

    def forward(self, states: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, store: Store) -> Tensor:
        """Apply the layer to rows [B, width, hidden size]; see ``Attention``."""
        states = states + self.self_attn(self.input_layernorm(states), angles, mask, store)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


def itself(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The store for rows that attend only to each other."""
    return keys, values


def initialise(module: nn.Module) -> None:
    """Initialise weights: normal, biases 0, norms 1; smaller for projections that end a residual branch."""
    for name, weight in module.named_parameters():
        if weight.dim() < 2:
            nn.init.zeros_(weight) if name.endswith("bias") else nn.init.ones_(weight)
        else:
            branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=_DEVIATION / math.sqrt(2) if branch else _DEVIATION)
