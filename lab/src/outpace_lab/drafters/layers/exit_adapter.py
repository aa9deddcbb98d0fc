"""Adapters of an early exit, from a lower layer's state to the last layer's (Liu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafters.support.draws import check_confidence
from outpace.learned.layers import Attention, LayerConfig, Rotary, Store, itself
from outpace.learned.learned import Fit
from outpace.learned.vocabulary import DraftVocabulary
from outpace.spec import check_choices, check_least
from outpace.targets.base import TargetModel
from outpace_lab.train.trained import (
    Losses,
    Objective,
    TrainedPart,
    TrainingBatch,
    accepted_of_chain,
    among,
    ids_of,
    learnable,
    learnt_logits,
    measure,
)

Kind = Literal["feed_forward", "attention"]


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter.

    Attributes:
        layers: number of the target's layers before it; at least 1.
        adapter: the layer between its norms: "feed_forward", or "attention" over the lower layers' outputs so
            far, as in Kangaroo.
        width: width of the feed-forward part's hidden layer, relative to the target's hidden size; above 0, 2
            by default.
        heads: attention heads; at least 1, 4 by default.
        num_speculative_tokens: length of the chains measured on held-out text, and default length of drafts;
            at least 1.
        min_confidence: the probability, among the ids drafted, below which a chain ends, in [0, 1].
        draft_vocabulary: number of the target's ids that are drafted, those most frequent in the training
            text; 0 is all.
    """

    layers: int = 2
    adapter: Kind = "feed_forward"
    width: float | None = None
    heads: int | None = None
    num_speculative_tokens: int = 6
    min_confidence: float = 0.6
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        check_choices("early_exit", self, "adapter")
        check_least("early_exit", self, layers=1, heads=1, num_speculative_tokens=1, draft_vocabulary=0)
        other = "width" if self.adapter == "attention" else "heads"
        if getattr(self, other) is not None:
            raise OutpaceError(f"early_exit: adapter={self.adapter} has no option {other}; leave it out")
        if self.width is not None and self.width <= 0:
            raise OutpaceError(f"early_exit: width must be above 0, not {self.width}")
        check_confidence("early_exit", self.min_confidence)


class Adapter(TrainedPart):
    """A residual layer, feed-forward or attention, between two norms.

    Attributes:
        attends: the sizes of its attention; None if it has none.
    """

    method: ClassVar[str] = "early_exit"
    config_type: ClassVar[type[Any]] = AdapterConfig

    def __init__(self, config: AdapterConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.drafted = DraftVocabulary(self.method, config.draft_vocabulary, fit)
        size = fit.hidden_size
        self.attends: LayerConfig | None = None
        self.before = nn.RMSNorm(size, eps=1e-6)
        self.after = nn.RMSNorm(size, eps=1e-6)
        if config.adapter == "attention":
            heads = config.heads or 4
            self.attends = LayerConfig(heads=heads, kv_heads=heads).sized(size)
            self.rotary = Rotary(self.attends)
            self.self_attn = Attention(self.attends, size)
            nn.init.zeros_(self.self_attn.o_proj.weight)
            return
        self.up = nn.Linear(size, max(1, round((config.width or 2.0) * size)))
        self.down = nn.Linear(self.up.out_features, size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.config.layers,)

    def check(self, target: TargetModel) -> None:
        super().check(target)
        if self.config.layers >= target.layers:
            raise OutpaceError(
                f"early_exit: the target has {target.layers} layers, so layers must be at most "
                f"{target.layers - 1}, not {self.config.layers}"
            )

    def advance(
        self,
        states: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        store: Store = itself,
    ) -> Tensor:
        """Inputs of the target's head, [B, width, hidden size].

        Args:
            states: outputs of the lower layers, [B, width, hidden size].
            positions: [B, width], if it attends.
            mask: [B, 1, width, columns], if it attends: true where a row attends to a column of the keys and
                values that ``store`` returns.
        """
        own = states.to(self.before.weight.dtype)
        normed = self.before(own)
        if self.attends is None:
            own = own + self.down(nn.functional.silu(self.up(normed)))
        else:
            assert positions is not None and mask is not None
            own = own + self.self_attn(normed, self.rotary(positions, own), mask, store)
        out: Tensor = self.after(own)
        return out

    def _states(self, batch: TrainingBatch) -> Tensor:
        """Inputs of the target's head at each place, [B, T, hidden size]."""
        return self.advance(batch.hidden[self.config.layers], batch.positions, batch.seen[:, None])

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., drafted ids] of inputs of the target's head, [..., hidden size]."""
        return self.drafted.head(self.target)(states)

    def logits(self, batch: TrainingBatch) -> Tensor:
        """Logits [B, T, drafted ids] of the token after each place."""
        return self.head(self._states(batch))

    def loss(self, batch: TrainingBatch, objective: Objective) -> Losses:
        at, places, labels, every = learnable(self.drafted, batch)
        draft = self.head(self._states(batch)[at, places])
        own = learnt_logits(self, batch, at, places)
        return among(measure(objective, [(draft, own, labels)], [1.0]), every)

    @torch.no_grad()
    def accepted(self, batch: TrainingBatch) -> Tensor:
        # While a chain is right, its rows are those of the text: its guess of depth d is that of place t + d.
        rows = self.logits(batch).float()
        best = ids_of(self.drafted, rows.argmax(dim=-1))
        sure = rows.max(dim=-1).values - rows.logsumexp(dim=-1)
        best[sure.exp() < self.config.min_confidence] = -1
        depth = self.config.num_speculative_tokens
        padded = nn.functional.pad(best, (0, depth - 1), value=-1)
        return accepted_of_chain(batch, padded.unfold(1, depth, 1))
