"""Modules that a model of a GGUF file has in place of transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Gathered(nn.Module):
    """A linear layer whose inputs are in another order: columns of a file's blocks are not moved.

    Args:
        order: the input of each column.
    """

    order: Tensor

    def __init__(self, linear: nn.Module, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = self.linear(states[..., self.order])
        return product


class Expert(NamedTuple):
    """The linear layers of an expert."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module


class Mixture(nn.Module):
    """A mixture of experts, of which each is linear layers of its own.

    What a row's experts give is added in their order, so a row has the same bits among any rows.

    Args:
        block: transformers', for its settings, and for an expert that all rows share.
        router: a linear layer of rows in float32.
    """

    def __init__(self, block: Any, router: nn.Module, experts: Sequence[Expert]) -> None:
        super().__init__()
        self.top_k = block.gate.top_k
        self.normed = getattr(block.gate, "norm_topk_prob", True)
        self.router = router
        self.gates = nn.ModuleList([expert.gate for expert in experts])
        self.ups = nn.ModuleList([expert.up for expert in experts])
        self.downs = nn.ModuleList([expert.down for expert in experts])
        self.act_fn = block.experts.act_fn
        self.shared_expert = getattr(block, "shared_expert", None)
        self.shared_expert_gate = getattr(block, "shared_expert_gate", None)
        self.sigmoid = nn.Sigmoid()

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, chosen = torch.softmax(self.router(rows.float()), -1).topk(self.top_k, dim=-1)
        if self.normed:
            first, *others = weights.unbind(-1)  # added in turn: a sum of torch's has an order of its own
            weights = weights / sum(others, start=first)[:, None]
        out = torch.zeros_like(rows, dtype=torch.float32)
        for number in chosen.unique().tolist():
            places, ranks = torch.where(chosen == number)
            some = rows[places]
            inner = self.act_fn(self.gates[number](some)) * self.ups[number](some)
            out.index_add_(0, places, self.downs[number](inner) * weights[places, ranks, None])
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out += self.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return out.to(rows.dtype).view(hidden_states.shape)
