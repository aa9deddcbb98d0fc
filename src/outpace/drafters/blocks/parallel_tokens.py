"""Parallel speculative sampling: look-ahead embeddings make the target guess ahead (PaSS, Monea et al. 2023).

Rows with learned embeddings in place of tokens ride along in a step: behind a node at place t, row k, from 0,
takes the place t + 1 + k of a token that is not known yet, and the target's prediction there is a guess of
the token at place t + 2 + k. The next step verifies the guesses, and takes look-ahead rows along again, so a
step is one forward.

What differs from the paper: there drafting and verifying are two forwards; here they are one, with look-ahead
rows behind the root and, by default, behind each guess, so that a full draft is ready whichever guesses are
accepted (Stern et al. 2018, section 4, merge the two in the same way). Guesses are drawn with the target's
own noise. Without trained embeddings the mean of the target's own is used, which guesses badly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from outpace.core import Draft, OutpaceError
from outpace.drafters.base import SequenceDrafter
from outpace.drafters.blocks.blocks import draw_places
from outpace.drafters.support.draws import Draws, Noise, check_noise
from outpace.drafters.support.growth import Growth, grow
from outpace.drafters.support.shapes import Growing, shape_of
from outpace.drafters.support.vocabulary import Vocabulary
from outpace.learned.learned import Batch, Fit, Learned, Losses, Objective, accepted_of_chain, measure
from outpace.sequence import Sequence, Step
from outpace.targets.base import TargetModel

_PLACES = 16  # places of a text that get look-ahead rows in one forward, if all are wanted


@dataclass(frozen=True)
class LookAheadConfig:
    """Look-ahead embeddings.

    Attributes:
        num_speculative_tokens: their number, at least 1.
        places: places of each row of a batch that are learnt from, drawn anew per batch; at least 1.
    """

    num_speculative_tokens: int = 3
    places: int = 16

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1 or self.places < 1:
            raise OutpaceError("parallel_tokens: num_speculative_tokens and places must be at least 1")


class LookAhead(Learned):
    """A table of embeddings, learnt through the frozen target."""

    method: ClassVar[str] = "parallel_tokens"
    config_type: ClassVar[type[Any]] = LookAheadConfig

    def __init__(self, config: LookAheadConfig, fit: Fit) -> None:
        super().__init__(config, fit)
        self.embeddings = nn.Parameter(torch.zeros(config.num_speculative_tokens, fit.hidden_size))

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
        """The target's predictions at look-ahead rows behind some places of each text.

        Args:
            places: [B, G].

        Returns:
            Logits [B, G, K, vocabulary]: row k, from 0, predicts the token k + 2 places after the given one.
        """
        (batch_size, width), count = batch.tokens.shape, self.config.num_speculative_tokens
        groups = places.shape[1]
        text = self.target.embed(batch.tokens)
        own = self.embeddings.to(text.dtype).expand(batch_size, groups, -1, -1).flatten(1, 2)
        steps = torch.arange(count, device=places.device)
        ahead = batch.positions.gather(1, places)[..., None] + 1 + steps
        positions = torch.cat([batch.positions, ahead.flatten(1)], dim=1)
        output = self.target.through(torch.cat([text, own], dim=1), positions, self._seen(batch, places))
        assert output.logits is not None
        found: Tensor = output.logits[:, width:].unflatten(1, (groups, count))
        return found

    def _seen(self, batch: Batch, places: Tensor) -> Tensor:
        """The mask [B, N, N] of the text's rows and then the look-ahead rows of each place in turn."""
        width, count = batch.tokens.shape[1], self.config.num_speculative_tokens
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
        weights = [1.0] * self.config.num_speculative_tokens
        return measure(objective, self._depths(batch), weights)

    def _depths(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        places = draw_places(batch, self.config.places, range(2, self.config.num_speculative_tokens + 2))
        rows = self.rows(batch, places)
        for depth in range(self.config.num_speculative_tokens):
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
        guesses = torch.full(
            (size, width, self.config.num_speculative_tokens), -1, device=batch.tokens.device
        )
        # The draft of a root at place t + 1 was predicted behind place t.
        for places in torch.arange(width - 1, device=batch.tokens.device).split(_PLACES):
            guesses[:, places + 1] = self.rows(batch, places.expand(size, -1)).argmax(dim=-1)
        same = batch.documents[:, 1:] == batch.documents[:, :-1]
        guesses[:, 1:][~same] = -1
        # The first step after a prompt only looks ahead.
        guesses[:, :-1][batch.counted[:, 1:] & ~batch.counted[:, :-1]] = -1
        return accepted_of_chain(batch, guesses)


@dataclass
class Ahead:
    """A sequence, and the target's predictions ahead of it.

    Attributes:
        vocabulary: the first id that is a look-ahead embedding.
        rows: the target's logits [vocabulary] for the tokens after the next root, in order.
    """

    sequence: Sequence
    shared: Growth
    vocabulary: int
    rows: list[Tensor] = field(default_factory=list)
    tree: Growing = field(init=False)


@dataclass(frozen=True)
class ParallelTokens(SequenceDrafter[Ahead]):
    """Look-ahead embeddings for the target.

    Attributes:
        path: the folder that ``outpace train parallel_tokens`` wrote, or the embeddings; None drafts
            with the mean of the target's own.
        num_speculative_tokens: K, look-ahead rows after one another, and so the longest draft; at least 1. By
            default as many as there are trained embeddings, or 3.
        behind: "all": look-ahead rows behind the root and each guess, K * (K + 2) nodes per step; "root":
            behind the root only, 2 * K nodes, and the next draft is shorter by what was accepted.
        draws: "coupled": with the target's own noise, independent under a verifier that needs that;
            "independent": with noise of its own; "greedy": its most probable tokens.
    """

    path: Any = field(default=None, repr=False)
    num_speculative_tokens: int | None = None
    behind: Literal["all", "root"] = "all"
    draws: Noise = "coupled"

    paper: ClassVar[str] = "Monea, Joulin, Grave 2023, PaSS: Parallel Speculative Sampling (arXiv 2311.13581)"
    probabilities: ClassVar[bool] = True
    ramp: ClassVar[int] = 2  # the first step only looks ahead

    def __post_init__(self) -> None:
        self.check_least(num_speculative_tokens=1)
        if self.behind not in ("all", "root"):
            raise OutpaceError(f"parallel_tokens: behind must be 'all' or 'root', not {self.behind!r}")
        check_noise("parallel_tokens", self.draws)

    @property
    def _count(self) -> int:
        """K, look-ahead rows behind a node."""
        made = LookAheadConfig() if self.path is None else LookAhead.config_of(self.path)
        given = self.num_speculative_tokens
        return int(made.num_speculative_tokens if given is None else given)

    @property
    def widths(self) -> tuple[int, ...]:
        count = self._count
        return (count * (count + 2) if self.behind == "all" else 2 * count,)

    def attach(self, target: TargetModel) -> TargetModel:
        if self.path is None:
            return target.with_embeddings(self._count)
        table = LookAhead.of(self.path, target).embeddings
        if len(table) < self._count:
            raise OutpaceError(
                f"parallel_tokens: there are {len(table)} trained embeddings, too few for "
                f"num_speculative_tokens={self.num_speculative_tokens}; leave it out"
            )
        return target.with_embeddings(table)

    def prepare(self, target: TargetModel) -> tuple[Growth, int]:
        if target.extra < (count := self._count):
            raise OutpaceError("parallel_tokens rides in the target's steps, so it drafts alone; use it so")
        shape = shape_of(count, method="parallel_tokens")
        draws = Draws(self.draws)
        return Growth(Vocabulary(), shape, draws, least=-math.inf, by_path=True), target.vocabulary

    def start(self, sequence: Sequence, shared: tuple[Growth, int]) -> Ahead:
        return Ahead(sequence, *shared)

    def draft(self, state: Ahead) -> Draft:
        state.tree = Growing(len(state.rows), state.shared.shape)
        while state.tree.depth < len(state.rows) and state.tree.front:
            grow([state], state.rows[state.tree.depth][None])
        chain = state.tree.finish()
        tokens, parents = list(chain.tokens), list(chain.parents)
        guesses, count = len(tokens), state.shared.shape.depth
        for node in range(-1, guesses if self.behind == "all" else 0):
            first = len(tokens)
            tokens += range(state.vocabulary, state.vocabulary + count)
            parents += [node, *range(first, first + count - 1)]
        state.sequence.stats.count("guesses", guesses)
        return Draft(tokens, parents, chain.distributions, riders=len(tokens) - guesses)

    def learn(self, state: Ahead, step: Step) -> None:
        draft = step.draft
        riders = {
            (draft.parents[node], draft.tokens[node]): node
            for node in range(len(draft) - draft.riders, len(draft))
        }
        last = step.path[-1] if step.path else -1
        # Rows 0 to K - 1 behind the last accepted node are all of use; of those behind the root, the rows
        # from len(path) on: earlier ones predicted what has been accepted by now.
        start, known = (last, 0) if (last, state.vocabulary) in riders else (-1, len(step.path))
        nodes = []
        node = riders.get((start, state.vocabulary))
        while node is not None:
            nodes.append(node)
            node = riders.get((node, state.vocabulary + len(nodes)))
        state.rows = [step.logits[node].clone() for node in nodes[known:]]
