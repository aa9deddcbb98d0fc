"""The trained part of ``parallel_tokens``: embeddings of tokens not known yet (PaSS, Monea et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core import OutpaceError
from outpace.drafting.learned import Batch, Fit, Learned, Losses, Objective, accepted_of_chain, measure
from outpace.targets.base import TargetModel

_PLACES = 16  # of a text that are looked ahead from in one forward, where all are wanted


@dataclass(frozen=True)
class LookAheadConfig:
    """Look-ahead embeddings.

    Attributes:
        num_lookahead: how many, at least 1.
        places: of each row of a batch that are learnt from, drawn at random; at least 1.
    """

    num_lookahead: int = 3
    places: int = 16

    def __post_init__(self) -> None:
        if self.num_lookahead < 1 or self.places < 1:
            raise OutpaceError("parallel_tokens: num_lookahead and places must be at least 1")


class LookAhead(Learned):
    """A table of embeddings. It is learnt through the target, which stays as it is."""

    method: ClassVar[str] = "parallel_tokens"
    config_type: ClassVar[type[Any]] = LookAheadConfig

    def __init__(self, config: LookAheadConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.embeddings = nn.Parameter(torch.zeros(config.num_lookahead, fit.hidden_size))

    @classmethod
    def new(cls, config: Any, target: TargetModel) -> LookAhead:
        made = super().new(config, target)
        tokens = torch.arange(target.vocabulary, device=target.hidden.device)
        with torch.no_grad():
            made.embeddings.copy_(target.embed(tokens).float().mean(dim=0).expand_as(made.embeddings))
        return made

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()

    def rows(self, batch: Batch, places: Tensor) -> Tensor:
        """What the target says at look-ahead rows behind some places of each text.

        Args:
            places: [B, G].

        Returns:
            Logits [B, G, K, vocabulary]: the k-th, from 0, of the token k + 2 after the place.
        """
        (batch_size, width), count = batch.tokens.shape, self.config.num_lookahead
        groups = places.shape[1]
        text = self.target.embed(batch.tokens)
        own = self.embeddings.to(text.dtype).expand(batch_size, groups, -1, -1).flatten(1, 2)
        steps = torch.arange(count, device=places.device)
        ahead = batch.positions.gather(1, places)[..., None] + 1 + steps
        positions = torch.cat([batch.positions, ahead.flatten(1)], dim=1)
        logits = self.target.through(torch.cat([text, own], dim=1), positions, self._seen(batch, places))
        found: Tensor = logits[:, width:].unflatten(1, (groups, count))
        return found

    def _seen(self, batch: Batch, places: Tensor) -> Tensor:
        """Who sees whom, [B, N, N], of the text's rows and then the look-ahead rows of each place in turn."""
        width, count = batch.tokens.shape[1], self.config.num_lookahead
        order = torch.arange(width, device=places.device)
        documents = torch.cat(
            [batch.documents, batch.documents.gather(1, places).repeat_interleave(count, 1)], 1
        )
        ends = torch.cat([order.expand_as(batch.tokens), places.repeat_interleave(count, 1)], dim=1)
        size = ends.shape[1]
        seen = torch.zeros(len(ends), size, size, dtype=torch.bool, device=places.device)
        seen[:, :, :width] = (order <= ends[..., None]) & (batch.documents[:, None] == documents[..., None])
        chain = torch.ones(count, count, dtype=torch.bool, device=places.device).tril()
        seen[:, width:, width:] = torch.block_diag(*[chain] * places.shape[1])
        return seen

    def loss(self, batch: Batch, objective: Objective) -> Losses:
        weights = [1.0] * self.config.num_lookahead
        return measure(objective, self._depths(batch), weights)

    def _depths(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        shape = (len(batch.tokens), self.config.places)
        places = torch.randint(batch.tokens.shape[1], shape, device=batch.tokens.device)
        rows = self.rows(batch, places)
        for depth in range(self.config.num_lookahead):
            at, group = batch.ahead(depth + 2).gather(1, places).nonzero(as_tuple=True)
            chosen = places[at, group]
            yield (
                rows[at, group, depth],
                batch.logits[at, chosen + 1 + depth],
                batch.tokens[at, chosen + 2 + depth],
            )

    @torch.no_grad()
    def accepted(self, batch: Batch) -> Tensor:
        size, width = batch.tokens.shape
        guesses = torch.full((size, width, self.config.num_lookahead), -1, device=batch.tokens.device)
        # What is drafted after a root was said behind the row before it.
        for places in torch.arange(width - 1, device=batch.tokens.device).split(_PLACES):
            guesses[:, places + 1] = self.rows(batch, places.expand(size, -1)).argmax(dim=-1)
        same = batch.documents[:, 1:] == batch.documents[:, :-1]
        guesses[:, 1:][~same] = -1
        return accepted_of_chain(batch, guesses)
