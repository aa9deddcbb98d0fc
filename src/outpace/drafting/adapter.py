"""The adapter of ``early_exit``: from the state of a lower layer to that of the last (Liu et al. 2024).

Kangaroo's adapter is a layer of attention between two norms. This one is a feed-forward layer between two
norms, so that it has no keys and values of its own to keep: the lower layers' attention is all there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafting.learned import Batch, Fit, Learned, Losses, Objective, accepted_of_chain, measure


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter.

    Attributes:
        layers: of the target that run before it; at least 1.
        width: of its hidden layer, relative to the target's hidden size; above 0.
        num_draft_tokens: of the chains that held-out texts are measured by; at least 1.
        min_confidence: likewise, the probability below which a chain ends, in [0, 1].
    """

    layers: int = 2
    width: float = 2.0
    num_draft_tokens: int = 6
    min_confidence: float = 0.6

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width <= 0 or self.num_draft_tokens < 1:
            raise OutpaceError(
                "early_exit: layers and num_draft_tokens must be at least 1, and width above 0"
            )
        if not 0 <= self.min_confidence <= 1:
            raise OutpaceError(
                f"early_exit: min_confidence must be between 0 and 1, not {self.min_confidence}"
            )


class Adapter(Learned):
    """A residual feed-forward layer, and a norm in place of the target's own before its head."""

    method: ClassVar[str] = "early_exit"
    config_type: ClassVar[type[Any]] = AdapterConfig

    def __init__(self, config: AdapterConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        size = fit.hidden_size
        self.before = nn.RMSNorm(size, eps=1e-6)
        self.up = nn.Linear(size, max(1, round(config.width * size)))
        self.down = nn.Linear(self.up.out_features, size)
        self.after = nn.RMSNorm(size, eps=1e-6)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.config.layers,)

    def rows(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of the next token, from what came out of the lower layers."""
        own = states.to(self.up.weight.dtype)
        own = own + self.down(nn.functional.silu(self.up(self.before(own))))
        return self.target.head(self.after(own))

    def loss(self, batch: Batch, objective: Objective) -> Losses:
        at, places = batch.ahead(1).nonzero(as_tuple=True)
        draft = self.rows(batch.hidden[self.config.layers][at, places])
        return measure(objective, [(draft, batch.logits[at, places], batch.tokens[at, places + 1])], [1.0])

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        # While a chain is right, its rows are those of the text: one guess a place is all there is to know.
        rows = self.rows(batch.hidden[self.config.layers]).float()
        best = rows.argmax(dim=-1)
        sure = rows.max(dim=-1).values - rows.logsumexp(dim=-1)
        best[sure.exp() < self.config.min_confidence] = -1
        depth = self.config.num_draft_tokens
        guesses = torch.full((*best.shape, depth), -1, dtype=best.dtype, device=best.device)
        for ahead in range(min(depth, best.shape[1])):
            guesses[:, : best.shape[1] - ahead, ahead] = best[:, ahead:]
        return accepted_of_chain(batch, guesses)
